package store

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// Audit is everything that is known of a session and its sample, from one snapshot.
type Audit struct {
	Session Session
	// BatchSeq and IdempotencyKey are those of the batch that released it.
	BatchSeq       int64
	IdempotencyKey string
	// Events and Turns are in their order; More: there are more than MaxAuditEntries of
	// either.
	Events []SessionEvent
	Turns  []Turn
	More   bool
	// Deliveries of the sample to every consumer.
	Deliveries []Delivery
	// HistoryPruned: events and turns are gone. TranscriptPruned: the tokens are.
	HistoryPruned, TranscriptPruned bool
}

// MaxAuditEntries bounds the events, and the turns, of one audit.
const MaxAuditEntries = 5_000

const selectAuditSQL = `
select b.seq, b.idempotency_key, coalesce(m.seq <= p.history_seq, false), coalesce(m.seq <= p.transcripts_seq, false)
from sessions s join batches b using (batch_id) join run_pruning p on p.run_id = s.run_id left join samples m using (session_id)
where s.session_id = $1`

// Audit returns the audit of one session in one round trip, or ErrNotFound.
func (s *Store) Audit(ctx context.Context, sessionID uuid.UUID) (Audit, error) {
	var a Audit
	batch := &pgx.Batch{}
	batch.Queue("begin isolation level repeatable read read only")
	batch.Queue(selectSessionSQL, sessionID).Query(func(rows pgx.Rows) (err error) {
		a.Session, err = pgx.CollectExactlyOneRow(rows, scanSession)
		return err
	})
	batch.Queue(selectAuditSQL, sessionID).QueryRow(func(row pgx.Row) error {
		return row.Scan(&a.BatchSeq, &a.IdempotencyKey, &a.HistoryPruned, &a.TranscriptPruned)
	})
	batch.Queue(selectEventsSQL, sessionID, 0, MaxAuditEntries+1).Query(func(rows pgx.Rows) (err error) {
		a.Events, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (SessionEvent, error) {
			e := SessionEvent{SessionID: sessionID}
			err := row.Scan(&e.Seq, &e.At, &e.Kind, &e.Detail)
			return e, err
		})
		return err
	})
	batch.Queue(selectTurnsSQL, sessionID, -1, MaxAuditEntries+1).Query(func(rows pgx.Rows) (err error) {
		a.Turns, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Turn])
		return err
	})
	batch.Queue(selectDeliveriesSQL, sessionID).Query(func(rows pgx.Rows) (err error) {
		a.Deliveries, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Delivery])
		return err
	})
	batch.Queue("commit")
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return Audit{}, fmt.Errorf("reading the audit of session %s: %w", sessionID, err)
	}
	defer conn.Release()
	if err := conn.SendBatch(ctx, batch).Close(); err != nil {
		_, _ = conn.Exec(context.WithoutCancel(ctx), "rollback")
		return Audit{}, found(err, "reading the audit of session", sessionID)
	}
	if len(a.Events) > MaxAuditEntries {
		a.Events, a.More = a.Events[:MaxAuditEntries], true
	}
	if len(a.Turns) > MaxAuditEntries {
		a.Turns, a.More = a.Turns[:MaxAuditEntries], true
	}
	return a, nil
}
