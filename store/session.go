package store

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"holdfast/router"
)

// SessionState is the closed set of a session's states.
type SessionState string

// Session states.
const (
	// SessionQueued: released, waiting for the contract's max concurrency.
	SessionQueued SessionState = "queued"
	// SessionDispatched: its workflow is started or about to be; "pending" on the backlog.
	SessionDispatched SessionState = "dispatched"
	// SessionHeld: a turn was asked for and waits.
	SessionHeld SessionState = "held"
	// SessionActive: admitted, in a model call, a tool gap or scoring.
	SessionActive SessionState = "active"
	// SessionEnded: see its status.
	SessionEnded SessionState = "ended"
)

// Usage counts what a session used of the engines, over all its turns.
type Usage struct {
	Turns int
	// PromptTokens were sent, CachedTokens of them found in prefix caches.
	PromptTokens int64
	CachedTokens int64
	OutputTokens int64
	// ContextTokens is the length of the context at the end.
	ContextTokens int64
	// Rewrites counts how often a harness left the context, and EarlierTokens sums the
	// lengths of the sequences that it left.
	Rewrites      int
	EarlierTokens int64
	// TokenSeconds integrates the context's length over the residency: block-seconds
	// times the tokens per block.
	TokenSeconds float64
	// Resumes and TokensRegenerated are the turns' sums; see TurnEffort.
	Resumes           int
	TokensRegenerated int64
}

// Times says where a session's time went.
type Times struct {
	HeldSeconds      float64
	ResidencySeconds float64
	QueueSeconds     float64
	PrefillSeconds   float64
	DecodeSeconds    float64
	ToolSeconds      float64
	ScoreSeconds     float64
}

// Session is one rollout as the audit trail shows it. Of a session that has not
// ended, times and token-seconds count what was over at its last change.
type Session struct {
	ID              uuid.UUID
	RunID           uuid.UUID
	Pool            string
	BatchID         uuid.UUID
	TaskID          uuid.UUID
	ExternalTaskID  string
	Member          int
	GroupSize       int
	Class           string
	State           SessionState
	Status          router.EndStatus // 0 until it has ended
	PolicyVersion   int64
	Instance        string
	Instances       []string
	HoldReason      string
	Holds           int
	CancelRequested bool
	CancelReason    string
	Usage           Usage
	Times           Times
	ReleasedAt      time.Time
	DispatchedAt    *time.Time
	FirstAdmittedAt *time.Time
	HeldSince       *time.Time
	EndedAt         *time.Time
	// SampleSeq, Reward, ScoreDetail and Problem are those of the sample.
	SampleSeq   int64
	Reward      *float64
	ScoreDetail json.RawMessage
	Problem     string
	// Restarts counts how often it was begun again under new weights.
	Restarts int
	// DeadlineAt is its group's, nil for none.
	DeadlineAt *time.Time
}

// SessionQuery selects sessions of a run in release order.
type SessionQuery struct {
	RunID uuid.UUID
	// BatchID narrows to one batch, TaskID to one task, Class and State further.
	BatchID *uuid.UUID
	TaskID  *uuid.UUID
	Class   string
	State   SessionState
	// After continues a listing after that session.
	After *uuid.UUID
	// Limit is at most 1,000; 0 means 100.
	Limit int
}

// liveCondition holds for sessions that are dispatched and have not ended; it is
// the condition of an index, word for word.
const liveCondition = `(dispatched_at is not null and ended_at is null)`

const (
	sessionColumns = `
select s.session_id, s.run_id, s.pool, s.batch_id, s.task_id, t.external_id, s.member, t.group_size, s.class, s.state, coalesce(s.status, ''),
       s.policy_version, coalesce(s.instance, ''), s.instances, coalesce(s.hold_reason, ''), s.holds,
       s.cancel_requested_at is not null, s.cancel_reason,
       s.turns, s.prompt_tokens, s.cached_tokens, s.output_tokens, s.context_tokens, s.token_seconds,
       s.rewrites, s.earlier_tokens, s.resumes, s.tokens_regenerated, s.held_seconds, s.residency_seconds, s.queue_seconds, s.prefill_seconds, s.decode_seconds, s.tool_seconds, coalesce(m.score_seconds, 0),
       s.released_at, s.dispatched_at, s.first_admitted_at, s.held_since, s.ended_at,
       coalesce(m.seq, 0), m.reward, m.score_detail, coalesce(m.problem, ''),
       s.restarts, (select g.deadline_at from groups g where g.group_id = s.task_id)
from sessions s join tasks t using (task_id) left join samples m using (session_id)`

	selectSessionSQL = sessionColumns + ` where s.session_id = $1`

	// What is asked of sessions under way is answered from their own small index,
	// not by walking through all that were ever released.
	selectSessionsSQL     = sessionColumns + ` join batches b on b.batch_id = s.batch_id where` + sessionFilter
	selectLiveSessionsSQL = sessionColumns + ` join batches b on b.batch_id = s.batch_id
where s.dispatched_at is not null and s.ended_at is null and s.run_id = $1 and s.pool = (select pool from runs where run_id = $1) and` + sessionFilter

	sessionFilter = ` b.run_id = $1 and ($2::uuid is null or b.batch_id = $2) and ($3::uuid is null or s.task_id = $3)
  and ($4 = '' or s.class = $4) and ($5 = '' or s.state = $5)
  and ($6::uuid is null or (b.seq, s.dispatch_ordinal, s.member) > (
        select ab.seq, a.dispatch_ordinal, a.member from sessions a join batches ab using (batch_id) where a.session_id = $6))
order by b.seq, s.dispatch_ordinal, s.member limit $7`

	selectCancelWantedSQL = `select ` + liveCondition + ` and cancel_requested_at is not null from sessions where session_id = $1`

	selectRunOfSessionSQL = `select run_id, state from sessions where session_id = $1`

	// $1 pool, $2 run, $3 sessions or null for all that are under way, $4 why.
	requestCancelSQL = `
with locked as (
    select session_id from sessions
    where ` + liveCondition + ` and pool = $1 and run_id = $2 and ($3::uuid[] is null or session_id = any($3)) and (cancel_requested_at is null or restarting)
    order by session_id for no key update
), asked as (
    update sessions s set restarting = false, stale = stale and not restarting, cancel_requested_at = statement_timestamp(), cancel_reason = $4, event_seq = s.event_seq + 1
    from locked l where s.session_id = l.session_id
    returning s.session_id, s.event_seq
), events as (
    insert into session_events (session_id, seq, run_id, at, kind, detail)
    select session_id, event_seq, $2, statement_timestamp(), 'cancel_requested', json_build_object('reason', $4::text) from asked
)
insert into outbox (pool, run_id, session_id, kind, reason, next_at)
select $1, $2, session_id, 'cancel', $4, statement_timestamp() from asked`
)

// Session returns one session, or ErrNotFound.
func (s *Store) Session(ctx context.Context, id uuid.UUID) (Session, error) {
	return readSession(ctx, s.pool, id)
}

func readSession(ctx context.Context, from queryer, id uuid.UUID) (Session, error) {
	rows, err := from.Query(ctx, selectSessionSQL, id)
	if err != nil {
		return Session{}, fmt.Errorf("reading session %s: %w", id, err)
	}
	session, err := pgx.CollectExactlyOneRow(rows, scanSession)
	return session, found(err, "reading session", id)
}

func scanSession(row pgx.CollectableRow) (Session, error) {
	var x Session
	var status string
	err := row.Scan(&x.ID, &x.RunID, &x.Pool, &x.BatchID, &x.TaskID, &x.ExternalTaskID, &x.Member, &x.GroupSize, &x.Class, &x.State, &status,
		&x.PolicyVersion, &x.Instance, &x.Instances, &x.HoldReason, &x.Holds, &x.CancelRequested, &x.CancelReason,
		&x.Usage.Turns, &x.Usage.PromptTokens, &x.Usage.CachedTokens, &x.Usage.OutputTokens, &x.Usage.ContextTokens, &x.Usage.TokenSeconds,
		&x.Usage.Rewrites, &x.Usage.EarlierTokens, &x.Usage.Resumes, &x.Usage.TokensRegenerated,
		&x.Times.HeldSeconds, &x.Times.ResidencySeconds, &x.Times.QueueSeconds, &x.Times.PrefillSeconds, &x.Times.DecodeSeconds, &x.Times.ToolSeconds, &x.Times.ScoreSeconds,
		&x.ReleasedAt, &x.DispatchedAt, &x.FirstAdmittedAt, &x.HeldSince, &x.EndedAt,
		&x.SampleSeq, &x.Reward, &x.ScoreDetail, &x.Problem,
		&x.Restarts, &x.DeadlineAt)
	if err != nil {
		return Session{}, err
	}
	x.Status, err = parseStatus(status)
	return x, err
}

// parseStatus reads the stored form of a status; empty is 0, not ended.
func parseStatus(text string) (router.EndStatus, error) {
	if text == "" {
		return 0, nil
	}
	return router.ParseEndStatus(text)
}

// Sessions lists sessions of a run.
func (s *Store) Sessions(ctx context.Context, query SessionQuery) ([]Session, error) {
	sql := selectSessionsSQL
	switch query.State {
	case SessionDispatched, SessionHeld, SessionActive:
		sql = selectLiveSessionsSQL
	}
	rows, err := s.pool.Query(ctx, sql, query.RunID, query.BatchID, query.TaskID, query.Class, string(query.State), query.After, pageLimit(query.Limit))
	if err != nil {
		return nil, fmt.Errorf("listing the sessions of run %s: %w", query.RunID, err)
	}
	sessions, err := pgx.CollectRows(rows, scanSession)
	if err != nil {
		return nil, fmt.Errorf("listing the sessions of run %s: %w", query.RunID, err)
	}
	return sessions, nil
}

// CancelWanted tells whether a session under way is asked to end: not any more once it
// has, or has begun again. Refusals: ErrNotFound.
func (s *Store) CancelWanted(ctx context.Context, id uuid.UUID) (wanted bool, err error) {
	err = s.pool.QueryRow(ctx, selectCancelWantedSQL, id).Scan(&wanted)
	return wanted, found(err, "looking whether to cancel session", id)
}

// CancelSession ends a queued session as cancelled at once; one under way is
// marked and its workflow asked to cancel. A session that has ended is returned
// as it is.
func (s *Store) CancelSession(ctx context.Context, id uuid.UUID, reason string) (Session, error) {
	var session Session
	reason = cleanText(reason)
	err := s.write(ctx, func(tx pgx.Tx) error {
		var runID uuid.UUID
		var state SessionState
		if err := tx.QueryRow(ctx, selectRunOfSessionSQL, id).Scan(&runID, &state); err != nil {
			return err
		}
		// Under the run's lock a session can neither be dispatched nor end.
		lock, err := lockRun(ctx, tx, runID)
		if err != nil {
			return err
		}
		cancelled, err := cancelQueued(ctx, tx, lock.sampleSeq, runID, []uuid.UUID{id}, reason)
		if err != nil {
			return err
		}
		if cancelled == 0 {
			batch := &pgx.Batch{}
			batch.Queue(requestCancelSQL, lock.pool, runID, []uuid.UUID{id}, reason)
			notify(batch, OutboxTopic())
			if err := tx.SendBatch(ctx, batch).Close(); err != nil {
				return err
			}
		}
		session, err = readSession(ctx, tx, id)
		return err
	})
	if err != nil {
		return Session{}, found(err, "cancelling session", id)
	}
	return session, nil
}
