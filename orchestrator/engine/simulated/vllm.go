package simulated

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// Version is what the server says at /version: the vLLM whose dialect it speaks.
const Version = "0.14.0+simulated"

// routeVLLM adds the endpoints that vLLM alone has. Those that control the engine
// are behind VLLM_SERVER_DEV_MODE=1 in a real one.
func (s *Server) routeVLLM(mux *http.ServeMux) {
	mux.HandleFunc("POST /v1/completions", s.live(s.completions))
	mux.HandleFunc("POST /tokenize", s.live(s.tokenizeVLLM))
	mux.HandleFunc("POST /detokenize", s.live(s.detokenizeVLLM))
	mux.HandleFunc("GET /version", s.live(func(_ *life, w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]string{"version": Version})
	}))
	mux.HandleFunc("POST /reset_prefix_cache", s.live(s.resetPrefixCache))
	mux.HandleFunc("POST /pause", s.live(s.pauseVLLM))
	mux.HandleFunc("POST /resume", s.live(func(l *life, w http.ResponseWriter, _ *http.Request) {
		l.resume()
		writeJSON(w, http.StatusOK, map[string]string{"status": "resumed"})
	}))
	mux.HandleFunc("GET /is_paused", s.live(func(l *life, w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]bool{"is_paused": l.cores[0].isPaused()})
	}))
	mux.HandleFunc("POST /abort_requests", s.live(s.abortRequests))
	mux.HandleFunc("POST /sleep", s.live(s.sleep))
	mux.HandleFunc("POST /wake_up", s.live(s.wakeUp))
	mux.HandleFunc("GET /is_sleeping", s.live(func(l *life, w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]bool{"is_sleeping": l.sleepLevel() > 0})
	}))
	// Transferring weights takes what is called between start and finish; here only
	// the name that comes at the end counts.
	for _, path := range []string{"/init_weight_transfer_engine", "/start_weight_update", "/update_weights"} {
		mux.HandleFunc("POST "+path, s.live(func(_ *life, w http.ResponseWriter, r *http.Request) {
			writeJSON(w, http.StatusOK, map[string]string{"message": strings.ReplaceAll(strings.TrimPrefix(r.URL.Path, "/"), "_", " ") + " done"})
		}))
	}
	mux.HandleFunc("POST /finish_weight_update", s.live(func(l *life, w http.ResponseWriter, r *http.Request) {
		s.newWeights(l, w, r, "weight_version")
	}))
	mux.HandleFunc("POST /update_weight_version", s.live(func(l *life, w http.ResponseWriter, r *http.Request) {
		s.newWeights(l, w, r, "new_version")
	}))
	// A vLLM of 2026 says its version here; older ones have no word for it.
	mux.HandleFunc("GET /weight_info", s.live(func(l *life, w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]string{"weight_version": l.weightVersion()})
	}))
}

// newWeights takes a version from a body that may be empty.
func (s *Server) newWeights(l *life, w http.ResponseWriter, r *http.Request, key string) {
	body := map[string]any{}
	if err := readSmall(r, &body); err != nil {
		s.writeError(w, badRequest("", "%v", err))
		return
	}
	version, _ := body[key].(string)
	l.setWeights(version)
	writeJSON(w, http.StatusOK, map[string]string{"message": "Weight update finished", "weight_version": l.weightVersion()})
}

const maxControlBytes = 1 << 20

// readSmall reads the JSON body of a control call, which may be missing.
func readSmall(r *http.Request, into any) error {
	err := json.NewDecoder(io.LimitReader(r.Body, maxControlBytes)).Decode(into)
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// queryBool reads a boolean of the query.
func queryBool(r *http.Request, name string, otherwise bool) (bool, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return otherwise, nil
	}
	v, err := strconv.ParseBool(text)
	if err != nil {
		return false, badRequest(name, "%s = %q is no boolean", name, text)
	}
	return v, nil
}

// pauseVLLM serves POST /pause?mode=&clear_cache=.
func (s *Server) pauseVLLM(l *life, w http.ResponseWriter, r *http.Request) {
	clearCache, err := queryBool(r, "clear_cache", true)
	if err != nil {
		s.refuse(w, err)
		return
	}
	mode := r.URL.Query().Get("mode")
	switch mode {
	case "", "abort":
		l.each((*core).pause)
		l.abortAll(anyCall)
	case "wait":
		if err := l.drain(r.Context()); err != nil {
			return // Nobody reads the answer.
		}
	case "keep":
		l.each((*core).pause)
	default:
		writeJSON(w, http.StatusBadRequest, map[string]string{"error": "Invalid mode: '" + mode + "'. Must be 'abort', 'wait', or 'keep'."})
		return
	}
	if clearCache {
		l.reset(true)
	}
	writeJSON(w, http.StatusOK, map[string]string{"status": "paused"})
}

// resetPrefixCache serves POST /reset_prefix_cache. A vLLM with requests under way
// answers 200 and has not reset anything, unless it is told to preempt them;
// versions before mid-2026 do not even say so in the body.
func (s *Server) resetPrefixCache(l *life, w http.ResponseWriter, r *http.Request) {
	preempt, err := queryBool(r, "reset_running_requests", false)
	if err != nil {
		s.refuse(w, err)
		return
	}
	done := !s.faults.RefuseFlush() && l.reset(preempt)
	writeJSON(w, http.StatusOK, map[string]bool{"success": done})
}

// abortRequests serves POST /abort_requests {request_ids}; without ids it aborts all.
func (s *Server) abortRequests(l *life, w http.ResponseWriter, r *http.Request) {
	var body struct {
		RequestIDs []string `json:"request_ids"`
	}
	if err := readSmall(r, &body); err != nil {
		s.writeError(w, badRequest("request_ids", "%v", err))
		return
	}
	n := l.abortAll(func(x *call) bool {
		return len(body.RequestIDs) == 0 || slices.Contains(body.RequestIDs, x.requestID) || slices.Contains(body.RequestIDs, "cmpl-"+x.requestID)
	})
	writeJSON(w, http.StatusOK, map[string]any{"status": "aborted", "num_aborted": n})
}

// sleep serves POST /sleep?level=: level 0 only pauses, the others give the cache up.
// What runs is aborted.
func (s *Server) sleep(l *life, w http.ResponseWriter, r *http.Request) {
	level := 1
	if text := r.URL.Query().Get("level"); text != "" {
		var err error
		if level, err = strconv.Atoi(text); err != nil || level < 0 || level > 2 {
			s.writeError(w, badRequest("level", "level = %q, want 0, 1 or 2", text))
			return
		}
	}
	l.each((*core).pause)
	if level > 0 {
		l.abortAll(anyCall)
		l.reset(true)
	}
	l.mu.Lock()
	l.sleep = level
	l.mu.Unlock()
}

func (s *Server) wakeUp(l *life, _ http.ResponseWriter, _ *http.Request) {
	l.mu.Lock()
	l.sleep = 0
	l.mu.Unlock()
	l.resume()
}

func (l *life) sleepLevel() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sleep
}

func (s *Server) sleepLevel() int {
	if l := s.life.Load(); l != nil {
		return l.sleepLevel()
	}
	return 0
}
