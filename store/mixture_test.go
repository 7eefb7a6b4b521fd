package store_test

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
)

func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if math.Abs(got-want) > 1e-9 {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

// mixed ends sessions so that the shares are easy to compute: 6 agent, 3 rlvr and
// 1 rlhf are released; of them end 3 agent completed and 1 failed, 2 rlvr
// truncated, 1 rlhf completed.
func mixed(t *testing.T) *fixture {
	f := newFixture(t, 100)
	f.submit("one", append(append(repeat("agent", 6), repeat("rlvr", 3)...), repeat("rlhf", 1)...)...)
	endings := map[string][]router.EndStatus{
		"agent": {router.Completed, router.Completed, router.Completed, router.Failed}, "rlvr": {router.Truncated, router.Truncated}, "rlhf": {router.Completed}}
	for _, id := range f.dispatch() {
		class := f.session(id).Class
		if left := endings[class]; len(left) > 0 {
			f.end(id, left[0])
			endings[class] = left[1:]
		}
	}
	return f
}

func TestMixture(t *testing.T) {
	f := mixed(t)
	ctx := t.Context()
	m, err := f.Mixture(ctx, f.run.ID, store.Window{})
	must(t, err)
	// Completed and truncated: 3 of 6 agent, 2 rlvr, 1 rlhf; released 6, 3 and 1 of 10.
	near(t, "TV against released", m.TVReleasedPP, 50*(math.Abs(3./6-.6)+math.Abs(2./6-.3)+math.Abs(1./6-.1)))
	near(t, "TV against rho", m.TVRhoPP, 50*(math.Abs(3./6-.486/.999)+math.Abs(2./6-.331/.999)+math.Abs(1./6-.182/.999)))
	near(t, "TV of nothing consumed", m.TVConsumedPP, 0)
	agent := m.Classes[0]
	if agent.Class != "agent" || agent.Released != 6 || agent.Completed != 3 || agent.Consumed != 0 {
		t.Errorf("agent %+v", agent)
	}

	page := f.samples(store.SampleQuery{Consumer: "trainer"})
	_, err = f.Ack(ctx, f.run.ID, "trainer", page.Samples[3].Cursor)
	must(t, err)
	consumed := map[string]int64{}
	for _, sample := range page.Samples[:4] {
		if sample.Status == router.Completed || sample.Status == router.Truncated {
			consumed[sample.Class]++
		}
	}
	m, err = f.Mixture(ctx, f.run.ID, store.Window{})
	must(t, err)
	total := 0.0
	for _, n := range consumed {
		total += float64(n)
	}
	want := 0.0
	for _, class := range m.Classes {
		if class.Consumed != consumed[class.Class] {
			t.Errorf("%s: consumed %d, want %d", class.Class, class.Consumed, consumed[class.Class])
		}
		want += 50 * math.Abs(float64(consumed[class.Class])/total-class.Rho)
	}
	near(t, "TV of what was consumed", m.TVConsumedPP, want)
	// Acknowledging the rest adds to the first part.
	_, err = f.Ack(ctx, f.run.ID, "trainer", page.Next)
	must(t, err)
	m, err = f.Mixture(ctx, f.run.ID, store.Window{})
	must(t, err)
	for _, class := range m.Classes {
		if class.Consumed != class.Completed {
			t.Errorf("all acknowledged: %+v", class)
		}
	}
	if _, err := f.Mixture(ctx, uuid.New(), store.Window{}); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("an unknown run: %v", err)
	}
}

func TestMixtureOverAWindow(t *testing.T) {
	f := mixed(t)
	ctx := t.Context()
	middle := f.now()
	page := f.samples(store.SampleQuery{Consumer: "trainer"})
	_, err := f.Ack(ctx, f.run.ID, "trainer", page.Next)
	must(t, err)
	f.submit("two", repeat("rlvr", 4)...)
	for _, id := range f.dispatch() {
		if f.session(id).Class == "rlvr" {
			f.end(id, router.Completed)
		}
	}
	for _, test := range []struct {
		name                          string
		window                        store.Window
		released, completed, consumed [3]int64 // agent, rlhf, rlvr
	}{
		{"before", store.Window{To: middle}, [3]int64{6, 1, 3}, [3]int64{3, 1, 2}, [3]int64{0, 0, 0}},
		{"since", store.Window{From: middle}, [3]int64{6, 1, 7}, [3]int64{0, 0, 5}, [3]int64{3, 1, 2}},
		{"an hour", store.LastSeconds(3_600), [3]int64{6, 1, 7}, [3]int64{3, 1, 7}, [3]int64{3, 1, 2}},
		{"long ago", store.Window{To: middle.Add(-time.Hour)}, [3]int64{}, [3]int64{}, [3]int64{}},
	} {
		m, err := f.Mixture(ctx, f.run.ID, test.window)
		must(t, err)
		for i, class := range m.Classes {
			if class.Released != test.released[i] || class.Completed != test.completed[i] || class.Consumed != test.consumed[i] {
				t.Errorf("%s: %+v, want %d, %d, %d", test.name, class, test.released[i], test.completed[i], test.consumed[i])
			}
		}
	}
}

func TestBacklog(t *testing.T) {
	f := newFixture(t, 6)
	f.submit("one", append(repeat("agent", 8), repeat("rlvr", 2)...)...)
	ids := f.dispatch()
	var agents []uuid.UUID
	for _, id := range ids {
		if f.session(id).Class == "agent" {
			agents = append(agents, id)
		}
	}
	f.decide(f.hold(agents[0], 0, router.AtCap), f.admit(agents[1], 0, "w1"))
	f.end(agents[2], router.Completed)
	backlog, err := f.Backlog(t.Context(), f.run.ID)
	must(t, err)
	agent := backlog[0]
	want := store.ClassBacklog{Class: "agent", Released: 8, Completed: 1, Ended: 1, Backlog: 7, Queued: 8 - int64(len(agents)), Pending: int64(len(agents)) - 3, Held: 1, Active: 1, GroupsEnded: 1}
	if agent.DrainSeconds == nil || *agent.DrainSeconds <= 0 || agent.OldestHoldSeconds < 0 {
		t.Errorf("drains in %v, oldest hold %v", agent.DrainSeconds, agent.OldestHoldSeconds)
	}
	if agent.OldestQueuedSeconds <= 0 || agent.OldestOutstandingSeconds < agent.OldestQueuedSeconds || agent.LiveTokenSeconds <= 0 ||
		agent.LiveBlockSeconds == nil || *agent.LiveBlockSeconds != agent.LiveTokenSeconds/16 {
		t.Errorf("waits %v, %v s, uses %v token-seconds, %v block-seconds", agent.OldestQueuedSeconds, agent.OldestOutstandingSeconds, agent.LiveTokenSeconds, agent.LiveBlockSeconds)
	}
	agent.DrainSeconds, agent.OldestHoldSeconds = nil, 0
	agent.OldestQueuedSeconds, agent.OldestOutstandingSeconds, agent.LiveTokenSeconds, agent.LiveBlockSeconds = 0, 0, 0, nil
	if agent != want {
		t.Errorf("backlog %+v, want %+v", agent, want)
	}
	if rlhf := backlog[1]; rlhf.Class != "rlhf" || rlhf.Released != 0 || rlhf.DrainSeconds != nil {
		t.Errorf("a class without tasks: %+v", rlhf)
	}
	if _, err := f.Backlog(t.Context(), uuid.New()); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("an unknown run: %v", err)
	}
}

func TestMetrics(t *testing.T) {
	f := newFixture(t, 100)
	ctx := t.Context()
	empty, err := f.Metrics(ctx, f.run.ID, store.Window{})
	must(t, err)
	if len(empty.Classes) != 0 || empty.Total.Samples != 0 {
		t.Errorf("before the first sample: %+v", empty)
	}
	f.submit("one", append(repeat("agent", 3), repeat("rlvr", 1)...)...)
	for i, id := range f.dispatch() {
		if i == 1 {
			f.decide(f.hold(id, 0, router.AtCap))
		}
		f.tick(1)
		f.decide(f.admit(id, 0, "w1"))
		f.commit(id, 0)
		f.commit(id, 1)
		f.end(id, []router.EndStatus{router.Completed, router.Completed, router.Failed, router.Truncated}[i])
	}
	m, err := f.Metrics(ctx, f.run.ID, store.Window{})
	must(t, err)
	total := m.Total
	if total.Samples != 3 || total.Turns != 8 || total.PromptTokens != 4*9 || total.CachedTokens != 4*2 || total.OutputTokens != 4*4 || total.HeldSessions != 1 {
		t.Errorf("total %+v", total)
	}
	near(t, "prefix hit", total.PrefixHit, 2./9)
	if total.ColdPrefillTokens != 4*7 {
		t.Errorf("cold prefill tokens %d", total.ColdPrefillTokens)
	}
	near(t, "samples per minute", total.SamplesPerMinute, 3/m.To.Sub(m.From).Minutes())
	if len(m.Classes) != 2 || m.Classes[0].Class != "agent" || m.Classes[0].Samples+m.Classes[1].Samples != 3 {
		t.Errorf("classes %+v", m.Classes)
	}
	if !(total.LatencyP50Seconds > 0 && total.LatencyP50Seconds <= total.LatencyP95Seconds && total.LatencyP95Seconds <= total.LatencyP99Seconds) {
		t.Errorf("latencies %v, %v, %v", total.LatencyP50Seconds, total.LatencyP95Seconds, total.LatencyP99Seconds)
	}
	past, err := f.Metrics(ctx, f.run.ID, store.Window{To: f.now().Add(-time.Hour), From: f.now().Add(-2 * time.Hour)})
	must(t, err)
	if past.Total.Samples != 0 || past.Total.Turns != 0 {
		t.Errorf("two hours ago: %+v", past.Total)
	}
	var field *store.FieldError
	if _, err := f.Metrics(ctx, f.run.ID, store.Window{From: f.now(), To: f.now().Add(-time.Hour)}); !errors.As(err, &field) {
		t.Errorf("a window that ends before it begins: %v", err)
	}
}

func TestSessionsListing(t *testing.T) {
	f := newFixture(t, 2)
	ctx := t.Context()
	first := f.submit("one", append(repeat("agent", 4), repeat("rlvr", 2)...)...)
	f.submit("two", prompted("rlhf", 3))
	f.dispatch()
	list := func(query store.SessionQuery) []store.Session {
		query.RunID = f.run.ID
		sessions, err := f.Sessions(ctx, query)
		must(t, err)
		return sessions
	}
	all := list(store.SessionQuery{})
	if len(all) != 9 || all[8].Class != "rlhf" || all[8].Member != 2 || all[8].GroupSize != 3 {
		t.Fatalf("%d sessions, the last %+v", len(all), all[len(all)-1])
	}
	for name, got := range map[string]int{
		"batch":  len(list(store.SessionQuery{BatchID: &first.ID})),
		"task":   len(list(store.SessionQuery{TaskID: &all[8].TaskID})),
		"class":  len(list(store.SessionQuery{Class: "rlvr"})),
		"state":  len(list(store.SessionQuery{State: store.SessionDispatched})),
		"limit":  len(list(store.SessionQuery{Limit: 5})),
		"paging": len(list(store.SessionQuery{After: &all[4].ID})),
	} {
		if want := map[string]int{"batch": 6, "task": 3, "class": 2, "state": 2, "limit": 5, "paging": 4}[name]; got != want {
			t.Errorf("by %s: %d sessions, want %d", name, got, want)
		}
	}
	if got := fmt.Sprint(list(store.SessionQuery{After: &all[4].ID})[0].ID); got != fmt.Sprint(all[5].ID) {
		t.Errorf("the next page begins with %s", got)
	}
	if store.SessionID(all[8].TaskID, 2) != all[8].ID {
		t.Error("a session's id is not the one of its task and member")
	}
}
