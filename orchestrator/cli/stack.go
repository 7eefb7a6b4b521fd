package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"go.temporal.io/sdk/client"
	sdklog "go.temporal.io/sdk/log"
	"golang.org/x/sync/errgroup"

	"holdfast/api"
	"holdfast/orchestrator/config"
	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/environment"
	"holdfast/orchestrator/environment/command"
	"holdfast/orchestrator/environment/exchange"
	"holdfast/orchestrator/scoring"
	"holdfast/orchestrator/service"
	"holdfast/orchestrator/weights"
	"holdfast/store"
	"holdfast/workflows/task"
)

// stack is the service against a Postgres and a Temporal that somebody runs: the
// same for serve, dev and demo.
type stack struct {
	store    *store.Store
	temporal client.Client
	// commands is nil where tasks may not name programs.
	commands     *command.Runner
	environments *environment.Registry
	service      *service.Service
	api          *api.Server
	log          *slog.Logger
}

// newStack connects and wires; nothing runs until run is called.
func newStack(ctx context.Context, cfg config.Config, log *slog.Logger) (*stack, error) {
	db, err := openStore(ctx, &cfg.Database, log)
	if err != nil {
		return nil, err
	}
	s := &stack{store: db, log: log}
	if err := s.wire(ctx, cfg); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// openStore connects to the database, and to the directory of columns if there is one.
func openStore(ctx context.Context, cfg *config.Database, log *slog.Logger) (*store.Store, error) {
	open := store.Config{URL: cfg.URL, MaxConnections: cfg.MaxConnections, Logger: log}
	if cfg.ColumnsDir != "" {
		blobs, err := store.NewDirBlobs(cfg.ColumnsDir)
		if err != nil {
			return nil, fmt.Errorf("database.columns_dir: %w", err)
		}
		open.Blobs = blobs
	}
	return store.Open(ctx, open)
}

func (s *stack) wire(ctx context.Context, cfg config.Config) error {
	listener, err := s.store.Listen(ctx)
	if err != nil {
		return err
	}
	s.temporal, err = client.DialContext(ctx, client.Options{
		HostPort: cfg.Temporal.Address, Namespace: cfg.Temporal.Namespace,
		Logger: sdklog.NewStructuredLogger(s.log.With("component", "temporal")),
		// Messages are references and counts: compressing them costs both sides more
		// than it saves.
		ConnectionOptions: client.ConnectionOptions{GrpcCompression: &client.GrpcCompressionNone{}},
	})
	if err != nil {
		return fmt.Errorf("reaching Temporal at %s: %w", cfg.Temporal.Address, err)
	}
	if dir := cfg.Environments.CommandsDir; dir != "" {
		if s.commands, err = command.NewRunner(ctx, command.Config{Root: dir}); err != nil {
			return fmt.Errorf("environments.commands_dir: %w", err)
		}
	}
	s.environments, err = environment.NewRegistry(environment.Config{Commands: s.commands, Access: access(&cfg.Environments)})
	if err != nil {
		return fmt.Errorf("environments: %w", err)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	s.service, err = service.New(service.Config{
		Pool: cfg.Pool, Store: s.store, Listener: listener, Temporal: s.temporal, Router: routerConfig(cfg.Router),
		NewClient:       engine.Connector(cfg.Limits.EngineSilence),
		ObserveInterval: cfg.Router.ObserveInterval, TickInterval: cfg.Router.TickInterval, LeaseTTL: cfg.Router.LeaseTTL,
		TurnsInFlight: cfg.Limits.TurnsInFlight, ContextCacheBytes: int64(cfg.Limits.ContextCacheMiB) << 20,
		EngineAttempts: cfg.Limits.EngineAttempts, Weights: weights.Limits(cfg.Weights),
		Scoring: scoring.Config{Commands: s.commands, Access: access(&cfg.Environments)}, Environments: s.environments,
		Retention:  retention(&cfg.Retention),
		Registerer: registry, Logger: s.log,
	})
	if err != nil {
		return err
	}
	s.api, err = api.New(api.Config{
		Listen: cfg.Listen, Tokens: apiTokens(cfg.Tokens), AllowOpen: cfg.AllowOpen,
		Store: s.store, Notifications: listener, Prober: prober{}, Router: describer{s.service, s.store}, Harness: harness{s.service},
		Allowed:  allowed(environment.Allowed{Access: access(&cfg.Environments), Programs: s.commands != nil}),
		Checks:   []api.Check{{Name: "temporal", Required: true, Check: s.checkTemporal}, {Name: "pool_owner", Check: s.checkOwner}},
		Registry: registry, Logger: s.log, Version: version(),
	})
	return err
}

// apiStopTimeout bounds the wait for requests under way at the end.
const apiStopTimeout = 3 * time.Second

// run serves until parent ends, a part of it dies, or started returns an error;
// started is called once the API answers.
func (s *stack) run(parent context.Context, started func(ctx context.Context, address string) error) error {
	if err := s.api.Start(parent); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(parent)
	group.Go(func() error {
		select {
		case <-s.api.Served():
			return errors.New("the API stopped serving")
		case <-ctx.Done():
		}
		stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), apiStopTimeout)
		defer cancel()
		return s.api.Stop(stopping)
	})
	group.Go(func() error { return s.service.Run(ctx) })
	group.Go(func() error { return started(ctx, s.api.Addr()) })
	err := group.Wait()
	if parent.Err() != nil {
		return nil
	}
	return err
}

// retention is the service's form of what the configuration says.
func retention(r *config.Retention) service.Retention {
	return service.Retention{
		Retention: store.Retention{Transcripts: r.Transcripts, History: r.History, EndedRuns: r.EndedRuns, RouterEvents: r.RouterEvents},
		Interval:  r.Interval, StepSamples: r.StepSamples, StepPause: r.StepPause,
	}
}

// access says which servers tasks may name: none where the configuration names none.
func access(e *config.Environments) exchange.Access {
	return exchange.Access{Credentials: e.Tokens(), AllowedHosts: e.AllowedHosts, Closed: len(e.AllowedHosts) == 0}
}

// allowed looks at what a task names outside of the service.
func allowed(by environment.Allowed) func(t *task.Spec, path string) *task.FieldError {
	return func(t *task.Spec, path string) *task.FieldError {
		refused := by.Check(t.Stepped(), t.Scorer, path)
		if refused == nil {
			return nil
		}
		return &task.FieldError{Path: refused.Path, Problem: refused.Problem, Offset: task.UnknownOffset}
	}
}

func (s *stack) close() {
	if s.environments != nil {
		if err := s.environments.Close(context.Background()); err != nil {
			s.log.Warn("closing environments", "error", err)
		}
	}
	if s.commands != nil {
		if err := s.commands.Close(); err != nil {
			s.log.Warn("removing the directories of programs", "error", err)
		}
	}
	if s.temporal != nil {
		s.temporal.Close()
	}
	s.store.Close()
}

func (s *stack) checkTemporal(ctx context.Context) error {
	_, err := s.temporal.CheckHealth(ctx, &client.CheckHealthRequest{})
	return err
}

func (s *stack) checkOwner(context.Context) error {
	if _, ok := s.service.Owner(); !ok {
		return errors.New("another process owns the pool, or none does yet")
	}
	return nil
}
