package fault

import (
	"errors"
	"reflect"
	"testing"

	"holdfast/orchestrator/engine/simulated/publish"
)

func must(t *testing.T, s Settings) *Injector {
	t.Helper()
	i, err := New(s)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// story is what an injector decides over a while, with kinds interleaved as told.
func story(i *Injector, interleaved bool) (fates []publish.Fate, statuses, drops []int) {
	fate := i.EventFate(0)
	other := i.EventFate(1)
	for range 500 {
		fates = append(fates, fate())
		if interleaved {
			other()
		}
		r, _ := i.Refusal()
		statuses = append(statuses, r.Status)
		drops = append(drops, i.DropAfter())
	}
	return fates, statuses, drops
}

func TestChoicesFollowTheSeed(t *testing.T) {
	s := Settings{
		Seed: 5, Events: Events{Lost: 0.1, Duplicated: 0.1, Reordered: 0.2, Delayed: 0.1, DelaySeconds: 1},
		Refusals: []Refusal{{Status: 429, Probability: 0.1}, {Status: 503, Probability: 0.2}}, Drops: Drops{Probability: 0.3, AfterTokens: 7},
	}
	f1, r1, d1 := story(must(t, s), false)
	i := must(t, s)
	f2, r2, d2 := story(i, true)
	if !reflect.DeepEqual(f1, f2) || !reflect.DeepEqual(r1, r2) || !reflect.DeepEqual(d1, d2) {
		t.Error("equal settings make other choices, or one rank's depend on another's")
	}
	_, c := i.State()
	if err := i.Set(s); err != nil {
		t.Fatal(err)
	}
	if f3, r3, _ := story(i, false); !reflect.DeepEqual(f1, f3) || !reflect.DeepEqual(r1, r3) {
		t.Error("setting the same again makes other choices")
	}
	s.Seed = 6
	if f4, _, _ := story(must(t, s), false); reflect.DeepEqual(f1, f4) {
		t.Error("another seed makes the same choices")
	}
	// 500 draws: each count is within five deviations of its mean. Both ranks count.
	for name, got := range map[string][3]int64{
		"lost": {c.EventsLost, 100, 48}, "delayed": {c.EventsDelayed, 100, 48}, "429": {c.Refused[429], 50, 34}, "503": {c.Refused[503], 90, 45},
	} {
		if got[0] < got[1]-got[2] || got[0] > got[1]+got[2] {
			t.Errorf("%d %s, want some %d", got[0], name, got[1])
		}
	}
	swapped := 0
	for n, f := range f1 {
		if f.Lost && (f.Swapped || f.Duplicate) {
			t.Errorf("batch %d is lost and more: %+v", n, f)
		}
		if f.Swapped {
			swapped++
		}
	}
	if swapped == 0 {
		t.Error("nothing is swapped")
	}
}

func TestNextCountsDown(t *testing.T) {
	i := must(t, Settings{
		Refusals: []Refusal{{Status: 500, Next: 2, RetryAfterSeconds: 3}, {Status: 504, Next: 1}},
		Drops:    Drops{Next: 1, AfterTokens: 9}, RefuseFlushes: 1,
	})
	var got []int
	for range 4 {
		r, ok := i.Refusal()
		if ok != (r.Status != 0) {
			t.Errorf("%v %+v", ok, r)
		}
		got = append(got, r.Status)
	}
	if !reflect.DeepEqual(got, []int{500, 500, 504, 0}) {
		t.Errorf("refused %v", got)
	}
	if a, b := i.DropAfter(), i.DropAfter(); a != 9 || b != 0 {
		t.Errorf("drops after %d, %d", a, b)
	}
	if a, b := i.RefuseFlush(), i.RefuseFlush(); !a || b {
		t.Errorf("flushes refused: %v, %v", a, b)
	}
	s, c := i.State()
	if s.Refusals[0].Next != 0 || s.SlowFactor != 1 || c.Refused[500] != 2 || c.Refused[504] != 1 || c.FlushesRefused != 1 {
		t.Errorf("%+v %+v", s, c)
	}
}

func TestNonsenseIsRefused(t *testing.T) {
	for name, s := range map[string]Settings{
		"probability": {Events: Events{Lost: 1.5}},
		"status":      {Refusals: []Refusal{{Status: 404, Next: 1}}},
		"stall":       {Metrics: Metrics{Mode: "slow"}},
		"seconds":     {Crash: &Crash{DownSeconds: -1}},
		"factor":      {SlowFactor: -1},
		"interval":    {Preemptions: Preemptions{Times: 2}},
		"count":       {Drops: Drops{Next: -1}},
	} {
		i := must(t, Settings{RefuseFlushes: 1})
		if err := i.Set(s); !errors.Is(err, ErrSettings) {
			t.Errorf("%s: %v", name, err)
		}
		if !i.RefuseFlush() {
			t.Errorf("%s: a refused setting replaced the old one", name)
		}
	}
}
