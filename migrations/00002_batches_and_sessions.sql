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

create table sessions (
    session_id          uuid             primary key,
    pool                text             not null,
    run_id              uuid             not null,
    batch_id            uuid             not null,
    task_id             uuid             not null,
    member              int              not null check (member >= 0),
    class               text             not null,
    dispatch_ordinal    int              not null check (dispatch_ordinal >= 0),
    policy_version      bigint           not null check (policy_version >= 0),
    state               text             not null
        check (state in ('queued', 'dispatched', 'held', 'active', 'ended')),
    -- A column of its own for the index below, so that going from held to active
    -- and back touches no index.
    live                boolean          not null generated always as (state in ('dispatched', 'held', 'active')) stored,
    status              text             check (status in ('completed', 'truncated', 'stale', 'failed', 'cancelled')),
    -- The instance that protects the session, and the turn that is granted there.
    instance            text,
    granted_turn        int              check (granted_turn >= turns),
    granted_at          timestamptz,
    predicted_cached_tokens bigint       not null default 0,
    epoch               bigint           not null default 0 check (epoch >= 0),
    instances           text[]           not null default '{}',
    hold_reason         text,
    holds               int              not null default 0 check (holds >= 0),
    held_since          timestamptz,
    held_seconds        double precision not null default 0 check (held_seconds >= 0 and held_seconds < 'Infinity'),
    first_admitted_at   timestamptz,
    admitted_at         timestamptz,
    residency_seconds   double precision not null default 0 check (residency_seconds >= 0 and residency_seconds < 'Infinity'),
    -- token_seconds integrates context_tokens over the residency, up to token_mark.
    token_seconds       double precision not null default 0 check (token_seconds >= 0 and token_seconds < 'Infinity'),
    token_mark          timestamptz,
    turns               int              not null default 0 check (turns >= 0),
    prompt_tokens       bigint           not null default 0 check (prompt_tokens >= 0),
    cached_tokens       bigint           not null default 0 check (cached_tokens between 0 and prompt_tokens),
    output_tokens       bigint           not null default 0 check (output_tokens >= 0),
    context_tokens      bigint           not null default 0 check (context_tokens >= 0),
    queue_seconds       double precision not null default 0,
    prefill_seconds     double precision not null default 0,
    decode_seconds      double precision not null default 0,
    tool_seconds        double precision not null default 0,
    min_policy_version  bigint,
    max_policy_version  bigint           check (max_policy_version >= min_policy_version),
    finish_reason       text             not null default '',
    event_seq           bigint           not null check (event_seq >= 0),
    cancel_requested_at timestamptz,
    cancel_reason       text             not null default '',
    released_at         timestamptz      not null,
    dispatched_at       timestamptz,
    ended_at            timestamptz,
    check ((state = 'ended') = (status is not null)),
    check ((state = 'ended') = (ended_at is not null)),
    check ((state = 'held') = (held_since is not null)),
    check ((state = 'held') = (hold_reason is not null)),
    check (state <> 'queued' or (dispatched_at is null and turns = 0)),
    check (state in ('queued', 'ended') or dispatched_at is not null),
    check (state <> 'active' or first_admitted_at is not null),
    check (state = 'active' or (granted_turn is null and admitted_at is null)),
    check (granted_turn is null or (instance is not null and granted_at is not null and epoch > 0)),
    check ((token_mark is null) = (admitted_at is null)),
    check (state <> 'ended' or instance is null)
) with (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.05);
create index sessions_of_batch on sessions (batch_id, dispatch_ordinal);
create index sessions_live on sessions (pool, run_id) where live;

-- seq is drawn from sessions.event_seq under the session's lock. A turn draws one
-- too and stands in the history without a row here.
create table session_events (
    session_id uuid        not null,
    seq        bigint      not null check (seq > 0),
    run_id     uuid        not null,
    at         timestamptz not null,
    kind       text        not null check (kind in ('released', 'dispatched', 'held', 'admitted', 'protection_ended',
                                                    'tool', 'retry', 'scored', 'cancel_requested', 'ended')),
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
