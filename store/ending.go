package store

import (
	"context"
	"encoding/json"

	"github.com/google/uuid"

	"holdfast/router"
)

// Ending is how a session ends.
type Ending struct {
	SessionID uuid.UUID
	Status    router.EndStatus
	// Reward may stand with Completed and Truncated only and must be finite.
	Reward *float64
	// ScoreDetail is the scorer's JSON object, if any.
	ScoreDetail  json.RawMessage
	ScoreSeconds float64
	// FinishReason says why a completed or truncated session stopped.
	FinishReason string
	// Problem says what went wrong in a session that failed.
	Problem string
}

// EndSession ends a session once: status, counters, group, sample and event in
// one transaction. If it has ended before, already is true, nothing changes, and
// the sample of that ending is returned. The sample carries no tokens. Refusals:
// ErrNotFound, *FieldError.
func (s *Store) EndSession(ctx context.Context, ending Ending) (already bool, sample Sample, err error) {
	return false, Sample{}, errUnfinished
}
