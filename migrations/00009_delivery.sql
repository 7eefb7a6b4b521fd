-- Delivery: how many samples may wait for the trainer, where its consumers began,
-- what was pruned, and further columns of samples.

-- +goose Up
-- null is no limit.
alter table contract_versions add column undelivered_limit int check (undelivered_limit between 1 and 100000000);

-- Set while no queued session is dispatched because too many samples wait.
alter table run_counters add column paused_at timestamptz;

-- What a consumer that began later never was to read.
alter table consumers add column start_seq bigint not null default 0;
alter table consumers add constraint consumers_start check (start_seq between 0 and acked_seq);

-- How far a run is pruned: the tokens of samples up to transcripts_seq are gone,
-- among them some of the places up to transcripts_place in the order of whole groups;
-- events and turns of the sessions up to history_seq as well. Apart from run_counters,
-- whose row every ending locks.
create table run_pruning (
    run_id            uuid   primary key references runs,
    transcripts_seq   bigint not null default 0 check (transcripts_seq >= 0),
    transcripts_place bigint not null default 0 check (transcripts_place >= 0),
    history_seq       bigint not null default 0 check (history_seq >= 0)
);
insert into run_pruning (run_id) select run_id from runs;

-- Further arrays of a sample. data is null where the bytes are kept elsewhere.
create table sample_columns (
    session_id uuid     not null,
    ordinal    int      not null check (ordinal >= 0),
    name       text     not null check (name ~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$'),
    dtype      text     not null,
    shape      bigint[] not null,
    size_bytes bigint   not null check (size_bytes >= 0),
    sha256     bytea    not null check (octet_length(sha256) = 32),
    data       bytea    check (octet_length(data) = size_bytes),
    primary key (session_id, name),
    unique (session_id, ordinal)
);
alter table sample_columns alter column data set storage external;

-- +goose Down
drop table sample_columns;
drop table run_pruning;
alter table consumers drop constraint consumers_start;
alter table consumers drop column start_seq;
alter table run_counters drop column paused_at;
alter table contract_versions drop column undelivered_limit;
