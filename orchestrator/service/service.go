// Package service runs one pool: it takes ownership, rebuilds the router from
// the store, runs the session workflows' worker, dispatches what trainers release
// and carries messages to workflows, until ownership is lost or the process ends.
//
// Any number of processes may run it for one pool; one of them owns the pool at a
// time, the others stand by. It serves no HTTP.
package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"
	"golang.org/x/sync/errgroup"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/environment"
	"holdfast/orchestrator/fleet"
	"holdfast/orchestrator/pool"
	"holdfast/orchestrator/scoring"
	"holdfast/orchestrator/weights"
	"holdfast/router"
	"holdfast/store"
	"holdfast/workflows"
	"holdfast/workflows/activities"
)

// Config sets up a Service.
type Config struct {
	Pool     string
	Store    *store.Store
	Listener *store.Listener
	Temporal client.Client
	// Router is the policy of the core.
	Router router.Config
	// NewClient connects to an engine of that kind.
	NewClient func(kind, url string) (engine.Client, error)

	ObserveInterval time.Duration
	TickInterval    time.Duration
	// LeaseTTL is how long a dead owner keeps the pool from others.
	LeaseTTL time.Duration
	// TurnsInFlight bounds model calls at once in this process.
	TurnsInFlight     int
	ContextCacheBytes int64
	EngineAttempts    int
	// Weights are the time-outs and periods of weight updates.
	Weights weights.Limits
	// Scoring says what scorers may do and reach.
	Scoring scoring.Config
	// Environments are those of sessions, kept for all terms of ownership; the service
	// does not close it. Nil means that tasks may have none that are stepped.
	Environments *environment.Registry
	// Retention says what is kept for how long.
	Retention Retention

	Registerer prometheus.Registerer
	Logger     *slog.Logger
}

// Service runs one pool while it owns it. Create it with New, run it once.
type Service struct {
	cfg     Config
	name    string
	metrics *metrics
	tokens  *activities.Counters
	pruned  *prometheus.CounterVec
	owned   *ownership
}

// owned is what exists while this process owns the pool.
type owned struct {
	epoch   int64
	loop    *pool.Loop
	engines *fleet.Fleet
	updates *weights.Coordinator
	acts    *activities.Activities
}

// breakerOpenFor is how long an engine that keeps failing is left alone.
const breakerOpenFor = 3 * time.Second

// lookAgain is how often in the time of a lease a process that stands by tries to get the pool.
const lookAgain = 5

// errLost ends a term of ownership.
var errLost = errors.New("ownership of the pool was lost")

// New returns a service that has not started.
func New(cfg Config) (*Service, error) {
	if cfg.Store == nil || cfg.Listener == nil || cfg.Temporal == nil || cfg.NewClient == nil || cfg.Logger == nil || cfg.Registerer == nil {
		return nil, errors.New("service: store, listener, temporal client, engine client factory, registerer and logger are required")
	}
	if cfg.Retention.Interval <= 0 || cfg.Retention.StepSamples < 1 {
		return nil, errors.New("service: a positive retention interval and step are required")
	}
	if cfg.Pool == "" || cfg.LeaseTTL <= 0 || cfg.TurnsInFlight < 1 {
		return nil, errors.New("service: pool, a positive lease and a positive number of turns in flight are required")
	}
	m, err := newMetrics(cfg.Registerer, cfg.Pool)
	if err != nil {
		return nil, fmt.Errorf("service: %w", err)
	}
	tokens, err := activities.NewCounters(cfg.Registerer, cfg.Pool)
	if err != nil {
		return nil, fmt.Errorf("service: %w", err)
	}
	pruned, err := newPrunedMetric(cfg.Registerer, cfg.Pool)
	if err != nil {
		return nil, fmt.Errorf("service: %w", err)
	}
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("service: %w", err)
	}
	s := &Service{cfg: cfg, name: fmt.Sprintf("%s/%d/%s", host, os.Getpid(), uuid.NewString()[:8]), metrics: m, tokens: tokens, pruned: pruned, owned: newOwnership()}
	for _, c := range []prometheus.Collector{newFleetMetrics(cfg.Pool, s.statuses), newWeightMetrics(cfg.Pool, s.weightStatus),
		newPressureMetrics(cfg.Pool, cfg.Logger, func(ctx context.Context) ([]store.BackPressure, error) { return cfg.Store.BackPressures(ctx, cfg.Pool) })} {
		if err := cfg.Registerer.Register(c); err != nil {
			return nil, fmt.Errorf("service: registering metrics: %w", err)
		}
	}
	return s, nil
}

// Run serves the pool until ctx ends: as owner whenever it can be, standing by
// otherwise.
func (s *Service) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		epoch, ok, err := s.cfg.Store.AcquirePool(ctx, s.cfg.Pool, s.name, s.cfg.LeaseTTL.Seconds())
		switch {
		case err != nil && ctx.Err() == nil:
			s.cfg.Logger.Warn("acquiring the pool failed, trying again", "pool", s.cfg.Pool, "error", err)
		case ok:
			s.metrics.owner.Set(1)
			s.owned.set(nil) // no other process owns it now: callers wait until the router is rebuilt
			err = s.own(ctx, epoch)
			s.metrics.owner.Set(0)
			if ctx.Err() == nil {
				s.cfg.Logger.Warn("this process owns the pool no more, standing by", "pool", s.cfg.Pool, "epoch", epoch, "reason", err)
			}
		case err == nil:
			s.watch(ctx)
		}
		timer := time.NewTimer(s.cfg.LeaseTTL / lookAgain)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
	return nil
}

// watch looks whether the owner is alive.
func (s *Service) watch(ctx context.Context) {
	lease, err := s.cfg.Store.PoolLease(ctx, s.cfg.Pool)
	if err != nil {
		if ctx.Err() == nil {
			s.cfg.Logger.Warn("looking at the pool's lease failed, trying again", "pool", s.cfg.Pool, "error", err)
		}
		return
	}
	s.owned.look(lease, s.cfg.LeaseTTL)
}

// own runs one term of ownership.
func (s *Service) own(ctx context.Context, epoch int64) error {
	log := s.cfg.Logger.With("pool", s.cfg.Pool, "epoch", epoch)
	messages := newWake()
	loop, err := pool.New(pool.Config{
		Router:       s.cfg.Router,
		Journal:      &journal{store: s.cfg.Store, pool: s.cfg.Pool, epoch: epoch, messages: messages},
		Now:          monotonicUnix(),
		TickInterval: s.cfg.TickInterval,
		Observe:      s.metrics.observe,
	})
	if err != nil {
		return err
	}
	instances, err := s.cfg.Store.Instances(ctx, s.cfg.Pool)
	if err != nil {
		return fmt.Errorf("restoring instances: %w", err)
	}
	// The fleet tells the router through the coordinator, which calls the fleet's
	// engines: neither does anything before it runs.
	var updates *weights.Coordinator
	engines, err := fleet.New(fleet.Config{
		Pool: s.cfg.Pool, Registry: s.cfg.Store,
		Changed:   func() <-chan struct{} { return s.cfg.Listener.WaitFor(store.InstancesTopic(s.cfg.Pool)) },
		Tell:      func(ctx context.Context, event router.Event) error { return updates.Tell(ctx, event) },
		NewClient: s.cfg.NewClient, ObserveInterval: s.cfg.ObserveInterval, Logger: log,
		// A crash breaks many calls at once and the engine may be back in seconds: a
		// probe costs one call.
		Breaker: engine.BreakerConfig{OpenFor: breakerOpenFor},
	})
	if err != nil {
		return err
	}
	if updates, err = s.newCoordinator(epoch, loop, engines, instances); err != nil {
		return err
	}
	var environments activities.Environments
	if s.cfg.Environments != nil {
		environments = s.cfg.Environments
	}
	acts, err := activities.New(activities.Config{
		Store: s.cfg.Store, Router: loop, Engines: guarded{engines, updates}, Epoch: epoch,
		ContextCacheBytes: s.cfg.ContextCacheBytes, EngineAttempts: s.cfg.EngineAttempts, Scoring: s.cfg.Scoring, Environments: environments, Counters: s.tokens, Logger: log,
	})
	if err != nil {
		return err
	}
	restored, err := s.restore(ctx, instances)
	if err != nil {
		return err
	}
	log.Info("this process owns the pool", "restored_events", len(restored))

	term, ctx := errgroup.WithContext(ctx)
	term.Go(func() error { return loop.Run(ctx, restored) })
	term.Go(func() error { return engines.Run(ctx) })
	term.Go(func() error { return updates.Run(ctx) })
	term.Go(func() error { return s.renew(ctx, epoch) })
	term.Go(func() error {
		d := dispatcher{store: s.cfg.Store, pool: s.cfg.Pool, listener: s.cfg.Listener, messages: messages, log: log}
		return d.run(ctx)
	})
	term.Go(func() error {
		k := deadlineKeeper{store: s.cfg.Store, pool: s.cfg.Pool, epoch: epoch, messages: messages, log: log}
		return k.run(ctx)
	})
	term.Go(func() error {
		r := relay{store: s.cfg.Store, temporal: s.cfg.Temporal, listener: s.cfg.Listener, messages: messages, cancelLocal: acts.CancelRunning, log: log}
		return r.run(ctx)
	})
	term.Go(func() error {
		r := reconciler{store: s.cfg.Store, loop: loop, forget: engines.Forget, log: log}
		return r.run(ctx)
	})
	term.Go(func() error {
		p := pruner{store: s.cfg.Store, pool: s.cfg.Pool, keep: s.cfg.Retention, pruned: s.pruned, log: log}
		return p.run(ctx)
	})
	term.Go(func() error { return s.work(ctx, acts) })
	if s.cfg.Environments != nil {
		sweep := sweeper{store: s.cfg.Store, environments: s.cfg.Environments, log: log}
		term.Go(func() error { return sweep.run(ctx) })
	}
	s.owned.set(&owned{epoch: epoch, loop: loop, engines: engines, updates: updates, acts: acts})
	err = term.Wait()
	s.owned.set(nil)
	s.leaveEnvironments()
	s.release(epoch)
	return err
}

// leaveEnvironments ends what the next owner could not reach, so that its sessions find
// that out at once, and nothing runs on for nobody.
func (s *Service) leaveEnvironments() {
	if s.cfg.Environments == nil {
		return
	}
	if err := s.cfg.Environments.Leave(context.Background()); err != nil {
		s.cfg.Logger.Warn("closing the environments of this process failed", "pool", s.cfg.Pool, "error", err)
	}
}

// restore reads what rebuilds the core, and puts every message that a dead owner
// may have owed back into the outbox.
func (s *Service) restore(ctx context.Context, instances []store.Instance) ([]router.Event, error) {
	sessions, err := s.cfg.Store.LiveSessions(ctx, s.cfg.Pool)
	if err != nil {
		return nil, fmt.Errorf("restoring sessions: %w", err)
	}
	if _, err := s.cfg.Store.RequeueMessages(ctx, s.cfg.Pool); err != nil {
		return nil, fmt.Errorf("restoring messages to workflows: %w", err)
	}
	return restoredEvents(instances, sessions), nil
}

// renew keeps the lease and ends the term when it cannot.
func (s *Service) renew(ctx context.Context, epoch int64) error {
	ticker := time.NewTicker(s.cfg.LeaseTTL / 3)
	defer ticker.Stop()
	expires := time.Now().Add(s.cfg.LeaseTTL)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
		asked := time.Now()
		err := s.cfg.Store.RenewPool(ctx, s.cfg.Pool, epoch, s.cfg.LeaseTTL.Seconds())
		switch {
		case err == nil:
			expires = asked.Add(s.cfg.LeaseTTL)
		case errors.Is(err, store.ErrFenced), time.Now().After(expires):
			return fmt.Errorf("%w: %w", errLost, err)
		case ctx.Err() == nil:
			s.cfg.Logger.Warn("renewing the lease failed, trying again", "pool", s.cfg.Pool, "error", err)
		}
	}
}

// release lets a successor start at once after an orderly end.
func (s *Service) release(epoch int64) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if err := s.cfg.Store.ReleasePool(ctx, s.cfg.Pool, epoch); err != nil {
		s.cfg.Logger.Warn("releasing the pool failed; its lease runs out by itself", "pool", s.cfg.Pool, "error", err)
	}
}

// work runs the Temporal worker until ctx ends.
func (s *Service) work(ctx context.Context, acts *activities.Activities) error {
	w := worker.New(s.cfg.Temporal, workflows.TaskQueue(s.cfg.Pool), worker.Options{
		MaxConcurrentActivityExecutionSize:     s.cfg.TurnsInFlight,
		MaxConcurrentWorkflowTaskExecutionSize: 64,
		MaxConcurrentActivityTaskPollers:       4,
		// A workflow task that finds no poller waiting is written to the database
		// first; most activities come back with their workflow's own task.
		MaxConcurrentWorkflowTaskPollers: 16,
		MaxHeartbeatThrottleInterval:     10 * time.Second,
		BackgroundActivityContext:        ctx,
		WorkerStopTimeout:                3 * time.Second,
	})
	w.RegisterWorkflowWithOptions(workflows.Session, workflow.RegisterOptions{Name: workflows.SessionWorkflow})
	acts.Register(w)
	if err := w.Start(); err != nil {
		return fmt.Errorf("starting the Temporal worker: %w", err)
	}
	<-ctx.Done()
	w.Stop()
	return ctx.Err()
}

// Owner tells whether this process owns the pool now, and under which epoch.
func (s *Service) Owner() (epoch int64, ok bool) {
	o := s.owned.current()
	if o == nil {
		return 0, false
	}
	return o.epoch, true
}

// View shows the router of this service's pool and what the fleet sees of its
// instances, or pool.ErrNotOwner for another pool or while another process owns it.
func (s *Service) View(ctx context.Context, name string) (View, error) {
	o := s.owned.current()
	if o == nil || name != s.cfg.Pool {
		return View{}, pool.ErrNotOwner
	}
	view, err := o.loop.View(ctx)
	return View{View: view, Epoch: o.epoch, Instances: o.engines.Statuses()}, err
}

// View is what an operator sees of a pool.
type View struct {
	pool.View
	Epoch     int64
	Instances []fleet.Status
}

// statuses is empty while this process does not own the pool.
func (s *Service) statuses() []fleet.Status {
	if o := s.owned.current(); o != nil {
		return o.engines.Statuses()
	}
	return nil
}

// monotonicUnix gives Unix nanoseconds that never run backwards while the process
// lives, whatever happens to the wall clock.
func monotonicUnix() func() router.Nanos {
	start := time.Now()
	unix := start.UnixNano()
	return func() router.Nanos { return unix + int64(time.Since(start)) }
}
