// Package config is the one typed configuration of Holdfast: defaults, then a
// YAML file, then the environment, then flags, each over the one before, checked
// once at start.
//
// It reads and checks; it opens nothing. Secrets are masked when it is printed.
package config

import (
	"fmt"
	"net"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Config holds everything that a process needs to know at start.
type Config struct {
	// Pool names the pool of engines that this process serves.
	Pool string `koanf:"pool"`
	// Listen is the address of the API, host:port; port 0 takes a free one.
	Listen string `koanf:"listen"`
	// AllowOpen permits an address beyond loopback without any token.
	AllowOpen bool `koanf:"allow_open"`
	// Tokens are the bearer tokens that the API accepts, as role:token.
	Tokens []string `koanf:"tokens"`

	Database Database `koanf:"database"`
	Temporal Temporal `koanf:"temporal"`
	Router   Router   `koanf:"router"`
	Weights  Weights  `koanf:"weights"`
	Limits   Limits   `koanf:"limits"`
	// Retention says what is kept for how long.
	Retention Retention `koanf:"retention"`
	// Environments says what tasks may have run and reached.
	Environments Environments `koanf:"environments"`
	Dev          Dev          `koanf:"dev"`
	Log          Log          `koanf:"log"`
}

// Database says where Postgres is.
type Database struct {
	// URL is a postgres:// URL; holdfast dev sets it by itself.
	URL string `koanf:"url"`
	// MaxConnections bounds the connection pool of this process.
	MaxConnections int `koanf:"max_connections"`
	// ColumnsDir is a directory, shared by all replicas, for the further columns of
	// samples; empty keeps them in Postgres.
	ColumnsDir string `koanf:"columns_dir"`
}

// Temporal says where the Temporal frontend is.
type Temporal struct {
	// Address is host:port; holdfast dev sets it by itself.
	Address   string `koanf:"address"`
	Namespace string `koanf:"namespace"`
}

// Router holds the periods of the pool's control loops.
type Router struct {
	// Policy is the admission variant: holdfast, misa-t, misa-t-paper, misa,
	// session-admission or placement-only.
	Policy string `koanf:"policy"`
	// ObserveInterval is how often each engine's metrics are read.
	ObserveInterval time.Duration `koanf:"observe_interval"`
	// TickInterval is how often time passes for the core when nothing happens.
	TickInterval time.Duration `koanf:"tick_interval"`
	// LeaseTTL is how long a dead owner keeps the pool.
	LeaseTTL time.Duration `koanf:"lease_ttl"`
}

// Weights holds the time-outs and periods of weight updates. How long an engine may
// take to pause is in the request.
type Weights struct {
	// CommitTimeout bounds resetting an engine's cache and naming its weights, with
	// all tries of a refusal; ResumeTimeout bounds resuming it.
	CommitTimeout time.Duration `koanf:"commit_timeout"`
	ResumeTimeout time.Duration `koanf:"resume_timeout"`
	// GoneAfter is how long an engine may be silent before an update goes on without it.
	GoneAfter time.Duration `koanf:"gone_after"`
	// SettleTimeout is how long at most a resumed engine's queue counts as the pause's.
	SettleTimeout time.Duration `koanf:"settle_timeout"`
	// LookInterval is how often engines are asked for their weight version.
	LookInterval time.Duration `koanf:"look_interval"`
	// RetryInterval is the wait between two tries of a call.
	RetryInterval time.Duration `koanf:"retry_interval"`
}

// Limits bounds what one process takes on.
type Limits struct {
	// TurnsInFlight bounds model calls at once in this process.
	TurnsInFlight int `koanf:"turns_in_flight"`
	// ContextCacheMiB bounds the token contexts kept in memory between turns.
	ContextCacheMiB int `koanf:"context_cache_mib"`
	// EngineAttempts bounds the tries of one turn that engines answered with errors.
	EngineAttempts int `koanf:"engine_attempts"`
	// EngineSilence is how long a model call may bring nothing, its wait in the engine's
	// queue included, before it is made elsewhere.
	EngineSilence time.Duration `koanf:"engine_silence"`
}

// Retention says for how long what nobody needs any more is kept; 0 is for ever.
type Retention struct {
	// Transcripts, History: how long after every consumer's acknowledgement tokens,
	// prompts and metadata are kept, and events and turns.
	Transcripts time.Duration `koanf:"transcripts"`
	History     time.Duration `koanf:"history"`
	// EndedRuns is how long after its end a run keeps what was not acknowledged.
	EndedRuns time.Duration `koanf:"ended_runs"`
	// RouterEvents is how long decisions about instances are kept.
	RouterEvents time.Duration `koanf:"router_events"`
	// Interval is how often the owner of the pool looks.
	Interval time.Duration `koanf:"interval"`
	// StepSamples bounds the samples of one short transaction, StepPause lies between two.
	StepSamples int           `koanf:"step_samples"`
	StepPause   time.Duration `koanf:"step_pause"`
}

func (r *Retention) validate() error {
	for _, limit := range []struct {
		name        string
		value       time.Duration
		least, most time.Duration
	}{
		{"transcripts", r.Transcripts, 0, maxRetention}, {"history", r.History, 0, maxRetention},
		{"ended_runs", r.EndedRuns, 0, maxRetention}, {"router_events", r.RouterEvents, 0, maxRetention},
		{"interval", r.Interval, 100 * time.Millisecond, 24 * time.Hour}, {"step_pause", r.StepPause, 0, time.Minute},
	} {
		if limit.value < limit.least || limit.value > limit.most {
			return &FieldError{"retention." + limit.name, fmt.Sprintf("%s is not between %s and %s", limit.value, limit.least, limit.most)}
		}
	}
	if r.StepSamples < 1 || r.StepSamples > 10_000 {
		return &FieldError{"retention.step_samples", fmt.Sprintf("%d is not between 1 and 10,000", r.StepSamples)}
	}
	return nil
}

// maxRetention is ten years, which is for ever for most.
const maxRetention = 10 * 365 * 24 * time.Hour

// Environments says what the tasks of trainers may have this process run and reach.
type Environments struct {
	// CommandsDir is the directory below which programs of tasks run, each in a
	// throw-away directory; empty means that tasks may not name programs. It must be
	// reachable for the account that programs run as.
	CommandsDir string `koanf:"commands_dir"`
	// AllowedHosts are patterns for the host or host:port of servers that tasks may
	// name; * is every host, and none means that tasks may not name servers.
	AllowedHosts []string `koanf:"allowed_hosts"`
	// Credentials are the bearer tokens that tasks may name, as NAME:TOKEN.
	Credentials []string `koanf:"credentials"`
}

// Tokens maps the names of credentials to their tokens.
func (e *Environments) Tokens() map[string]string {
	tokens := make(map[string]string, len(e.Credentials))
	for _, credential := range e.Credentials {
		name, token, _ := strings.Cut(credential, ":")
		tokens[name] = token
	}
	return tokens
}

func (e *Environments) validate() error {
	for i, pattern := range e.AllowedHosts {
		if _, err := path.Match(pattern, ""); err != nil || pattern == "" {
			return &FieldError{fmt.Sprintf("environments.allowed_hosts[%d]", i), fmt.Sprintf("%q is no pattern for a host or host:port", pattern)}
		}
	}
	for i, credential := range e.Credentials {
		if name, token, ok := strings.Cut(credential, ":"); !ok || name == "" || token == "" {
			return &FieldError{fmt.Sprintf("environments.credentials[%d]", i), "is not NAME:TOKEN"}
		}
	}
	return nil
}

// Dev sets up holdfast dev and holdfast demo.
type Dev struct {
	// DataDir holds Postgres' data, logs and sockets.
	DataDir string `koanf:"data_dir"`
	// Engines is the number of simulated engines.
	Engines int `koanf:"engines"`
	// EngineCapacityTokens is each simulated engine's KV cache, in tokens.
	EngineCapacityTokens int64 `koanf:"engine_capacity_tokens"`
	// TimeScale is engine seconds per wall second.
	TimeScale float64 `koanf:"time_scale"`
}

// Log sets up logging.
type Log struct {
	// Level is debug, info, warn or error.
	Level string `koanf:"level"`
	// Format is text or json.
	Format string `koanf:"format"`
}

// Default returns the configuration before file, environment and flags.
func Default() Config {
	return Config{
		Pool:     "default",
		Listen:   "127.0.0.1:8080",
		Database: Database{MaxConnections: 16},
		Temporal: Temporal{Namespace: "holdfast"},
		Router: Router{
			Policy:          "holdfast",
			ObserveInterval: 2 * time.Second,
			TickInterval:    time.Second,
			LeaseTTL:        10 * time.Second,
		},
		Weights: Weights{
			CommitTimeout: time.Minute, ResumeTimeout: time.Minute, GoneAfter: 15 * time.Second, SettleTimeout: time.Minute,
			LookInterval: 5 * time.Second, RetryInterval: 500 * time.Millisecond,
		},
		Limits: Limits{TurnsInFlight: 2_000, ContextCacheMiB: 512, EngineAttempts: 6, EngineSilence: 30 * time.Minute},
		Retention: Retention{
			Transcripts: 7 * 24 * time.Hour, History: 30 * 24 * time.Hour, EndedRuns: 30 * 24 * time.Hour, RouterEvents: 7 * 24 * time.Hour,
			Interval: time.Minute, StepSamples: 500, StepPause: 20 * time.Millisecond,
		},
		Dev: Dev{
			DataDir: ".holdfast/dev", Engines: 2, EngineCapacityTokens: 400_000, TimeScale: 1,
		},
		Log: Log{Level: "info", Format: "text"},
	}
}

// FieldError names one field of the configuration and what is wrong with it.
type FieldError struct{ Field, Problem string }

// Error returns field and problem in one line.
func (e *FieldError) Error() string { return e.Field + ": " + e.Problem }

// Policies are the admission policies by name.
var Policies = []string{"holdfast", "misa-t", "misa-t-paper", "misa", "session-admission", "placement-only"}

var poolName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// Validate checks what every command needs and returns the first *FieldError.
func (c *Config) Validate() error {
	switch {
	case !poolName.MatchString(c.Pool):
		return &FieldError{"pool", fmt.Sprintf("%q is not a name of up to 63 lower-case letters, digits and inner dashes", c.Pool)}
	case c.Database.MaxConnections < 4 || c.Database.MaxConnections > 500:
		return &FieldError{"database.max_connections", fmt.Sprintf("%d is not between 4 and 500", c.Database.MaxConnections)}
	case c.Router.ObserveInterval < 100*time.Millisecond || c.Router.ObserveInterval > time.Minute:
		return &FieldError{"router.observe_interval", fmt.Sprintf("%s is not between 100ms and 1m", c.Router.ObserveInterval)}
	case c.Router.TickInterval < 100*time.Millisecond || c.Router.TickInterval > time.Minute:
		return &FieldError{"router.tick_interval", fmt.Sprintf("%s is not between 100ms and 1m", c.Router.TickInterval)}
	case c.Router.LeaseTTL < 2*time.Second || c.Router.LeaseTTL > 5*time.Minute:
		return &FieldError{"router.lease_ttl", fmt.Sprintf("%s is not between 2s and 5m", c.Router.LeaseTTL)}
	case c.Limits.TurnsInFlight < 1 || c.Limits.TurnsInFlight > 100_000:
		return &FieldError{"limits.turns_in_flight", fmt.Sprintf("%d is not between 1 and 100,000", c.Limits.TurnsInFlight)}
	case c.Limits.ContextCacheMiB < 16 || c.Limits.ContextCacheMiB > 1<<20:
		return &FieldError{"limits.context_cache_mib", fmt.Sprintf("%d MiB is not between 16 and 1,048,576", c.Limits.ContextCacheMiB)}
	case c.Limits.EngineAttempts < 1 || c.Limits.EngineAttempts > 100:
		return &FieldError{"limits.engine_attempts", fmt.Sprintf("%d is not between 1 and 100", c.Limits.EngineAttempts)}
	case c.Limits.EngineSilence < time.Second || c.Limits.EngineSilence > 24*time.Hour:
		return &FieldError{"limits.engine_silence", fmt.Sprintf("%s is not between 1s and 24h", c.Limits.EngineSilence)}
	case !slices.Contains(Policies, c.Router.Policy):
		return &FieldError{"router.policy", fmt.Sprintf("%q is none of %s", c.Router.Policy, strings.Join(Policies, ", "))}
	case c.Log.Format != "text" && c.Log.Format != "json":
		return &FieldError{"log.format", fmt.Sprintf("%q is neither text nor json", c.Log.Format)}
	}
	if err := c.Weights.validate(); err != nil {
		return err
	}
	if err := c.Environments.validate(); err != nil {
		return err
	}
	if err := c.Retention.validate(); err != nil {
		return err
	}
	return c.validateListen()
}

func (w *Weights) validate() error {
	for _, limit := range []struct {
		name        string
		value       time.Duration
		least, most time.Duration
	}{
		{"commit_timeout", w.CommitTimeout, 100 * time.Millisecond, time.Hour},
		{"resume_timeout", w.ResumeTimeout, 100 * time.Millisecond, time.Hour},
		{"gone_after", w.GoneAfter, 100 * time.Millisecond, time.Hour},
		{"settle_timeout", w.SettleTimeout, 100 * time.Millisecond, time.Hour},
		{"look_interval", w.LookInterval, 100 * time.Millisecond, 10 * time.Minute},
		{"retry_interval", w.RetryInterval, 10 * time.Millisecond, time.Minute},
	} {
		if limit.value < limit.least || limit.value > limit.most {
			return &FieldError{"weights." + limit.name, fmt.Sprintf("%s is not between %s and %s", limit.value, limit.least, limit.most)}
		}
	}
	return nil
}

func (c *Config) validateListen() error {
	host, port, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return &FieldError{"listen", fmt.Sprintf("%q is not host:port", c.Listen)}
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return &FieldError{"listen", fmt.Sprintf("port %q is not a number from 0 to 65,535", port)}
	}
	for i, t := range c.Tokens {
		role, token, ok := strings.Cut(t, ":")
		if !ok || token == "" || (role != "trainer" && role != "operator" && role != "viewer") {
			return &FieldError{fmt.Sprintf("tokens[%d]", i), "is not ROLE:TOKEN with role trainer, operator or viewer"}
		}
	}
	ip := net.ParseIP(host)
	loopback := host == "localhost" || (ip != nil && ip.IsLoopback())
	if !loopback && len(c.Tokens) == 0 && !c.AllowOpen {
		return &FieldError{"listen", fmt.Sprintf("%q is reachable from outside and no token is set; set tokens, or allow_open to accept that", c.Listen)}
	}
	return nil
}

// ValidateServe checks what only holdfast serve needs.
func (c *Config) ValidateServe() error {
	if err := c.ValidateDatabase(); err != nil {
		return err
	}
	if c.Temporal.Address == "" {
		return &FieldError{"temporal.address", "is required: host:port of a Temporal frontend"}
	}
	if _, _, err := net.SplitHostPort(c.Temporal.Address); err != nil {
		return &FieldError{"temporal.address", fmt.Sprintf("%q is not host:port", c.Temporal.Address)}
	}
	if c.Temporal.Namespace == "" {
		return &FieldError{"temporal.namespace", "is required"}
	}
	return nil
}

// ValidateDatabase checks what holdfast serve and holdfast migrate need.
func (c *Config) ValidateDatabase() error {
	if c.Database.URL == "" {
		return &FieldError{"database.url", "is required: postgres://user:password@host:port/name"}
	}
	u, err := url.Parse(c.Database.URL)
	if err != nil || (u.Scheme != "postgres" && u.Scheme != "postgresql") {
		return &FieldError{"database.url", "is not a postgres:// URL"}
	}
	return nil
}

// ValidateDev checks what holdfast dev and holdfast demo need.
func (c *Config) ValidateDev() error {
	switch {
	case c.Dev.DataDir == "":
		return &FieldError{"dev.data_dir", "is required"}
	case c.Dev.Engines < 0 || c.Dev.Engines > 64:
		return &FieldError{"dev.engines", fmt.Sprintf("%d is not between 0 and 64", c.Dev.Engines)}
	case c.Dev.EngineCapacityTokens < 1_024 || c.Dev.EngineCapacityTokens > 1<<31:
		return &FieldError{"dev.engine_capacity_tokens", fmt.Sprintf("%d tokens is not between 1,024 and 2,147,483,648", c.Dev.EngineCapacityTokens)}
	case !(c.Dev.TimeScale >= 0.01 && c.Dev.TimeScale <= 10_000):
		return &FieldError{"dev.time_scale", fmt.Sprintf("%g is not between 0.01 and 10,000 engine seconds per wall second", c.Dev.TimeScale)}
	}
	return nil
}

// Masked returns a copy whose secrets are replaced, for printing.
func (c Config) Masked() Config {
	if u, err := url.Parse(c.Database.URL); err == nil && c.Database.URL != "" {
		c.Database.URL = u.Redacted()
	}
	c.Tokens = maskedAfterColon(c.Tokens)
	c.Environments.Credentials = maskedAfterColon(c.Environments.Credentials)
	return c
}

func maskedAfterColon(secrets []string) []string {
	masked := make([]string, len(secrets))
	for i, secret := range secrets {
		name, _, _ := strings.Cut(secret, ":")
		masked[i] = name + ":xxxxx"
	}
	return masked
}
