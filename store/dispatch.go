package store

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

const (
	selectNextBatchSQL = `
select batch_id, next_ordinal, queued from batches where run_id = $1 and queued > 0 order by seq limit 1`

	// $1 batch, $2 its next ordinal, $3 how many, $4 run. The run is locked.
	dispatchBatchSQL = `
with picked as (
    select session_id from sessions
    where batch_id = $1 and dispatch_ordinal >= $2 and state = 'queued'
    order by dispatch_ordinal limit $3
), moved as (
    update sessions s set state = 'dispatched', dispatched_at = statement_timestamp(), event_seq = s.event_seq + 1
    from picked p where s.session_id = p.session_id
    returning s.session_id, s.pool, s.class, s.dispatch_ordinal, s.event_seq
), events as (
    insert into session_events (session_id, seq, run_id, at, kind)
    select session_id, event_seq, $4, statement_timestamp(), 'dispatched' from moved
), starts as (
    insert into outbox (pool, run_id, session_id, kind, next_at)
    select pool, $4, session_id, 'start', statement_timestamp() from moved order by dispatch_ordinal
), classes as (
    update class_counters c set queued = c.queued - m.n, live = c.live + m.n
    from (select class, count(*) as n from moved group by class) m where c.run_id = $4 and c.class = m.class
), batch as (
    update batches set next_ordinal = (select max(dispatch_ordinal) + 1 from moved), queued = queued - (select count(*) from moved)
    where batch_id = $1
), run as (
    update run_counters set queued = queued - (select count(*) from moved), live = live + (select count(*) from moved)
    where run_id = $4
)
select count(*) from moved`
)

// DispatchQueued moves the next queued sessions of a run to dispatched, at most
// limit and no more than the contract's max concurrency leaves room for, and puts
// their starts into the outbox. It returns how many were moved; 0 for a run that
// has ended, and while too many samples wait for the trainer (see BackPressure).
// Batches go in order of their release, and within a batch the classes
// are mixed in its own shares from the first session on.
func (s *Store) DispatchQueued(ctx context.Context, runID uuid.UUID, limit int) (int, error) {
	dispatched := 0
	err := s.write(ctx, func(tx pgx.Tx) error {
		lock, err := lockRun(ctx, tx, runID)
		if err != nil || lock.state == RunEnded {
			return err
		}
		if paused, err := lock.pressure.settle(ctx, tx, runID); err != nil || paused {
			return err
		}
		for room := min(limit, lock.maxConcurrency-lock.live); dispatched < room; {
			n, err := dispatchNextBatch(ctx, tx, runID, room-dispatched)
			if err != nil {
				return err
			}
			if n == 0 {
				break
			}
			dispatched += n
		}
		if dispatched > 0 {
			_, err = tx.Exec(ctx, notifySQL, string(OutboxTopic()))
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("dispatching sessions of run %s: %w", runID, err)
	}
	return dispatched, nil
}

// dispatchNextBatch dispatches up to limit sessions of the oldest batch that has
// queued ones, and returns 0 if there is none.
func dispatchNextBatch(ctx context.Context, tx pgx.Tx, runID uuid.UUID, limit int) (int, error) {
	var batchID uuid.UUID
	var nextOrdinal, queued, moved int
	err := tx.QueryRow(ctx, selectNextBatchSQL, runID).Scan(&batchID, &nextOrdinal, &queued)
	if err == pgx.ErrNoRows {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("looking for a batch: %w", err)
	}
	err = tx.QueryRow(ctx, dispatchBatchSQL, batchID, nextOrdinal, min(limit, queued), runID).Scan(&moved)
	if err != nil {
		return 0, fmt.Errorf("dispatching from batch %s: %w", batchID, err)
	}
	return moved, nil
}
