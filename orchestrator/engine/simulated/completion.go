package simulated

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"holdfast/orchestrator/engine/internal/jsonscan"
)

// completions serves POST /v1/completions.
func (s *Server) completions(l *life, w http.ResponseWriter, r *http.Request) {
	x, err := s.accept(l, w, r, parseCompletion)
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

// respond answers with one document.
func (s *Server) respond(w http.ResponseWriter, ctx context.Context, x *call) error {
	return s.answer(ctx, x, func(p progress) error {
		if !p.done() {
			return nil
		}
		tmp := scratches.Get().(*scratch)
		defer scratches.Put(tmp)
		t := tape{at: x.promptEnd}
		tmp.noise = t.read(tmp.noise[:0], &p.sampler, p.generated)
		buf := s.appendHead(tmp.body[:0], x)
		buf = append(buf, `,"choices":[`...)
		buf = appendChoice(buf, x, &p, tmp.noise)
		buf = append(buf, ']')
		buf = s.appendUsage(buf, x, &p)
		buf = append(buf, '}')
		tmp.body = buf
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", strconv.Itoa(len(buf)))
		_, err := w.Write(buf)
		return err
	})
}

// stream answers with server-sent events.
func (s *Server) stream(w http.ResponseWriter, ctx context.Context, x *call) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	w.Header().Set("Cache-Control", "no-cache")
	out := http.NewResponseController(w)
	tmp := scratches.Get().(*scratch)
	defer scratches.Put(tmp)
	t := tape{at: x.promptEnd}
	first := true
	send := func(buf []byte) error {
		tmp.body = buf
		if _, err := w.Write(buf); err != nil {
			return err
		}
		return out.Flush()
	}
	err := s.answer(ctx, x, func(p progress) error {
		buf := tmp.body[:0]
		if p.generated > t.next || p.done() {
			tmp.noise = t.read(tmp.noise[:0], &p.sampler, p.generated)
			buf = append(buf, "data: "...)
			buf = s.appendHead(buf, x)
			buf = append(buf, `,"choices":[`...)
			if !first {
				x.request.ReturnPromptTokens = false
			}
			first = false
			buf = appendChoice(buf, x, &p, tmp.noise)
			buf = append(buf, "]}\n\n"...)
		}
		if p.done() && x.request.IncludeUsage {
			buf = append(buf, "data: "...)
			buf = s.appendHead(buf, x)
			buf = append(buf, `,"choices":[]`...)
			buf = s.appendUsage(buf, x, &p)
			buf = append(buf, "}\n\n"...)
		}
		if p.done() {
			buf = append(buf, "data: [DONE]\n\n"...)
		}
		return send(buf)
	})
	if errors.Is(err, errClosed) {
		document, _ := json.Marshal(s.errorDocument(&apiError{http.StatusServiceUnavailable, "ServiceUnavailableError", err.Error(), ""}))
		// An error means that the client is gone too.
		_ = send(append(append(append(tmp.body[:0], "data: "...), document...), "\n\ndata: [DONE]\n\n"...))
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

// appendChoice appends the choice with the output tokens made of some noise. A request that
// takes token ids gets no text and, with the log-probabilities, no token strings.
func appendChoice(buf []byte, x *call, p *progress, noise []uint64) []byte {
	buf = append(buf, `{"index":0,"text":"`...)
	if !x.request.ReturnTokenIDs {
		for _, n := range noise {
			buf = appendWord(buf, p.sampler.token(n))
		}
	}
	buf = append(buf, `","logprobs":`...)
	if x.request.Logprobs {
		buf = appendLogprobs(buf, x, p, noise)
	} else {
		buf = append(buf, "null"...)
	}
	buf = append(buf, `,"finish_reason":`...)
	switch {
	case p.ending == aborted:
		buf = append(buf, `"abort"`...)
	case !p.done():
		buf = append(buf, "null"...)
	case x.stopped:
		buf = append(buf, `"stop"`...)
	default:
		buf = append(buf, `"length"`...)
	}
	buf = append(buf, `,"stop_reason":null`...)
	if x.request.ReturnTokenIDs {
		buf = append(buf, `,"token_ids":`...)
		buf = appendTokenIDs(buf, p, noise)
	}
	if x.request.ReturnPromptTokens {
		buf = append(buf, `,"prompt_token_ids":`...)
		buf = jsonscan.WriteInts(buf, x.request.Prompt)
	}
	return append(buf, '}')
}

func appendTokenIDs(buf []byte, p *progress, noise []uint64) []byte {
	buf = append(buf, '[')
	for i, n := range noise {
		if i > 0 {
			buf = append(buf, ',')
		}
		buf = jsonscan.AppendInt(buf, p.sampler.token(n))
	}
	return append(buf, ']')
}

func appendLogprobs(buf []byte, x *call, p *progress, noise []uint64) []byte {
	buf = append(buf, `{"token_logprobs":[`...)
	for i, n := range noise {
		if i > 0 {
			buf = append(buf, ',')
		}
		buf = appendLogprob(buf, logprobThousandths(n))
	}
	buf = append(buf, `],"tokens":[`...)
	if !x.request.ReturnTokenIDs {
		for i, n := range noise {
			if i > 0 {
				buf = append(buf, ',')
			}
			buf = append(appendWord(append(buf, '"'), p.sampler.token(n)), '"')
		}
	}
	return append(buf, `],"top_logprobs":null,"text_offset":[]}`...)
}

// appendUsage appends the token counts, and what only a simulation knows: the
// time in the engine's queue, in wall seconds.
func (s *Server) appendUsage(buf []byte, x *call, p *progress) []byte {
	buf = append(buf, `,"usage":{"prompt_tokens":`...)
	buf = strconv.AppendInt(buf, int64(x.promptTokens), 10)
	buf = append(buf, `,"completion_tokens":`...)
	buf = strconv.AppendInt(buf, int64(p.generated), 10)
	buf = append(buf, `,"total_tokens":`...)
	buf = strconv.AppendInt(buf, int64(x.promptTokens+p.generated), 10)
	buf = append(buf, `,"prompt_tokens_details":{"cached_tokens":`...)
	buf = strconv.AppendInt(buf, int64(p.event.CachedTokens), 10)
	buf = append(buf, `}},"timings":{"queue_seconds":`...)
	buf = strconv.AppendFloat(buf, float64(p.event.QueueNanos)/1e9/s.cfg.TimeScale, 'g', 6, 64)
	buf = append(buf, `,"prefill_seconds":`...)
	buf = strconv.AppendFloat(buf, float64(p.event.PrefillNanos)/1e9/s.cfg.TimeScale, 'g', 6, 64)
	buf = append(buf, `,"preemptions":`...)
	buf = strconv.AppendInt(buf, int64(p.event.Preemptions), 10)
	return append(buf, '}')
}
