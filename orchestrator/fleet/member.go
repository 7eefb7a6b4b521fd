package fleet

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/kvevents"
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
	fleet *Fleet
	id    router.InstanceID
	// client is the breaker, before the engine's own.
	client   engine.Client
	breaker  *engine.Breaker
	gone     chan struct{}
	receipts receipts
	// events is nil where the instance does not publish any.
	events *kvevents.Subscriber

	mu       sync.Mutex
	info     store.Instance
	up       bool
	draining bool
	// state is what the router was told last; prompted is the engine's total of prompt tokens then.
	state    router.Observability
	prompted int64
	// retell: the router has forgotten what the instance caches since the event source told it.
	retell   bool
	sessions map[router.SessionID]*resident
}

// resident is a session whose context an instance has served last, as far as our
// own requests tell.
type resident struct {
	tokens  int64
	running bool
}

// described is the instance as the registry has it.
func (m *member) described() store.Instance {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.info
}

// announce takes in what the registry says anew, and tells the router if that
// concerns it.
func (m *member) announce(ctx context.Context, info store.Instance) {
	m.mu.Lock()
	before, up := m.info, m.up
	m.info = info
	m.mu.Unlock()
	if up && joined(&before) != joined(&info) {
		event := joined(&info)
		m.tell(ctx, &event)
	}
}

// joined is how an instance is announced to the router.
func joined(info *store.Instance) router.InstanceJoined {
	return router.InstanceJoined{
		Instance: router.InstanceID(info.ID), CapacityBlocks: info.CapacityBlocks, BlockTokens: info.BlockTokens,
		MaxContextTokens: info.MaxContextTokens, MaxRunning: info.MaxRunning,
		PrefillTokensPerSecond: info.PrefillTokensPerSecond, PolicyVersion: info.PolicyVersion,
	}
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

// look reads the instance's metrics once and tells the router. An engine without
// metrics is only asked whether it is well, and counts as blind: the router then
// goes by its own ledger.
func (m *member) look(ctx context.Context) error {
	if m.breaker.Stats().State == engine.BreakerOpen {
		return engine.ErrBreakerOpen
	}
	ctx, cancel := context.WithTimeout(ctx, observeTimeout)
	defer cancel()
	taken := time.Now().UnixNano()
	metrics, err := m.client.Metrics(ctx)
	if errors.Is(err, engine.ErrNoMetrics) {
		if err := m.client.Health(ctx); err != nil {
			return err
		}
		m.markUp(ctx)
		m.observed(ctx, router.Blind)
		return nil
	}
	if err != nil {
		return err
	}
	m.markUp(ctx)
	m.retellCache(ctx)
	m.noticeRestart(ctx, metrics.PromptTokens)
	m.observed(ctx, router.Fresh)
	snapshot := &router.Snapshot{
		TakenAt: taken, Instance: m.id, Running: metrics.Running, Waiting: metrics.Waiting,
		Preemptions: metrics.Preemptions,
	}
	m.mu.Lock()
	snapshot.UsedBlocks = int64(metrics.KVUsage * float64(m.info.CapacityBlocks))
	for session, r := range m.sessions {
		snapshot.Sessions = append(snapshot.Sessions, router.SnapshotSession{
			Session: session, Tokens: r.tokens, CachedBlocks: -1, Running: r.running,
		})
	}
	m.mu.Unlock()
	m.tell(ctx, snapshot)
	return nil
}

// observed tells the router when it becomes known more or less of the instance.
func (m *member) observed(ctx context.Context, state router.Observability) {
	m.mu.Lock()
	was := m.state
	m.state = state
	m.mu.Unlock()
	if was != state {
		m.tell(ctx, &router.ObservabilityChanged{Instance: m.id, State: state})
	}
}

// noticeRestart tells the router of an engine that came back between two looks: a
// total that runs backwards belongs to a new process with an empty cache.
func (m *member) noticeRestart(ctx context.Context, promptTokens int64) {
	m.mu.Lock()
	restarted := promptTokens < m.prompted
	m.prompted = promptTokens
	version := m.info.PolicyVersion
	m.mu.Unlock()
	if restarted {
		m.fleet.cfg.Logger.Warn("an engine was restarted in place: its cache is empty", "instance", m.id)
		m.tell(ctx, &router.InstanceReset{Instance: m.id, PolicyVersion: version})
	}
}

// missed handles a failed observation. A refused connection means that nobody is
// there; anything else may be a busy engine, whose metrics are only stale.
func (m *member) missed(ctx context.Context, failures int, err error) {
	if refused(err) || errors.Is(err, engine.ErrBreakerOpen) {
		m.markDown(ctx, err)
		return
	}
	switch failures {
	case degradedAfter:
		m.fleet.cfg.Logger.Warn("an engine's metrics are stale", "instance", m.id, "error", err)
		m.observed(ctx, router.Degraded)
	case blindAfter:
		m.fleet.cfg.Logger.Error("an engine cannot be observed", "instance", m.id, "error", err)
		m.observed(ctx, router.Blind)
	}
}

func (m *member) markUp(ctx context.Context) {
	m.mu.Lock()
	if m.breaker.Stats().State == engine.BreakerOpen {
		// It opened while the metrics were read; who opened it takes the instance down.
		m.mu.Unlock()
		return
	}
	was, draining, info := m.up, m.draining, m.info
	m.up, m.retell = true, m.retell || !m.up
	m.mu.Unlock()
	if was {
		return
	}
	m.fleet.cfg.Logger.Info("an engine answers", "instance", m.id, "url", info.URL)
	event := joined(&info)
	m.tell(ctx, &event)
	if draining {
		m.tell(ctx, &router.InstanceDraining{Instance: m.id, Draining: true})
	}
}

// markDown tells the router that the instance is gone, with its cache. It is told
// also when the instance was never up, since a restored core believes it is.
func (m *member) markDown(ctx context.Context, why error) {
	m.mu.Lock()
	was, url := m.up, m.info.URL
	m.up, m.state, m.prompted = false, router.Fresh, 0
	clear(m.sessions)
	m.mu.Unlock()
	if was {
		m.fleet.cfg.Logger.Warn("an engine is gone", "instance", m.id, "url", url, "reason", why)
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
	if err != nil && (refused(err) || m.breaker.Stats().State == engine.BreakerOpen) {
		// The router is told that it is gone: of an engine that fails whatever it is
		// asked nobody should wait for an answer. It joins again to be tried once.
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
