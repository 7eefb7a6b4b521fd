package store_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"pgregory.net/rapid"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
	"holdfast/workflows/task"
)

// model is a dumb copy of what the store should hold: one entry per session.
type model struct {
	s     *store.Store
	run   store.Run
	pool  string
	epoch int64
	clock time.Time

	batches  int
	sessions []*modelSession
	limit    int // of concurrency
	// ended lists sessions in the order of their ends.
	ended []*modelSession

	// consumer's view: what it holds unacknowledged, and how far it acknowledged.
	cursor    store.Cursor
	delivered int
	acked     int
	received  map[uuid.UUID]int
}

type modelSession struct {
	id     uuid.UUID
	class  string
	state  store.SessionState
	status router.EndStatus
	turns  int
}

// TestAnyInterleaving: whatever is done in whatever order, counters agree with
// rows and with the model, samples come once and in order, and nothing that was
// acknowledged comes again.
func TestAnyInterleaving(t *testing.T) {
	s := storetest.New(t)
	runs := 0
	rapid.Check(t, func(rt *rapid.T) {
		runs++
		m := newModel(rt, s, fmt.Sprint("pool-", runs))
		rt.Repeat(map[string]func(*rapid.T){
			"submit":     m.submit,
			"dispatch":   m.dispatch,
			"admit":      m.admit,
			"hold":       m.hold,
			"unprotect":  m.unprotect,
			"commit":     m.commit,
			"end":        m.end,
			"cancel":     m.cancel,
			"read":       m.read,
			"ack":        m.ack,
			"crash":      m.crash,
			"contract":   m.contract,
			"submitBad":  m.submitBad,
			"staleEpoch": m.staleEpoch,
			"":           m.check,
		})
		m.finish(rt)
	})
}

func ok(t *rapid.T, err error) {
	if err != nil {
		t.Fatalf("%v", err)
	}
}

func newModel(t *rapid.T, s *store.Store, pool string) *model {
	m := &model{s: s, pool: pool, clock: time.Now(), limit: rapid.IntRange(1, 12).Draw(t, "concurrency"), received: map[uuid.UUID]int{}}
	var err error
	m.run, err = s.CreateRun(t.Context(), store.NewRun{Name: "property", Pool: pool, Contract: contract(m.limit)})
	ok(t, err)
	m.epoch, _, err = s.AcquirePool(t.Context(), pool, "owner", 3_600)
	ok(t, err)
	return m
}

// pick draws a session in one of the states, or skips the action.
func (m *model) pick(t *rapid.T, states ...store.SessionState) *modelSession {
	var candidates []*modelSession
	for _, session := range m.sessions {
		if slices.Contains(states, session.state) {
			candidates = append(candidates, session)
		}
	}
	if len(candidates) == 0 {
		t.Skip("no session in", states)
	}
	return rapid.SampledFrom(candidates).Draw(t, "session")
}

func (m *model) live() int {
	n := 0
	for _, session := range m.sessions {
		if session.state != store.SessionQueued && session.state != store.SessionEnded {
			n++
		}
	}
	return n
}

func (m *model) submit(t *rapid.T) {
	m.batches++
	key := fmt.Sprint("batch-", m.batches)
	var tasks []*task.Spec
	for range rapid.IntRange(1, 4).Draw(t, "tasks") {
		tasks = append(tasks, prompted(rapid.SampledFrom([]string{"agent", "rlvr", "rlhf"}).Draw(t, "class"), rapid.IntRange(1, 3).Draw(t, "members")))
	}
	batch, _, err := m.s.SubmitBatch(t.Context(), submission(t, m.run.ID, key, tasks...))
	ok(t, err)
	again, replayed, err := m.s.SubmitBatch(t.Context(), submission(t, m.run.ID, key, tasks...))
	ok(t, err)
	if !replayed || again.Seq != batch.Seq || batch.Seq != int64(m.batches) {
		t.Fatalf("batch %+v, repeated %+v", batch, again)
	}
	released, err := m.s.Sessions(t.Context(), store.SessionQuery{RunID: m.run.ID, BatchID: &batch.ID})
	ok(t, err)
	for _, session := range released {
		m.sessions = append(m.sessions, &modelSession{id: session.ID, class: session.Class, state: store.SessionQueued})
	}
}

func (m *model) submitBad(t *rapid.T) {
	_, _, err := m.s.SubmitBatch(t.Context(), submission(t, m.run.ID, "bad", prompted("agent", 2), prompted("poet", 1)))
	var unknown *store.UnknownClassError
	if !errors.As(err, &unknown) {
		t.Fatalf("a bad batch: %v", err)
	}
}

func (m *model) dispatch(t *rapid.T) {
	limit := rapid.IntRange(1, 6).Draw(t, "limit")
	n, err := m.s.DispatchQueued(t.Context(), m.run.ID, limit)
	ok(t, err)
	want := max(0, min(limit, m.limit-m.live()))
	for _, session := range m.sessions { // in release order
		if want > 0 && session.state == store.SessionQueued {
			session.state = store.SessionDispatched
			want--
			n--
		}
	}
	if n != 0 {
		t.Fatalf("dispatched %d more than expected", n)
	}
}

func (m *model) contract(t *rapid.T) {
	m.limit = rapid.IntRange(1, 12).Draw(t, "concurrency")
	_, err := m.s.PutContract(t.Context(), m.run.ID, contract(m.limit))
	ok(t, err)
}

func (m *model) record(t *rapid.T, kind router.DecisionKind, reason router.Reason, session *modelSession, turn int) error {
	m.clock = m.clock.Add(time.Millisecond)
	return m.s.RecordDecisions(t.Context(), m.pool, m.epoch, []store.DecisionRecord{{
		Decision: router.Decision{Kind: kind, Reason: reason, At: m.clock.UnixNano(), Session: router.SessionID(session.id), Turn: turn, Instance: "w1"},
		Signal:   kind == router.Admit && rapid.Bool().Draw(t, "signal")}})
}

func (m *model) admit(t *rapid.T) {
	session := m.pick(t, store.SessionDispatched, store.SessionHeld, store.SessionActive)
	ok(t, m.record(t, router.Admit, router.NewSession, session, session.turns))
	session.state = store.SessionActive
}

func (m *model) hold(t *rapid.T) {
	session := m.pick(t, store.SessionDispatched, store.SessionHeld, store.SessionActive, store.SessionEnded)
	reason := rapid.SampledFrom([]router.Reason{router.AtCap, router.NoBlocks}).Draw(t, "reason")
	ok(t, m.record(t, router.Hold, reason, session, session.turns))
	if session.state != store.SessionEnded {
		session.state = store.SessionHeld
	}
}

func (m *model) unprotect(t *rapid.T) {
	session := m.pick(t, store.SessionHeld, store.SessionActive, store.SessionEnded)
	ok(t, m.record(t, router.ProtectionEnded, router.PrefixEvicted, session, session.turns))
}

func (m *model) staleEpoch(t *rapid.T) {
	session := m.pick(t, store.SessionDispatched, store.SessionHeld, store.SessionActive)
	former := m.epoch
	var err error
	m.epoch, _, err = m.s.AcquirePool(t.Context(), m.pool, "owner", 3_600)
	ok(t, err)
	current := m.epoch
	m.epoch = former
	err = m.record(t, router.Hold, router.NoInstance, session, session.turns)
	m.epoch = current
	if !errors.Is(err, store.ErrFenced) {
		t.Fatalf("a former epoch: %v", err)
	}
}

func (m *model) commit(t *rapid.T) {
	session := m.pick(t, store.SessionActive, store.SessionEnded)
	number := session.turns
	if session.turns > 0 && rapid.Bool().Draw(t, "repeat") {
		number--
	}
	already, err := m.s.CommitTurn(t.Context(), turn(session.id, number))
	switch {
	case number < session.turns:
		if err != nil || !already {
			t.Fatalf("repeated turn: %v, %v", already, err)
		}
	case session.state == store.SessionEnded:
		if !errors.Is(err, store.ErrSessionEnded) {
			t.Fatalf("a turn after the end: %v", err)
		}
	default:
		ok(t, err)
		session.turns++
	}
}

func (m *model) end(t *rapid.T) {
	session := m.pick(t, store.SessionQueued, store.SessionDispatched, store.SessionHeld, store.SessionActive, store.SessionEnded)
	status := rapid.SampledFrom([]router.EndStatus{router.Completed, router.Truncated, router.Stale, router.Failed, router.Cancelled}).Draw(t, "status")
	already, sample, err := m.s.EndSession(t.Context(), store.Ending{SessionID: session.id, Status: status})
	ok(t, err)
	if already != (session.state == store.SessionEnded) {
		t.Fatalf("already %v for a session that is %s", already, session.state)
	}
	if already {
		status = session.status
	} else {
		m.markEnded(session, status)
	}
	if sample.Status != status || m.ended[sample.Seq-1] != session {
		t.Fatalf("sample %d is %v", sample.Seq, sample.Status)
	}
}

func (m *model) markEnded(session *modelSession, status router.EndStatus) {
	session.state, session.status = store.SessionEnded, status
	m.ended = append(m.ended, session)
}

func (m *model) cancel(t *rapid.T) {
	session := m.pick(t, store.SessionQueued, store.SessionDispatched, store.SessionActive, store.SessionEnded)
	_, err := m.s.CancelSession(t.Context(), session.id, "test")
	ok(t, err)
	if session.state == store.SessionQueued {
		m.markEnded(session, router.Cancelled)
	}
}

// read takes the next page, as a consumer that asks from its own place on.
func (m *model) read(t *rapid.T) {
	limit := rapid.IntRange(1, 4).Draw(t, "limit")
	from := m.acked
	if m.cursor != "" {
		from = max(from, m.delivered)
	}
	page, err := m.s.Samples(t.Context(), store.SampleQuery{RunID: m.run.ID, Consumer: "trainer", After: m.cursor, Limit: limit, WithTokens: true})
	ok(t, err)
	want := m.ended[from:min(len(m.ended), from+limit)]
	if len(page.Samples) != len(want) || page.More != (from+limit < len(m.ended)) {
		t.Fatalf("%d samples after %d of %d, more %v", len(page.Samples), from, len(m.ended), page.More)
	}
	for i, sample := range page.Samples {
		if sample.SessionID != want[i].id || sample.Status != want[i].status || sample.Usage.Turns != want[i].turns {
			t.Fatalf("sample %d is of session %s, %v", sample.Seq, sample.SessionID, sample.Status)
		}
		m.received[sample.SessionID]++
	}
	m.delivered, m.cursor = from+len(want), page.Next
}

func (m *model) ack(t *rapid.T) {
	if m.cursor == "" {
		t.Skip("nothing read")
	}
	place, err := m.s.Ack(t.Context(), m.run.ID, "trainer", m.cursor)
	if m.delivered == 0 && errors.Is(err, store.ErrNotFound) {
		return // it has read empty pages only and is not known yet
	}
	ok(t, err)
	m.acked = max(m.acked, m.delivered)
	if place.AcknowledgedSeq != int64(m.acked) {
		t.Fatalf("acknowledged %d, want %d", place.AcknowledgedSeq, m.acked)
	}
}

// crash makes the consumer forget what it has not acknowledged.
func (m *model) crash(*rapid.T) { m.cursor, m.delivered = "", m.acked }

func (m *model) check(t *rapid.T) {
	ok(t, m.s.VerifyCounters(t.Context(), m.run.ID))
	backlog, err := m.s.Backlog(t.Context(), m.run.ID)
	ok(t, err)
	for _, class := range backlog {
		var want store.ClassBacklog
		want.Class = class.Class
		for _, session := range m.sessions {
			if session.class == class.Class {
				want.Released++
				*map[store.SessionState]*int64{store.SessionQueued: &want.Queued, store.SessionDispatched: &want.Pending,
					store.SessionHeld: &want.Held, store.SessionActive: &want.Active, store.SessionEnded: &want.Ended}[session.state]++
				if session.state == store.SessionEnded {
					*map[router.EndStatus]*int64{router.Completed: &want.Completed, router.Truncated: &want.Truncated, router.Stale: &want.Stale,
						router.Failed: &want.Failed, router.Cancelled: &want.Cancelled}[session.status]++
				}
			}
		}
		want.Backlog = want.Queued + want.Pending + want.Held + want.Active
		class.DrainSeconds, class.OldestHoldSeconds, class.GroupsEnded, class.GroupsWithoutSignal = nil, 0, 0, 0
		if class != want {
			t.Fatalf("backlog %+v, want %+v", class, want)
		}
	}
}

// finish ends what is left and reads to the end: every session has come at least
// once.
func (m *model) finish(t *rapid.T) {
	for _, session := range m.sessions {
		if session.state != store.SessionEnded {
			_, _, err := m.s.EndSession(t.Context(), store.Ending{SessionID: session.id, Status: router.Completed})
			ok(t, err)
			m.markEnded(session, router.Completed)
		}
	}
	m.check(t)
	m.crash(t)
	for from := -1; from < m.delivered; {
		from = m.delivered
		m.read(t)
		m.ack(t)
	}
	for _, session := range m.sessions {
		if m.received[session.id] == 0 {
			t.Fatalf("session %s was never delivered", session.id)
		}
	}
	if m.acked != len(m.sessions) {
		t.Fatalf("%d of %d samples are acknowledged", m.acked, len(m.sessions))
	}
}
