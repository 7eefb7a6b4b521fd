package simulated

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"holdfast/orchestrator/engine/internal/jsonscan"
	"holdfast/router/sim/instance"
)

// scratch is what a handler needs only until its request is submitted, or only
// while it writes: prompts and outputs are megabytes.
type scratch struct {
	body   []byte
	prompt []int32
	hashes []blockHash
}

var scratches = sync.Pool{New: func() any { return new(scratch) }}

// completions serves POST /v1/completions.
func (s *Server) completions(w http.ResponseWriter, r *http.Request) {
	x, err := s.accept(w, r)
	if err == nil && x.request.Stream {
		s.stream(w, r.Context(), x)
		return
	}
	if err == nil {
		err = s.respond(w, r.Context(), x)
	}
	if err != nil {
		s.refuse(w, err)
	}
}

// refuse answers with an error document. Nothing has been written before.
func (s *Server) refuse(w http.ResponseWriter, err error) {
	var api *apiError
	var tooLarge *http.MaxBytesError
	switch {
	case errors.Is(err, context.Canceled):
		return // Nobody reads the answer.
	case errors.As(err, &api):
	case errors.As(err, &tooLarge):
		api = &apiError{http.StatusRequestEntityTooLarge, "BadRequestError", err.Error(), ""}
	case errors.Is(err, errClosed):
		api = &apiError{http.StatusServiceUnavailable, "ServiceUnavailableError", err.Error(), ""}
	case errors.Is(err, instance.ErrContextTooLong):
		api = badRequest("max_tokens", "%v", err)
	default:
		api = &apiError{http.StatusInternalServerError, "InternalServerError", err.Error(), ""}
		s.cfg.Logger.Error("a completion failed", "error", err)
	}
	writeError(w, api)
}

// accept reads a request and submits it.
func (s *Server) accept(w http.ResponseWriter, r *http.Request) (*call, error) {
	started := time.Now()
	tmp := scratches.Get().(*scratch)
	defer scratches.Put(tmp)
	var err error
	if tmp.body, err = readBody(tmp.body[:0], http.MaxBytesReader(w, r.Body, s.cfg.MaxBodyBytes), r.ContentLength); err != nil {
		return nil, err
	}
	request, err := parseCompletion(tmp.body, tmp.prompt, &s.cfg)
	if request == nil {
		return nil, err
	}
	tmp.prompt = request.Prompt
	if err != nil {
		return nil, err
	}
	x := &call{
		requestID: r.Header.Get("X-Request-Id"), sessionID: r.Header.Get("X-Session-Id"),
		request: request, promptTokens: len(request.Prompt), wallStart: started,
	}
	if x.requestID == "" {
		x.requestID = strconv.FormatInt(started.UnixNano(), 36)
	}
	size := s.cfg.Engine.BlockTokens
	salt := hashSalt(request.CacheSalt)
	tmp.hashes = hashPrompt(tmp.hashes[:0], salt, request.Prompt, size)
	x.promptHash = hashStart
	if n := len(tmp.hashes); n > 0 {
		x.promptHash = tmp.hashes[n-1] ^ salt
	}
	x.promptTail = append(x.promptTail, request.Prompt[len(tmp.hashes)*size:]...)
	x.sampler = s.newSampler(x)
	x.outputTokens, x.stopped = x.sampler.outputTokens(request, s.cfg.MeanOutputTokens)
	if request.ReturnPromptTokens {
		request.Prompt = append([]int32(nil), request.Prompt...)
	} else {
		request.Prompt = nil
	}
	return x, s.core.submit(x, tmp.hashes, tmp.prompt)
}

// newSampler makes a request's tokens depend on its content and seed, without a
// seed on its name; at temperature 0 on its content alone.
func (s *Server) newSampler(x *call) sampler {
	h := hashBlock(x.promptHash, x.promptTail)
	base := mix(s.cfg.Seed, uint64(h))
	switch {
	case x.request.Temperature == 0:
	case x.request.Seed != nil:
		base = mix(base, uint64(*x.request.Seed)+1)
	default:
		base = mix(base, uint64(hashName(x.requestID)))
	}
	return sampler{base: base, vocabulary: uint64(s.cfg.VocabularySize)}
}

// readBody reads all of r into buf.
func readBody(buf []byte, r io.Reader, length int64) ([]byte, error) {
	const maxReserveBytes = 8 << 20 // The length is only a claim.
	if want := int(min(length, maxReserveBytes)) + 1; want > cap(buf) {
		buf = make([]byte, 0, want)
	}
	for {
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
		n, err := r.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if err == io.EOF {
			return buf, nil
		}
		if err != nil {
			return buf, err
		}
	}
}

// respond answers with one document.
func (s *Server) respond(w http.ResponseWriter, ctx context.Context, x *call) error {
	for done := false; !done; {
		var err error
		if _, done, err = s.core.wait(ctx, x); err != nil {
			return err
		}
	}
	buf := s.appendHead(nil, x)
	buf = append(buf, `,"choices":[`...)
	buf = appendChoice(buf, x, 0, x.outputTokens, true)
	buf = append(buf, ']')
	buf = s.appendUsage(buf, x)
	buf = append(buf, '}')
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(buf)))
	// An error here means that the client is gone.
	_, _ = w.Write(buf)
	return nil
}

// stream answers with server-sent events.
func (s *Server) stream(w http.ResponseWriter, ctx context.Context, x *call) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	w.Header().Set("Cache-Control", "no-cache")
	out := http.NewResponseController(w)
	tmp := scratches.Get().(*scratch)
	defer scratches.Put(tmp)
	sent := 0
	for done := false; !done; {
		var generated int
		var err error
		generated, done, err = s.core.wait(ctx, x)
		if ctx.Err() != nil {
			return
		}
		buf := tmp.body[:0]
		switch {
		case err != nil:
			document, _ := json.Marshal((&apiError{http.StatusServiceUnavailable, "ServiceUnavailableError", err.Error(), ""}).document())
			buf = append(append(append(buf, "data: "...), document...), "\n\n"...)
		case generated > sent:
			buf = append(buf, "data: "...)
			buf = s.appendHead(buf, x)
			buf = append(buf, `,"choices":[`...)
			buf = appendChoice(buf, x, sent, generated, done)
			buf = append(buf, "]}\n\n"...)
			sent = generated
		}
		if done && err == nil && x.request.IncludeUsage {
			buf = append(buf, "data: "...)
			buf = s.appendHead(buf, x)
			buf = append(buf, `,"choices":[]`...)
			buf = s.appendUsage(buf, x)
			buf = append(buf, "}\n\n"...)
		}
		if done {
			buf = append(buf, "data: [DONE]\n\n"...)
		}
		tmp.body = buf
		if _, err := w.Write(buf); err == nil {
			err = out.Flush()
			if err == nil {
				continue
			}
		}
		s.core.abort(x) // The client is gone; its context may not know yet.
		return
	}
}

func (s *Server) appendHead(buf []byte, x *call) []byte {
	buf = append(buf, `{"id":`...)
	buf = jsonscan.WriteString(buf, "cmpl-"+x.requestID)
	buf = append(buf, `,"object":"text_completion","created":`...)
	buf = strconv.AppendInt(buf, x.wallStart.Unix(), 10)
	buf = append(buf, `,"model":`...)
	return jsonscan.WriteString(buf, s.cfg.Model)
}

// appendChoice appends the choice with output tokens [from, to). A request that
// takes token ids gets no text and, with the log-probabilities, no token strings.
func appendChoice(buf []byte, x *call, from, to int, last bool) []byte {
	buf = append(buf, `{"index":0,"text":"`...)
	if !x.request.ReturnTokenIDs {
		for i := from; i < to; i++ {
			buf = appendWord(buf, x.sampler.token(i))
		}
	}
	buf = append(buf, `","logprobs":`...)
	if x.request.Logprobs {
		buf = appendLogprobs(buf, x, from, to)
	} else {
		buf = append(buf, "null"...)
	}
	buf = append(buf, `,"finish_reason":`...)
	switch {
	case !last:
		buf = append(buf, "null"...)
	case x.stopped:
		buf = append(buf, `"stop"`...)
	default:
		buf = append(buf, `"length"`...)
	}
	buf = append(buf, `,"stop_reason":null`...)
	if x.request.ReturnTokenIDs {
		buf = append(buf, `,"token_ids":[`...)
		for i := from; i < to; i++ {
			if i > from {
				buf = append(buf, ',')
			}
			buf = jsonscan.AppendInt(buf, x.sampler.token(i))
		}
		buf = append(buf, ']')
	}
	if x.request.ReturnPromptTokens && from == 0 {
		buf = append(buf, `,"prompt_token_ids":`...)
		buf = jsonscan.WriteInts(buf, x.request.Prompt)
	}
	return append(buf, '}')
}

func appendLogprobs(buf []byte, x *call, from, to int) []byte {
	buf = append(buf, `{"token_logprobs":[`...)
	for i := from; i < to; i++ {
		if i > from {
			buf = append(buf, ',')
		}
		buf = appendLogprob(buf, x.sampler.logprobThousandths(i))
	}
	buf = append(buf, `],"tokens":[`...)
	if !x.request.ReturnTokenIDs {
		for i := from; i < to; i++ {
			if i > from {
				buf = append(buf, ',')
			}
			buf = append(appendWord(append(buf, '"'), x.sampler.token(i)), '"')
		}
	}
	return append(buf, `],"top_logprobs":null,"text_offset":[]}`...)
}

// appendUsage appends the token counts, and what only a simulation knows: the
// time in the engine's queue, in wall seconds.
func (s *Server) appendUsage(buf []byte, x *call) []byte {
	buf = append(buf, `,"usage":{"prompt_tokens":`...)
	buf = strconv.AppendInt(buf, int64(x.promptTokens), 10)
	buf = append(buf, `,"completion_tokens":`...)
	buf = strconv.AppendInt(buf, int64(x.outputTokens), 10)
	buf = append(buf, `,"total_tokens":`...)
	buf = strconv.AppendInt(buf, int64(x.promptTokens+x.outputTokens), 10)
	buf = append(buf, `,"prompt_tokens_details":{"cached_tokens":`...)
	buf = strconv.AppendInt(buf, int64(x.event.CachedTokens), 10)
	buf = append(buf, `}},"timings":{"queue_seconds":`...)
	buf = strconv.AppendFloat(buf, float64(x.event.QueueNanos)/1e9/s.cfg.TimeScale, 'g', 6, 64)
	buf = append(buf, `,"prefill_seconds":`...)
	buf = strconv.AppendFloat(buf, float64(x.event.PrefillNanos)/1e9/s.cfg.TimeScale, 'g', 6, 64)
	buf = append(buf, `,"preemptions":`...)
	buf = strconv.AppendInt(buf, int64(x.event.Preemptions), 10)
	return append(buf, '}')
}
