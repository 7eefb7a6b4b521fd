package store_test

import (
	"errors"
	"fmt"
	"maps"
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

	readers []*reader
	// pruned counts the samples whose transcripts are gone.
	pruned int
}

type modelSession struct {
	id     uuid.UUID
	task   uuid.UUID
	class  string
	state  store.SessionState
	status router.EndStatus
	turns  int
}

// TestAnyInterleaving: whatever is done in whatever order, counters agree with
// rows and with the model, every consumer gets every sample at least once and in order,
// nothing that it acknowledged comes again unless it asks for it by an earlier place,
// and what is pruned everyone had acknowledged.
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
			"lookBack":   m.lookBack,
			"prune":      m.prune,
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
	m := &model{s: s, pool: pool, clock: time.Now(), limit: rapid.IntRange(1, 12).Draw(t, "concurrency"),
		readers: []*reader{newReader("trainer"), newReader("logger")}}
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
		m.sessions = append(m.sessions, &modelSession{id: session.ID, task: session.TaskID, class: session.Class, state: store.SessionQueued})
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

// reader is a consumer as the model sees it: what it holds unacknowledged, and how far
// it acknowledged.
type reader struct {
	name      string
	cursor    store.Cursor
	delivered int
	acked     int
	// known: the store has a row for it.
	known bool
	// marks are cursors it was given, by the place that they stand for.
	marks    map[int]store.Cursor
	received map[uuid.UUID]int
}

func newReader(name string) *reader {
	return &reader{name: name, marks: map[int]store.Cursor{}, received: map[uuid.UUID]int{}}
}

// prunable is how far everyone has acknowledged: nothing while nobody reads.
func (m *model) prunable() int {
	least, readers := len(m.ended), 0
	for _, r := range m.readers {
		if r.known {
			least, readers = min(least, r.acked), readers+1
		}
	}
	if readers == 0 {
		return 0
	}
	return least
}

// read takes the next page, as a consumer that asks from its own place on.
func (m *model) read(t *rapid.T) {
	m.readPage(t, rapid.SampledFrom(m.readers).Draw(t, "reader"), rapid.IntRange(1, 4).Draw(t, "limit"))
}

func (m *model) readPage(t *rapid.T, r *reader, limit int) {
	from := r.acked
	if r.cursor != "" {
		from = r.delivered
	}
	page, err := m.s.Samples(t.Context(), store.SampleQuery{RunID: m.run.ID, Consumer: r.name, After: r.cursor, Limit: limit, WithTokens: true})
	if from < m.pruned {
		m.refused(t, err)
		return
	}
	ok(t, err)
	m.compare(t, r, page, from, limit)
	r.delivered, r.cursor = from+len(page.Samples), page.Next
	r.marks[r.delivered] = page.Next
	r.known = true
}

// compare checks a page against the order of the ends.
func (m *model) compare(t *rapid.T, r *reader, page store.SamplePage, from, limit int) {
	want := m.ended[from:min(len(m.ended), from+limit)]
	if len(page.Samples) != len(want) || page.More != (from+limit < len(m.ended)) {
		t.Fatalf("%s: %d samples after %d of %d, more %v", r.name, len(page.Samples), from, len(m.ended), page.More)
	}
	for i, sample := range page.Samples {
		if sample.SessionID != want[i].id || sample.Status != want[i].status || sample.Usage.Turns != want[i].turns ||
			len(sample.Tokens.TokenIDs) != 3+max(0, 3*want[i].turns-1) {
			t.Fatalf("%s: sample %d is of session %s, %v", r.name, sample.Seq, sample.SessionID, sample.Status)
		}
		r.received[sample.SessionID]++
	}
}

// refused: what is pruned is refused, and the refusal names where the rest begins.
func (m *model) refused(t *rapid.T, err error) {
	var gone *store.PrunedError
	if !errors.As(err, &gone) {
		t.Fatalf("before place %d, which is pruned: %v", m.pruned, err)
	}
	page, err := m.s.Samples(t.Context(), store.SampleQuery{RunID: m.run.ID, After: gone.First, Limit: 1, WithTokens: true})
	ok(t, err)
	if m.pruned < len(m.ended) && page.Samples[0].SessionID != m.ended[m.pruned].id {
		t.Fatalf("what is left begins with sample %d, %d are pruned", page.Samples[0].Seq, m.pruned)
	}
}

// lookBack reads again from a place that the consumer had, as from a checkpoint.
func (m *model) lookBack(t *rapid.T) {
	r := rapid.SampledFrom(m.readers).Draw(t, "reader")
	if len(r.marks) == 0 {
		t.Skip("no place to go back to")
	}
	from := rapid.SampledFrom(slices.Sorted(maps.Keys(r.marks))).Draw(t, "place")
	page, err := m.s.Samples(t.Context(), store.SampleQuery{RunID: m.run.ID, Consumer: r.name, After: r.marks[from], Limit: 3, WithTokens: true})
	if from < m.pruned {
		m.refused(t, err)
		return
	}
	ok(t, err)
	m.compare(t, r, page, from, 3)
	r.delivered, r.cursor = from+len(page.Samples), page.Next
	r.marks[r.delivered] = page.Next
	r.known = true
}

func (m *model) ack(t *rapid.T) {
	r := rapid.SampledFrom(m.readers).Draw(t, "reader")
	if r.cursor == "" {
		t.Skip("nothing read")
	}
	m.ackOf(t, r)
}

func (m *model) ackOf(t *rapid.T, r *reader) {
	place, err := m.s.Ack(t.Context(), m.run.ID, r.name, r.cursor)
	ok(t, err)
	r.acked = max(r.acked, r.delivered)
	if place.AcknowledgedSeq != int64(r.acked) {
		t.Fatalf("%s: acknowledged %d, want %d", r.name, place.AcknowledgedSeq, r.acked)
	}
}

// crash makes a consumer forget what it has not acknowledged.
func (m *model) crash(t *rapid.T) { rapid.SampledFrom(m.readers).Draw(t, "reader").forget() }

func (r *reader) forget() { r.cursor, r.delivered = "", r.acked }

// prune removes what everyone has acknowledged, in steps, and nothing else.
func (m *model) prune(t *rapid.T) {
	keep := store.Retention{Transcripts: time.Nanosecond, History: time.Nanosecond}
	limit := rapid.IntRange(1, 5).Draw(t, "step")
	want := m.prunable()
	for i := m.pruned; i < want; i++ {
		if !m.groupIsWhole(m.ended[i]) {
			want = i
			break
		}
	}
	want = min(want, m.pruned+limit)
	done, err := m.s.Prune(t.Context(), m.run.ID, keep, limit)
	ok(t, err)
	if done.Samples != int64(want-m.pruned) || done.Histories != done.Samples {
		t.Fatalf("pruned %+v of what came after %d, want up to %d", done, m.pruned, want)
	}
	m.pruned = want
	if want > 0 {
		var gone *store.PrunedError
		if _, err := storetest.SampleOf(t.Context(), m.s, m.ended[want-1].id); !errors.As(err, &gone) {
			t.Fatalf("a pruned sample: %v", err)
		}
	}
}

func (m *model) groupIsWhole(of *modelSession) bool {
	for _, session := range m.sessions {
		if session.task == of.task && session.state != store.SessionEnded {
			return false
		}
	}
	return true
}

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
		class.OldestQueuedSeconds, class.OldestOutstandingSeconds, class.LiveTokenSeconds, class.LiveBlockSeconds = 0, 0, 0, nil
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
	for _, r := range m.readers {
		if m.pruned > 0 && !r.known {
			continue // it began too late to be owed everything
		}
		r.forget()
		for from := -1; from < r.delivered; {
			from = r.delivered
			m.readPage(t, r, 4)
			m.ackOf(t, r)
		}
		for _, session := range m.sessions {
			if r.received[session.id] == 0 {
				t.Fatalf("session %s was never delivered to %s", session.id, r.name)
			}
		}
		if r.acked != len(m.sessions) {
			t.Fatalf("%d of %d samples are acknowledged by %s", r.acked, len(m.sessions), r.name)
		}
	}
	for before := -1; before < m.pruned; {
		before = m.pruned
		m.prune(t)
	}
	m.check(t)
}
