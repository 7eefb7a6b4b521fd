package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Class says what a caller may do about a failed call.
type Class uint8

const (
	// RetryHere: the same instance may answer in a while.
	RetryHere Class = iota + 1
	// RetryElsewhere: this instance is gone or cannot serve; another one may.
	RetryElsewhere
	// FailTurn: the request itself is at fault and will fail everywhere.
	FailTurn
	// Cancelled: the caller's context ended; nothing is wrong with the engine.
	Cancelled
)

func (c Class) String() string {
	switch c {
	case RetryHere:
		return "retry-here"
	case RetryElsewhere:
		return "retry-elsewhere"
	case FailTurn:
		return "fail-turn"
	case Cancelled:
		return "cancelled"
	}
	return fmt.Sprintf("Class(%d)", uint8(c))
}

// ErrNotCalled is the cause of a failure before anything was sent: the instance is
// known not to answer.
var ErrNotCalled = errors.New("the instance does not answer at present")

// Error is a failed call to an engine.
type Error struct {
	Class Class
	// StatusCode is the HTTP status, 0 if there was no response.
	StatusCode int
	// RetryAfterSeconds is how long the engine asks to be left alone, 0 if it does not.
	RetryAfterSeconds float64
	// Message is the engine's own, shortened.
	Message string
	// Err is the cause, if it was not a response.
	Err error
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("engine: ")
	switch {
	case e.StatusCode != 0 && e.Message != "":
		fmt.Fprintf(&b, "status %d: %s", e.StatusCode, e.Message)
	case e.StatusCode != 0:
		fmt.Fprintf(&b, "status %d", e.StatusCode)
	default:
		b.WriteString(e.Message)
	}
	if e.Err != nil {
		if e.Message != "" || e.StatusCode != 0 {
			b.WriteString(": ")
		}
		b.WriteString(e.Err.Error())
	}
	fmt.Fprintf(&b, " (%s)", e.Class)
	return b.String()
}

func (e *Error) Unwrap() error { return e.Err }

// transportError sorts a call that got no complete response. Whatever broke,
// the instance is not to be trusted with the next try.
func transportError(ctx context.Context, doing string, err error) *Error {
	if cause := ctx.Err(); cause != nil {
		// The cause may be hidden in a closed connection's error.
		if !errors.Is(err, cause) {
			err = fmt.Errorf("%w (%w)", cause, err)
		}
		return &Error{Class: Cancelled, Message: doing, Err: err}
	}
	return &Error{Class: RetryElsewhere, Message: doing, Err: err}
}

// statusError sorts a refusal by its status.
func statusError(r *http.Response, body []byte) *Error {
	e := &Error{StatusCode: r.StatusCode, Message: errorMessage(body)}
	after, asked := retryAfter(r.Header.Get("Retry-After"), time.Now())
	e.RetryAfterSeconds = after
	e.Class = statusClass(r.StatusCode, asked)
	return e
}

func statusClass(status int, askedToWait bool) Class {
	switch {
	case status == http.StatusTooManyRequests, status == http.StatusRequestTimeout:
		return RetryHere
	case status == http.StatusServiceUnavailable && askedToWait:
		return RetryHere
	case status >= 500:
		return RetryElsewhere
	case status >= 400:
		return FailTurn
	}
	// A redirect or a success without content is not the engine we know.
	return RetryElsewhere
}

const (
	maxMessageBytes      = 500
	maxRetryAfterSeconds = 3600
)

// errorMessage reads the message of the error documents that engines send, in
// the old flat and the new nested form, or else the beginning of the text.
func errorMessage(body []byte) string {
	var doc struct {
		Message string          `json:"message"`
		Detail  json.RawMessage `json:"detail"`
		Error   json.RawMessage `json:"error"`
	}
	message := ""
	if json.Unmarshal(body, &doc) == nil {
		message = doc.Message
		var nested struct {
			Message string `json:"message"`
		}
		switch {
		case message != "":
		case json.Unmarshal(doc.Error, &nested) == nil && nested.Message != "":
			message = nested.Message
		case json.Unmarshal(doc.Error, &message) == nil && message != "":
		case len(doc.Detail) > 0:
			if json.Unmarshal(doc.Detail, &message) != nil {
				message = string(doc.Detail)
			}
		}
	}
	if message == "" {
		message = strings.TrimSpace(string(body))
	}
	if len(message) > maxMessageBytes {
		message = strings.ToValidUTF8(message[:maxMessageBytes], "") + "..."
	}
	return message
}

// retryAfter reads a Retry-After header in either of its forms.
func retryAfter(header string, now time.Time) (seconds float64, ok bool) {
	if header == "" {
		return 0, false
	}
	if n, err := strconv.ParseFloat(header, 64); err == nil && n >= 0 {
		return min(n, maxRetryAfterSeconds), true
	}
	if at, err := http.ParseTime(header); err == nil {
		return min(max(at.Sub(now).Seconds(), 0), maxRetryAfterSeconds), true
	}
	return 0, false
}
