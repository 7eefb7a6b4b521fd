package store

import (
	"context"
	"encoding/json"
	"time"

	"github.com/google/uuid"
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

// AppendEvents adds entries to sessions' histories. Events of unknown sessions
// are dropped.
func (s *Store) AppendEvents(ctx context.Context, events []SessionEvent) error {
	return errUnfinished
}

// SessionEvents returns entries after the given Seq (0 for the first page), in
// order; limit is at most 1,000. An unknown session is ErrNotFound.
func (s *Store) SessionEvents(ctx context.Context, sessionID uuid.UUID, after int64, limit int) (EventPage, error) {
	return EventPage{}, errUnfinished
}
