package store_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"pgregory.net/rapid"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
	"holdfast/workflows/task"
)

// groupModel knows what it asked for, and looks at the rest through the store.
type groupModel struct {
	s       *store.Store
	run     store.Run
	policy  store.GroupPolicy
	spare   int
	refills *int

	batches int
	limit   int
	// wished are the sessions that the model itself cancelled, rewards those of
	// usable ones.
	wished  map[uuid.UUID]bool
	rewards map[uuid.UUID]*float64

	cursor store.Cursor
	// received is what was delivered, in order; acked of it are acknowledged.
	received []uuid.UUID
	came     map[uuid.UUID]store.Sample
	acked    int
	// pruned of it are gone.
	pruned int
}

// TestGroupsInAnyOrder: whatever ends in whatever order and however, A = N + Q,
// groups are bounded, do what their policy says, turn out one way, and come whole,
// each sample once.
func TestGroupsInAnyOrder(t *testing.T) {
	s := storetest.New(t)
	runs := 0
	rapid.Check(t, func(rt *rapid.T) {
		runs++
		m := &groupModel{s: s, limit: rapid.IntRange(1, 12).Draw(rt, "concurrency"), wished: map[uuid.UUID]bool{}, rewards: map[uuid.UUID]*float64{}, came: map[uuid.UUID]store.Sample{},
			policy: rapid.SampledFrom([]store.GroupPolicy{store.GroupPartial, store.GroupRefill, store.GroupEnd}).Draw(rt, "policy"),
			spare:  rapid.IntRange(0, 2).Draw(rt, "spare")}
		if m.policy == store.GroupRefill && rapid.Bool().Draw(rt, "bounded") {
			n := rapid.IntRange(0, 3).Draw(rt, "refills")
			m.refills = &n
		}
		c := contract(m.limit)
		c.GroupPolicy, c.SpareMembers, c.GroupRefills = m.policy, m.spare, m.refills
		var err error
		m.run, err = s.CreateRun(rt.Context(), store.NewRun{Name: "groups", Pool: fmt.Sprint("pool-", runs), Contract: c})
		ok(rt, err)
		rt.Repeat(map[string]func(*rapid.T){
			"submit": m.submit, "dispatch": m.dispatch, "end": m.end, "end2": m.end, "cancel": m.cancel,
			"read": m.read, "ack": m.ack, "crash": m.crash, "prune": m.prune, "": m.check,
		})
		m.finish(rt)
	})
}

func (m *groupModel) submit(t *rapid.T) {
	m.batches++
	var tasks []*task.Spec
	for range rapid.IntRange(1, 2).Draw(t, "tasks") {
		tasks = append(tasks, prompted(rapid.SampledFrom([]string{"agent", "rlvr"}).Draw(t, "class"), rapid.IntRange(1, 3).Draw(t, "members")))
	}
	_, _, err := m.s.SubmitBatch(t.Context(), submission(t, m.run.ID, fmt.Sprint(m.batches), tasks...))
	ok(t, err)
}

func (m *groupModel) dispatch(t *rapid.T) {
	_, err := m.s.DispatchQueued(t.Context(), m.run.ID, rapid.IntRange(1, 6).Draw(t, "limit"))
	ok(t, err)
}

func (m *groupModel) sessions(t *rapid.T) []store.Session {
	sessions, err := m.s.Sessions(t.Context(), store.SessionQuery{RunID: m.run.ID, Limit: 1_000})
	ok(t, err)
	return sessions
}

func (m *groupModel) pick(t *rapid.T) store.Session {
	sessions := m.sessions(t)
	if len(sessions) == 0 {
		t.Skip("no sessions")
	}
	return rapid.SampledFrom(sessions).Draw(t, "session")
}

func (m *groupModel) end(t *rapid.T) {
	session := m.pick(t)
	m.endAs(t, session, rapid.SampledFrom([]router.EndStatus{router.Completed, router.Completed, router.Truncated, router.Stale, router.Failed, router.Failed, router.Cancelled}).Draw(t, "status"))
}

func (m *groupModel) endAs(t *rapid.T, session store.Session, status router.EndStatus) {
	ending := store.Ending{SessionID: session.ID, Status: status}
	if status == router.Completed || status == router.Truncated {
		if reward := rapid.IntRange(0, 2).Draw(t, "reward"); reward < 2 {
			value := float64(reward)
			ending.Reward = &value
		}
	}
	already, sample, err := m.s.EndSession(t.Context(), ending)
	ok(t, err)
	if already != (session.State == store.SessionEnded) {
		t.Fatalf("already %v for a session that is %s", already, session.State)
	}
	if !already {
		m.rewards[session.ID] = ending.Reward
		again, repeated, err := m.s.EndSession(t.Context(), ending)
		ok(t, err)
		if !again || repeated.Seq != sample.Seq {
			t.Fatalf("repeated as %v, sample %d of %d", again, repeated.Seq, sample.Seq)
		}
	}
}

func (m *groupModel) cancel(t *rapid.T) {
	session := m.pick(t)
	_, err := m.s.CancelSession(t.Context(), session.ID, "a wish")
	ok(t, err)
	m.wished[session.ID] = m.wished[session.ID] || session.State != store.SessionEnded && !session.CancelRequested
}

func (m *groupModel) read(t *rapid.T) {
	page, err := m.s.Samples(t.Context(), store.SampleQuery{RunID: m.run.ID, Consumer: "trainer", WholeGroups: true, After: m.cursor, Limit: rapid.IntRange(1, 9).Draw(t, "limit")})
	ok(t, err)
	if page.More && len(page.Samples) == 0 {
		t.Fatalf("an empty page says that there is more")
	}
	for _, sample := range page.Samples {
		if sample.GroupOutcome == "" {
			t.Fatalf("session %s came of a group that is not whole", sample.SessionID)
		}
		m.received = append(m.received, sample.SessionID)
		m.came[sample.SessionID] = sample
	}
	m.cursor = page.Next
}

func (m *groupModel) ack(t *rapid.T) {
	if len(m.received) == m.acked {
		t.Skip("nothing new")
	}
	place, err := m.s.Ack(t.Context(), m.run.ID, "trainer", m.cursor)
	ok(t, err)
	m.acked = len(m.received)
	if place.AcknowledgedSeq != int64(m.acked) {
		t.Fatalf("acknowledged %d, want %d", place.AcknowledgedSeq, m.acked)
	}
}

// prune may take only what is acknowledged; that reading goes on shows in read.
func (m *groupModel) prune(t *rapid.T) {
	done, err := m.s.Prune(t.Context(), m.run.ID, atOnce, rapid.IntRange(1, 5).Draw(t, "step"))
	ok(t, err)
	if m.pruned += int(done.Samples); m.pruned > m.acked {
		t.Fatalf("%d samples are pruned, %d are acknowledged", m.pruned, m.acked)
	}
}

func (m *groupModel) crash(*rapid.T) { m.cursor, m.received = "", m.received[:m.acked] }

// groupView is a group as its sessions show it.
type groupView struct {
	size, members, ended, usable, unusable, wished int
	// going are under way and not asked to cancel, or queued; byPolicy were asked to
	// cancel because the group ended.
	going, byPolicy int
}

func (m *groupModel) views(t *rapid.T) map[uuid.UUID]*groupView {
	groups := map[uuid.UUID]*groupView{}
	for _, session := range m.sessions(t) {
		g := groups[session.TaskID]
		if g == nil {
			g = &groupView{size: session.GroupSize}
			groups[session.TaskID] = g
		}
		g.members++
		policy := strings.HasPrefix(session.CancelReason, "the group ended")
		if policy {
			g.byPolicy++
		}
		switch {
		case policy && session.Status == router.Cancelled:
		case session.State != store.SessionEnded:
			if !session.CancelRequested {
				g.going++
			}
			continue
		case session.Status == router.Completed, session.Status == router.Truncated:
			g.usable++
		case session.Status == router.Cancelled, m.wished[session.ID]:
			g.wished++
		default:
			g.unusable++
		}
		g.ended++
	}
	return groups
}

func (m *groupModel) allowed(size int) int {
	switch {
	case m.policy != store.GroupRefill:
		return 0
	case m.refills != nil:
		return *m.refills
	}
	return size
}

func (m *groupModel) check(t *rapid.T) {
	ok(t, m.s.VerifyCounters(t.Context(), m.run.ID))
	backlog, err := m.s.Backlog(t.Context(), m.run.ID)
	ok(t, err)
	for _, c := range backlog {
		if c.Released != c.Ended+c.Backlog || c.Backlog != c.Queued+c.Pending+c.Held+c.Active {
			t.Fatalf("A is not N + Q: %+v", c)
		}
	}
	for id, g := range m.views(t) {
		released := g.size
		if g.size > 1 {
			released += m.spare
		}
		refills := g.members - released
		// A spare member stands in for whatever ended unusable, a wish included.
		short := g.unusable > 0 && released-g.unusable-g.wished < g.size
		switch {
		case refills > max(0, g.unusable+g.wished-(released-g.size)), g.byPolicy > 0 && !short:
			t.Fatalf("group %s did not use its spare members: %d refills, %+v", id, refills, *g)
		case refills < 0 || refills > m.allowed(g.size) || refills > g.unusable:
			t.Fatalf("group %s has %d refills of %d allowed for %d unusable members", id, refills, m.allowed(g.size), g.unusable)
		case g.usable >= g.size && g.going > 0:
			t.Fatalf("group %s is complete and %d members go on", id, g.going)
		case m.policy == store.GroupEnd && g.unusable > 0 && g.wished == 0 && short && g.going > 0:
			t.Fatalf("group %s has ended and %d members go on", id, g.going)
		case m.policy == store.GroupRefill && g.wished == 0 && g.usable < g.size && refills < min(m.allowed(g.size), max(0, g.unusable-(released-g.size))):
			t.Fatalf("group %s has %d refills for %d unusable members", id, refills, g.unusable)
		}
	}
}

// finish ends what is left, refills too, and reads to the end.
func (m *groupModel) finish(t *rapid.T) {
	for left := true; left; {
		left = false
		for _, session := range m.sessions(t) {
			if session.State != store.SessionEnded {
				m.endAs(t, session, rapid.SampledFrom([]router.EndStatus{router.Completed, router.Failed}).Draw(t, "last"))
				left = true
				break
			}
		}
	}
	m.check(t)
	m.crash(t)
	for before := -1; before < len(m.received); {
		before = len(m.received)
		m.read(t)
	}
	m.groupsAreWhole(t)
	m.signalsAreCounted(t)
}

// groupsAreWhole: everything came once, group by group, and says how it turned out.
func (m *groupModel) groupsAreWhole(t *rapid.T) {
	groups := m.views(t)
	seen := map[uuid.UUID]bool{}
	left := 0
	var current uuid.UUID
	for _, id := range m.received {
		sample := m.came[id]
		g := groups[sample.TaskID]
		if seen[id] || left > 0 && sample.TaskID != current || sample.GroupMembers != g.members {
			t.Fatalf("sample of member %d of %d came with %d left of its group, seen %v", sample.Member, g.members, left, seen[id])
		}
		if left == 0 {
			current, left = sample.TaskID, g.members
		}
		left--
		seen[id] = true
		switch {
		case sample.GroupOutcome == store.GroupComplete && g.usable >= g.size:
		case sample.GroupOutcome == store.GroupFellShort && g.usable < g.size:
		case sample.GroupOutcome == store.GroupEnded && m.policy == store.GroupEnd && g.unusable > 0:
		default:
			t.Fatalf("group %+v turned out as %q", *g, sample.GroupOutcome)
		}
	}
	if all := len(m.sessions(t)); len(seen) != all {
		t.Fatalf("%d of %d samples came", len(seen), all)
	}
}

func (m *groupModel) signalsAreCounted(t *rapid.T) {
	rewards := map[uuid.UUID]map[string]int{}
	class := map[uuid.UUID]string{}
	for _, session := range m.sessions(t) {
		class[session.TaskID] = session.Class
		if session.Status == router.Completed || session.Status == router.Truncated {
			if rewards[session.TaskID] == nil {
				rewards[session.TaskID] = map[string]int{}
			}
			text := "none"
			if reward := m.rewards[session.ID]; reward != nil {
				text = fmt.Sprint(*reward)
			}
			rewards[session.TaskID][text]++
		}
	}
	ended, flat := map[string]int64{}, map[string]int64{}
	for id, name := range class {
		ended[name]++
		if len(rewards[id]) == 1 && rewards[id]["none"] == 0 && rewards[id]["0"]+rewards[id]["1"] > 1 {
			flat[name]++
		}
	}
	backlog, err := m.s.Backlog(t.Context(), m.run.ID)
	ok(t, err)
	for _, c := range backlog {
		if c.GroupsEnded != ended[c.Class] || c.GroupsWithoutSignal != flat[c.Class] {
			t.Fatalf("%s: %d groups ended and %d without signal, want %d and %d", c.Class, c.GroupsEnded, c.GroupsWithoutSignal, ended[c.Class], flat[c.Class])
		}
	}
}
