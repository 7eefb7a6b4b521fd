package engine

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"holdfast/orchestrator/engine/internal/jsonscan"
)

// OpenAIConfig is what an OpenAI client needs.
type OpenAIConfig struct {
	// URL is the server's base, such as http://127.0.0.1:11434.
	URL string
	// Model is the served model's name; empty takes the first that the server lists.
	Model string
	// Codec turns ids into text and back. Default Bytes.
	Codec TextCodec
	// StallTimeout is how long a generation may be silent before the instance
	// counts as gone; it includes the wait in the engine's queue. Default 30 minutes.
	StallTimeout time.Duration
	// HTTPClient replaces the client's own connections.
	HTTPClient *http.Client
}

// OpenAI speaks to any server with OpenAI's completions endpoint: llama.cpp,
// Ollama, TGI. Such servers take and give text, so the ids of a result are the
// codec's for that text, not those that were sampled (Result.IDsReencoded); there
// are no log-probabilities that would belong to them, no cached tokens, no salt, no
// priority, no metrics and no control. Limits and stop tokens are counted in the
// codec's ids and enforced here. A least length and ignoring the end of sequence are
// asked for, and not every server heeds them.
type OpenAI struct {
	server
	codec TextCodec
	model atomic.Pointer[string]
	asked bool
}

// NewOpenAI returns a client for an OpenAI-compatible server. It makes no call.
func NewOpenAI(cfg OpenAIConfig) (*OpenAI, error) {
	s, err := newServer(cfg.URL, cfg.HTTPClient, cfg.StallTimeout)
	if err != nil {
		return nil, err
	}
	if cfg.Codec == nil {
		cfg.Codec = Bytes{}
	}
	o := &OpenAI{server: s, codec: cfg.Codec, asked: cfg.Model == ""}
	if !o.asked {
		o.model.Store(&cfg.Model)
	}
	return o, nil
}

// Generate implements Client.
func (o *OpenAI) Generate(ctx context.Context, request Request, onProgress func(Progress)) (Result, error) {
	started := time.Now()
	refused := Result{CachedTokens: -1, IDsReencoded: true}
	if err := checkRequest(&request); err != nil {
		return refused, err
	}
	prompt, err := o.codec.Decode(request.Prompt)
	if err != nil {
		return refused, &Error{Class: FailTurn, Message: "turning the prompt into text", Err: err}
	}
	model, err := o.modelName(ctx)
	if err != nil {
		return refused, err
	}
	header := make(http.Header, 4)
	if request.RequestID != "" {
		header.Set("X-Request-Id", request.RequestID)
	}
	if request.SessionID != "" {
		header.Set("X-Session-Id", request.SessionID)
	}
	g := textGeneration{codec: o.codec, collected: collected{started: started, request: &request, onProgress: onProgress}}
	g.result = Result{CachedTokens: -1, PromptTokens: len(request.Prompt), IDsReencoded: true}
	err = o.stream(ctx, "/v1/completions", encodeOpenAI(&request, model, prompt), header, g.read)
	g.result.TotalSeconds = time.Since(started).Seconds()
	var e *Error
	if o.asked && errors.As(err, &e) && e.StatusCode == http.StatusNotFound && !g.begun() {
		// The server may have been restarted with another model: ask again.
		o.model.Store(nil)
		e.Class = RetryHere
	}
	return g.result, err
}

func (o *OpenAI) modelName(ctx context.Context) (string, error) {
	if m := o.model.Load(); m != nil {
		return *m, nil
	}
	model, err := listModels(ctx, &o.server)
	if err != nil {
		return "", err
	}
	o.model.Store(&model.ID)
	return model.ID, nil
}

func encodeOpenAI(r *Request, model, prompt string) []byte {
	buf := make([]byte, 0, 512+2*len(prompt))
	buf = jsonscan.WriteString(append(buf, `{"model":`...), model)
	buf = strconv.AppendInt(append(buf, `,"max_tokens":`...), int64(r.MaxTokens), 10)
	buf = strconv.AppendFloat(append(buf, `,"temperature":`...), r.Temperature, 'g', -1, 64)
	if r.TopP > 0 {
		buf = strconv.AppendFloat(append(buf, `,"top_p":`...), r.TopP, 'g', -1, 64)
	}
	if r.Seed != nil {
		buf = strconv.AppendInt(append(buf, `,"seed":`...), *r.Seed, 10)
	}
	if r.IgnoreEOS {
		// Known to llama.cpp, ignored elsewhere.
		buf = append(buf, `,"ignore_eos":true`...)
	}
	buf = append(buf, `,"stream":true,"stream_options":{"include_usage":true},"prompt":`...)
	return append(jsonscan.WriteString(buf, prompt), '}')
}

// textGeneration reads one completion as text.
type textGeneration struct {
	collected
	codec TextCodec
}

// errEnough ends the reading of a stream whose rest is not wanted; closing the
// connection makes the server stop.
var errEnough = errors.New("enough has come")

// read consumes the stream up to its end marker, which some servers do not send.
// A server that does not stream answers with one document.
func (g *textGeneration) read(body io.Reader, alive func()) error {
	peek := &firstByte{r: body}
	err := readEvents(peek, alive, g.event)
	if errors.Is(err, errStreamEnds) && peek.first == '{' && len(peek.kept) > 0 {
		err = g.event(peek.kept)
	}
	switch {
	case errors.Is(err, errEnough), errors.Is(err, errStreamEnds) && g.done:
	case err != nil:
		return err
	}
	return g.finish()
}

// firstByte keeps what it reads if that begins as a JSON document.
type firstByte struct {
	r     io.Reader
	first byte
	kept  []byte
}

func (f *firstByte) Read(p []byte) (int, error) {
	n, err := f.r.Read(p)
	if n > 0 && f.first == 0 {
		f.first = p[0]
	}
	if f.first == '{' && len(f.kept)+n <= maxEventBytes {
		f.kept = append(f.kept, p[:n]...)
	}
	return n, err
}

// event takes one chunk in.
func (g *textGeneration) event(data []byte) error {
	err := jsonscan.Object(data, func(key string, value []byte) error {
		switch key {
		case "choices":
			return jsonscan.Elements(value, g.choice)
		case "error":
			if isNull(value) {
				return nil
			}
			return streamError(value)
		}
		return nil
	})
	if err != nil && !errors.Is(err, errEnough) {
		return eventError(err)
	}
	g.progress()
	return err
}

// choice takes text in, in the form of a completion or of a chat.
func (g *textGeneration) choice(data []byte) error {
	var choice struct {
		Index   int     `json:"index"`
		Text    *string `json:"text"`
		Message *struct {
			Content string `json:"content"`
		} `json:"message"`
		Delta *struct {
			Content string `json:"content"`
		} `json:"delta"`
		FinishReason *string `json:"finish_reason"`
	}
	if err := json.Unmarshal(data, &choice); err != nil {
		return err
	}
	if choice.Index != 0 {
		return nil
	}
	var text string
	switch {
	case choice.Text != nil:
		text = *choice.Text
	case choice.Message != nil:
		text = choice.Message.Content
	case choice.Delta != nil:
		text = choice.Delta.Content
	}
	if choice.FinishReason != nil && *choice.FinishReason != "" {
		g.done = true
		g.result.FinishReason = parseFinishReason(*choice.FinishReason)
	}
	return g.text(text)
}

// text appends the ids of a text and ends the generation at a stop token or at the
// limit, which the server knows only in tokens of its own.
func (g *textGeneration) text(text string) error {
	r := &g.result
	from := len(r.OutputIDs)
	r.OutputIDs = g.codec.Encode(r.OutputIDs, text)
	for i := max(from, g.request.MinTokens-1); i < min(len(r.OutputIDs), g.request.MaxTokens); i++ {
		if slices.Contains(g.request.StopTokenIDs, r.OutputIDs[i]) {
			r.OutputIDs = r.OutputIDs[:i+1]
			r.FinishReason, g.done = FinishStop, true
			return errEnough
		}
	}
	if len(r.OutputIDs) < g.request.MaxTokens {
		return nil
	}
	if len(r.OutputIDs) > g.request.MaxTokens || !g.done {
		r.OutputIDs = g.cut()
		r.FinishReason, g.done = FinishLength, true
	}
	return errEnough
}

// cut is the output up to the limit and to the last whole character before it,
// since half of one could not be sent back as text.
func (g *textGeneration) cut() []int32 {
	ids := g.result.OutputIDs[:g.request.MaxTokens]
	for n := len(ids); n > 0 && len(ids)-n < utf8.UTFMax; n-- {
		if _, err := g.codec.Decode(ids[:n]); err == nil {
			return ids[:n]
		}
	}
	return ids
}

// finish checks that the generation ended. Counts are not compared: the server's
// tokens are not the codec's.
func (g *textGeneration) finish() error {
	if !g.done {
		return errStreamEnds
	}
	return nil
}

// Health implements Client. Where there is no health endpoint, a server that lists
// its models counts as well.
func (o *OpenAI) Health(ctx context.Context) error {
	_, err := o.get(ctx, "/health", maxErrorBodyBytes)
	if hasStatus(err, http.StatusNotFound, http.StatusMethodNotAllowed) {
		_, err = listModels(ctx, &o.server)
	}
	return err
}

// Metrics implements Client: there are none, ErrNoMetrics.
func (o *OpenAI) Metrics(context.Context) (Metrics, error) {
	return Metrics{}, &Error{Class: FailTurn, Message: "an OpenAI-compatible server is asked for its health only", Err: ErrNoMetrics}
}

// Discover implements Client. The protocol names the model and nothing else; what
// llama.cpp, TGI and Ollama tell besides is taken, in their own tokens. The size of
// the KV cache is never known.
func (o *OpenAI) Discover(ctx context.Context) (Info, error) {
	model, err := listModels(ctx, &o.server)
	if err != nil {
		return Info{}, err
	}
	info := Info{Model: model.ID, MaxContextTokens: model.MaxContextTokens}
	if m := o.model.Load(); m != nil && !o.asked {
		info.Model = *m
	}
	for _, path := range []string{"/props", "/info", "/api/version"} {
		body, err := o.get(ctx, path, maxServerInfoBytes)
		if ctx.Err() != nil {
			return Info{}, transportError(ctx, "calling "+path, ctx.Err())
		}
		if err == nil {
			readOpenAIInfo(body, &info)
		}
	}
	return info, nil
}

// readOpenAIInfo takes what the servers' own endpoints say; nothing depends on it.
func readOpenAIInfo(body []byte, info *Info) {
	var doc struct {
		// llama.cpp's /props.
		Settings struct {
			Context *int64 `json:"n_ctx"`
		} `json:"default_generation_settings"`
		Slots *int64 `json:"total_slots"`
		Build string `json:"build_info"`
		// TGI's /info.
		MaxTotalTokens *int64 `json:"max_total_tokens"`
		MaxConcurrent  *int64 `json:"max_concurrent_requests"`
		// TGI's /info and Ollama's /api/version.
		Version string `json:"version"`
	}
	if json.Unmarshal(body, &doc) != nil {
		return
	}
	if n := bounded(1<<40, doc.Settings.Context, doc.MaxTotalTokens); n > 0 {
		info.MaxContextTokens = n
	}
	if n := bounded(1<<30, doc.Slots, doc.MaxConcurrent); n > 0 {
		info.MaxRunning = int(n)
	}
	for _, version := range []string{doc.Version, doc.Build} {
		if version != "" {
			info.Version = version
		}
	}
}
