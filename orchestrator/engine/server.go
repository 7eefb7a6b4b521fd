package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"
)

// server is the HTTP side that all kinds of engine share.
type server struct {
	base  string
	http  *http.Client
	stall time.Duration
}

// defaultStallTimeout is long because it includes the wait in the engine's queue.
const defaultStallTimeout = 30 * time.Minute

func newServer(base string, client *http.Client, stall time.Duration) (server, error) {
	u, err := url.Parse(base)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return server{}, fmt.Errorf("engine URL %q: want http://host:port", base)
	}
	if stall < 0 {
		return server{}, errors.New("engine client: a stall timeout must not be negative")
	}
	s := server{base: strings.TrimRight(base, "/"), http: client, stall: stall}
	if s.http == nil {
		s.http = &http.Client{Transport: newTransport()}
	}
	if s.stall == 0 {
		s.stall = defaultStallTimeout
	}
	return s, nil
}

// newTransport keeps a connection for each request in flight: an engine serves
// some hundreds, and the standard library would keep two.
func newTransport() *http.Transport {
	return &http.Transport{
		DialContext:         (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		MaxIdleConns:        4096,
		MaxIdleConnsPerHost: 1024,
		IdleConnTimeout:     90 * time.Second,
		DisableCompression:  true,
		WriteBufferSize:     64 << 10,
		ReadBufferSize:      64 << 10,
	}
}

const (
	maxErrorBodyBytes = 64 << 10
	maxInfoBodyBytes  = 1 << 20
	maxMetricsBytes   = 16 << 20
)

// stream posts a generation and hands the answer's body to read, which calls alive
// whenever something came. It makes the request once: a generation is never
// repeated here. Errors are *Error.
func (s *server) stream(parent context.Context, path string, body []byte, header http.Header, read func(body io.Reader, alive func()) error) error {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.base+path, bytes.NewReader(body))
	if err != nil {
		return &Error{Class: FailTurn, Message: "making the request", Err: err}
	}
	request.Header = header
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Accept", "text/event-stream")
	// Lets the transport try again, without sending the header, when a kept
	// connection turns out to be closed: servers close idle ones after seconds,
	// and one that died has aborted the request.
	request.Header["Idempotency-Key"] = []string{}
	watch := newStallWatch(s.stall, cancel)
	defer watch.stop()
	response, err := s.http.Do(request)
	if err != nil {
		return watch.explain(ctx, "calling the engine", err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, maxErrorBodyBytes))
		return statusError(response, text)
	}
	if err := read(response.Body, watch.touch); err != nil {
		var e *Error
		if errors.As(err, &e) {
			return e
		}
		return watch.explain(ctx, "reading the engine's answer", err)
	}
	return nil
}

// get reads a small document.
func (s *server) get(ctx context.Context, path string, limit int64) ([]byte, error) {
	return s.call(ctx, http.MethodGet, path, nil, limit)
}

// post sends a small document and reads the answer.
func (s *server) post(ctx context.Context, path string, body []byte) ([]byte, error) {
	return s.call(ctx, http.MethodPost, path, body, maxInfoBodyBytes)
}

func (s *server) call(ctx context.Context, method, path string, body []byte, limit int64) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, method, s.base+path, bytes.NewReader(body))
	if err != nil {
		return nil, &Error{Class: FailTurn, Message: "making the request", Err: err}
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	response, err := s.http.Do(request)
	if err != nil {
		return nil, transportError(ctx, "calling "+path, err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, limit+1))
	switch {
	case err != nil:
		return nil, transportError(ctx, "reading "+path, err)
	case response.StatusCode != http.StatusOK:
		return nil, statusError(response, answer)
	case int64(len(answer)) > limit:
		return nil, &Error{Class: RetryElsewhere, Message: fmt.Sprintf("%s answers with more than %d bytes", path, limit)}
	}
	return answer, nil
}

// hasStatus tells whether an error is an answer with one of these HTTP statuses.
func hasStatus(err error, statuses ...int) bool {
	var e *Error
	if !errors.As(err, &e) {
		return false
	}
	for _, status := range statuses {
		if e.StatusCode == status {
			return true
		}
	}
	return false
}

// missing explains a control call that the engine does not have: what, and what
// opens it. Other errors pass unchanged.
func missing(err error, path, hint string) error {
	if !hasStatus(err, http.StatusNotFound, http.StatusMethodNotAllowed) {
		return err
	}
	var e *Error
	errors.As(err, &e)
	return &Error{Class: FailTurn, StatusCode: e.StatusCode, Message: fmt.Sprintf("the engine has no %s: %s", path, hint)}
}

// checkRequest refuses what no engine could answer.
func checkRequest(r *Request) error {
	if len(r.Prompt) > 0 && r.MaxTokens >= 1 && r.MinTokens >= 0 && r.MinTokens <= r.MaxTokens {
		return nil
	}
	return &Error{Class: FailTurn, Message: fmt.Sprintf("a prompt of %d tokens and %d to %d output tokens is no request", len(r.Prompt), r.MinTokens, r.MaxTokens)}
}

// stallWatch cancels a call over which nothing has come for too long.
type stallWatch struct {
	timer   *time.Timer
	after   time.Duration
	stalled atomic.Bool
}

func newStallWatch(after time.Duration, cancel context.CancelFunc) *stallWatch {
	w := &stallWatch{after: after}
	w.timer = time.AfterFunc(after, func() {
		w.stalled.Store(true)
		cancel()
	})
	return w
}

func (w *stallWatch) touch() { w.timer.Reset(w.after) }
func (w *stallWatch) stop()  { w.timer.Stop() }

// explain sorts the error of a call that broke, which may be the watch's doing.
func (w *stallWatch) explain(ctx context.Context, doing string, err error) *Error {
	if w.stalled.Load() {
		return &Error{Class: RetryElsewhere, Message: fmt.Sprintf("%s: nothing came for %s", doing, w.after), Err: err}
	}
	return transportError(ctx, doing, err)
}
