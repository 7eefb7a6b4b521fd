package store

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
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

const (
	firstReconnectWait = 50 * time.Millisecond
	maxReconnectWait   = 5 * time.Second
)

// Listener fans one LISTEN connection out to any number of waiters.
type Listener struct {
	mu sync.Mutex
	// waiting holds one channel per topic that someone waits for. It is closed and
	// forgotten at the topic's next notification, so that the map stays as small
	// as the set of topics waited for.
	waiting map[Topic]chan struct{}
}

// Listen opens a connection of its own and keeps it open, reconnecting when it is
// lost, until ctx ends.
func (s *Store) Listen(ctx context.Context) (*Listener, error) {
	conn, err := s.openListening(ctx)
	if err != nil {
		return nil, err
	}
	l := &Listener{waiting: map[Topic]chan struct{}{}}
	go s.keepListening(ctx, l, conn)
	return l, nil
}

func (s *Store) openListening(ctx context.Context) (*pgx.Conn, error) {
	conn, err := pgx.ConnectConfig(ctx, s.pool.Config().ConnConfig)
	if err != nil {
		return nil, fmt.Errorf("opening the listening connection: %w", err)
	}
	if _, err := conn.Exec(ctx, "listen holdfast"); err != nil {
		closeQuietly(conn)
		return nil, fmt.Errorf("listening: %w", err)
	}
	return conn, nil
}

// closeQuietly closes a connection of which nothing more is expected.
func closeQuietly(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}

func (s *Store) keepListening(ctx context.Context, l *Listener, conn *pgx.Conn) {
	wait := firstReconnectWait
	for {
		if conn != nil {
			err := l.forward(ctx, conn)
			closeQuietly(conn)
			conn = nil
			if ctx.Err() == nil {
				s.log.Warn("the listening connection was lost; reconnecting", "error", err)
			}
		}
		select {
		case <-ctx.Done():
			l.wakeAll()
			return
		case <-time.After(wait):
		}
		reconnected, err := s.openListening(ctx)
		if err != nil {
			wait = min(2*wait, maxReconnectWait)
			continue
		}
		conn, wait = reconnected, firstReconnectWait
		// Whatever was notified while nobody listened is unknown: let all look.
		l.wakeAll()
	}
}

// forward wakes waiters until the connection is lost.
func (l *Listener) forward(ctx context.Context, conn *pgx.Conn) error {
	for {
		notification, err := conn.WaitForNotification(ctx)
		if err != nil {
			return err
		}
		l.wake(Topic(notification.Payload))
	}
}

func (l *Listener) wake(topic Topic) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if waiting, ok := l.waiting[topic]; ok {
		close(waiting)
		delete(l.waiting, topic)
	}
}

func (l *Listener) wakeAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for topic, waiting := range l.waiting {
		close(waiting)
		delete(l.waiting, topic)
	}
}

// WaitFor returns a channel that is closed at the next notification of the topic,
// or when notifications may have been missed. To miss nothing, call it first,
// then look, then wait.
func (l *Listener) WaitFor(topic Topic) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	waiting, ok := l.waiting[topic]
	if !ok {
		waiting = make(chan struct{})
		l.waiting[topic] = waiting
	}
	return waiting
}
