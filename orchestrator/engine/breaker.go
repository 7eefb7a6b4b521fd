package engine

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"
)

// ErrBreakerOpen is the cause of a refusal by a Breaker, and an ErrNotCalled.
var ErrBreakerOpen = fmt.Errorf("%w: it has failed too often and is left alone for a while", ErrNotCalled)

// BreakerState is what a Breaker does with generations.
type BreakerState uint8

const (
	// BreakerClosed: they go to the engine.
	BreakerClosed BreakerState = iota + 1
	// BreakerHalfOpen: one goes to the engine as a probe, the others are refused.
	BreakerHalfOpen
	// BreakerOpen: all are refused.
	BreakerOpen
)

func (s BreakerState) String() string {
	switch s {
	case BreakerClosed:
		return "closed"
	case BreakerHalfOpen:
		return "half-open"
	case BreakerOpen:
		return "open"
	}
	return "unknown"
}

// BreakerConfig is when a Breaker opens, and for how long.
type BreakerConfig struct {
	// ConsecutiveFailures opens it; default 5.
	ConsecutiveFailures int
	// FailureShare of at least MinCalls calls within Window opens it too, which
	// finds an engine that begins every answer and drops some; defaults 0.5, 20 and
	// one minute.
	FailureShare float64
	MinCalls     int
	Window       time.Duration
	// OpenFor is how long it stays open before a probe, lengthened at random by up to
	// a half, so that the breakers of many processes do not probe at once; default
	// ten seconds.
	OpenFor time.Duration
	// Changed, if not nil, is told of each change. It must not call the Breaker.
	Changed func(from, to BreakerState)
}

// BreakerStats is what a Breaker has done since it was made.
type BreakerStats struct {
	State BreakerState
	// Opened counts changes to open, Refused the calls not made.
	Opened, Refused int64
}

// Breaker stands before a client and leaves an engine alone that keeps failing.
// Only what speaks against the engine counts: failures of class RetryElsewhere.
// Refusals, wrong requests, waiting (429) and cancelled calls do not. A probe has
// succeeded with its first token, so that a long generation does not keep others
// waiting. Metrics, discovery and health pass, since they tell when it is back.
type Breaker struct {
	Client
	machine         *gobreaker.TwoStepCircuitBreaker[struct{}]
	opened, refused atomic.Int64
}

// NewBreaker puts a breaker before a client.
func NewBreaker(client Client, cfg BreakerConfig) (*Breaker, error) {
	if client == nil {
		return nil, errors.New("circuit breaker: a client is required")
	}
	if cfg.ConsecutiveFailures < 0 || cfg.MinCalls < 0 || cfg.Window < 0 || cfg.OpenFor < 0 || cfg.FailureShare < 0 || cfg.FailureShare > 1 {
		return nil, errors.New("circuit breaker: counts and times must not be negative, and the share of failures at most 1")
	}
	if cfg.ConsecutiveFailures == 0 {
		cfg.ConsecutiveFailures = 5
	}
	if cfg.FailureShare == 0 {
		cfg.FailureShare = 0.5
	}
	if cfg.MinCalls == 0 {
		cfg.MinCalls = 20
	}
	if cfg.Window == 0 {
		cfg.Window = time.Minute
	}
	if cfg.OpenFor == 0 {
		cfg.OpenFor = 10 * time.Second
	}
	b := &Breaker{Client: client}
	b.machine = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		MaxRequests: 1, Interval: cfg.Window, BucketPeriod: cfg.Window / 6,
		Timeout: cfg.OpenFor + rand.N(cfg.OpenFor/2+1),
		ReadyToTrip: func(c gobreaker.Counts) bool {
			return int(c.ConsecutiveFailures) >= cfg.ConsecutiveFailures ||
				int(c.Requests) >= cfg.MinCalls && float64(c.TotalFailures) >= cfg.FailureShare*float64(c.Requests)
		},
		IsSuccessful: func(err error) bool { return !blames(err) },
		// A cancelled call or a wait says nothing; half-open, the next call is the probe.
		IsExcluded: func(err error) bool { return err != nil && !blames(err) },
		OnStateChange: func(_ string, from, to gobreaker.State) {
			if to == gobreaker.StateOpen {
				b.opened.Add(1)
			}
			if cfg.Changed != nil {
				cfg.Changed(breakerState(from), breakerState(to))
			}
		},
	})
	return b, nil
}

// blames tells whether an error speaks against the engine.
func blames(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Class == RetryElsewhere
}

// Generate implements Client. Refused, it returns class RetryElsewhere with the cause
// ErrBreakerOpen, and nothing has been sent.
func (b *Breaker) Generate(ctx context.Context, request Request, onProgress func(Progress)) (Result, error) {
	done, err := b.machine.Allow()
	if err != nil {
		b.refused.Add(1)
		return Result{CachedTokens: -1}, &Error{Class: RetryElsewhere, Err: ErrBreakerOpen}
	}
	answers := false
	result, err := b.Client.Generate(ctx, request, func(p Progress) {
		if !answers {
			answers = true
			done(nil)
		}
		if onProgress != nil {
			onProgress(p)
		}
	})
	if !answers {
		done(err)
		return result, err
	}
	if blames(err) {
		// It began to answer, which counted as a success, and broke: that counts too.
		if done, refused := b.machine.Allow(); refused == nil {
			done(err)
		}
	}
	return result, err
}

// Stats is the breaker's state, for metrics.
func (b *Breaker) Stats() BreakerStats {
	return BreakerStats{State: breakerState(b.machine.State()), Opened: b.opened.Load(), Refused: b.refused.Load()}
}

// Unwrap is the client behind the breaker.
func (b *Breaker) Unwrap() Client { return b.Client }

func breakerState(s gobreaker.State) BreakerState {
	switch s {
	case gobreaker.StateOpen:
		return BreakerOpen
	case gobreaker.StateHalfOpen:
		return BreakerHalfOpen
	}
	return BreakerClosed
}

// ControllerOf is the Controller of a client, also of one behind a Breaker.
func ControllerOf(client Client) (Controller, bool) { return behind[Controller](client) }

// behind finds what a client can do besides, or the client that it wraps.
func behind[T any](client Client) (found T, ok bool) {
	for client != nil {
		if found, ok = client.(T); ok {
			return found, true
		}
		wrapped, isWrapper := client.(interface{ Unwrap() Client })
		if !isWrapper {
			break
		}
		client = wrapped.Unwrap()
	}
	return found, false
}
