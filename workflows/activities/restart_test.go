package activities

import (
	"errors"
	"slices"
	"testing"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
)

// beginAgain does with a session what a weight update does under a contract that
// restarts, up to the end of the workflow's run.
func (f *fixture) beginAgain(id uuid.UUID) {
	f.t.Helper()
	_, err := f.conn.Exec(f.t.Context(), `update sessions set stale = true, restarting = true, cancel_requested_at = now() where session_id = $1`, id)
	must(f.t, err)
	if _, _, err := f.EndSession(f.t.Context(), store.Ending{SessionID: id, Status: router.Cancelled}); !errors.Is(err, store.ErrSessionRestarted) {
		f.t.Fatalf("the session ended: %v", err)
	}
}

// TestTurnOfAnAttemptThatWasLeftIsNotKept: the session begins again while a call is
// under way. What that call gives is neither committed nor checkpointed, and does not
// end the new attempt, which generates its own.
func TestTurnOfAnAttemptThatWasLeftIsNotKept(t *testing.T) {
	f := newFixture(t)
	e := newEngines(t)
	a := f.worker(e, &placements{}, 4)
	id := f.session(single(10))
	e.reached = func() {
		e.reached = nil
		f.beginAgain(id)
	}
	if reply, err := a.turn(t.Context(), id, 0, &pulse{}); !errors.Is(err, store.ErrSessionRestarted) {
		t.Fatalf("a turn of the attempt that was left: %+v, %v", reply, err)
	}
	if rows := f.checkpointRows(); rows != 0 {
		t.Errorf("%d checkpoints of it are left", rows)
	}
	reply, err := a.turn(t.Context(), id, 0, &pulse{})
	if status := parsed(t, reply, err); status != router.Truncated {
		t.Errorf("the new attempt ended as %v", status)
	}
	sample := f.end(a, id, reply)
	checkSample(t, e, &sample, 10)
	if sample.Restarts != 1 {
		t.Errorf("the sample counts %d restarts", sample.Restarts)
	}
}

// TestContextOfAnEarlierAttemptIsNotUsed, whichever comes into the cache first.
func TestContextOfAnEarlierAttemptIsNotUsed(t *testing.T) {
	c, err := newContextCache(1 << 20)
	must(t, err)
	id := uuid.New()
	of := func(restarts int) *sessionContext {
		return &sessionContext{work: store.WorkSession{ID: id, Restarts: restarts, Turns: 1}, tokens: []int32{int32(restarts)}}
	}
	c.put(of(1))
	c.put(of(0))
	if got := c.take(id, 1); got == nil || !slices.Equal(got.tokens, []int32{1}) {
		t.Fatalf("the later attempt's context was replaced: %+v", got)
	}
	c.put(of(0))
	c.dropOlder(id, 0)
	c.put(of(1))
	c.dropOlder(id, 1)
	if got := c.takeAny(id); got == nil || got.work.Restarts != 1 {
		t.Fatalf("the context of the present attempt is gone: %+v", got)
	}
	c.put(of(0))
	c.dropOlder(id, 1)
	if got := c.takeAny(id); got != nil {
		t.Fatalf("a context of the attempt that was left is there: %+v", got)
	}
}
