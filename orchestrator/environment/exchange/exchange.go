// Package exchange posts a JSON document to a server of somebody else's and reads
// a JSON document back, with bounds on time, attempts and size.
//
// It repeats a request only when the server cannot have given an answer that
// counts: on connections that are refused or break and on 502, 503 and 504. The
// protocols that use it number their requests, so that a request that did arrive
// is harmless a second time. Never repeated are 4xx and other statuses, answers
// that are no JSON or too long, and time-outs. Redirects are not followed: where
// a request goes is decided by whoever allows the host.
package exchange

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"syscall"
	"time"

	"github.com/sethvargo/go-retry"

	"holdfast/orchestrator/environment/excerpt"
	"holdfast/orchestrator/environment/failure"
)

// Defaults.
const (
	DefaultRetries          = 4
	DefaultFirstDelay       = 100 * time.Millisecond
	DefaultMaxResponseBytes = 16 << 20

	maxDelay      = 2 * time.Second
	jitterPercent = 50
	// complaintBytes is how much of a refusal is repeated in an error.
	complaintBytes = 300
)

// Config of a Poster. Zero values mean the defaults.
type Config struct {
	// Transport carries the requests; nil means http.DefaultTransport.
	Transport http.RoundTripper
	// Bearer is sent as authorization if it is not empty.
	Bearer string
	// Timeout bounds one Post with all its attempts; 0 means none but the caller's.
	Timeout time.Duration
	// Retries is how often a request is repeated at most; negative means never.
	Retries int
	// FirstDelay is waited before the first repetition, more or less by half, and
	// doubled each time up to two seconds.
	FirstDelay       time.Duration
	MaxResponseBytes int64
}

// Poster posts. It is safe for concurrent use.
type Poster struct {
	config Config
	client *http.Client
}

// New returns a poster.
func New(config Config) *Poster {
	if config.Retries == 0 {
		config.Retries = DefaultRetries
	}
	if config.FirstDelay == 0 {
		config.FirstDelay = DefaultFirstDelay
	}
	if config.MaxResponseBytes == 0 {
		config.MaxResponseBytes = DefaultMaxResponseBytes
	}
	return &Poster{config: config, client: &http.Client{Transport: config.Transport, CheckRedirect: NoRedirect}}
}

// NoRedirect makes an http.Client give a redirect back as it is.
func NoRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Post sends request and decodes the answer into answer, which may be nil.
// Members that answer does not know are ignored. Errors are *failure.Error.
func (p *Poster) Post(ctx context.Context, url string, request, answer any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return failure.New(failure.Malformed, "encoding a request", err)
	}
	limited, cancel := ctx, context.CancelFunc(func() {})
	if p.config.Timeout > 0 {
		limited, cancel = context.WithTimeout(ctx, p.config.Timeout)
	}
	defer cancel()
	backoff := retry.WithCappedDuration(maxDelay, retry.NewExponential(p.config.FirstDelay))
	backoff = retry.WithMaxRetries(uint64(max(0, p.config.Retries)), retry.WithJitterPercent(jitterPercent, backoff))
	var last error
	again := true
	err = retry.Do(limited, backoff, func(attempt context.Context) error {
		again, last = p.post(attempt, url, body, answer)
		if again && attempt.Err() == nil {
			return retry.RetryableError(last)
		}
		return last
	})
	switch {
	case err == nil:
		return nil
	case !again:
		return last // an answer that counts, however late
	case ctx.Err() != nil:
		return failure.New(failure.OfContext(ctx), "", ctx.Err())
	case limited.Err() != nil:
		return timedOut(p.config.Timeout, last)
	}
	return last
}

// timedOut says that the time passed: in an attempt that got no answer, or between
// attempts, and then what the last one met is what is wrong.
func timedOut(limit time.Duration, last error) error {
	late := failure.Newf(failure.Timeout, "", "no answer within %v", limit)
	if kind, ok := failure.KindOf(last); ok && kind != failure.Timeout {
		late.Kind, late.Err = kind, last
	}
	return late
}

// post makes one attempt. again tells whether another may help.
func (p *Poster) post(ctx context.Context, url string, body []byte, answer any) (again bool, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return false, failure.New(failure.Refused, "", err)
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Accept", "application/json")
	if p.config.Bearer != "" {
		request.Header.Set("Authorization", "Bearer "+p.config.Bearer)
	}
	response, err := p.client.Do(request)
	if err != nil {
		return true, broken(ctx, err)
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(response.Body, p.config.MaxResponseBytes+1))
	switch {
	case err != nil:
		return true, broken(ctx, err)
	case int64(len(raw)) > p.config.MaxResponseBytes:
		return false, failure.Newf(failure.TooLarge, "", "an answer of more than %d bytes", p.config.MaxResponseBytes)
	}
	if response.StatusCode < 200 || response.StatusCode > 299 {
		return refused(response.StatusCode, raw)
	}
	if answer == nil {
		return false, nil
	}
	if err := json.Unmarshal(raw, answer); err != nil {
		return false, failure.NotAsDocumented("the answer", err)
	}
	return false, nil
}

// broken tells a connection that ended in the middle from one that never began.
func broken(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return failure.New(failure.OfContext(ctx), "", err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return failure.New(failure.Died, "", err)
	}
	return failure.New(failure.Unreachable, "", err)
}

// refused sorts the statuses by what a caller can do about them.
func refused(status int, body []byte) (again bool, err error) {
	complaint := &failure.Error{Kind: failure.Refused, Status: status, Message: excerpt.Line(string(body), complaintBytes)}
	switch status {
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		complaint.Kind = failure.Unreachable
		return true, complaint
	case http.StatusNotFound, http.StatusGone:
		complaint.Kind = failure.Lost
	case http.StatusConflict:
		complaint.Kind = failure.Conflict
	}
	if complaint.Message == "" {
		complaint.Message = fmt.Sprintf("the server says no more than %q", http.StatusText(status))
	}
	return false, complaint
}
