package store_test

import (
	"errors"
	"testing"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
	"holdfast/workflows/task"
)

// due is a task with a deadline.
func due(members int, seconds float64) *task.Spec {
	spec := prompted("agent", members)
	spec.DeadlineSeconds = seconds
	return spec
}

// pass lets all deadlines pass, as a restart after them finds it.
func (f *fixture) pass() {
	f.t.Helper()
	f.change(`update groups set deadline_at = now() - interval '1 second' where deadline_at is not null`)
}

func (f *fixture) expire() int {
	f.t.Helper()
	n, err := f.ExpireDeadlines(f.t.Context(), pool, f.epoch)
	must(f.t, err)
	return n
}

// TestDeadlines: at the deadline queued members end as stale at once, those under way
// are asked to, those that ended before stand; each policy then does what it says, and
// nothing is released any more.
func TestDeadlines(t *testing.T) {
	for _, c := range []struct {
		policy  store.GroupPolicy
		outcome store.GroupOutcome
	}{{store.GroupPartial, store.GroupFellShort}, {store.GroupRefill, store.GroupFellShort}, {store.GroupEnd, store.GroupEnded}} {
		t.Run(string(c.policy), func(t *testing.T) {
			f := grouped(t, 3, c.policy, 0, nil)
			f.submit("one", due(5, 60), prompted("rlvr", 1))
			f.dispatch()
			m := f.membersOf("agent")
			if at := m[0].DeadlineAt; at == nil || at.Sub(m[0].ReleasedAt).Seconds() != 60 {
				t.Fatalf("released at %v, due at %v", m[0].ReleasedAt, at)
			}
			f.end(m[0].ID, router.Completed)
			if n := f.expire(); n != 0 {
				t.Fatalf("%d sessions expired before the deadline", n)
			}
			f.pass()
			if n := f.expire(); n != 4 {
				t.Errorf("%d sessions expired, want 4", n)
			}
			if n := f.expire(); n != 0 {
				t.Errorf("%d expired a second time", n)
			}
			m = f.membersOf("agent")
			if len(m) != 5 || m[3].Status != router.Stale || m[4].Status != router.Stale || m[0].Status != router.Completed {
				t.Fatalf("queued members: %+v", m)
			}
			asked := f.messages(store.OutboxCancel)
			if len(asked) != 2 || asked[m[1].ID] == "" || asked[m[2].ID] == "" {
				t.Errorf("asked to end: %v", asked)
			}
			// The one ends as it was asked to; the other's last token was there before.
			f.end(m[1].ID, router.Cancelled)
			f.end(m[2].ID, router.Completed)
			m = f.membersOf("agent")
			if len(m) != 5 || m[1].Status != router.Stale || m[2].Status != router.Completed {
				t.Errorf("members under way: %+v", m)
			}
			if got := f.outcomeOf(m[0].TaskID); got != string(c.outcome) {
				t.Errorf("the group is %q, want %q", got, c.outcome)
			}
			backlog, err := f.Backlog(t.Context(), f.run.ID)
			must(t, err)
			if b := backlog[0]; b.Stale != 3 || b.Expired != 3 || b.Released != b.Ended+b.Backlog || b.Backlog != 0 {
				t.Errorf("backlog: %+v", b)
			}
			must(t, f.VerifyCounters(t.Context(), f.run.ID))
		})
	}
}

// TestDeadlineOfACompleteGroup leaves it complete, and its spare members cancelled.
func TestDeadlineOfACompleteGroup(t *testing.T) {
	f := grouped(t, 10, store.GroupPartial, 1, nil)
	f.submit("one", due(2, 60))
	f.dispatch()
	m := f.members()
	f.end(m[0].ID, router.Completed)
	f.end(m[1].ID, router.Completed)
	f.pass()
	if n := f.expire(); n != 0 {
		t.Errorf("%d members of a complete group expired", n)
	}
	f.end(m[2].ID, router.Cancelled)
	if m = f.members(); m[2].Status != router.Cancelled || f.outcomeOf(m[0].TaskID) != "complete" {
		t.Errorf("%+v", m[2])
	}
}

// TestDeadlinesAreTheOwners: a process that has lost the pool expires nothing.
func TestDeadlinesAreTheOwners(t *testing.T) {
	f := grouped(t, 10, store.GroupPartial, 0, nil)
	f.submit("one", due(2, 60))
	f.pass()
	if _, err := f.ExpireDeadlines(t.Context(), pool, f.epoch-1); !errors.Is(err, store.ErrFenced) {
		t.Errorf("an earlier owner: %v", err)
	}
	if n := f.expire(); n != 2 {
		t.Errorf("%d expired, want 2", n)
	}
}

// TestFreshness: budgets of class and contract are compared with what was measured,
// and what is beyond the staleness bound is counted where it was completed.
func TestFreshness(t *testing.T) {
	f := newFixture(t, 10)
	terms := contract(10)
	bound := 0
	terms.StalenessBound, terms.FreshnessBudgetSeconds, terms.Classes[1].FreshnessBudgetSeconds = &bound, 5, 50
	_, err := f.PutContract(t.Context(), f.run.ID, terms)
	must(t, err)
	f.submit("one", repeat("agent", 3)...)
	ids := f.dispatch()
	f.decide(f.admit(ids[0], 0, "w1"))
	_, err = f.CommitTurn(t.Context(), turn(ids[0], 0))
	must(t, err)
	must(t, f.AdvancePolicyVersion(t.Context(), pool, 2))
	f.change(`update sessions set released_at = now() - interval '9 seconds'`)
	f.end(ids[0], router.Completed)
	f.end(ids[1], router.Completed)
	backlog, err := f.Backlog(t.Context(), f.run.ID)
	must(t, err)
	if b := backlog[0]; b.FreshnessBudgetSeconds != 5 || b.OldestOutstandingSeconds < 9 || b.OverBound != 1 {
		t.Errorf("agent: %+v", b)
	}
	if b := backlog[2]; b.Class != "rlvr" || b.FreshnessBudgetSeconds != 50 {
		t.Errorf("rlvr: %+v", b)
	}
	m, err := f.Metrics(t.Context(), f.run.ID, store.Window{})
	must(t, err)
	if c := m.Classes[0]; c.OverBudget != 2 || c.OverBound != 1 || c.FreshnessBudgetSeconds != 5 || c.BlockSeconds == nil || m.Total.FreshnessBudgetSeconds != 0 {
		t.Errorf("metrics: %+v, total %+v", c, m.Total)
	}
	for _, window := range []store.Window{{}, store.LastSeconds(60)} {
		mixture, err := f.Mixture(t.Context(), f.run.ID, window)
		must(t, err)
		if c := mixture.Classes[0]; c.OverBound != 1 || c.Stale != 0 || c.Completed != 2 {
			t.Errorf("mixture: %+v", c)
		}
	}
	must(t, f.VerifyCounters(t.Context(), f.run.ID))
}

// membersOf are the run's sessions of a class, by member.
func (f *fixture) membersOf(class string) []store.Session {
	f.t.Helper()
	var of []store.Session
	for _, session := range f.members() {
		if session.Class == class {
			of = append(of, session)
		}
	}
	return of
}

func (f *fixture) outcomeOf(group uuid.UUID) (outcome string) {
	f.t.Helper()
	must(f.t, f.conn().QueryRow(f.t.Context(), `select coalesce(outcome, '') from groups where group_id = $1`, group).Scan(&outcome))
	return outcome
}
