package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/store"
	"holdfast/workflows/task"
)

// TestProblemOf: every error that a handler can return has its answer, however
// deep it is wrapped.
func TestProblemOf(t *testing.T) {
	_, unreachable := pgx.Connect(t.Context(), "postgres://127.0.0.1:1/none?sslmode=disable&connect_timeout=5")
	if unreachable == nil {
		t.Fatal("something answers on port 1")
	}
	for _, c := range []struct {
		err    error
		status int
		kind   problemKind
	}{
		{&task.FieldError{Path: "tasks[0].class", Problem: "is required", Offset: task.UnknownOffset}, http.StatusUnprocessableEntity, kindInvalidRequest},
		{&task.FieldError{Path: "tasks[0]", Problem: "is not valid JSON: x", Offset: 3}, http.StatusBadRequest, kindInvalidJSON},
		{&store.FieldError{Path: "classes", Problem: "x"}, http.StatusUnprocessableEntity, kindInvalidRequest},
		{&store.UnknownClassError{Class: "x", Path: "tasks[0].class"}, http.StatusUnprocessableEntity, kindUnknownClass},
		{&store.ConflictError{Subject: "pool", Problem: "is in use"}, http.StatusConflict, kindConflict},
		{store.ErrIdempotencyMismatch, http.StatusConflict, kindKeyReused},
		{store.ErrRunEnded, http.StatusConflict, kindRunEnded},
		{store.ErrNotFound, http.StatusNotFound, kindNotFound},
		{ErrNotOwner, http.StatusServiceUnavailable, kindNotOwner},
		{context.DeadlineExceeded, http.StatusServiceUnavailable, kindTimeout},
		{context.Canceled, http.StatusServiceUnavailable, kindStopping},
		{unreachable, http.StatusServiceUnavailable, kindUnavailable},
		{&pgconn.PgError{Code: "57P01"}, http.StatusServiceUnavailable, kindUnavailable},
		{&pgconn.PgError{Code: "53300"}, http.StatusServiceUnavailable, kindUnavailable},
		{&pgconn.PgError{Code: "23505"}, http.StatusInternalServerError, kindInternal},
		{&pgconn.PgError{Code: "57014"}, http.StatusInternalServerError, kindInternal},
		{io.ErrUnexpectedEOF, http.StatusServiceUnavailable, kindUnavailable},
		{errors.New("secret detail"), http.StatusInternalServerError, kindInternal},
	} {
		p := problemOf(fmt.Errorf("doing something: %w", c.err))
		if p.Status != c.status || p.Type != problemTypePrefix+string(c.kind) || p.Title == "" || p.Detail == "" {
			t.Errorf("%v is answered %+v", c.err, p.Problem)
		}
		if (p.Status == http.StatusServiceUnavailable) != (p.header.Get("Retry-After") != "") {
			t.Errorf("%v: Retry-After is %q", c.err, p.header.Get("Retry-After"))
		}
		if c.kind == kindInternal && p.cause == nil {
			t.Errorf("%v is not kept for the log", c.err)
		}
	}
	if p := problemOf(errors.New("secret detail")); p.Detail == "secret detail" {
		t.Error("an internal error is told to the caller")
	}
}
