package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
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
// endpoint, with token ids in both directions (vLLM 0.10.2 or later).
type VLLM struct {
	base     string
	http     *http.Client
	interval int
	stall    time.Duration
	model    atomic.Pointer[string]
	// asked says that model is what the server said, which may change.
	asked bool
}

// NewVLLM returns a client for a vLLM server. It makes no call.
func NewVLLM(cfg VLLMConfig) (*VLLM, error) {
	u, err := url.Parse(cfg.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("engine URL %q: want http://host:port", cfg.URL)
	}
	if cfg.StreamIntervalTokens < 0 || cfg.StallTimeout < 0 {
		return nil, errors.New("engine client: a stream interval or stall timeout must not be negative")
	}
	v := &VLLM{
		base: strings.TrimRight(cfg.URL, "/"), http: cfg.HTTPClient,
		interval: cfg.StreamIntervalTokens, stall: cfg.StallTimeout,
	}
	if v.http == nil {
		v.http = &http.Client{Transport: newTransport()}
	}
	if v.interval == 0 {
		v.interval = 512
	}
	if v.stall == 0 {
		v.stall = 30 * time.Minute
	}
	if v.asked = cfg.Model == ""; !v.asked {
		v.model.Store(&cfg.Model)
	}
	return v, nil
}

// newTransport keeps a connection for each request in flight: an engine serves
// some hundreds, and the standard library would keep two.
func newTransport() *http.Transport {
	return &http.Transport{
		DialContext:         (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		MaxIdleConns:        4096,
		MaxIdleConnsPerHost: 1024,
		IdleConnTimeout:     90 * time.Second,
		DisableCompression:  true,
		WriteBufferSize:     64 << 10,
		ReadBufferSize:      64 << 10,
	}
}

const (
	maxErrorBodyBytes = 64 << 10
	maxInfoBodyBytes  = 1 << 20
	maxMetricsBytes   = 16 << 20
)

// Generate implements Client.
func (v *VLLM) Generate(ctx context.Context, request Request, onProgress func(Progress)) (Result, error) {
	started := time.Now()
	if len(request.Prompt) == 0 || request.MaxTokens < 1 || request.MinTokens < 0 || request.MinTokens > request.MaxTokens {
		return Result{CachedTokens: -1}, &Error{Class: FailTurn, Message: fmt.Sprintf("a prompt of %d tokens and %d to %d output tokens is no request", len(request.Prompt), request.MinTokens, request.MaxTokens)}
	}
	model, err := v.modelName(ctx)
	if err != nil {
		return Result{CachedTokens: -1}, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	body := v.encode(request, model)
	httpRequest, err := http.NewRequestWithContext(ctx, http.MethodPost, v.base+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return Result{CachedTokens: -1}, &Error{Class: FailTurn, Message: "making the request", Err: err}
	}
	httpRequest.Header.Set("Content-Type", "application/json")
	httpRequest.Header.Set("Accept", "text/event-stream")
	// Lets the transport try again, without sending the header, when a kept
	// connection turns out to be closed: servers close idle ones after seconds,
	// and one that died has aborted the request.
	httpRequest.Header["Idempotency-Key"] = []string{}
	if request.RequestID != "" {
		httpRequest.Header.Set("X-Request-Id", request.RequestID)
	}
	if request.SessionID != "" {
		httpRequest.Header.Set("X-Session-Id", request.SessionID)
	}
	if request.DataParallelRank >= 0 {
		httpRequest.Header.Set("X-data-parallel-rank", strconv.Itoa(request.DataParallelRank))
	}
	watch := newStallWatch(v.stall, cancel)
	defer watch.stop()
	response, err := v.http.Do(httpRequest)
	if err != nil {
		return Result{CachedTokens: -1}, watch.explain(ctx, "calling the engine", err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, maxErrorBodyBytes))
		e := statusError(response, text)
		if e.StatusCode == http.StatusNotFound && v.asked {
			// The server may have been restarted with another model: ask again.
			v.model.Store(nil)
			e.Class = RetryHere
		}
		return Result{CachedTokens: -1}, e
	}
	g := generation{started: started, request: &request, onProgress: onProgress}
	g.result.CachedTokens = -1
	g.result.PromptTokens = len(request.Prompt)
	// What is generated at least is worth one allocation.
	g.result.OutputIDs = make([]int32, 0, request.MinTokens)
	if request.WithLogprobs {
		g.result.Logprobs = make([]float32, 0, request.MinTokens)
	}
	err = g.read(response.Body, watch.touch)
	g.result.TotalSeconds = time.Since(started).Seconds()
	if err == nil {
		return g.result, nil
	}
	var e *Error
	if !errors.As(err, &e) {
		e = watch.explain(ctx, "reading the engine's answer", err)
	}
	return g.result, e
}

// modelName is the name to send, asked for once.
func (v *VLLM) modelName(ctx context.Context) (string, error) {
	if m := v.model.Load(); m != nil {
		return *m, nil
	}
	models, err := v.models(ctx)
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

type servedModel struct {
	ID               string `json:"id"`
	MaxContextTokens int64  `json:"max_model_len"`
	// MaxSequences and PrefillTokensPerSecond are what the simulated engine adds.
	MaxSequences           int     `json:"max_num_seqs"`
	PrefillTokensPerSecond float64 `json:"prefill_tokens_per_second"`
}

func (v *VLLM) models(ctx context.Context) (servedModel, error) {
	body, err := v.get(ctx, "/v1/models", maxInfoBodyBytes)
	if err != nil {
		return servedModel{}, err
	}
	var list struct {
		Data []servedModel `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return servedModel{}, &Error{Class: RetryElsewhere, Message: "reading the engine's models", Err: err}
	}
	if len(list.Data) == 0 || list.Data[0].ID == "" {
		return servedModel{}, &Error{Class: RetryElsewhere, Message: "the engine serves no model"}
	}
	return list.Data[0], nil
}

// Discover implements Client.
func (v *VLLM) Discover(ctx context.Context) (Info, error) {
	model, err := v.models(ctx)
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
		BlockTokens:            metrics.BlockTokens, CapacityBlocks: metrics.CapacityBlocks,
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

// get reads a small document.
func (v *VLLM) get(ctx context.Context, path string, limit int64) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, v.base+path, nil)
	if err != nil {
		return nil, &Error{Class: FailTurn, Message: "making the request", Err: err}
	}
	response, err := v.http.Do(request)
	if err != nil {
		return nil, transportError(ctx, "calling "+path, err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, limit+1))
	switch {
	case err != nil:
		return nil, transportError(ctx, "reading "+path, err)
	case response.StatusCode != http.StatusOK:
		return nil, statusError(response, body)
	case int64(len(body)) > limit:
		return nil, &Error{Class: RetryElsewhere, Message: fmt.Sprintf("%s answers with more than %d bytes", path, limit)}
	}
	return body, nil
}

// stallWatch cancels a call over which nothing has come for too long.
type stallWatch struct {
	timer   *time.Timer
	after   time.Duration
	stalled atomic.Bool
}

func newStallWatch(after time.Duration, cancel context.CancelFunc) *stallWatch {
	w := &stallWatch{after: after}
	w.timer = time.AfterFunc(after, func() {
		w.stalled.Store(true)
		cancel()
	})
	return w
}

func (w *stallWatch) touch() { w.timer.Reset(w.after) }
func (w *stallWatch) stop()  { w.timer.Stop() }

// explain sorts the error of a call that broke, which may be the watch's doing.
func (w *stallWatch) explain(ctx context.Context, doing string, err error) *Error {
	if w.stalled.Load() {
		return &Error{Class: RetryElsewhere, Message: fmt.Sprintf("%s: nothing came for %s", doing, w.after), Err: err}
	}
	return transportError(ctx, doing, err)
}
