package simulated

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"time"

	"holdfast/orchestrator/engine/internal/jsonscan"
)

// defaultNewTokens is SGLang's.
const defaultNewTokens = 128

// parseGenerate reads and checks the body of SGLang's POST /generate.
func parseGenerate(body []byte, prompt []int32, cfg *Config) (*completionRequest, error) {
	r := &completionRequest{Prompt: prompt[:0], MaxTokens: defaultNewTokens, Temperature: 1, StreamInterval: cfg.StreamIntervalTokens, ReturnTokenIDs: true}
	err := jsonscan.Object(body, func(key string, value []byte) error {
		if string(value) == "null" {
			return nil
		}
		switch key {
		case "input_ids":
			return r.readPrompt(value, cfg.VocabularySize)
		case "text":
			r.ReturnTokenIDs = false
			return r.readPrompt(value, cfg.VocabularySize)
		case "sampling_params":
			return r.readSampling(value)
		case "return_logprob":
			return field(key, value, &r.Logprobs)
		case "stream":
			return field(key, value, &r.Stream)
		case "rid":
			return field(key, value, &r.RequestID)
		case "extra_key":
			return field(key, value, &r.CacheSalt)
		case "priority":
			return field(key, value, &r.Priority)
		case "data_parallel_rank", "routed_dp_rank":
			var err error
			if r.Rank, err = rankText(value); err != nil {
				return badRequest(key, "%s: %v", key, err)
			}
			return nil
		}
		if !json.Valid(value) {
			return badRequest(key, "%s is not valid JSON", key)
		}
		return nil
	})
	var api *apiError
	switch {
	case errors.As(err, &api):
		return nil, api
	case err != nil:
		return nil, badRequest("", "the body is not a generation request: %v", err)
	}
	if r.IgnoreEOS {
		// SGLang then looks at no token at all.
		r.StopTokenIDs = nil
	}
	return r, r.check(cfg)
}

func (r *completionRequest) readSampling(value []byte) error {
	return jsonscan.Object(value, func(key string, value []byte) error {
		if string(value) == "null" {
			return nil
		}
		switch key {
		case "max_new_tokens":
			return field(key, value, &r.MaxTokens)
		case "min_new_tokens":
			return field(key, value, &r.MinTokens)
		case "temperature":
			return field(key, value, &r.Temperature)
		case "ignore_eos":
			return field(key, value, &r.IgnoreEOS)
		case "stop_token_ids":
			return field(key, value, &r.StopTokenIDs)
		case "sampling_seed":
			return field(key, value, &r.Seed)
		case "n":
			return wantOne(key, value)
		}
		if !json.Valid(value) {
			return badRequest(key, "%s is not valid JSON", key)
		}
		return nil
	})
}

// generate serves POST /generate.
func (s *Server) generate(l *life, w http.ResponseWriter, r *http.Request) {
	x, err := s.accept(l, w, r, parseGenerate)
	switch {
	case err != nil:
		s.refuse(w, err)
	case x.request.Stream:
		s.streamGenerate(w, r.Context(), x)
	default:
		if err := s.respondGenerate(w, r.Context(), x); err != nil {
			s.refuse(w, err)
		}
	}
}

func (s *Server) respondGenerate(w http.ResponseWriter, ctx context.Context, x *call) error {
	return s.answer(ctx, x, func(p progress) error {
		if !p.done() {
			return nil
		}
		tmp := scratches.Get().(*scratch)
		defer scratches.Put(tmp)
		t := tape{at: x.promptEnd}
		tmp.noise = t.read(tmp.noise[:0], &p.sampler, p.generated)
		tmp.body = s.appendGeneration(tmp.body[:0], x, &p, tmp.noise)
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", strconv.Itoa(len(tmp.body)))
		_, err := w.Write(tmp.body)
		return err
	})
}

// streamGenerate answers with server-sent events. Each repeats all of the output so far,
// as SGLang does unless it is started with incremental streaming.
func (s *Server) streamGenerate(w http.ResponseWriter, ctx context.Context, x *call) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	out := http.NewResponseController(w)
	tmp := scratches.Get().(*scratch)
	defer scratches.Put(tmp)
	t := tape{at: x.promptEnd}
	tmp.noise = tmp.noise[:0]
	send := func(buf []byte) error {
		tmp.body = buf
		if _, err := w.Write(buf); err != nil {
			return err
		}
		return out.Flush()
	}
	err := s.answer(ctx, x, func(p progress) error {
		if p.generated == t.next && !p.done() {
			return nil
		}
		if s.cfg.IncrementalStream {
			tmp.noise = tmp.noise[:0]
		}
		tmp.noise = t.read(tmp.noise, &p.sampler, p.generated)
		buf := append(tmp.body[:0], "data: "...)
		buf = s.appendGeneration(buf, x, &p, tmp.noise)
		buf = append(buf, "\n\n"...)
		if p.done() {
			buf = append(buf, "data: [DONE]\n\n"...)
		}
		return send(buf)
	})
	if errors.Is(err, errClosed) {
		document, _ := json.Marshal(s.errorDocument(&apiError{message: err.Error()}))
		// An error means that the client is gone too.
		_ = send(append(append(append(tmp.body[:0], "data: "...), document...), "\n\ndata: [DONE]\n\n"...))
	}
}

// appendGeneration appends the document of one answer. A prompt of token ids gets no
// text, as from an engine that loads no tokenizer.
func (s *Server) appendGeneration(buf []byte, x *call, p *progress, noise []uint64) []byte {
	buf = append(buf, `{"text":"`...)
	if !x.request.ReturnTokenIDs {
		for _, n := range noise {
			buf = appendWord(buf, p.sampler.token(n))
		}
	}
	buf = append(buf, `","output_ids":`...)
	buf = appendTokenIDs(buf, p, noise)
	buf = append(buf, `,"meta_info":{"id":`...)
	buf = jsonscan.WriteString(buf, x.requestID)
	buf = append(buf, `,"finish_reason":`...)
	switch {
	case p.ending == aborted:
		buf = append(buf, `{"type":"abort","message":"Aborted"}`...)
	case !p.done():
		buf = append(buf, "null"...)
	case x.stopped:
		buf = append(buf, `{"type":"stop","matched":`...)
		buf = append(jsonscan.AppendInt(buf, x.stopToken), '}')
	default:
		buf = append(buf, `{"type":"length","length":`...)
		buf = append(strconv.AppendInt(buf, int64(x.request.MaxTokens), 10), '}')
	}
	number := func(name string, n int) {
		buf = append(append(append(buf, `,"`...), name...), `":`...)
		buf = strconv.AppendInt(buf, int64(n), 10)
	}
	number("prompt_tokens", x.promptTokens)
	number("completion_tokens", p.generated)
	number("cached_tokens", p.event.CachedTokens)
	number("total_retractions", p.event.Preemptions)
	number("dp_rank", s.cfg.FirstRank+x.core.rank)
	buf = append(buf, `,"weight_version":`...)
	buf = jsonscan.WriteString(buf, p.sampler.span(max(p.generated-1, 0)).version)
	if x.request.Logprobs {
		buf = append(buf, `,"output_token_logprobs":[`...)
		for i, n := range noise {
			if i > 0 {
				buf = append(buf, ',')
			}
			buf = appendLogprob(append(buf, '['), logprobThousandths(n))
			buf = jsonscan.AppendInt(append(buf, ','), p.sampler.token(n))
			buf = append(buf, ",null]"...)
		}
		buf = append(buf, ']')
	}
	if p.done() {
		buf = append(buf, `,"e2e_latency":`...)
		buf = strconv.AppendFloat(buf, time.Since(x.wallStart).Seconds(), 'f', 6, 64)
	}
	return append(buf, "}}"...)
}
