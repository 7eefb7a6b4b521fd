package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Transactions take their locks in one order, so that they never wait for each
// other in a circle: pool owner, then the run's counters (and with them its
// classes and batches), then sessions by ascending id, then everything else.

// write runs do in a read committed transaction.
func (s *Store) write(ctx context.Context, do func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, s.pool, do)
}

// writeInTwoTrips runs a transaction of two batches, the second made from what the
// first has read, in two round trips: begin and commit travel with them. It is
// for what happens at every turn.
func (s *Store) writeInTwoTrips(ctx context.Context, first *pgx.Batch, then func() (*pgx.Batch, error)) error {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	begin := &pgx.Batch{}
	begin.Queue("begin")
	begin.QueuedQueries = append(begin.QueuedQueries, first.QueuedQueries...)
	err = conn.SendBatch(ctx, begin).Close()
	if err == nil {
		var second *pgx.Batch
		if second, err = then(); err == nil {
			second.Queue("commit")
			err = conn.SendBatch(ctx, second).Close()
		}
	}
	if err != nil {
		// If this fails as well the pool closes the connection, which rolls back.
		_, _ = conn.Exec(context.WithoutCancel(ctx), "rollback")
	}
	return err
}

// read runs do on one snapshot.
func (s *Store) read(ctx context.Context, do func(pgx.Tx) error) error {
	options := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}
	return pgx.BeginTxFunc(ctx, s.pool, options, do)
}

// queryer is what a pool and a transaction have in common for reading.
type queryer interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// found turns "no rows" into ErrNotFound about the subject, and adds what was
// being done to any other error.
func found(err error, doing string, subject any) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("%s %v: %w", doing, subject, ErrNotFound)
	}
	return fmt.Errorf("%s %v: %w", doing, subject, err)
}

// violates tells whether err is the violation of the named constraint.
func violates(err error, constraint string) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.ConstraintName == constraint
}

// pageLimit applies a page's default and maximum.
func pageLimit(limit int) int {
	const defaultLimit, maxLimit = 100, 1_000
	if limit <= 0 {
		return defaultLimit
	}
	return min(limit, maxLimit)
}

// notifySQL wakes waiters of a topic when the transaction commits.
const notifySQL = `select pg_notify('holdfast', $1)`

func notify(batch *pgx.Batch, topic Topic) { batch.Queue(notifySQL, string(topic)) }
