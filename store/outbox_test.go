package store_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"holdfast/store"
	"holdfast/store/storetest"
)

func TestOutboxDeliversAtLeastOnce(t *testing.T) {
	f := newFixture(t, 100)
	ctx := t.Context()
	f.submit("one", repeat("agent", 6)...)
	f.dispatch()
	first, err := f.ClaimOutbox(ctx, 4, 3_600)
	must(t, err)
	rest, err := f.ClaimOutbox(ctx, 4, 3_600)
	must(t, err)
	if len(first) != 4 || len(rest) != 2 || first[0].ID > first[1].ID || rest[0].Attempts != 1 {
		t.Fatalf("claimed %d and %d", len(first), len(rest))
	}
	if none, err := f.ClaimOutbox(ctx, 4, 3_600); err != nil || len(none) != 0 {
		t.Fatalf("claimed messages were claimed again: %v, %v", none, err)
	}
	must(t, f.FinishOutbox(ctx, []int64{first[0].ID, first[1].ID, 1 << 40}))
	must(t, f.RetryOutbox(ctx, first[2].ID, 0, "the server said \x00"))
	again, err := f.ClaimOutbox(ctx, 4, 0)
	must(t, err)
	if len(again) != 1 || again[0].ID != first[2].ID || again[0].Attempts != 2 {
		t.Errorf("after a retry came %+v", again)
	}
	// Its lease of zero seconds is over, as that of a claimant that died would be.
	again, err = f.ClaimOutbox(ctx, 4, 3_600)
	must(t, err)
	if len(again) != 1 || again[0].Attempts != 3 {
		t.Errorf("after the lease ran out came %+v", again)
	}
	due, ok, err := f.NextOutboxDue(ctx)
	must(t, err)
	if in := time.Until(due); !ok || in < 30*time.Minute || in > time.Hour {
		t.Errorf("the next message is due in %v, %v", in, ok)
	}
}

func TestClaimDoesNotWaitForAnotherClaimant(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	f.submit("one", repeat("agent", 3)...)
	f.dispatch()
	other := f.conn()
	_, err := other.Exec(ctx, `begin`)
	must(t, err)
	_, err = other.Exec(ctx, `select from outbox order by id limit 1 for update`)
	must(t, err)
	ctx, cancel := context.WithTimeout(ctx, storetest.Patience)
	defer cancel()
	rows, err := f.ClaimOutbox(ctx, 10, 60)
	if err != nil || len(rows) != 2 {
		t.Errorf("claimed %d messages, %v, want the 2 that are free", len(rows), err)
	}
}

func TestConcurrentClaimantsShareNothing(t *testing.T) {
	f := newFixture(t, 300)
	f.submit("one", repeat("agent", 200)...)
	f.dispatch()
	var mu sync.Mutex
	claims := map[int64]int{}
	var wait sync.WaitGroup
	for range 6 {
		wait.Go(func() {
			for {
				rows, err := f.ClaimOutbox(t.Context(), 7, 60)
				if err != nil {
					t.Error(err)
				}
				if len(rows) == 0 {
					return
				}
				mu.Lock()
				for _, row := range rows {
					claims[row.ID]++
				}
				mu.Unlock()
			}
		})
	}
	wait.Wait()
	for id, n := range claims {
		if n != 1 {
			t.Errorf("message %d was claimed %d times", id, n)
		}
	}
	// A claimant that found the rest locked by others may leave before the end, but
	// all rows go to someone.
	if len(claims) != 200 {
		t.Errorf("%d messages were claimed, want 200", len(claims))
	}
	if _, ok, err := f.NextOutboxDue(t.Context()); err != nil || !ok {
		t.Errorf("claimed messages are gone: %v, %v", ok, err)
	}
}

func TestGrantsAndCancelsGoToTheOutbox(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	f.submit("one", repeat("agent", 2)...)
	ids := f.dispatch()
	starts, err := f.ClaimOutbox(ctx, 10, 60)
	must(t, err)
	must(t, f.FinishOutbox(ctx, []int64{starts[0].ID, starts[1].ID}))
	signalled, silent := f.admit(ids[0], 0, "w1"), f.admit(ids[1], 0, "w1")
	signalled.Signal = true
	f.decide(signalled, silent)
	_, err = f.CancelSession(ctx, ids[1], "no longer needed")
	must(t, err)
	_, err = f.CancelSession(ctx, ids[1], "again")
	must(t, err)
	messages, err := f.ClaimOutbox(ctx, 10, 60)
	must(t, err)
	if len(messages) != 2 {
		t.Fatalf("messages %+v", messages)
	}
	if m := messages[0]; m.Kind != store.OutboxGrant || m.SessionID != ids[0] || m.Turn != 0 {
		t.Errorf("first message %+v", m)
	}
	if m := messages[1]; m.Kind != store.OutboxCancel || m.SessionID != ids[1] || m.Reason != "no longer needed" {
		t.Errorf("second message %+v", m)
	}
}
