package api

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humaecho"
	"golang.org/x/sync/semaphore"
)

// workKind says which bound an operation's requests count against, so that long
// polls that only wait, and batches and exports that take long, leave room for the others.
type workKind uint8

const (
	workRequest workKind = iota
	workWait
	workUpload
	workTurn
	workExport
)

// String returns the kind's name as metrics show it.
func (k workKind) String() string {
	switch k {
	case workRequest:
		return "request"
	case workWait:
		return "wait"
	case workUpload:
		return "upload"
	case workTurn:
		return "turn"
	case workExport:
		return "export"
	}
	return fmt.Sprintf("workKind(%d)", uint8(k))
}

// terms are what an operation demands before its handler runs.
type terms struct {
	roles []Role
	kind  workKind
	// timeout bounds the handler.
	timeout time.Duration
}

// termsKey is where an operation's metadata keeps its terms.
const termsKey = "terms"

// gate lets a request pass to its operation: the caller must be known and have
// the role, and there must be room. It refuses before the body is read.
func (s *Server) gate(ctx huma.Context, next func(huma.Context)) {
	c := humaecho.Unwrap(ctx)
	want, ok := ctx.Operation().Metadata[termsKey].(terms)
	if !ok {
		writeProblem(c, newProblem(http.StatusInternalServerError, kindInternal, "the operation has no terms"))
		return
	}
	if path, query := c.Request().URL.Path, c.Request().URL.RawQuery; !plainText(path) {
		writeProblem(c, newProblem(http.StatusNotFound, kindNotFound, "the path is no text that a name could have"))
		return
	} else if text, err := url.QueryUnescape(query); err != nil || !plainText(text) {
		writeProblem(c, newProblem(http.StatusUnprocessableEntity, kindInvalidRequest, "query: must be text without U+0000"))
		return
	}
	if refused := s.pass(c.Request(), want.roles); refused != nil {
		writeProblem(c, refused)
		return
	}
	leave, refused := s.enter(want.kind)
	if refused != nil {
		writeProblem(c, refused)
		return
	}
	defer leave()
	if want.kind != workUpload {
		c.Request().Body = shortBody{c.Request().Body}
	}
	bounded, cancel := context.WithTimeout(ctx.Context(), want.timeout)
	defer cancel()
	next(huma.WithContext(ctx, bounded))
}

// pass lets a request through whose caller is known, has one of the roles and is no page
// of another site.
func (s *Server) pass(r *http.Request, roles []Role) *problem {
	who, refused := s.doorkeeper.admit(r, roles)
	stateOf(r.Context()).caller = who
	if refused != nil {
		return refused
	}
	if err := s.crossOrigin.Check(r); err != nil {
		return newProblem(http.StatusForbidden, kindForbidden, "a page of another site may not do this").because(err)
	}
	return nil
}

// enter takes a place among the requests of its kind at work, which leave gives back.
func (s *Server) enter(kind workKind) (leave func(), refused *problem) {
	slots := s.slots[kind]
	if !slots.TryAcquire(1) {
		s.metrics.refused.WithLabelValues(kind.String()).Inc()
		return nil, newProblem(http.StatusTooManyRequests, kindOverloaded, fmt.Sprintf("as many requests of kind %s are at work as are allowed; try again after a moment", kind))
	}
	working := s.metrics.working.WithLabelValues(kind.String())
	working.Inc()
	return func() {
		working.Dec()
		slots.Release(1)
	}, nil
}

// plainText tells whether the database can keep a text.
func plainText(text string) bool { return utf8.ValidString(text) && !strings.ContainsRune(text, 0) }

func newSlots(limits *Limits) map[workKind]*semaphore.Weighted {
	return map[workKind]*semaphore.Weighted{
		workRequest: semaphore.NewWeighted(int64(limits.Requests)),
		workWait:    semaphore.NewWeighted(int64(limits.Waiting)),
		workUpload:  semaphore.NewWeighted(int64(limits.Uploads)),
		workTurn:    semaphore.NewWeighted(int64(limits.Turns)),
		workExport:  semaphore.NewWeighted(int64(limits.Exports)),
	}
}
