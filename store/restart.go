package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"holdfast/router"
)

// ErrSessionRestarted: the session did not end but begins again from its prompt.
var ErrSessionRestarted = errors.New("the session begins again")

// restartSQL puts a session back to where it was dispatched, under the pool's present
// weights. $1 session, $2 its attempt that is left, $3 now, $4 held, $5 resident and
// $6 token seconds up to now, $7 the last event number. What the attempt had generated
// is kept apart; its turns stay in the history, each at its own number. Messages to
// the attempt's workflow are withdrawn.
const restartSQL = `
with turns as (
    delete from turns where session_id = $1 returning *
), kept_turns as (
    insert into abandoned_turns (session_id, attempt, turn, detail) select session_id, $2, turn, to_jsonb(t) from turns t
), history as (
    insert into session_events (session_id, seq, run_id, at, kind, detail)
    select session_id, event_seq, run_id, committed_at, 'turn', jsonb_strip_nulls(to_jsonb(t) - array['session_id', 'run_id', 'event_seq', 'seen_digest'] || jsonb_build_object('abandoned_attempt', $2::int))
    from turns t
), segments as (
    delete from segments where session_id = $1 returning *
), kept_segments as (
    insert into abandoned_segments (session_id, attempt, turn, part, kind, policy_version, start_tokens, tokens, ids, logprobs)
    select session_id, $2, turn, part, kind, policy_version, start_tokens, tokens, ids, logprobs from segments
), observed as (
    delete from observations where session_id = $1
), columns as (
    delete from sample_columns where session_id = $1
), checkpoints as (
    delete from turn_checkpoints where session_id = $1
), messages as (
    delete from outbox where session_id = $1 and kind in ('cancel', 'grant')
), event as (
    insert into session_events (session_id, seq, run_id, at, kind, detail)
    select s.session_id, $7, s.run_id, $3, 'restarted',
           json_build_object('reason', s.cancel_reason, 'attempt', $2::int + 1, 'policy_version', p.policy_version, 'abandoned_turns', s.turns, 'abandoned_output_tokens', s.output_tokens)
    from sessions s join pools p using (pool) where s.session_id = $1
), counted as (
    update class_counters c set restarts = c.restarts + 1 from sessions s where s.session_id = $1 and c.run_id = s.run_id and c.class = s.class
)
update sessions s set
    state = 'dispatched', restarts = s.restarts + 1, restarting = false, stale = false, cancel_requested_at = null, cancel_reason = '',
    policy_version = p.policy_version, min_policy_version = null, max_policy_version = null,
    instance = null, granted_turn = null, granted_at = null, predicted_cached_tokens = 0,
    hold_reason = null, held_since = null, held_seconds = $4, first_admitted_at = null, admitted_at = null,
    residency_seconds = $5, token_seconds = $6, token_mark = null,
    turns = 0, prompt_tokens = 0, cached_tokens = 0, output_tokens = 0, context_tokens = t.prompt_tokens, rewrites = 0, earlier_tokens = 0,
    finish_reason = '', event_seq = $7
from pools p, tasks t where s.session_id = $1 and p.pool = s.pool and t.task_id = s.task_id`

// restarts tells what an ending is instead: the session begins again, if that is what
// it was asked to end for, or has done so already, if this is the ending repeated, or
// an old cancellation that came late.
func (row *endingRow) restarts(ending *Ending) (restart, restarted bool) {
	if ending.Status != router.Cancelled || !row.runActive || row.group.outcome != "" || row.group.expired {
		return false, false
	}
	return row.restarting, row.restartCount > 0 && !row.cancelRequested
}

// restart writes that a locked session begins again. It stays released and
// dispatched, so that A, N and Q stay as they are.
func (row *endingRow) restart(ctx context.Context, tx pgx.Tx) error {
	if row.heldSince != nil {
		row.heldSeconds += secondsBetween(*row.heldSince, row.now)
	}
	row.residency.stop(row.now)
	_, err := tx.Exec(ctx, restartSQL, row.sessionID, row.restartCount, row.now, row.heldSeconds, row.residency.seconds, row.residency.tokenSeconds, row.eventSeq+1)
	if err != nil {
		return fmt.Errorf("beginning it again: %w", err)
	}
	return nil
}
