package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"regexp"
	"runtime/debug"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"
)

// requestState follows one request through its handling.
type requestState struct {
	id     string
	caller caller
	// problem is what was answered, and cause what the log should know of it.
	problem *problem
	cause   error
}

func (s *requestState) failed(p *problem) {
	s.problem = p
	s.cause = errors.Join(s.cause, p.cause)
}

type requestStateKey struct{}

func stateOf(ctx context.Context) *requestState {
	if state, ok := ctx.Value(requestStateKey{}).(*requestState); ok {
		return state
	}
	return &requestState{}
}

const requestIDHeader = "X-Request-Id"

var requestIDPattern = regexp.MustCompile(`^[A-Za-z0-9._:-]{1,64}$`)

// follow is the outermost layer of every request: it gives it an id, bounds how
// long its connection may stall, keeps a panic from taking the process down,
// answers errors that no one answered, and counts and logs the outcome.
func (s *Server) follow(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) (err error) {
		begin := time.Now()
		r := c.Request()
		state := &requestState{id: r.Header.Get(requestIDHeader)}
		if !requestIDPattern.MatchString(state.id) {
			state.id = uuid.NewString()
		}
		c.Response().Header().Set(requestIDHeader, state.id)
		c.SetRequest(r.WithContext(context.WithValue(r.Context(), requestStateKey{}, state)))
		c.Response().Writer = &movingWriter{ResponseWriter: c.Response().Writer, stall: s.limits.StallTimeout}

		defer func() {
			cause := recover()
			if cause != nil && cause != any(http.ErrAbortHandler) {
				s.metrics.panics.Inc()
				s.log.Error("a request panicked", "request", state.id, "method", r.Method, "route", c.Path(), "panic", cause, "stack", string(debug.Stack()))
			}
			if cause != nil {
				writeProblem(c, newProblem(http.StatusInternalServerError, kindInternal, "something went wrong inside; the log has it under the request id"))
			}
			s.account(c, state, time.Since(begin))
			if cause != nil && state.problem != nil && c.Response().Status != state.problem.Status {
				// Part of another answer is on its way: cut it off, or the client
				// would take it for whole.
				panic(http.ErrAbortHandler)
			}
		}()
		err = next(c)
		switch {
		case err == nil:
		case strings.HasPrefix(r.URL.Path, openAIPath+"/"):
			_ = writeOpenAIProblem(c, problemOfEcho(err))
		default:
			writeProblem(c, problemOfEcho(err))
		}
		return nil
	}
}

func (s *Server) account(c echo.Context, state *requestState, took time.Duration) {
	status, route, method := c.Response().Status, c.Path(), c.Request().Method
	if route == "" {
		route = "unknown"
	}
	s.metrics.finished(route, method, status, took)
	level := slog.LevelDebug
	switch {
	case c.Request().Context().Err() != nil:
		// The caller has gone; what it would have been told is no one's problem.
	case status >= 500 && status != http.StatusServiceUnavailable:
		level = slog.LevelError
	case status >= 500:
		level = slog.LevelWarn
	case status >= 400 || method != http.MethodGet:
		level = slog.LevelInfo
	}
	if !s.log.Enabled(context.Background(), level) {
		return
	}
	attributes := []any{"request", state.id, "method", method, "path", c.Request().URL.Path, "status", status,
		"duration_ms", float64(took.Microseconds()) / 1000, "bytes", c.Response().Size, "remote", c.Request().RemoteAddr}
	if state.caller.name != "" {
		attributes = append(attributes, "caller", state.caller.name)
	}
	if state.problem != nil {
		attributes = append(attributes, "problem", state.problem.Detail)
	}
	if state.cause != nil {
		attributes = append(attributes, "cause", state.cause.Error())
	}
	s.log.Log(context.Background(), level, "request", attributes...)
}

// movingWriter ends a connection to which nothing can be written for a while,
// however long the answer is in all.
type movingWriter struct {
	http.ResponseWriter
	stall time.Duration
}

// Unwrap lets http.ResponseController reach the connection.
func (w *movingWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Write moves the deadline and writes.
func (w *movingWriter) Write(p []byte) (int, error) {
	// A writer without deadlines, as in tests, is no reason to fail.
	if err := http.NewResponseController(w.ResponseWriter).SetWriteDeadline(time.Now().Add(w.stall)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, fmt.Errorf("setting the write deadline: %w", err)
	}
	return w.ResponseWriter.Write(p)
}

// movingReader gives a body that keeps arriving all the time it needs, and ends
// one that has stopped.
type movingReader struct {
	from       io.Reader
	controller *http.ResponseController
	stall      time.Duration
}

// Read moves the deadline and reads.
func (r *movingReader) Read(p []byte) (int, error) {
	if err := r.controller.SetReadDeadline(time.Now().Add(r.stall)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, fmt.Errorf("setting the read deadline: %w", err)
	}
	return r.from.Read(p)
}

// rest lifts the deadline: the body has arrived, and what comes now takes the
// time of the service, not of the sender.
func (r *movingReader) rest() error {
	if err := r.controller.SetReadDeadline(time.Time{}); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return fmt.Errorf("lifting the read deadline: %w", err)
	}
	return nil
}

// shortBody makes a small body that breaks off look ended, so that it is answered
// as the malformed JSON it is and not as a failure of the service.
type shortBody struct{ io.ReadCloser }

// Read turns a broken end into a plain one.
func (b shortBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = io.EOF
	}
	return n, err
}
