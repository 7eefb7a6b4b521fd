package store

import (
	"context"
	"encoding/json"
	"errors"
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
       greatest(0, coalesce((select p.policy_version from pools p where p.pool = s.pool) - s.min_policy_version, 0)), statement_timestamp(),
       s.member, s.cancel_requested_at is not null, r.state = 'active',
       g.size, g.members, g.ended, g.usable, g.refills, g.refills_allowed, g.policy, coalesce(g.outcome, ''),
       g.rewarded, g.reward_min, g.reward_max, coalesce(g.deadline_at <= statement_timestamp(), false), c.grouped_seq,
       coalesce((select v.staleness_bound from contract_versions v where v.run_id = r.run_id and v.version = r.contract_version), -1),
       s.restarting, s.restarts
from sessions s join run_counters c using (run_id) join runs r using (run_id) join groups g on g.group_id = s.task_id
where s.session_id = $1 and ($2 or not ` + groupCancelsCondition + `) for no key update of s`

	endSessionSQL = `
update sessions set state = 'ended', status = $2, ended_at = $3, held_since = null, hold_reason = null, held_seconds = $4,
       admitted_at = null, token_mark = null, residency_seconds = $5, token_seconds = $6,
       instance = null, granted_turn = null, granted_at = null, event_seq = $7
where session_id = $1`

	insertSampleSQL = `
insert into samples (run_id, seq, session_id, class, status, reward, score_detail, score_seconds, finish_reason, problem, tokens, ended_at, staleness, over_bound)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)`

	// $2 and $3 are how many left queued and live: 1 and 0, or 0 and 1; $4 how many
	// members the group has that is whole with this one, or 0.
	countEndedSQL = `
update run_counters set sample_seq = sample_seq + 1, queued = queued - $2, live = live - $3, grouped_seq = grouped_seq + $4 where run_id = $1`

	countEndedClassSQL = `
update class_counters set queued = queued - $3, live = live - $4, backlog = backlog - 1, ended = ended + 1,
       completed = completed + ($5 = 'completed')::int, truncated = truncated + ($5 = 'truncated')::int,
       stale = stale + ($5 = 'stale')::int, failed = failed + ($5 = 'failed')::int, cancelled = cancelled + ($5 = 'cancelled')::int,
       groups_ended = groups_ended + $6, groups_without_signal = groups_without_signal + $7,
       over_bound = over_bound + $8::boolean::int, expired = expired + $9::boolean::int
where run_id = $1 and class = $2`

	// A session that ends without having been dispatched leaves its batch's queue.
	countEndedBatchSQL = `update batches set queued = queued - 1 where batch_id = $1`

	// $1 run, $2 sessions or null for all that are queued, $3 why, $4 the last
	// sample number, $5 cancelled, or stale where a deadline has passed. The run is
	// locked.
	endQueuedSQL = `
with picked as (
    select s.session_id, s.class, s.batch_id, s.task_id, s.context_tokens, row_number() over (order by b.seq, s.dispatch_ordinal) as n
    from batches b join sessions s using (batch_id)
    where b.run_id = $1 and b.queued > 0 and s.state = 'queued' and ($2::uuid[] is null or s.session_id = any($2))
), ended as (
    update sessions s set state = 'ended', status = $5, ended_at = statement_timestamp(),
           cancel_requested_at = statement_timestamp(), cancel_reason = $3, event_seq = s.event_seq + 1
    from picked p where s.session_id = p.session_id
    returning s.session_id, s.event_seq, p.class, p.batch_id, p.task_id, p.context_tokens, p.n
), samples as (
    insert into samples (run_id, seq, session_id, class, status, problem, tokens, ended_at)
    select $1, $4 + n, session_id, class, $5, $3, context_tokens, statement_timestamp() from ended
), events as (
    insert into session_events (session_id, seq, run_id, at, kind, detail)
    select session_id, event_seq, $1, statement_timestamp(), 'ended', json_build_object('status', $5::text, 'problem', $3::text) from ended
), groups as (
    update groups g set ended = g.ended + e.n from (select task_id, count(*) as n from ended group by task_id) e where g.group_id = e.task_id
), batches as (
    update batches b set queued = b.queued - e.n from (select batch_id, count(*) as n from ended group by batch_id) e where b.batch_id = e.batch_id
), classes as (
    update class_counters c set queued = c.queued - e.n, backlog = c.backlog - e.n, ended = c.ended + e.n,
           cancelled = c.cancelled + case $5 when 'cancelled' then e.n else 0 end, stale = c.stale + case $5 when 'stale' then e.n else 0 end,
           expired = c.expired + case $5 when 'stale' then e.n else 0 end
    from (select class, count(*) as n from ended group by class) e where c.run_id = $1 and c.class = e.class
), run as (
    update run_counters set sample_seq = sample_seq + (select count(*) from ended), queued = queued - (select count(*) from ended)
    where run_id = $1
)
select count(*), array_agg(distinct task_id) from ended`
)

// EndSession ends a session once: status, counters, group, sample and event in
// one transaction. If it has ended before, already is true, nothing changes, and
// the sample of that ending is returned. The sample carries no tokens. A
// cancellation that a contract turns into a restart ends nothing: the error is then
// ErrSessionRestarted. Refusals: ErrNotFound, *FieldError.
func (s *Store) EndSession(ctx context.Context, ending Ending) (already bool, sample Sample, err error) {
	if err := ending.check(); err != nil {
		return false, Sample{}, err
	}
	restarted := false
	var left []heldColumn
	err = s.write(ctx, func(tx pgx.Tx) error {
		row, err := lockEnding(ctx, tx, ending.SessionID)
		if err != nil {
			return err
		}
		already = row.state == SessionEnded
		if !already {
			var restart bool
			if restart, restarted = row.restarts(&ending); restart {
				restarted = true
				if left, err = readHeldColumns(ctx, tx, ending.SessionID); err != nil {
					return err
				}
				return row.restart(ctx, tx)
			}
			if restarted {
				return nil
			}
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
	if restarted {
		s.dropBlobs(ctx, ending.SessionID, left)
		return false, Sample{}, fmt.Errorf("ending session %s: %w", ending.SessionID, ErrSessionRestarted)
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
	// restarting: it was asked to end so that it can begin again; restartCount is how
	// often it has.
	restarting   bool
	restartCount int
	// bound is the contract's on staleness, -1 for none.
	bound  int64
	member int
	// cancelRequested, by whomever; runActive: the run has not ended.
	cancelRequested, runActive bool
	group                      endingGroup
	// groupedSeq is the last place in the run's order of whole groups.
	groupedSeq int64
}

// lockEnding takes the locks of the session's run and of the session, in this
// order, and returns pgx.ErrNoRows for an unknown session. Where the ending may
// cancel other members they are locked with it, in a further round trip.
func lockEnding(ctx context.Context, tx pgx.Tx, sessionID uuid.UUID) (*endingRow, error) {
	row := &endingRow{sessionID: sessionID}
	batch := &pgx.Batch{}
	batch.Queue(`select from run_counters where run_id = (select run_id from sessions where session_id = $1) for update`, sessionID)
	row.queueLock(batch, false)
	err := tx.SendBatch(ctx, batch).Close()
	if !errors.Is(err, pgx.ErrNoRows) {
		return row, err
	}
	if err := lockMembers(ctx, tx, sessionID); err != nil {
		return nil, err
	}
	batch = &pgx.Batch{}
	row.queueLock(batch, true)
	return row, tx.SendBatch(ctx, batch).Close()
}

// queueLock locks the session and reads its row; without others, not if its ending
// may cancel other members.
func (row *endingRow) queueLock(batch *pgx.Batch, others bool) {
	r, g := &row.residency, &row.group
	batch.Queue(lockEndingSQL, row.sessionID, others).QueryRow(func(found pgx.Row) error {
		return found.Scan(&row.runID, &row.pool, &row.batchID, &row.taskID, &row.class, &row.state, &row.dispatchOrdinal, &row.sampleSeq,
			&row.heldSince, &row.heldSeconds, &r.admittedAt, &r.seconds, &r.tokenSeconds, &r.tokenMark, &r.contextTokens,
			&row.finishReason, &row.eventSeq, &row.stale, &row.cancelReason, &row.staleness, &row.now,
			&row.member, &row.cancelRequested, &row.runActive,
			&g.size, &g.members, &g.ended, &g.usable, &g.refills, &g.refillsAllowed, &g.policy, &g.outcome,
			&g.rewarded, &g.rewardMin, &g.rewardMax, &g.expired, &row.groupedSeq, &row.bound,
			&row.restarting, &row.restartCount)
	})
}

// end writes the ending of a locked session.
func (row *endingRow) end(ctx context.Context, tx pgx.Tx, ending Ending) error {
	if row.stale && ending.Status == router.Cancelled {
		ending.Status, ending.Problem = router.Stale, row.cancelReason
	}
	if ending.Status == router.Cancelled && ending.Problem == "" {
		ending.Problem = row.cancelReason
	}
	// What was asked to end as stale and failed instead is unusable all the same.
	does := row.group.judge(row.member, &ending, row.cancelRequested && !row.stale, row.runActive)
	var replacedBy *uuid.UUID
	if does.refill {
		id := SessionID(row.taskID, row.group.members-1)
		replacedBy = &id
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
		// ReplacedBy is the member released in its place.
		ReplacedBy *uuid.UUID `json:"replaced_by,omitempty"`
	}{status, ending.Reward, finishReason, problem, replacedBy})
	if err != nil {
		return fmt.Errorf("describing the ending: %w", err)
	}
	var events eventRows
	last := row.eventSeq
	if ending.ScoreSeconds > 0 {
		last++
		events.add(SessionEvent{SessionID: row.sessionID, Seq: last, At: row.now, Kind: EventScored, Detail: scoredDetail(&ending)}, row.runID)
	}
	last++
	events.add(SessionEvent{SessionID: row.sessionID, Seq: last, At: row.now, Kind: EventEnded, Detail: detail}, row.runID)

	batch := &pgx.Batch{}
	batch.Queue(endSessionSQL, row.sessionID, status, row.now, row.heldSeconds, row.residency.seconds, row.residency.tokenSeconds, last)
	batch.Queue(dropCheckpointsSQL, row.sessionID)
	batch.Queue(insertSampleSQL, row.runID, row.sampleSeq+1, row.sessionID, row.class, status, ending.Reward, nullJSON(ending.ScoreDetail),
		ending.ScoreSeconds, finishReason, problem, row.residency.contextTokens, row.now, row.staleness, row.overBound(ending.Status))
	row.queueCounts(batch, &ending, does)
	if does.refill {
		row.queueRefill(batch, *replacedBy)
	}
	events.queue(batch)
	notify(batch, SamplesTopic(row.runID))
	notify(batch, DispatchTopic())
	if err := tx.SendBatch(ctx, batch).Close(); err != nil || does.cancel == "" {
		return err
	}
	return cancelMembers(ctx, tx, row, row.sampleSeq+1, does.cancel)
}

// scoredDetail says how long the scorer took; what it found stands in the sample.
func scoredDetail(ending *Ending) json.RawMessage {
	return json.RawMessage(fmt.Sprintf(`{"seconds":%g}`, ending.ScoreSeconds))
}

// overBound tells whether the sample is usable and older than the contract allows.
func (row *endingRow) overBound(status router.EndStatus) bool {
	return usable(status) && row.bound >= 0 && row.staleness > row.bound
}

func usable(status router.EndStatus) bool {
	return status == router.Completed || status == router.Truncated
}

// queueCounts counts the ending in run, class, group and batch.
func (row *endingRow) queueCounts(batch *pgx.Batch, ending *Ending, does verdict) {
	status := ending.Status.String()
	queued, live := 0, 1
	if row.state == SessionQueued {
		queued, live = 1, 0
		batch.Queue(countEndedBatchSQL, row.batchID)
	}
	var place *int64
	whole, settled, flat, refills := 0, 0, 0, 0
	if does.settled {
		whole, settled = row.group.members, 1
		last := row.groupedSeq + int64(whole)
		place = &last
	}
	if does.flat {
		flat = 1
	}
	if does.refill {
		refills = 1
	}
	batch.Queue(countEndedSQL, row.runID, queued, live, whole)
	batch.Queue(countEndedClassSQL, row.runID, row.class, queued, live, status, settled, flat,
		row.overBound(ending.Status), ending.Status == router.Stale && row.group.expired)
	batch.Queue(countEndedGroupSQL, row.taskID, status, ending.Reward, refills, string(does.outcome), place)
}

// queueRefill releases a member in the place of the one that ends.
func (row *endingRow) queueRefill(batch *pgx.Batch, id uuid.UUID) {
	state := SessionDispatched
	if row.state == SessionQueued {
		state = SessionQueued
	}
	batch.Queue(refillSQL, row.sessionID, id, row.group.members-1, string(state))
	notify(batch, OutboxTopic())
}

// cancelQueued ends the run's queued sessions, or those of the given ones that are
// queued, as cancelled. The caller holds the run's lock and knows the number of
// its last sample.
func cancelQueued(ctx context.Context, tx pgx.Tx, sampleSeq int64, runID uuid.UUID, sessionIDs []uuid.UUID, reason string) (int, error) {
	return endQueued(ctx, tx, sampleSeq, runID, sessionIDs, router.Cancelled, reason)
}

// endQueued is cancelQueued with a status of its own.
func endQueued(ctx context.Context, tx pgx.Tx, sampleSeq int64, runID uuid.UUID, sessionIDs []uuid.UUID, status router.EndStatus, reason string) (int, error) {
	var ended int
	var groups []uuid.UUID
	if err := tx.QueryRow(ctx, endQueuedSQL, runID, sessionIDs, reason, sampleSeq, status.String()).Scan(&ended, &groups); err != nil {
		return 0, fmt.Errorf("ending queued sessions: %w", err)
	}
	if ended > 0 {
		if _, err := tx.Exec(ctx, settleGroupsSQL, runID, groups); err != nil {
			return 0, fmt.Errorf("settling the groups of ended sessions: %w", err)
		}
		if _, err := tx.Exec(ctx, notifySQL, string(SamplesTopic(runID))); err != nil {
			return 0, fmt.Errorf("telling of ended sessions: %w", err)
		}
	}
	return ended, nil
}
