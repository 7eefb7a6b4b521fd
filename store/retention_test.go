package store_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
)

// atOnce lets go of everything that is done with.
var atOnce = store.Retention{Transcripts: time.Nanosecond, History: time.Nanosecond, EndedRuns: time.Nanosecond}

func (f *fixture) prune(keep store.Retention, limit int) store.Pruned {
	f.t.Helper()
	done, err := f.Prune(f.t.Context(), f.run.ID, keep, limit)
	must(f.t, err)
	return done
}

// readAndAck has a consumer read n samples and acknowledge them.
func (f *fixture) readAndAck(consumer string, n int) store.SamplePage {
	f.t.Helper()
	page := f.samples(store.SampleQuery{Consumer: consumer, Limit: n})
	_, err := f.Ack(f.t.Context(), f.run.ID, consumer, page.Next)
	must(f.t, err)
	return page
}

// sessionsWithTurns releases and ends n sessions of two turns each.
func (f *fixture) sessionsWithTurns(key string, n int) []uuid.UUID {
	f.t.Helper()
	f.submit(key, repeat("agent", n)...)
	ids := f.dispatch()
	for _, id := range ids {
		f.decide(f.admit(id, 0, "w1"))
		f.commit(id, 0)
		f.commit(id, 1)
		f.end(id, router.Completed)
	}
	return ids
}

func (f *fixture) count(table string, ids ...uuid.UUID) (n int) {
	f.t.Helper()
	must(f.t, f.conn().QueryRow(f.t.Context(), `select count(*) from `+table+` where session_id = any($1)`, ids).Scan(&n))
	return n
}

func TestPruneTakesWhatEveryoneHasAcknowledged(t *testing.T) {
	f := newFixture(t, 100)
	ids := f.sessionsWithTurns("one", 6)
	if done := f.prune(atOnce, 100); done.Samples != 0 {
		t.Fatalf("without any consumer %+v was pruned", done)
	}
	f.readAndAck("trainer", 5)
	f.samples(store.SampleQuery{Consumer: "logger", Limit: 2})
	if done := f.prune(atOnce, 100); done.Samples != 0 {
		t.Fatalf("a consumer has acknowledged nothing, and %+v was pruned", done)
	}
	first := f.readAndAck("logger", 4)
	if done := f.prune(store.Retention{Transcripts: time.Hour, History: time.Hour}, 100); done.Samples != 0 {
		t.Fatalf("nothing is an hour old, and %+v was pruned", done)
	}
	samples, histories, err := f.Prunable(t.Context(), f.run.ID, atOnce)
	must(t, err)
	if samples != 4 || histories != 4 {
		t.Errorf("counted %d samples and %d histories beforehand", samples, histories)
	}
	before, err := f.Mixture(t.Context(), f.run.ID, store.Window{})
	must(t, err)
	done := f.prune(atOnce, 3)
	if done.Samples != 3 || done.Rows["segments"] != 9 || done.Rows["turns"] != 6 || done.Rows["session_events"] == 0 {
		t.Errorf("a step of 3 pruned %+v", done)
	}
	if done := f.prune(atOnce, 3); done.Samples != 1 || done.Histories != 1 {
		t.Errorf("the rest was %+v", done)
	}
	for _, table := range []string{"segments", "turns", "session_events"} {
		if gone, kept := f.count(table, ids[:4]...), f.count(table, ids[4:]...); gone != 0 || kept == 0 {
			t.Errorf("%s: %d rows of pruned sessions, %d of the others", table, gone, kept)
		}
	}
	f.verify()
	after, err := f.Mixture(t.Context(), f.run.ID, store.Window{})
	must(t, err)
	if fmt.Sprint(before) != fmt.Sprint(after) {
		t.Errorf("the mixture was %+v, is %+v", before, after)
	}
	f.refusesPruned(first, ids)
}

// refusesPruned: four samples are gone, of which first holds the last ones.
func (f *fixture) refusesPruned(first store.SamplePage, ids []uuid.UUID) {
	t := f.t
	t.Helper()
	var gone *store.PrunedError
	for name, query := range map[string]store.SampleQuery{
		"a new reader": {Consumer: "late"}, "a reader without a name": {}, "an old cursor": {Consumer: "trainer", After: first.Samples[0].Cursor},
	} {
		query.RunID = f.run.ID
		if _, err := f.Samples(t.Context(), query); !errors.As(err, &gone) || gone.First != first.Next {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := seqs(f.samples(store.SampleQuery{After: gone.First, WithTokens: true})); fmt.Sprint(got) != "[5 6]" {
		t.Errorf("after the cursor that the refusal names: %v", got)
	}
	if _, err := storetest.SampleOf(t.Context(), f.Store, ids[0]); !errors.As(err, &gone) {
		t.Errorf("a pruned sample: %v", err)
	}
	if pruned, err := f.HistoryPruned(t.Context(), ids[3]); err != nil || !pruned {
		t.Errorf("history of a pruned session: %v, %v", pruned, err)
	}
	if pruned, err := f.HistoryPruned(t.Context(), ids[4]); err != nil || pruned {
		t.Errorf("history of another session: %v, %v", pruned, err)
	}
}

// TestConsumersThatBeginLater: where a new consumer starts is written down at once and
// holds over restarts.
func TestConsumersThatBeginLater(t *testing.T) {
	f := newFixture(t, 100)
	f.sessionsWithTurns("one", 4)
	f.readAndAck("trainer", 2)
	f.prune(atOnce, 10)
	for _, test := range []struct {
		start store.Start
		want  string
	}{{store.StartAvailable, "[3 4]"}, {store.StartNow, "[]"}} {
		name := string(test.start)
		for range 2 { // the second time as after a crash
			if got := seqs(f.samples(store.SampleQuery{Consumer: name, Start: test.start})); fmt.Sprint(got) != test.want {
				t.Errorf("%s: %v", test.start, got)
			}
		}
	}
	f.sessionsWithTurns("two", 1)
	if got := seqs(f.samples(store.SampleQuery{Consumer: "now", Start: store.StartNow})); fmt.Sprint(got) != "[5]" {
		t.Errorf("a consumer that began at 4 gets %v", got)
	}
	f.readAndAck("now", 10)
	f.verify()
	pressure, err := f.BackPressure(t.Context(), f.run.ID)
	must(t, err)
	if pressure.Undelivered != 3 {
		t.Errorf("%d undelivered, the slowest consumer has acknowledged 2 of 5", pressure.Undelivered)
	}
	must(t, f.RemoveConsumer(t.Context(), f.run.ID, "available"))
	must(t, f.RemoveConsumer(t.Context(), f.run.ID, "trainer"))
	if err := f.RemoveConsumer(t.Context(), f.run.ID, "trainer"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("removed twice: %v", err)
	}
	if pressure, err = f.BackPressure(t.Context(), f.run.ID); err != nil || pressure.Undelivered != 0 {
		t.Errorf("with the consumer that is done alone: %+v, %v", pressure, err)
	}
}

// TestPruneKeepsGroupsThatAreOpen: a member that everyone has does not go before its
// group is whole, and a reader of whole groups is waited for by its own order.
func TestPruneKeepsGroupsThatAreOpen(t *testing.T) {
	f := newFixture(t, 100)
	f.submit("one", prompted("agent", 2), prompted("agent", 1))
	ids := f.dispatch()
	f.end(ids[0], router.Completed)
	f.end(ids[2], router.Completed)
	f.readAndAck("trainer", 10)
	if done := f.prune(atOnce, 10); done.Samples != 0 {
		t.Fatalf("half a group was pruned: %+v", done)
	}
	f.end(ids[1], router.Completed)
	f.samples(store.SampleQuery{Consumer: "grouped", WholeGroups: true, Limit: 1})
	f.readAndAck("trainer", 10)
	if done := f.prune(atOnce, 10); done.Samples != 0 {
		t.Fatalf("the reader of groups has acknowledged nothing, and %+v was pruned", done)
	}
	page := f.samples(store.SampleQuery{Consumer: "grouped", WholeGroups: true})
	_, err := f.Ack(t.Context(), f.run.ID, "grouped", page.Next)
	must(t, err)
	if done := f.prune(atOnce, 10); done.Samples != 3 {
		t.Errorf("at the end %+v was pruned", done)
	}
	var gone *store.PrunedError
	if _, err := f.Samples(t.Context(), store.SampleQuery{RunID: f.run.ID, WholeGroups: true}); !errors.As(err, &gone) || gone.First != page.Next {
		t.Errorf("groups that are gone: %v", err)
	}
	var left int
	must(t, f.conn().QueryRow(t.Context(), `select count(*) from tasks where prompt_ids is not null or spec::text <> '{}'`).Scan(&left))
	if left != 0 {
		t.Errorf("%d tasks still have their prompts", left)
	}
	f.verify()
}

// TestPruneEndedRuns: a run that is over long enough waits for nobody, and a process
// that prunes it already is not waited for.
func TestPruneEndedRuns(t *testing.T) {
	f := newFixture(t, 100)
	f.sessionsWithTurns("one", 3)
	_, err := f.EndRun(t.Context(), f.run.ID)
	must(t, err)
	if done := f.prune(store.Retention{Transcripts: time.Nanosecond, EndedRuns: time.Hour}, 10); done.Samples != 0 {
		t.Fatalf("%+v was pruned within the hour", done)
	}
	tx, err := f.conn().Begin(t.Context())
	must(t, err)
	_, err = tx.Exec(t.Context(), `select from run_pruning where run_id = $1 for update`, f.run.ID)
	must(t, err)
	if done := f.prune(atOnce, 10); done.Samples != 0 {
		t.Fatalf("%+v was pruned beside another pruner", done)
	}
	must(t, tx.Rollback(t.Context()))
	runs, err := f.PrunableRuns(t.Context(), pool)
	must(t, err)
	if len(runs) != 1 {
		t.Errorf("%d runs to prune", len(runs))
	}
	if done := f.prune(atOnce, 10); done.Samples != 3 {
		t.Errorf("%+v was pruned", done)
	}
	if runs, err = f.PrunableRuns(t.Context(), pool); err != nil || len(runs) != 0 {
		t.Errorf("%d runs still to prune, %v", len(runs), err)
	}
	f.verify()
}

func TestBackPressure(t *testing.T) {
	f := newFixture(t, 100)
	limited := contract(100)
	limit := 4
	limited.UndeliveredLimit = &limit
	_, err := f.PutContract(t.Context(), f.run.ID, limited)
	must(t, err)
	f.ended(4, router.Completed)
	f.submit("more", repeat("agent", 3)...)
	dispatched := func() int {
		t.Helper()
		n, err := f.DispatchQueued(t.Context(), f.run.ID, 10)
		must(t, err)
		return n
	}
	paused := func() string {
		t.Helper()
		pressure, err := f.BackPressure(t.Context(), f.run.ID)
		must(t, err)
		return pressure.Paused()
	}
	if n := dispatched(); n != 0 || paused() != "undelivered samples 4 of 4" {
		t.Errorf("at the limit %d were dispatched; %q", n, paused())
	}
	f.readAndAck("trainer", 1)
	if n := dispatched(); n != 3 || paused() != "" {
		t.Errorf("at three quarters %d were dispatched; %q", n, paused())
	}
	f.submit("yet more", repeat("agent", 1)...)
	for _, id := range f.live() {
		f.end(id, router.Failed)
	}
	if n := dispatched(); n != 0 || paused() != "undelivered samples 6 of 4" {
		t.Errorf("beyond the limit %d were dispatched; %q", n, paused())
	}
	f.readAndAck("trainer", 2)
	if n := dispatched(); n != 0 {
		t.Errorf("below the limit but above the lower mark %d were dispatched", n)
	}
	limited.UndeliveredLimit = nil
	_, err = f.PutContract(t.Context(), f.run.ID, limited)
	must(t, err)
	if n := dispatched(); n != 1 || paused() != "" {
		t.Errorf("without a limit %d were dispatched; %q", n, paused())
	}
	f.verify()
}

// TestBackPressureOfWholeGroups: members of open groups are not held against a reader
// that cannot have them yet, or it would wait for ever.
func TestBackPressureOfWholeGroups(t *testing.T) {
	f := newFixture(t, 100)
	limited := contract(100)
	limit := 2
	limited.UndeliveredLimit, limited.MaxConcurrency = &limit, 3
	_, err := f.PutContract(t.Context(), f.run.ID, limited)
	must(t, err)
	f.submit("first", prompted("agent", 1))
	f.end(f.dispatch()[0], router.Completed)
	page := f.samples(store.SampleQuery{Consumer: "trainer", WholeGroups: true})
	_, err = f.Ack(t.Context(), f.run.ID, "trainer", page.Next)
	must(t, err)
	f.submit("group", prompted("agent", 4))
	for _, id := range f.dispatch() {
		f.end(id, router.Completed)
	}
	if ids := f.dispatch(); len(ids) != 1 {
		t.Errorf("the last member of a group is not dispatched: %v", ids)
	}
}

// TestAReaderCountsFromItsFirstLook: one that has found nothing yet is waited for by
// pruning, and keeps dispatch from standing still for what it could not have.
func TestAReaderCountsFromItsFirstLook(t *testing.T) {
	f := newFixture(t, 100)
	limited := contract(2)
	limit := 2
	limited.UndeliveredLimit = &limit
	_, err := f.PutContract(t.Context(), f.run.ID, limited)
	must(t, err)
	f.submit("group", prompted("agent", 4))
	for _, id := range f.dispatch() {
		f.end(id, router.Completed)
	}
	if ids := f.dispatch(); len(ids) != 0 {
		t.Fatalf("without a reader %d more than the limit were dispatched", len(ids))
	}
	listener, err := f.Listen(t.Context())
	must(t, err)
	dispatch := listener.WaitFor(store.DispatchTopic())
	page := f.samples(store.SampleQuery{Consumer: "trainer", WholeGroups: true})
	if len(page.Samples) != 0 {
		t.Fatalf("%d samples of an open group", len(page.Samples))
	}
	woken(t, "a new reader", dispatch)
	rest := f.dispatch()
	if len(rest) != 2 {
		t.Fatalf("%d of the other two members were dispatched", len(rest))
	}
	for _, id := range rest {
		f.end(id, router.Completed)
	}
	page = f.samples(store.SampleQuery{Consumer: "monitor", WholeGroups: true})
	if len(page.Samples) != 4 {
		t.Fatalf("%d samples of the group", len(page.Samples))
	}
	_, err = f.Ack(t.Context(), f.run.ID, "monitor", page.Next)
	must(t, err)
	if done := f.prune(store.Retention{Transcripts: time.Nanosecond}, 10); done.Samples != 0 {
		t.Errorf("%d samples were pruned before the trainer", done.Samples)
	}
	if page = f.samples(store.SampleQuery{Consumer: "trainer", WholeGroups: true}); len(page.Samples) != 4 {
		t.Errorf("the trainer got %d samples", len(page.Samples))
	}
	f.verify()
}

// live lists the sessions that are dispatched.
func (f *fixture) live() []uuid.UUID {
	f.t.Helper()
	sessions, err := f.Sessions(f.t.Context(), store.SessionQuery{RunID: f.run.ID, State: store.SessionDispatched, Limit: 1_000})
	must(f.t, err)
	ids := make([]uuid.UUID, len(sessions))
	for i, session := range sessions {
		ids[i] = session.ID
	}
	return ids
}

func TestSamplesOfOneBatch(t *testing.T) {
	f := newFixture(t, 100)
	one := f.submit("one", repeat("agent", 2)...)
	f.submit("two", repeat("agent", 2)...)
	ids := f.dispatch()
	for _, i := range []int{2, 0, 3, 1} {
		f.end(ids[i], router.Completed)
	}
	if got := seqs(f.samples(store.SampleQuery{BatchID: &one.ID})); fmt.Sprint(got) != "[2 4]" {
		t.Errorf("of the first batch came %v", got)
	}
	page := f.samples(store.SampleQuery{BatchID: &one.ID, Limit: 1})
	if got := seqs(f.samples(store.SampleQuery{BatchID: &one.ID, After: page.Next})); fmt.Sprint(got) != "[4]" || !page.More {
		t.Errorf("on the next page came %v", got)
	}
	var field *store.FieldError
	if _, err := f.Samples(t.Context(), store.SampleQuery{RunID: f.run.ID, BatchID: &one.ID, Consumer: "trainer"}); !errors.As(err, &field) || field.Path != "batch" {
		t.Errorf("one batch for a consumer: %v", err)
	}
}

// TestFirstPageBesideAPruner: a new consumer whose first page a prune overtakes is
// refused, since what it was given could not be given again.
func TestFirstPageBesideAPruner(t *testing.T) {
	f := newFixture(t, 10)
	f.sessionsWithTurns("one", 3)
	conn := f.conn()
	pruner, err := conn.Begin(t.Context())
	must(t, err)
	_, err = pruner.Exec(t.Context(), `update run_pruning set transcripts_seq = 2 where run_id = $1`, f.run.ID)
	must(t, err)
	refused := make(chan error, 1)
	go func() {
		_, err := f.Samples(t.Context(), store.SampleQuery{RunID: f.run.ID, Consumer: "late", Limit: 1})
		refused <- err
	}()
	// It has its page once it waits for the pruner.
	f.waitForLockWaiters(1)
	must(t, pruner.Commit(t.Context()))
	var gone *store.PrunedError
	if err := storetest.Came(t, "an answer to the reader", refused); !errors.As(err, &gone) {
		t.Fatalf("the page was given: %v", err)
	}
	if got := seqs(f.samples(store.SampleQuery{After: gone.First})); fmt.Sprint(got) != "[3]" {
		t.Errorf("after the cursor that the refusal names: %v", got)
	}
	if consumers, err := f.Consumers(t.Context(), f.run.ID); err != nil || len(consumers) != 0 {
		t.Errorf("consumers %+v, %v", consumers, err)
	}
}
