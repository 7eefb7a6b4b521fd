package store_test

import (
	"math"
	"sync"
	"testing"

	"holdfast/router"
	"holdfast/store"
	"holdfast/workflows/task"
)

func TestDispatchKeepsToConcurrencyAndMixture(t *testing.T) {
	f := newFixture(t, 50)
	ctx := t.Context()
	// The classes come one after the other; dispatch mixes them all the same.
	tasks := append(append(repeat("rlhf", 22), repeat("rlvr", 40)...), repeat("agent", 60)...)
	f.submit("one", tasks...)
	f.submit("two", repeat("agent", 5)...)
	ended := 0
	for ended < 122 {
		n, err := f.DispatchQueued(ctx, f.run.ID, 20)
		must(t, err)
		if n > 20 {
			t.Fatalf("dispatched %d of at most 20", n)
		}
		live := f.dispatchedByState(store.SessionDispatched)
		if len(live) > 50 {
			t.Fatalf("%d sessions are live of at most 50", len(live))
		}
		backlog, err := f.Backlog(ctx, f.run.ID)
		must(t, err)
		dispatched, total := map[string]float64{}, 0.0
		for _, class := range backlog {
			left := class.Released - class.Queued
			dispatched[class.Class] = float64(left)
			total += float64(left)
		}
		if total <= 122 {
			for class, share := range map[string]float64{"agent": 60. / 122, "rlvr": 40. / 122, "rlhf": 22. / 122} {
				if math.Abs(dispatched[class]-share*total) > 2 {
					t.Errorf("of %v dispatched %v are %s, share %.3f", total, dispatched[class], class, share)
				}
			}
		}
		if n == 0 {
			for _, id := range live[:min(30, len(live))] {
				f.end(id, router.Completed)
				ended++
			}
		}
	}
	f.verify()
}

func repeat(class string, n int) []*task.Spec {
	tasks := make([]*task.Spec, n)
	for i := range tasks {
		tasks[i] = prompted(class, 1)
	}
	return tasks
}

func TestConcurrentDispatchersShareTheRoom(t *testing.T) {
	f := newFixture(t, 30)
	f.submit("one", repeat("agent", 100)...)
	var wait sync.WaitGroup
	counts := make([]int, 6)
	for i := range counts {
		wait.Go(func() {
			n, err := f.DispatchQueued(t.Context(), f.run.ID, 20)
			if err != nil {
				t.Error(err)
			}
			counts[i] = n
		})
	}
	wait.Wait()
	total := 0
	for _, n := range counts {
		total += n
	}
	if total != 30 {
		t.Errorf("%v were dispatched, want 30 together", counts)
	}
	messages, err := f.ClaimOutbox(t.Context(), 1_000, 60)
	must(t, err)
	seen := map[string]bool{}
	for _, message := range messages {
		if message.Kind != store.OutboxStart || message.Pool != pool || message.RunID != f.run.ID || seen[message.SessionID.String()] {
			t.Errorf("message %+v", message)
		}
		seen[message.SessionID.String()] = true
	}
	if len(messages) != 30 {
		t.Errorf("%d starts in the outbox, want 30", len(messages))
	}
	f.verify()
}

func TestRaisingConcurrencyLetsMoreIn(t *testing.T) {
	f := newFixture(t, 2)
	ctx := t.Context()
	f.submit("one", repeat("agent", 10)...)
	f.dispatch()
	larger := contract(5)
	_, err := f.PutContract(ctx, f.run.ID, larger)
	must(t, err)
	if n, err := f.DispatchQueued(ctx, f.run.ID, 100); err != nil || n != 3 {
		t.Errorf("dispatched %d more, %v, want 3", n, err)
	}
	_, err = f.PutContract(ctx, f.run.ID, contract(1))
	must(t, err)
	if n, err := f.DispatchQueued(ctx, f.run.ID, 100); err != nil || n != 0 {
		t.Errorf("dispatched %d above the new limit, %v", n, err)
	}
}
