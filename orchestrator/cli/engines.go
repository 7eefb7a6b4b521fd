package cli

import (
	"context"
	"fmt"
	"log/slog"
	"time"

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
		engine := simulatedConfig(cfg, log.With("engine", simulatedID(i)))
		engine.KVEvents = simulated.KVEvents{Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0"}
		server, err := startEngine(engine, "127.0.0.1:0")
		if err != nil {
			engines.stop()
			return nil, err
		}
		engines.servers = append(engines.servers, server)
	}
	return engines, nil
}

// simulatedConfig is a simulated engine as configured. All have the same seed: they
// serve the same model, so that one can continue what another one began.
func simulatedConfig(cfg config.Dev, log *slog.Logger) simulated.Config {
	params := instance.Demo()
	params.CapacityBlocks = int(cfg.EngineCapacityTokens) / params.BlockTokens
	return simulated.Config{Engine: params, TimeScale: cfg.TimeScale, Seed: 1, StreamIntervalTokens: 128, Logger: log}
}

func startEngine(cfg simulated.Config, address string) (*simulated.Server, error) {
	server, err := simulated.New(cfg)
	if err != nil {
		return nil, err
	}
	if err := server.Start(address); err != nil {
		// Nothing runs yet that could hold a stop up.
		_ = server.Stop(context.Background())
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
