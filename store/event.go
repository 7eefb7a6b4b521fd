package store

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// EventKind is the closed set of entries in a session's history.
type EventKind string

// Event kinds. Turns appear among the events of a session without being stored
// twice.
const (
	EventReleased        EventKind = "released"
	EventDispatched      EventKind = "dispatched"
	EventHeld            EventKind = "held"
	EventAdmitted        EventKind = "admitted"
	EventProtectionEnded EventKind = "protection_ended"
	EventTurn            EventKind = "turn"
	EventTool            EventKind = "tool"
	EventRetry           EventKind = "retry"
	EventScored          EventKind = "scored"
	EventCancelRequested EventKind = "cancel_requested"
	EventRestarted       EventKind = "restarted"
	EventEnded           EventKind = "ended"
)

// SessionEvent is one entry of a session's history.
type SessionEvent struct {
	SessionID uuid.UUID
	// Seq counts from 1 within the session, without gaps; AppendEvents sets it.
	Seq    int64
	At     time.Time
	Kind   EventKind
	Detail json.RawMessage
}

// Delivery tells when a consumer was first given a session's sample, and when it
// acknowledged it.
type Delivery struct {
	Consumer       string
	DeliveredAt    *time.Time
	AcknowledgedAt *time.Time
}

// EventPage is a piece of a session's history.
type EventPage struct {
	Events []SessionEvent
	// More: there are events after the last of Events.
	More bool
	// Deliveries of the sample to every consumer, whatever the page.
	Deliveries []Delivery
}

// maxDetailBytes bounds the detail of one event.
const maxDetailBytes = 64 << 10

const (
	// Draws consecutive numbers of a session's history under its lock.
	drawEventSeqSQL = `
update sessions set event_seq = event_seq + $2 where session_id = $1 returning event_seq, run_id`

	// A turn stands in the history at the place it drew; see CommitTurn.
	selectEventsSQL = `
select seq, at, kind, detail from (
    select seq, at, kind, detail from session_events where session_id = $1 and seq > $2
    union all
    select event_seq, committed_at, 'turn', json_build_object(
               'turn', turn, 'instance', instance, 'policy_version', policy_version, 'prompt_tokens', prompt_tokens,
               'predicted_cached_tokens', predicted_cached_tokens, 'cached_tokens', cached_tokens, 'output_tokens', output_tokens,
               'tool_seconds', tool_seconds, 'total_seconds', total_seconds, 'finish_reason', finish_reason, 'attempts', attempts)
    from turns where session_id = $1 and event_seq > $2
) history order by seq limit $3`

	// The first mark at or beyond the sample tells when it was passed.
	selectDeliveriesSQL = `
select c.consumer,
       (select min(m.at) from consumer_marks m where m.run_id = c.run_id and m.consumer = c.consumer and m.kind = 'delivered' and m.seq >= p.place),
       (select min(m.at) from consumer_marks m where m.run_id = c.run_id and m.consumer = c.consumer and m.kind = 'acknowledged' and m.seq >= p.place)
from samples s join sessions x using (session_id) join consumers c on c.run_id = s.run_id left join groups g on g.group_id = x.task_id,
lateral (select case when c.grouped then g.place - g.members + 1 + x.member else s.seq end as place) p
where s.session_id = $1 and c.delivered_seq >= p.place and c.start_seq < p.place order by c.consumer`

	sessionExistsSQL = `select exists (select from sessions where session_id = $1)`
)

// eventRows collects events for insertEventsSQL.
type eventRows struct {
	sessions []uuid.UUID
	seqs     []int64
	runs     []uuid.UUID
	times    []time.Time
	kinds    []string
	details  []*string
}

func (r *eventRows) add(e SessionEvent, runID uuid.UUID) {
	r.sessions = append(r.sessions, e.SessionID)
	r.seqs = append(r.seqs, e.Seq)
	r.runs = append(r.runs, runID)
	r.times = append(r.times, e.At)
	r.kinds = append(r.kinds, string(e.Kind))
	var detail *string
	if len(e.Detail) > 0 {
		text := string(e.Detail)
		detail = &text
	}
	r.details = append(r.details, detail)
}

func (r *eventRows) queue(batch *pgx.Batch) {
	if len(r.seqs) > 0 {
		batch.Queue(insertEventsSQL, r.sessions, r.seqs, r.runs, r.times, r.kinds, r.details)
	}
}

// AppendEvents adds entries to sessions' histories, each session's in the order
// given. Events of unknown sessions are dropped. A kind that the store writes
// itself and a detail that is no JSON of at most 64 KiB are *FieldError.
func (s *Store) AppendEvents(ctx context.Context, events []SessionEvent) error {
	bySession := map[uuid.UUID][]SessionEvent{}
	for i, e := range events {
		path := fmt.Sprintf("events[%d]", i)
		switch e.Kind {
		case EventTool, EventRetry, EventScored:
		default:
			return &FieldError{Path: path + ".kind", Problem: fmt.Sprintf("must be tool, retry or scored, is %q", e.Kind)}
		}
		if err := checkDetail(path+".detail", e.Detail); err != nil {
			return err
		}
		bySession[e.SessionID] = append(bySession[e.SessionID], e)
	}
	ids := make([]uuid.UUID, 0, len(bySession))
	for id := range bySession {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b uuid.UUID) int { return bytes.Compare(a[:], b[:]) })
	err := s.write(ctx, func(tx pgx.Tx) error {
		var rows eventRows
		draw := &pgx.Batch{}
		for _, id := range ids {
			entries := bySession[id]
			draw.Queue(drawEventSeqSQL, id, len(entries)).Query(func(found pgx.Rows) error {
				for found.Next() {
					var last int64
					var runID uuid.UUID
					if err := found.Scan(&last, &runID); err != nil {
						return err
					}
					for i, e := range entries {
						e.Seq = last - int64(len(entries)-1-i)
						rows.add(e, runID)
					}
				}
				return found.Err()
			})
		}
		if err := tx.SendBatch(ctx, draw).Close(); err != nil {
			return err
		}
		insert := &pgx.Batch{}
		rows.queue(insert)
		return tx.SendBatch(ctx, insert).Close()
	})
	if err != nil {
		return fmt.Errorf("appending %d session events: %w", len(events), err)
	}
	return nil
}

// checkDetail refuses what a json column would not take.
func checkDetail(path string, detail json.RawMessage) error {
	if len(detail) > maxDetailBytes {
		return &FieldError{Path: path, Problem: fmt.Sprintf("must be at most %d bytes, is %d", maxDetailBytes, len(detail))}
	}
	if len(detail) > 0 && (!json.Valid(detail) || !utf8.Valid(detail)) {
		return &FieldError{Path: path, Problem: "must be JSON in UTF-8"}
	}
	return nil
}

// SessionEvents returns entries after the given Seq (0 for the first page), in
// order; limit is at most 1,000. An unknown session is ErrNotFound.
func (s *Store) SessionEvents(ctx context.Context, sessionID uuid.UUID, after int64, limit int) (EventPage, error) {
	limit = pageLimit(limit)
	var page EventPage
	err := s.read(ctx, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, selectEventsSQL, sessionID, after, limit+1)
		if err != nil {
			return err
		}
		page.Events, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (SessionEvent, error) {
			e := SessionEvent{SessionID: sessionID}
			err := row.Scan(&e.Seq, &e.At, &e.Kind, &e.Detail)
			return e, err
		})
		if err != nil {
			return err
		}
		if len(page.Events) == 0 {
			if err := sessionMustExist(ctx, tx, sessionID); err != nil {
				return err
			}
		}
		rows, err = tx.Query(ctx, selectDeliveriesSQL, sessionID)
		if err != nil {
			return err
		}
		page.Deliveries, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Delivery])
		return err
	})
	if err != nil {
		return EventPage{}, found(err, "reading the events of session", sessionID)
	}
	if len(page.Events) > limit {
		page.Events, page.More = page.Events[:limit], true
	}
	return page, nil
}

// sessionMustExist returns pgx.ErrNoRows for an unknown session.
func sessionMustExist(ctx context.Context, from queryer, id uuid.UUID) error {
	var exists bool
	if err := from.QueryRow(ctx, sessionExistsSQL, id).Scan(&exists); err != nil {
		return err
	}
	if !exists {
		return pgx.ErrNoRows
	}
	return nil
}
