-- What was released, and the sessions that it became.
--
-- Tables that are filled by COPY or once per turn carry no foreign keys: their
-- keys are derived from their parents' (UUIDv5), and each row is written in the
-- transaction that writes or locks its parent, so that a check per row would only
-- cost time.

-- +goose Up
create table batches (
    batch_id        uuid        primary key,
    pool            text        not null references pools,
    run_id          uuid        not null references runs,
    seq             bigint      not null check (seq > 0),
    idempotency_key text        not null,
    body_sha256     bytea       not null check (octet_length(body_sha256) = 32),
    policy_version  bigint      not null check (policy_version >= 0),
    tasks           int         not null check (tasks between 1 and 10000),
    sessions        int         not null check (sessions between tasks and 100000),
    -- sessions per class, as {"agent": 48}
    classes         jsonb       not null,
    -- Sessions up to next_ordinal (exclusive) have left the queue; later ones have
    -- too if they were cancelled in it. queued counts those that wait.
    next_ordinal    int         not null default 0 check (next_ordinal between 0 and sessions),
    queued          int         not null check (queued between 0 and sessions - next_ordinal),
    created_at      timestamptz not null,
    unique (run_id, seq),
    unique (run_id, idempotency_key)
) with (fillfactor = 50);
create index batches_with_queued on batches (run_id, seq) where queued > 0;

-- spec and metadata are json, not jsonb: they are given back as they came and
-- never searched. metadata stands apart from spec because every sample carries it.
create table tasks (
    task_id       uuid primary key,
    pool          text not null,
    run_id        uuid not null,
    batch_id      uuid not null,
    ordinal       int  not null check (ordinal >= 0),
    external_id   text not null,
    class         text not null,
    group_size    int  not null check (group_size > 0),
    spec          json not null,
    metadata      json,
    prompt_tokens int  not null check (prompt_tokens >= 0),
    -- zstd of little-endian int32; null if the prompt is synthetic, text or messages
    prompt_ids    bytea,
    check (prompt_ids is null or prompt_tokens > 0)
);
alter table tasks alter column prompt_ids set storage external;

-- members may exceed size: spare and refilled members are numbered on from size.
create table groups (
    group_id uuid primary key,
    pool     text not null,
    run_id   uuid not null,
    batch_id uuid not null,
    class    text not null,
    size     int  not null check (size > 0),
    members  int  not null check (members >= size),
    ended    int  not null default 0 check (ended between 0 and members),
    usable   int  not null default 0 check (usable between 0 and ended)
) with (fillfactor = 70);

-- Updated twice a turn, so each CHECK here costs: Postgres reads a table's checks
-- anew for every statement that writes to it. Those that hold the columns together
-- stay; the range of a single column is checked by the code that computes it.
create table sessions (
    session_id          uuid             primary key,
    pool                text             not null,
    run_id              uuid             not null,
    batch_id            uuid             not null,
    task_id             uuid             not null,
    member              int              not null,
    class               text             not null,
    dispatch_ordinal    int              not null,
    policy_version      bigint           not null,
    state               text             not null,
    status              text,
    -- The instance that protects the session, and the turn that is granted there.
    instance            text,
    granted_turn        int,
    granted_at          timestamptz,
    predicted_cached_tokens bigint       not null default 0,
    epoch               bigint           not null default 0,
    instances           text[]           not null default '{}',
    hold_reason         text,
    holds               int              not null default 0,
    held_since          timestamptz,
    held_seconds        double precision not null default 0,
    first_admitted_at   timestamptz,
    admitted_at         timestamptz,
    residency_seconds   double precision not null default 0,
    -- token_seconds integrates context_tokens over the residency, up to token_mark.
    token_seconds       double precision not null default 0,
    token_mark          timestamptz,
    turns               int              not null default 0,
    prompt_tokens       bigint           not null default 0,
    cached_tokens       bigint           not null default 0,
    output_tokens       bigint           not null default 0,
    context_tokens      bigint           not null default 0,
    queue_seconds       double precision not null default 0,
    prefill_seconds     double precision not null default 0,
    decode_seconds      double precision not null default 0,
    tool_seconds        double precision not null default 0,
    min_policy_version  bigint,
    max_policy_version  bigint,
    finish_reason       text             not null default '',
    event_seq           bigint           not null,
    cancel_requested_at timestamptz,
    cancel_reason       text             not null default '',
    released_at         timestamptz      not null,
    dispatched_at       timestamptz,
    ended_at            timestamptz,
    constraint sessions_state   check (state in ('queued', 'dispatched', 'held', 'active', 'ended')),
    constraint sessions_queued  check ((state = 'queued') = (dispatched_at is null and ended_at is null)),
    constraint sessions_ended   check ((state = 'ended') = (ended_at is not null) and (status is null) = (ended_at is null)
                                       and (ended_at is null or instance is null)),
    constraint sessions_held    check ((state = 'held') = (held_since is not null) and (held_since is null) = (hold_reason is null)),
    constraint sessions_active  check (case when state = 'active' then first_admitted_at is not null else granted_turn is null and admitted_at is null end),
    constraint sessions_granted check (granted_turn is null or (granted_turn >= turns and instance is not null)),
    constraint sessions_cached  check (cached_tokens between 0 and prompt_tokens)
) with (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.05);
create index sessions_of_batch on sessions (batch_id, dispatch_ordinal);
-- The sessions under way. State would be an equal condition, but an update that
-- changes a column of an index cannot be in place, and a hold changes the state.
create index sessions_live on sessions (pool, run_id) where dispatched_at is not null and ended_at is null;

-- seq is drawn from sessions.event_seq under the session's lock. A turn draws one
-- too and stands in the history without a row here. The kinds are store.EventKind.
create table session_events (
    session_id uuid        not null,
    seq        bigint      not null,
    run_id     uuid        not null,
    at         timestamptz not null,
    kind       text        not null,
    detail     json,
    primary key (session_id, seq)
);

-- Messages to workflows, delivered at least once. The id is no cursor: it only
-- tells messages apart and breaks ties.
create table outbox (
    id         bigint      primary key generated always as identity,
    pool       text        not null,
    run_id     uuid        not null,
    session_id uuid        not null,
    kind       text        not null check (kind in ('start', 'grant', 'cancel')),
    turn       int         check (turn >= 0),
    reason     text,
    attempts   int         not null default 0 check (attempts >= 0),
    next_at    timestamptz not null default now(),
    problem    text,
    created_at timestamptz not null default now(),
    check ((kind = 'grant') = (turn is not null)),
    check ((kind = 'cancel') = (reason is not null))
) with (autovacuum_vacuum_scale_factor = 0.02);
create index outbox_due on outbox (next_at, id);

-- +goose Down
drop table outbox;
drop table session_events;
drop table sessions;
drop table groups;
drop table tasks;
drop table batches;
