package store

import (
	"context"
	"time"

	"github.com/google/uuid"

	"holdfast/router"
)

// DecisionRecord is one decision of a pool's router, to be made durable before
// anyone acts on it.
type DecisionRecord struct {
	router.Decision
	// Signal asks for an outbox message with an Admit: the session's workflow is
	// not waiting for the answer of a call.
	Signal bool
}

// RecordDecisions makes decisions durable in one transaction, in their order.
//
// Decision times are Unix nanoseconds. An Admit makes the session active at its
// instance and grants the turn; a Hold makes it held (a repeated Hold with the
// same reason writes nothing); ProtectionEnded withdraws instance and grant;
// CapChanged goes to the pool's router events. Each leaves an event with its
// numbers. Decisions about sessions that have ended meanwhile are dropped. If
// epoch is not the pool's current one, nothing is written and the error is
// ErrFenced.
func (s *Store) RecordDecisions(ctx context.Context, pool string, epoch int64, records []DecisionRecord) error {
	return errUnfinished
}

// Grant is the permission to run one turn at one instance.
type Grant struct {
	SessionID uuid.UUID
	Turn      int
	Instance  string
	// URL and Kind are those of the instance.
	URL  string
	Kind string
	// Epoch is the ownership under which the grant was given.
	Epoch int64
	// PolicyVersion is the instance's as last announced.
	PolicyVersion         int64
	PredictedCachedTokens int64
	GrantedAt             time.Time
}

// Grant returns the grant of that turn; ok is false while there is none.
func (s *Store) Grant(ctx context.Context, sessionID uuid.UUID, turn int) (grant Grant, ok bool, err error) {
	return Grant{}, false, errUnfinished
}

// RouterEvent is a decision that concerns an instance and no session.
type RouterEvent struct {
	Seq      int64
	At       time.Time
	Kind     string
	Reason   string
	Instance string
	Detail   []byte
}

// RouterEvents returns the pool's latest router events, newest first; limit is at
// most 1,000.
func (s *Store) RouterEvents(ctx context.Context, pool string, limit int) ([]RouterEvent, error) {
	return nil, errUnfinished
}
