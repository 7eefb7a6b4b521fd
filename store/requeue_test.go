package store_test

import (
	"testing"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
)

// TestOwedMessagesAreRequeuedOnce lets a dead owner's relay lose everything, and
// expects each live session's start, each uncommitted grant and each cancellation
// back, and nothing twice.
func TestOwedMessagesAreRequeuedOnce(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	f.submit("one", prompted("agent", 4))
	ids := f.dispatch()
	f.decide(f.admit(ids[0], 0, "w1"), f.admit(ids[1], 0, "w1"), f.hold(ids[2], 0, router.AtCap))
	f.commit(ids[1], 0)
	f.end(ids[3], router.Completed)
	_, err := f.CancelSession(ctx, ids[2], "not needed")
	must(t, err)
	f.exec("delete from outbox")

	added, err := f.RequeueMessages(ctx, f.run.Pool)
	must(t, err)
	again, err := f.RequeueMessages(ctx, f.run.Pool)
	must(t, err)
	if added != 5 || again != 0 {
		t.Fatalf("requeued %d messages, then %d: want 3 starts, 1 grant, 1 cancellation, then none", added, again)
	}
	rows, err := f.ClaimOutbox(ctx, 100, 60)
	must(t, err)
	count := map[store.OutboxKind]int{}
	for _, row := range rows {
		count[row.Kind]++
		if row.SessionID == ids[3] {
			t.Errorf("a %s message for a session that has ended", row.Kind)
		}
		if row.Kind == store.OutboxGrant && (row.SessionID != ids[0] || row.Turn != 0) {
			t.Errorf("a grant of turn %d for session %s", row.Turn, row.SessionID)
		}
	}
	if count[store.OutboxStart] != 3 || count[store.OutboxGrant] != 1 || count[store.OutboxCancel] != 1 {
		t.Fatalf("requeued %v", count)
	}
}

func TestEndedAmongTellsWhichAndHow(t *testing.T) {
	f := newFixture(t, 10)
	f.submit("one", prompted("agent", 2))
	ids := f.dispatch()
	f.end(ids[0], router.Truncated)
	ended, err := f.EndedAmong(t.Context(), append(ids, uuid.New()))
	must(t, err)
	if len(ended) != 1 || ended[0].ID != ids[0] || ended[0].Status != router.Truncated {
		t.Fatalf("ended: %+v, want %s truncated", ended, ids[0])
	}
}
