-- What sessions produced, and who has consumed it.

-- +goose Up

-- Written once a turn, so the ranges of single columns are checked by CommitTurn;
-- see sessions.
create table turns (
    session_id              uuid             not null,
    turn                    int              not null,
    run_id                  uuid             not null,
    -- the place in the session's history
    event_seq               bigint           not null,
    instance                text             not null,
    epoch                   bigint           not null,
    policy_version          bigint           not null,
    prompt_tokens           bigint           not null,
    predicted_cached_tokens bigint           not null,
    -- null if the engine did not tell
    cached_tokens           bigint,
    output_tokens           bigint           not null,
    appended_tokens         bigint           not null,
    started_at              timestamptz      not null,
    committed_at            timestamptz      not null,
    queue_seconds           double precision not null,
    prefill_seconds         double precision not null,
    decode_seconds          double precision not null,
    total_seconds           double precision not null,
    tool_seconds            double precision not null,
    finish_reason           text             not null,
    attempts                int              not null,
    primary key (session_id, turn)
);

-- Append-only deltas of a session's tokens. start_tokens is where the segment
-- begins in the context: the end of the segment before it, or, where a harness
-- rewrote its history, an earlier place from which the context goes on anew. The
-- kinds are store.SegmentKind.
create table segments (
    session_id     uuid   not null,
    turn           int    not null,
    part           int    not null,
    run_id         uuid   not null,
    kind           text   not null,
    policy_version bigint not null,
    start_tokens   bigint not null,
    tokens         int    not null,
    -- zstd of little-endian int32 and float32
    ids            bytea  not null,
    logprobs       bytea,
    primary key (session_id, turn, part),
    constraint segments_logprobs check (logprobs is null or kind = 'generated')
);
alter table segments alter column ids set storage external;
alter table segments alter column logprobs set storage external;

-- One row per ended session, whatever its status. Infinities and NaN are no
-- rewards; NaN sorts above infinity.
create table samples (
    run_id        uuid             not null references runs,
    seq           bigint           not null check (seq > 0),
    session_id    uuid             not null unique references sessions,
    class         text             not null,
    status        text             not null check (status in ('completed', 'truncated', 'stale', 'failed', 'cancelled')),
    reward        double precision check (reward > '-Infinity' and reward < 'Infinity'),
    score_detail  json,
    score_seconds double precision not null default 0 check (score_seconds >= 0 and score_seconds < 'Infinity'),
    finish_reason text             not null default '',
    problem       text             not null default '',
    tokens        bigint           not null check (tokens >= 0),
    ended_at      timestamptz      not null,
    primary key (run_id, seq),
    check (reward is null or status in ('completed', 'truncated'))
);
create index samples_ended on samples (run_id, ended_at);

create table consumers (
    run_id        uuid        not null references runs,
    consumer      text        not null check (consumer ~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$'),
    delivered_seq bigint      not null default 0 check (delivered_seq >= 0),
    acked_seq     bigint      not null default 0 check (acked_seq between 0 and delivered_seq),
    updated_at    timestamptz not null default now(),
    primary key (run_id, consumer)
) with (fillfactor = 50);

-- When a consumer's two places passed which seq: tells when a sample was first
-- delivered and when it was acknowledged.
create table consumer_marks (
    run_id   uuid        not null references runs,
    consumer text        not null,
    kind     text        not null check (kind in ('delivered', 'acknowledged')),
    seq      bigint      not null check (seq > 0),
    at       timestamptz not null,
    primary key (run_id, consumer, kind, seq),
    foreign key (run_id, consumer) references consumers
);

-- Usable (completed or truncated) samples that a consumer has acknowledged.
create table consumer_classes (
    run_id   uuid   not null,
    consumer text   not null,
    class    text   not null,
    consumed bigint not null check (consumed >= 0),
    primary key (run_id, consumer, class),
    foreign key (run_id, consumer) references consumers
) with (fillfactor = 50);

-- +goose Down
drop table consumer_classes;
drop table consumer_marks;
drop table consumers;
drop table samples;
drop table segments;
drop table turns;
