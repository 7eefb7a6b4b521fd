-- What a turn has generated and not committed yet, so that it outlives engines,
-- streams and workers; and what losses have cost all the same.

-- +goose Up

-- Rows of one turn form a chain by their ids: a worker that goes on from what
-- another left names the row that it follows, so that rows of two workers that both
-- believe to run the turn never mix. They go with the turn's commit or the
-- session's end, hence an early vacuum.
create table turn_checkpoints (
    session_id         uuid        not null,
    turn               int         not null,
    -- where the row begins in the turn's output
    start_tokens       int         not null check (start_tokens >= 0),
    tokens             int         not null check (tokens > 0),
    part               uuid        not null,
    -- the part that this one follows; null for the first
    previous           uuid,
    -- zstd of little-endian int32 and float32
    ids                bytea       not null,
    logprobs           bytea,
    policy_version     bigint      not null,
    instance           text        not null,
    epoch              bigint      not null,
    -- of the turn up to the end of this row; see turns
    attempts           int         not null,
    resumes            int         not null,
    tokens_regenerated bigint      not null,
    at                 timestamptz not null,
    primary key (session_id, turn, start_tokens),
    check ((start_tokens = 0) = (previous is null))
) with (autovacuum_vacuum_scale_factor = 0.02);
alter table turn_checkpoints alter column ids set storage external;
alter table turn_checkpoints alter column logprobs set storage external;

-- resumes: how often the turn's generation went on from what there was of it.
-- tokens_regenerated: tokens generated again because an earlier copy was lost.
alter table turns
    add column resumes            int    not null default 0,
    add column tokens_regenerated bigint not null default 0;
alter table sessions
    add column resumes            int    not null default 0,
    add column tokens_regenerated bigint not null default 0;

-- +goose Down
alter table sessions
    drop column tokens_regenerated,
    drop column resumes;
alter table turns
    drop column tokens_regenerated,
    drop column resumes;
drop table turn_checkpoints;
