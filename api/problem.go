package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/labstack/echo/v4"

	"holdfast/api/wire"
	"holdfast/store"
	"holdfast/workflows/task"
)

// problemKind names a kind of problem for programs; it is the end of the
// document's type. docs/api.md lists what a caller should do about each.
type problemKind string

// The closed set of problem kinds.
const (
	kindInvalidJSON      problemKind = "invalid-json"
	kindInvalidRequest   problemKind = "invalid-request"
	kindUnknownClass     problemKind = "unknown-class"
	kindUnknownCursor    problemKind = "unknown-cursor"
	kindPruned           problemKind = "pruned"
	kindEngineNoAnswer   problemKind = "engine-does-not-answer"
	kindUnauthorized     problemKind = "unauthorized"
	kindForbidden        problemKind = "forbidden"
	kindNotFound         problemKind = "not-found"
	kindMethodNotAllowed problemKind = "method-not-allowed"
	kindConflict         problemKind = "conflict"
	kindBusy             problemKind = "turn-under-way"
	kindKeyReused        problemKind = "idempotency-key-reused"
	kindRunEnded         problemKind = "run-ended"
	kindTooLarge         problemKind = "too-large"
	kindUnsupportedMedia problemKind = "unsupported-media-type"
	kindBodyTimeout      problemKind = "body-timeout"
	kindLimit            problemKind = "limit-reached"
	kindOverloaded       problemKind = "overloaded"
	kindNotOwner         problemKind = "not-owner"
	kindUnavailable      problemKind = "unavailable"
	kindTimeout          problemKind = "timeout"
	kindStopping         problemKind = "stopping"
	kindInternal         problemKind = "internal"
)

var kindTitles = map[problemKind]string{
	kindInvalidJSON:      "The body is not valid JSON",
	kindInvalidRequest:   "The request is not acceptable",
	kindUnknownClass:     "The contract does not declare the class",
	kindUnknownCursor:    "The cursor is not known",
	kindPruned:           "What was asked for is pruned",
	kindEngineNoAnswer:   "The engine does not answer",
	kindUnauthorized:     "A token is required",
	kindForbidden:        "Not allowed",
	kindNotFound:         "Not found",
	kindMethodNotAllowed: "Method not allowed",
	kindConflict:         "Conflict with what exists",
	kindBusy:             "Another call of the session is under way",
	kindKeyReused:        "The idempotency key was used with another body",
	kindRunEnded:         "The run has ended",
	kindTooLarge:         "The body is too large",
	kindUnsupportedMedia: "Unsupported media type",
	kindBodyTimeout:      "The body did not arrive in time",
	kindLimit:            "A limit of the task is reached",
	kindOverloaded:       "Too many requests",
	kindNotOwner:         "Another process runs the router",
	kindUnavailable:      "A part of the service is not available",
	kindTimeout:          "The request took too long",
	kindStopping:         "The service is stopping",
	kindInternal:         "Internal error",
}

const problemTypePrefix = "urn:holdfast:problem:"

// retryAfterSeconds stands in the Retry-After header of 429 and 503.
const retryAfterSeconds = "1"

// problem is an error with everything its answer needs.
type problem struct {
	wire.Problem
	header http.Header
	// cause is for the log only.
	cause error
}

func newProblem(status int, kind problemKind, detail string) *problem {
	p := &problem{Problem: wire.Problem{
		Type: problemTypePrefix + string(kind), Title: kindTitles[kind], Status: status, Detail: detail,
	}}
	if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
		p.header = http.Header{"Retry-After": {retryAfterSeconds}}
	}
	return p
}

// invalid is the problem of one field that is not acceptable.
func invalid(location, message string) *problem {
	p := newProblem(http.StatusUnprocessableEntity, kindInvalidRequest, location+" "+message)
	p.Errors = []wire.ErrorDetail{{Location: location, Message: message}}
	return p
}

// because keeps the cause for the log.
func (p *problem) because(err error) *problem {
	p.cause = err
	return p
}

// GetStatus, GetHeaders and ContentType make a problem an answer of huma's.
func (p *problem) GetStatus() int { return p.Status }

// GetHeaders returns the headers of the answer.
func (p *problem) GetHeaders() http.Header { return p.header }

// ContentType returns the media type of problem documents.
func (p *problem) ContentType(string) string { return problemMediaType }

const problemMediaType = "application/problem+json"

// problemOf maps every error that a handler can return to its answer. It is the
// only place that does.
func problemOf(err error) *problem {
	var (
		ready        *problem
		taskField    *task.FieldError
		storeField   *store.FieldError
		unknownClass *store.UnknownClassError
		conflict     *store.ConflictError
		gone         *store.PrunedError
		tooLarge     *bodyTooLargeError
		body         *bodyError
		syntax       *offsetError
		member       *memberError
	)
	switch {
	case errors.As(err, &ready):
		return ready
	case errors.As(err, &taskField):
		return taskProblem(taskField)
	case errors.As(err, &tooLarge):
		p := newProblem(http.StatusRequestEntityTooLarge, kindTooLarge, tooLarge.Error())
		p.Errors = []wire.ErrorDetail{{Location: tooLarge.location, Message: tooLarge.message()}}
		return p
	case errors.As(err, &body):
		return bodyProblem(body)
	case errors.As(err, &syntax):
		return bodyProblem(&bodyError{kind: bodyNotJSON, location: "body", message: syntax.message(), offset: syntax.offset})
	case errors.As(err, &member):
		return invalid(bodyPath(member.path), member.problem)
	case errors.As(err, &unknownClass):
		p := newProblem(http.StatusUnprocessableEntity, kindUnknownClass, bodyPath(unknownClass.Path)+": "+fmt.Sprintf("class %q is not declared by the run's contract", unknownClass.Class))
		p.Errors = []wire.ErrorDetail{{Location: bodyPath(unknownClass.Path), Message: "is not declared by the run's contract", Value: unknownClass.Class}}
		return p
	case errors.As(err, &storeField):
		return invalid(bodyPath(storeField.Path), storeField.Problem)
	case errors.As(err, &conflict):
		return newProblem(http.StatusConflict, kindConflict, conflict.Error())
	case errors.As(err, &gone):
		return newProblem(http.StatusGone, kindPruned, gone.Error())
	case errors.Is(err, store.ErrIdempotencyMismatch):
		p := newProblem(http.StatusConflict, kindKeyReused, "the idempotency key was used before with another body; nothing was released")
		p.Errors = []wire.ErrorDetail{{Location: "header.Idempotency-Key", Message: "was used before with another body"}}
		return p
	case errors.Is(err, store.ErrRunEnded):
		return newProblem(http.StatusConflict, kindRunEnded, "the run has ended; it accepts no batches and no contract versions")
	case errors.Is(err, store.ErrNotFound):
		return newProblem(http.StatusNotFound, kindNotFound, "there is no such thing").because(err)
	case errors.Is(err, ErrNotOwner):
		return newProblem(http.StatusServiceUnavailable, kindNotOwner, "another process runs this pool's router, or none does at the moment").because(err)
	case errors.Is(err, context.DeadlineExceeded):
		return newProblem(http.StatusServiceUnavailable, kindTimeout, "the request took longer than the service allows; nothing was half done").because(err)
	case errors.Is(err, context.Canceled):
		return newProblem(http.StatusServiceUnavailable, kindStopping, "the request was broken off").because(err)
	case databaseDown(err):
		return newProblem(http.StatusServiceUnavailable, kindUnavailable, "the database cannot be reached at the moment; trying again is right").because(err)
	}
	return newProblem(http.StatusInternalServerError, kindInternal, "something went wrong inside; the log has it under the request id").because(err)
}

// taskProblem answers for one task of a batch: what is not JSON is 400, what is
// JSON and not acceptable is 422.
func taskProblem(e *task.FieldError) *problem {
	status, kind, message := http.StatusUnprocessableEntity, kindInvalidRequest, e.Problem
	if strings.HasPrefix(e.Problem, notJSON) || strings.HasPrefix(e.Problem, cutShort) {
		status, kind, message = http.StatusBadRequest, kindInvalidJSON, explainNotJSON(e.Problem)
	}
	detail := wire.ErrorDetail{Location: bodyPath(e.Path), Message: message}
	text := detail.Location + " " + message
	if e.Offset != task.UnknownOffset {
		detail.OffsetBytes = &e.Offset
		text += fmt.Sprintf(" (at byte %d)", e.Offset)
	}
	p := newProblem(status, kind, text)
	p.Errors = []wire.ErrorDetail{detail}
	return p
}

// Beginnings of task.FieldError.Problem that mean the text is not JSON at all.
const (
	notJSON  = "is not valid JSON"
	cutShort = "the document ends"
)

func bodyProblem(e *bodyError) *problem {
	status, kind := http.StatusBadRequest, kindInvalidJSON
	switch e.kind {
	case bodyNotAcceptable:
		status, kind = http.StatusUnprocessableEntity, kindInvalidRequest
	case bodyTooSlow:
		status, kind = http.StatusRequestTimeout, kindBodyTimeout
	case bodyUnsupported:
		status, kind = http.StatusUnsupportedMediaType, kindUnsupportedMedia
	}
	message := explainNotJSON(e.message)
	detail := wire.ErrorDetail{Location: e.location, Message: message}
	text := e.location + " " + message
	if e.offset >= 0 {
		detail.OffsetBytes = &e.offset
		text += fmt.Sprintf(" (at byte %d)", e.offset)
	}
	p := newProblem(status, kind, text).because(e.cause)
	p.Errors = []wire.ErrorDetail{detail}
	return p
}

// explainNotJSON adds what the commonest cause is: serialisers that write
// numbers which JSON does not have.
func explainNotJSON(message string) string {
	for _, sign := range []string{"character 'N'", "character 'I'"} {
		if strings.Contains(message, sign) {
			return message + "; JSON has no NaN, Infinity or None: leave the field out"
		}
	}
	return message
}

// databaseDown tells a database that cannot be reached, is shutting down or has
// no connection left from one that was asked something wrong.
func databaseDown(err error) bool {
	if errors.As(err, new(*pgconn.ConnectError)) || errors.As(err, new(*net.OpError)) || errors.Is(err, io.ErrUnexpectedEOF) {
		return true
	}
	var answered *pgconn.PgError
	if !errors.As(err, &answered) {
		return false
	}
	// Classes of SQLSTATE: connection exception, insufficient resources, operator intervention.
	for _, class := range []string{"08", "53", "57P"} {
		if strings.HasPrefix(answered.Code, class) {
			return true
		}
	}
	return false
}

// relocated gives a field that the store names by itself its place in the
// request; other errors pass.
func relocated(err error, path, location string) error {
	var field *store.FieldError
	if !errors.As(err, &field) || field.Path != path {
		return err
	}
	return invalid(location, field.Problem)
}

// bodyPath puts a path that a lower layer gives relative to the body into the
// form of locations.
func bodyPath(path string) string {
	switch {
	case path == "":
		return "body"
	case strings.HasPrefix(path, "body"), strings.HasPrefix(path, "query."), strings.HasPrefix(path, "path."), strings.HasPrefix(path, "header."):
		return path
	}
	return "body." + path
}

// problemOfHuma translates what huma found while it checked a request.
func problemOfHuma(m *huma.ErrorModel) *problem {
	kinds := map[int]problemKind{
		http.StatusBadRequest: kindInvalidJSON, http.StatusUnprocessableEntity: kindInvalidRequest,
		http.StatusRequestEntityTooLarge: kindTooLarge, http.StatusRequestTimeout: kindBodyTimeout,
		http.StatusUnsupportedMediaType: kindUnsupportedMedia,
	}
	kind, known := kinds[m.Status]
	if !known {
		return newProblem(m.Status, kindInternal, m.Detail).because(m)
	}
	p := newProblem(m.Status, kind, m.Detail)
	var sayings []string
	for _, found := range m.Errors {
		if found == nil {
			continue
		}
		detail := wire.ErrorDetail{Location: found.Location, Message: explainNotJSON(found.Message), OffsetBytes: offsetIn(found)}
		problem, path, ofMember := memberIn(found.Message)
		if ofMember {
			detail.Location, detail.Message = bodyPath(path), problem
		}
		// What huma has beside a memberError is the whole body.
		if kind == kindInvalidRequest && !ofMember {
			if detail.Value = shortValue(found.Value); detail.Value != nil {
				detail.Message += fmt.Sprintf(", is %v", detail.Value)
			}
		}
		p.Errors = append(p.Errors, detail)
		sayings = append(sayings, detail.Location+" "+detail.Message)
	}
	switch n := len(sayings); {
	case n > maxSayings:
		p.Detail = strings.Join(sayings[:maxSayings], "; ") + fmt.Sprintf("; and %d more", n-maxSayings)
	case n > 0:
		p.Detail = strings.Join(sayings, "; ")
	}
	return p
}

// maxSayings bounds how many things wrong are told in one sentence.
const maxSayings = 3

// offsetIn recovers the byte that an offsetError tells: huma keeps only the text.
func offsetIn(found *huma.ErrorDetail) *int64 {
	match := offsetPattern.FindStringSubmatch(found.Message)
	if match == nil {
		return nil
	}
	offset, err := strconv.ParseInt(match[1], 10, 64)
	if err != nil {
		return nil
	}
	return &offset
}

var offsetPattern = regexp.MustCompile(` at byte (\d+)$`)

// maxValueBytes bounds how much of a bad value an answer repeats.
const maxValueBytes = 80

// shortValue keeps a value that helps to recognise the place, and drops others.
func shortValue(value any) any {
	switch v := value.(type) {
	case string:
		if v == "" {
			return nil
		}
		return shorten(v)
	case bool, float64, int, int64, json.Number:
		return v
	}
	return nil
}

func shorten(s string) string {
	if len(s) <= maxValueBytes {
		return s
	}
	return strings.ToValidUTF8(s[:maxValueBytes], "") + "..."
}

// writeProblem answers a request outside huma's operations.
func writeProblem(c echo.Context, p *problem) {
	state := stateOf(c.Request().Context())
	state.failed(p)
	p.RequestID = state.id
	if c.Response().Committed {
		return
	}
	for name, values := range p.header {
		c.Response().Header()[name] = values
	}
	c.Response().Header().Set(echo.HeaderContentType, problemMediaType)
	c.Response().WriteHeader(p.Status)
	if err := json.NewEncoder(c.Response()).Encode(&p.Problem); err != nil {
		state.cause = errors.Join(state.cause, fmt.Errorf("writing the answer: %w", err))
	}
}

// problemOfEcho answers for what no route took.
func problemOfEcho(err error) *problem {
	var routing *echo.HTTPError
	if errors.As(err, &routing) {
		switch routing.Code {
		case http.StatusNotFound:
			return newProblem(http.StatusNotFound, kindNotFound, "there is no such path; /api/v1/openapi.yaml lists them all")
		case http.StatusMethodNotAllowed:
			return newProblem(http.StatusMethodNotAllowed, kindMethodNotAllowed, "the path does not take this method; the Allow header lists those it takes")
		}
	}
	return problemOf(err)
}

// isTimeout tells a read deadline from other failures of a connection.
func isTimeout(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }
