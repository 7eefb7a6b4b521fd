package store_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
)

// change moves times behind the store's back.
func (f *fixture) change(sql string, args ...any) {
	f.t.Helper()
	_, err := f.conn().Exec(f.t.Context(), sql, args...)
	must(f.t, err)
}

func (f *fixture) pace() store.PaceFigures {
	f.t.Helper()
	figures, err := f.Pace(f.t.Context(), f.run.ID)
	must(f.t, err)
	return figures
}

func (f *fixture) endAll(status router.EndStatus, ids ...uuid.UUID) {
	f.t.Helper()
	for _, id := range ids {
		_, _, err := f.EndSession(f.t.Context(), store.Ending{SessionID: id, Status: status})
		must(f.t, err)
	}
}

func TestPaceOfAFreshRun(t *testing.T) {
	f := newFixture(t, 8)
	p := f.pace()
	if p.MaxConcurrency != 8 || p.StalenessBound != nil || p.BusySeconds != 0 || p.VersionSeconds != 0 || p.Unacknowledged != 0 || len(p.Classes) != 3 || p.RunEnded {
		t.Errorf("a fresh run has pace figures %+v", p)
	}
	if _, err := f.Pace(t.Context(), uuid.New()); err == nil {
		t.Error("an unknown run has a pace")
	}
}

// TestPaceFiguresAreCountedAndMeasured: what is outstanding by state, the time under
// way as a union, service times, versions, and what was acknowledged between them.
func TestPaceFiguresAreCountedAndMeasured(t *testing.T) {
	f := newFixture(t, 20)
	f.submit("one", prompted("agent", 8), prompted("rlvr", 4))
	ids := f.dispatch()
	for _, id := range ids {
		f.decide(f.admit(id, 0, "w1"))
	}
	f.endAll(router.Completed, ids[:9]...)
	f.endAll(router.Failed, ids[9])
	// Released 100 s ago; the first five were under way from 90 to 60 s ago, the next
	// five from 70 to 40 s ago, two are since 10 s ago: 50 s and 10 s. All of it is told
	// from one moment, as the test itself takes its time.
	base := f.now()
	ago := func(seconds int) time.Time { return base.Add(-time.Duration(seconds) * time.Second) }
	f.change(`update batches set created_at = $1`, ago(100))
	f.change(`update sessions set dispatched_at = $2, first_admitted_at = $3 where session_id = any($1)`, ids[:5], ago(90), ago(80))
	f.change(`update samples set ended_at = $2 where session_id = any($1)`, ids[:5], ago(60))
	f.change(`update sessions set dispatched_at = $2, first_admitted_at = $3 where session_id = any($1)`, ids[5:10], ago(70), ago(50))
	f.change(`update samples set ended_at = $2 where session_id = any($1)`, ids[5:10], ago(40))
	f.change(`update sessions set dispatched_at = $2 where session_id = any($1)`, ids[10:], ago(10))
	f.decide(f.hold(ids[11], 0, router.AtCap))
	for version, secondsAgo := range []int{80, 40, 30} {
		must(t, f.AdvancePolicyVersion(t.Context(), pool, int64(version+1)))
		f.change(`update weight_updates set advanced_at = $2 where policy_version = $1`, version+1, ago(secondsAgo))
	}
	page, err := f.Samples(t.Context(), store.SampleQuery{RunID: f.run.ID, Consumer: "trainer", Limit: 7})
	must(t, err)
	_, err = f.Ack(t.Context(), f.run.ID, "trainer", page.Samples[2].Cursor)
	must(t, err)
	f.change(`update consumer_marks set at = $1 where kind = 'acknowledged'`, ago(35))
	_, err = f.Ack(t.Context(), f.run.ID, "trainer", page.Samples[6].Cursor)
	must(t, err)

	p := f.pace()
	since := f.now().Sub(base).Seconds()
	// What goes on has gone on since that moment; the rest stands.
	near := func(what string, got, want, goneOn float64) {
		t.Helper()
		if got < want-0.001 || got > want+goneOn+0.001 {
			t.Errorf("%s is %v, want %v and at most %v more", what, got, want, goneOn)
		}
	}
	near("busy", p.BusySeconds, 60, since)
	// Five took 20 s and four 10 s; the tenth failed.
	near("mean service", p.ServiceMeanSeconds, 140.0/9, 0)
	near("since the last ending", p.SecondsSinceEnded, 40, since)
	// From the release 100 s ago to 30 s ago in three versions.
	near("between versions", p.VersionSeconds, 70.0/3, 0)
	near("age of the version", p.VersionAgeSeconds, 30, since)
	// Three were acknowledged between the second version and the third, four after it.
	if p.StepSamples != 4 || p.Unacknowledged != 2 || p.Undelivered != 3 || p.PolicyVersion != 3 {
		t.Errorf("steps of %d, %d unacknowledged, %d undelivered, version %d", p.StepSamples, p.Unacknowledged, p.Undelivered, p.PolicyVersion)
	}
	var ended, outstanding, held, waiting, released int64
	for _, c := range p.Classes {
		ended += c.EndedInWindow
		outstanding += c.Outstanding
		held += c.Held
		waiting += c.Waiting
		released += c.Released
	}
	if ended != 10 || outstanding != 2 || held != 1 || waiting != 1 || released != 12 {
		t.Errorf("%d ended, %d outstanding, %d held, %d waiting, %d released", ended, outstanding, held, waiting, released)
	}
	near("the slowest of agent", p.Classes[0].ServiceP99Seconds, 20, 0)

	// A process that begins anew reads the very same.
	again, err := store.Open(t.Context(), store.Config{URL: f.url})
	if err == nil {
		defer again.Close()
		var q store.PaceFigures
		if q, err = again.Pace(t.Context(), f.run.ID); err == nil && (q.StepSamples != p.StepSamples || q.Unacknowledged != p.Unacknowledged || fmt.Sprint(q.Classes) != fmt.Sprint(p.Classes)) {
			t.Errorf("after a restart it is %+v, was %+v", q, p)
		}
	}
	must(t, err)
}

// TestReleasedCountsFromTheShares: a contract with other shares begins to count anew,
// one that changes something else goes on.
func TestReleasedCountsFromTheShares(t *testing.T) {
	f := newFixture(t, 20)
	f.submit("one", prompted("agent", 8))
	terms := contract(30)
	_, err := f.PutContract(t.Context(), f.run.ID, terms)
	must(t, err)
	if p := f.pace(); p.Classes[0].Released != 8 {
		t.Errorf("%d released under the same shares, want 8", p.Classes[0].Released)
	}
	terms.Classes = []store.ClassShare{{Class: "rlvr", Share: 0.5}, {Class: "agent", Share: 0.5}}
	_, err = f.PutContract(t.Context(), f.run.ID, terms)
	must(t, err)
	f.submit("two", prompted("agent", 2))
	p := f.pace()
	if len(p.Classes) != 2 || p.Classes[0].Class != "rlvr" || p.Classes[1].Released != 2 || p.Classes[1].Outstanding != 10 {
		t.Errorf("under other shares: %+v", p.Classes)
	}
	terms.MaxConcurrency = 7
	_, err = f.PutContract(t.Context(), f.run.ID, terms)
	must(t, err)
	if p := f.pace(); p.Classes[1].Released != 2 || p.MaxConcurrency != 7 {
		t.Errorf("a wider pool began to count anew: %+v", p.Classes)
	}
}

// TestPaceFollowsTheReaderThatAcknowledges: one that began elsewhere than at the
// beginning stands far and has taken nothing; where it alone reads, what was before
// its start waits for nobody.
func TestPaceFollowsTheReaderThatAcknowledges(t *testing.T) {
	f := newFixture(t, 40)
	f.submit("one", repeat("agent", 30)...)
	ids := f.dispatch()
	f.endAll(router.Completed, ids[:9]...)
	f.endAll(router.Failed, ids[9])
	must(t, f.AdvancePolicyVersion(t.Context(), pool, 1))
	page, err := f.Samples(t.Context(), store.SampleQuery{RunID: f.run.ID, Consumer: "trainer"})
	must(t, err)
	_, err = f.Ack(t.Context(), f.run.ID, "trainer", page.Samples[5].Cursor)
	must(t, err)
	read := func(query store.SampleQuery) store.SamplePage {
		t.Helper()
		query.RunID = f.run.ID
		page, err := f.Samples(t.Context(), query)
		must(t, err)
		return page
	}
	read(store.SampleQuery{Consumer: "monitor", Start: store.StartNow})
	if p := f.pace(); p.Unacknowledged != 3 || p.StepSamples != 6 {
		t.Errorf("beside a monitor %d are unacknowledged and steps are of %d, want 3 and 6", p.Unacknowledged, p.StepSamples)
	}

	// The trainer is begun again under a new name, behind what there is.
	must(t, f.RemoveConsumer(t.Context(), f.run.ID, "trainer"))
	must(t, f.RemoveConsumer(t.Context(), f.run.ID, "monitor"))
	read(store.SampleQuery{Consumer: "resumed", Start: store.StartNow})
	if p := f.pace(); p.Unacknowledged != 0 || p.StepSamples != 0 {
		t.Errorf("of a new start %d are unacknowledged and steps are of %d", p.Unacknowledged, p.StepSamples)
	}
	f.endAll(router.Completed, ids[10:15]...)
	page = read(store.SampleQuery{Consumer: "resumed"})
	_, err = f.Ack(t.Context(), f.run.ID, "resumed", page.Samples[3].Cursor)
	must(t, err)
	if p := f.pace(); p.Unacknowledged != 1 || p.StepSamples != 4 {
		t.Errorf("after its first step %d are unacknowledged and steps are of %d, want 1 and 4", p.Unacknowledged, p.StepSamples)
	}
	f.verify()
}

// TestPaceOfAReaderOfWholeGroupsThatBeganLater: what has ended of an open group is
// still to be read, whichever side of the start it ended on.
func TestPaceOfAReaderOfWholeGroupsThatBeganLater(t *testing.T) {
	f := newFixture(t, 40)
	f.submit("one", prompted("agent", 2), prompted("agent", 3), prompted("agent", 4))
	ofSize := map[int][]uuid.UUID{}
	for _, id := range f.dispatch() {
		size := f.session(id).GroupSize
		ofSize[size] = append(ofSize[size], id)
	}
	f.endAll(router.Completed, ofSize[2]...)
	f.endAll(router.Completed, ofSize[3][:2]...)
	page, err := f.Samples(t.Context(), store.SampleQuery{RunID: f.run.ID, Consumer: "resumed", WholeGroups: true, Start: store.StartNow})
	must(t, err)
	if len(page.Samples) != 0 {
		t.Fatalf("behind the end are %d samples", len(page.Samples))
	}
	if p := f.pace(); p.Unacknowledged != 2 {
		t.Errorf("%d are unacknowledged, want the 2 of the open group", p.Unacknowledged)
	}
	f.endAll(router.Completed, ofSize[3][2:]...)
	f.endAll(router.Completed, ofSize[4][0])
	if p := f.pace(); p.Unacknowledged != 4 {
		t.Errorf("%d are unacknowledged, want a group of 3 and 1 of an open one", p.Unacknowledged)
	}
	page, err = f.Samples(t.Context(), store.SampleQuery{RunID: f.run.ID, Consumer: "resumed", WholeGroups: true})
	must(t, err)
	_, err = f.Ack(t.Context(), f.run.ID, "resumed", page.Next)
	must(t, err)
	if p := f.pace(); p.Unacknowledged != 1 {
		t.Errorf("%d are unacknowledged, want 1 of an open group", p.Unacknowledged)
	}
}
