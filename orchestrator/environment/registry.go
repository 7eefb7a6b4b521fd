package environment

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"time"

	"holdfast/orchestrator/environment/command"
	"holdfast/orchestrator/environment/exchange"
	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/environment/spec"
)

// DefaultMaxLive is how many environments a process has at a time.
const DefaultMaxLive = 1024

// Config says what environments of this process may do.
type Config struct {
	// Commands runs programs; nil means that exec environments and mcp programs
	// are not allowed here. The registry does not close it.
	Commands *command.Runner
	// Access says which servers specs may name.
	Access exchange.Access
	// MaxLive bounds environments; 0 means DefaultMaxLive.
	MaxLive int
	// Transport carries HTTP; nil means one of the registry's own.
	Transport http.RoundTripper
	// FirstRetryDelay is passed on to package exchange.
	FirstRetryDelay time.Duration
}

// Registry keeps the environments that live in this process. It is safe for
// concurrent use.
type Registry struct {
	config Config

	mu     sync.Mutex
	live   map[string]*session
	closed bool
}

// NewRegistry returns an empty registry.
func NewRegistry(config Config) (*Registry, error) {
	if err := config.Access.Check(); err != nil {
		return nil, err
	}
	if config.MaxLive == 0 {
		config.MaxLive = DefaultMaxLive
	}
	if config.Transport == nil {
		config.Transport = http.DefaultTransport.(*http.Transport).Clone()
	}
	return &Registry{config: config, live: make(map[string]*session)}, nil
}

// Open returns the environment of a session: the one that lives here, or a new
// one. It takes no time and reaches nobody; Reset does. sessionID names the
// episode everywhere.
func (r *Registry) Open(sessionID string, environment spec.Environment) (Environment, error) {
	doing := "opening environment " + sessionID
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, failure.Newf(failure.Lost, doing, "this process is ending")
	}
	if known, ok := r.live[sessionID]; ok {
		return known, nil
	}
	if len(r.live) >= r.config.MaxLive {
		return nil, failure.Newf(failure.Exhausted, doing, "%d environments live here, which is the limit", len(r.live))
	}
	d, err := r.driver(sessionID, environment)
	if err != nil {
		return nil, failure.Within(context.Background(), doing, failure.Disabled, err)
	}
	s := newSession(r, sessionID, d)
	r.live[sessionID] = s
	return s, nil
}

// Release closes a session's environment. Where it does not live here, an http
// episode is closed by its id alone, and of the other kinds there is nothing to
// release: they end with the process that they lived in.
func (r *Registry) Release(ctx context.Context, sessionID string, environment spec.Environment) error {
	r.mu.Lock()
	known, ok := r.live[sessionID]
	r.mu.Unlock()
	if ok {
		return known.Close(ctx)
	}
	if environment.Kind != spec.HTTP {
		return nil
	}
	d, err := r.driver(sessionID, environment)
	if err == nil {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeWait)
		defer cancel()
		err = d.close(closing)
		r.rest()
	}
	return failure.Within(ctx, "releasing environment "+sessionID, failure.Died, err)
}

// Idle lists the sessions whose environments nobody has called for a while.
func (r *Registry) Idle(idle time.Duration) []string {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	var ids []string
	for id, s := range r.live {
		if s.idleSince(now) >= idle {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// Drop closes the environments of these sessions that live here: what is left of
// sessions whose end never reached this process.
func (r *Registry) Drop(ctx context.Context, sessionIDs []string) error {
	var left []*session
	r.mu.Lock()
	for _, id := range sessionIDs {
		if s, ok := r.live[id]; ok {
			left = append(left, s)
		}
	}
	r.mu.Unlock()
	return closeAll(ctx, left)
}

// Leave closes what cannot outlive this process, and forgets the rest: the episodes at
// servers, with which another process goes on. More can be opened later.
func (r *Registry) Leave(ctx context.Context) error {
	var local []*session
	r.mu.Lock()
	for id, s := range r.live {
		if !s.driver.remote() {
			local = append(local, s)
			continue
		}
		s.end()
		delete(r.live, id)
	}
	r.mu.Unlock()
	return closeAll(ctx, local)
}

// Live is how many environments live here.
func (r *Registry) Live() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.live)
}

// Close closes every environment and opens no more. It can be called again.
func (r *Registry) Close(ctx context.Context) error {
	r.mu.Lock()
	r.closed = true
	var all []*session
	for _, s := range r.live {
		all = append(all, s)
	}
	r.mu.Unlock()
	return closeAll(ctx, all)
}

// closeAll closes side by side, since each may take as long as closeWait.
func closeAll(ctx context.Context, sessions []*session) error {
	errs := make([]error, len(sessions))
	var wait sync.WaitGroup
	for i, s := range sessions {
		wait.Go(func() { errs[i] = s.Close(ctx) })
	}
	wait.Wait()
	return errors.Join(errs...)
}

func (r *Registry) forget(s *session) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.live[s.id] == s {
		delete(r.live, s.id)
	}
}

// rest closes connections that wait for another call, once nothing lives here that
// would make one.
func (r *Registry) rest() {
	if transport, ok := r.config.Transport.(interface{ CloseIdleConnections() }); ok && r.Live() == 0 {
		transport.CloseIdleConnections()
	}
}

// driver is what a kind of environment does; session adds what they share. Calls
// never overlap. A reset that fails leaves nothing behind. close can be called
// again, also after a reset that failed or never was.
type driver interface {
	// remote tells whether the episode lives outside of this process.
	remote() bool
	reset(ctx context.Context, request ResetRequest) (Observation, error)
	step(ctx context.Context, action Action) (Observation, error)
	close(ctx context.Context) error
}

func (r *Registry) driver(id string, e spec.Environment) (driver, error) {
	if err := e.Validate("environment"); err != nil {
		return nil, failure.New(failure.Refused, "", err)
	}
	switch e.Kind {
	case spec.HTTP:
		bearer, err := r.config.Access.Bearer(e.HTTP.URL, e.HTTP.Credential)
		if err != nil {
			return nil, err
		}
		return newHTTPDriver(id, e, exchange.Config{
			Transport: r.config.Transport, Bearer: bearer, FirstDelay: r.config.FirstRetryDelay, MaxResponseBytes: maxAnswerBytes,
		}), nil
	case spec.MCP:
		return r.mcpDriver(id, e)
	}
	if r.config.Commands == nil {
		return nil, errNoCommands
	}
	return &execDriver{id: id, spec: *e.Exec, commands: r.config.Commands, keepBytes: keepBytes(e)}, nil
}

var errNoCommands = failure.Newf(failure.Disabled, "", "this process runs no programs")

func (r *Registry) mcpDriver(id string, e spec.Environment) (driver, error) {
	server := *e.MCP
	d := &mcpDriver{id: id, spec: server, keepBytes: keepBytes(e), commands: r.config.Commands, transport: r.config.Transport}
	if server.Program != nil {
		if d.commands == nil {
			return nil, errNoCommands
		}
		return d, nil
	}
	var err error
	d.bearer, err = r.config.Access.Bearer(server.URL, server.Credential)
	return d, err
}

func keepBytes(e spec.Environment) int {
	if e.ObservationBytes == 0 {
		return spec.DefaultObservationBytes
	}
	return e.ObservationBytes
}
