-- What environments answered, from when it counts until its session ends.

-- +goose Up

-- Written before the session goes on, so that a repeated step finds it and does not
-- happen again. The ids go into the next turn's segment, the rest into the session's
-- history: rows are dropped with the session's end, hence an early vacuum.
create table observations (
    session_id   uuid             not null,
    -- 0 is the reset, n answers the message of turn n - 1
    step         int              not null check (step >= 0),
    -- how often the environment was stepped: a message whose calls cannot be read
    -- never reaches it
    episode_step int              not null check (episode_step between 0 and step),
    tokens       int              not null check (tokens >= 0),
    -- zstd of little-endian int32, null for none
    ids          bytea,
    reward       double precision check (reward > '-Infinity' and reward < 'Infinity'),
    seconds      double precision not null check (seconds >= 0 and seconds < 'Infinity'),
    -- how the session ends with it, null where it goes on
    status       text             check (status in ('completed', 'truncated', 'failed')),
    problem      text             not null default '',
    at           timestamptz      not null,
    primary key (session_id, step)
) with (autovacuum_vacuum_scale_factor = 0.02);
alter table observations alter column ids set storage external;

-- +goose Down
drop table observations;
