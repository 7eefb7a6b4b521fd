package pool

import (
	"context"
	"errors"
	"testing"

	"holdfast/router"
)

// awaited is a caller of AwaitTurn in a goroutine of its own.
type awaited struct {
	held      chan router.Reason
	placement chan Placement
	err       chan error
}

func await(ctx context.Context, loop *Loop, n byte) awaited {
	a := awaited{held: make(chan router.Reason, 1), placement: make(chan Placement, 1), err: make(chan error, 1)}
	go func() {
		placement, err := loop.AwaitTurn(ctx, router.TurnRequested{Session: session(n), Class: "agent", PromptTokens: 1_600},
			func(reason router.Reason) { a.held <- reason })
		if err != nil {
			a.err <- err
			return
		}
		a.placement <- placement
	}()
	return a
}

// reason waits until the caller is told that it is held.
func (a awaited) reason(t *testing.T) router.Reason {
	t.Helper()
	select {
	case reason := <-a.held:
		return reason
	case placement := <-a.placement:
		t.Fatalf("placed without a hold: %+v", placement)
	case err := <-a.err:
		t.Fatalf("ended without a hold: %v", err)
	}
	return 0
}

// placed waits until the caller is admitted.
func (a awaited) placed(t *testing.T) Placement {
	t.Helper()
	select {
	case placement := <-a.placement:
		return placement
	case err := <-a.err:
		t.Fatalf("ended without a placement: %v", err)
	}
	return Placement{}
}

// failed waits until the caller is told that it will not be admitted.
func (a awaited) failed(t *testing.T) error {
	t.Helper()
	select {
	case err := <-a.err:
		return err
	case placement := <-a.placement:
		t.Fatalf("placed %+v", placement)
	}
	return nil
}

// full is a loop whose two places are taken by sessions 1 and 2.
func full(t *testing.T, journal *ledger) (*Loop, context.Context) {
	t.Helper()
	loop, ctx, _ := running(t, journal)
	for n := byte(1); n <= 2; n++ {
		if p := ask(t, ctx, loop, n, 0); !p.Admitted {
			t.Fatalf("session %d: %+v", n, p)
		}
	}
	return loop, ctx
}

func end(t *testing.T, ctx context.Context, loop *Loop, n byte) {
	t.Helper()
	if err := loop.Tell(ctx, &router.SessionEnded{Session: session(n), Status: router.Completed}); err != nil {
		t.Fatal(err)
	}
}

func TestAwaitingCallerIsToldOfTheHoldAndThenAdmittedWithoutASignal(t *testing.T) {
	journal := &ledger{}
	loop, ctx := full(t, journal)
	a := await(ctx, loop, 3)
	if reason := a.reason(t); reason != router.AtCap {
		t.Fatalf("held for %s, want at_cap", reason)
	}
	end(t, ctx, loop, 1)
	if p := a.placed(t); !p.Admitted || p.Instance != "e1" {
		t.Fatalf("placed %+v", p)
	}
	records := journal.of(session(3))
	if len(records) != 2 || records[0].Kind != router.Hold || records[1].Kind != router.Admit || records[1].Signal {
		t.Fatalf("recorded %+v: want a hold, then an admission that nobody must be signalled of", records)
	}
}

func TestACallerWhoGaveUpFindsThePlaceWhenItAsksAgain(t *testing.T) {
	journal := &ledger{}
	loop, ctx := full(t, journal)
	giving, giveUp := context.WithCancel(ctx)
	first := await(giving, loop, 3)
	first.reason(t)
	giveUp()
	if err := first.failed(t); !errors.Is(err, context.Canceled) {
		t.Fatalf("the first caller got %v", err)
	}
	second := await(ctx, loop, 3)
	second.reason(t)
	end(t, ctx, loop, 2)
	if p := second.placed(t); !p.Admitted {
		t.Fatalf("placed %+v", p)
	}
	if p := ask(t, ctx, loop, 3, 0); !p.Admitted {
		t.Fatalf("asked once more: %+v", p)
	}
	admissions := 0
	for _, r := range journal.of(session(3)) {
		if r.Kind == router.Admit {
			admissions++
		}
	}
	if admissions != 1 {
		t.Fatalf("%d admissions are recorded", admissions)
	}
}

func TestAwaitingEndsWithTheSessionAndWithTheLoop(t *testing.T) {
	loop, ctx := full(t, &ledger{})
	ended, left := await(ctx, loop, 3), await(ctx, loop, 4)
	ended.reason(t)
	left.reason(t)
	end(t, ctx, loop, 3)
	if err := ended.failed(t); err == nil || errors.Is(err, ErrNotOwner) {
		t.Fatalf("the session's end gave %v", err)
	}
	journal := loop.cfg.Journal.(*ledger)
	journal.mu.Lock()
	journal.fail = errors.New("disk on fire")
	journal.mu.Unlock()
	end(t, ctx, loop, 1)
	if err := left.failed(t); !errors.Is(err, ErrNotOwner) {
		t.Fatalf("the loop's end gave %v", err)
	}
}
