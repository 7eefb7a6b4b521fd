package engine

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// scripted answers generations as it is told.
type scripted struct {
	Client
	calls    int
	generate func(ctx context.Context, onProgress func(Progress)) error
}

func (s *scripted) Generate(ctx context.Context, _ Request, onProgress func(Progress)) (Result, error) {
	s.calls++
	return Result{}, s.generate(ctx, onProgress)
}

func failing(class Class) func(context.Context, func(Progress)) error {
	return func(context.Context, func(Progress)) error { return &Error{Class: class, Message: "boom"} }
}

func working(_ context.Context, onProgress func(Progress)) error {
	onProgress(Progress{OutputTokens: 1})
	onProgress(Progress{OutputTokens: 2})
	return nil
}

func dropping(ctx context.Context, onProgress func(Progress)) error {
	onProgress(Progress{OutputTokens: 1})
	return failing(RetryElsewhere)(ctx, onProgress)
}

func newTestBreaker(t *testing.T, client Client, changes *[]string) *Breaker {
	t.Helper()
	b, err := NewBreaker(client, BreakerConfig{Changed: func(from, to BreakerState) {
		*changes = append(*changes, from.String()+" to "+to.String())
	}})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestBreakerOpensProbesAndCloses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		engine := &scripted{generate: failing(RetryElsewhere)}
		var changes []string
		b := newTestBreaker(t, engine, &changes)
		call := func() error { _, err := b.Generate(t.Context(), someRequest, nil); return err }
		for range 5 {
			if err := call(); errors.Is(err, ErrBreakerOpen) {
				t.Fatal("open too early")
			}
		}
		var e *Error
		if err := call(); !errors.Is(err, ErrBreakerOpen) || !errors.As(err, &e) || e.Class != RetryElsewhere || engine.calls != 5 {
			t.Fatalf("after five failures: %v, %d calls", err, engine.calls)
		}
		time.Sleep(16 * time.Second) // Ten seconds and at most a half more.
		if err := call(); errors.Is(err, ErrBreakerOpen) || engine.calls != 6 {
			t.Fatalf("no probe: %v", err)
		}
		if err := call(); !errors.Is(err, ErrBreakerOpen) {
			t.Fatalf("open no more after a failed probe: %v", err)
		}
		time.Sleep(16 * time.Second)
		// The probe is long: others are let in as soon as it has a token.
		inside := 0
		engine.generate = func(ctx context.Context, onProgress func(Progress)) error {
			engine.generate = working
			if err := call(); !errors.Is(err, ErrBreakerOpen) {
				t.Errorf("two probes at once: %v", err)
			}
			onProgress(Progress{OutputTokens: 1})
			if err := call(); err != nil {
				t.Errorf("the probe's first token did not close it: %v", err)
			}
			inside++
			return nil
		}
		if err := call(); err != nil || inside != 1 {
			t.Fatal(err)
		}
		want := []string{"closed to open", "open to half-open", "half-open to open", "open to half-open", "half-open to closed"}
		if s := b.Stats(); s != (BreakerStats{State: BreakerClosed, Opened: 2, Refused: 3}) || !slices.Equal(changes, want) {
			t.Errorf("%+v, %q", s, changes)
		}
	})
}

// TestBreakerCountsOnlyTheEngine: what does not speak against the engine neither
// opens the breaker nor hides failures.
func TestBreakerCountsOnlyTheEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		engine := &scripted{}
		var changes []string
		b := newTestBreaker(t, engine, &changes)
		for _, class := range []Class{RetryHere, FailTurn, Cancelled} {
			engine.generate = failing(class)
			for range 50 {
				if _, err := b.Generate(t.Context(), someRequest, nil); errors.Is(err, ErrBreakerOpen) {
					t.Fatalf("opened by %v", class)
				}
			}
		}
		for range 4 {
			engine.generate = failing(RetryElsewhere)
			_, _ = b.Generate(t.Context(), someRequest, nil)
			engine.generate = failing(FailTurn)
			_, _ = b.Generate(t.Context(), someRequest, nil)
		}
		if s := b.Stats(); s.State != BreakerClosed {
			t.Fatalf("%+v after four failures", s)
		}
		engine.generate = failing(RetryElsewhere)
		_, _ = b.Generate(t.Context(), someRequest, nil)
		if s := b.Stats(); s.State != BreakerOpen {
			t.Errorf("%+v after five failures in a row, apart from what does not count", s)
		}
		// While it is open, a cancelled probe leaves the next call to be the probe.
		time.Sleep(16 * time.Second)
		engine.generate = failing(Cancelled)
		_, _ = b.Generate(t.Context(), someRequest, nil)
		engine.generate = working
		if _, err := b.Generate(t.Context(), someRequest, nil); err != nil || b.Stats().State != BreakerClosed {
			t.Errorf("%v, %+v", err, b.Stats())
		}
	})
}

// TestBreakerFindsAnEngineThatDropsItsStreams: each call begins well, so that no two
// failures follow each other.
func TestBreakerFindsAnEngineThatDropsItsStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		engine := &scripted{generate: dropping}
		var changes []string
		b := newTestBreaker(t, engine, &changes)
		for range 10 {
			_, _ = b.Generate(t.Context(), someRequest, nil)
		}
		if s := b.Stats(); s.State != BreakerOpen || engine.calls != 10 {
			t.Errorf("%+v after %d dropped streams", s, engine.calls)
		}
		// The same failures spread over hours, among calls that work, do not open it.
		b = newTestBreaker(t, engine, &changes)
		for range 50 {
			engine.generate = dropping
			_, _ = b.Generate(t.Context(), someRequest, nil)
			time.Sleep(time.Minute)
			engine.generate = working
			for range 20 {
				_, _ = b.Generate(t.Context(), someRequest, nil)
			}
		}
		if s := b.Stats(); s.Opened != 0 {
			t.Errorf("%+v", s)
		}
	})
}

func TestBreakerKeepsTheControl(t *testing.T) {
	client := testClient(t, "http://127.0.0.1:1", 0)
	var changes []string
	b := newTestBreaker(t, newTestBreaker(t, client, &changes), &changes)
	if c, ok := ControllerOf(b); !ok || c != Controller(client) {
		t.Errorf("%v, %v", c, ok)
	}
	if _, err := NewBreaker(nil, BreakerConfig{}); err == nil {
		t.Error("no client accepted")
	}
	if _, err := NewBreaker(client, BreakerConfig{FailureShare: 2}); err == nil {
		t.Error("a share of 2 accepted")
	}
}
