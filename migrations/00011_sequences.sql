-- A harness may rewrite its history: the session then goes on in a new sequence of
-- tokens. What it was last shown lets its next message list be told from a rewrite.

-- +goose Up

-- rewrites: how often the context was rewritten after its first turn.
-- earlier_tokens: the sequences that were left then, summed over their lengths; with
-- context_tokens, that of the last one, they are what a sample carries.
alter table sessions
    add column rewrites       int    not null default 0,
    add column earlier_tokens bigint not null default 0;

-- kept_tokens: how much of the context before it the turn kept; null where it went
-- on from all of it. seen_length and seen_digest: what the harness has seen after
-- the turn, as a count of messages or of bytes of text, and a SHA-256 of that; null
-- where it spoke in token ids.
alter table turns
    add column kept_tokens bigint,
    add column seen_length int,
    add column seen_digest bytea;

-- +goose Down
alter table turns
    drop column seen_digest,
    drop column seen_length,
    drop column kept_tokens;
alter table sessions
    drop column earlier_tokens,
    drop column rewrites;
