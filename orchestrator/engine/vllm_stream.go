package engine

import (
	"encoding/json"
	"fmt"
	"io"

	"holdfast/orchestrator/engine/internal/jsonscan"
)

// generation reads one streamed completion of vLLM.
type generation struct{ collected }

// read consumes the stream up to its end marker.
func (g *generation) read(body io.Reader, alive func()) error {
	if err := readEvents(body, alive, g.event); err != nil {
		return err
	}
	if len(g.result.OutputIDs) == 0 && g.done && g.completion > 0 {
		return &Error{Class: FailTurn, Message: "the engine sends no token ids: it needs vLLM 0.10.2 or later"}
	}
	return g.finish()
}

// event takes one chunk in.
func (g *generation) event(data []byte) error {
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
		case "weight_version":
			g.result.WeightVersion = weightVersion(value)
		case "error":
			return streamError(value)
		}
		return nil
	})
	if err != nil {
		return eventError(err)
	}
	g.progress()
	return nil
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
		if err == nil {
			err = checkLogprobs(r.Logprobs, from)
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
