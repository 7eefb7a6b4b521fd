package store

import (
	"context"

	"github.com/google/uuid"
)

// Topic is something one can wait for.
type Topic string

// SamplesTopic: a session of the run has ended, so there is a new sample.
func SamplesTopic(runID uuid.UUID) Topic { return Topic("samples:" + runID.String()) }

// DispatchTopic: sessions of some run may be dispatchable (a batch came in, a
// session ended, a contract changed).
func DispatchTopic() Topic { return "dispatch" }

// InstancesTopic: instances or the policy version of the pool changed.
func InstancesTopic(pool string) Topic { return Topic("instances:" + pool) }

// OutboxTopic: there are new messages in the outbox.
func OutboxTopic() Topic { return "outbox" }

// Listener fans one LISTEN connection out to any number of waiters.
type Listener struct{}

// Listen opens a connection of its own and keeps it open, reconnecting when it is
// lost, until ctx ends.
func (s *Store) Listen(ctx context.Context) (*Listener, error) {
	return nil, errUnfinished
}

// WaitFor returns a channel that is closed at the next notification of the topic,
// or when notifications may have been missed. To miss nothing, call it first,
// then look, then wait.
func (l *Listener) WaitFor(topic Topic) <-chan struct{} {
	return nil
}
