package store_test

import (
	"errors"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
)

func (f *fixture) kinds(id uuid.UUID) []store.EventKind {
	f.t.Helper()
	page, err := f.SessionEvents(f.t.Context(), id, 2, 1_000) // after released and dispatched
	must(f.t, err)
	kinds := []store.EventKind{}
	for _, e := range page.Events {
		kinds = append(kinds, e.Kind)
	}
	return kinds
}

func (f *fixture) session(id uuid.UUID) store.Session {
	f.t.Helper()
	session, err := f.Session(f.t.Context(), id)
	must(f.t, err)
	return session
}

func TestDecisionsOfAFormerOwnerAreRefused(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	must(t, f.ReleasePool(ctx, pool, f.epoch))
	epoch, ok, err := f.AcquirePool(ctx, pool, "another", 60)
	must(t, err)
	if !ok || epoch <= f.epoch {
		t.Fatalf("epoch %d after %d, %v", epoch, f.epoch, ok)
	}
	capped := store.DecisionRecord{Decision: router.Decision{Kind: router.CapChanged, Reason: router.Pressure, At: f.tick(1), Instance: "w1"}}
	for _, stale := range []int64{f.epoch, epoch + 1, 0} {
		if err := f.RecordDecisions(ctx, pool, stale, []store.DecisionRecord{f.admit(id, 0, "w1"), capped}); !errors.Is(err, store.ErrFenced) {
			t.Errorf("epoch %d: %v, want ErrFenced", stale, err)
		}
	}
	if err := f.RecordDecisions(ctx, "unowned", 1, []store.DecisionRecord{f.admit(id, 0, "w1")}); !errors.Is(err, store.ErrFenced) {
		t.Errorf("a pool without owner: %v", err)
	}
	if session := f.session(id); session.State != store.SessionDispatched {
		t.Errorf("a fenced decision left %+v", session)
	}
	events, err := f.RouterEvents(ctx, pool, 10)
	if err != nil || len(events) != 0 {
		t.Errorf("a fenced change of the cap left %v, %v", events, err)
	}
	f.epoch = epoch
	f.decide(f.admit(id, 0, "w1"), capped)
	events, err = f.RouterEvents(ctx, pool, 10)
	if err != nil || len(events) != 1 || events[0].Reason != "pressure" {
		t.Errorf("router events %v, %v", events, err)
	}
}

// TestOwnershipWaitsForDecisionsUnderWay: a pool cannot change hands between the
// check of the epoch and the commit of what was decided under it.
func TestOwnershipWaitsForDecisionsUnderWay(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	must(t, f.RenewPool(ctx, pool, f.epoch, 0))
	blocker := f.conn()
	_, err := blocker.Exec(ctx, `begin`)
	must(t, err)
	_, err = blocker.Exec(ctx, `select from sessions where session_id = $1 for update`, id)
	must(t, err)
	recorded, acquired := make(chan error, 1), make(chan error, 1)
	record := f.admit(id, 0, "w1")
	go func() { recorded <- f.RecordDecisions(ctx, pool, f.epoch, []store.DecisionRecord{record}) }()
	f.waitForLockWaiters(1)
	go func() {
		_, _, err := f.AcquirePool(ctx, pool, "another", 60)
		acquired <- err
	}()
	f.waitForLockWaiters(2)
	select {
	case <-acquired:
		t.Error("the pool changed hands under decisions that were being written")
	default:
	}
	_, err = blocker.Exec(ctx, `commit`)
	must(t, err)
	must(t, storetest.Came(t, "the decisions", recorded))
	must(t, storetest.Came(t, "the pool", acquired))
	if err := f.RecordDecisions(ctx, pool, f.epoch, []store.DecisionRecord{f.hold(id, 0, router.AtCap)}); !errors.Is(err, store.ErrFenced) {
		t.Errorf("after the pool changed hands: %v", err)
	}
}

// waitForLockWaiters returns once that many statements wait for a lock, or fails.
func (f *fixture) waitForLockWaiters(n int) {
	f.t.Helper()
	conn := f.conn()
	deadline := time.Now().Add(storetest.Patience)
	for waiting := -1; waiting < n; {
		if time.Now().After(deadline) {
			f.t.Fatalf("%d statements wait for a lock, want %d", waiting, n)
		}
		must(f.t, conn.QueryRow(f.t.Context(),
			`select count(*) from pg_stat_activity, pg_sleep(0.005) where wait_event_type = 'Lock' and datname = current_database() and backend_type = 'client backend'`).Scan(&waiting))
	}
}

// waitForLockOr returns once a statement waits for a lock, or done is closed.
func (f *fixture) waitForLockOr(done <-chan struct{}) {
	f.t.Helper()
	conn := f.conn()
	deadline := time.Now().Add(storetest.Patience)
	for waiting := 0; waiting == 0; {
		select {
		case <-done:
			return
		default:
		}
		if time.Now().After(deadline) {
			f.t.Fatal("no statement waits for a lock")
		}
		must(f.t, conn.QueryRow(f.t.Context(),
			`select count(*) from pg_stat_activity, pg_sleep(0.005) where wait_event_type = 'Lock' and datname = current_database() and backend_type = 'client backend'`).Scan(&waiting))
	}
}

func TestHoldsAreWrittenOnce(t *testing.T) {
	f := newFixture(t, 10)
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	f.decide(f.hold(id, 0, router.AtCap), f.hold(id, 0, router.AtCap))
	f.decide(f.hold(id, 0, router.AtCap))
	since := f.session(id).HeldSince
	f.decide(f.hold(id, 0, router.BehindOthers))
	session := f.session(id)
	if session.State != store.SessionHeld || session.HoldReason != "behind_others" || session.Holds != 1 || !session.HeldSince.Equal(*since) {
		t.Errorf("held as %+v", session)
	}
	if got := f.kinds(id); !slices.Equal(got, []store.EventKind{store.EventHeld, store.EventHeld}) {
		t.Errorf("events %v", got)
	}
	f.tick(5)
	f.decide(f.admit(id, 0, "w1"))
	if held := f.session(id).Times.HeldSeconds; math.Abs(held-5) > 0.1 {
		t.Errorf("held %v s, want 5", held)
	}
	f.decide(f.hold(id, 0, router.AtCap))
	f.tick(2)
	f.decide(f.admit(id, 0, "w1"), f.admit(id, 0, "w1"))
	session = f.session(id)
	if math.Abs(session.Times.HeldSeconds-7) > 0.1 || session.Holds != 2 || session.State != store.SessionActive {
		t.Errorf("after a second hold: %+v", session)
	}
	if got := f.kinds(id); len(got) != 5 {
		t.Errorf("a repeated admission left an event: %v", got)
	}
}

// TestResidencyCountsAdmissionsOnly: residency and token-seconds grow from an
// admission to the next hold, loss of protection or end, gaps included.
func TestResidencyCountsAdmissionsOnly(t *testing.T) {
	f := newFixture(t, 10)
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	f.decide(f.admit(id, 0, "w1"))
	f.tick(10)
	f.decide(f.hold(id, 0, router.WaitingForWarm))
	f.tick(100)
	f.decide(f.admit(id, 0, "w2"))
	f.tick(5)
	lost := store.DecisionRecord{Decision: router.Decision{Kind: router.ProtectionEnded, Reason: router.InstanceGone, At: f.tick(0), Session: router.SessionID(id), Instance: "w2"}}
	f.decide(lost, lost)
	if _, ok, err := f.Grant(t.Context(), id, 0); err != nil || ok {
		t.Errorf("the grant outlived the protection: %v, %v", ok, err)
	}
	session := f.session(id)
	if math.Abs(session.Times.ResidencySeconds-15) > 0.1 || math.Abs(session.Usage.TokenSeconds-15*3) > 0.3 {
		t.Errorf("residency %v s, %v token-seconds, want 15 and 45", session.Times.ResidencySeconds, session.Usage.TokenSeconds)
	}
	if session.Instance != "" || session.State != store.SessionActive || !slices.Equal(session.Instances, []string{"w1", "w2"}) {
		t.Errorf("session %+v", session)
	}
	if got := f.kinds(id); !slices.Equal(got, []store.EventKind{store.EventAdmitted, store.EventHeld, store.EventAdmitted, store.EventProtectionEnded}) {
		t.Errorf("events %v", got)
	}
}

// TestLateDecisionsAreDropped: the router decides on what it knew; what has
// happened meanwhile wins.
func TestLateDecisionsAreDropped(t *testing.T) {
	f := newFixture(t, 2)
	f.submit("one", repeat("agent", 3)...)
	ids := f.dispatch()
	queued := f.dispatchedByState(store.SessionQueued)[0]
	f.decide(f.admit(ids[0], 0, "w1"))
	f.commit(ids[0], 0)
	f.end(ids[1], router.Cancelled)
	f.decide(f.hold(ids[0], 0, router.AtCap), f.admit(ids[1], 0, "w1"), f.admit(queued, 0, "w1"), f.admit(uuid.New(), 0, "w1"), f.hold(ids[1], 0, router.AtCap))
	if session := f.session(ids[0]); session.State != store.SessionActive {
		t.Errorf("a hold of a committed turn left %s", session.State)
	}
	if session := f.session(ids[1]); session.State != store.SessionEnded || session.Status != router.Cancelled {
		t.Errorf("a decision after the end left %s", session.State)
	}
	if session := f.session(queued); session.State != store.SessionQueued {
		t.Errorf("a decision before the dispatch left %s", session.State)
	}
	f.verify()
}

// TestNumbersThatJSONCannotCarry: an infinite cost must not keep a decision from
// being recorded.
func TestNumbersThatJSONCannotCarry(t *testing.T) {
	f := newFixture(t, 2)
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	record := f.admit(id, 0, "w1")
	record.Numbers.CostSeconds, record.Numbers.KBarBlocks = math.Inf(1), math.NaN()
	f.decide(record)
	if session := f.session(id); session.State != store.SessionActive {
		t.Errorf("the session is %s", session.State)
	}
}

// TestLiveSessions: a new owner finds what it needs to rebuild the ledger.
func TestLiveSessions(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	f.submit("one", prompted("agent", 2), prompted("rlvr", 1), prompted("rlvr", 1), prompted("rlhf", 1))
	ids := f.dispatch()
	var agents []uuid.UUID
	others := map[string]uuid.UUID{}
	for _, id := range ids {
		session := f.session(id)
		if session.Class == "agent" {
			agents = append(agents, id)
		} else {
			others[session.Class] = id
		}
	}
	f.decide(f.admit(agents[0], 0, "w1"), f.hold(agents[1], 0, router.WaitingForSibling))
	f.decide(f.admit(others["rlvr"], 0, "w2"))
	f.commit(others["rlvr"], 0)
	f.decide(f.admit(others["rlhf"], 0, "w2"))
	f.end(others["rlhf"], router.Failed)
	live, err := f.LiveSessions(ctx, pool)
	must(t, err)
	byID := map[uuid.UUID]store.LiveSession{}
	for _, session := range live {
		byID[session.ID] = session
	}
	if len(live) != 3 {
		t.Fatalf("%d live sessions, want 3: %+v", len(live), live)
	}
	if s := byID[agents[0]]; s.Instance != "w1" || !s.Granted || s.Turn != 0 || s.AdmittedAt == nil || s.GroupSize != 2 || s.PromptTokens != 3 || s.ContextTokens != 3 {
		t.Errorf("admitted: %+v", s)
	}
	if s := byID[agents[1]]; s.Instance != "" || s.Granted || s.HeldSince == nil || s.State != store.SessionHeld || s.GroupID != byID[agents[0]].GroupID {
		t.Errorf("held: %+v", s)
	}
	if s := byID[others["rlvr"]]; s.Instance != "w2" || s.Granted || s.Turn != 1 || s.ContextTokens != 5 || s.GroupSize != 1 {
		t.Errorf("between turns: %+v", s)
	}
	if elsewhere, err := f.LiveSessions(ctx, "elsewhere"); err != nil || len(elsewhere) != 0 {
		t.Errorf("another pool has %v, %v", elsewhere, err)
	}
}
