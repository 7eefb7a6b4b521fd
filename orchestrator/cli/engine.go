package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"holdfast/orchestrator/config"
	"holdfast/orchestrator/engine/simulated"
	"holdfast/orchestrator/engine/simulated/publish"
)

func newEngine() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "engine",
		Short: "Run one simulated engine that speaks vLLM's or SGLang's HTTP",
		Long: `Runs the simulator's engine model behind an engine's HTTP interface: blocks of 16 tokens,
prefix cache with LRU eviction, chunked prefill, batched decode, preemption. Tokens are
noise; timing and cache are the model's. Register it with POST /api/v1/pools/POOL/instances.

It breaks on demand: GET and PUT /simulated/faults show and set what goes wrong.`,
		Example: `  holdfast engine --kv-events tcp://127.0.0.1:5557 --kv-events-replay tcp://127.0.0.1:6557
  holdfast engine --dialect sglang --ranks 2
  holdfast engine --faults '{"events":{"lost":0.05},"drops":{"probability":0.01,"after_tokens":100}}'`,
		Args: cobra.NoArgs,
	}
	flags := addConfigFlags(cmd, config.Default(), engineFlags, logFlags)
	address := cmd.Flags().String("address", "127.0.0.1:0", "address to serve, host:port; port 0 takes a free one")
	options := addSimulatedFlags(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := flags.load((*config.Config).ValidateDev)
		if err != nil {
			return err
		}
		log, err := newLogger(cfg.Log)
		if err != nil {
			return err
		}
		engine := simulatedConfig(cfg.Dev, log)
		if err := options.apply(&engine); err != nil {
			return badInput(err)
		}
		server, err := startEngine(engine, *address)
		if err != nil {
			return err
		}
		fmt.Fprintf(cmd.OutOrStdout(), "engine: %s\n", server.URL())
		for _, e := range server.KVEndpoints() {
			fmt.Fprintf(cmd.OutOrStdout(), "kv events of rank %d: %s, replay: %s\n", e.Rank, e.Endpoint, orNone(e.ReplayEndpoint))
		}
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

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// simulatedFlags are the flags of one simulated engine that are not in the configuration.
type simulatedFlags struct {
	dialect, encoding, faults string
	config                    simulated.Config
}

func addSimulatedFlags(flags *pflag.FlagSet) *simulatedFlags {
	o := &simulatedFlags{}
	c, k := &o.config, &o.config.KVEvents
	flags.StringVar(&o.dialect, "dialect", "vllm", "whose HTTP to speak: vllm or sglang")
	flags.StringVar(&c.Model, "model", "simulated", "name of the served model")
	flags.Uint64Var(&c.Seed, "seed", 1, "seed of the generated tokens; engines with equal seeds continue each other's outputs")
	flags.StringVar(&c.WeightVersion, "weight-version", "default", "name of the weights at the start and after a crash")
	flags.IntVar(&c.Ranks, "ranks", 1, "data-parallel ranks behind the address, 1 to 64, each with a cache of its own")
	flags.IntVar(&c.FirstRank, "first-rank", 0, "global number of the first rank")
	flags.StringVar(&k.Endpoint, "kv-events", "", "publish KV cache events at tcp://host:port, rank r at port + r; port 0 takes free ones")
	flags.BoolVar(&k.Connect, "kv-events-connect", false, "connect to --kv-events instead of binding it")
	flags.StringVar(&k.ReplayEndpoint, "kv-events-replay", "", "answer replays at tcp://host:port, rank r at port + r")
	flags.StringVar(&o.encoding, "kv-events-encoding", "map", "array (vLLM to mid-2026), map (since) or mixed (map events in an array); sglang has its own")
	flags.StringVar(&k.Topic, "kv-events-topic", "", "topic of the events")
	flags.IntVar(&k.HistoryBatches, "kv-events-history", 10_000, "batches kept for replays")
	flags.BoolVar(&k.OldReplies, "kv-events-old-replies", false, "replay without topic, as vLLM before 0.26")
	flags.BoolVar(&k.FlushIdle, "kv-events-flush-idle", false, "publish a cache reset at once; by default with the next step")
	flags.StringVar(&o.faults, "faults", "", "faults from the start: JSON as for /simulated/faults, or @FILE")
	return o
}

// apply adds the flags to a configuration.
func (o *simulatedFlags) apply(cfg *simulated.Config) error {
	base := *cfg
	*cfg = o.config
	cfg.Engine, cfg.TimeScale, cfg.StreamIntervalTokens, cfg.Logger = base.Engine, base.TimeScale, base.StreamIntervalTokens, base.Logger
	var err error
	if cfg.Dialect, err = simulated.ParseDialect(o.dialect); err != nil {
		return err
	}
	if cfg.KVEvents.Encoding, err = publish.ParseEncoding(o.encoding); err != nil {
		return err
	}
	text := []byte(o.faults)
	if path, ok := strings.CutPrefix(o.faults, "@"); ok {
		if text, err = os.ReadFile(path); err != nil {
			return fmt.Errorf("reading the faults: %w", err)
		}
	}
	if len(text) == 0 {
		return nil
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&cfg.Faults); err != nil {
		return fmt.Errorf("reading the faults: %w", err)
	}
	return nil
}
