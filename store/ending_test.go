package store_test

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
)

func TestEndSessionOnce(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	f.submit("one", prompted("agent", 2))
	ids := f.dispatch()
	f.decide(f.hold(ids[0], 0, router.AtCap))
	reward := 1.5
	_, first, err := f.EndSession(ctx, store.Ending{SessionID: ids[0], Status: router.Completed, Reward: &reward, FinishReason: "stop"})
	must(t, err)
	already, again, err := f.EndSession(ctx, store.Ending{SessionID: ids[0], Status: router.Failed, Problem: "late"})
	must(t, err)
	if !already || again.Status != router.Completed || again.Seq != first.Seq || *again.Reward != 1.5 || again.Problem != "" {
		t.Errorf("ended again as %+v, already %v", again, already)
	}
	_, failed, err := f.EndSession(ctx, store.Ending{SessionID: ids[1], Status: router.Failed, Problem: "engine said \x00 " + strings.Repeat("x", 10_000)})
	must(t, err)
	if failed.Seq != 2 || failed.Reward != nil || len(failed.Problem) > 5_000 {
		t.Errorf("failed as %+v", failed)
	}
	if _, _, err := f.EndSession(ctx, store.Ending{SessionID: uuid.New(), Status: router.Failed}); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("an unknown session: %v", err)
	}
	f.verify()
}

func TestEndSessionRefusals(t *testing.T) {
	f := newFixture(t, 10)
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	one, nan, inf := 1.0, math.NaN(), math.Inf(-1)
	for _, test := range []struct {
		path   string
		ending store.Ending
	}{
		{"status", store.Ending{}},
		{"status", store.Ending{Status: 99}},
		{"reward", store.Ending{Status: router.Completed, Reward: &nan}},
		{"reward", store.Ending{Status: router.Completed, Reward: &inf}},
		{"reward", store.Ending{Status: router.Failed, Reward: &one}},
		{"reward", store.Ending{Status: router.Stale, Reward: &one}},
		{"score_detail", store.Ending{Status: router.Completed, ScoreDetail: json.RawMessage(`{"a":`)}},
		{"score_detail", store.Ending{Status: router.Completed, ScoreDetail: json.RawMessage("\"\xff\"")}},
		{"score_detail", store.Ending{Status: router.Completed, ScoreDetail: json.RawMessage(`"` + strings.Repeat("x", 70_000) + `"`)}},
		{"score_seconds", store.Ending{Status: router.Completed, ScoreSeconds: -1}},
	} {
		test.ending.SessionID = id
		_, _, err := f.EndSession(t.Context(), test.ending)
		var field *store.FieldError
		if !errors.As(err, &field) || field.Path != test.path {
			t.Errorf("%+v: %v, want a refusal of %s", test.ending, err, test.path)
		}
	}
	f.verify()
}

func TestCancelSession(t *testing.T) {
	f := newFixture(t, 1)
	ctx := t.Context()
	f.submit("one", repeat("agent", 3)...)
	live := f.dispatch()[0]
	queued := f.dispatchedByState(store.SessionQueued)
	session, err := f.CancelSession(ctx, queued[0], "why not \x00")
	must(t, err)
	if session.State != store.SessionEnded || session.Status != router.Cancelled || session.SampleSeq != 1 {
		t.Errorf("a queued session is %+v", session)
	}
	session, err = f.CancelSession(ctx, live, "enough")
	must(t, err)
	if session.State != store.SessionDispatched || !session.CancelRequested || session.CancelReason != "enough" {
		t.Errorf("a live session is %+v", session)
	}
	work, err := f.SessionForWork(ctx, live)
	must(t, err)
	if !work.CancelRequested {
		t.Error("the worker is not told of the cancellation")
	}
	f.end(live, router.Completed) // it finished before it heard of the cancellation
	session, err = f.CancelSession(ctx, live, "too late")
	must(t, err)
	if session.Status != router.Completed || session.CancelReason != "enough" {
		t.Errorf("an ended session is %+v", session)
	}
	if _, err := f.CancelSession(ctx, uuid.New(), ""); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("an unknown session: %v", err)
	}
	// The place of the cancelled session in the queue is skipped.
	if ids := f.dispatch(); len(ids) != 1 || ids[0] != queued[1] {
		t.Errorf("dispatched %v, want %v", ids, queued[1])
	}
	f.verify()
}

// TestConcurrentEndingsKeepOrder: many sessions end at a time, each twice, while
// a reader follows; it sees every sample once, in order, without gaps, and
// A = N + Q at every look.
func TestConcurrentEndingsKeepOrder(t *testing.T) {
	f := newFixture(t, 200)
	ctx := t.Context()
	f.submit("one", append(repeat("agent", 60), repeat("rlvr", 60)...)...)
	ids := f.dispatch()
	work := make(chan uuid.UUID, 2*len(ids))
	for _, id := range append(ids, ids...) {
		work <- id
	}
	close(work)
	statuses := []router.EndStatus{router.Completed, router.Truncated, router.Stale, router.Failed, router.Cancelled}
	var wait sync.WaitGroup
	for worker := range 6 {
		wait.Go(func() {
			for id := range work {
				if _, _, err := f.EndSession(ctx, store.Ending{SessionID: id, Status: statuses[worker%len(statuses)]}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	seen := map[uuid.UUID]bool{}
	var cursor store.Cursor
	for last := int64(0); last < int64(len(ids)) && !t.Failed(); {
		page, err := f.Samples(ctx, store.SampleQuery{RunID: f.run.ID, After: cursor, Limit: 7})
		must(t, err)
		for _, sample := range page.Samples {
			if sample.Seq != last+1 || seen[sample.SessionID] {
				t.Fatalf("after sample %d came %d, session %s", last, sample.Seq, sample.SessionID)
			}
			last, seen[sample.SessionID] = sample.Seq, true
		}
		cursor = page.Next
		backlog, err := f.Backlog(ctx, f.run.ID)
		must(t, err)
		for _, c := range backlog {
			if c.Released != c.Ended+c.Backlog || c.Backlog != c.Queued+c.Pending+c.Held+c.Active || c.Ended != c.Completed+c.Truncated+c.Stale+c.Failed+c.Cancelled {
				t.Fatalf("counters disagree: %+v", c)
			}
		}
	}
	wait.Wait()
	f.verify()
}
