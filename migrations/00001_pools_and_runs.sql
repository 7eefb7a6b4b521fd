-- Pools with their owners and instances; runs with their contracts and counters.
-- Free text is bounded by the code; names that end up in URLs and metric labels
-- are bounded here as well.

-- +goose Up
create table pools (
    pool           text        primary key check (pool ~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$'),
    policy_version bigint      not null default 0 check (policy_version >= 0),
    created_at     timestamptz not null default now()
);

-- The row stays when a lease ends, since epochs must never repeat.
create table pool_owners (
    pool       text        primary key references pools,
    owner      text        not null check (owner <> ''),
    epoch      bigint      not null check (epoch > 0),
    expires_at timestamptz not null
) with (fillfactor = 50);

create table instances (
    pool                      text             not null references pools,
    instance                  text             not null check (instance ~ '^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$'),
    url                       text             not null,
    kind                      text             not null,
    capacity_blocks           bigint           not null check (capacity_blocks > 0),
    block_tokens              int              not null check (block_tokens > 0),
    max_context_tokens        bigint           not null check (max_context_tokens > 0),
    max_running               int              not null check (max_running >= 0),
    prefill_tokens_per_second double precision not null
        check (prefill_tokens_per_second >= 0 and prefill_tokens_per_second < 'Infinity'),
    policy_version            bigint           not null check (policy_version >= 0),
    ttl_seconds               double precision not null check (ttl_seconds >= 0 and ttl_seconds < 'Infinity'),
    state                     text             not null check (state in ('active', 'draining', 'removed')),
    created_at                timestamptz      not null default now(),
    seen_at                   timestamptz      not null,
    primary key (pool, instance)
) with (fillfactor = 50);

create table runs (
    run_id           uuid        primary key,
    pool             text        not null references pools,
    name             text        not null check (name <> ''),
    state            text        not null check (state in ('active', 'ended')),
    contract_version int         not null check (contract_version > 0),
    created_at       timestamptz not null default now(),
    ended_at         timestamptz,
    check ((state = 'ended') = (ended_at is not null))
);
create unique index runs_one_active_per_pool on runs (pool) where state = 'active';
create index runs_newest on runs (created_at, run_id);

create table contract_versions (
    run_id          uuid        not null references runs,
    version         int         not null check (version > 0),
    max_concurrency int         not null check (max_concurrency between 1 and 100000),
    staleness_bound int         check (staleness_bound between 0 and 10000),
    group_policy    text        not null check (group_policy in ('partial', 'refill', 'end')),
    created_at      timestamptz not null default now(),
    primary key (run_id, version)
);
alter table runs add foreign key (run_id, contract_version) references contract_versions deferrable initially deferred;

-- share is rho, normalised; given_share is what the trainer wrote. NaN sorts
-- above every number in Postgres, so an upper bound refuses it too.
create table contract_classes (
    run_id      uuid             not null,
    version     int              not null,
    ordinal     int              not null check (ordinal >= 0),
    class       text             not null check (class ~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$'),
    share       double precision not null check (share between 0 and 1),
    given_share double precision not null check (given_share between 0 and 1.01),
    primary key (run_id, version, class),
    unique (run_id, version, ordinal),
    foreign key (run_id, version) references contract_versions
);

-- One row per run. Whoever draws a sequence number or moves a session in or out
-- of queued or live holds this row's lock until commit, so that the numbers
-- become visible in their order. sample_seq is N of the whole run.
create table run_counters (
    run_id     uuid   primary key references runs,
    batch_seq  bigint not null default 0 check (batch_seq >= 0),
    sample_seq bigint not null default 0 check (sample_seq >= 0),
    released   bigint not null default 0,
    queued     bigint not null default 0 check (queued >= 0),
    live       bigint not null default 0 check (live >= 0),
    check (released = sample_seq + queued + live)
) with (fillfactor = 30);

-- A, N and Q of one class: released, ended, backlog.
create table class_counters (
    run_id    uuid   not null references runs,
    class     text   not null,
    released  bigint not null default 0 check (released >= 0),
    queued    bigint not null default 0 check (queued >= 0),
    live      bigint not null default 0 check (live >= 0),
    completed bigint not null default 0 check (completed >= 0),
    truncated bigint not null default 0 check (truncated >= 0),
    stale     bigint not null default 0 check (stale >= 0),
    failed    bigint not null default 0 check (failed >= 0),
    cancelled bigint not null default 0 check (cancelled >= 0),
    ended     bigint not null default 0,
    backlog   bigint not null default 0,
    primary key (run_id, class),
    check (ended = completed + truncated + stale + failed + cancelled),
    check (backlog = queued + live),
    check (released = ended + backlog)
) with (fillfactor = 30);

-- Decisions that concern an instance and no session.
create table router_events (
    pool     text        not null references pools,
    seq      bigint      not null generated always as identity,
    epoch    bigint      not null,
    at       timestamptz not null,
    kind     text        not null,
    reason   text        not null,
    instance text        not null,
    detail   json        not null,
    primary key (pool, seq)
);

-- +goose Down
drop table router_events;
drop table class_counters;
drop table run_counters;
drop table contract_classes;
alter table runs drop constraint runs_run_id_contract_version_fkey;
drop table contract_versions;
drop table runs;
drop table instances;
drop table pool_owners;
drop table pools;
