package weights

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"holdfast/orchestrator/engine"
	"holdfast/router"
	"holdfast/store"
)

func TestEachModeFromBeginToCommit(t *testing.T) {
	for _, test := range []struct {
		mode  string
		cache store.WeightCache
		calls []string
		salt  string
	}{
		{"abort", store.CacheReset, []string{"pause abort", "reset", "name 4", "resume"}, ""},
		{"wait", store.CacheReset, []string{"pause wait", "reset", "name 4", "resume"}, ""},
		{"keep", store.CacheSalt, []string{"pause keep", "name 4", "resume"}, "holdfast-4"},
		{"in_place", store.CacheSalt, []string{"pause in_place", "name 4", "resume"}, "holdfast-4"},
	} {
		t.Run(test.mode, func(t *testing.T) {
			w := newWorld(t, 2)
			before := <-w.enter("e1")
			before.Leave()
			w.begin(4, test.mode, func(u *store.NewWeightUpdate) { u.Cache = test.cache })
			w.await(4, store.WeightPaused)
			if w.observed("e1") != router.Degraded || w.observed("e2") != router.Degraded || len(w.resets("e1")) != 0 {
				t.Errorf("while paused the router was told %v", w.told)
			}
			held := w.enter("e2")
			w.commit(4, "")
			u := w.await(4, store.WeightCommitted)
			pass := <-held
			defer pass.Leave()
			if before.PolicyVersion != 0 || pass.PolicyVersion != 4 || pass.CacheSalt != test.salt {
				t.Errorf("requests passed before with %+v and after with %+v", before, pass)
			}
			for _, id := range []router.InstanceID{"e1", "e2"} {
				w.wantCalls(id, test.calls...)
				if !slices.Equal(w.resets(id), []int64{4}) || w.cleared[id] != 1 || u.Instance(string(id)).State != store.PlaceResumed {
					t.Errorf("%s: resets %v, cleared %d times, row %+v", id, w.resets(id), w.cleared[id], u.Instance(string(id)))
				}
			}
			if v := w.versions(); v["pool"] != 4 || v["e1"] != 4 || v["e2"] != 4 {
				t.Errorf("versions %v", v)
			}
		})
	}
}

func TestQueueAfterAPauseIsNotTakenForOverload(t *testing.T) {
	w := newWorld(t, 1)
	w.begin(1, "abort", nil)
	w.await(1, store.WeightPaused)
	// What the fleet sees meanwhile does not open the caps.
	for _, state := range []router.Observability{router.Blind, router.Fresh} {
		if err := w.c.Tell(w.ctx, &router.ObservabilityChanged{Instance: "e1", State: state}); err != nil {
			t.Fatal(err)
		}
		if want := max(state, router.Degraded); w.observed("e1") != want {
			t.Fatalf("seen as %s while paused, the router was told %s", state, w.observed("e1"))
		}
	}
	w.commit(1, "")
	w.await(1, store.WeightCommitted)
	(<-w.enter("e1")).Leave()
	snapshot := func(waiting int) router.Observability {
		if err := w.c.Tell(w.ctx, &router.Snapshot{Instance: "e1", TakenAt: time.Now().UnixNano(), Waiting: waiting}); err != nil {
			t.Fatal(err)
		}
		return w.observed("e1")
	}
	for i, step := range []struct {
		waiting int
		want    router.Observability
	}{{0, router.Degraded}, {9, router.Degraded}, {0, router.Degraded}, {0, router.Fresh}, {9, router.Fresh}} {
		if got := snapshot(step.waiting); got != step.want {
			t.Fatalf("after snapshot %d with %d waiting: %s, want %s", i, step.waiting, got, step.want)
		}
	}
}

func TestWaitModeLetsOurGenerationsFinishFirst(t *testing.T) {
	w := newWorld(t, 1)
	under := <-w.enter("e1")
	w.begin(1, "wait", nil)
	w.eventually("the door to be shut", func() bool { return w.observed("e1") == router.Degraded })
	w.wantCalls("e1")
	under.Leave()
	w.await(1, store.WeightPaused)
	w.wantCalls("e1", "pause wait")
}

func TestHalfTheInstancesRefuseAndAreAskedAgain(t *testing.T) {
	w := newWorld(t, 4)
	for _, id := range []router.InstanceID{"e2", "e4"} {
		w.engines[id].refuses("pause", always(engine.FailTurn, "no such mode"))
	}
	w.begin(1, "abort", nil)
	u := w.await(1, store.WeightFailed)
	if u.FailedStep != store.StepPause || !strings.Contains(u.Problem, "2 of 4 instances refused to pause: e2, e4") || !strings.Contains(u.Instance("e4").Problem, "no such mode") {
		t.Fatalf("failed as %+v", u)
	}
	if u.Instance("e1").State != store.PlacePaused || u.Instance("e2").State != store.PlaceRefused {
		t.Fatalf("rows %+v", u.Instances)
	}
	// Those that refused go on generating; those that are paused do not.
	(<-w.enter("e2")).Leave()
	held := w.enter("e1")

	w.engines["e2"].refuses("pause", nil)
	w.engines["e4"].refuses("pause", nil)
	w.begin(1, "abort", nil)
	w.await(1, store.WeightPaused)
	w.engines["e3"].refuses("name", always(engine.FailTurn, "no word for it")) // which stops nothing
	w.commit(1, "")
	u = w.await(1, store.WeightCommitted)
	(<-held).Leave()
	w.wantCalls("e1", "pause abort", "reset", "name 1", "resume")
	w.wantCalls("e2", "pause abort", "pause abort", "reset", "name 1", "resume")
	if u.Attempt != 3 || !strings.Contains(u.Instance("e3").Problem, "no word for it") {
		t.Fatalf("committed as %+v", u)
	}
}

func TestRefusedResetIsTriedAgainThenFailsAndCanBeSaltedInstead(t *testing.T) {
	w := newWorld(t, 2)
	w.begin(1, "abort", nil)
	w.await(1, store.WeightPaused)
	// e1 gives in at the third try, e2 never.
	var tries atomic.Int64
	w.engines["e1"].refuses("reset", func(context.Context) error {
		if tries.Add(1) < 3 {
			return &engine.Error{Class: engine.RetryHere, StatusCode: 400, Message: "requests are pending"}
		}
		return nil
	})
	w.engines["e2"].refuses("reset", always(engine.RetryHere, "requests are pending"))
	_ = w.stop()
	w.limits.CommitTimeout = 3 * time.Second // long enough for e1 on a slow disk, too
	w.own()
	w.commit(1, "")
	u := w.await(1, store.WeightFailed)
	if u.FailedStep != store.StepCommit || !strings.Contains(u.Instance("e2").Problem, "not within 3s: resetting the prefix cache: engine: status 400: requests are pending") {
		t.Fatalf("failed as %+v", u)
	}
	if u.Instance("e1").State != store.PlacePrepared || w.versions()["pool"] != 0 || len(w.resets("e1")) != 0 {
		t.Fatalf("before the version is in force: %+v, versions %v", u.Instance("e1"), w.versions())
	}
	w.wantCalls("e1", "pause abort", "reset", "pause abort", "reset", "pause abort", "reset", "name 1")
	w.commit(1, store.CacheSalt)
	w.await(1, store.WeightCommitted)
	if pass := <-w.enter("e2"); pass.CacheSalt != "holdfast-1" || pass.PolicyVersion != 1 {
		t.Fatalf("passed with %+v", pass)
	}
}

func TestResumeThatFailsIsAskedAgainAfterTheVersionIsInForce(t *testing.T) {
	w := newWorld(t, 2)
	w.begin(1, "abort", nil)
	w.await(1, store.WeightPaused)
	w.engines["e2"].refuses("resume", always(engine.FailTurn, "stuck"))
	w.commit(1, "")
	u := w.await(1, store.WeightFailed)
	if u.FailedStep != store.StepResume || u.AdvancedAt == nil || w.versions()["pool"] != 1 {
		t.Fatalf("failed as %+v", u)
	}
	(<-w.enter("e1")).Leave()
	w.engines["e2"].refuses("resume", nil)
	w.commit(1, "")
	w.await(1, store.WeightCommitted)
	(<-w.enter("e2")).Leave()
}

func TestCancelInTheMiddleOfAPause(t *testing.T) {
	w := newWorld(t, 2)
	called := make(chan struct{}, 1)
	w.engines["e2"].refuses("pause", hang(called))
	w.begin(1, "wait", nil)
	w.awaitSignal("a pause of e2", called)
	w.cancel(1)
	w.await(1, store.WeightCancelled)
	w.wantCalls("e2", "pause wait", "resume")
	if got := w.engines["e1"].calls(); !slices.Contains(got, "resume") {
		t.Errorf("calls of e1: %q, want a resume", got)
	}
	if v := w.versions(); v["pool"] != 0 || v["e1"] != 0 || len(w.resets("e1")) != 0 {
		t.Errorf("a cancelled update left %v", v)
	}
	(<-w.enter("e2")).Leave()
}

func TestCancelAfterAFailedCommitGivesOldNamesBack(t *testing.T) {
	w := newWorld(t, 2)
	if err := w.AdvancePolicyVersion(w.ctx, pool, 5); err != nil {
		t.Fatal(err)
	}
	w.begin(6, "abort", nil)
	w.await(6, store.WeightPaused)
	w.engines["e2"].refuses("reset", always(engine.FailTurn, "cannot"))
	w.commit(6, "")
	w.await(6, store.WeightFailed)
	w.cancel(6)
	w.await(6, store.WeightCancelled)
	w.wantCalls("e1", "pause abort", "reset", "name 6", "reset", "name 5", "resume")
	w.wantCalls("e2", "pause abort", "reset", "resume")
	if w.versions()["pool"] != 5 {
		t.Errorf("versions %v", w.versions())
	}
}

func TestSuccessorGoesOn(t *testing.T) {
	w := newWorld(t, 2)
	called := make(chan struct{}, 1)
	w.engines["e2"].refuses("pause", hang(called))
	w.begin(1, "abort", nil)
	w.awaitSignal("a pause of e2", called)
	w.eventually("e1 to be paused", func() bool {
		u, err := w.WeightUpdate(w.ctx, pool, 1)
		return err == nil && u.Instance("e1").State == store.PlacePaused
	})
	first := w.c
	w.engines["e2"].refuses("pause", nil)
	_ = w.stop()
	w.own()
	w.await(1, store.WeightPaused)
	w.wantCalls("e1", "pause abort") // it is not paused twice
	held := w.enter("e1")
	w.commit(1, "")
	w.await(1, store.WeightCommitted)
	(<-held).Leave()
	if !slices.Equal(w.resets("e1"), []int64{1}) {
		t.Errorf("resets %v", w.resets("e1"))
	}
	// The one before writes nothing any more.
	if err := first.mark(w.ctx, &store.WeightUpdate{PolicyVersion: 1, Attempt: 2}, "e1", store.PlacePaused, store.PlacePaused, ""); !errors.Is(err, store.ErrFenced) {
		t.Errorf("a mark under an epoch that is over: %v", err)
	}
}

func TestCoordinatorEndsWhenThePoolIsLost(t *testing.T) {
	w := newWorld(t, 1)
	if epoch, ok, err := w.AcquirePool(w.ctx, pool, "owner", 60); err != nil || !ok || epoch == w.epoch {
		t.Fatal(epoch, ok, err)
	}
	w.begin(1, "abort", nil)
	ended := make(chan error, 1)
	c := w.c
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	_ = w.stop()
	// Run again under the old epoch: its first write is refused.
	restarted, err := New(Config{Pool: pool, Epoch: w.epoch, Store: w.Store, Router: w.router(), Engines: w, Limits: w.limits, Logger: c.cfg.Logger,
		Changed: c.cfg.Changed})
	if err != nil {
		t.Fatal(err)
	}
	restarted.limitGone()
	go func() { ended <- restarted.Run(ctx) }()
	if err := <-ended; !errors.Is(err, store.ErrFenced) {
		t.Fatalf("ended with %v", err)
	}
}

func (c *Coordinator) isShut(id router.InstanceID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.member(id).shut
}

// limitGone makes silent instances count as gone at once.
func (c *Coordinator) limitGone() { c.cfg.Limits.GoneAfter = time.Nanosecond }

func TestInstanceLostInTheMiddleDoesNotHoldTheUpdateUp(t *testing.T) {
	w := newWorld(t, 3)
	w.begin(1, "abort", nil)
	w.await(1, store.WeightPaused)
	_ = w.stop()
	w.limits.GoneAfter = 50 * time.Millisecond
	w.own()
	w.eventually("the successor to shut the doors", func() bool { return w.observed("e2") == router.Degraded && w.c.isShut("e2") })
	waiting := make(chan error, 1)
	go func() {
		_, err := w.c.Enter(w.ctx, "e2")
		waiting <- err
	}()
	w.leave("e2")
	if err := w.RemoveInstance(w.ctx, pool, "e3"); err != nil {
		t.Fatal(err)
	}
	w.leave("e3")
	var failed *engine.Error
	if err := <-waiting; !errors.As(err, &failed) || failed.Class != engine.RetryElsewhere {
		t.Fatalf("a request to an instance that went away: %v", err)
	}
	w.commit(1, "")
	u := w.await(1, store.WeightCommitted)
	if u.Instance("e2").State != store.PlaceGone || u.Instance("e3").State != store.PlaceGone || !strings.Contains(u.Instance("e2").Problem, "did not answer for 50ms") {
		t.Fatalf("rows %+v", u.Instances)
	}
	if v := w.versions(); v["pool"] != 1 || v["e1"] != 1 || v["e2"] != 0 {
		t.Fatalf("versions %v", v)
	}
	// It was paused when it fell silent: once it is back it must not stay so.
	w.join("e2")
	resumed := make(chan struct{}, 1)
	w.engines["e2"].refuses("resume", func(context.Context) error {
		select {
		case resumed <- struct{}{}:
		default:
		}
		return nil
	})
	w.awaitSignal("an engine that was left paused to be resumed", resumed)
}

func TestInstanceThatRestartsInTheMiddleIsPausedAgain(t *testing.T) {
	w := newWorld(t, 2)
	w.begin(1, "abort", nil)
	w.await(1, store.WeightPaused)
	w.leave("e2")
	w.join("e2")
	w.eventually("e2 to be paused again", func() bool {
		u, err := w.WeightUpdate(w.ctx, pool, 1)
		return err == nil && u.Instance("e2").State == store.PlacePaused && len(w.engines["e2"].calls()) == 2
	})
	w.commit(1, "")
	w.await(1, store.WeightCommitted)
	w.wantCalls("e2", "pause abort", "pause abort", "reset", "name 1", "resume")
}

func TestInstanceThatJoinsInTheMiddleIsBroughtAlong(t *testing.T) {
	w := newWorld(t, 1)
	w.begin(1, "keep", func(u *store.NewWeightUpdate) { u.Cache = store.CacheSalt })
	w.await(1, store.WeightPaused)
	w.register("e2")
	w.join("e2")
	w.eventually("e2 to be paused", func() bool {
		u, err := w.WeightUpdate(w.ctx, pool, 1)
		return err == nil && u.Instance("e2").State == store.PlacePaused
	})
	if w.observed("e2") != router.Degraded {
		t.Error("the router was not told that the joining instance is paused")
	}
	w.commit(1, "")
	w.await(1, store.WeightCommitted)
	w.wantCalls("e2", "pause keep", "name 1", "resume")
	if v := w.versions(); v["e2"] != 1 {
		t.Errorf("versions %v", v)
	}
}

func TestPoolWithoutEnginesTakesAVersion(t *testing.T) {
	w := newWorld(t, 0)
	w.begin(2, "wait", nil)
	w.await(2, store.WeightPaused)
	if status := w.c.Status(); status.PolicyVersion != 2 || status.BeganAt.IsZero() {
		t.Errorf("status %+v", status)
	}
	w.commit(2, store.CacheSalt)
	w.await(2, store.WeightCommitted)
	if v := w.versions(); v["pool"] != 2 {
		t.Errorf("versions %v", v)
	}
}

func TestObserveModeCallsNoEngine(t *testing.T) {
	w := newWorld(t, 2)
	w.begin(1, "abort", func(u *store.NewWeightUpdate) { u.Control = store.ControlObserve })
	w.await(1, store.WeightPaused)
	if w.observed("e1") != router.Degraded {
		t.Error("the router was not told of the update")
	}
	held := w.enter("e1")
	w.engines["e1"].setLabel("1") // by the trainer, in the middle
	w.commit(1, "")
	w.await(1, store.WeightCommitted)
	(<-held).Leave()
	w.wantCalls("e1")
	w.wantCalls("e2")
	if v := w.versions(); v["pool"] != 1 || v["e2"] != 1 || !slices.Equal(w.resets("e1"), []int64{1}) {
		t.Errorf("versions %v, resets %v", v, w.resets("e1"))
	}
}

func TestWeightsChangedUnaskedAreNoticed(t *testing.T) {
	w := newWorld(t, 2)
	// A first label below what is known says nothing; one beyond it does.
	if err := w.AdvancePolicyVersion(w.ctx, pool, 3); err != nil {
		t.Fatal(err)
	}
	w.eventually("the announced version", func() bool {
		return slices.Equal(w.resets("e1"), []int64{3}) && slices.Equal(w.resets("e2"), []int64{3})
	})
	w.engines["e1"].setLabel("1")
	w.engines["e2"].setLabel("7")
	w.eventually("e2's version", func() bool { return slices.Equal(w.resets("e2"), []int64{3, 7}) })
	if v := w.versions(); v["pool"] != 7 || v["e1"] != 3 || v["e2"] != 7 {
		t.Fatalf("versions %v", v)
	}
	// A change back is a change: the engine was restarted with older weights.
	w.engines["e2"].setLabel("0")
	w.eventually("e2's older version", func() bool { return slices.Equal(w.resets("e2"), []int64{3, 7, 0}) })
	// A name that is no number empties the index and leaves the version.
	w.engines["e2"].setLabel("default")
	w.eventually("a reset without a number", func() bool { return slices.Equal(w.resets("e2"), []int64{3, 7, 0, 0}) })
	if v := w.versions(); v["pool"] != 7 || v["e2"] != 0 {
		t.Fatalf("versions %v", v)
	}
	if !slices.Equal(w.resets("e1"), []int64{3}) {
		t.Errorf("e1 was reset to %v, want the announced version alone", w.resets("e1"))
	}
	if status := w.c.Status(); status.Unasked != 3 || status.State != "" {
		t.Errorf("status %+v", status)
	}
	history, err := w.WeightUpdates(w.ctx, pool, nil, 0)
	if err != nil || len(history) != 3 || history[0].PolicyVersion != 7 || history[0].Source != store.WeightObserved || history[1].Source != store.WeightAnnounced {
		t.Fatalf("history %+v, %v", history, err)
	}
}
