-- Freshness: deadlines of groups, budgets of classes, sessions that are begun again
-- under new weights, and what the release pace is computed from.

-- +goose Up
alter table contract_versions drop constraint contract_versions_stale_policy_check;
alter table contract_versions add constraint contract_versions_stale_policy_check check (stale_policy in ('finish', 'end', 'restart'));
-- max_restarts is how often restart begins one session again; null unless that is the
-- policy. freshness_budget_seconds is null for none, and of a class for the run's.
alter table contract_versions add column max_restarts int check (max_restarts between 1 and 100);
alter table contract_versions add column freshness_budget_seconds double precision check (freshness_budget_seconds > 0 and freshness_budget_seconds < 'Infinity');
alter table contract_classes add column freshness_budget_seconds double precision check (freshness_budget_seconds > 0 and freshness_budget_seconds < 'Infinity');
-- What was released of the class before its run's shares became these.
alter table contract_classes add column released_before bigint not null default 0 check (released_before >= 0);

-- Members that have not ended by then end as stale.
alter table groups add column deadline_at timestamptz;
-- Its members were asked to end because the deadline has passed.
alter table groups add column expired boolean not null default false;
create index groups_with_deadline on groups (pool, deadline_at) where deadline_at is not null and place is null and not expired;

-- restarting: what the session is asked to end for lets it begin again.
alter table sessions add column restarts int not null default 0;
alter table sessions add column restarting boolean not null default false;

-- Usable, and older than the contract's bound allows.
alter table samples add column over_bound boolean not null default false;

-- over_bound counts usable samples older than their contract's bound, restarts the
-- sessions that were begun again, expired the samples that their deadline ended.
alter table class_counters
    add column over_bound bigint not null default 0 check (over_bound >= 0),
    add column restarts   bigint not null default 0 check (restarts >= 0),
    add column expired    bigint not null default 0 check (expired between 0 and stale);

-- What a session had done before it was begun again: the turns as they stood, and
-- the tokens.
create table abandoned_turns (
    session_id uuid  not null,
    attempt    int   not null check (attempt >= 0),
    turn       int   not null,
    detail     jsonb not null,
    primary key (session_id, attempt, turn)
);
create table abandoned_segments (
    session_id     uuid   not null,
    attempt        int    not null check (attempt >= 0),
    turn           int    not null,
    part           int    not null,
    kind           text   not null,
    policy_version bigint not null,
    start_tokens   bigint not null,
    tokens         int    not null,
    ids            bytea  not null,
    logprobs       bytea,
    primary key (session_id, attempt, turn, part)
);
alter table abandoned_segments alter column ids set storage external;
alter table abandoned_segments alter column logprobs set storage external;

-- +goose Down
drop table abandoned_segments;
drop table abandoned_turns;
alter table class_counters
    drop column expired,
    drop column restarts,
    drop column over_bound;
alter table samples drop column over_bound;
alter table sessions drop column restarting;
alter table sessions drop column restarts;
drop index groups_with_deadline;
alter table groups drop column expired;
alter table groups drop column deadline_at;
alter table contract_classes drop column released_before;
alter table contract_classes drop column freshness_budget_seconds;
alter table contract_versions drop column freshness_budget_seconds;
alter table contract_versions drop column max_restarts;
alter table contract_versions drop constraint contract_versions_stale_policy_check;
alter table contract_versions add constraint contract_versions_stale_policy_check check (stale_policy in ('finish', 'end'));
