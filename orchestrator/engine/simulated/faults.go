package simulated

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"holdfast/orchestrator/engine/simulated/fault"
)

// routeFaults adds the endpoints that no engine has.
func (s *Server) routeFaults(mux *http.ServeMux) {
	mux.HandleFunc("GET /simulated/faults", s.live(s.getFaults))
	mux.HandleFunc("PUT /simulated/faults", s.live(s.putFaults))
	mux.HandleFunc("PUT /simulated/script", s.live(s.putScript))
	mux.HandleFunc("GET /simulated/kv_events", s.live(func(_ *life, w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, s.KVEndpoints())
	}))
}

// faultState is the document of /simulated/faults.
type faultState struct {
	Settings fault.Settings `json:"settings"`
	Counters fault.Counters `json:"counters"`
}

func (s *Server) getFaults(_ *life, w http.ResponseWriter, _ *http.Request) {
	settings, counters := s.faults.State()
	writeJSON(w, http.StatusOK, faultState{settings, counters})
}

// putFaults replaces all settings. A crash comes after the answer.
func (s *Server) putFaults(l *life, w http.ResponseWriter, r *http.Request) {
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20))
	decoder.DisallowUnknownFields()
	var settings fault.Settings
	err := decoder.Decode(&settings)
	crash := settings.Crash
	settings.Crash = nil
	if err == nil {
		err = s.SetFaults(settings)
	}
	if err != nil {
		s.writeError(w, badRequest("", "faults: %v", err))
		return
	}
	s.getFaults(l, w, r)
	if crash != nil {
		// An error means that the client did not wait for the answer.
		_ = http.NewResponseController(w).Flush()
		go s.Crash(seconds(crash.DownSeconds))
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// SetFaults replaces the faults in force and starts their choices anew.
func (s *Server) SetFaults(settings fault.Settings) error {
	if err := s.faults.Set(settings); err != nil {
		return err
	}
	s.startFaults(settings)
	return nil
}

// Faults returns the faults in force and what they have done.
func (s *Server) Faults() (fault.Settings, fault.Counters) { return s.faults.State() }

// startFaults begins what does not wait for a request.
func (s *Server) startFaults(settings fault.Settings) {
	s.applySpeed()
	var page []byte
	if settings.Metrics.Mode == fault.Frozen {
		page = s.metricsPage()
	}
	s.mu.Lock()
	s.stall = stall{settings.Metrics.Mode, time.Now().Add(seconds(settings.Metrics.Seconds)), page}
	stopTimer(s.storm)
	s.storms++
	if p, storm := settings.Preemptions, s.storms; p.Times > 0 && !s.stopped {
		s.storm = time.AfterFunc(0, func() { s.preempt(storm, p.Times, seconds(p.IntervalSeconds)) })
	}
	s.mu.Unlock()
	if settings.Crash != nil {
		s.Crash(seconds(settings.Crash.DownSeconds))
	}
}

// applySpeed slows the ranks down as the faults say.
func (s *Server) applySpeed() {
	settings, _ := s.faults.State()
	s.eachRank(func(c *core) { c.setSpeed(1 / settings.SlowFactor) })
}

// preempt is one gust of a preemption storm, unless another one has taken its place.
func (s *Server) preempt(storm, times int, interval time.Duration) {
	s.mu.Lock()
	over := s.storms != storm || s.stopped
	s.mu.Unlock()
	if over {
		return
	}
	var hit int64
	s.eachRank(func(c *core) { hit += c.preemptAll() })
	s.faults.Count(func(n *fault.Counters) { n.Preempted += hit })
	s.mu.Lock()
	defer s.mu.Unlock()
	if times > 1 && s.storms == storm && !s.stopped {
		s.storm = time.AfterFunc(interval, func() { s.preempt(storm, times-1, interval) })
	}
}

// Crash ends everything at once: connections break, the port refuses, and nothing
// in flight gets an answer. After the time down the engine starts again in place, with
// an empty cache, its first weights, and KV events numbered from 0. Faults stay as set.
func (s *Server) Crash(down time.Duration) {
	s.mu.Lock()
	if s.stopped {
		s.mu.Unlock()
		return
	}
	l, server, served := s.life.Swap(nil), s.http, s.served
	s.mu.Unlock()
	if l == nil {
		return // It is down already.
	}
	s.faults.Count(func(n *fault.Counters) { n.Crashes++ })
	l.close(crashed)
	if server != nil {
		// An error means that the listener was closed already.
		_ = server.Close()
		<-served
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reopen = s.reopen || server != nil
	if !s.stopped {
		s.restart = time.AfterFunc(down, s.comeBack)
	}
}

// restartRetry is how long a restart waits for its ports when somebody has taken them.
const restartRetry = 100 * time.Millisecond

// comeBack restarts the engine in place.
func (s *Server) comeBack() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped || s.life.Load() != nil {
		return
	}
	l, err := s.newLife()
	if err == nil {
		s.life.Store(l)
		if s.reopen {
			err = s.serve()
		}
		if err != nil {
			s.life.Store(nil)
			l.close(crashed)
		}
	}
	if err != nil {
		s.cfg.Logger.Error("a simulated engine does not come back yet", "error", err)
		s.restart = time.AfterFunc(restartRetry, s.comeBack)
		return
	}
	s.reopen = false
	s.applySpeed()
}

// stall is a metrics page that does not follow the engine.
type stall struct {
	mode  string
	until time.Time
	page  []byte
}

// stalling wraps the pages that tell of the engine's load.
func (s *Server) stalling(page http.Handler) http.HandlerFunc {
	return s.live(func(_ *life, w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		stall := s.stall
		s.mu.Unlock()
		left := time.Until(stall.until)
		if stall.mode == "" || left <= 0 {
			page.ServeHTTP(w, r)
			return
		}
		s.faults.Count(func(n *fault.Counters) { n.MetricsStalled++ })
		if stall.mode == fault.Frozen && r.URL.Path == metricsPath {
			w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
			// An error means that the client is gone.
			_, _ = w.Write(stall.page)
			return
		}
		timer := time.NewTimer(left)
		defer timer.Stop()
		select {
		case <-timer.C:
			page.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
	})
}

const metricsPath = "/metrics"

// page keeps what a handler writes.
type page struct {
	bytes.Buffer
	header http.Header
}

func (p *page) Header() http.Header { return p.header }
func (p *page) WriteHeader(int)     {}

// metricsPage is the page as it is now.
func (s *Server) metricsPage() []byte {
	p := &page{header: http.Header{}}
	// A background request is as good as any: the page is the same for all.
	s.metrics.ServeHTTP(p, &http.Request{Method: http.MethodGet, Header: http.Header{}})
	return p.Bytes()
}

// refuseByFault answers in the place of a generation, if a fault says so.
func (s *Server) refuseByFault(w http.ResponseWriter) error {
	r, ok := s.faults.Refusal()
	if !ok {
		return nil
	}
	if r.RetryAfterSeconds > 0 {
		w.Header().Set("Retry-After", strconv.FormatFloat(r.RetryAfterSeconds, 'f', -1, 64))
	}
	return &apiError{r.Status, "InternalServerError", "a fault on demand: " + http.StatusText(r.Status), ""}
}
