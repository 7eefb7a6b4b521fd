package cli

import (
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"holdfast/orchestrator/config"
)

// configFlags are flags that set fields of the configuration. Their help names
// the unit; the default shown is the configuration's own.
type configFlags struct {
	base  config.Config
	flags *pflag.FlagSet
	file  *string
}

// addConfigFlags gives a command the flag for the configuration file and those
// for the named groups of fields. base is what holds where nobody says otherwise.
func addConfigFlags(cmd *cobra.Command, base config.Config, groups ...func(*configFlags, config.Config)) *configFlags {
	c := &configFlags{base: base, flags: cmd.Flags()}
	c.file = c.flags.String("config", "", "configuration file in YAML (environment: HOLDFAST_CONFIG)")
	for _, group := range groups {
		group(c, base)
	}
	return c
}

func (c *configFlags) mark(name, field string) {
	// The flag exists, so annotating it cannot fail.
	_ = c.flags.SetAnnotation(name, config.FieldAnnotation, []string{field})
}

func logFlags(c *configFlags, d config.Config) {
	c.flags.String("log-level", d.Log.Level, "least severe level that is logged: debug, info, warn or error")
	c.mark("log-level", "log.level")
	c.flags.String("log-format", d.Log.Format, "log format: text or json")
	c.mark("log-format", "log.format")
}

func poolFlags(c *configFlags, d config.Config) {
	c.flags.String("pool", d.Pool, "name of the pool of engines to serve")
	c.mark("pool", "pool")
	c.flags.String("listen", d.Listen, "API address, host:port; port 0 takes a free one")
	c.mark("listen", "listen")
	c.flags.StringSlice("token", d.Tokens, "bearer token that the API accepts, as ROLE:TOKEN with role trainer, operator or viewer; may be repeated")
	c.mark("token", "tokens")
	c.flags.Bool("allow-open", d.AllowOpen, "serve an address beyond loopback without any token")
	c.mark("allow-open", "allow_open")
}

func databaseFlags(c *configFlags, d config.Config) {
	c.flags.String("database-url", d.Database.URL, "Postgres, as postgres://user:password@host:port/name")
	c.mark("database-url", "database.url")
	c.flags.Int("database-max-connections", d.Database.MaxConnections, "connections that this process opens at most, 4 to 500")
	c.mark("database-max-connections", "database.max_connections")
}

func temporalFlags(c *configFlags, d config.Config) {
	c.flags.String("temporal-address", d.Temporal.Address, "Temporal frontend, host:port")
	c.mark("temporal-address", "temporal.address")
	c.flags.String("temporal-namespace", d.Temporal.Namespace, "Temporal namespace; it must exist")
	c.mark("temporal-namespace", "temporal.namespace")
}

func routerFlags(c *configFlags, d config.Config) {
	c.flags.String("policy", d.Router.Policy, "admission policy: holdfast, misa-t, misa-t-paper, misa, session-admission or placement-only")
	c.mark("policy", "router.policy")
	c.flags.Duration("observe-interval", d.Router.ObserveInterval, "how often each engine's metrics are read, 100ms to 1m")
	c.mark("observe-interval", "router.observe_interval")
	c.flags.Duration("tick-interval", d.Router.TickInterval, "how often time passes for the router when nothing happens, 100ms to 1m")
	c.mark("tick-interval", "router.tick_interval")
	c.flags.Duration("lease-ttl", d.Router.LeaseTTL, "how long a dead owner keeps the pool from its successor, 2s to 5m")
	c.mark("lease-ttl", "router.lease_ttl")
}

func limitFlags(c *configFlags, d config.Config) {
	c.flags.Int("turns-in-flight", d.Limits.TurnsInFlight, "model calls at once in this process")
	c.mark("turns-in-flight", "limits.turns_in_flight")
	c.flags.Int("context-cache-mib", d.Limits.ContextCacheMiB, "memory for token contexts kept between turns, MiB")
	c.mark("context-cache-mib", "limits.context_cache_mib")
	c.flags.Int("engine-attempts", d.Limits.EngineAttempts, "calls of one turn that engines may answer with errors before the session fails")
	c.mark("engine-attempts", "limits.engine_attempts")
	c.flags.Duration("engine-silence", d.Limits.EngineSilence, "how long a model call may bring nothing, its wait in the engine's queue included, before it is made elsewhere")
	c.mark("engine-silence", "limits.engine_silence")
}

func devFlags(c *configFlags, d config.Config) {
	c.flags.String("data-dir", d.Dev.DataDir, "directory for the private Postgres, logs and locks")
	c.mark("data-dir", "dev.data_dir")
	c.flags.Int("engines", d.Dev.Engines, "simulated engines to start, 0 to 64")
	c.mark("engines", "dev.engines")
	engineFlags(c, d)
}

func engineFlags(c *configFlags, d config.Config) {
	c.flags.Int64("engine-capacity-tokens", d.Dev.EngineCapacityTokens, "KV cache of each simulated engine, tokens")
	c.mark("engine-capacity-tokens", "dev.engine_capacity_tokens")
	c.flags.Float64("time-scale", d.Dev.TimeScale, "engine seconds that pass per wall second")
	c.mark("time-scale", "dev.time_scale")
}

// load reads and checks the configuration.
func (c *configFlags) load(checks ...func(*config.Config) error) (config.Config, error) {
	path := *c.file
	if path == "" {
		path = config.FileFromEnvironment()
	}
	cfg, err := config.Load(c.base, path, c.flags)
	if err != nil {
		return cfg, badInput(err)
	}
	for _, check := range append([]func(*config.Config) error{(*config.Config).Validate}, checks...) {
		if err := check(&cfg); err != nil {
			return cfg, badInput(fmt.Errorf("configuration: %w", err))
		}
	}
	return cfg, nil
}
