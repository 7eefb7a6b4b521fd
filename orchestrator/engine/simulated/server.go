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
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"holdfast/router/sim/instance"
)

// Version is what the server says at /version: the vLLM whose dialect it speaks.
const Version = "0.14.0+simulated"

// Server is a simulated engine. Handler works from New on; Start and Stop add a
// listener of its own.
type Server struct {
	cfg     Config
	core    *core
	handler http.Handler

	mu       sync.Mutex
	listener net.Listener
	http     *http.Server
	served   chan struct{}
	// fresh holds the connections on which nothing has been asked yet. Shutdown
	// would wait for each of them for five seconds.
	fresh map[net.Conn]struct{}
}

// New makes an engine. Its clock starts now; it uses no goroutine while idle.
func New(cfg Config) (*Server, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg}
	var err error
	if s.core, err = s.newCore(); err != nil {
		return nil, fmt.Errorf("creating a simulated engine: %w", err)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collector{s})
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/completions", s.completions)
	mux.HandleFunc("GET /v1/models", s.models)
	mux.HandleFunc("GET /health", s.health)
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]string{"version": Version})
	})
	mux.HandleFunc("POST /reset_prefix_cache", func(http.ResponseWriter, *http.Request) { s.ResetPrefixCache() })
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, &apiError{http.StatusNotFound, "NotFoundError", "Not Found: " + r.Method + " " + r.URL.Path, ""})
	})
	s.handler = mux
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
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("starting a simulated engine: %w", err)
	}
	s.listener = listener
	s.fresh = make(map[net.Conn]struct{})
	s.http = &http.Server{Handler: s.handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, ConnState: s.connState}
	s.served = make(chan struct{})
	go func() {
		defer close(s.served)
		if err := s.http.Serve(listener); err != nil && !errors.Is(err, http.ErrServerClosed) {
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

// URL is the base URL of a started server.
func (s *Server) URL() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listener == nil {
		return ""
	}
	return "http://" + s.listener.Addr().String()
}

// Stop takes no new requests, lets those in flight finish until ctx ends, and
// aborts the rest. The engine does not work afterwards.
func (s *Server) Stop(ctx context.Context) error {
	s.mu.Lock()
	server, served := s.http, s.served
	s.mu.Unlock()
	var err error
	if server != nil {
		server.RegisterOnShutdown(s.closeFresh)
		if err = server.Shutdown(ctx); err != nil {
			s.core.close()
			// What was aborted still has its answer to write.
			writing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			if server.Shutdown(writing) != nil {
				err = errors.Join(err, server.Close())
			}
		}
		<-served
	}
	s.core.close()
	if err != nil {
		return fmt.Errorf("stopping a simulated engine: %w", err)
	}
	return nil
}

// ResetPrefixCache forgets all cached blocks.
func (s *Server) ResetPrefixCache() { s.core.look(s.core.model.ResetCache) }

// Stats is the model's state now.
func (s *Server) Stats() (stats instance.Stats) {
	s.core.look(func() { stats = s.core.model.Stats() })
	return stats
}

// RequestInfo is a request in flight.
type RequestInfo struct {
	RequestID, SessionID string
	Progress             instance.Progress
}

// Requests lists the requests in flight, in order of arrival.
func (s *Server) Requests() (list []RequestInfo) {
	s.core.look(func() {
		ids := make([]uint64, 0, len(s.core.calls))
		for id := range s.core.calls {
			ids = append(ids, id)
		}
		slices.Sort(ids)
		for _, id := range ids {
			x := s.core.calls[id]
			p, _ := s.core.model.Progress(id)
			list = append(list, RequestInfo{x.requestID, x.sessionID, p})
		}
	})
	return list
}

// ResidentBlocks lists the hashes of the blocks that are in the cache now, sorted.
func (s *Server) ResidentBlocks() (hashes []uint64) {
	s.core.look(func() {
		s.core.publishDecoded()
		hashes = s.core.chains.residentHashes(nil)
	})
	slices.Sort(hashes)
	return slices.Compact(hashes)
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	closed := false
	s.core.look(func() { closed = s.core.closed })
	if closed {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
}

func (s *Server) models(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{
		"object": "list",
		"data": []any{map[string]any{
			"id": s.cfg.Model, "object": "model", "created": s.core.started.Unix(), "owned_by": "vllm",
			"root": s.cfg.Model, "parent": nil, "max_model_len": s.cfg.Engine.MaxContextTokens,
			// Not vLLM's: what an operator would otherwise have to type in. Tokens a
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

func writeError(w http.ResponseWriter, e *apiError) { writeJSON(w, e.status, e.document()) }

func (e *apiError) document() map[string]any {
	var param any
	if e.param != "" {
		param = e.param
	}
	return map[string]any{"error": map[string]any{"message": e.message, "type": e.kind, "param": param, "code": e.status}}
}
