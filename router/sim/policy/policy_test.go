package policy_test

import (
	"slices"
	"testing"

	"holdfast/router"
	"holdfast/router/sim"
	"holdfast/router/sim/instance"
	"holdfast/router/sim/policy"
	"holdfast/router/sim/workload"
)

// watched counts what a policy has sent where, from its decisions alone.
type watched struct {
	inner sim.Policy
	// home and class are of sessions that have been admitted; busy have a turn at
	// the engine.
	home  map[router.SessionID]router.InstanceID
	class map[router.SessionID]router.ClassID
	busy  map[router.SessionID]bool
	check func(w *watched, d *router.Decision)
}

func (w *watched) Step(ev router.Event, out []router.Decision) []router.Decision {
	switch ev := ev.(type) {
	case *router.TurnEnded:
		delete(w.busy, ev.Session)
	case *router.SessionEnded:
		delete(w.home, ev.Session)
	case *router.TurnRequested:
		w.class[ev.Session] = ev.Class
	}
	from := len(out)
	out = w.inner.Step(ev, out)
	for i := range out[from:] {
		if d := &out[from+i]; d.Kind == router.Admit {
			w.home[d.Session] = d.Instance
			w.busy[d.Session] = true
			w.check(w, d)
		}
	}
	return out
}

// count is the number of sessions at an instance for which keep holds.
func (w *watched) count(at router.InstanceID, keep func(router.SessionID) bool) int {
	n := 0
	for s, home := range w.home {
		if home == at && keep(s) {
			n++
		}
	}
	return n
}

func watch(t *testing.T, spec sim.Spec, check func(w *watched, d *router.Decision)) {
	t.Helper()
	engine := instance.QwenLike()
	engine.CapacityBlocks /= 8
	source, err := sim.Composed{Seed: 1, GroupSize: 2, Mixture: []sim.ComposedClass{
		{Class: workload.PaperAgent(workload.GapsQwen).Scaled(0.25), Share: 0.5},
		{Class: workload.PaperRLVR().Scaled(0.25), Share: 0.3},
		{Class: workload.PaperRLHF().Scaled(0.25), Share: 0.2},
	}}.Source()
	if err != nil {
		t.Fatal(err)
	}
	cfg := sim.Config{
		Seed: 1, Instances: slices.Repeat([]instance.Params{engine}, 2), Source: source,
		Trainer: sim.Trainer{OuterConcurrency: 100}, Observed: sim.DefaultObservation(),
		MeasureSeconds: 900, RouterBlockTokens: 64,
	}
	create := spec.New
	spec.New = func(truth sim.Truth) (sim.Policy, error) {
		inner, err := create(truth)
		return &watched{inner: inner, check: check, home: map[router.SessionID]router.InstanceID{},
			class: map[router.SessionID]router.ClassID{}, busy: map[router.SessionID]bool{}}, err
	}
	if _, err := sim.Run(cfg, spec); err != nil {
		t.Fatal(err)
	}
}

func everybody(router.SessionID) bool { return true }

func TestSessionCeilingHolds(t *testing.T) {
	most := 0
	watch(t, policy.SessionCeiling(12), func(w *watched, d *router.Decision) {
		n := w.count(d.Instance, everybody)
		most = max(most, n)
		if n > 12 {
			t.Fatalf("%d sessions at %s under a ceiling of 12", n, d.Instance)
		}
	})
	if most != 12 {
		t.Errorf("at most %d sessions were let in, the ceiling is 12", most)
	}
}

func TestRequestCeilingHolds(t *testing.T) {
	most, sessions := 0, 0
	watch(t, policy.RequestCeiling(12), func(w *watched, d *router.Decision) {
		n := w.count(d.Instance, func(s router.SessionID) bool { return w.busy[s] })
		most, sessions = max(most, n), max(sessions, w.count(d.Instance, everybody))
		if n > 12 {
			t.Fatalf("%d requests in flight at %s under a ceiling of 12", n, d.Instance)
		}
	})
	if most != 12 {
		t.Errorf("at most %d requests were in flight, the ceiling is 12", most)
	}
	// What the ceiling does not bound, and why it loses locality.
	if sessions < 24 {
		t.Errorf("at most %d sessions shared an instance under a request ceiling of 12", sessions)
	}
}

func TestClassCeilingsHold(t *testing.T) {
	ceilings := map[router.ClassID]int{"agent": 5, "rlvr": 4, "rlhf": 2}
	watch(t, policy.ClassCeilings(ceilings), func(w *watched, d *router.Decision) {
		class := w.class[d.Session]
		if n := w.count(d.Instance, func(s router.SessionID) bool { return w.class[s] == class }); n > ceilings[class] {
			t.Fatalf("%d %s sessions at %s", n, class, d.Instance)
		}
	})
}

func TestPartitionsAreKept(t *testing.T) {
	watch(t, policy.Partitioned([]policy.Partition{
		{Classes: []router.ClassID{"agent"}, Instances: []int{0}, Ceiling: 10},
		{Classes: []router.ClassID{"rlvr", "rlhf"}, Instances: []int{1}, Ceiling: 10},
	}), func(w *watched, d *router.Decision) {
		if agent := w.class[d.Session] == "agent"; agent != (d.Instance == "w00") {
			t.Fatalf("%s was sent to %s", w.class[d.Session], d.Instance)
		}
	})
}

func TestStickySessionsStay(t *testing.T) {
	for _, spec := range []sim.Spec{policy.StickyLeastLoaded(), policy.StickyLeastInFlight(), policy.Permissive()} {
		first := map[router.SessionID]router.InstanceID{}
		watch(t, spec, func(_ *watched, d *router.Decision) {
			if home, known := first[d.Session]; known && home != d.Instance {
				t.Fatalf("%s moved session %x", spec.Name, d.Session[:8])
			}
			first[d.Session] = d.Instance
		})
	}
}

// ThunderAgent pauses between turns, and so keeps what is active within the cache.
func TestThunderAgentLikeMovesOrPausesSessions(t *testing.T) {
	paused := 0
	asked := map[router.SessionID]int{}
	watch(t, policy.ThunderAgentLike(), func(w *watched, d *router.Decision) {
		if d.Turn > 0 && d.Reason == router.NewSession {
			paused++
		}
		asked[d.Session] = d.Turn
	})
	if paused == 0 {
		t.Error("no session was ever paused and resumed under overload")
	}
}

func TestImpossibleCeilingsAreRefused(t *testing.T) {
	if _, err := policy.RequestCeiling(0).New(nil); err == nil {
		t.Error("a request ceiling of 0 is accepted")
	}
}
