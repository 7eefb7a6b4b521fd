package simulated

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"holdfast/orchestrator/engine/simulated/fault"
	"holdfast/router/sim/instance"
)

// Server is a simulated engine. Handler works from New on; Start and Stop add a
// listener of its own.
type Server struct {
	cfg     Config
	faults  *fault.Injector
	handler http.Handler
	metrics http.Handler
	script  atomic.Pointer[Script]
	// life is nil while the engine is down after a crash.
	life atomic.Pointer[life]

	mu       sync.Mutex
	listener net.Listener
	address  string // that a restart listens on
	http     *http.Server
	served   chan struct{}
	stopped  bool
	restart  *time.Timer
	reopen   bool // a crash has closed the listener
	storm    *time.Timer
	storms   int // how many there were: which one the timer is of
	stall    stall
	// boundEvents and boundReplay are rank 0's endpoints, which outlive a crash.
	boundEvents, boundReplay string
	// fresh holds the connections on which nothing has been asked yet. Shutdown
	// would wait for each of them for five seconds.
	fresh map[net.Conn]struct{}
}

// New makes an engine. Its clock starts now; without KV events it uses no goroutine while idle.
func New(cfg Config) (*Server, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg}
	s.script.Store(&cfg.Script)
	var err error
	if s.faults, err = fault.New(cfg.Faults); err != nil {
		return nil, fmt.Errorf("creating a simulated engine: %w", err)
	}
	l, err := s.newLife()
	if err != nil {
		return nil, fmt.Errorf("creating a simulated engine: %w", err)
	}
	s.life.Store(l)
	mux := http.NewServeMux()
	registry := prometheus.NewRegistry()
	switch cfg.Dialect {
	case VLLM:
		registry.MustRegister(vllmCollector{s})
		s.routeVLLM(mux)
	case SGLang:
		registry.MustRegister(sglangCollector{s})
		s.routeSGLang(mux)
	}
	s.metrics = promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
	mux.HandleFunc("GET /v1/models", s.live(s.models))
	mux.HandleFunc("GET /health", s.live(s.health))
	mux.HandleFunc("GET "+metricsPath, s.stalling(s.metrics))
	mux.HandleFunc("/", s.live(func(_ *life, w http.ResponseWriter, r *http.Request) {
		s.writeError(w, &apiError{http.StatusNotFound, "NotFoundError", "Not Found: " + r.Method + " " + r.URL.Path, ""})
	}))
	s.routeFaults(mux)
	s.handler = mux
	s.startFaults(cfg.Faults)
	return s, nil
}

// Handler serves the engine's endpoints.
func (s *Server) Handler() http.Handler { return s.handler }

// Start listens on an address such as 127.0.0.1:0 and serves until Stop.
func (s *Server) Start(address string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.http != nil {
		return errors.New("the simulated engine has been started before")
	}
	s.address = address
	return s.serve()
}

// serve listens on the server's address. The lock is held.
func (s *Server) serve() error {
	listener, err := net.Listen("tcp", s.address)
	if err != nil {
		return fmt.Errorf("starting a simulated engine: %w", err)
	}
	s.listener, s.address = listener, listener.Addr().String()
	s.fresh = make(map[net.Conn]struct{})
	server := &http.Server{Handler: s.handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, ConnState: s.connState}
	served := make(chan struct{})
	s.http, s.served = server, served
	go func() {
		defer close(served)
		if err := server.Serve(listener); err != nil && !errors.Is(err, http.ErrServerClosed) {
			s.cfg.Logger.Error("a simulated engine stopped serving", "error", err)
		}
	}()
	return nil
}

func (s *Server) connState(conn net.Conn, state http.ConnState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if state == http.StateNew {
		s.fresh[conn] = struct{}{}
	} else {
		delete(s.fresh, conn)
	}
}

// closeFresh closes the connections on which nothing has been asked.
func (s *Server) closeFresh() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for conn := range s.fresh {
		conn.Close()
	}
}

// URL is the base URL of a started server, also while it is down.
func (s *Server) URL() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listener == nil {
		return ""
	}
	return "http://" + s.address
}

// Stop takes no new requests, lets those in flight finish until ctx ends, and
// aborts the rest. The engine does not work afterwards.
func (s *Server) Stop(ctx context.Context) error {
	s.mu.Lock()
	s.stopped = true
	stopTimer(s.restart)
	stopTimer(s.storm)
	server, served := s.http, s.served
	s.mu.Unlock()
	l := s.life.Load()
	if l == nil {
		return nil // It is down already.
	}
	var err error
	if server != nil {
		server.RegisterOnShutdown(s.closeFresh)
		if err = server.Shutdown(ctx); err != nil {
			l.close(shutDown)
			// What was aborted still has its answer to write.
			writing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			if server.Shutdown(writing) != nil {
				err = errors.Join(err, server.Close())
			}
		}
		<-served
	}
	l.close(shutDown)
	if err != nil {
		return fmt.Errorf("stopping a simulated engine: %w", err)
	}
	return nil
}

func stopTimer(t *time.Timer) {
	if t != nil {
		t.Stop()
	}
}

// ResetPrefixCache forgets all cached blocks, also while requests run, which an
// engine would refuse over HTTP.
func (s *Server) ResetPrefixCache() {
	s.eachRank(func(c *core) { c.look(c.model.ResetCache) })
}

// eachRank runs f on every rank of the engine if it is up.
func (s *Server) eachRank(f func(*core)) {
	if l := s.life.Load(); l != nil {
		l.each(f)
	}
}

// Stats is the model's state now, summed over the ranks. A crashed engine has none.
func (s *Server) Stats() (sum instance.Stats) {
	s.eachRank(func(c *core) {
		c.look(func() { sum = addStats(sum, c.model.Stats()) })
	})
	return sum
}

func addStats(a, b instance.Stats) instance.Stats {
	a.Waiting += b.Waiting
	a.Prefilling += b.Prefilling
	a.Decoding += b.Decoding
	a.Loading += b.Loading
	a.TotalBlocks += b.TotalBlocks
	a.FreeBlocks += b.FreeBlocks
	a.IdleBlocks += b.IdleBlocks
	a.PinnedBlocks += b.PinnedBlocks
	a.PrivateBlocks += b.PrivateBlocks
	a.HostBlocks += b.HostBlocks
	a.PromptTokens += b.PromptTokens
	a.CachedTokens += b.CachedTokens
	a.HostTokens += b.HostTokens
	a.GeneratedTokens += b.GeneratedTokens
	a.ComputedTokens += b.ComputedTokens
	a.RecomputedTokens += b.RecomputedTokens
	a.Submitted += b.Submitted
	a.Finished += b.Finished
	a.Aborted += b.Aborted
	a.Preemptions += b.Preemptions
	a.Steps += b.Steps
	a.BusyNanos += b.BusyNanos
	return a
}

// RequestInfo is a request in flight.
type RequestInfo struct {
	RequestID, SessionID string
	// Rank is the data-parallel rank that it runs on.
	Rank     int
	Progress instance.Progress
}

// Requests lists the requests in flight, by rank and in order of arrival.
func (s *Server) Requests() (list []RequestInfo) {
	s.eachRank(func(c *core) {
		c.look(func() {
			for _, id := range c.inOrder() {
				x := c.calls[id]
				p, _ := c.model.Progress(id)
				list = append(list, RequestInfo{x.requestID, x.sessionID, s.cfg.FirstRank + c.rank, p})
			}
		})
	})
	return list
}

// ResidentBlocks lists the hashes of the blocks that are in any rank's cache now,
// sorted, as vLLM's events name them.
func (s *Server) ResidentBlocks() (hashes []uint64) {
	s.eachRank(func(c *core) { hashes = append(hashes, c.residentBlocks()...) })
	slices.Sort(hashes)
	return slices.Compact(hashes)
}

// ResidentPrefixes returns contents whose blocks are cached now at one rank, by its
// global number: every cached block is a block of one of them, and all their full
// blocks that a chain holds are cached. Contents are known where KV events are published.
func (s *Server) ResidentPrefixes(rank int) (prefixes [][]int32) {
	l := s.life.Load()
	if rank -= s.cfg.FirstRank; l == nil || rank < 0 || rank >= len(l.cores) {
		return nil
	}
	c := l.cores[rank]
	c.look(func() {
		c.publishDecoded()
		prefixes = c.chains.residentPrefixes()
	})
	return prefixes
}

// RankResidentBlocks lists the hashes of the blocks in the cache of one rank, by its
// global number.
func (s *Server) RankResidentBlocks(rank int) []uint64 {
	l := s.life.Load()
	if rank -= s.cfg.FirstRank; l == nil || rank < 0 || rank >= len(l.cores) {
		return nil
	}
	hashes := l.cores[rank].residentBlocks()
	slices.Sort(hashes)
	return slices.Compact(hashes)
}

func (c *core) residentBlocks() (hashes []uint64) {
	c.look(func() {
		c.publishDecoded()
		hashes = c.chains.residentHashes(nil)
	})
	return hashes
}

// WeightVersion is the version of the weights that generate now.
func (s *Server) WeightVersion() string {
	if l := s.life.Load(); l != nil {
		return l.weightVersion()
	}
	return ""
}

// KVEndpoint is where one rank publishes its KV cache events.
type KVEndpoint struct {
	// Rank is the global data-parallel rank.
	Rank int `json:"rank"`
	// Endpoint is what was bound, or what is connected to.
	Endpoint string `json:"endpoint"`
	// ReplayEndpoint is empty if there is none.
	ReplayEndpoint string `json:"replay_endpoint,omitempty"`
	// Published is the number of batches published so far, and so the sequence number
	// that the next one will have.
	Published uint64 `json:"published"`
}

// KVEndpoints lists where the ranks publish their events, in order; it is empty if they do not.
func (s *Server) KVEndpoints() (list []KVEndpoint) {
	s.eachRank(func(c *core) {
		c.look(func() {
			if l := c.log; l != nil {
				list = append(list, KVEndpoint{s.cfg.FirstRank + c.rank, l.publisher.Endpoint(), l.publisher.ReplayEndpoint(), l.publisher.Published()})
			}
		})
	})
	return list
}

func (s *Server) health(l *life, w http.ResponseWriter, _ *http.Request) {
	closed := false
	l.cores[0].look(func() { closed = l.cores[0].closed != running })
	if closed {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
}

func (s *Server) models(l *life, w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{
		"object": "list",
		"data": []any{map[string]any{
			"id": s.cfg.Model, "object": "model", "created": l.started.Unix(), "owned_by": s.cfg.Dialect.String(),
			"root": s.cfg.Model, "parent": nil, "max_model_len": s.cfg.Engine.MaxContextTokens,
			// Neither engine's: what an operator would otherwise have to type in. Tokens a
			// second are wall time, as the router counts.
			"max_num_seqs":              s.cfg.Engine.MaxSequences,
			"prefill_tokens_per_second": 1e9 / s.cfg.Engine.PrefillTokenNanos * s.cfg.TimeScale,
		}},
	})
}

func writeJSON(w http.ResponseWriter, status int, document any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// An error here means that the client is gone.
	_ = json.NewEncoder(w).Encode(document)
}

// writeError answers with an error document of the dialect.
func (s *Server) writeError(w http.ResponseWriter, e *apiError) {
	writeJSON(w, e.status, s.errorDocument(e))
}

func (s *Server) errorDocument(e *apiError) map[string]any {
	if s.cfg.Dialect == SGLang {
		return map[string]any{"error": map[string]any{"message": e.message}}
	}
	var param any
	if e.param != "" {
		param = e.param
	}
	return map[string]any{"error": map[string]any{"message": e.message, "type": e.kind, "param": param, "code": e.status}}
}
