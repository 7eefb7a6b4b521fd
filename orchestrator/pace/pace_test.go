package pace_test

import (
	"math"
	"testing"

	"pgregory.net/rapid"

	"holdfast/orchestrator/pace"
)

func eta(n int) *int { return &n }

// steady is a run with a bound of 1 in the middle of its work: 10 endings a second,
// versions every 20 s, the present one just in force, 40 sessions outstanding.
func steady() pace.State {
	return pace.State{
		MaxConcurrency: 1_000, StalenessBound: eta(1), VersionSeconds: 20, BusySeconds: 60, ServiceMeanSeconds: 4, UnderWay: 40,
		Classes: []pace.Class{
			{Name: "agent", Share: 0.5, Released: 500, Outstanding: 20, EndedInWindow: 300, ServiceP99Seconds: 3},
			{Name: "rlvr", Share: 0.3, Released: 300, Outstanding: 12, EndedInWindow: 180, ServiceP99Seconds: 4},
			{Name: "rlhf", Share: 0.2, Released: 200, Outstanding: 8, EndedInWindow: 120, ServiceP99Seconds: 2},
		},
	}
}

func TestAdvice(t *testing.T) {
	single := pace.Ask{GroupSize: 1, AskAgainSeconds: 10}
	for _, c := range []struct {
		name   string
		change func(*pace.State, *pace.Ask)
		total  int64
		limit  pace.Factor
		class  string
		idle   bool
	}{
		// 10/s for 0.7 x 40 s, less the 40 that are outstanding.
		{name: "the time to the bound", total: 240, limit: pace.Staleness},
		{name: "an older version leaves less", change: func(s *pace.State, _ *pace.Ask) { s.VersionAgeSeconds = 20 }, total: 100, limit: pace.Staleness},
		{name: "the bound is exhausted", change: func(s *pace.State, _ *pace.Ask) { s.VersionAgeSeconds = 35 }, total: 0, limit: pace.Staleness},
		{name: "beyond the bound", change: func(s *pace.State, _ *pace.Ask) { s.VersionAgeSeconds = 500 }, total: 0, limit: pace.Staleness},
		{name: "a class that falls behind limits all", change: func(s *pace.State, _ *pace.Ask) { s.Classes[2].Outstanding = 50 }, total: 35, limit: pace.Staleness, class: "rlhf"},
		// 10/s for 0.7 x 20 s, times 4 s / 7 s, less 40.
		{name: "a class with long sessions limits all", change: func(s *pace.State, _ *pace.Ask) { s.Classes[0].ServiceP99Seconds = 7 }, total: 40, limit: pace.Staleness, class: "agent"},
		{name: "a class with sessions too long", change: func(s *pace.State, _ *pace.Ask) { s.Classes[0].ServiceP99Seconds = 41 }, total: 0, limit: pace.Staleness, class: "agent"},
		{name: "long sessions seen too seldom to judge", change: func(s *pace.State, _ *pace.Ask) {
			s.Classes[0].ServiceP99Seconds, s.Classes[0].EndedInWindow = 41, 7
		}, total: 103, limit: pace.Staleness},
		{name: "steps of 64 samples", change: func(_ *pace.State, a *pace.Ask) { a.StepSamples = 64 }, total: 88, limit: pace.Undelivered},
		{name: "steps as they were", change: func(s *pace.State, _ *pace.Ask) { s.StepSamples = 64 }, total: 88, limit: pace.Undelivered},
		{name: "what waits counts", change: func(s *pace.State, a *pace.Ask) { a.StepSamples, s.Unacknowledged = 64, 60 }, total: 28, limit: pace.Undelivered},
		{name: "in groups with spares", change: func(s *pace.State, a *pace.Ask) {
			a.StepSamples, a.GroupSize, a.SpareMembers, s.Unacknowledged = 64, 4, 1, 60
		}, total: 45, limit: pace.Undelivered},
		{name: "the contract's limit", change: func(s *pace.State, _ *pace.Ask) { s.UndeliveredLimit, s.Undelivered = 100, 50 }, total: 10, limit: pace.Undelivered},
		{name: "no bound: the pool's concurrency", change: func(s *pace.State, _ *pace.Ask) { s.StalenessBound = nil }, total: 1_060, limit: pace.Backlog},
		{name: "no bound and held: what is under way", change: func(s *pace.State, _ *pace.Ask) { s.StalenessBound, s.Held, s.UnderWay = nil, 6, 34 }, total: 94, limit: pace.Backlog},
		{name: "nothing measured: a first wave", change: func(s *pace.State, _ *pace.Ask) {
			*s = pace.State{MaxConcurrency: 1_000, StalenessBound: eta(1), Classes: []pace.Class{{Name: "a", Share: 0.5}, {Name: "b", Share: 0.5}}}
		}, total: 16, limit: pace.ColdStart},
		{name: "nothing measured, a step known: one step", change: func(s *pace.State, a *pace.Ask) {
			*s = pace.State{MaxConcurrency: 1_000, StalenessBound: eta(1), Classes: []pace.Class{{Name: "a", Share: 0.5}, {Name: "b", Share: 0.5}}}
			a.StepSamples = 32
		}, total: 32, limit: pace.ColdStart},
		{name: "no version yet: still the first wave", change: func(s *pace.State, _ *pace.Ask) { s.VersionSeconds = 0 }, total: 0, limit: pace.ColdStart},
		{name: "small concurrency", change: func(s *pace.State, _ *pace.Ask) { s.MaxConcurrency, s.BusySeconds, s.Classes[0].Outstanding = 45, 0, 0 }, total: 4, limit: pace.ColdStart},
		{name: "the trainer has everything and waits", change: func(s *pace.State, _ *pace.Ask) {
			s.VersionAgeSeconds = 39.99
			for i := range s.Classes {
				s.Classes[i].Outstanding = 0
			}
		}, total: 1, limit: pace.Staleness, idle: true},
		{name: "the trainer trains", change: func(s *pace.State, a *pace.Ask) {
			s.VersionAgeSeconds, s.Unacknowledged, a.StepSamples = 30, 64, 32
			for i := range s.Classes {
				s.Classes[i].Outstanding = 0
			}
		}, total: 0, limit: pace.Undelivered},
		{name: "a version overdue with nothing outstanding", change: func(s *pace.State, a *pace.Ask) {
			s.VersionAgeSeconds, s.Unacknowledged, a.StepSamples = 41, 64, 32
			for i := range s.Classes {
				s.Classes[i].Outstanding = 0
			}
		}, total: 1, limit: pace.Staleness, idle: true},
		{name: "the run has ended", change: func(s *pace.State, _ *pace.Ask) { s.RunEnded = true }, total: 0, limit: pace.Ended},
	} {
		t.Run(c.name, func(t *testing.T) {
			state, ask := steady(), single
			if c.change != nil {
				c.change(&state, &ask)
			}
			a := pace.Advise(&state, ask)
			if a.Sessions != c.total || a.Limit != c.limit || a.LimitClass != c.class || a.Idle != c.idle {
				t.Errorf("advises %d, limited by %v of class %q, idle %v; want %d, %v, %q, %v", a.Sessions, a.Limit, a.LimitClass, a.Idle, c.total, c.limit, c.class, c.idle)
			}
			if a.Why(&state) == "" {
				t.Error("does not say why")
			}
		})
	}
}

// TestClassesThatWereReleasedTooOftenWait: advice corrects what others have done to
// the shares.
func TestClassesThatWereReleasedTooOftenWait(t *testing.T) {
	state := steady()
	state.StalenessBound = nil
	state.MaxConcurrency = 100
	state.Classes[1].Released = 330
	a := pace.Advise(&state, pace.Ask{GroupSize: 1})
	if a.Sessions != 60 || a.Classes[0].Sessions != 43 || a.Classes[1].Sessions != 0 || a.Classes[2].Sessions != 17 {
		t.Errorf("advises %+v after 30 too many of rlvr; it is to wait", a.Classes)
	}
}

// drawState draws shares and the unit that is released together.
func drawState(t *rapid.T) (pace.State, pace.Ask) {
	classes := make([]pace.Class, rapid.IntRange(1, 6).Draw(t, "classes"))
	sum := 0.0
	for i := range classes {
		classes[i].Name = string(rune('a' + i))
		classes[i].Share = rapid.Float64Range(0.001, 1).Draw(t, "share")
		sum += classes[i].Share
	}
	for i := range classes {
		classes[i].Share /= sum
	}
	state := pace.State{Classes: classes, MaxConcurrency: int64(rapid.IntRange(8, 500).Draw(t, "concurrency"))}
	ask := pace.Ask{GroupSize: int64(rapid.IntRange(1, 8).Draw(t, "group")), AskAgainSeconds: 10}
	if ask.GroupSize > 1 {
		ask.SpareMembers = int64(rapid.IntRange(0, 2).Draw(t, "spare"))
	}
	return state, ask
}

// TestFollowingKeepsTheShares: whoever releases what is advised is always within one
// group of rho, whatever rooms the advice came from.
func TestFollowingKeepsTheShares(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		state, ask := drawState(t)
		unit := ask.GroupSize + ask.SpareMembers
		var total int64
		for range rapid.IntRange(1, 30).Draw(t, "questions") {
			state.MaxConcurrency = int64(rapid.IntRange(1, 200).Draw(t, "concurrency"))
			a := pace.Advise(&state, ask)
			for i, c := range a.Classes {
				if c.Sessions < 0 || c.Sessions != c.Groups*unit {
					t.Fatalf("class %d: %d sessions in %d groups of %d", i, c.Sessions, c.Groups, unit)
				}
				state.Classes[i].Released += c.Sessions
				state.Classes[i].Outstanding += c.Sessions
				total += c.Sessions
			}
			for i := range state.Classes {
				c := &state.Classes[i]
				if off := math.Abs(float64(c.Released) - c.Share*float64(total)); off > float64(unit)+1e-6 {
					t.Fatalf("%d of %d released of class %d with share %v: off by %v, more than a unit of %d", c.Released, total, i, c.Share, off, unit)
				}
				c.Outstanding = int64(rapid.IntRange(0, int(c.Outstanding)).Draw(t, "left"))
			}
		}
	})
}

// TestAdviceKeepsItsBounds: never negative, within every room, none when the bound is
// exhausted, some on a cold start, and the same for the same figures.
func TestAdviceKeepsItsBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		state, ask := drawState(t)
		unit := ask.GroupSize + ask.SpareMembers
		if rapid.Bool().Draw(t, "bound") {
			state.StalenessBound = eta(rapid.IntRange(0, 4).Draw(t, "eta"))
		}
		state.VersionSeconds = rapid.Float64Range(0, 1e4).Draw(t, "interval")
		state.VersionAgeSeconds = rapid.Float64Range(0, 1e5).Draw(t, "age")
		state.BusySeconds = rapid.Float64Range(0, 1800).Draw(t, "busy")
		state.Unacknowledged = int64(rapid.IntRange(0, 1_000).Draw(t, "unacknowledged"))
		ask.StepSamples = int64(rapid.IntRange(0, 200).Draw(t, "step"))
		var outstanding, ended int64
		for i := range state.Classes {
			c := &state.Classes[i]
			c.Released = int64(rapid.IntRange(0, 10_000).Draw(t, "released"))
			c.Outstanding = int64(rapid.IntRange(0, 300).Draw(t, "outstanding"))
			c.EndedInWindow = int64(rapid.IntRange(0, 300).Draw(t, "ended"))
			state.ServiceMeanSeconds = rapid.Float64Range(0, 1e4).Draw(t, "mean")
			c.ServiceP99Seconds = rapid.Float64Range(0, 1e4).Draw(t, "service")
			outstanding += c.Outstanding
			ended += c.EndedInWindow
		}
		a := pace.Advise(&state, ask)
		again := pace.Advise(&state, ask)
		var total int64
		for i, c := range a.Classes {
			if c.Sessions < 0 || again.Classes[i] != c {
				t.Fatalf("class %d: %+v, then %+v", i, c, again.Classes[i])
			}
			total += c.Sessions
		}
		if total != a.Sessions {
			t.Fatalf("the classes sum to %d, the advice says %d", total, a.Sessions)
		}
		if a.Idle {
			if outstanding > 0 || total != unit {
				t.Fatalf("idle with %d outstanding advises %d, a unit is %d", outstanding, total, unit)
			}
			return
		}
		for _, room := range []*int64{a.StalenessRoom, a.UndeliveredRoom, a.BacklogRoom} {
			if room != nil && (*room < 0 || total > *room) {
				t.Fatalf("advises %d in a room of %d", total, *room)
			}
		}
		if state.StalenessBound != nil && state.VersionSeconds > 0 && state.BusySeconds > 0 && ended >= pace.LeastEnded {
			horizon := float64(*state.StalenessBound+1)*state.VersionSeconds - state.VersionAgeSeconds
			if float64(ended)/state.BusySeconds*horizon <= float64(outstanding) && total > 0 {
				t.Fatalf("advises %d although %d outstanding exhaust the bound in %v s", total, outstanding, horizon)
			}
		}
	})
}

// TestColdStartAdvisesSomething: whatever the contract, the first question is not
// answered with nothing.
func TestColdStartAdvisesSomething(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		state, ask := drawState(t)
		if rapid.Bool().Draw(t, "bound") {
			state.StalenessBound = eta(rapid.IntRange(0, 4).Draw(t, "eta"))
		}
		ask.StepSamples = int64(rapid.IntRange(0, 64).Draw(t, "step"))
		if a := pace.Advise(&state, ask); a.Sessions < 1 {
			t.Fatalf("advises nothing at first: %+v", a)
		}
	})
}
