package store_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
)

func update(version int64) store.NewWeightUpdate {
	return store.NewWeightUpdate{Pool: pool, PolicyVersion: version, Mode: "abort", Cache: store.CacheReset, Control: store.ControlManage, PauseTimeoutSeconds: 30}
}

func (f *fixture) begin(version int64) store.WeightUpdate {
	f.t.Helper()
	u, err := f.BeginWeightUpdate(f.t.Context(), update(version))
	must(f.t, err)
	return u
}

func (f *fixture) mark(u store.WeightUpdate, instance string, state, reached store.WeightPlace) {
	f.t.Helper()
	must(f.t, f.MarkWeightInstance(f.t.Context(), f.epoch, store.WeightMark{Pool: pool, PolicyVersion: u.PolicyVersion, Instance: instance, Attempt: u.Attempt, State: state, Reached: reached}))
}

func (f *fixture) settle(u store.WeightUpdate, to store.WeightState, failed store.WeightStep) bool {
	f.t.Helper()
	settled, err := f.SettleWeightUpdate(f.t.Context(), f.epoch, &u, to, failed, "")
	must(f.t, err)
	return settled
}

// force brings a version into force by an update from begin to commit.
func (f *fixture) force(version int64, cache store.WeightCache) store.WeightUpdate {
	f.t.Helper()
	u := f.begin(version)
	if !f.settle(u, store.WeightPaused, "") {
		f.t.Fatal("a pausing update was not settled")
	}
	u, err := f.CommitWeightUpdate(f.t.Context(), pool, version, cache)
	must(f.t, err)
	f.mark(u, "w1", store.PlacePrepared, store.PlacePrepared)
	f.mark(u, "w2", store.PlacePrepared, store.PlacePrepared)
	advanced, err := f.AdvanceWeights(f.t.Context(), f.epoch, &u)
	must(f.t, err)
	if !advanced || !f.settle(u, store.WeightCommitted, "") {
		f.t.Fatalf("advanced %v", advanced)
	}
	u, err = f.WeightUpdate(f.t.Context(), pool, version)
	must(f.t, err)
	return u
}

func wantConflict(t *testing.T, err error, existing, says string) {
	t.Helper()
	var conflict *store.ConflictError
	if !errors.As(err, &conflict) || conflict.Existing != existing || !strings.Contains(conflict.Error(), says) {
		t.Fatalf("got %v, want a conflict with %s that says %q", err, existing, says)
	}
}

func TestWeightUpdateGoesThroughItsStates(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	u := f.begin(3)
	if u.State != store.WeightPausing || u.Attempt != 1 || u.FromVersion != 0 || u.Source != store.WeightRequested {
		t.Fatalf("begun as %+v", u)
	}
	if again := f.begin(3); again.Attempt != 1 || again.State != store.WeightPausing {
		t.Fatalf("begun twice: %+v", again)
	}
	other := update(3)
	other.Mode = "keep"
	_, err := f.BeginWeightUpdate(ctx, other)
	wantConflict(t, err, "3", "other terms")
	_, err = f.BeginWeightUpdate(ctx, update(4))
	wantConflict(t, err, "3", "version 3 is pausing")
	wantConflict(t, f.AdvancePolicyVersion(ctx, pool, 9), "3", "passed over")
	_, err = f.CommitWeightUpdate(ctx, pool, 3, "")
	wantConflict(t, err, "3", "before its engines are paused")

	f.mark(u, "w1", store.PlacePaused, store.PlacePaused)
	f.mark(u, "w2", store.PlaceRefused, store.PlacePending)
	if !f.settle(u, store.WeightFailed, store.StepPause) {
		t.Fatal("the failure was not settled")
	}
	u = f.begin(3) // what failed to pause is tried again by asking again
	if u.State != store.WeightPausing || u.Attempt != 2 || u.FailedStep != "" || u.Instance("w1").Reached != store.PlacePaused {
		t.Fatalf("tried again: %+v", u)
	}
	late := u
	late.Attempt = 1
	f.mark(late, "w1", store.PlaceRefused, store.PlacePending)
	if f.settle(late, store.WeightFailed, store.StepPause) {
		t.Fatal("a late answer to the first attempt settled the second")
	}
	f.mark(u, "w2", store.PlacePaused, store.PlacePaused)
	f.settle(u, store.WeightPaused, "")
	u, err = f.CommitWeightUpdate(ctx, pool, 3, store.CacheSalt)
	must(t, err)
	if u.State != store.WeightCommitting || u.Attempt != 3 || u.Instance("w1").State != store.PlacePaused || u.Cache != store.CacheSalt {
		t.Fatalf("committing: %+v", u)
	}
	_, err = f.CancelWeightUpdate(ctx, pool, 3)
	wantConflict(t, err, "3", "is being committed")
	f.mark(u, "w1", store.PlacePrepared, store.PlacePrepared)
	f.mark(u, "w2", store.PlaceGone, store.PlacePaused)
	advanced, err := f.AdvanceWeights(ctx, f.epoch, &u)
	must(t, err)
	again, err := f.AdvanceWeights(ctx, f.epoch, &u)
	must(t, err)
	if !advanced || again {
		t.Fatalf("advanced %v, then %v", advanced, again)
	}
	version, err := f.PolicyVersion(ctx, pool)
	must(t, err)
	salt, err := f.CacheSalt(ctx, pool)
	must(t, err)
	instances, err := f.Instances(ctx, pool)
	must(t, err)
	if version != 3 || salt != "holdfast-3" || instances[0].PolicyVersion != 3 || instances[1].PolicyVersion != 0 {
		t.Fatalf("in force: version %d, salt %q, instances %+v", version, salt, instances)
	}
	u, err = f.WeightUpdate(ctx, pool, 3)
	must(t, err)
	f.settle(u, store.WeightFailed, store.StepResume)
	_, err = f.CancelWeightUpdate(ctx, pool, 3)
	wantConflict(t, err, "3", "in force")
	u, err = f.CommitWeightUpdate(ctx, pool, 3, "")
	must(t, err)
	f.settle(u, store.WeightCommitted, "")
	if u, err = f.CommitWeightUpdate(ctx, pool, 3, ""); err != nil || u.State != store.WeightCommitted {
		t.Fatalf("committed twice: %+v, %v", u, err)
	}
	if _, open, err := f.OpenWeightUpdate(ctx, pool); err != nil || open {
		t.Fatalf("still open: %v, %v", open, err)
	}
	var field *store.FieldError
	if _, err := f.BeginWeightUpdate(ctx, update(2)); !errors.As(err, &field) || field.Path != "policy_version" {
		t.Fatalf("an earlier version: %v", err)
	}
}

func TestCancelledVersionMayBeBegunAnew(t *testing.T) {
	f := newFixture(t, 10)
	u := f.begin(1)
	f.mark(u, "w1", store.PlacePaused, store.PlacePaused)
	u, err := f.CancelWeightUpdate(t.Context(), pool, 1)
	must(t, err)
	if u.State != store.WeightCancelling || u.Attempt != 2 {
		t.Fatalf("cancelling: %+v", u)
	}
	_, err = f.CommitWeightUpdate(t.Context(), pool, 1, "")
	wantConflict(t, err, "1", "was cancelled")
	f.settle(u, store.WeightCancelled, "")
	if u, err = f.CancelWeightUpdate(t.Context(), pool, 1); err != nil || u.State != store.WeightCancelled {
		t.Fatalf("cancelled twice: %+v, %v", u, err)
	}
	if u = f.begin(1); u.State != store.WeightPausing || u.Attempt != 3 || len(u.Instances) != 0 {
		t.Fatalf("begun anew: %+v", u)
	}
}

func TestOneOfManyBeginningsWins(t *testing.T) {
	f := newFixture(t, 10)
	const n = 8
	results := make([]error, n)
	var wait sync.WaitGroup
	for i := range n {
		wait.Go(func() { _, results[i] = f.BeginWeightUpdate(t.Context(), update(int64(i+1))) })
	}
	wait.Wait()
	open, ok, err := f.OpenWeightUpdate(t.Context(), pool)
	must(t, err)
	if !ok {
		t.Fatal("no update is open")
	}
	for i, err := range results {
		var conflict *store.ConflictError
		if won := int64(i+1) == open.PolicyVersion; won != (err == nil) || !won && !errors.As(err, &conflict) {
			t.Errorf("version %d, open is %d: %v", i+1, open.PolicyVersion, err)
		}
	}
}

func TestOwnerOfAnotherEpochChangesNoUpdate(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	u := f.begin(1)
	old := f.epoch
	must(t, f.ReleasePool(ctx, pool, old))
	if _, ok, err := f.AcquirePool(ctx, pool, "successor", 60); err != nil || !ok {
		t.Fatal(ok, err)
	}
	mark := store.WeightMark{Pool: pool, PolicyVersion: 1, Instance: "w1", Attempt: 1, State: store.PlacePaused, Reached: store.PlacePaused}
	_, settled := f.SettleWeightUpdate(ctx, old, &u, store.WeightPaused, "", "")
	_, advanced := f.AdvanceWeights(ctx, old, &u)
	_, observed := f.ObserveWeightVersion(ctx, pool, old, "w1", 7)
	for what, err := range map[string]error{"mark": f.MarkWeightInstance(ctx, old, mark), "settle": settled, "advance": advanced, "observe": observed} {
		if !errors.Is(err, store.ErrFenced) {
			t.Errorf("%s under an epoch that is over: %v", what, err)
		}
	}
}

func TestBadUpdatesAreNamed(t *testing.T) {
	f := newFixture(t, 10)
	for path, change := range map[string]func(*store.NewWeightUpdate){
		"policy_version":        func(u *store.NewWeightUpdate) { u.PolicyVersion = 0 },
		"mode":                  func(u *store.NewWeightUpdate) { u.Mode = "halt" },
		"control":               func(u *store.NewWeightUpdate) { u.Control = "" },
		"pause_timeout_seconds": func(u *store.NewWeightUpdate) { u.PauseTimeoutSeconds = 0 },
		"cache":                 func(u *store.NewWeightUpdate) { u.Mode = "in_place" },
	} {
		bad := update(1)
		change(&bad)
		var field *store.FieldError
		if _, err := f.BeginWeightUpdate(t.Context(), bad); !errors.As(err, &field) || field.Path != path {
			t.Errorf("%s: %v", path, err)
		}
	}
	for what, do := range map[string]func() error{
		"begin": func() error {
			u := update(1)
			u.Pool = "nowhere"
			_, err := f.BeginWeightUpdate(t.Context(), u)
			return err
		},
		"commit": func() error { _, err := f.CommitWeightUpdate(t.Context(), pool, 1, ""); return err },
		"cancel": func() error { _, err := f.CancelWeightUpdate(t.Context(), pool, 1); return err },
		"read":   func() error { _, err := f.WeightUpdate(t.Context(), pool, 1); return err },
		"list":   func() error { _, err := f.WeightUpdates(t.Context(), "nowhere", nil, 0); return err },
	} {
		if err := do(); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("%s of what is not there: %v", what, err)
		}
	}
}

func TestObservedAndAnnouncedVersionsAreHistory(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	must(t, f.AdvancePolicyVersion(ctx, pool, 2))
	for _, observed := range []struct {
		version int64
		changed bool
	}{{2, false}, {5, true}, {5, false}, {1, true}} {
		changed, err := f.ObserveWeightVersion(ctx, pool, f.epoch, "w1", observed.version)
		must(t, err)
		if changed != observed.changed {
			t.Fatalf("observed %d: changed %v", observed.version, changed)
		}
	}
	f.begin(6)
	if changed, err := f.ObserveWeightVersion(ctx, pool, f.epoch, "w2", 6); err != nil || changed {
		t.Fatalf("observed during an update: %v, %v", changed, err)
	}
	history, err := f.WeightUpdates(ctx, pool, nil, 0)
	must(t, err)
	want := []struct {
		version, from int64
		source        store.WeightSource
	}{{6, 5, store.WeightRequested}, {5, 2, store.WeightObserved}, {2, 0, store.WeightAnnounced}, {1, 5, store.WeightObserved}}
	if len(history) != len(want) {
		t.Fatalf("history %+v", history)
	}
	for i, w := range want {
		if h := history[i]; h.PolicyVersion != w.version || h.FromVersion != w.from || h.Source != w.source {
			t.Errorf("entry %d is %+v, want %+v", i, h, w)
		}
	}
	if in := history[1].Instances; len(in) != 1 || in[0].Instance != "w1" || in[0].State != store.PlaceObserved {
		t.Errorf("observed at %+v", in)
	}
	instances, err := f.Instances(ctx, pool)
	must(t, err)
	version, err := f.PolicyVersion(ctx, pool)
	must(t, err)
	if version != 5 || instances[0].PolicyVersion != 1 || instances[1].PolicyVersion != 2 {
		t.Fatalf("pool %d, instances %+v", version, instances)
	}
	before := int64(5)
	if page, err := f.WeightUpdates(ctx, pool, &before, 1); err != nil || len(page) != 1 || page[0].PolicyVersion != 2 {
		t.Fatalf("page below 5: %+v, %v", page, err)
	}
}

// TestStaleSessions: three updates pass over a session that has generated at
// version 0, one that was admitted at version 2, one that was never admitted, and
// one that waits in the queue.
func TestStaleSessions(t *testing.T) {
	for _, test := range []struct {
		policy store.StalePolicy
		ended  int
		status router.EndStatus
	}{{store.StaleFinish, 0, router.Completed}, {store.StaleEnd, 1, router.Stale}} {
		t.Run(string(test.policy), func(t *testing.T) {
			f := newFixture(t, 4)
			ctx := t.Context()
			bound := 1
			terms := contract(3)
			terms.StalenessBound, terms.StalePolicy = &bound, test.policy
			_, err := f.PutContract(ctx, f.run.ID, terms)
			must(t, err)
			f.submit("one", repeat("agent", 4)...)
			ids := f.dispatch()
			if len(ids) != 3 {
				t.Fatalf("dispatched %d", len(ids))
			}
			old, young, never := ids[0], ids[1], ids[2]
			f.decide(f.admit(old, 0, "w1"))
			f.commit(old, 0) // under version 0
			if u := f.force(1, ""); u.SessionsOverBound != 0 {
				t.Fatalf("at version 1: %+v", u)
			}
			// The router's clock is the database's here: an admission after version 2 is in force.
			u := f.force(2, "")
			if u.SessionsOverBound != 1 || u.SessionsEnded != test.ended {
				t.Fatalf("at version 2 %d sessions are over the bound and %d end, want 1 and %d", u.SessionsOverBound, u.SessionsEnded, test.ended)
			}
			f.clock = f.now()
			f.decide(f.admit(young, 0, "w1"), f.hold(never, 0, router.AtCap))
			if u = f.force(3, ""); u.SessionsOverBound != 1-test.ended {
				t.Fatalf("at version 3: %+v", u)
			}
			f.expectAsked(ctx, old, test.ended == 1)
			f.expectAsked(ctx, young, false)
			f.expectAsked(ctx, never, false)

			ending := router.Completed
			if test.ended == 1 {
				ending = router.Cancelled // what the workflow makes of the request
			}
			sample := f.end(old, ending)
			if sample.Status != test.status || sample.Staleness != 3 || (sample.Problem != "") != (test.ended == 1) {
				t.Fatalf("the old session's sample: %+v", sample)
			}
			if sample := f.end(young, router.Cancelled); sample.Status != router.Cancelled || sample.Staleness != 0 {
				t.Fatalf("a session cancelled for another reason: %+v", sample)
			}
			f.verify()
		})
	}
}

func (f *fixture) expectAsked(ctx context.Context, id uuid.UUID, asked bool) {
	f.t.Helper()
	session, err := f.Session(ctx, id)
	must(f.t, err)
	if session.CancelRequested != asked || asked && !strings.HasPrefix(session.CancelReason, "stale: 2 behind") {
		f.t.Fatalf("session %+v, want asked to end: %v", session, asked)
	}
}

func TestAnnouncedInstanceHasTheWeightsInForce(t *testing.T) {
	f := newFixture(t, 10)
	f.force(4, "")
	for _, test := range []struct{ given, want int64 }{{0, 4}, {3, 3}, {0, 4}} {
		in := instance("w9")
		in.PolicyVersion = test.given
		registered, err := f.RegisterInstance(t.Context(), in)
		must(t, err)
		if registered.PolicyVersion != test.want {
			t.Fatalf("registered with %d it has %d, want %d", test.given, registered.PolicyVersion, test.want)
		}
	}
}
