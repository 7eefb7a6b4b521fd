package store

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
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
	// OutboxFinish tells the workflow that the harness has asked for the end.
	OutboxFinish OutboxKind = "finish"
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

const (
	claimOutboxSQL = `
with due as (
    select id from outbox where next_at <= statement_timestamp() order by next_at, id limit $1 for update skip locked
), claimed as (
    update outbox o set attempts = o.attempts + 1, next_at = statement_timestamp() + make_interval(secs => $2)
    from due where o.id = due.id
    returning o.id, o.kind, o.session_id, o.run_id, o.pool, coalesce(o.turn, 0), coalesce(o.reason, ''), o.attempts, o.created_at
)
select * from claimed order by id`

	finishOutboxSQL = `delete from outbox where id = any($1)`

	retryOutboxSQL = `
update outbox set next_at = statement_timestamp() + make_interval(secs => $2), problem = $3 where id = $1`

	nextOutboxDueSQL = `select next_at from outbox order by next_at, id limit 1`
)

// ClaimOutbox returns due messages, oldest first, and hides them from other
// claimants for leaseSeconds; what is neither finished nor retried by then is due
// again.
func (s *Store) ClaimOutbox(ctx context.Context, limit int, leaseSeconds float64) ([]OutboxRow, error) {
	rows, err := s.pool.Query(ctx, claimOutboxSQL, limit, leaseSeconds)
	if err != nil {
		return nil, fmt.Errorf("claiming outbox messages: %w", err)
	}
	claimed, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (r OutboxRow, err error) {
		err = row.Scan(&r.ID, &r.Kind, &r.SessionID, &r.RunID, &r.Pool, &r.Turn, &r.Reason, &r.Attempts, &r.CreatedAt)
		return r, err
	})
	if err != nil {
		return nil, fmt.Errorf("claiming outbox messages: %w", err)
	}
	return claimed, nil
}

// FinishOutbox removes delivered messages. Unknown ids are ignored.
func (s *Store) FinishOutbox(ctx context.Context, ids []int64) error {
	if _, err := s.pool.Exec(ctx, finishOutboxSQL, ids); err != nil {
		return fmt.Errorf("finishing outbox messages: %w", err)
	}
	return nil
}

// RetryOutbox makes a claimed message due again in delaySeconds and keeps why.
func (s *Store) RetryOutbox(ctx context.Context, id int64, delaySeconds float64, problem string) error {
	if _, err := s.pool.Exec(ctx, retryOutboxSQL, id, delaySeconds, cleanText(problem)); err != nil {
		return fmt.Errorf("putting back outbox message %d: %w", id, err)
	}
	return nil
}

// NextOutboxDue returns when the next message falls due, claimed ones included;
// ok is false when there is none.
func (s *Store) NextOutboxDue(ctx context.Context) (due time.Time, ok bool, err error) {
	err = s.pool.QueryRow(ctx, nextOutboxDueSQL).Scan(&due)
	if err == pgx.ErrNoRows {
		return time.Time{}, false, nil
	}
	if err != nil {
		return time.Time{}, false, fmt.Errorf("reading when the outbox is due: %w", err)
	}
	return due, true, nil
}
