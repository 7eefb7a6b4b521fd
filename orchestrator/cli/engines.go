package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"holdfast/orchestrator/config"
	"holdfast/orchestrator/engine/simulated"
	"holdfast/router/sim/instance"
)

// engineKindSimulated is the kind under which our own engines are registered.
const engineKindSimulated = "simulated"

// simulatedEngines are the engines of one process.
type simulatedEngines struct{ servers []*simulated.Server }

func simulatedID(i int) string { return fmt.Sprintf("sim-%d", i) }

// startEngines starts simulated engines on free loopback ports.
func startEngines(cfg config.Dev, log *slog.Logger) (*simulatedEngines, error) {
	engines := &simulatedEngines{}
	for i := range cfg.Engines {
		server, err := startEngine(cfg, uint64(i+1), "127.0.0.1:0", log.With("engine", simulatedID(i)))
		if err != nil {
			engines.stop()
			return nil, err
		}
		engines.servers = append(engines.servers, server)
	}
	return engines, nil
}

func startEngine(cfg config.Dev, seed uint64, address string, log *slog.Logger) (*simulated.Server, error) {
	params := instance.Demo()
	params.CapacityBlocks = int(cfg.EngineCapacityTokens) / params.BlockTokens
	server, err := simulated.New(simulated.Config{
		Engine: params, TimeScale: cfg.TimeScale, Seed: seed, StreamIntervalTokens: 128, Logger: log,
		KVEvents: simulated.KVEvents{Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0"},
	})
	if err != nil {
		return nil, err
	}
	if err := server.Start(address); err != nil {
		return nil, err
	}
	return server, nil
}

func (e *simulatedEngines) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for _, server := range e.servers {
		// What is still generating is cut off; the service asks again elsewhere.
		_ = server.Stop(ctx)
	}
}

func newEngine() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "engine",
		Short: "Run one simulated engine that speaks vLLM's HTTP",
		Long: `Runs the simulator's engine model behind vLLM's HTTP interface: blocks of 16 tokens,
prefix cache with LRU eviction, chunked prefill, batched decode, preemption. Tokens are
noise; timing and cache are the model's. Register it with POST /api/v1/pools/POOL/instances.`,
		Args: cobra.NoArgs,
	}
	flags := addConfigFlags(cmd, config.Default(), engineFlags, logFlags)
	address := cmd.Flags().String("address", "127.0.0.1:0", "address to serve, host:port; port 0 takes a free one")
	seed := cmd.Flags().Uint64("seed", 1, "seed of the generated tokens")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := flags.load((*config.Config).ValidateDev)
		if err != nil {
			return err
		}
		log, err := newLogger(cfg.Log)
		if err != nil {
			return err
		}
		server, err := startEngine(cfg.Dev, *seed, *address, log)
		if err != nil {
			return err
		}
		fmt.Fprintf(cmd.OutOrStdout(), "engine: %s\n", server.URL())
		<-cmd.Context().Done()
		stopping, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := server.Stop(stopping); !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		return nil
	}
	return cmd
}
