-- Sessions whose loop a harness runs: its turns are told apart by its own ids, and
-- it asks for the end.

-- +goose Up
alter table turns add column request_id text;
create unique index turns_of_request on turns (session_id, request_id) where request_id is not null;

-- How the harness asked the session to end.
alter table sessions add column finish json;

alter table outbox drop constraint outbox_kind_check;
alter table outbox add constraint outbox_kind_check check (kind in ('start', 'grant', 'cancel', 'finish'));

-- +goose Down
alter table outbox drop constraint outbox_kind_check;
alter table outbox add constraint outbox_kind_check check (kind in ('start', 'grant', 'cancel'));
alter table sessions drop column finish;
drop index turns_of_request;
alter table turns drop column request_id;
