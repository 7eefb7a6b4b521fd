package engine

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"holdfast/orchestrator/engine/internal/jsonscan"
)

// SGLangConfig is what an SGLang client needs.
type SGLangConfig struct {
	// URL is the server's base, such as http://10.0.0.7:30000.
	URL string
	// StallTimeout is how long a generation may be silent before the instance
	// counts as gone; it includes the wait in the engine's queue. Default 30 minutes.
	StallTimeout time.Duration
	// IdlePollInterval is how often Pause asks a busy engine whether it is idle, when
	// it waits. Default 250 ms.
	IdlePollInterval time.Duration
	// HTTPClient replaces the client's own connections.
	HTTPClient *http.Client
}

// SGLang speaks to an SGLang server through its native /generate endpoint, with
// token ids in both directions (SGLang 0.5.3 or later). It implements Controller.
type SGLang struct {
	server
	idlePoll time.Duration
	inFlight atomic.Int64
}

// NewSGLang returns a client for an SGLang server. It makes no call.
func NewSGLang(cfg SGLangConfig) (*SGLang, error) {
	s, err := newServer(cfg.URL, cfg.HTTPClient, cfg.StallTimeout)
	if err != nil {
		return nil, err
	}
	if cfg.IdlePollInterval < 0 {
		return nil, errors.New("engine client: the idle poll interval must not be negative")
	}
	if cfg.IdlePollInterval == 0 {
		cfg.IdlePollInterval = 250 * time.Millisecond
	}
	return &SGLang{server: s, idlePoll: cfg.IdlePollInterval}, nil
}

// abortTimeout bounds the call that tells an engine to give a request up.
const abortTimeout = 2 * time.Second

// Generate implements Client.
func (s *SGLang) Generate(ctx context.Context, request Request, onProgress func(Progress)) (Result, error) {
	started := time.Now()
	if err := checkRequest(&request); err != nil {
		return Result{CachedTokens: -1}, err
	}
	s.inFlight.Add(1)
	defer s.inFlight.Add(-1)
	rid := uniqueRequestID(request.RequestID)
	g := sglangGeneration{collected: collected{started: started, request: &request, onProgress: onProgress, result: newResult(&request)}}
	header := make(http.Header, 4)
	if request.SessionID != "" {
		header.Set("X-Session-Id", request.SessionID)
	}
	err := s.stream(ctx, "/generate", encodeSGLang(&request, rid), header, g.read)
	g.result.TotalSeconds = time.Since(started).Seconds()
	if err != nil && !answered(err) {
		s.abort(ctx, rid)
	}
	return g.result, err
}

// uniqueRequestID makes an id that is no prefix of another one and never used
// twice: SGLang aborts all requests whose id begins with the one given, and
// refuses an id that it still works on.
func uniqueRequestID(requestID string) string {
	var b [8]byte
	// Never fails: see crypto/rand.
	_, _ = rand.Read(b[:])
	return requestID + "/" + hex.EncodeToString(b[:])
}

// answered tells whether the engine ended the request itself, so that nothing is
// left to abort.
func answered(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.StatusCode != 0
}

// abort tells the engine to give a request up. SGLang notices a closed connection
// seconds later or, while the request waits in its queue, not before it would have
// sent something. If the call fails, nothing better can be done.
func (s *SGLang) abort(ctx context.Context, rid string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortTimeout)
	defer cancel()
	body := append(jsonscan.WriteString([]byte(`{"rid":`), rid), '}')
	_, _ = s.post(ctx, "/abort_request", body)
}

// streamIntervalTokens is how many tokens the engine should send at a time: some 64
// chunks a generation, because each repeats all before it unless the server runs with
// incremental streaming, but never more than what may be lost with the engine.
func streamIntervalTokens(maxTokens int) int { return min(max(512, maxTokens/64), 2048) }

// encodeSGLang writes the request document. Prompts are long, so that nothing here
// goes through reflection.
func encodeSGLang(r *Request, rid string) []byte {
	buf := make([]byte, 0, 512+8*len(r.Prompt)+8*len(r.StopTokenIDs))
	buf = jsonscan.WriteString(append(buf, `{"rid":`...), rid)
	buf = append(buf, `,"stream":true,"sampling_params":{"max_new_tokens":`...)
	buf = strconv.AppendInt(buf, int64(r.MaxTokens), 10)
	if r.MinTokens > 0 {
		buf = strconv.AppendInt(append(buf, `,"min_new_tokens":`...), int64(r.MinTokens), 10)
	}
	if r.IgnoreEOS {
		buf = append(buf, `,"ignore_eos":true`...)
	}
	buf = strconv.AppendFloat(append(buf, `,"temperature":`...), r.Temperature, 'g', -1, 64)
	if r.TopP > 0 {
		buf = strconv.AppendFloat(append(buf, `,"top_p":`...), r.TopP, 'g', -1, 64)
	}
	if r.Seed != nil {
		buf = strconv.AppendInt(append(buf, `,"sampling_seed":`...), *r.Seed, 10)
	}
	if len(r.StopTokenIDs) > 0 {
		buf = jsonscan.WriteInts(append(buf, `,"stop_token_ids":`...), r.StopTokenIDs)
	}
	buf = strconv.AppendInt(append(buf, `,"stream_interval":`...), int64(streamIntervalTokens(r.MaxTokens)), 10)
	buf = append(buf, '}')
	if r.WithLogprobs {
		buf = append(buf, `,"return_logprob":true`...)
	}
	if r.CacheSalt != "" {
		buf = jsonscan.WriteString(append(buf, `,"extra_key":`...), r.CacheSalt)
	}
	if r.Priority != 0 {
		buf = strconv.AppendInt(append(buf, `,"priority":`...), int64(r.Priority), 10)
	}
	if r.DataParallelRank >= 0 {
		// The newer name is routed_dp_rank; this one is accepted by all versions.
		buf = strconv.AppendInt(append(buf, `,"data_parallel_rank":`...), int64(r.DataParallelRank), 10)
	}
	buf = jsonscan.WriteInts(append(buf, `,"input_ids":`...), r.Prompt)
	return append(buf, '}')
}

// Health implements Client.
func (s *SGLang) Health(ctx context.Context) error {
	_, err := s.get(ctx, "/health", maxErrorBodyBytes)
	return err
}

// Metrics implements Client. A server without --enable-metrics has no page: ErrNoMetrics.
func (s *SGLang) Metrics(ctx context.Context) (Metrics, error) {
	body, err := s.get(ctx, "/metrics", maxMetricsBytes)
	if hasStatus(err, http.StatusNotFound) {
		return Metrics{}, &Error{Class: FailTurn, StatusCode: http.StatusNotFound, Message: "SGLang runs without --enable-metrics", Err: ErrNoMetrics}
	}
	if err != nil {
		return Metrics{}, err
	}
	m, err := parseSGLangMetrics(body)
	if err != nil {
		return Metrics{}, &Error{Class: RetryElsewhere, Message: "reading the engine's metrics", Err: err}
	}
	return m, nil
}

// Discover implements Client.
func (s *SGLang) Discover(ctx context.Context) (Info, error) {
	body, err := s.get(ctx, "/server_info", maxServerInfoBytes)
	if hasStatus(err, http.StatusNotFound) {
		// Its older name.
		body, err = s.get(ctx, "/get_server_info", maxServerInfoBytes)
	}
	if err != nil {
		return Info{}, err
	}
	info, err := parseServerInfo(body)
	if err != nil {
		return Info{}, &Error{Class: RetryElsewhere, Message: "reading the engine's description", Err: err}
	}
	if info.MaxContextTokens == 0 || info.Model == "" {
		models, err := listModels(ctx, &s.server)
		if err != nil {
			return Info{}, err
		}
		if info.Model == "" {
			info.Model = models.ID
		}
		if info.MaxContextTokens == 0 {
			info.MaxContextTokens = models.MaxContextTokens
		}
	}
	return info, nil
}

const maxServerInfoBytes = 8 << 20

// parseServerInfo reads what SGLang says of itself: its arguments, and what its
// schedulers found at start, which some versions give in internal_states, one of
// each data-parallel rank.
func parseServerInfo(body []byte) (Info, error) {
	var doc struct {
		ModelPath          string          `json:"model_path"`
		ServedModelName    string          `json:"served_model_name"`
		Version            string          `json:"version"`
		PageSize           *int64          `json:"page_size"`
		ContextLength      *int64          `json:"context_length"`
		MaxTotalTokens     *int64          `json:"max_total_num_tokens"`
		MaxRunningRequests *int64          `json:"max_running_requests"`
		Ranks              *int64          `json:"dp_size"`
		WeightVersion      json.RawMessage `json:"weight_version"`
		States             []schedulerInfo `json:"internal_states"`
		// What the simulated engine adds.
		PrefillTokensPerSecond float64 `json:"prefill_tokens_per_second"`
	}
	if err := json.Unmarshal(body, &doc); err != nil {
		return Info{}, err
	}
	var first schedulerInfo
	if len(doc.States) > 0 {
		first = doc.States[0]
	}
	page := bounded(1<<20, doc.PageSize, first.PageSize)
	if page == 0 {
		// SGLang's own default.
		page = 1
	}
	ranks := max(bounded(1<<16, doc.Ranks), 1)
	info := Info{
		Model: doc.ServedModelName, Version: doc.Version, BlockTokens: int(page),
		CapacityBlocks:   bounded(1<<40, doc.MaxTotalTokens, first.MaxTotalTokens, first.Memory.TokenCapacity) / page * ranks,
		MaxContextTokens: bounded(1<<40, doc.ContextLength, first.ContextLength),
		MaxRunning:       int(bounded(1<<30, first.MaxRunningPerRank, doc.MaxRunningRequests) * ranks),
		DataParallelSize: int(ranks), WeightVersion: weightVersion(doc.WeightVersion),
		PrefillTokensPerSecond: max(doc.PrefillTokensPerSecond, 0),
	}
	if info.Model == "" {
		info.Model = doc.ModelPath
	}
	if info.Model == "" && doc.PageSize == nil && doc.MaxTotalTokens == nil && len(doc.States) == 0 {
		return Info{}, errors.New("the document is not SGLang's")
	}
	return info, nil
}

type schedulerInfo struct {
	PageSize          *int64 `json:"page_size"`
	ContextLength     *int64 `json:"context_len"`
	MaxTotalTokens    *int64 `json:"max_total_num_tokens"`
	MaxRunningPerRank *int64 `json:"effective_max_running_requests_per_dp"`
	Memory            struct {
		TokenCapacity *int64 `json:"token_capacity"`
	} `json:"memory_usage"`
}

// bounded is the first of the values that is there and above 0, at most limit; else 0.
func bounded(limit int64, values ...*int64) int64 {
	for _, v := range values {
		if v != nil && *v > 0 {
			return min(*v, limit)
		}
	}
	return 0
}

// listModels reads the first served model, and its context limit where it is given.
func listModels(ctx context.Context, s *server) (servedModel, error) {
	body, err := s.get(ctx, "/v1/models", maxInfoBodyBytes)
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
