package pool

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"holdfast/router"
)

// ledger is a journal in memory that can be told to fail or to wait.
type ledger struct {
	mu      sync.Mutex
	records []Recorded
	fail    error
	gate    chan struct{} // if set, recording an admission takes one token from it
}

func (l *ledger) Record(ctx context.Context, decisions []Recorded) error {
	l.mu.Lock()
	gate, fail := l.gate, l.fail
	l.mu.Unlock()
	admits := slices.ContainsFunc(decisions, func(r Recorded) bool { return r.Kind == router.Admit })
	if gate != nil && admits {
		select {
		case <-gate:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if fail != nil {
		return fail
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.records = append(l.records, slices.Clone(decisions)...)
	return nil
}

func (l *ledger) of(session router.SessionID) []Recorded {
	l.mu.Lock()
	defer l.mu.Unlock()
	var found []Recorded
	for _, r := range l.records {
		if r.Session == session {
			found = append(found, r)
		}
	}
	return found
}

// running starts a loop whose instance takes two sessions of 100 blocks.
func running(t *testing.T, journal *ledger, restored ...router.Event) (*Loop, context.Context, <-chan error) {
	t.Helper()
	clock := struct {
		sync.Mutex
		now router.Nanos
	}{now: 1}
	cfg := router.DefaultConfig()
	cfg.StaticCap = 2
	loop, err := New(Config{
		Router: cfg, Journal: journal, TickInterval: time.Hour,
		Now: func() router.Nanos {
			clock.Lock()
			defer clock.Unlock()
			clock.now += int64(time.Millisecond)
			return clock.now
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	ended := make(chan error, 1)
	joined := &router.InstanceJoined{Instance: "e1", CapacityBlocks: 10_000, BlockTokens: 16, MaxContextTokens: 100_000, PrefillTokensPerSecond: 10_000}
	go func() { ended <- loop.Run(ctx, append([]router.Event{joined}, restored...)) }()
	t.Cleanup(func() {
		cancel()
		<-loop.done
	})
	return loop, ctx, ended
}

func session(n byte) router.SessionID { return router.SessionID{15: n} }

func ask(t *testing.T, ctx context.Context, loop *Loop, n byte, turn int) Placement {
	t.Helper()
	placement, err := loop.RequestTurn(ctx, router.TurnRequested{Session: session(n), Class: "agent", Turn: turn, PromptTokens: 1_600})
	if err != nil {
		t.Fatal(err)
	}
	return placement
}

func TestHoldIsAnsweredThenGrantedWithASignal(t *testing.T) {
	journal := &ledger{}
	loop, ctx, _ := running(t, journal)
	for n := byte(1); n <= 2; n++ {
		if p := ask(t, ctx, loop, n, 0); !p.Admitted || p.Instance != "e1" {
			t.Fatalf("session %d: %+v, want an admission to e1", n, p)
		}
	}
	if p := ask(t, ctx, loop, 3, 0); p.Admitted || p.Reason != router.AtCap {
		t.Fatalf("the third session got %+v, want a hold at the cap", p)
	}
	if err := loop.Tell(ctx, &router.SessionEnded{Session: session(1), Status: router.Completed}); err != nil {
		t.Fatal(err)
	}
	// The question comes behind the ending in the loop's queue, so its answer is
	// the state after it.
	if p := ask(t, ctx, loop, 3, 0); !p.Admitted {
		t.Fatalf("after a session ended the held one got %+v", p)
	}
	records := journal.of(session(3))
	if len(records) != 2 || records[0].Kind != router.Hold || records[0].Signal || records[1].Kind != router.Admit || !records[1].Signal {
		t.Fatalf("recorded %+v: want a hold, then an admission that is signalled", records)
	}
	for _, r := range journal.of(session(2)) {
		if r.Signal {
			t.Fatalf("an admission that answered a call is signalled too: %+v", r)
		}
	}
}

func TestRepeatedQuestionIsOneAdmission(t *testing.T) {
	journal := &ledger{}
	loop, ctx, _ := running(t, journal)
	first := ask(t, ctx, loop, 1, 0)
	if again := ask(t, ctx, loop, 1, 0); again != first {
		t.Fatalf("the same turn was placed twice: %+v, then %+v", first, again)
	}
	if records := journal.of(session(1)); len(records) != 1 {
		t.Fatalf("one admission left %d records", len(records))
	}
}

func TestContinuationOnItsInstanceNeedsNoRecord(t *testing.T) {
	journal := &ledger{}
	loop, ctx, _ := running(t, journal)
	ask(t, ctx, loop, 1, 0)
	ended := &router.TurnEnded{Session: session(1), Turn: 0, Instance: "e1", PromptTokens: 1_600, CachedTokens: 0, OutputTokens: 100}
	if err := loop.Tell(ctx, ended); err != nil {
		t.Fatal(err)
	}
	if p := ask(t, ctx, loop, 1, 1); !p.Admitted || p.Reason != router.Continuation {
		t.Fatalf("the second turn got %+v, want a continuation", p)
	}
	if records := journal.of(session(1)); len(records) != 1 {
		t.Fatalf("a continuation that stays left records: %+v", records)
	}
}

func TestNothingIsAnsweredBeforeItIsRecorded(t *testing.T) {
	journal := &ledger{gate: make(chan struct{})}
	loop, ctx, _ := running(t, journal)
	answered := make(chan Placement, 1)
	go func() {
		p, err := loop.RequestTurn(ctx, router.TurnRequested{Session: session(1), Class: "agent", PromptTokens: 1_600})
		if err != nil {
			t.Error(err)
		}
		answered <- p
	}()
	// Handing over the token is the moment at which the record is written; the
	// answer must not have come before it.
	select {
	case p := <-answered:
		t.Fatalf("answered %+v before it was recorded", p)
	case journal.gate <- struct{}{}:
	}
	if p := <-answered; !p.Admitted {
		t.Fatalf("answered %+v", p)
	}
}

func TestLostJournalEndsTheLoopAndRefusesCallers(t *testing.T) {
	fenced := errors.New("another owner")
	journal := &ledger{fail: fenced}
	loop, ctx, ended := running(t, journal)
	_, err := loop.RequestTurn(ctx, router.TurnRequested{Session: session(1), Class: "agent", PromptTokens: 1_600})
	if !errors.Is(err, ErrNotOwner) {
		t.Fatalf("asked of a loop that lost its journal: %v, want ErrNotOwner", err)
	}
	if err := <-ended; !errors.Is(err, fenced) {
		t.Fatalf("the loop ended with %v, want the journal's error", err)
	}
	if err := loop.Tell(ctx, &router.Tick{}); !errors.Is(err, ErrNotOwner) {
		t.Fatalf("telling an ended loop: %v, want ErrNotOwner", err)
	}
}

func TestSessionsListsEachOnceUntilItEnds(t *testing.T) {
	loop, ctx, _ := running(t, &ledger{})
	for n := byte(1); n <= 3; n++ { // two admitted, one held
		ask(t, ctx, loop, n, 0)
	}
	known, err := loop.Sessions(ctx)
	if err != nil || len(known) != 3 {
		t.Fatalf("known sessions %v, %v", known, err)
	}
	view, err := loop.View(ctx)
	if err != nil || view.HeldTotal != 1 || view.Held[0].Session != session(3) || view.Held[0].Reason != router.AtCap ||
		view.Report.Instances[0].Protected != 2 || view.Recent[0].Session != session(3) {
		t.Fatalf("view of two admitted and one held: %+v, %v", view, err)
	}
	for n := byte(1); n <= 3; n++ {
		if err := loop.Tell(ctx, &router.SessionEnded{Session: session(n), Status: router.Failed}); err != nil {
			t.Fatal(err)
		}
	}
	if known, err = loop.Sessions(ctx); err != nil || len(known) != 0 {
		t.Fatalf("after all ended: %v, %v", known, err)
	}
}

func TestRestoredSessionsKeepTheirPlaces(t *testing.T) {
	journal := &ledger{}
	loop, ctx, _ := running(t, journal,
		&router.SessionRestored{Session: session(1), Class: "agent", Turn: 3, PromptTokens: 1_600, Instance: "e1", AdmittedAt: 1},
		&router.SessionRestored{Session: session(2), Class: "agent", Turn: 1, PromptTokens: 1_600, Instance: "e1", AdmittedAt: 1},
		&router.SessionRestored{Session: session(3), Class: "agent", PromptTokens: 1_600, HeldSince: 1},
	)
	if p := ask(t, ctx, loop, 1, 3); !p.Admitted || p.Reason != router.Continuation {
		t.Fatalf("an admitted session got %+v after the restart", p)
	}
	if p := ask(t, ctx, loop, 3, 0); p.Admitted {
		t.Fatalf("a held session was admitted beyond the cap: %+v", p)
	}
	if err := loop.Tell(ctx, &router.SessionEnded{Session: session(2), Status: router.Completed}); err != nil {
		t.Fatal(err)
	}
	view, err := loop.View(ctx)
	if err != nil || !strings.Contains(view.Text, "e1") || len(view.Report.Instances) != 1 || len(view.Recent) == 0 {
		t.Fatalf("view %+v, %v", view, err)
	}
	// An answer comes after the records of its round, so those of the ending too.
	ask(t, ctx, loop, 1, 3)
	records := journal.of(session(3))
	if len(records) == 0 || records[len(records)-1].Kind != router.Admit || !records[len(records)-1].Signal {
		t.Fatalf("the held session's records after a place became free: %+v", records)
	}
}
