package store_test

import (
	"encoding/json"
	"errors"
	"slices"
	"testing"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
	"holdfast/workflows/task"
)

// restarting is a fixture whose contract begins stale sessions again.
func restarting(t *testing.T, restarts int) *fixture {
	t.Helper()
	f := newFixture(t, 10)
	terms := contract(10)
	bound := 0
	terms.StalenessBound, terms.StalePolicy, terms.MaxRestarts = &bound, store.StaleRestart, &restarts
	_, err := f.PutContract(t.Context(), f.run.ID, terms)
	must(t, err)
	return f
}

// turnAt runs one turn of an attempt.
func (f *fixture) turnAt(id uuid.UUID, number int) {
	f.t.Helper()
	f.decide(f.admit(id, number, "w1"))
	commit := turn(id, number)
	commit.Restarts = f.session(id).Restarts
	_, err := f.CommitTurn(f.t.Context(), commit)
	must(f.t, err)
}

// cancelled is how a workflow that was asked to cancel ends.
func (f *fixture) cancelled(id uuid.UUID) error {
	f.t.Helper()
	_, _, err := f.EndSession(f.t.Context(), store.Ending{SessionID: id, Status: router.Cancelled})
	return err
}

// TestRestart: a session under way that becomes too old begins again from its prompt
// under the new version, as often as the contract allows; then it ends as stale. It
// stays one released session, and A = N + Q at every step.
func TestRestart(t *testing.T) {
	f := restarting(t, 2)
	ctx := t.Context()
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	for attempt := 1; attempt <= 2; attempt++ {
		f.turnAt(id, 0)
		f.turnAt(id, 1)
		must(t, f.AdvancePolicyVersion(ctx, pool, int64(attempt)))
		if asked := f.messages(store.OutboxCancel); asked[id] == "" {
			t.Fatalf("attempt %d was not asked to stop", attempt)
		}
		must(t, f.VerifyCounters(ctx, f.run.ID))
		if err := f.cancelled(id); !errors.Is(err, store.ErrSessionRestarted) {
			t.Fatalf("attempt %d: %v, want a restart", attempt, err)
		}
		// The same ending again, or the cancellation late, changes nothing.
		before := f.session(id)
		if err := f.cancelled(id); !errors.Is(err, store.ErrSessionRestarted) {
			t.Fatalf("the ending repeated: %v", err)
		}
		s := f.session(id)
		if s.State != store.SessionDispatched || s.Restarts != attempt || s.PolicyVersion != int64(attempt) || s.Usage.Turns != 0 || s.Usage.OutputTokens != 0 ||
			s.Usage.ContextTokens != 3 || s.CancelRequested || s.Instance != "" || s.Times.ResidencySeconds <= 0 || s.Restarts != before.Restarts {
			t.Fatalf("begun again: %+v", s)
		}
		if asked := f.messages(store.OutboxCancel); len(asked) != 0 {
			t.Errorf("still asked to stop: %v", asked)
		}
		must(t, f.VerifyCounters(ctx, f.run.ID))
	}
	f.turnAt(id, 0)
	must(t, f.AdvancePolicyVersion(ctx, pool, 3))
	must(t, f.cancelled(id))
	s := f.session(id)
	if s.Status != router.Stale || s.Restarts != 2 {
		t.Fatalf("after its restarts: %+v", s)
	}
	backlog, err := f.Backlog(ctx, f.run.ID)
	must(t, err)
	if b := backlog[0]; b.Restarts != 2 || b.Stale != 1 || b.Released != 1 || b.Backlog != 0 {
		t.Errorf("backlog: %+v", b)
	}
	must(t, f.VerifyCounters(ctx, f.run.ID))
}

// TestRestartLeavesTheOldAttemptOut of the sample and in the history.
func TestRestartLeavesTheOldAttemptOut(t *testing.T) {
	f := restarting(t, 2)
	ctx := t.Context()
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	f.turnAt(id, 0)
	f.turnAt(id, 1)
	must(t, f.AdvancePolicyVersion(ctx, pool, 5))
	if err := f.cancelled(id); !errors.Is(err, store.ErrSessionRestarted) {
		t.Fatal(err)
	}
	again := turn(id, 0)
	again.Restarts = 1
	again.Generated, again.Versions = []int32{40, 41, 42}, nil
	again.PolicyVersion, again.Logprobs = 5, []float32{-1, -2, -3}
	f.decide(f.admit(id, 0, "w2"))
	_, err := f.CommitTurn(ctx, again)
	must(t, err)
	f.end(id, router.Completed)

	page := f.samples(store.SampleQuery{WithTokens: true})
	sample := page.Samples[0]
	if !slices.Equal(sample.Tokens.TokenIDs, []int32{1, 2, 3, 40, 41, 42}) || sample.Staleness != 0 || sample.Usage.OutputTokens != 3 || sample.Restarts != 1 {
		t.Errorf("the sample: %v, staleness %d, %d output tokens, %d restarts", sample.Tokens.TokenIDs, sample.Staleness, sample.Usage.OutputTokens, sample.Restarts)
	}
	history, err := f.SessionEvents(ctx, id, 0, 100)
	must(t, err)
	events := history.Events
	kinds := map[store.EventKind]int{}
	abandoned := 0
	for i, event := range events {
		kinds[event.Kind]++
		if event.Seq != int64(i+1) {
			t.Errorf("event %d has number %d", i+1, event.Seq)
		}
		var detail map[string]any
		if len(event.Detail) > 0 {
			must(t, json.Unmarshal(event.Detail, &detail))
		}
		if detail["abandoned_attempt"] != nil {
			abandoned++
		}
	}
	if kinds[store.EventTurn] != 3 || kinds[store.EventRestarted] != 1 || abandoned != 2 {
		t.Errorf("history: %v, %d abandoned turns", kinds, abandoned)
	}
	var kept int
	must(t, f.conn().QueryRow(ctx, `select sum(tokens) from abandoned_segments where kind = 'generated' and session_id = $1`, id).Scan(&kept))
	if kept != 4 {
		t.Errorf("%d generated tokens of the old attempt are kept, want 4", kept)
	}
	f.readAndAck("trainer", 1)
	if done := f.prune(atOnce, 10); done.Rows["abandoned_turns"] != 2 || f.count("abandoned_segments", id) != 0 {
		t.Errorf("of the old attempt was pruned %+v", done)
	}
	must(t, f.VerifyCounters(ctx, f.run.ID))
}

// TestTheAttemptThatWasLeftWritesNothing: a worker that hung while its session began
// again may wake when the new attempt has come just as far. Its turn, its observation
// and its checkpoint are refused, also as repetitions of what is there.
func TestTheAttemptThatWasLeftWritesNothing(t *testing.T) {
	f := restarting(t, 2)
	ctx := t.Context()
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	f.turnAt(id, 0)
	must(t, f.AdvancePolicyVersion(ctx, pool, 1))
	if err := f.cancelled(id); !errors.Is(err, store.ErrSessionRestarted) {
		t.Fatal(err)
	}
	work, err := f.SessionForWork(ctx, id)
	must(t, err)
	if work.Restarts != 1 {
		t.Fatalf("a worker reads %d restarts", work.Restarts)
	}
	again := turn(id, 0)
	again.Restarts, again.Generated = 1, []int32{40, 41}
	f.decide(f.admit(id, 0, "w2"))
	_, err = f.CommitTurn(ctx, again)
	must(t, err)
	_, err = f.SaveObservation(ctx, store.Observation{SessionID: id, Restarts: 1, Step: 0, IDs: []int32{7}}, nil)
	must(t, err)

	for number := range 2 {
		if _, err := f.CommitTurn(ctx, turn(id, number)); !errors.Is(err, store.ErrSessionRestarted) {
			t.Errorf("turn %d of the old attempt: %v", number, err)
		}
		if _, err := f.SaveObservation(ctx, store.Observation{SessionID: id, Step: number, IDs: []int32{9}}, nil); !errors.Is(err, store.ErrSessionRestarted) {
			t.Errorf("observation %d of the old attempt: %v", number, err)
		}
	}
	late := checkpoint(id, 1, 0, 3, 1, uuid.Nil)
	if _, err := f.SaveCheckpoint(ctx, late); !errors.Is(err, store.ErrSessionRestarted) {
		t.Errorf("a checkpoint of the old attempt: %v", err)
	}
	late.Restarts = 1
	if _, err := f.SaveCheckpoint(ctx, late); err != nil {
		t.Errorf("a checkpoint of the new attempt: %v", err)
	}
	f.turnAt(id, 1)
	f.end(id, router.Completed)
	sample := f.samples(store.SampleQuery{WithTokens: true}).Samples[0]
	if want := []int32{1, 2, 3, 40, 41, 51, 101, 201}; !slices.Equal(sample.Tokens.TokenIDs, want) {
		t.Errorf("the sample is %v, want %v", sample.Tokens.TokenIDs, want)
	}
	f.verify()
}

// TestTurnOfAnotherContextIsRefused: what a worker generated from tokens that are not
// the session's is not its next turn.
func TestTurnOfAnotherContextIsRefused(t *testing.T) {
	f := newFixture(t, 10)
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	f.commit(id, 0)
	wrong := turn(id, 1)
	wrong.PromptTokens++
	var field *store.FieldError
	if _, err := f.CommitTurn(t.Context(), wrong); !errors.As(err, &field) || field.Path != "prompt_tokens" {
		t.Fatalf("a turn of another context: %v", err)
	}
	f.commit(id, 1)
	f.verify()
}

// TestCancellationInTheMiddleOfAWeightUpdate: a wish to cancel that is committed while
// the update waits for the session stands.
func TestCancellationInTheMiddleOfAWeightUpdate(t *testing.T) {
	f := restarting(t, 2)
	ctx := t.Context()
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	f.turnAt(id, 0)
	trainer, err := f.conn().Begin(ctx)
	must(t, err)
	_, err = trainer.Exec(ctx, `update sessions set cancel_requested_at = now(), cancel_reason = 'enough' where session_id = $1`, id)
	must(t, err)
	advanced := make(chan error, 1)
	go func() { advanced <- f.AdvancePolicyVersion(ctx, pool, 1) }()
	f.waitForLockWaiters(1)
	must(t, trainer.Commit(ctx))
	must(t, storetest.Came(t, "the version in force", advanced))
	if s := f.session(id); s.CancelReason != "enough" {
		t.Errorf("asked to end because %q", s.CancelReason)
	}
	must(t, f.cancelled(id))
	if s := f.session(id); s.Status != router.Cancelled || s.Restarts != 0 {
		t.Errorf("ended as %v after %d restarts", s.Status, s.Restarts)
	}
	f.verify()
}

// TestWhatDoesNotRestart: a wish to cancel counts for more, a run that has ended begins
// nothing, a group that is over neither, and a harness's session is not ours to begin.
func TestWhatDoesNotRestart(t *testing.T) {
	for name, c := range map[string]struct {
		spec   *task.Spec
		meant  func(f *fixture, id uuid.UUID)
		status router.EndStatus
	}{
		"cancelled by hand": {meant: func(f *fixture, id uuid.UUID) {
			_, err := f.CancelSession(f.t.Context(), id, "enough")
			must(f.t, err)
		}, status: router.Cancelled},
		"run ended": {meant: func(f *fixture, _ uuid.UUID) {
			_, err := f.EndRun(f.t.Context(), f.run.ID)
			must(f.t, err)
		}, status: router.Cancelled},
		"deadline passed": {spec: due(1, 60), meant: func(f *fixture, _ uuid.UUID) {
			f.pass()
			f.expire()
		}, status: router.Stale},
		"external": {spec: func() *task.Spec {
			spec := prompted("agent", 1)
			spec.Environment = &task.Environment{Kind: task.EnvironmentExternal}
			return spec
		}(), meant: func(*fixture, uuid.UUID) {}, status: router.Stale},
	} {
		t.Run(name, func(t *testing.T) {
			f := restarting(t, 2)
			if c.spec == nil {
				c.spec = prompted("agent", 1)
			}
			f.submit("one", c.spec)
			id := f.dispatch()[0]
			f.turnAt(id, 0)
			must(t, f.AdvancePolicyVersion(t.Context(), pool, 1))
			c.meant(f, id)
			must(t, f.cancelled(id))
			if s := f.session(id); s.Status != c.status || s.Restarts != 0 {
				t.Errorf("ended as %v after %d restarts, want %v", s.Status, s.Restarts, c.status)
			}
			must(t, f.VerifyCounters(t.Context(), f.run.ID))
		})
	}
}
