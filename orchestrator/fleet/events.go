package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/kvevents"
	"holdfast/router"
	"holdfast/store"
)

// errNotJoined makes the event stream tell everything anew once the router knows
// the instance.
var errNotJoined = errors.New("the router does not know the instance at present")

// subscribe prepares to follow what the instance tells of its KV cache.
func (m *member) subscribe(in *store.Instance) error {
	dialect := kvevents.VLLM
	if in.Kind == "sglang" {
		dialect = kvevents.SGLang
	}
	var err error
	m.events, err = kvevents.New(kvevents.Config{
		Instance: m.id, Endpoint: in.KVEvents.Endpoint, Bind: in.KVEvents.Bind, ReplayEndpoint: in.KVEvents.ReplayEndpoint,
		Topic: in.KVEvents.Topic, Dialect: dialect, BlockTokens: in.BlockTokens, Ranks: in.Ranks,
		PolicyVersion: func() int64 { return m.described().PolicyVersion },
		Tell: func(ctx context.Context, event router.Event) error {
			if !m.isUp() {
				return errNotJoined
			}
			return m.fleet.cfg.Tell(ctx, event)
		},
		Logger: m.fleet.cfg.Logger,
	})
	if err != nil {
		return fmt.Errorf("following the KV events of %s: %w", in.ID, err)
	}
	return nil
}

// listen follows the event stream until ctx ends or the instance leaves the registry.
func (m *member) listen(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- m.events.Run(ctx) }()
	select {
	case <-m.gone:
		cancel()
		<-ended
		return nil
	case err := <-ended:
		return err
	}
}

// retellCache tells the router again what the instance caches, after it had left
// and joined. That waits for an event stream that is whole, so that blocks which a
// restart has cost are not told of.
func (m *member) retellCache(ctx context.Context) {
	m.mu.Lock()
	owed := m.retell
	m.mu.Unlock()
	if !owed || m.events == nil || !m.events.Health().Trusted {
		return
	}
	if m.events.Retell(ctx) == nil {
		m.mu.Lock()
		m.retell = false
		m.mu.Unlock()
	}
}

// Status is what the fleet sees of one instance.
type Status struct {
	Instance router.InstanceID
	// Up: it answered when it was last asked.
	Up    bool
	State router.Observability
	// Sessions are those whose context the instance has served last; Running of them
	// are in a model call.
	Sessions, Running int
	// Breaker is what the circuit breaker before the engine has done.
	Breaker engine.BreakerStats
	// Events is nil where the instance does not tell what it caches.
	Events   *kvevents.Health
	Receipts Receipts
}

// Statuses lists all instances, in order of their ids.
func (f *Fleet) Statuses() []Status {
	var list []Status
	for _, m := range f.all() {
		s := Status{Instance: m.id, Breaker: m.breaker.Stats(), Receipts: m.receipts.look()}
		m.mu.Lock()
		s.Up, s.State, s.Sessions = m.up, m.state, len(m.sessions)
		for _, r := range m.sessions {
			if r.running {
				s.Running++
			}
		}
		m.mu.Unlock()
		if m.events != nil {
			health := m.events.Health()
			s.Events = &health
		}
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b Status) int { return cmp.Compare(a.Instance, b.Instance) })
	return list
}
