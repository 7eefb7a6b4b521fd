-- Weight updates: what a pool's engines go through while their weights change, and
-- what becomes of sessions that are older than their contract allows.

-- +goose Up
-- The salt of the prefix caches since the last update that changed it; empty for none.
alter table pools add column cache_salt text not null default '';

alter table contract_versions add column stale_policy text not null default 'finish' check (stale_policy in ('finish', 'end'));

-- Asked to end because it is older than its contract's staleness bound.
alter table sessions add column stale boolean not null default false;

-- Policy versions between the oldest generated token and the pool at the end.
alter table samples add column staleness bigint not null default 0 check (staleness >= 0);

-- The history of a pool's policy versions. advanced_at is when the version came
-- into force; failed_step says which step a failed update stopped in, and attempt
-- counts what it was asked to do, so that a late answer to an earlier one is known.
create table weight_updates (
    pool                  text             not null references pools,
    policy_version        bigint           not null check (policy_version >= 0),
    from_version          bigint           not null check (from_version >= 0),
    source                text             not null check (source in ('requested', 'announced', 'observed')),
    mode                  text             check (mode in ('abort', 'wait', 'keep', 'in_place')),
    cache                 text             not null check (cache in ('reset', 'salt')),
    control               text             not null check (control in ('manage', 'observe')),
    state                 text             not null
        check (state in ('pausing', 'paused', 'committing', 'committed', 'cancelling', 'cancelled', 'failed')),
    failed_step           text             check (failed_step in ('pause', 'commit', 'resume', 'cancel')),
    problem               text             not null default '',
    attempt               int              not null default 1 check (attempt > 0),
    pause_timeout_seconds double precision not null check (pause_timeout_seconds >= 0 and pause_timeout_seconds < 'Infinity'),
    -- Sessions under way that were older than their bound when the version came into
    -- force, and those of them that were asked to end.
    sessions_over_bound   int              not null default 0 check (sessions_over_bound >= 0),
    sessions_ended        int              not null default 0 check (sessions_ended between 0 and sessions_over_bound),
    began_at              timestamptz      not null,
    changed_at            timestamptz      not null,
    advanced_at           timestamptz,
    primary key (pool, policy_version),
    check ((mode is not null) = (source = 'requested')),
    check ((failed_step is not null) = (state = 'failed')),
    check (case when state = 'committed' or failed_step = 'resume' then advanced_at is not null
                when state = 'committing' then true
                else advanced_at is null end)
);
create unique index weight_updates_one_open on weight_updates (pool) where state not in ('committed', 'cancelled');

-- reached is how far an instance has come, whatever was refused after it.
create table weight_update_instances (
    pool           text        not null,
    policy_version bigint      not null,
    instance       text        not null,
    state          text        not null check (state in ('pending', 'paused', 'prepared', 'resumed', 'refused', 'gone', 'observed')),
    reached        text        not null check (reached in ('pending', 'paused', 'prepared', 'resumed')),
    attempt        int         not null check (attempt > 0),
    problem        text        not null default '',
    changed_at     timestamptz not null,
    primary key (pool, policy_version, instance),
    foreign key (pool, policy_version) references weight_updates
);

-- +goose Down
drop table weight_update_instances;
drop table weight_updates;
alter table samples drop column staleness;
alter table sessions drop column stale;
alter table contract_versions drop column stale_policy;
alter table pools drop column cache_salt;
