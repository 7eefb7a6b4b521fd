package store

import (
	"errors"
	"fmt"
)

// Sentinel errors that callers branch on. They arrive wrapped: use errors.Is.
var (
	// ErrNotFound: no such run, batch, session, instance or pool.
	ErrNotFound = errors.New("not found")
	// ErrFenced: another process owns the pool by now; nothing was written.
	ErrFenced = errors.New("the pool has another owner")
	// ErrUnknownCursor: the cursor is malformed, of another run, or beyond the end.
	ErrUnknownCursor = errors.New("unknown cursor")
	// ErrIdempotencyMismatch: the idempotency key was used with another body.
	ErrIdempotencyMismatch = errors.New("the idempotency key was used with another body")
	// ErrRunEnded: the run accepts no more batches or contract versions.
	ErrRunEnded = errors.New("the run has ended")
	// ErrSessionEnded: the session has ended; the turn was not recorded.
	ErrSessionEnded = errors.New("the session has ended")
	// ErrTurnOutOfOrder: an earlier turn of the session has not been committed.
	ErrTurnOutOfOrder = errors.New("an earlier turn has not been committed")
)

// PrunedError tells that what was asked for has been pruned.
type PrunedError struct {
	// Subject is what is gone, such as "samples up to number 400".
	Subject string
	// First is where what is left begins, as the cursor to read after; empty where
	// nothing is.
	First Cursor
}

// Error says what is gone and where the rest begins.
func (e *PrunedError) Error() string {
	if e.First == "" {
		return e.Subject + " are pruned"
	}
	return e.Subject + " are pruned; what is left comes after cursor " + string(e.First)
}

// FieldError names the part of an input that is not acceptable, and why.
type FieldError struct {
	// Path is a JSON path such as classes[1].share.
	Path string
	// Problem completes the sentence "Path ...".
	Problem string
}

// Error joins path and problem.
func (e *FieldError) Error() string { return e.Path + ": " + e.Problem }

// UnknownClassError tells that a task names a class that the run's contract does
// not declare.
type UnknownClassError struct {
	Class string
	// Path is a JSON path such as tasks[3].class.
	Path string
}

// Error names class and path.
func (e *UnknownClassError) Error() string {
	return fmt.Sprintf("%s: class %q is not declared by the run's contract", e.Path, e.Class)
}

// ConflictError tells that what was asked for contradicts something that exists.
type ConflictError struct {
	// Subject is what was to be created or changed, such as "run".
	Subject string
	// Existing identifies what stands in the way.
	Existing string
	// Problem completes the sentence "Subject ...".
	Problem string
}

// Error joins subject, problem and what stands in the way.
func (e *ConflictError) Error() string {
	return fmt.Sprintf("%s %s (%s)", e.Subject, e.Problem, e.Existing)
}
