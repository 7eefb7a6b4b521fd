package fleet

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"holdfast/orchestrator/engine"
	"holdfast/router"
	"holdfast/store"
)

const (
	// degradedAfter and blindAfter are failed observations in a row.
	degradedAfter = 2
	blindAfter    = 10
	// observeTimeout bounds one reading of an engine's metrics.
	observeTimeout = 5 * time.Second
)

// member is one instance of the fleet.
type member struct {
	fleet  *Fleet
	id     router.InstanceID
	info   store.Instance
	client engine.Client
	gone   chan struct{}

	mu       sync.Mutex
	up       bool
	draining bool
	sessions map[router.SessionID]*resident
}

// resident is a session whose context an instance has served last, as far as our
// own requests tell.
type resident struct {
	tokens  int64
	running bool
}

func (m *member) isUp() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.up
}

// observe watches the instance until ctx ends or it leaves the registry.
func (m *member) observe(ctx context.Context) error {
	ticker := time.NewTicker(m.fleet.cfg.ObserveInterval)
	defer ticker.Stop()
	failures := 0
	for {
		err := m.look(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			if failures >= degradedAfter {
				m.tell(ctx, &router.ObservabilityChanged{Instance: m.id, State: router.Fresh})
			}
			failures = 0
		default:
			failures++
			m.missed(ctx, failures, err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-m.gone:
			return nil
		case <-ticker.C:
		}
	}
}

// look reads the instance's metrics once and tells the router.
func (m *member) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, observeTimeout)
	defer cancel()
	taken := time.Now().UnixNano()
	metrics, err := m.client.Metrics(ctx)
	if err != nil {
		return err
	}
	m.markUp(ctx)
	snapshot := &router.Snapshot{
		TakenAt: taken, Instance: m.id, Running: metrics.Running, Waiting: metrics.Waiting,
		UsedBlocks:  int64(metrics.KVUsage * float64(m.info.CapacityBlocks)),
		Preemptions: metrics.Preemptions,
	}
	m.mu.Lock()
	for session, r := range m.sessions {
		snapshot.Sessions = append(snapshot.Sessions, router.SnapshotSession{
			Session: session, Tokens: r.tokens, CachedBlocks: -1, Running: r.running,
		})
	}
	m.mu.Unlock()
	m.tell(ctx, snapshot)
	return nil
}

// missed handles a failed observation. A refused connection means that nobody is
// there; anything else may be a busy engine, whose metrics are only stale.
func (m *member) missed(ctx context.Context, failures int, err error) {
	if refused(err) {
		m.markDown(ctx, err)
		return
	}
	switch failures {
	case degradedAfter:
		m.fleet.cfg.Logger.Warn("an engine's metrics are stale", "instance", m.id, "error", err)
		m.tell(ctx, &router.ObservabilityChanged{Instance: m.id, State: router.Degraded})
	case blindAfter:
		m.fleet.cfg.Logger.Error("an engine cannot be observed", "instance", m.id, "error", err)
		m.tell(ctx, &router.ObservabilityChanged{Instance: m.id, State: router.Blind})
	}
}

func (m *member) markUp(ctx context.Context) {
	m.mu.Lock()
	was, draining := m.up, m.draining
	m.up = true
	m.mu.Unlock()
	if was {
		return
	}
	m.fleet.cfg.Logger.Info("an engine answers", "instance", m.id, "url", m.info.URL)
	m.tell(ctx, &router.InstanceJoined{
		Instance: m.id, CapacityBlocks: m.info.CapacityBlocks, BlockTokens: m.info.BlockTokens,
		MaxContextTokens: m.info.MaxContextTokens, MaxRunning: m.info.MaxRunning,
		PrefillTokensPerSecond: m.info.PrefillTokensPerSecond, PolicyVersion: m.info.PolicyVersion,
	})
	if draining {
		m.tell(ctx, &router.InstanceDraining{Instance: m.id, Draining: true})
	}
}

// markDown tells the router that the instance is gone, with its cache. It is told
// also when the instance was never up, since a restored core believes it is.
func (m *member) markDown(ctx context.Context, why error) {
	m.mu.Lock()
	was := m.up
	m.up = false
	clear(m.sessions)
	m.mu.Unlock()
	if was {
		m.fleet.cfg.Logger.Warn("an engine is gone", "instance", m.id, "url", m.info.URL, "reason", why)
	}
	m.tell(ctx, &router.InstanceLeft{Instance: m.id})
}

func (m *member) setDraining(ctx context.Context, draining bool) {
	m.mu.Lock()
	was := m.draining
	m.draining = draining
	m.mu.Unlock()
	if was != draining {
		m.tell(ctx, &router.InstanceDraining{Instance: m.id, Draining: draining})
	}
}

// generate runs one model call and keeps the ledger.
func (m *member) generate(ctx context.Context, session router.SessionID, request engine.Request, onProgress func(engine.Progress)) (engine.Result, error) {
	m.mu.Lock()
	m.sessions[session] = &resident{tokens: int64(len(request.Prompt)), running: true}
	m.mu.Unlock()
	result, err := m.client.Generate(ctx, request, onProgress)
	m.mu.Lock()
	if r := m.sessions[session]; r != nil {
		r.running = false
		r.tokens += int64(len(result.OutputIDs))
	}
	m.mu.Unlock()
	if err != nil && refused(err) {
		m.markDown(ctx, err)
	}
	return result, err
}

func (m *member) forget(session router.SessionID) {
	m.mu.Lock()
	delete(m.sessions, session)
	m.mu.Unlock()
}

// tell feeds the router. When this process has lost the pool, its successor
// observes the instance itself.
func (m *member) tell(ctx context.Context, event router.Event) {
	if err := m.fleet.cfg.Tell(ctx, event); err != nil && ctx.Err() == nil {
		m.fleet.cfg.Logger.Debug("the router was not told", "instance", m.id, "error", err)
	}
}

// refused tells whether nobody listens at the engine's address.
func refused(err error) bool {
	var dns *net.DNSError
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.EHOSTUNREACH) || (errors.As(err, &dns) && dns.IsNotFound)
}
