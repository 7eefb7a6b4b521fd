package store

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// TurnCommit is one finished model call with the tokens it added.
type TurnCommit struct {
	SessionID uuid.UUID
	// Restarts is the session's as the worker read it with the context: a turn of an
	// attempt that was left is refused.
	Restarts int
	// Turn counts from 0; it must be the number of turns committed before.
	Turn     int
	Instance string
	Epoch    int64
	// PolicyVersion is the one the turn ended under; Versions cover Generated where
	// parts of it were generated under others, and are nil where none were.
	PolicyVersion int64
	Versions      []VersionSpan
	// Kept, if set, is how many tokens of the context before it the turn kept: a harness
	// rewrote the rest, and the session goes on in a new sequence of tokens. nil keeps all.
	Kept *int64
	// Appended are the ids that the environment added before this
	// call, Generated those that the call produced.
	Appended  []int32
	Generated []int32
	// Logprobs of Generated: as many, all finite; or none.
	Logprobs []float32
	// PromptTokens is the context before the turn: what the session has, or the turn
	// kept of it, and Appended. CachedTokens of it came from the
	// prefix cache, -1 if the engine did not tell; PredictedCachedTokens is what
	// the router expected. With several calls both are those of the last.
	PromptTokens          int64
	PredictedCachedTokens int64
	CachedTokens          int64
	// StartedAt is when the call was sent.
	StartedAt      time.Time
	QueueSeconds   float64
	PrefillSeconds float64
	DecodeSeconds  float64
	TotalSeconds   float64
	// ToolSeconds passed in the environment between the turn before and this call.
	ToolSeconds  float64
	FinishReason string
	// RequestID is the harness's name for the call that made the turn; empty for our own.
	RequestID string
	// Seen is what the harness has seen after the turn, nil where it speaks in token ids.
	Seen *Seen
	// 0 attempts mean 1.
	TurnEffort
}

// Seen identifies what a harness has been shown: so many messages, or bytes of text.
type Seen struct {
	Length int
	Digest []byte
}

// Turn is one committed model call.
type Turn struct {
	Turn     int
	Instance string
	Epoch    int64
	// PolicyVersion is the one the turn ended under.
	PolicyVersion         int64
	PromptTokens          int64
	PredictedCachedTokens int64
	// CachedTokens is -1 if the engine did not tell.
	CachedTokens   int64
	OutputTokens   int64
	AppendedTokens int64
	StartedAt      time.Time
	CommittedAt    time.Time
	QueueSeconds   float64
	PrefillSeconds float64
	DecodeSeconds  float64
	TotalSeconds   float64
	ToolSeconds    float64
	FinishReason   string
	// KeptTokens is nil unless the turn began a rewritten context; see TurnCommit.Kept.
	KeptTokens *int64
	TurnEffort
}

const (
	// One statement, so that a turn costs one round trip and one commit. The
	// session's row lock orders repeated commits of one turn: the loser finds the
	// turn counted and writes nothing. A harness has its last turn before it asks for
	// the end: what was under way then is not part of what is scored.
	commitTurnSQL = `
with session as (
    update sessions set
        turns = turns + 1, event_seq = event_seq + 1, granted_turn = null, granted_at = null,
        prompt_tokens = prompt_tokens + $7, cached_tokens = cached_tokens + coalesce($9, 0), output_tokens = output_tokens + $10,
        context_tokens = coalesce($32, context_tokens) + $11 + $10,
        rewrites = rewrites + case when $32::bigint is not null and turns > 0 then 1 else 0 end,
        earlier_tokens = earlier_tokens + case when $32::bigint is not null and turns > 0 then context_tokens else 0 end,
        token_seconds = token_seconds + coalesce(context_tokens * greatest(0, extract(epoch from statement_timestamp() - token_mark)), 0),
        token_mark = case when token_mark is null then null else greatest(token_mark, statement_timestamp()) end,
        queue_seconds = queue_seconds + $13, prefill_seconds = prefill_seconds + $14, decode_seconds = decode_seconds + $15,
        tool_seconds = tool_seconds + $17, finish_reason = $18,
        min_policy_version = least(min_policy_version, $27), max_policy_version = greatest(max_policy_version, $28),
        resumes = resumes + $29, tokens_regenerated = tokens_regenerated + $30
    where session_id = $1 and restarts = $35 and turns = $2 and coalesce($32, 0) <= context_tokens and coalesce($32, context_tokens) + $11 = $7
      and ($31 = '' or finish is null and cancel_requested_at is null) and ` + liveCondition + `
    returning run_id, event_seq, context_tokens - $11 - $10 as start_tokens
), turn as (
    insert into turns (session_id, turn, run_id, event_seq, instance, epoch, policy_version, prompt_tokens, predicted_cached_tokens,
                       cached_tokens, output_tokens, appended_tokens, started_at, committed_at,
                       queue_seconds, prefill_seconds, decode_seconds, total_seconds, tool_seconds, finish_reason, attempts,
                       resumes, tokens_regenerated, request_id, kept_tokens, seen_length, seen_digest)
    select $1, $2, run_id, event_seq, $3, $4, $5, $7, $8, $9, $10, $6, $12, statement_timestamp(), $13, $14, $15, $16, $17, $18, $19, $29, $30, nullif($31, ''),
           $32, $33, $34
    from session
), segment as (
    insert into segments (session_id, turn, part, run_id, kind, policy_version, start_tokens, tokens, ids, logprobs)
    select $1, $2, p.part, s.run_id, p.kind, p.policy_version, s.start_tokens + p.start_tokens, p.tokens, p.ids, p.logprobs
    from session s, unnest($20::int[], $21::text[], $22::bigint[], $23::int[], $24::bytea[], $25::bytea[], $26::bigint[])
         as p (part, kind, start_tokens, tokens, ids, logprobs, policy_version)
), checkpoints as (
    delete from turn_checkpoints where session_id = $1 and turn <= $2 and exists (select from session)
)
select count(*) from session`

	selectTurnStateSQL = `select ` + liveCondition + ` and ($2 = '' or finish is null and cancel_requested_at is null), restarts, turns, context_tokens from sessions where session_id = $1`

	selectTurnsSQL = `
select turn, instance, epoch, policy_version, prompt_tokens, predicted_cached_tokens, coalesce(cached_tokens, -1), output_tokens,
       appended_tokens, started_at, committed_at, queue_seconds, prefill_seconds, decode_seconds, total_seconds, tool_seconds,
       finish_reason, kept_tokens, attempts, resumes, tokens_regenerated
from turns where session_id = $1 and turn > $2 order by turn limit $3`
)

// CommitTurn makes a turn durable: the turn, its token segments and the session's
// totals, in one round trip. Repeating it changes nothing and reports
// alreadyCommitted. Refusals: ErrSessionEnded, ErrSessionRestarted, ErrTurnOutOfOrder,
// ErrTurnOfOtherRequest, ErrNotFound, *FieldError for log-probabilities that are not
// finite or not as many as tokens, and for a prompt that is not the session's context.
func (s *Store) CommitTurn(ctx context.Context, commit TurnCommit) (alreadyCommitted bool, err error) {
	if err := commit.check(); err != nil {
		return false, err
	}
	args := commit.arguments()
	var committed int
	if err := s.pool.QueryRow(ctx, commitTurnSQL, args...).Scan(&committed); err != nil {
		if violates(err, "turns_of_request") {
			err = ErrTurnOfOtherRequest
		}
		return false, fmt.Errorf("committing turn %d of session %s: %w", commit.Turn, commit.SessionID, err)
	}
	if committed == 1 {
		return false, nil
	}
	var live bool
	var restarts, turns int
	var contextTokens int64
	err = s.pool.QueryRow(ctx, selectTurnStateSQL, commit.SessionID, commit.RequestID).Scan(&live, &restarts, &turns, &contextTokens)
	switch {
	case err != nil:
	case commit.Restarts != restarts:
		// What is committed is another attempt's, whatever its number.
		err = ErrSessionRestarted
	case commit.Turn < turns:
		return true, nil
	case !live:
		err = ErrSessionEnded
	case commit.Turn == turns && commit.Kept == nil:
		err = &FieldError{Path: "prompt_tokens", Problem: fmt.Sprintf("must be the session's %d with the %d appended, is %d", contextTokens, len(commit.Appended), commit.PromptTokens)}
	default:
		err = fmt.Errorf("%d turns are committed: %w", turns, ErrTurnOutOfOrder)
	}
	return false, found(err, fmt.Sprintf("committing turn %d of session", commit.Turn), commit.SessionID)
}

// check refuses what the schema would refuse, with the field's name.
func (c *TurnCommit) check() error {
	if err := checkLogprobs(c.Logprobs, len(c.Generated)); err != nil {
		return err
	}
	if c.Versions != nil {
		if err := checkVersions(c.Versions, len(c.Generated)); err != nil {
			return err
		}
	}
	if strings.ContainsRune(c.RequestID, 0) || !utf8.ValidString(c.RequestID) {
		return &FieldError{Path: "request_id", Problem: "must be text without U+0000"}
	}
	if c.Kept != nil && (*c.Kept < 0 || *c.Kept+int64(len(c.Appended)) != c.PromptTokens) {
		return &FieldError{Path: "kept", Problem: fmt.Sprintf("must leave the prompt's %d tokens with the %d appended, is %d", c.PromptTokens, len(c.Appended), *c.Kept)}
	}
	if c.CachedTokens > c.PromptTokens {
		return &FieldError{Path: "cached_tokens", Problem: fmt.Sprintf("must be at most the %d prompt tokens, is %d", c.PromptTokens, c.CachedTokens)}
	}
	for _, seconds := range []struct {
		path  string
		value float64
	}{
		{"queue_seconds", c.QueueSeconds}, {"prefill_seconds", c.PrefillSeconds}, {"decode_seconds", c.DecodeSeconds},
		{"total_seconds", c.TotalSeconds}, {"tool_seconds", c.ToolSeconds},
	} {
		if !(seconds.value >= 0) || math.IsInf(seconds.value, 0) {
			return &FieldError{Path: seconds.path, Problem: fmt.Sprintf("must be finite and not negative, is %v", seconds.value)}
		}
	}
	return nil
}

// arguments are those of commitTurnSQL.
func (c *TurnCommit) arguments() []any {
	var cached *int64
	if c.CachedTokens >= 0 {
		cached = &c.CachedTokens
	}
	p := c.parts()
	oldest, newest := c.PolicyVersion, c.PolicyVersion
	for i, version := range p.versions {
		if p.kinds[i] == string(SegmentGenerated) {
			oldest, newest = min(oldest, version), max(newest, version)
		}
	}
	appended := int64(len(c.Appended))
	var seenLength *int
	var seenDigest []byte
	if c.Seen != nil {
		seenLength, seenDigest = &c.Seen.Length, c.Seen.Digest
	}
	return []any{c.SessionID, c.Turn, c.Instance, c.Epoch, c.PolicyVersion, appended, c.PromptTokens,
		max(0, c.PredictedCachedTokens), cached, int64(len(c.Generated)), appended, c.StartedAt,
		c.QueueSeconds, c.PrefillSeconds, c.DecodeSeconds, c.TotalSeconds, c.ToolSeconds, cleanText(c.FinishReason), max(1, c.Attempts),
		p.parts, p.kinds, p.starts, p.counts, p.ids, p.logprobs, p.versions, oldest, newest, c.Resumes, c.TokensRegenerated, c.RequestID, c.Kept, seenLength, seenDigest, c.Restarts}
}

// turnParts are the columns of a turn's segments.
type turnParts struct {
	parts    []int32
	kinds    []string
	starts   []int64
	counts   []int32
	ids      [][]byte
	logprobs [][]byte
	versions []int64
}

func (c *TurnCommit) parts() turnParts {
	var p turnParts
	start := int64(0)
	add := func(kind SegmentKind, ids []int32, logprobs []float32, version int64) {
		// A rewrite that only drops tokens leaves a row of none, which says where.
		if len(ids) == 0 && (kind != SegmentAppended || c.Kept == nil) {
			return
		}
		p.parts = append(p.parts, int32(len(p.parts)))
		p.kinds = append(p.kinds, string(kind))
		p.starts = append(p.starts, start)
		p.counts = append(p.counts, int32(len(ids)))
		packed := packTokens(ids)
		if packed == nil {
			packed = []byte{}
		}
		p.ids = append(p.ids, packed)
		p.logprobs = append(p.logprobs, packLogprobs(logprobs))
		p.versions = append(p.versions, version)
		start += int64(len(ids))
	}
	add(SegmentAppended, c.Appended, nil, c.PolicyVersion)
	versions := c.Versions
	if versions == nil {
		versions = []VersionSpan{{Tokens: len(c.Generated), PolicyVersion: c.PolicyVersion}}
	}
	eachSpan(versions, func(from, to int, version int64) {
		add(SegmentGenerated, c.Generated[from:to], logprobsOf(c.Logprobs, from, to), version)
	})
	return p
}

// SessionTurns returns turns after the given one (-1 for the first page), in
// order; limit is at most 1,000. An unknown session is ErrNotFound.
func (s *Store) SessionTurns(ctx context.Context, sessionID uuid.UUID, after, limit int) ([]Turn, error) {
	rows, err := s.pool.Query(ctx, selectTurnsSQL, sessionID, after, pageLimit(limit))
	if err != nil {
		return nil, fmt.Errorf("reading the turns of session %s: %w", sessionID, err)
	}
	turns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Turn])
	if err == nil && len(turns) == 0 {
		err = sessionMustExist(ctx, s.pool, sessionID)
	}
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, fmt.Errorf("reading the turns of session %s: %w", sessionID, err)
	}
	return turns, found(err, "reading the turns of session", sessionID)
}
