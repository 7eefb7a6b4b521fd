package store

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"holdfast/router"
)

const deadlineReason = "stale: the deadline of its group has passed"

const (
	selectExpiredRunsSQL = `
select distinct run_id from groups where pool = $1 and deadline_at <= statement_timestamp() and place is null and not expired`

	// $3 bounds what one transaction does. A group that is complete cancels what is left
	// of it by itself.
	expireGroupsSQL = `
with due as (
    select group_id from groups
    where pool = $1 and run_id = $2 and deadline_at <= statement_timestamp() and place is null and not expired
    order by deadline_at, group_id limit $3
)
update groups g set expired = true, outcome = coalesce(outcome, case policy when 'end' then 'ended' end)
from due where g.group_id = due.group_id returning g.group_id, g.members, g.outcome is not distinct from 'complete'`

	// As requestCancelSQL, of sessions that then end as stale.
	requestStaleSQL = `
with locked as (
    select session_id from sessions
    where ` + liveCondition + ` and pool = $1 and run_id = $2 and session_id = any($3) and (cancel_requested_at is null or restarting)
    order by session_id for no key update
), asked as (
    update sessions s set stale = true, restarting = false, cancel_requested_at = statement_timestamp(), cancel_reason = $4, event_seq = s.event_seq + 1
    from locked l where s.session_id = l.session_id
    returning s.session_id, s.event_seq
), events as (
    insert into session_events (session_id, seq, run_id, at, kind, detail)
    select session_id, event_seq, $2, statement_timestamp(), 'cancel_requested', json_build_object('reason', $4::text) from asked
), messages as (
    insert into outbox (pool, run_id, session_id, kind, reason, next_at)
    select $1, $2, session_id, 'cancel', $4, statement_timestamp() from asked
)
select count(*) from asked`
)

// maxExpired bounds the groups that one transaction expires.
const maxExpired = 200

// ExpireDeadlines ends what is left of groups whose deadline has passed: queued
// members at once as stale, those under way are asked to end and then do so as
// stale. The group's policy then holds, but nothing is released for it any more. It
// returns how many sessions are concerned; ErrFenced if epoch is not the pool's.
func (s *Store) ExpireDeadlines(ctx context.Context, pool string, epoch int64) (int, error) {
	rows, err := s.pool.Query(ctx, selectExpiredRunsSQL, pool)
	if err != nil {
		return 0, fmt.Errorf("looking for deadlines of pool %s: %w", pool, err)
	}
	runs, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return 0, fmt.Errorf("looking for deadlines of pool %s: %w", pool, err)
	}
	concerned := 0
	for _, run := range runs {
		for more := true; more; {
			err := s.write(ctx, func(tx pgx.Tx) error {
				if err := fence(ctx, tx, pool, epoch); err != nil {
					return err
				}
				groups, sessions, err := expire(ctx, tx, pool, run)
				more = groups == maxExpired
				concerned += sessions
				return err
			})
			if err != nil {
				return concerned, fmt.Errorf("keeping deadlines of run %s: %w", run, err)
			}
		}
	}
	return concerned, nil
}

// expire deals with at most maxExpired groups of a run.
func expire(ctx context.Context, tx pgx.Tx, pool string, runID uuid.UUID) (groups, sessions int, err error) {
	lock, err := lockRun(ctx, tx, runID)
	if err != nil {
		return 0, 0, err
	}
	rows, err := tx.Query(ctx, expireGroupsSQL, pool, runID, maxExpired)
	if err != nil {
		return 0, 0, err
	}
	var ids []uuid.UUID
	var group uuid.UUID
	var members int
	var complete bool
	_, err = pgx.ForEachRow(rows, []any{&group, &members, &complete}, func() error {
		groups++
		if !complete {
			ids = append(ids, memberIDs(group, members)...)
		}
		return nil
	})
	if err != nil || len(ids) == 0 {
		return groups, 0, err
	}
	ended, err := endQueued(ctx, tx, lock.sampleSeq, runID, ids, router.Stale, deadlineReason)
	if err != nil {
		return groups, 0, err
	}
	var asked int
	if err := tx.QueryRow(ctx, requestStaleSQL, pool, runID, ids, deadlineReason).Scan(&asked); err != nil {
		return groups, ended, err
	}
	_, err = tx.Exec(ctx, notifySQL, string(OutboxTopic()))
	return groups, ended + asked, err
}
