package store_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"

	"holdfast/migrations"
	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
	"holdfast/workflows/task"
)

// grouped is a fixture whose contract treats groups so.
func grouped(t testing.TB, maxConcurrency int, policy store.GroupPolicy, spare int, refills *int) *fixture {
	t.Helper()
	f := newFixture(t, maxConcurrency)
	c := contract(maxConcurrency)
	c.GroupPolicy, c.SpareMembers, c.GroupRefills = policy, spare, refills
	_, err := f.PutContract(t.Context(), f.run.ID, c)
	must(t, err)
	return f
}

// members are the sessions of a run's only group, by number.
func (f *fixture) members() []store.Session {
	f.t.Helper()
	sessions, err := f.Sessions(f.t.Context(), store.SessionQuery{RunID: f.run.ID, Limit: 1_000})
	must(f.t, err)
	slices.SortFunc(sessions, func(a, b store.Session) int { return a.Member - b.Member })
	return sessions
}

func (f *fixture) reward(id uuid.UUID, reward float64) store.Sample {
	f.t.Helper()
	_, sample, err := f.EndSession(f.t.Context(), store.Ending{SessionID: id, Status: router.Completed, Reward: &reward})
	must(f.t, err)
	return sample
}

// messages are the sessions that the outbox has a message for, with its reason.
func (f *fixture) messages(kind store.OutboxKind) map[uuid.UUID]string {
	f.t.Helper()
	rows, err := f.ClaimOutbox(f.t.Context(), 1_000, 0)
	must(f.t, err)
	found := map[uuid.UUID]string{}
	for _, row := range rows {
		if row.Kind == kind {
			found[row.SessionID] = row.Reason
		}
	}
	return found
}

func TestAnUnusableMemberEndsItsGroup(t *testing.T) {
	f := grouped(t, 3, store.GroupEnd, 0, nil)
	f.submit("one", prompted("agent", 4))
	f.dispatch()
	m := f.members()
	f.end(m[0].ID, router.Truncated)
	f.end(m[1].ID, router.Stale)
	const reason = "the group ended: member 1 became stale"
	m = f.members()
	if m[3].State != store.SessionEnded || m[3].Status != router.Cancelled || m[3].Problem != reason {
		t.Errorf("the queued member is %+v", m[3])
	}
	if m[2].State != store.SessionDispatched || !m[2].CancelRequested || m[2].CancelReason != reason || f.messages(store.OutboxCancel)[m[2].ID] != reason {
		t.Errorf("the member under way is %+v", m[2])
	}
	f.verify()
	last := f.end(m[2].ID, router.Cancelled)
	if last.Problem != reason || last.GroupOutcome != store.GroupEnded || last.GroupMembers != 4 {
		t.Errorf("its sample is %+v", last)
	}
	f.verify()
}

func TestARefillTakesTheFailedMembersPlace(t *testing.T) {
	two := 2
	f := grouped(t, 2, store.GroupRefill, 0, &two)
	ctx := t.Context()
	f.submit("one", prompted("agent", 2))
	f.submit("two", prompted("rlvr", 2))
	ids := f.dispatch()
	must(t, f.AdvancePolicyVersion(ctx, pool, 5))
	for range 2 { // the repeated ending releases nothing
		_, _, err := f.EndSession(ctx, store.Ending{SessionID: ids[0], Status: router.Failed})
		must(t, err)
	}
	batch, err := f.Batches(ctx, f.run.ID, 0, 1)
	must(t, err)
	group := func() []store.Session {
		t.Helper()
		var all []store.Session
		query := store.SessionQuery{RunID: f.run.ID, BatchID: &batch[0].ID, Limit: 1}
		for {
			page, err := f.Sessions(ctx, query)
			must(t, err)
			if len(page) == 0 {
				return all
			}
			all, query.After = append(all, page[0]), &page[0].ID
		}
	}
	m := group()
	if len(m) != 3 {
		t.Fatalf("%d members are listed one by one, want 3", len(m))
	}
	slices.SortFunc(m, func(a, b store.Session) int { return a.Member - b.Member })
	refill := m[2]
	if refill.ID != store.SessionID(refill.TaskID, 2) || refill.State != store.SessionDispatched || refill.PolicyVersion != 5 || refill.GroupSize != 2 {
		t.Errorf("the refill is %+v", refill)
	}
	if _, starts := f.messages(store.OutboxStart)[refill.ID]; !starts {
		t.Error("nothing starts the refill")
	}
	history, err := f.SessionEvents(ctx, refill.ID, 0, 10)
	must(t, err)
	if len(history.Events) != 2 || !strings.Contains(string(history.Events[0].Detail), ids[0].String()) || history.Events[1].Kind != store.EventDispatched {
		t.Errorf("its history is %+v", history.Events)
	}
	history, err = f.SessionEvents(ctx, ids[0], 0, 10)
	must(t, err)
	if last := history.Events[len(history.Events)-1]; !strings.Contains(string(last.Detail), refill.ID.String()) {
		t.Errorf("the failed member's end does not name its refill: %s", last.Detail)
	}
	mixture, err := f.Mixture(ctx, f.run.ID, store.LastSeconds(600))
	must(t, err)
	if agent := mixture.Classes[0]; agent.Released != 3 {
		t.Errorf("over a window %d of the class are released, want 3", agent.Released)
	}
	f.verify()

	// No slot was won by it: the other batch waits still.
	if n, err := f.DispatchQueued(ctx, f.run.ID, 10); err != nil || n != 0 {
		t.Fatalf("dispatched %d, %v", n, err)
	}
	f.end(refill.ID, router.Stale)
	f.end(store.SessionID(refill.TaskID, 3), router.Failed) // the last that the contract allows
	if m := group(); len(m) != 4 {
		t.Errorf("%d members, want 4", len(m))
	}
	sample := f.end(ids[1], router.Completed)
	if sample.GroupOutcome != store.GroupFellShort || sample.GroupMembers != 4 {
		t.Errorf("the group turned out as %q with %d members", sample.GroupOutcome, sample.GroupMembers)
	}
	if n, err := f.DispatchQueued(ctx, f.run.ID, 10); err != nil || n != 2 {
		t.Errorf("dispatched %d, %v", n, err)
	}
	f.verify()
}

func TestARefillOfAQueuedMemberStandsInItsPlace(t *testing.T) {
	f := grouped(t, 1, store.GroupRefill, 0, nil)
	f.submit("one", prompted("agent", 2))
	f.submit("two", prompted("rlvr", 1))
	live := f.dispatch()[0]
	queued := f.dispatchedByState(store.SessionQueued)[0]
	f.end(queued, router.Failed)
	f.verify()
	f.end(live, router.Completed)
	next := f.session(f.dispatch()[0])
	if next.Class != "agent" || next.Member != 2 {
		t.Errorf("dispatched next is %+v", next)
	}
	f.verify()
}

// TestAWishedEndTriggersNothing: what the trainer cancels is not refilled, however
// it ends, nor is anything in a run that has ended.
func TestAWishedEndTriggersNothing(t *testing.T) {
	for _, policy := range []store.GroupPolicy{store.GroupRefill, store.GroupEnd} {
		f := grouped(t, 4, policy, 0, nil)
		f.submit("one", prompted("agent", 4))
		f.dispatch()
		m := f.members()
		f.end(m[0].ID, router.Cancelled)
		_, err := f.CancelSession(t.Context(), m[1].ID, "enough")
		must(t, err)
		f.end(m[1].ID, router.Failed)
		m = f.members()
		if len(m) != 4 || m[2].CancelRequested {
			t.Errorf("%s: a wish made %d members, member 2 %+v", policy, len(m), m[2])
		}
		_, err = f.EndRun(t.Context(), f.run.ID)
		must(t, err)
		f.end(m[2].ID, router.Failed)
		if m := f.members(); len(m) != 4 {
			t.Errorf("%s: an ended run has %d members", policy, len(m))
		}
		f.end(m[3].ID, router.Cancelled)
		f.verify()
	}
}

func TestSpareMembersStandIn(t *testing.T) {
	for _, policy := range []store.GroupPolicy{store.GroupPartial, store.GroupRefill, store.GroupEnd} {
		f := grouped(t, 5, policy, 2, nil)
		batch := f.submit("one", prompted("agent", 3), prompted("rlvr", 1))
		if batch.Sessions != 6 {
			t.Fatalf("%d sessions, want 3 with 2 to spare and 1 without", batch.Sessions)
		}
		f.dispatch()
		var m []store.Session
		for _, session := range f.members() {
			if session.Class == "agent" {
				m = append(m, session)
			}
		}
		f.end(m[0].ID, router.Failed)
		if now := f.members(); len(now) != 6 {
			t.Errorf("%s: a failure with members to spare made %d sessions", policy, len(now))
		}
		for _, k := range []int{4, 2, 1} {
			f.end(m[k].ID, router.Completed)
		}
		rest := f.session(m[3].ID)
		if rest.CancelReason != "the group is complete" || !rest.CancelRequested && rest.Status != router.Cancelled {
			t.Errorf("%s: the member too many is %+v", policy, rest)
		}
		if sample := f.sampleOf(m[1].ID); sample.GroupOutcome != store.GroupComplete {
			t.Errorf("%s: the group turned out as %q", policy, sample.GroupOutcome)
		}
		f.verify()
	}
}

func (f *fixture) sampleOf(id uuid.UUID) store.Sample {
	f.t.Helper()
	sample, err := storetest.SampleOf(f.t.Context(), f.Store, id)
	must(f.t, err)
	return sample
}

func TestGroupsWithoutSignalAreCounted(t *testing.T) {
	f := newFixture(t, 100)
	f.submit("one", prompted("agent", 2), prompted("agent", 2), prompted("agent", 2), prompted("agent", 2), prompted("agent", 1))
	byTask := map[uuid.UUID][]uuid.UUID{}
	for _, id := range f.dispatch() {
		task := f.session(id).TaskID
		byTask[task] = append(byTask[task], id)
	}
	var pairs [][]uuid.UUID
	for _, ids := range byTask {
		if len(ids) == 2 {
			pairs = append(pairs, ids)
		} else {
			f.reward(ids[0], 1) // alone, it cannot be compared
		}
	}
	f.reward(pairs[0][0], 0.5)
	f.reward(pairs[0][1], 0.5) // no signal
	f.reward(pairs[1][0], 0.5)
	f.reward(pairs[1][1], 1)
	f.reward(pairs[2][0], 1)
	f.end(pairs[2][1], router.Failed) // nothing to compare with
	f.reward(pairs[3][0], 1)
	f.end(pairs[3][1], router.Completed) // not scored
	backlog, err := f.Backlog(t.Context(), f.run.ID)
	must(t, err)
	if agent := backlog[0]; agent.GroupsEnded != 5 || agent.GroupsWithoutSignal != 1 {
		t.Errorf("%d groups ended, %d without signal", agent.GroupsEnded, agent.GroupsWithoutSignal)
	}
	f.verify()
}

// TestAMadePromptIsEveryMembers: the ids that an engine made of a text are those of
// spare members and of refills too, whenever these are released.
func TestAMadePromptIsEveryMembers(t *testing.T) {
	f := grouped(t, 10, store.GroupRefill, 1, nil)
	spec := prompted("agent", 2)
	spec.Prompt = task.Prompt{Text: "Two and two?"}
	f.submit("one", spec)
	f.dispatch()
	m := f.members()
	f.end(m[0].ID, router.Failed)
	f.end(m[1].ID, router.Failed) // refilled before the prompt is made
	must(t, f.SetPromptTokens(t.Context(), m[0].TaskID, []int32{7, 8, 9}))
	f.end(m[2].ID, router.Failed) // refilled after
	m = f.members()
	if len(m) != 5 {
		t.Fatalf("%d members, want 5", len(m))
	}
	for _, session := range m[3:] {
		if session.Usage.ContextTokens != 3 {
			t.Errorf("the context of member %d has %d tokens, want 3", session.Member, session.Usage.ContextTokens)
		}
	}
	if ended := m[1].Usage.ContextTokens; ended != 0 {
		t.Errorf("a member that ended before has %d tokens", ended)
	}
	f.verify()
}

// TestMembersEndAtOnce: all members of many groups end at a time, each twice, while
// the router decides about them in other orders. Nothing waits in a circle, and no
// group gets a member too many.
func TestMembersEndAtOnce(t *testing.T) {
	for _, policy := range []store.GroupPolicy{store.GroupRefill, store.GroupEnd} {
		f := grouped(t, 400, policy, 1, nil)
		for n := range 12 {
			f.submit(fmt.Sprint(n), prompted("agent", 4), prompted("rlvr", 3))
		}
		for range 12 { // refills come up again
			ids := f.dispatch()
			if len(ids) == 0 {
				break
			}
			rounds := make([][]store.DecisionRecord, 10)
			for n := range rounds {
				for _, id := range ids {
					rounds[n] = append(rounds[n], f.hold(id, 0, []router.Reason{router.AtCap, router.NoBlocks}[n%2]))
				}
			}
			work := make(chan uuid.UUID, 2*len(ids))
			for _, id := range append(ids, ids...) {
				work <- id
			}
			close(work)
			var wait sync.WaitGroup
			wait.Go(func() {
				for _, records := range rounds {
					if err := f.RecordDecisions(context.Background(), pool, f.epoch, records); err != nil {
						t.Error(err)
					}
				}
			})
			for worker := range 4 {
				wait.Go(func() {
					for id := range work {
						status := []router.EndStatus{router.Completed, router.Failed}[(worker+int(id[15]))%2]
						if _, _, err := f.EndSession(context.Background(), store.Ending{SessionID: id, Status: status}); err != nil {
							t.Error(err)
						}
					}
				})
			}
			wait.Wait()
			f.verify()
		}
		counts := map[uuid.UUID]int{}
		for _, session := range f.members() {
			counts[session.TaskID]++
			if session.State != store.SessionEnded {
				t.Errorf("%s: session %s is %s", policy, session.ID, session.State)
			}
			if most := 2*session.GroupSize + 1; counts[session.TaskID] > most {
				t.Errorf("%s: a group of %d has more than %d members", policy, session.GroupSize, most)
			}
		}
	}
}

func TestWholeGroupsInOrder(t *testing.T) {
	f := newFixture(t, 100)
	ctx := t.Context()
	f.submit("one", prompted("agent", 3), prompted("rlvr", 3), prompted("rlhf", 1))
	f.dispatch()
	of := map[string][]uuid.UUID{}
	for _, session := range f.members() {
		of[session.Class] = append(of[session.Class], session.ID)
	}
	whole := store.SampleQuery{Consumer: "trainer", WholeGroups: true, Limit: 4}
	f.end(of["rlvr"][2], router.Completed)
	f.end(of["agent"][0], router.Completed)
	f.end(of["agent"][2], router.Failed)
	if page := f.samples(whole); len(page.Samples) != 0 || page.More {
		t.Fatalf("%d samples of groups that are not whole", len(page.Samples))
	}
	f.end(of["agent"][1], router.Completed)
	f.end(of["rlhf"][0], router.Completed)
	f.end(of["rlvr"][0], router.Completed)
	f.end(of["rlvr"][1], router.Completed)
	first := f.samples(whole)
	want := append(slices.Clone(of["agent"]), of["rlhf"]...)
	if got := sessionsOf(first); !slices.Equal(got, want) || !first.More {
		t.Fatalf("the first page holds %v, want %v", got, want)
	}
	place, err := f.Ack(ctx, f.run.ID, "trainer", first.Samples[1].Cursor)
	must(t, err)
	if place.AcknowledgedSeq != 2 || !place.WholeGroups {
		t.Errorf("acknowledged %+v", place)
	}
	consumed := func() (n int64) {
		for _, window := range []store.Window{{}, store.LastSeconds(600)} {
			m, err := f.Mixture(ctx, f.run.ID, window)
			must(t, err)
			n = 0
			for _, class := range m.Classes {
				n += class.Consumed
			}
		}
		return n
	}
	if n := consumed(); n != 0 {
		t.Errorf("%d count as consumed of a group that is acknowledged in part", n)
	}
	// After a crash the rest of the group comes again, and nothing else of it.
	if got := sessionsOf(f.samples(whole)); !slices.Equal(got, want[2:]) {
		t.Errorf("again came %v, want %v", got, want[2:])
	}
	small := whole
	small.After, small.Limit = first.Next, 2
	if page := f.samples(small); len(page.Samples) != 2 || !page.More {
		t.Errorf("of a group larger than the page came %d, more %v", len(page.Samples), page.More)
	}
	last := whole
	last.After = first.Next
	last.Statuses = []router.EndStatus{router.Failed}
	page := f.samples(last)
	if len(page.Samples) != 0 || page.More {
		t.Errorf("%d failures beyond, more %v", len(page.Samples), page.More)
	}
	_, err = f.Ack(ctx, f.run.ID, "trainer", page.Next)
	must(t, err)
	if n := consumed(); n != 6 {
		t.Errorf("%d count as consumed, want 6", n)
	}
	history, err := f.SessionEvents(ctx, of["agent"][0], 0, 10)
	must(t, err)
	if len(history.Deliveries) != 1 || history.Deliveries[0].AcknowledgedAt == nil {
		t.Errorf("delivered %+v", history.Deliveries)
	}

	// The orders do not mix.
	var conflict *store.ConflictError
	if _, err := f.Samples(ctx, store.SampleQuery{RunID: f.run.ID, Consumer: "trainer"}); !errors.As(err, &conflict) {
		t.Errorf("the other order for the same consumer: %v", err)
	}
	other := f.samples(store.SampleQuery{Consumer: "logger"})
	if _, err := f.Samples(ctx, store.SampleQuery{RunID: f.run.ID, WholeGroups: true, After: other.Next}); !errors.Is(err, store.ErrUnknownCursor) {
		t.Errorf("a cursor of the other order: %v", err)
	}
	if _, err := f.Ack(ctx, f.run.ID, "logger", page.Next); !errors.Is(err, store.ErrUnknownCursor) {
		t.Errorf("acknowledging in the other order: %v", err)
	}
	if len(other.Samples) != 7 {
		t.Errorf("in completion order come %d samples", len(other.Samples))
	}
	f.verify()
}

func sessionsOf(page store.SamplePage) (ids []uuid.UUID) {
	for _, sample := range page.Samples {
		ids = append(ids, sample.SessionID)
	}
	return ids
}

// TestGroupsReleasedBeforeTheyHadPlaces: the step that brings places gives them to
// groups that ended before it.
func TestGroupsReleasedBeforeTheyHadPlaces(t *testing.T) {
	f := newFixture(t, 100)
	f.submit("one", prompted("agent", 2), prompted("rlvr", 2), prompted("rlhf", 1))
	f.dispatch()
	for _, session := range f.members() {
		switch {
		case session.Class != "rlvr":
			f.reward(session.ID, 1)
		case session.Member == 0:
			f.end(session.ID, router.Completed)
		}
	}
	before, err := f.Backlog(t.Context(), f.run.ID)
	must(t, err)
	for f.has("groups", "place") { // whatever steps lie above that one
		must(t, migrations.Down(t.Context(), f.url))
	}
	must(t, migrations.Up(t.Context(), f.url))
	again := storetest.Open(t, f.url) // the steps have changed what connections had prepared
	must(t, again.VerifyCounters(t.Context(), f.run.ID))
	after, err := again.Backlog(t.Context(), f.run.ID)
	must(t, err)
	for i := range after {
		if after[i].GroupsEnded != before[i].GroupsEnded || after[i].GroupsWithoutSignal != before[i].GroupsWithoutSignal {
			t.Errorf("%+v, was %+v", after[i], before[i])
		}
	}
	page, err := again.Samples(t.Context(), store.SampleQuery{RunID: f.run.ID, WholeGroups: true})
	must(t, err)
	if len(page.Samples) != 3 {
		t.Errorf("%d samples of whole groups, want 3", len(page.Samples))
	}
}

// has tells whether a table has a column.
func (f *fixture) has(table, column string) (has bool) {
	f.t.Helper()
	const query = `select exists (select from information_schema.columns where table_name = $1 and column_name = $2)`
	must(f.t, f.conn().QueryRow(f.t.Context(), query, table, column).Scan(&has))
	return has
}
