package engine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"

	"holdfast/orchestrator/engine/internal/jsonscan"
)

// sglangGeneration reads one streamed generation of SGLang. Depending on version
// and flags each chunk brings either what is new or everything so far, and ids
// and log-probabilities may differ in that; the count of output tokens in each
// chunk tells which.
type sglangGeneration struct {
	collected
	// ids is scratch for one chunk, text for one element of it.
	ids  []int32
	text []byte
}

// read consumes the stream up to its end marker.
func (g *sglangGeneration) read(body io.Reader, alive func()) error {
	if err := readEvents(body, alive, g.event); err != nil {
		return err
	}
	if len(g.result.OutputIDs) == 0 && g.done && g.completion > 0 {
		return &Error{Class: FailTurn, Message: "the engine sends no token ids: it needs SGLang 0.5.3 or later"}
	}
	return g.finish()
}

// event takes one chunk in.
func (g *sglangGeneration) event(data []byte) error {
	var ids, meta []byte
	err := jsonscan.Object(data, func(key string, value []byte) error {
		switch key {
		case "output_ids":
			ids = value
		case "meta_info":
			meta = value
		case "error":
			return streamError(value)
		}
		return nil
	})
	if err == nil {
		err = g.chunk(ids, meta)
	}
	if err != nil {
		return eventError(err)
	}
	g.progress()
	return nil
}

func (g *sglangGeneration) chunk(ids, meta []byte) error {
	var finish, logprobs []byte
	if meta != nil && !isNull(meta) {
		err := jsonscan.Object(meta, func(key string, value []byte) error {
			switch key {
			case "finish_reason":
				finish = value
			case "output_token_logprobs":
				logprobs = value
			default:
				return g.meta(key, value)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	if err := g.tokens(ids, logprobs); err != nil {
		return err
	}
	if finish == nil || isNull(finish) {
		return nil
	}
	return g.finished(finish)
}

// meta takes one of the figures in that come with each chunk.
func (g *sglangGeneration) meta(key string, value []byte) error {
	switch key {
	case "completion_tokens":
		return readCount(value, &g.completion)
	case "prompt_tokens":
		n := 0
		if err := readCount(value, &n); err != nil {
			return err
		}
		if n > 0 {
			g.result.PromptTokens = n
		}
	case "cached_tokens":
		return readCount(value, &g.result.CachedTokens)
	case "weight_version":
		g.result.WeightVersion = weightVersion(value)
	case "queue_time":
		var seconds *float64
		if err := json.Unmarshal(value, &seconds); err != nil {
			return err
		}
		if seconds != nil && *seconds > 0 {
			g.result.QueueSeconds = *seconds
		}
	}
	return nil
}

// readCount reads a count that may be null, which leaves what is there.
func readCount(value []byte, count *int) error {
	var n *int
	if err := json.Unmarshal(value, &n); err != nil {
		return err
	}
	if n != nil && *n >= 0 {
		*count = *n
	}
	return nil
}

// tokens appends what a chunk brings beyond what has come before.
func (g *sglangGeneration) tokens(ids, logprobs []byte) error {
	r := &g.result
	have := len(r.OutputIDs)
	if ids != nil && !isNull(ids) {
		var err error
		if g.ids, err = jsonscan.AppendInts(g.ids[:0], ids); err != nil {
			return err
		}
		r.OutputIDs = append(r.OutputIDs, g.ids[g.known(have, len(g.ids), g.repeats()):]...)
	}
	if !g.request.WithLogprobs || logprobs == nil || isNull(logprobs) {
		return nil
	}
	return g.logprobs(logprobs, ids == nil || isNull(ids))
}

// known is how many of the n entries of a chunk's array have come before, of which
// there are have.
func (g *sglangGeneration) known(have, n int, repeats bool) int {
	switch {
	case g.completion == n:
		return min(have, n)
	case g.completion == have+n:
		return 0
	case repeats:
		return have
	}
	return 0
}

// repeats tells whether a chunk whose count fits neither reading begins with
// everything so far.
func (g *sglangGeneration) repeats() bool {
	have := g.result.OutputIDs
	return len(have) > 0 && len(g.ids) >= len(have) && slices.Equal(g.ids[:len(have)], have)
}

// logprobs takes an array of [log-probability, id, text] in. Where a chunk has no
// ids of its own they are taken from here; otherwise the two must agree.
func (g *sglangGeneration) logprobs(data []byte, withIDs bool) error {
	r := &g.result
	n := 0
	if err := jsonscan.Elements(data, func([]byte) error { n++; return nil }); err != nil {
		return err
	}
	have := len(r.Logprobs)
	skip := g.known(have, n, n >= len(r.OutputIDs) && have > 0)
	at := 0
	err := jsonscan.Elements(data, func(element []byte) error {
		if at++; at <= skip {
			return nil
		}
		id, err := g.logprob(element)
		if err != nil {
			return err
		}
		position := len(r.Logprobs) - 1
		switch {
		case withIDs:
			r.OutputIDs = append(r.OutputIDs, id)
		case position >= len(r.OutputIDs) || r.OutputIDs[position] != id:
			return &Error{Class: FailTurn, Message: fmt.Sprintf("the log-probability of output token %d belongs to another token, %d", position, id)}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return checkLogprobs(r.Logprobs, have)
}

// logprob appends the log-probability of one element and returns its token id.
func (g *sglangGeneration) logprob(element []byte) (int32, error) {
	first := bytes.IndexByte(element, ',')
	if first < 0 || element[0] != '[' {
		return 0, fmt.Errorf("%w: want [log-probability, id, text]", jsonscan.ErrSyntax)
	}
	second := len(element) - 1
	if comma := bytes.IndexByte(element[first+1:], ','); comma >= 0 {
		second = first + 1 + comma
	}
	// Both parts as arrays of one, so that the same readers serve.
	before := len(g.result.Logprobs)
	var err error
	g.text = append(append(g.text[:0], element[:first]...), ']')
	if g.result.Logprobs, err = jsonscan.AppendFloats(g.result.Logprobs, g.text); err != nil {
		return 0, err
	}
	g.text = append(append(append(g.text[:0], '['), element[first+1:second]...), ']')
	var one [1]int32
	id, err := jsonscan.AppendInts(one[:0], g.text)
	if err != nil {
		return 0, err
	}
	if len(id) != 1 || len(g.result.Logprobs) != before+1 {
		return 0, fmt.Errorf("%w: want one log-probability and one token id", jsonscan.ErrSyntax)
	}
	return id[0], nil
}

// finished reads why the generation ended: a document with a type, of older
// versions the bare type. An abort with a status is an error, without one it is
// the answer to somebody's abort.
func (g *sglangGeneration) finished(value []byte) error {
	var reason struct {
		Type    string `json:"type"`
		Message string `json:"message"`
		Status  int    `json:"status_code"`
	}
	if json.Unmarshal(value, &reason.Type) != nil {
		if err := json.Unmarshal(value, &reason); err != nil {
			return fmt.Errorf("reading the finish reason: %w", err)
		}
	}
	g.done = true
	g.result.FinishReason = parseFinishReason(reason.Type)
	if g.result.FinishReason == FinishAbort && reason.Status >= 400 && reason.Status <= 599 {
		return &Error{Class: statusClass(reason.Status, false), StatusCode: reason.Status, Message: reason.Message}
	}
	return nil
}
