package store

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// Consumer is a reader's place in a run's samples.
type Consumer struct {
	RunID        uuid.UUID
	Name         string
	Delivered    Cursor
	Acknowledged Cursor
	// DeliveredSeq and AcknowledgedSeq are the same places as numbers.
	DeliveredSeq    int64
	AcknowledgedSeq int64
	// StartSeq is where a consumer began that was not to read everything.
	StartSeq int64
	// WholeGroups: the places are in the order of whole groups.
	WholeGroups bool
	UpdatedAt   time.Time
}

const (
	consumerColumns = `
select run_id, consumer, delivered_seq, acked_seq, start_seq, grouped, updated_at from consumers where run_id = $1`

	lockConsumerSQL    = consumerColumns + ` and consumer = $2 for update`
	lockConsumerRowSQL = `select true from consumers where run_id = $1 and consumer = $2 for update`

	// The consumer that has acknowledged most since its start. Of equals it is the one
	// that began first, which has the more to read.
	furthestConsumerSQL = `
select x.consumer, x.grouped, x.start_seq, x.acked_seq from consumers x where x.run_id = $1 order by x.acked_seq - x.start_seq desc, x.start_seq, x.consumer limit 1`

	selectConsumersSQL = consumerColumns + ` order by consumer`

	// $3 and $4 are the old and the new place, $5 whether they count whole groups. A
	// group counts as consumed when the last of it is acknowledged.
	ackSQL = `
with marked as (
    insert into consumer_marks (run_id, consumer, kind, seq, at) values ($1, $2, 'acknowledged', $4, statement_timestamp())
), counted as (
    insert into consumer_classes as c (run_id, consumer, class, consumed)
    select $1, $2, class, n from (
        select class, count(*) as n from samples
        where not $5 and run_id = $1 and seq > $3 and seq <= $4 and status in ('completed', 'truncated') group by class
        union all
        select class, sum(usable) from groups where $5 and run_id = $1 and place > $3 and place <= $4 group by class) usable
    on conflict (run_id, consumer, class) do update set consumed = c.consumed + excluded.consumed
)
update consumers set acked_seq = $4, updated_at = statement_timestamp() where run_id = $1 and consumer = $2
returning updated_at`
)

// Ack records that the consumer has everything up to the cursor. An older cursor
// than the last acknowledged changes nothing. Errors: ErrUnknownCursor (also for
// one beyond what was delivered to that consumer, or of the other order), ErrNotFound.
func (s *Store) Ack(ctx context.Context, runID uuid.UUID, consumer string, cursor Cursor) (Consumer, error) {
	if _, err := cursor.seq(runID, false); err != nil {
		if _, err := cursor.seq(runID, true); err != nil {
			return Consumer{}, err
		}
	}
	var c Consumer
	err := s.write(ctx, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, lockConsumerSQL, runID, consumer)
		if err != nil {
			return err
		}
		if c, err = pgx.CollectExactlyOneRow(rows, scanConsumer); err != nil {
			return err
		}
		seq, err := cursor.seq(runID, c.WholeGroups)
		if err != nil {
			return err
		}
		if seq > c.DeliveredSeq {
			return fmt.Errorf("a cursor beyond what was delivered: %w", ErrUnknownCursor)
		}
		if seq <= c.AcknowledgedSeq {
			return nil
		}
		if err := tx.QueryRow(ctx, ackSQL, runID, consumer, c.AcknowledgedSeq, seq, c.WholeGroups).Scan(&c.UpdatedAt); err != nil {
			return err
		}
		c.AcknowledgedSeq, c.Acknowledged = seq, cursorOf(runID, c.WholeGroups, seq)
		// It may be what a paused run waits for.
		_, err = tx.Exec(ctx, notifySQL, string(DispatchTopic()))
		return err
	})
	if err != nil {
		return Consumer{}, found(err, "acknowledging for consumer", consumer)
	}
	return c, nil
}

func scanConsumer(row pgx.CollectableRow) (Consumer, error) {
	var c Consumer
	if err := row.Scan(&c.RunID, &c.Name, &c.DeliveredSeq, &c.AcknowledgedSeq, &c.StartSeq, &c.WholeGroups, &c.UpdatedAt); err != nil {
		return Consumer{}, err
	}
	c.Delivered, c.Acknowledged = cursorOf(c.RunID, c.WholeGroups, c.DeliveredSeq), cursorOf(c.RunID, c.WholeGroups, c.AcknowledgedSeq)
	return c, nil
}

// RemoveConsumer forgets a reader, whose acknowledgements nobody waits for any longer;
// ErrNotFound if there is none of that name.
func (s *Store) RemoveConsumer(ctx context.Context, runID uuid.UUID, consumer string) error {
	err := s.write(ctx, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, lockConsumerRowSQL, runID, consumer).Scan(new(bool)); err != nil {
			return err
		}
		batch := &pgx.Batch{}
		for _, table := range []string{"consumer_classes", "consumer_marks", "consumers"} {
			batch.Queue(`delete from `+table+` where run_id = $1 and consumer = $2`, runID, consumer)
		}
		notify(batch, DispatchTopic())
		return tx.SendBatch(ctx, batch).Close()
	})
	return found(err, "removing consumer", consumer)
}

// Consumers lists the readers of a run.
func (s *Store) Consumers(ctx context.Context, runID uuid.UUID) ([]Consumer, error) {
	rows, err := s.pool.Query(ctx, selectConsumersSQL, runID)
	if err != nil {
		return nil, fmt.Errorf("listing the consumers of run %s: %w", runID, err)
	}
	consumers, err := pgx.CollectRows(rows, scanConsumer)
	if err != nil {
		return nil, fmt.Errorf("listing the consumers of run %s: %w", runID, err)
	}
	return consumers, nil
}
