-- Where an instance tells what its KV cache holds, and who changes its weights.

-- +goose Up
alter table instances
    -- Empty: the instance publishes no events.
    add column kv_events_endpoint text not null default '',
    -- Holdfast listens there and the engine connects.
    add column kv_events_bind     boolean not null default false,
    add column kv_replay_endpoint text not null default '',
    add column kv_topic           text not null default '',
    -- Data-parallel rank r publishes at the endpoint's port + r.
    add column ranks              int not null default 1 check (ranks between 1 and 1024),
    -- observe: the trainer pauses the engine and loads its weights; Holdfast only looks on.
    add column control            text not null default 'manage' check (control in ('manage', 'observe'));

-- +goose Down
alter table instances
    drop column control,
    drop column ranks,
    drop column kv_topic,
    drop column kv_replay_endpoint,
    drop column kv_events_bind,
    drop column kv_events_endpoint;
