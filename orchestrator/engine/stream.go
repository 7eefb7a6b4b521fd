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
)

// maxEventBytes bounds one server-sent event: a million tokens with their
// log-probabilities, far more than any engine sends at once.
const maxEventBytes = 32 << 20

var errStreamEnds = errors.New("the stream ends before the generation does")

// readEvents hands the data of each server-sent event to event, up to the end
// marker. Engines send each event's data in one line.
func readEvents(body io.Reader, alive func(), event func(data []byte) error) error {
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
			return nil
		}
		if err := event(data); err != nil {
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

// collected is what a stream has brought so far, whatever the dialect.
type collected struct {
	started    time.Time
	request    *Request
	onProgress func(Progress)
	result     Result
	// told is how many tokens onProgress has been called with.
	told       int
	completion int // as the engine counts its output tokens, 0 if it does not
	done       bool
}

// begun tells whether any output has come.
func (c *collected) begun() bool { return len(c.result.OutputIDs) > 0 }

// progress tells the caller of new tokens, if there are any.
func (c *collected) progress() {
	n := len(c.result.OutputIDs)
	if n == c.told {
		return
	}
	if c.told == 0 {
		c.result.TimeToFirstTokenSeconds = time.Since(c.started).Seconds()
	}
	c.told = n
	if c.onProgress != nil {
		c.onProgress(Progress{OutputTokens: n, OutputIDs: c.result.OutputIDs, Logprobs: c.result.Logprobs})
	}
}

// finish checks that what came is a whole generation.
func (c *collected) finish() error {
	r := &c.result
	if !c.done {
		return errStreamEnds
	}
	if c.completion > 0 && c.completion != len(r.OutputIDs) {
		return &Error{Class: RetryElsewhere, Message: fmt.Sprintf("the engine counts %d output tokens and sent %d", c.completion, len(r.OutputIDs))}
	}
	if c.request.WithLogprobs && len(r.Logprobs) != len(r.OutputIDs) {
		return &Error{Class: FailTurn, Message: fmt.Sprintf("the engine sent %d log-probabilities for %d tokens", len(r.Logprobs), len(r.OutputIDs))}
	}
	return nil
}

// checkLogprobs refuses values that no training could use.
func checkLogprobs(logprobs []float32, from int) error {
	for i, p := range logprobs[from:] {
		if math.IsNaN(float64(p)) || math.IsInf(float64(p), 0) {
			return &Error{Class: FailTurn, Message: fmt.Sprintf("output token %d has the log-probability %v", from+i, p)}
		}
	}
	return nil
}

// weightVersion is what the engine says of its weights: a name or a number. Any
// other form says nothing.
func weightVersion(value []byte) string {
	var name string
	if json.Unmarshal(value, &name) == nil {
		return name
	}
	var number json.Number
	if json.Unmarshal(value, &number) == nil {
		return number.String()
	}
	return ""
}

// eventError keeps what is sorted already and says of the rest where it happened.
func eventError(err error) error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return fmt.Errorf("reading an event: %w", err)
}

// streamError is an error document in the place of a chunk: the status has
// been sent by then, so the code is in the document.
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

func isNull(value []byte) bool { return string(value) == "null" }
