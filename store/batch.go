package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"holdfast/workflows/task"
)

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

const (
	// Two submissions with one key take turns; the second then finds the batch of
	// the first, or nothing if it failed.
	lockKeySQL = `select pg_advisory_xact_lock(hashtextextended($1, 0))`

	batchColumns = `
select batch_id, run_id, seq, idempotency_key, policy_version, tasks, sessions, classes, created_at, body_sha256 from batches`

	selectBatchSQL = batchColumns + ` where batch_id = $1`

	selectBatchesSQL = batchColumns + ` where run_id = $1 and seq > $2 order by seq limit $3`

	insertBatchSQL = `
insert into batches (batch_id, pool, run_id, seq, idempotency_key, body_sha256, policy_version, tasks, sessions, classes, queued, created_at)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $9, $11)`

	countReleasedSQL = `
update run_counters set batch_seq = $2, released = released + $3, queued = queued + $3 where run_id = $1`

	countReleasedClassSQL = `
update class_counters set released = released + $3, queued = queued + $3, backlog = backlog + $3 where run_id = $1 and class = $2`
)

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
	key := submission.IdempotencyKey
	if key == "" || len(key) > MaxIdempotencyKeyBytes || cleanText(key) != key {
		return Batch{}, false, &FieldError{Path: "idempotency_key", Problem: fmt.Sprintf("must be 1 to %d bytes of text", MaxIdempotencyKeyBytes)}
	}
	id := BatchID(submission.RunID, key)
	err = s.write(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, lockKeySQL, id.String()); err != nil {
			return err
		}
		stored, hash, err := readBatch(ctx, tx, id)
		if err == nil {
			batch, replayed = stored, true
			return compareBody(submission, hash)
		}
		if !errors.Is(err, ErrNotFound) {
			return err
		}
		r := release{tx: tx, submission: submission, batchID: id}
		batch, err = r.run(ctx)
		return err
	})
	if err != nil {
		return Batch{}, false, fmt.Errorf("submitting a batch to run %s: %w", submission.RunID, err)
	}
	return batch, replayed, nil
}

// compareBody reads a repeated submission to its end and compares its hash.
func compareBody(submission BatchSubmission, storedHash []byte) error {
	for {
		_, err := submission.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	if !bytes.Equal(submission.BodyHash(), storedHash) {
		return ErrIdempotencyMismatch
	}
	return nil
}

// Batch returns one batch, or ErrNotFound.
func (s *Store) Batch(ctx context.Context, id uuid.UUID) (Batch, error) {
	batch, _, err := readBatch(ctx, s.pool, id)
	return batch, err
}

// Batches lists the batches of a run after the given Seq (0 for the first page),
// in order of release; limit is at most 1,000.
func (s *Store) Batches(ctx context.Context, runID uuid.UUID, after int64, limit int) ([]Batch, error) {
	rows, err := s.pool.Query(ctx, selectBatchesSQL, runID, after, pageLimit(limit))
	if err != nil {
		return nil, fmt.Errorf("listing the batches of run %s: %w", runID, err)
	}
	batches, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Batch, error) {
		batch, _, err := scanBatch(row)
		return batch, err
	})
	if err != nil {
		return nil, fmt.Errorf("listing the batches of run %s: %w", runID, err)
	}
	return batches, nil
}

func readBatch(ctx context.Context, from queryer, id uuid.UUID) (Batch, []byte, error) {
	batch, hash, err := scanBatch(from.QueryRow(ctx, selectBatchSQL, id))
	return batch, hash, found(err, "reading batch", id)
}

func scanBatch(row pgx.Row) (batch Batch, hash []byte, err error) {
	err = row.Scan(&batch.ID, &batch.RunID, &batch.Seq, &batch.IdempotencyKey, &batch.PolicyVersion,
		&batch.Tasks, &batch.Sessions, &batch.SessionsByClass, &batch.CreatedAt, &hash)
	return batch, hash, err
}
