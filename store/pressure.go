package store

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// BackPressure says how many ended samples of a run wait for its trainer, and
// whether that keeps queued sessions from being dispatched.
type BackPressure struct {
	RunID uuid.UUID
	// Undelivered counts what the slowest consumer has not acknowledged: of all
	// ended samples, or of those in whole groups if that is what it reads. Without a
	// consumer it is every sample.
	Undelivered int64
	// Limit is the contract's, nil for none.
	Limit *int
	// PausedAt is since when nothing is dispatched; nil if that goes on.
	PausedAt *time.Time
	// MaxConcurrency and Live tell the other reason why a session is queued.
	MaxConcurrency, Live int
}

// Paused says why nothing is dispatched; empty if it is.
func (b *BackPressure) Paused() string {
	if b.PausedAt == nil {
		return ""
	}
	if b.Limit == nil {
		return fmt.Sprintf("undelivered samples %d, about to go on", b.Undelivered)
	}
	return fmt.Sprintf("undelivered samples %d of %d", b.Undelivered, *b.Limit)
}

// QueueReason says why a queued session of the run is not dispatched; empty if its
// turn is about to come.
func (b *BackPressure) QueueReason() string {
	if paused := b.Paused(); paused != "" {
		return paused
	}
	if b.Live >= b.MaxConcurrency {
		return fmt.Sprintf("sessions under way %d of max_concurrency %d", b.Live, b.MaxConcurrency)
	}
	return ""
}

const (
	// undeliveredOfRun reads the durable counters alone: those that endings move and
	// those that acknowledgements move. c is the run's row of run_counters.
	undeliveredOfRun = `
coalesce((select max(case when x.grouped then c.grouped_seq else c.sample_seq end - x.acked_seq) from consumers x where x.run_id = c.run_id), c.sample_seq)`

	setPausedSQL = `update run_counters set paused_at = case when $2 then statement_timestamp() end where run_id = $1`

	selectPressureSQL = `
select c.run_id,` + undeliveredOfRun + `, v.undelivered_limit, c.paused_at, v.max_concurrency, c.live
from runs r join run_counters c using (run_id) join contract_versions v on v.run_id = r.run_id and v.version = r.contract_version`
)

// pressure is what decides about dispatch, read under the run's lock.
type pressure struct {
	limit       *int
	paused      bool
	undelivered int64
}

// pauses tells whether dispatch is to stand still. It begins at the limit and ends
// at three quarters of it, so that it does not flutter around one number.
func (p *pressure) pauses() bool {
	switch {
	case p.limit == nil:
		return false
	case p.paused:
		return p.undelivered > int64(*p.limit)*3/4
	}
	return p.undelivered >= int64(*p.limit)
}

// settle writes down a change and returns whether dispatch stands still.
func (p *pressure) settle(ctx context.Context, tx pgx.Tx, runID uuid.UUID) (bool, error) {
	pauses := p.pauses()
	if pauses == p.paused {
		return pauses, nil
	}
	if _, err := tx.Exec(ctx, setPausedSQL, runID, pauses); err != nil {
		return pauses, fmt.Errorf("noting that dispatch is paused: %w", err)
	}
	return pauses, nil
}

// BackPressure returns the run's, or ErrNotFound.
func (s *Store) BackPressure(ctx context.Context, runID uuid.UUID) (BackPressure, error) {
	rows, err := s.pool.Query(ctx, selectPressureSQL+` where r.run_id = $1`, runID)
	if err != nil {
		return BackPressure{}, fmt.Errorf("reading the back-pressure of run %s: %w", runID, err)
	}
	b, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[BackPressure])
	return b, found(err, "reading the back-pressure of run", runID)
}

// BackPressures returns those of the pool's active runs.
func (s *Store) BackPressures(ctx context.Context, pool string) ([]BackPressure, error) {
	rows, err := s.pool.Query(ctx, selectPressureSQL+` where r.pool = $1 and r.state = 'active'`, pool)
	if err != nil {
		return nil, fmt.Errorf("reading the back-pressure of pool %s: %w", pool, err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[BackPressure])
	if err != nil {
		return nil, fmt.Errorf("reading the back-pressure of pool %s: %w", pool, err)
	}
	return all, nil
}
