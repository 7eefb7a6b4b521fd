package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"holdfast/api/wire"
	"holdfast/store"
	"holdfast/workflows/task"
)

// Config sets up a Server. Store and Notifications are required.
type Config struct {
	// Listen is the TCP address to listen on, such as 127.0.0.1:8080; port 0
	// takes a free one, which Server.Addr then tells.
	Listen string
	// Tokens are the bearer tokens that are accepted. Without any, every caller
	// may do everything, which is refused for an address that other machines can
	// reach unless AllowOpen is set.
	Tokens    []Token
	AllowOpen bool
	Limits    Limits
	Store     *store.Store
	// Notifications wakes long polls; a *store.Listener.
	Notifications Notifications
	// Prober asks engines for what they are; without one, registering instances
	// answers 503.
	Prober Prober
	// Router describes the routers that this process owns; without one, asking
	// for it answers 503.
	Router Router
	// Harness makes the calls of sessions whose loop runs outside; without one, asking
	// for them answers 503.
	Harness Harness
	// Allowed returns the first field of a task that names a server, a credential or a
	// program which tasks may not use where they are run, or nil. path is the JSON path
	// of the task. Without it everything is allowed.
	Allowed func(spec *task.Spec, path string) *task.FieldError
	// Checks decide readiness, besides the database's.
	Checks []Check
	// Registry holds the process's metrics, which /metrics shows; nil means a new one.
	Registry *prometheus.Registry
	// Logger is nil for slog.Default.
	Logger *slog.Logger
	// Version of the program, for people.
	Version string
}

// Notifications tells when there may be something new. *store.Listener is one.
type Notifications interface {
	WaitFor(topic store.Topic) <-chan struct{}
}

// Prober asks a running engine what it is, within ctx. Its error says why there
// is no answer, in words for an operator.
type Prober interface {
	Discover(ctx context.Context, kind, url string) (EngineInfo, error)
}

// EngineInfo is what an engine tells about itself. A figure that it does not tell is 0.
type EngineInfo struct {
	// CapacityBlocks is the KV cache in blocks of BlockTokens tokens.
	CapacityBlocks         int64
	BlockTokens            int
	MaxContextTokens       int64
	MaxRunning             int
	PrefillTokensPerSecond float64
	PolicyVersion          int64
}

// Router describes a pool's router. It returns ErrNotOwner when another process
// runs it, or none.
type Router interface {
	Describe(ctx context.Context, pool string) (wire.RouterView, error)
}

// ErrNotOwner: this process does not run the pool's router.
var ErrNotOwner = errors.New("this process does not run the pool's router")

// Check is one thing that readiness depends on.
type Check struct {
	Name string
	// Required checks make the service unready; others are only shown.
	Required bool
	Check    func(ctx context.Context) error
}

// Limits bound what requests can cost. Zero values take the defaults.
type Limits struct {
	// Requests at work at a time, long polls and batches apart; 64.
	Requests int
	// Waiting is the number of long polls at a time; 512.
	Waiting int
	// Uploads is the number of batches read at a time; 4.
	Uploads int
	// Turns is the number of harnesses' calls at a time, those that are held included; 4,096.
	Turns int
	// Exports is the number of exports at a time; 4. One of Parquet holds a row group.
	Exports int
	// Pages is the number of sample pages in memory at a time; 4.
	Pages int
	// BatchBytes bounds the body of a batch, as sent and decoded; 64 MiB.
	BatchBytes int64
	// TaskBytes bounds one task of a batch; 16 MiB.
	TaskBytes int64
	// PageBytes bounds the packed tokens of one sample page; 32 MiB. A page
	// holds at least one sample.
	PageBytes int64
	// RequestTimeout bounds the work of an ordinary request; 30 s.
	RequestTimeout time.Duration
	// UploadTimeout bounds a batch from its first byte to its commit; 5 min.
	UploadTimeout time.Duration
	// StallTimeout ends a connection on which no byte moves while it should; 30 s.
	StallTimeout time.Duration
	// WaitTimeout bounds the wait of a long poll; 60 s.
	WaitTimeout time.Duration
	// TurnTimeout bounds a harness's call, holds included; 24 h.
	TurnTimeout time.Duration
}

func (l *Limits) setDefaults() {
	setDefault(&l.Requests, 64)
	setDefault(&l.Waiting, 512)
	setDefault(&l.Uploads, 4)
	setDefault(&l.Turns, 4_096)
	setDefault(&l.Exports, 4)
	setDefault(&l.Pages, 4)
	setDefault(&l.BatchBytes, 64<<20)
	setDefault(&l.TaskBytes, 16<<20)
	setDefault(&l.PageBytes, 32<<20)
	setDefault(&l.RequestTimeout, 30*time.Second)
	setDefault(&l.UploadTimeout, 5*time.Minute)
	setDefault(&l.StallTimeout, 30*time.Second)
	setDefault(&l.WaitTimeout, 60*time.Second)
	setDefault(&l.TurnTimeout, 24*time.Hour)
}

func setDefault[T int | int64 | time.Duration](value *T, otherwise T) {
	if *value == 0 {
		*value = otherwise
	}
}

func (l *Limits) validate() error {
	for name, value := range map[string]int64{
		"requests": int64(l.Requests), "waiting": int64(l.Waiting), "uploads": int64(l.Uploads), "turns": int64(l.Turns), "exports": int64(l.Exports), "pages": int64(l.Pages),
		"batch bytes": l.BatchBytes, "task bytes": l.TaskBytes, "page bytes": l.PageBytes,
		"request timeout": int64(l.RequestTimeout), "upload timeout": int64(l.UploadTimeout),
		"stall timeout": int64(l.StallTimeout), "wait timeout": int64(l.WaitTimeout),
		"turn timeout": int64(l.TurnTimeout),
	} {
		if value < 0 {
			return fmt.Errorf("limit of %s must be positive, is %d", name, value)
		}
	}
	return nil
}

// validate sets defaults and refuses what would be unsafe or cannot work.
func (c *Config) validate() error {
	if c.Store == nil || c.Notifications == nil {
		return errors.New("a store and its notifications are required")
	}
	c.Limits.setDefaults()
	if err := c.Limits.validate(); err != nil {
		return err
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Registry == nil {
		c.Registry = prometheus.NewRegistry()
	}
	return CheckExposure(c.Listen, c.Tokens, c.AllowOpen)
}

// CheckExposure refuses to serve an address that other machines can reach
// without any token, unless that is explicitly allowed, and tokens that are
// unsafe. It is also for validating a configuration file before anything starts.
func CheckExposure(listen string, tokens []Token, allowOpen bool) error {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return fmt.Errorf("listen address %q: %w", listen, err)
	}
	if err := validateTokens(tokens); err != nil {
		return err
	}
	if len(tokens) == 0 && !allowOpen && !isLoopback(host) {
		return fmt.Errorf("listen address %q can be reached from other machines and no token is configured: configure tokens, listen on 127.0.0.1, or allow open access explicitly", listen)
	}
	return nil
}

// isLoopback tells whether a host names this machine only. A name other than
// localhost may resolve to anything and counts as reachable.
func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}
