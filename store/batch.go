package store

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"

	"holdfast/workflows/task"
)

var errUnfinished = errors.New("not built yet")

// Limits of a batch.
const (
	MaxBatchTasks          = 10_000
	MaxBatchSessions       = 100_000
	MaxIdempotencyKeyBytes = 256
)

// BatchSubmission is a batch on its way in. Its tasks are pulled one by one, so
// that a large body is never held in memory.
type BatchSubmission struct {
	RunID uuid.UUID
	// IdempotencyKey makes a repeated submission harmless; required.
	IdempotencyKey string
	// PolicyVersion is the one the tasks are released at; nil means the pool's
	// current one. It may lie below the pool's, not above.
	PolicyVersion *int64
	// Next returns the next task, already checked by itself, and io.EOF after the
	// last. Any other error ends the submission and is returned, wrapped.
	Next func() (*task.Spec, error)
	// BodyHash is called once, after io.EOF, and returns the SHA-256 of the body.
	BodyHash func() []byte
}

// Batch is a set of tasks released together.
type Batch struct {
	ID             uuid.UUID
	RunID          uuid.UUID
	Seq            int64
	IdempotencyKey string
	PolicyVersion  int64
	Tasks          int
	Sessions       int
	// SessionsByClass is what the batch added to A.
	SessionsByClass map[string]int
	CreatedAt       time.Time
}

// BatchID is the id of the batch with that key in that run.
func BatchID(runID uuid.UUID, idempotencyKey string) uuid.UUID {
	return uuid.NewSHA1(runID, []byte("batch:"+idempotencyKey))
}

// SubmitBatch releases a batch: all of it or nothing. If the key was used before
// with the same body, the stored batch is returned and replayed is true; with
// another body the error is ErrIdempotencyMismatch. Other refusals:
// *UnknownClassError, *FieldError (a repeated task id, too many tasks or sessions,
// no tasks at all), ErrRunEnded, ErrNotFound.
func (s *Store) SubmitBatch(ctx context.Context, submission BatchSubmission) (batch Batch, replayed bool, err error) {
	return Batch{}, false, errUnfinished
}

// Batch returns one batch, or ErrNotFound.
func (s *Store) Batch(ctx context.Context, id uuid.UUID) (Batch, error) {
	return Batch{}, errUnfinished
}
