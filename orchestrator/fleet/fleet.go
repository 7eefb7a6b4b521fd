// Package fleet keeps touch with the engines of one pool: which are registered,
// which answer, how loaded they are, and which sessions they have served.
//
// It observes and carries model calls; it decides nothing. What it sees it tells
// the router as events, and an engine that does not answer is told at once, so
// that turns are held or placed elsewhere instead of failing one by one.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"holdfast/orchestrator/engine"
	"holdfast/router"
	"holdfast/store"
)

// Registry lists the pool's instances.
type Registry interface {
	Instances(ctx context.Context, pool string) ([]store.Instance, error)
}

// Config sets up a Fleet.
type Config struct {
	Pool     string
	Registry Registry
	// Changed returns a channel that is closed when the registry changes.
	Changed func() <-chan struct{}
	// Tell feeds the router.
	Tell func(ctx context.Context, event router.Event) error
	// NewClient connects to an engine of that kind; it does not call it yet.
	NewClient func(kind, url string) (engine.Client, error)
	// Breaker is when an engine that keeps failing is left alone; zero means the defaults.
	Breaker engine.BreakerConfig
	// ObserveInterval is how often each engine's metrics are read.
	ObserveInterval time.Duration
	Logger          *slog.Logger
}

// registryInterval bounds how late a missed notification of the registry, or an
// instance whose time to live has run out, is noticed.
const registryInterval = 2 * time.Second

// Fleet is safe for concurrent use. Run it once.
type Fleet struct {
	cfg     Config
	mu      sync.RWMutex
	members map[router.InstanceID]*member
}

// New returns a fleet that has not started.
func New(cfg Config) (*Fleet, error) {
	if cfg.Registry == nil || cfg.Changed == nil || cfg.Tell == nil || cfg.NewClient == nil || cfg.Logger == nil {
		return nil, errors.New("fleet: registry, change channel, router, client factory and logger are required")
	}
	if cfg.ObserveInterval <= 0 {
		return nil, errors.New("fleet: the observe interval must be positive")
	}
	return &Fleet{cfg: cfg, members: make(map[router.InstanceID]*member)}, nil
}

// Run follows the registry until ctx ends.
func (f *Fleet) Run(ctx context.Context) error {
	observers, ctx := errgroup.WithContext(ctx)
	observers.Go(func() error {
		for {
			changed := f.cfg.Changed()
			if err := f.follow(ctx, observers); err != nil && ctx.Err() == nil {
				f.cfg.Logger.Warn("reading the instance registry failed, trying again", "error", err)
			}
			timer := time.NewTimer(registryInterval)
			select {
			case <-ctx.Done():
				timer.Stop()
				return ctx.Err()
			case <-changed:
			case <-timer.C:
			}
			timer.Stop()
		}
	})
	return observers.Wait()
}

// follow brings the members in line with the registry.
func (f *Fleet) follow(ctx context.Context, observers *errgroup.Group) error {
	listed, err := f.cfg.Registry.Instances(ctx, f.cfg.Pool)
	if err != nil {
		return err
	}
	present := make(map[router.InstanceID]bool, len(listed))
	for _, in := range listed {
		id := router.InstanceID(in.ID)
		present[id] = !in.Expired
		m := f.member(id)
		if m != nil && (in.Expired || elsewhere(m.described(), in)) {
			f.remove(ctx, m)
			m = nil
		}
		if m == nil && !in.Expired {
			if m, err = f.add(in); err != nil {
				f.cfg.Logger.Error("an instance cannot be used", "instance", in.ID, "error", err)
				continue
			}
			observers.Go(func() error { return m.observe(ctx) })
			if m.events != nil {
				observers.Go(func() error { return m.listen(ctx) })
			}
		}
		if m != nil {
			m.announce(ctx, in)
			m.setDraining(ctx, in.State == store.InstanceDraining)
		}
	}
	for _, m := range f.all() {
		if !present[m.id] {
			f.remove(ctx, m)
		}
	}
	return nil
}

// elsewhere tells whether an instance must be connected to anew.
func elsewhere(was, is store.Instance) bool {
	return was.URL != is.URL || was.Kind != is.Kind || was.KVEvents != is.KVEvents || was.Ranks != is.Ranks || was.BlockTokens != is.BlockTokens
}

func (f *Fleet) add(in store.Instance) (*member, error) {
	client, err := f.cfg.NewClient(in.Kind, in.URL)
	if err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", in.URL, err)
	}
	settings := f.cfg.Breaker
	settings.Changed = func(from, to engine.BreakerState) {
		f.cfg.Logger.Warn("an engine's circuit breaker changed", "instance", in.ID, "from", from.String(), "to", to.String())
	}
	breaker, err := engine.NewBreaker(client, settings)
	if err != nil {
		return nil, err
	}
	m := &member{
		fleet: f, id: router.InstanceID(in.ID), info: in, client: breaker, breaker: breaker,
		gone: make(chan struct{}), sessions: make(map[router.SessionID]*resident),
	}
	if in.KVEvents.Endpoint != "" {
		if err := m.subscribe(&in); err != nil {
			return nil, err
		}
	}
	f.mu.Lock()
	f.members[m.id] = m
	f.mu.Unlock()
	return m, nil
}

func (f *Fleet) remove(ctx context.Context, m *member) {
	f.mu.Lock()
	delete(f.members, m.id)
	f.mu.Unlock()
	close(m.gone)
	m.markDown(ctx, errors.New("it was taken out of the registry or announced elsewhere"))
}

func (f *Fleet) member(id router.InstanceID) *member {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.members[id]
}

func (f *Fleet) all() []*member {
	f.mu.RLock()
	defer f.mu.RUnlock()
	members := make([]*member, 0, len(f.members))
	for _, m := range f.members {
		members = append(members, m)
	}
	return members
}

// Generate runs one model call at an instance. An instance that is unknown or
// down is a *engine.Error of class RetryElsewhere.
func (f *Fleet) Generate(ctx context.Context, instance router.InstanceID, session router.SessionID, request engine.Request, onProgress func(engine.Progress)) (engine.Result, error) {
	m := f.member(instance)
	if m == nil || !m.isUp() {
		return engine.Result{}, &engine.Error{Class: engine.RetryElsewhere, Err: fmt.Errorf("%s: %w", instance, engine.ErrNotCalled)}
	}
	for _, other := range f.all() {
		if other != m {
			other.forget(session)
		}
	}
	return m.generate(ctx, session, request, onProgress)
}

// MaxContextTokens is the largest context that any instance takes, 0 while none is known.
// An instance takes none that is larger than its whole cache, whatever it tells: the
// router admits it nowhere, and would hold it for ever.
func (f *Fleet) MaxContextTokens() int64 {
	f.mu.RLock()
	defer f.mu.RUnlock()
	var largest int64
	for _, m := range f.members {
		in := m.described()
		limit := in.MaxContextTokens
		if cache := in.CapacityBlocks * int64(in.BlockTokens); cache > 0 {
			limit = min(limit, cache)
		}
		largest = max(largest, limit)
	}
	return largest
}

// Forget drops a session that has ended from the ledgers.
func (f *Fleet) Forget(session router.SessionID) {
	for _, m := range f.all() {
		m.forget(session)
	}
}
