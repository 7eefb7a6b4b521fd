// Package weights takes a pool's engines through updates of their weights: it
// pauses them, parts with the prefixes of the old weights, brings the new version
// into force and resumes them, as the trainer asks through the store. It also
// notices engines whose weights changed unasked.
//
// What is asked for and how far each engine has come is in Postgres; everything
// here follows from that, so that a new owner of the pool goes on where the last
// one was. It loads no weights, and decides nothing about sessions: those that an
// update cuts go on from what they had, as after any loss.
package weights

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"holdfast/orchestrator/engine"
	"holdfast/router"
	"holdfast/store"
)

// Engines reaches the pool's instances.
type Engines interface {
	// Controller is false for an instance whose kind of engine has no such calls.
	Controller(id router.InstanceID) (engine.Controller, bool)
	// CacheCleared is told when an instance's prefixes are of no use any more.
	CacheCleared(ctx context.Context, id router.InstanceID, policyVersion int64)
}

// Router is told of resets and of engines that are paused; the pool's loop.
type Router interface {
	Tell(ctx context.Context, event router.Event) error
}

// Limits are the time-outs and periods of a Coordinator.
type Limits struct {
	// CommitTimeout bounds resetting an engine's cache and naming its weights,
	// with all tries of a refusal.
	CommitTimeout time.Duration
	// ResumeTimeout bounds resuming an engine.
	ResumeTimeout time.Duration
	// GoneAfter is how long an engine may be silent before an update goes on without it.
	GoneAfter time.Duration
	// SettleTimeout bounds how long a resumed engine's queue is taken for the
	// pause's and not for overload.
	SettleTimeout time.Duration
	// LookInterval is how often engines are asked for their weight version, and
	// bounds how late a missed notification is noticed.
	LookInterval time.Duration
	// RetryInterval is the wait between two tries of a call.
	RetryInterval time.Duration
}

// Config sets up a Coordinator.
type Config struct {
	Pool string
	// Epoch is the ownership under which the coordinator writes.
	Epoch   int64
	Store   *store.Store
	Router  Router
	Engines Engines
	// Changed returns a channel that is closed when an update of the pool changes.
	Changed func() <-chan struct{}
	// Versions are the instances' policy versions that the router was restored with.
	Versions map[router.InstanceID]int64
	Limits   Limits
	Logger   *slog.Logger
}

// Coordinator is safe for concurrent use. Run it once.
type Coordinator struct {
	cfg     Config
	wake    chan struct{}
	pokes   chan router.InstanceID
	started time.Time

	// telling orders what the router is told of one state after another; it is
	// taken before mu.
	telling sync.Mutex
	mu      sync.Mutex
	// ready is closed once the first look at the store is over.
	ready   chan struct{}
	members map[router.InstanceID]*member
	open    bool
	salt    string
	status  Status

	// The fields below belong to Run's goroutine.
	jobs    map[router.InstanceID]*job
	running sync.WaitGroup
	looked  bool
	// round counts looks at the store; jobs read it.
	round atomic.Int64
}

// Status is what a Coordinator is at.
type Status struct {
	// PolicyVersion, State and BeganAt are those of the open update, zero if there is none.
	PolicyVersion int64
	State         store.WeightState
	BeganAt       time.Time
	// Unasked counts changes of weights that nobody had asked for.
	Unasked int64
}

// Status tells what the coordinator is at.
func (c *Coordinator) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.status
}

// New returns a coordinator that has not started.
func New(cfg Config) (*Coordinator, error) {
	if cfg.Pool == "" || cfg.Store == nil || cfg.Router == nil || cfg.Engines == nil || cfg.Changed == nil || cfg.Logger == nil {
		return nil, errors.New("weights: pool, store, router, engines, change channel and logger are required")
	}
	l := cfg.Limits
	if l.CommitTimeout <= 0 || l.ResumeTimeout <= 0 || l.GoneAfter <= 0 || l.SettleTimeout <= 0 || l.LookInterval <= 0 || l.RetryInterval <= 0 {
		return nil, errors.New("weights: all limits must be positive")
	}
	c := &Coordinator{
		cfg: cfg, wake: make(chan struct{}, 1), pokes: make(chan router.InstanceID, 64), started: time.Now(), ready: make(chan struct{}),
		members: make(map[router.InstanceID]*member), jobs: make(map[router.InstanceID]*job),
	}
	for id, version := range cfg.Versions {
		m := c.member(id)
		m.known, m.version = true, version
	}
	return c, nil
}

// Run follows the pool's updates until ctx ends or another process owns the pool.
func (c *Coordinator) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer c.running.Wait()
	defer cancel()
	c.running.Go(func() { c.watchVersions(ctx) })
	ticker := time.NewTicker(c.cfg.Limits.LookInterval)
	defer ticker.Stop()
	for {
		changed := c.cfg.Changed()
		err := c.reconcile(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, store.ErrFenced):
			return fmt.Errorf("coordinating weight updates: %w", err)
		case err != nil:
			c.cfg.Logger.Warn("following weight updates failed, trying again", "error", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-c.wake:
		case <-ticker.C:
		}
	}
}

func (c *Coordinator) notify() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// reconcile brings engines and router nearer to what the store says.
func (c *Coordinator) reconcile(ctx context.Context) error {
	c.round.Add(1)
	listed, err := c.cfg.Store.Instances(ctx, c.cfg.Pool)
	if err != nil {
		return err
	}
	update, open, err := c.cfg.Store.OpenWeightUpdate(ctx, c.cfg.Pool)
	if err != nil {
		return err
	}
	salt, err := c.cfg.Store.CacheSalt(ctx, c.cfg.Pool)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return err
	}
	if err := c.tellVersions(ctx, listed); err != nil {
		return err
	}
	c.take(listed, &update, open, salt)
	if err := c.tellStates(ctx); err != nil {
		return err
	}
	if !c.looked {
		c.looked = true
		close(c.ready)
	}
	if !open {
		c.dropJobs()
		return c.freeStranded(ctx)
	}
	return c.advance(ctx, &update, listed)
}

// take notes what the store says and shuts or opens the members' doors.
func (c *Coordinator) take(listed []store.Instance, update *store.WeightUpdate, open bool, salt string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open, c.salt = open, salt
	c.status.PolicyVersion, c.status.State, c.status.BeganAt = update.PolicyVersion, update.State, update.BeganAt
	registered := make(map[router.InstanceID]bool, len(listed))
	for i := range listed {
		id := router.InstanceID(listed[i].ID)
		registered[id] = !listed[i].Expired
		m := c.member(id)
		shut := open && mustShut(update, update.Instance(listed[i].ID))
		if m.shut && !shut {
			m.settling, m.resumedAt, m.calm = true, time.Now(), 0
		}
		if shut {
			m.settling = false
		}
		if m.shut != shut {
			m.shut = shut
			m.ring()
		}
	}
	for id, m := range c.members {
		if !registered[id] && !m.up {
			m.ring()
			delete(c.members, id)
		}
	}
}

// mustShut tells whether new requests to an instance wait at our door. They would
// wait in the paused engine as well, but there they keep its cache from being
// reset and count as a queue. An engine that refused to pause goes on meanwhile.
func mustShut(u *store.WeightUpdate, row store.WeightInstance) bool {
	if row.Reached == store.PlaceResumed {
		return false
	}
	return u.State != store.WeightFailed || row.Reached.AtLeast(store.PlacePaused)
}

// tellVersions tells the router of instances whose policy version has changed: what
// they had cached is of the old weights.
func (c *Coordinator) tellVersions(ctx context.Context, listed []store.Instance) error {
	c.telling.Lock()
	defer c.telling.Unlock()
	for i := range listed {
		id := router.InstanceID(listed[i].ID)
		c.mu.Lock()
		m := c.member(id)
		changed := m.known && m.version != listed[i].PolicyVersion
		c.mu.Unlock()
		if !changed {
			continue
		}
		c.cfg.Engines.CacheCleared(ctx, id, listed[i].PolicyVersion)
		if err := c.cfg.Router.Tell(ctx, &router.InstanceReset{Instance: id, PolicyVersion: listed[i].PolicyVersion}); err != nil {
			return err
		}
		c.mu.Lock()
		m.version = listed[i].PolicyVersion
		c.mu.Unlock()
	}
	return nil
}
