package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"mime"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	strictjson "github.com/go-json-experiment/json"
	"github.com/google/uuid"

	"holdfast/api/wire"
)

// do sends a call until it is answered, refused, or not worth repeating.
func do[T any](ctx context.Context, c *Client, k call) (T, error) {
	for attempt := 1; ; attempt++ {
		answer, err := try[T](ctx, c, &k)
		if err == nil {
			return answer, nil
		}
		again, delay := c.worthRepeating(&k, attempt, err)
		if ctx.Err() != nil && !errors.Is(err, ctx.Err()) {
			err = errors.Join(ctx.Err(), err)
		}
		if ctx.Err() != nil || !again {
			return answer, fmt.Errorf("%s %s: %w", k.method, c.url(&k), err)
		}
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return answer, fmt.Errorf("%s %s: %w", k.method, c.url(&k), errors.Join(ctx.Err(), err))
		}
	}
}

// worthRepeating tells whether to send a call again, and after which pause.
func (c *Client) worthRepeating(k *call, attempt int, err error) (bool, time.Duration) {
	if attempt >= c.config.Attempts {
		return false, 0
	}
	var refused *refusal
	switch {
	case errors.As(err, new(*sourceError)):
		return false, 0
	case !errors.As(err, &refused):
		if !k.repeatable && !neverSent(err) {
			return false, 0
		}
		return true, c.pause(attempt, 0)
	case refused.problem.Status == http.StatusTooManyRequests:
		// Refused before any work, so that even what is not repeatable may be.
		return true, c.pause(attempt, refused.after)
	case refused.problem.Status == http.StatusServiceUnavailable, refused.problem.Status == http.StatusBadGateway, refused.problem.Status == http.StatusGatewayTimeout:
		return k.repeatable, c.pause(attempt, refused.after)
	}
	return false, 0
}

// pause draws a delay at random below a bound that doubles with each attempt, so
// that callers who failed together do not return together.
func (c *Client) pause(attempt int, atLeast time.Duration) time.Duration {
	bound := c.config.MaxDelay
	if shift := attempt - 1; shift < 20 && c.config.MinDelay<<shift < bound {
		bound = c.config.MinDelay << shift
	}
	return min(atLeast, c.config.MaxDelay) + rand.N(bound+1)
}

// neverSent tells failures to connect from failures that leave open whether the
// service has got the request.
func neverSent(err error) bool {
	var failed *net.OpError
	return errors.As(err, &failed) && failed.Op == "dial"
}

// refusal is a problem document with the pause that the service asks for. It
// unwraps to the *wire.Problem.
type refusal struct {
	problem *wire.Problem
	after   time.Duration
}

// Error is the problem's.
func (r *refusal) Error() string { return r.problem.Error() }

// Unwrap gives the problem.
func (r *refusal) Unwrap() error { return r.problem }

// try sends a call once.
func try[T any](ctx context.Context, c *Client, k *call) (answer T, err error) {
	timeout := k.timeout
	if timeout == 0 {
		timeout = c.config.CallTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var body io.ReadCloser
	if k.body != nil {
		if body, err = k.body(); err != nil {
			return answer, err
		}
		// The transport closes it as well, but perhaps only after it has returned.
		defer body.Close()
	}
	response, err := c.send(ctx, k, body)
	if err != nil {
		return answer, err
	}
	defer response.Body.Close()
	if response.StatusCode >= http.StatusBadRequest {
		return answer, readRefusal(response)
	}
	if response.StatusCode == http.StatusNoContent {
		return answer, nil
	}
	if err := strictjson.UnmarshalRead(response.Body, &answer); err != nil {
		return answer, fmt.Errorf("reading the answer: %w", err)
	}
	return answer, nil
}

func (c *Client) send(ctx context.Context, k *call, body io.ReadCloser) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, k.method, c.url(k), nil)
	if err != nil {
		return nil, fmt.Errorf("making the request: %w", err)
	}
	if body != nil {
		request.Body, request.ContentLength = body, -1
	}
	if sized, ok := body.(*sizedBody); ok {
		request.ContentLength = sized.size
	}
	for name, given := range k.header {
		request.Header[name] = given
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	if c.config.Token != "" {
		request.Header.Set("Authorization", "Bearer "+c.config.Token)
	}
	return c.http.Do(request)
}

// maxProblemBytes bounds what is read of an answer that is no success.
const maxProblemBytes = 1 << 20

func readRefusal(response *http.Response) error {
	text, err := io.ReadAll(io.LimitReader(response.Body, maxProblemBytes))
	if err != nil {
		return fmt.Errorf("reading a refusal of status %d: %w", response.StatusCode, err)
	}
	refused := &refusal{problem: new(wire.Problem)}
	if media, _, _ := mime.ParseMediaType(response.Header.Get("Content-Type")); media != "application/problem+json" || json.Unmarshal(text, refused.problem) != nil {
		// Something between client and service answered.
		refused.problem = &wire.Problem{Type: "about:blank", Title: http.StatusText(response.StatusCode), Detail: fmt.Sprintf("%s: %.200s", response.Status, text)}
	}
	refused.problem.Status = response.StatusCode
	if seconds, err := strconv.Atoi(response.Header.Get("Retry-After")); err == nil && seconds > 0 {
		refused.after = time.Duration(seconds) * time.Second
	}
	return refused
}

// sizedBody is a body of known length.
type sizedBody struct {
	*bytes.Reader
	size int64
}

// Close does nothing.
func (*sizedBody) Close() error { return nil }

func jsonBody(document any) func() (io.ReadCloser, error) {
	return func() (io.ReadCloser, error) {
		text, err := strictjson.Marshal(document)
		if err != nil {
			return nil, &sourceError{fmt.Errorf("encoding the request: %w", err)}
		}
		return &sizedBody{Reader: bytes.NewReader(text), size: int64(len(text))}, nil
	}
}

// sourceError is a failure of what the caller gave, which no repetition mends.
type sourceError struct{ err error }

// Error is the cause's.
func (e *sourceError) Error() string { return e.err.Error() }

// Unwrap gives the cause.
func (e *sourceError) Unwrap() error { return e.err }

// values makes a query of the pairs whose value is not empty.
func values(pairs ...string) url.Values {
	query := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			query.Set(pairs[i], pairs[i+1])
		}
	}
	return query
}

func number(n int) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(n)
}

func instant(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}

func identifier(id uuid.UUID) string {
	if id == uuid.Nil {
		return ""
	}
	return id.String()
}
