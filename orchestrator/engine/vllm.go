package engine

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"holdfast/orchestrator/engine/internal/jsonscan"
)

// VLLMConfig is what a VLLM client needs.
type VLLMConfig struct {
	// URL is the server's base, such as http://10.0.0.7:8000.
	URL string
	// Model is the served model's name; empty asks the server.
	Model string
	// StreamIntervalTokens is how many tokens the server should send at a time. vLLM
	// has it as a server flag and ignores it in a request; the simulated engine follows it. Default 512.
	StreamIntervalTokens int
	// StallTimeout is how long a generation may be silent before the instance
	// counts as gone; it includes the wait in the engine's queue. Default 30 minutes.
	StallTimeout time.Duration
	// HTTPClient replaces the client's own connections.
	HTTPClient *http.Client
}

// VLLM speaks to a vLLM server through its OpenAI-compatible completions
// endpoint, with token ids in both directions (vLLM 0.10.2 or later). It
// implements Controller.
type VLLM struct {
	server
	interval int
	model    atomic.Pointer[string]
	// asked says that model is what the server said, which may change.
	asked bool
}

// NewVLLM returns a client for a vLLM server. It makes no call.
func NewVLLM(cfg VLLMConfig) (*VLLM, error) {
	s, err := newServer(cfg.URL, cfg.HTTPClient, cfg.StallTimeout)
	if err != nil {
		return nil, err
	}
	if cfg.StreamIntervalTokens < 0 {
		return nil, errors.New("engine client: a stream interval must not be negative")
	}
	v := &VLLM{server: s, interval: cfg.StreamIntervalTokens}
	if v.interval == 0 {
		v.interval = 512
	}
	if v.asked = cfg.Model == ""; !v.asked {
		v.model.Store(&cfg.Model)
	}
	return v, nil
}

// Generate implements Client.
func (v *VLLM) Generate(ctx context.Context, request Request, onProgress func(Progress)) (Result, error) {
	started := time.Now()
	if err := checkRequest(&request); err != nil {
		return Result{CachedTokens: -1}, err
	}
	model, err := v.modelName(ctx)
	if err != nil {
		return Result{CachedTokens: -1}, err
	}
	header := make(http.Header, 8)
	if request.RequestID != "" {
		header.Set("X-Request-Id", request.RequestID)
	}
	if request.SessionID != "" {
		header.Set("X-Session-Id", request.SessionID)
	}
	if request.DataParallelRank >= 0 {
		header.Set("X-data-parallel-rank", strconv.Itoa(request.DataParallelRank))
	}
	g := generation{collected{started: started, request: &request, onProgress: onProgress, result: newResult(&request)}}
	err = v.stream(ctx, "/v1/completions", v.encode(request, model), header, g.read)
	g.result.TotalSeconds = time.Since(started).Seconds()
	var e *Error
	if v.asked && errors.As(err, &e) && e.StatusCode == http.StatusNotFound && !g.begun() {
		// The server may have been restarted with another model: ask again.
		v.model.Store(nil)
		e.Class = RetryHere
	}
	return g.result, err
}

// newResult has room for what is generated at least.
func newResult(request *Request) Result {
	r := Result{CachedTokens: -1, PromptTokens: len(request.Prompt), OutputIDs: make([]int32, 0, request.MinTokens)}
	if request.WithLogprobs {
		r.Logprobs = make([]float32, 0, request.MinTokens)
	}
	return r
}

// modelName is the name to send, asked for once.
func (v *VLLM) modelName(ctx context.Context) (string, error) {
	if m := v.model.Load(); m != nil {
		return *m, nil
	}
	models, err := listModels(ctx, &v.server)
	if err != nil {
		return "", err
	}
	v.model.Store(&models.ID)
	return models.ID, nil
}

// encode writes the request document. Prompts are long, so that nothing here
// goes through reflection.
func (v *VLLM) encode(r Request, model string) []byte {
	buf := make([]byte, 0, 512+8*len(r.Prompt)+8*len(r.StopTokenIDs))
	buf = append(buf, `{"model":`...)
	buf = jsonscan.WriteString(buf, model)
	buf = append(buf, `,"max_tokens":`...)
	buf = strconv.AppendInt(buf, int64(r.MaxTokens), 10)
	if r.MinTokens > 0 {
		buf = append(buf, `,"min_tokens":`...)
		buf = strconv.AppendInt(buf, int64(r.MinTokens), 10)
	}
	if r.IgnoreEOS {
		buf = append(buf, `,"ignore_eos":true`...)
	}
	buf = append(buf, `,"temperature":`...)
	buf = strconv.AppendFloat(buf, r.Temperature, 'g', -1, 64)
	if r.TopP > 0 {
		buf = append(buf, `,"top_p":`...)
		buf = strconv.AppendFloat(buf, r.TopP, 'g', -1, 64)
	}
	if r.Seed != nil {
		buf = append(buf, `,"seed":`...)
		buf = strconv.AppendInt(buf, *r.Seed, 10)
	}
	if len(r.StopTokenIDs) > 0 {
		buf = append(buf, `,"stop_token_ids":`...)
		buf = jsonscan.WriteInts(buf, r.StopTokenIDs)
	}
	if r.WithLogprobs {
		buf = append(buf, `,"logprobs":0`...)
	}
	if r.CacheSalt != "" {
		buf = append(buf, `,"cache_salt":`...)
		buf = jsonscan.WriteString(buf, r.CacheSalt)
	}
	if r.Priority != 0 {
		buf = append(buf, `,"priority":`...)
		buf = strconv.AppendInt(buf, int64(r.Priority), 10)
	}
	buf = append(buf, `,"stream":true,"stream_options":{"include_usage":true},"return_token_ids":true`...)
	// Extensions of the simulated engine, ignored by vLLM.
	buf = append(buf, `,"return_prompt_token_ids":false,"stream_interval":`...)
	buf = strconv.AppendInt(buf, int64(v.interval), 10)
	buf = append(buf, `,"prompt":`...)
	buf = jsonscan.WriteInts(buf, r.Prompt)
	return append(buf, '}')
}

// Health implements Client.
func (v *VLLM) Health(ctx context.Context) error {
	_, err := v.get(ctx, "/health", maxErrorBodyBytes)
	return err
}

// Metrics implements Client.
func (v *VLLM) Metrics(ctx context.Context) (Metrics, error) {
	body, err := v.get(ctx, "/metrics", maxMetricsBytes)
	if err != nil {
		return Metrics{}, err
	}
	m, err := parseMetrics(body)
	if err != nil {
		return Metrics{}, &Error{Class: RetryElsewhere, Message: "reading the engine's metrics", Err: err}
	}
	return m, nil
}

// servedModel is an entry of /v1/models.
type servedModel struct {
	ID               string `json:"id"`
	MaxContextTokens int64  `json:"max_model_len"`
	// MaxSequences and PrefillTokensPerSecond are what the simulated engine adds.
	MaxSequences           int     `json:"max_num_seqs"`
	PrefillTokensPerSecond float64 `json:"prefill_tokens_per_second"`
}

// Discover implements Client.
func (v *VLLM) Discover(ctx context.Context) (Info, error) {
	model, err := listModels(ctx, &v.server)
	if err != nil {
		return Info{}, err
	}
	metrics, err := v.Metrics(ctx)
	if err != nil {
		return Info{}, err
	}
	info := Info{
		Model: model.ID, MaxContextTokens: model.MaxContextTokens, MaxRunning: model.MaxSequences,
		PrefillTokensPerSecond: model.PrefillTokensPerSecond,
		BlockTokens:            metrics.BlockTokens, CapacityBlocks: metrics.CapacityBlocks, DataParallelSize: max(1, len(metrics.Ranks)),
	}
	var version struct {
		Version string `json:"version"`
	}
	// Not every server that speaks vLLM has the endpoint, and nothing depends on it.
	if body, err := v.get(ctx, "/version", maxInfoBodyBytes); err == nil && json.Unmarshal(body, &version) == nil {
		info.Version = version.Version
	}
	return info, nil
}
