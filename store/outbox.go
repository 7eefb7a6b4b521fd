package store

import (
	"context"
	"time"

	"github.com/google/uuid"
)

// OutboxKind is the closed set of messages to workflows.
type OutboxKind string

// Outbox kinds.
const (
	// OutboxStart starts the session's workflow; its id is the session's.
	OutboxStart OutboxKind = "start"
	// OutboxGrant signals a held workflow that its turn was admitted.
	OutboxGrant OutboxKind = "grant"
	// OutboxCancel asks the workflow to cancel.
	OutboxCancel OutboxKind = "cancel"
)

// OutboxRow is one message to a workflow, to be delivered at least once.
type OutboxRow struct {
	ID        int64
	Kind      OutboxKind
	SessionID uuid.UUID
	RunID     uuid.UUID
	Pool      string
	// Turn belongs to OutboxGrant.
	Turn int
	// Reason belongs to OutboxCancel.
	Reason string
	// Attempts counts claims, this one included.
	Attempts  int
	CreatedAt time.Time
}

// ClaimOutbox returns due messages, oldest first, and hides them from other
// claimants for leaseSeconds; what is neither finished nor retried by then is due
// again.
func (s *Store) ClaimOutbox(ctx context.Context, limit int, leaseSeconds float64) ([]OutboxRow, error) {
	return nil, errUnfinished
}

// FinishOutbox removes delivered messages. Unknown ids are ignored.
func (s *Store) FinishOutbox(ctx context.Context, ids []int64) error {
	return errUnfinished
}

// RetryOutbox makes a claimed message due again in delaySeconds and keeps why.
func (s *Store) RetryOutbox(ctx context.Context, id int64, delaySeconds float64, problem string) error {
	return errUnfinished
}

// NextOutboxDue returns when the next message falls due, claimed ones included;
// ok is false when there is none.
func (s *Store) NextOutboxDue(ctx context.Context) (due time.Time, ok bool, err error) {
	return time.Time{}, false, errUnfinished
}
