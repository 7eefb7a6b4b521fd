package store

import (
	"context"

	"github.com/google/uuid"
)

// DispatchQueued moves the next queued sessions of a run to dispatched, at most
// limit and no more than the contract's max concurrency leaves room for, and puts
// their starts into the outbox. It returns how many were moved; 0 for a run that
// has ended.
func (s *Store) DispatchQueued(ctx context.Context, runID uuid.UUID, limit int) (int, error) {
	return 0, errUnfinished
}
