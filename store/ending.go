package store

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"holdfast/router"
)

// Ending is how a session ends.
type Ending struct {
	SessionID uuid.UUID
	Status    router.EndStatus
	// Reward may stand with Completed and Truncated only and must be finite.
	Reward *float64
	// ScoreDetail is the scorer's JSON, at most 64 KiB, if any.
	ScoreDetail  json.RawMessage
	ScoreSeconds float64
	// FinishReason says why a completed or truncated session stopped; empty means
	// the finish reason of its last turn.
	FinishReason string
	// Problem says what went wrong in a session that failed.
	Problem string
}

const (
	lockEndingSQL = `
select s.run_id, s.pool, s.batch_id, s.task_id, s.class, s.state, s.dispatch_ordinal, c.sample_seq,
       s.held_since, s.held_seconds, s.admitted_at, s.residency_seconds, s.token_seconds, s.token_mark, s.context_tokens,
       s.finish_reason, s.event_seq, s.stale, s.cancel_reason,
       greatest(0, coalesce((select p.policy_version from pools p where p.pool = s.pool) - s.min_policy_version, 0)), statement_timestamp()
from sessions s join run_counters c using (run_id) where s.session_id = $1 for no key update of s`

	endSessionSQL = `
update sessions set state = 'ended', status = $2, ended_at = $3, held_since = null, hold_reason = null, held_seconds = $4,
       admitted_at = null, token_mark = null, residency_seconds = $5, token_seconds = $6,
       instance = null, granted_turn = null, granted_at = null, event_seq = $7
where session_id = $1`

	insertSampleSQL = `
insert into samples (run_id, seq, session_id, class, status, reward, score_detail, score_seconds, finish_reason, problem, tokens, ended_at, staleness)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)`

	// $2 and $3 are how many left queued and live: 1 and 0, or 0 and 1.
	countEndedSQL = `
update run_counters set sample_seq = sample_seq + 1, queued = queued - $2, live = live - $3 where run_id = $1`

	countEndedClassSQL = `
update class_counters set queued = queued - $3, live = live - $4, backlog = backlog - 1, ended = ended + 1,
       completed = completed + ($5 = 'completed')::int, truncated = truncated + ($5 = 'truncated')::int,
       stale = stale + ($5 = 'stale')::int, failed = failed + ($5 = 'failed')::int, cancelled = cancelled + ($5 = 'cancelled')::int
where run_id = $1 and class = $2`

	countEndedGroupSQL = `
update groups set ended = ended + 1, usable = usable + ($2 in ('completed', 'truncated'))::int where group_id = $1`

	// A session that ends without having been dispatched leaves its batch's queue.
	countEndedBatchSQL = `update batches set queued = queued - 1 where batch_id = $1`

	// $1 run, $2 one session or null for all that are queued, $3 why, $4 the last
	// sample number. The run is locked.
	cancelQueuedSQL = `
with picked as (
    select s.session_id, s.class, s.batch_id, s.task_id, s.context_tokens, row_number() over (order by b.seq, s.dispatch_ordinal) as n
    from batches b join sessions s using (batch_id)
    where b.run_id = $1 and b.queued > 0 and s.state = 'queued' and ($2::uuid is null or s.session_id = $2)
), ended as (
    update sessions s set state = 'ended', status = 'cancelled', ended_at = statement_timestamp(),
           cancel_requested_at = statement_timestamp(), cancel_reason = $3, event_seq = s.event_seq + 1
    from picked p where s.session_id = p.session_id
    returning s.session_id, s.event_seq, p.class, p.batch_id, p.task_id, p.context_tokens, p.n
), samples as (
    insert into samples (run_id, seq, session_id, class, status, problem, tokens, ended_at)
    select $1, $4 + n, session_id, class, 'cancelled', $3, context_tokens, statement_timestamp() from ended
), events as (
    insert into session_events (session_id, seq, run_id, at, kind, detail)
    select session_id, event_seq, $1, statement_timestamp(), 'ended', json_build_object('status', 'cancelled', 'problem', $3::text) from ended
), groups as (
    update groups g set ended = g.ended + e.n from (select task_id, count(*) as n from ended group by task_id) e where g.group_id = e.task_id
), batches as (
    update batches b set queued = b.queued - e.n from (select batch_id, count(*) as n from ended group by batch_id) e where b.batch_id = e.batch_id
), classes as (
    update class_counters c set queued = c.queued - e.n, backlog = c.backlog - e.n, ended = c.ended + e.n, cancelled = c.cancelled + e.n
    from (select class, count(*) as n from ended group by class) e where c.run_id = $1 and c.class = e.class
), run as (
    update run_counters set sample_seq = sample_seq + (select count(*) from ended), queued = queued - (select count(*) from ended)
    where run_id = $1
)
select count(*) from ended`
)

// EndSession ends a session once: status, counters, group, sample and event in
// one transaction. If it has ended before, already is true, nothing changes, and
// the sample of that ending is returned. The sample carries no tokens. Refusals:
// ErrNotFound, *FieldError.
func (s *Store) EndSession(ctx context.Context, ending Ending) (already bool, sample Sample, err error) {
	if err := ending.check(); err != nil {
		return false, Sample{}, err
	}
	err = s.write(ctx, func(tx pgx.Tx) error {
		row, err := lockEnding(ctx, tx, ending.SessionID)
		if err != nil {
			return err
		}
		already = row.state == SessionEnded
		if !already {
			if err := row.end(ctx, tx, ending); err != nil {
				return err
			}
		}
		sample, err = readSampleOf(ctx, tx, ending.SessionID)
		return err
	})
	if err != nil {
		return false, Sample{}, found(err, "ending session", ending.SessionID)
	}
	return already, sample, nil
}

func (e *Ending) check() error {
	if e.Status < router.Completed || e.Status > router.Cancelled {
		return &FieldError{Path: "status", Problem: fmt.Sprintf("must be an end status, is %v", e.Status)}
	}
	if e.Reward != nil {
		if e.Status != router.Completed && e.Status != router.Truncated {
			return &FieldError{Path: "reward", Problem: fmt.Sprintf("must be absent from a session that is %v", e.Status)}
		}
		if math.IsNaN(*e.Reward) || math.IsInf(*e.Reward, 0) {
			return &FieldError{Path: "reward", Problem: fmt.Sprintf("must be finite, is %v", *e.Reward)}
		}
	}
	if !(e.ScoreSeconds >= 0) || math.IsInf(e.ScoreSeconds, 0) {
		return &FieldError{Path: "score_seconds", Problem: fmt.Sprintf("must be finite and not negative, is %v", e.ScoreSeconds)}
	}
	return checkDetail("score_detail", e.ScoreDetail)
}

// endingRow is what an ending needs of a session's row.
type endingRow struct {
	sessionID, runID, batchID, taskID uuid.UUID
	pool, class                       string
	state                             SessionState
	dispatchOrdinal                   int
	sampleSeq                         int64
	heldSince                         *time.Time
	heldSeconds                       float64
	residency                         residency
	finishReason                      string
	eventSeq                          int64
	// stale: the session was asked to end because it is too old, with that reason.
	stale        bool
	cancelReason string
	// staleness is how many policy versions the pool is ahead of the session's oldest.
	staleness int64
	now       time.Time
}

// lockEnding takes the locks of the session's run and of the session, in this
// order, and returns pgx.ErrNoRows for an unknown session.
func lockEnding(ctx context.Context, tx pgx.Tx, sessionID uuid.UUID) (*endingRow, error) {
	row := &endingRow{sessionID: sessionID}
	r := &row.residency
	batch := &pgx.Batch{}
	batch.Queue(`select from run_counters where run_id = (select run_id from sessions where session_id = $1) for update`, sessionID)
	batch.Queue(lockEndingSQL, sessionID).QueryRow(func(found pgx.Row) error {
		return found.Scan(&row.runID, &row.pool, &row.batchID, &row.taskID, &row.class, &row.state, &row.dispatchOrdinal, &row.sampleSeq,
			&row.heldSince, &row.heldSeconds, &r.admittedAt, &r.seconds, &r.tokenSeconds, &r.tokenMark, &r.contextTokens,
			&row.finishReason, &row.eventSeq, &row.stale, &row.cancelReason, &row.staleness, &row.now)
	})
	return row, tx.SendBatch(ctx, batch).Close()
}

// end writes the ending of a locked session.
func (row *endingRow) end(ctx context.Context, tx pgx.Tx, ending Ending) error {
	if row.stale && ending.Status == router.Cancelled {
		ending.Status, ending.Problem = router.Stale, row.cancelReason
	}
	status := ending.Status.String()
	finishReason, problem := cleanText(ending.FinishReason), cleanText(ending.Problem)
	if finishReason == "" {
		finishReason = row.finishReason
	}
	if row.heldSince != nil {
		row.heldSeconds += secondsBetween(*row.heldSince, row.now)
	}
	row.residency.stop(row.now)
	detail, err := json.Marshal(struct {
		Status       string   `json:"status"`
		Reward       *float64 `json:"reward,omitempty"`
		FinishReason string   `json:"finish_reason,omitempty"`
		Problem      string   `json:"problem,omitempty"`
	}{status, ending.Reward, finishReason, problem})
	if err != nil {
		return fmt.Errorf("describing the ending: %w", err)
	}
	queued, live := 0, 1
	if row.state == SessionQueued {
		queued, live = 1, 0
	}
	var events eventRows
	events.add(SessionEvent{SessionID: row.sessionID, Seq: row.eventSeq + 1, At: row.now, Kind: EventEnded, Detail: detail}, row.runID)

	batch := &pgx.Batch{}
	batch.Queue(endSessionSQL, row.sessionID, status, row.now, row.heldSeconds, row.residency.seconds, row.residency.tokenSeconds, row.eventSeq+1)
	batch.Queue(dropCheckpointsSQL, row.sessionID)
	batch.Queue(insertSampleSQL, row.runID, row.sampleSeq+1, row.sessionID, row.class, status, ending.Reward, nullJSON(ending.ScoreDetail),
		ending.ScoreSeconds, finishReason, problem, row.residency.contextTokens, row.now, row.staleness)
	batch.Queue(countEndedSQL, row.runID, queued, live)
	batch.Queue(countEndedClassSQL, row.runID, row.class, queued, live, status)
	batch.Queue(countEndedGroupSQL, row.taskID, status)
	if queued == 1 {
		batch.Queue(countEndedBatchSQL, row.batchID)
	}
	events.queue(batch)
	notify(batch, SamplesTopic(row.runID))
	notify(batch, DispatchTopic())
	return tx.SendBatch(ctx, batch).Close()
}

// cancelQueued ends the run's queued sessions, or the given one if it is queued,
// as cancelled. The caller holds the run's lock.
func cancelQueued(ctx context.Context, tx pgx.Tx, lock runLock, runID uuid.UUID, sessionID *uuid.UUID, reason string) (int, error) {
	var cancelled int
	if err := tx.QueryRow(ctx, cancelQueuedSQL, runID, sessionID, reason, lock.sampleSeq).Scan(&cancelled); err != nil {
		return 0, fmt.Errorf("cancelling queued sessions: %w", err)
	}
	if cancelled > 0 {
		if _, err := tx.Exec(ctx, notifySQL, string(SamplesTopic(runID))); err != nil {
			return 0, fmt.Errorf("telling of cancelled sessions: %w", err)
		}
	}
	return cancelled, nil
}
