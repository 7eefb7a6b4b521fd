package engine

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"holdfast/orchestrator/engine/internal/jsonscan"
)

// maxEventBytes bounds one server-sent event: a million tokens with their
// log-probabilities, far more than any engine sends at once.
const maxEventBytes = 32 << 20

var errStreamEnds = errors.New("the stream ends before the generation does")

// generation reads one streamed completion.
type generation struct {
	started    time.Time
	request    *Request
	onProgress func(Progress)
	result     Result
	completion int // as usage says, 0 if it does not
	done       bool
}

// read consumes the stream up to its end marker.
func (g *generation) read(body io.Reader, alive func()) error {
	lines := bufio.NewReaderSize(body, 64<<10)
	var line []byte
	for {
		var err error
		line, err = readLine(lines, line[:0])
		if err == io.EOF {
			return fmt.Errorf("%w: %w", errStreamEnds, io.ErrUnexpectedEOF)
		}
		if err != nil {
			return err
		}
		alive()
		data, ok := bytes.CutPrefix(line, []byte("data:"))
		if !ok {
			continue // Comments, blank lines and other fields.
		}
		data = bytes.TrimSpace(data)
		if string(data) == "[DONE]" {
			return g.finish()
		}
		if err := g.event(data); err != nil {
			return err
		}
	}
}

// readLine appends the next line, without its end, to buf.
func readLine(r *bufio.Reader, buf []byte) ([]byte, error) {
	for {
		part, err := r.ReadSlice('\n')
		buf = append(buf, part...)
		if len(buf) > maxEventBytes {
			return buf, fmt.Errorf("an event is longer than %d bytes", maxEventBytes)
		}
		if err == bufio.ErrBufferFull {
			continue
		}
		if err != nil {
			return buf, err
		}
		return bytes.TrimRight(buf, "\r\n"), nil
	}
}

// finish checks that what came is a whole generation.
func (g *generation) finish() error {
	r := &g.result
	if !g.done {
		return errStreamEnds
	}
	if len(r.OutputIDs) == 0 && g.completion > 0 {
		return &Error{Class: FailTurn, Message: "the engine sends no token ids: it needs vLLM 0.10.2 or later"}
	}
	if g.completion > 0 && g.completion != len(r.OutputIDs) {
		return &Error{Class: RetryElsewhere, Message: fmt.Sprintf("the engine counts %d output tokens and sent %d", g.completion, len(r.OutputIDs))}
	}
	if g.request.WithLogprobs && len(r.Logprobs) != len(r.OutputIDs) {
		return &Error{Class: FailTurn, Message: fmt.Sprintf("the engine sent %d log-probabilities for %d tokens", len(r.Logprobs), len(r.OutputIDs))}
	}
	return nil
}

// event takes one chunk in.
func (g *generation) event(data []byte) error {
	before := len(g.result.OutputIDs)
	err := jsonscan.Object(data, func(key string, value []byte) error {
		switch key {
		case "choices":
			return jsonscan.Elements(value, g.choice)
		case "usage":
			return g.usage(value)
		case "timings":
			var timings struct {
				QueueSeconds float64 `json:"queue_seconds"`
			}
			if err := json.Unmarshal(value, &timings); err != nil {
				return err
			}
			g.result.QueueSeconds = timings.QueueSeconds
		case "error":
			return streamError(value)
		}
		return nil
	})
	if err != nil {
		var e *Error
		if errors.As(err, &e) {
			return e
		}
		return fmt.Errorf("reading an event: %w", err)
	}
	if n := len(g.result.OutputIDs); n > before {
		if before == 0 {
			g.result.TimeToFirstTokenSeconds = time.Since(g.started).Seconds()
		}
		if g.onProgress != nil {
			g.onProgress(Progress{OutputTokens: n, OutputIDs: g.result.OutputIDs, Logprobs: g.result.Logprobs})
		}
	}
	return nil
}

// streamError is an error document in the place of a chunk: vLLM has sent its
// status by then, so the code is in the document.
func streamError(value []byte) error {
	var doc struct {
		Message string `json:"message"`
		Code    int    `json:"code"`
	}
	if err := json.Unmarshal(value, &doc); err != nil || doc.Code < 400 || doc.Code > 599 {
		return &Error{Class: RetryElsewhere, Message: "in the stream: " + errorMessage(value)}
	}
	return &Error{Class: statusClass(doc.Code, false), StatusCode: doc.Code, Message: "in the stream: " + errorMessage(value)}
}

func (g *generation) choice(data []byte) error {
	r := &g.result
	tokens := len(r.OutputIDs)
	var logprobs []byte
	err := jsonscan.Object(data, func(key string, value []byte) error {
		var err error
		switch key {
		case "token_ids":
			if !isNull(value) {
				r.OutputIDs, err = jsonscan.AppendInts(r.OutputIDs, value)
			}
		case "logprobs":
			if !isNull(value) {
				logprobs = value
			}
		case "finish_reason":
			var reason *string
			if err := json.Unmarshal(value, &reason); err != nil {
				return err
			}
			if reason != nil {
				g.done = true
				r.FinishReason = parseFinishReason(*reason)
			}
		}
		return err
	})
	if err != nil {
		return err
	}
	if g.request.WithLogprobs && logprobs != nil {
		if err := g.logprobs(logprobs); err != nil {
			return err
		}
		added := len(r.OutputIDs) - tokens
		if len(r.OutputIDs) > 0 && len(r.Logprobs) != len(r.OutputIDs) {
			return &Error{Class: FailTurn, Message: fmt.Sprintf("a chunk of %d tokens brings the log-probabilities to %d for %d tokens", added, len(r.Logprobs), len(r.OutputIDs))}
		}
	}
	return nil
}

func (g *generation) logprobs(data []byte) error {
	return jsonscan.Object(data, func(key string, value []byte) error {
		if key != "token_logprobs" || isNull(value) {
			return nil
		}
		r := &g.result
		from := len(r.Logprobs)
		var err error
		r.Logprobs, err = jsonscan.AppendFloats(r.Logprobs, value)
		for i, p := range r.Logprobs[from:] {
			if math.IsNaN(float64(p)) || math.IsInf(float64(p), 0) {
				return &Error{Class: FailTurn, Message: fmt.Sprintf("output token %d has the log-probability %v", from+i, p)}
			}
		}
		return err
	})
}

func (g *generation) usage(data []byte) error {
	var usage *struct {
		PromptTokens     int `json:"prompt_tokens"`
		CompletionTokens int `json:"completion_tokens"`
		Details          *struct {
			CachedTokens *int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	if err := json.Unmarshal(data, &usage); err != nil || usage == nil {
		return err
	}
	g.completion = usage.CompletionTokens
	if usage.PromptTokens > 0 {
		g.result.PromptTokens = usage.PromptTokens
	}
	if d := usage.Details; d != nil && d.CachedTokens != nil && *d.CachedTokens >= 0 {
		g.result.CachedTokens = *d.CachedTokens
	}
	return nil
}

func isNull(value []byte) bool { return string(value) == "null" }
