package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"holdfast/migrations"
	"holdfast/orchestrator/config"
	"holdfast/orchestrator/devserver"
	"holdfast/orchestrator/environment/command"
	"holdfast/store"
)

func newDev() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run everything in one process tree, with nothing to set up",
		Long: `Starts a private Postgres and a Temporal development server, applies the migrations,
starts simulated engines, and serves the API. Everything is kept below the data
directory: stop it, or kill it, and start it again, and every session goes on.`,
		Example: `  holdfast dev
  holdfast dev --listen 127.0.0.1:0 --engines 4 --time-scale 30`,
		Args: cobra.NoArgs,
	}
	flags := addConfigFlags(cmd, config.Default(), poolFlags, routerFlags, limitFlags, devFlags, logFlags)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := flags.load((*config.Config).ValidateDev)
		if err != nil {
			return err
		}
		log, err := newLogger(cfg.Log)
		if err != nil {
			return err
		}
		if !cmd.Flags().Changed("listen") {
			cfg.Listen = freeAddress(cfg.Listen)
		}
		usual := flags.base.Listen
		return runDev(cmd.Context(), cfg, log, cmd.OutOrStdout(), func(_ context.Context, address string) error {
			if !cmd.Flags().Changed("listen") && address != usual {
				fmt.Fprintf(cmd.OutOrStdout(), "%s is taken; for submit and watch: export HOLDFAST_URL=http://%s\n", usual, address)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "API: http://%s   (Ctrl-C stops everything; the data stays in %s)\n", address, cfg.Dev.DataDir)
			return nil
		})
	}
	return cmd
}

// freeAddress returns the address if it can be listened on, else the same host
// with a free port: a development service should start beside whatever runs.
func freeAddress(address string) string {
	listener, err := net.Listen("tcp", address)
	if err == nil {
		listener.Close()
		return address
	}
	host, _, splitErr := net.SplitHostPort(address)
	if splitErr != nil || !errors.Is(err, syscall.EADDRINUSE) {
		return address
	}
	return net.JoinHostPort(host, "0")
}

// runDev runs the whole process tree until ctx ends or a part of it dies. started
// is called once the API answers and every engine is registered.
func runDev(ctx context.Context, cfg config.Config, log *slog.Logger, out io.Writer, started func(ctx context.Context, address string) error) error {
	begin := time.Now()
	step := func(what string) { fmt.Fprintf(out, "[%5.1f s] %s\n", time.Since(begin).Seconds(), what) }
	servers, err := devserver.Start(ctx, devserver.Config{
		DataDir: cfg.Dev.DataDir, Namespace: cfg.Temporal.Namespace, Progress: step,
	})
	if err != nil {
		return err
	}
	defer func() {
		stopping, cancel := context.WithTimeout(context.Background(), 9*time.Second)
		defer cancel()
		if err := servers.Stop(stopping); err != nil {
			log.Error("stopping the development servers", "error", err)
		}
	}()
	cfg.Database.URL, cfg.Temporal.Address = servers.DatabaseURL(), servers.TemporalAddress()
	step("applying migrations")
	if err := migrations.Up(ctx, cfg.Database.URL); err != nil {
		return err
	}
	engines, err := startEngines(cfg.Dev, log)
	if err != nil {
		return err
	}
	defer engines.stop()
	devEnvironments(ctx, &cfg, log)
	s, err := newStack(ctx, cfg, log)
	if err != nil {
		return err
	}
	defer s.close()
	if err := engines.register(ctx, s.store, cfg.Pool); err != nil {
		return err
	}
	step(fmt.Sprintf("%d simulated engines, %s tokens of KV cache each, %g engine seconds per second", cfg.Dev.Engines, thousands(cfg.Dev.EngineCapacityTokens), cfg.Dev.TimeScale))

	running, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() {
		if err, died := <-servers.Done(); died {
			stop(err)
		}
	}()
	if err := s.run(running, started); err != nil {
		return err
	}
	if ctx.Err() == nil {
		return context.Cause(running)
	}
	return nil
}

// devEnvironments opens to tasks what a development service may: servers of this host,
// and programs below the data directory, unless the configuration says otherwise.
// Where programs cannot be run there, as when their account cannot reach the
// directory, the service does without them.
func devEnvironments(ctx context.Context, cfg *config.Config, log *slog.Logger) {
	if len(cfg.Environments.AllowedHosts) == 0 {
		cfg.Environments.AllowedHosts = []string{"127.0.0.1", "localhost", "::1"}
	}
	if cfg.Environments.CommandsDir != "" {
		return
	}
	dir := filepath.Join(cfg.Dev.DataDir, "commands")
	runner, err := command.NewRunner(ctx, command.Config{Root: dir})
	if err != nil {
		log.Warn("tasks may not name programs: they cannot be run below the data directory; set environments.commands_dir", "error", err)
		return
	}
	if err := runner.Close(); err != nil {
		log.Warn("trying to run a program", "error", err)
	}
	cfg.Environments.CommandsDir = dir
}

// register announces the engines in the pool's registry, as an operator would
// through the API, and takes out those of an earlier start that are no more.
func (e *simulatedEngines) register(ctx context.Context, s *store.Store, pool string) error {
	before, err := s.Instances(ctx, pool)
	if err != nil {
		return err
	}
	here := make(map[string]bool)
	for i, server := range e.servers {
		id := simulatedID(i)
		here[id] = true
		info, err := (prober{}).Discover(ctx, engineKindSimulated, server.URL())
		if err != nil {
			return fmt.Errorf("asking %s what it is: %w", id, err)
		}
		var events store.KVEvents
		if endpoints := server.KVEndpoints(); len(endpoints) > 0 {
			events = store.KVEvents{Endpoint: endpoints[0].Endpoint, ReplayEndpoint: endpoints[0].ReplayEndpoint}
		}
		if _, err := s.RegisterInstance(ctx, store.Instance{
			Pool: pool, ID: id, KVEvents: events, URL: server.URL(), Kind: engineKindSimulated,
			CapacityBlocks: info.CapacityBlocks, BlockTokens: info.BlockTokens, MaxContextTokens: info.MaxContextTokens,
			MaxRunning: info.MaxRunning, PrefillTokensPerSecond: info.PrefillTokensPerSecond, PolicyVersion: info.PolicyVersion,
		}); err != nil {
			return fmt.Errorf("registering %s: %w", id, err)
		}
	}
	for _, in := range before {
		if in.Kind == engineKindSimulated && !here[in.ID] {
			if err := s.RemoveInstance(ctx, pool, in.ID); err != nil {
				return fmt.Errorf("removing %s: %w", in.ID, err)
			}
		}
	}
	return nil
}
