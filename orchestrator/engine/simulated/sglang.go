package simulated

import (
	"encoding/json"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// sglangVersion is the SGLang whose dialect it speaks.
const sglangVersion = "0.5.9+simulated"

// routeSGLang adds the endpoints that SGLang alone has.
func (s *Server) routeSGLang(mux *http.ServeMux) {
	mux.HandleFunc("POST /generate", s.live(s.generate))
	mux.HandleFunc("POST /tokenize", s.live(s.tokenizeSGLang))
	mux.HandleFunc("POST /detokenize", s.live(s.detokenizeSGLang))
	for path, handle := range map[string]func(*life, http.ResponseWriter, *http.Request){
		"GET /health_generate": s.health,
		"GET /server_info":     s.serverInfo, "GET /get_server_info": s.serverInfo,
		"GET /model_info": s.modelInfo, "GET /get_model_info": s.modelInfo,
		"GET /get_weight_version":               s.getWeightVersion,
		"POST /pause_generation":                s.pauseGeneration,
		"POST /continue_generation":             s.continueGeneration,
		"GET /flush_cache":                      s.flushCache,
		"POST /flush_cache":                     s.flushCache,
		"POST /abort_request":                   s.abortRequest,
		"POST /update_weights_from_disk":        s.updateWeights,
		"POST /update_weights_from_tensor":      s.updateWeights,
		"POST /update_weights_from_distributed": s.updateWeights,
		"POST /update_weight_version":           s.updateWeightVersion,
	} {
		mux.HandleFunc(path, s.live(handle))
	}
	mux.HandleFunc("GET /v1/loads", s.stalling(s.live(s.loads)))
}

func (s *Server) modelInfo(l *life, w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{
		"model_path": s.cfg.Model, "tokenizer_path": s.cfg.Model, "is_generation": true,
		"preferred_sampling_params": nil, "weight_version": l.weightVersion(),
	})
}

func (s *Server) getWeightVersion(l *life, w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]string{"weight_version": l.weightVersion()})
}

// serverInfo tells how the engine is set up, and where it publishes KV events.
func (s *Server) serverInfo(l *life, w http.ResponseWriter, _ *http.Request) {
	e := &s.cfg.Engine
	states := make([]map[string]any, 0, len(l.cores))
	for _, rank := range s.snapshots() {
		states = append(states, map[string]any{
			"last_gen_throughput":                   rank.throughput(&s.cfg),
			"effective_max_running_requests_per_dp": e.MaxSequences,
		})
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"model_path": s.cfg.Model, "served_model_name": s.cfg.Model, "version": sglangVersion,
		"page_size": e.BlockTokens, "context_length": e.MaxContextTokens, "max_req_input_len": e.MaxContextTokens - 1,
		"max_total_num_tokens": e.BlockTokens * e.CapacityBlocks, "max_running_requests": e.MaxSequences,
		"chunked_prefill_size": e.MaxBatchedTokens, "dp_size": s.cfg.Ranks, "tp_size": 1, "enable_metrics": true,
		"incremental_streaming_output": s.cfg.IncrementalStream, "stream_interval": s.cfg.StreamIntervalTokens,
		"weight_version": l.weightVersion(), "kv_events": s.kvEventsInfo(), "internal_states": states,
		// Not SGLang's; see models.
		"prefill_tokens_per_second": 1e9 / e.PrefillTokenNanos * s.cfg.TimeScale,
	})
}

// kvEventsInfo is nil if nothing is published. Ports are of rank 0; the others follow.
func (s *Server) kvEventsInfo() any {
	endpoints := s.KVEndpoints()
	if len(endpoints) == 0 {
		return nil
	}
	hostPort := func(endpoint string) (string, int) {
		host, text, _ := net.SplitHostPort(strings.TrimPrefix(endpoint, "tcp://"))
		port, _ := strconv.Atoi(text) // The endpoint is one that was bound.
		return host, port
	}
	host, port := hostPort(endpoints[0].Endpoint)
	info := map[string]any{
		"publisher": "zmq", "endpoint_host": host, "endpoint_port_base": port, "topic": s.cfg.KVEvents.Topic,
		"block_size": s.cfg.Engine.BlockTokens, "dp_size": s.cfg.Ranks,
	}
	if replay := endpoints[0].ReplayEndpoint; replay != "" {
		_, info["replay_endpoint_port_base"] = hostPort(replay)
	}
	return info
}

// loads reports each rank's load.
func (s *Server) loads(_ *life, w http.ResponseWriter, _ *http.Request) {
	capacity := s.cfg.Engine.BlockTokens * s.cfg.Engine.CapacityBlocks
	list := []map[string]any{}
	running, waiting := 0, 0
	for _, rank := range s.snapshots() {
		stats := &rank.stats
		used := stats.UsedBlocks() * s.cfg.Engine.BlockTokens
		number, _ := strconv.Atoi(rank.rank) // It was made from a number.
		list = append(list, map[string]any{
			"dp_rank": number, "num_running_reqs": stats.Running(), "num_waiting_reqs": stats.Waiting,
			"num_total_reqs": stats.Running() + stats.Waiting, "num_used_tokens": used, "max_total_num_tokens": capacity,
			"token_usage": float64(used) / float64(capacity), "gen_throughput": rank.throughput(&s.cfg),
			"cache_hit_rate": ratio(stats.CachedTokens, stats.PromptTokens), "max_running_requests": s.cfg.Engine.MaxSequences,
		})
		running += stats.Running()
		waiting += stats.Waiting
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"timestamp": time.Now().UTC().Format(time.RFC3339Nano), "version": sglangVersion, "dp_rank_count": len(list), "loads": list,
		"aggregate": map[string]int{"total_running_reqs": running, "total_waiting_reqs": waiting, "total_reqs": running + waiting},
	})
}

func ratio(part, whole int64) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// throughput is generated tokens per wall second, on average since the start.
func (r *snapshot) throughput(cfg *Config) float64 {
	if r.at == 0 {
		return 0
	}
	return float64(r.stats.GeneratedTokens) / r.at * cfg.TimeScale
}

// readControl reads a control call's body or answers that it is none.
func (s *Server) readControl(w http.ResponseWriter, r *http.Request, into any) bool {
	if err := readSmall(r, into); err != nil {
		s.writeError(w, badRequest("", "%v", err))
		return false
	}
	return true
}

// pauseGeneration serves POST /pause_generation {mode}. Retracted requests lose their
// blocks; those paused in place keep them, and with them the old weights' KV.
func (s *Server) pauseGeneration(l *life, w http.ResponseWriter, r *http.Request) {
	body := struct {
		Mode string `json:"mode"`
	}{"abort"}
	if !s.readControl(w, r, &body) {
		return
	}
	switch body.Mode {
	case "abort", "retract", "in_place":
	default:
		s.writeError(w, badRequest("mode", "Invalid mode: %q. Expected one of [\"abort\", \"retract\", \"in_place\"].", body.Mode))
		return
	}
	l.each((*core).pause)
	switch body.Mode {
	case "abort":
		l.abortAll(anyCall)
	case "retract":
		l.each(func(c *core) { c.preemptAll() })
	}
	writeJSON(w, http.StatusOK, map[string]string{"message": "Generation paused successfully.", "status": "ok"})
}

func (s *Server) continueGeneration(l *life, w http.ResponseWriter, _ *http.Request) {
	l.resume()
	writeJSON(w, http.StatusOK, map[string]string{"message": "Generation continued successfully.", "status": "ok"})
}

// flush forgets the caches unless requests are pending. Requests that wait because
// the engine is paused do not count.
func (s *Server) flush(l *life) bool {
	busy := s.faults.RefuseFlush()
	l.each(func(c *core) { busy = busy || c.busy() })
	return !busy && l.reset(false)
}

func (s *Server) flushCache(l *life, w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	text := "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be performed.)\n"
	if !s.flush(l) {
		w.WriteHeader(http.StatusBadRequest)
		text = "Flush cache failed: there are running or waiting requests.\n"
	}
	// An error means that the client is gone.
	_, _ = w.Write([]byte(text))
}

// abortRequest serves POST /abort_request {rid | abort_all}. A rid aborts all requests
// whose ids begin with it.
func (s *Server) abortRequest(l *life, w http.ResponseWriter, r *http.Request) {
	var body struct {
		RID string `json:"rid"`
		All bool   `json:"abort_all"`
	}
	if !s.readControl(w, r, &body) {
		return
	}
	l.abortAll(func(x *call) bool { return body.All || body.RID != "" && strings.HasPrefix(x.requestID, body.RID) })
}

// updateWeights serves POST /update_weights_from_disk and its like. The weights are
// only a name here. Unless the engine is paused it waits for what is in flight.
func (s *Server) updateWeights(l *life, w http.ResponseWriter, r *http.Request) {
	body := struct {
		Version    *string `json:"weight_version"`
		FlushCache bool    `json:"flush_cache"`
		AbortAll   bool    `json:"abort_all_requests"`
	}{FlushCache: true}
	if !s.readControl(w, r, &body) {
		return
	}
	if body.AbortAll {
		l.abortAll(anyCall)
	}
	paused := l.cores[0].isPaused()
	if !paused {
		if err := l.drain(r.Context()); err != nil {
			l.resume()
			return // Nobody reads the answer.
		}
		defer l.resume()
	}
	if body.FlushCache && !s.flush(l) {
		writeJSON(w, http.StatusBadRequest, map[string]any{"success": false, "message": "Cache flush failed: requests are running.", "num_paused_requests": 0})
		return
	}
	version := ""
	if body.Version != nil {
		version = *body.Version
	}
	l.setWeights(version)
	writeJSON(w, http.StatusOK, map[string]any{"success": true, "message": "Succeeded to update model weights.", "num_paused_requests": 0})
}

// updateWeightVersion serves POST /update_weight_version {new_version, abort_all_requests},
// which aborts everything unless told not to.
func (s *Server) updateWeightVersion(l *life, w http.ResponseWriter, r *http.Request) {
	body := struct {
		Version  string `json:"new_version"`
		AbortAll bool   `json:"abort_all_requests"`
	}{AbortAll: true}
	if !s.readControl(w, r, &body) {
		return
	}
	if body.AbortAll {
		l.abortAll(anyCall)
	}
	l.setWeights(body.Version)
	writeJSON(w, http.StatusOK, map[string]any{"success": true, "message": "Weight version updated to " + body.Version, "new_version": body.Version})
}

// rankText accepts a rank as a number.
func rankText(value []byte) (string, error) {
	var n int
	if err := json.Unmarshal(value, &n); err != nil {
		return "", err
	}
	return strconv.Itoa(n), nil
}
