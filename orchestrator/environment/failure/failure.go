// Package failure names the ways in which something outside of this process (an
// environment, a tool server, a scorer) can let a session down.
//
// An infrastructure failure is never a reward of zero and never an observation
// for the model: it ends a call with an *Error, and the caller gives the session
// a status of its own. What the model did wrong (an unknown tool, a command that
// exits with 1) is not a failure in this sense.
package failure

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
)

// Kind says what went wrong, in the words a caller branches on.
type Kind uint8

const (
	// Unreachable: nobody answered, or a proxy said that nobody does (502, 503,
	// 504), after all retries.
	Unreachable Kind = iota + 1
	// Timeout: the other side took longer than it may.
	Timeout
	// Died: a process ended, or a connection broke, while it was needed.
	Died
	// Lost: the other side does not know the episode any more, or it belonged to
	// a process of ours that is gone.
	Lost
	// Conflict: the episode stands at another step than the one asked for, and
	// the answer to that step cannot be had again.
	Conflict
	// Refused: the request was answered with a status that says not to repeat it.
	Refused
	// Malformed: the answer does not follow the documented schema, or holds a
	// reward that is not finite.
	Malformed
	// TooLarge: the answer is longer than the limit.
	TooLarge
	// LimitReached: a program whose whole answer is needed ran into one of its
	// limits (CPU time, output, file size).
	LimitReached
	// Exhausted: this process runs as many environments as it may.
	Exhausted
	// Disabled: the operator does not allow this kind or this host here.
	Disabled
	// Cancelled: the caller's context ended; nothing is wrong with the other side.
	Cancelled
)

var names = [...]string{
	Unreachable: "unreachable", Timeout: "timeout", Died: "died", Lost: "lost", Conflict: "conflict", Refused: "refused",
	Malformed: "malformed", TooLarge: "too_large", LimitReached: "limit_reached", Exhausted: "exhausted", Disabled: "disabled",
	Cancelled: "cancelled",
}

func (k Kind) String() string {
	if int(k) < len(names) && names[k] != "" {
		return names[k]
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Repeatable tells whether the same call may succeed a little later. Every other
// kind needs a new episode, another task or the operator.
func (k Kind) Repeatable() bool {
	return k == Unreachable || k == Exhausted
}

// Error is one failed operation.
type Error struct {
	Kind Kind
	// Doing says what was tried, such as "stepping environment 4f1a…".
	Doing string
	// Status is the HTTP status of the answer, 0 if there was none.
	Status int
	// Message is the other side's own words, shortened; it may be empty.
	Message string
	// Err is the cause, if there is one.
	Err error
}

func (e *Error) Error() string {
	text := e.Kind.String()
	if e.Doing != "" {
		text = e.Doing + ": " + text
	}
	if e.Status != 0 {
		text += fmt.Sprintf(" (status %d)", e.Status)
	}
	if e.Message != "" {
		text += ": " + e.Message
	}
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

func (e *Error) Unwrap() error { return e.Err }

// New returns an error of a kind with a cause.
func New(kind Kind, doing string, err error) *Error {
	return &Error{Kind: kind, Doing: doing, Err: err}
}

// Newf returns an error of a kind whose message is put together like fmt.Sprintf.
func Newf(kind Kind, doing, format string, args ...any) *Error {
	return &Error{Kind: kind, Doing: doing, Message: fmt.Sprintf(format, args...)}
}

// NotAsDocumented returns the error of what another side wrote and encoding/json could
// not read, in words for its author: the place in the document, and no type of Go's.
func NotAsDocumented(what string, err error) *Error {
	var misfit *json.UnmarshalTypeError
	if errors.As(err, &misfit) {
		place, article := cmp.Or(misfit.Field, "the document"), "a"
		if misfit.Value == "array" || misfit.Value == "object" {
			article = "an"
		}
		return &Error{Kind: Malformed, Message: fmt.Sprintf("%s is not as documented: %s cannot be %s %s", what, place, article, misfit.Value)}
	}
	return &Error{Kind: Malformed, Message: what + " is not as documented", Err: err}
}

// Within gives err what was being done when it has no such words yet, and turns
// an error without a kind into one: Cancelled when ctx has ended, otherwise
// fallback.
func Within(ctx context.Context, doing string, fallback Kind, err error) error {
	if err == nil {
		return nil
	}
	var known *Error
	if errors.As(err, &known) {
		if known.Doing != "" {
			return err
		}
		named := *known
		named.Doing = doing
		return &named
	}
	if ctx.Err() != nil {
		return New(OfContext(ctx), doing, ctx.Err())
	}
	return New(fallback, doing, err)
}

// OfContext tells why a context ended: Timeout when a deadline passed, Cancelled
// otherwise.
func OfContext(ctx context.Context) Kind {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return Timeout
	}
	return Cancelled
}

// KindOf returns the kind of an error that this package made, and whether it did.
func KindOf(err error) (Kind, bool) {
	var known *Error
	if errors.As(err, &known) {
		return known.Kind, true
	}
	return 0, false
}
