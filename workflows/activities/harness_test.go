package activities

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
	"holdfast/workflows"
	"holdfast/workflows/task"
)

// harnessed is a task whose loop a harness runs.
func harnessed(maxTokens int) *task.Spec {
	spec := single(maxTokens)
	spec.Environment = &task.Environment{Kind: task.EnvironmentExternal}
	return spec
}

// ignore is a harness that looks at nothing but the turn.
var ignore = workflows.HarnessProgress{OnWait: func(string) {}}

func (f *fixture) call(a *Activities, id uuid.UUID, call workflows.HarnessCall) workflows.HarnessTurn {
	f.t.Helper()
	made, err := a.HarnessTurn(f.t.Context(), id, call, ignore)
	must(f.t, err)
	return made
}

func TestHarnessTurnsGoOnAndARepeatedRequestGivesItsTurn(t *testing.T) {
	f := newFixture(t)
	id := f.session(harnessed(5))
	p := &placements{}
	a := f.worker(newEngines(t), p, testCheckpointTokens)

	first := f.call(a, id, workflows.HarnessCall{RequestID: "a"})
	second := f.call(a, id, workflows.HarnessCall{RequestID: "b", Append: []int32{7, 8}, MaxTokens: 3})
	context, err := f.Context(t.Context(), id)
	must(t, err)
	third := f.call(a, id, workflows.HarnessCall{RequestID: "c", Context: append(slices.Clone(context), 9), WithPromptIDs: true})
	if first.Turn != 0 || second.Turn != 1 || third.Turn != 2 || len(first.OutputIDs) != 5 || len(second.OutputIDs) != 3 || len(third.Logprobs) != 5 {
		t.Fatalf("turns %+v, %+v, %+v", first, second, third)
	}
	want := slices.Concat(make([]int32, promptTokens), first.OutputIDs, []int32{7, 8}, second.OutputIDs)
	if !slices.Equal(context, want) || third.PromptTokens != int64(len(want)+1) || !slices.Equal(third.PromptIDs, append(want, 9)) {
		t.Fatalf("the context is %v, want %v; the third prompt has %d tokens", context, want, third.PromptTokens)
	}
	asked := len(p.questions)
	if oldest := f.call(a, id, workflows.HarnessCall{RequestID: "a", WithPromptIDs: true}); !oldest.Repeated || oldest.Turn != 0 || oldest.PromptIDs != nil || !slices.Equal(oldest.OutputIDs, first.OutputIDs) {
		t.Fatalf("the oldest request again: %+v", oldest)
	}
	// A request is known to the worker that made its turn, and to another one.
	for _, worker := range []*Activities{a, f.worker(newEngines(t), p, testCheckpointTokens)} {
		again := f.call(worker, id, workflows.HarnessCall{RequestID: "c", Context: append(slices.Clone(context), 9), WithPromptIDs: true})
		if !again.Repeated || again.Turn != 2 || !slices.Equal(again.PromptIDs, third.PromptIDs) || !slices.Equal(again.OutputIDs, third.OutputIDs) || !slices.Equal(again.Logprobs, third.Logprobs) {
			t.Fatalf("asked again: %+v, want %+v", again, third)
		}
	}
	if len(p.questions) != asked {
		t.Fatalf("a repeated request asked the router %d times", len(p.questions)-asked)
	}
}

func TestHarnessCallThatDoesNotGoOnLosesNothingWhereItIsRefused(t *testing.T) {
	f := newFixture(t)
	spec := harnessed(4)
	spec.Environment.Rewrites = task.RewritesRefuse
	id := f.session(spec)
	a := f.worker(newEngines(t), &placements{}, testCheckpointTokens)
	f.call(a, id, workflows.HarnessCall{RequestID: "a"})
	before, err := f.Context(t.Context(), id)
	must(t, err)

	changed := slices.Clone(before)
	changed[4]++
	var rewritten *workflows.RewrittenError
	_, err = a.HarnessTurn(t.Context(), id, workflows.HarnessCall{RequestID: "b", Context: changed}, ignore)
	if !errors.As(err, &rewritten) || rewritten.AtTokens != 4 || rewritten.SessionTokens != len(before) {
		t.Fatalf("a rewritten context got %v", err)
	}
	_, err = a.HarnessTurn(t.Context(), id, workflows.HarnessCall{RequestID: "b", Context: before[:5]}, ignore)
	if !errors.As(err, &rewritten) || rewritten.AtTokens != 5 {
		t.Fatalf("a shortened context got %v", err)
	}
	after := f.call(a, id, workflows.HarnessCall{RequestID: "b", Context: before})
	if after.Turn != 1 || after.PromptTokens != int64(len(before)) {
		t.Fatalf("the next call made %+v", after)
	}
	if _, err := a.HarnessTurn(t.Context(), f.session(single(3)), workflows.HarnessCall{RequestID: "a"}, ignore); !errors.Is(err, workflows.ErrNotHarness) {
		t.Fatalf("a session with a loop of its own got %v", err)
	}
	if _, err := a.HarnessTurn(t.Context(), uuid.New(), workflows.HarnessCall{RequestID: "a"}, ignore); !errors.Is(err, store.ErrNotFound) {
		t.Fatalf("an unknown session got %v", err)
	}
}

func TestHarnessHearsOfHoldsAndOneCallAtATimeRuns(t *testing.T) {
	f := newFixture(t)
	id := f.session(harnessed(4))
	held := make(chan string)
	release := make(chan struct{})
	p := &placements{holdNext: func(question int) bool { return question == 0 }}
	a := f.worker(newEngines(t), p, testCheckpointTokens)
	made := make(chan workflows.HarnessTurn, 1)
	go func() {
		turn, err := a.HarnessTurn(context.WithoutCancel(t.Context()), id, workflows.HarnessCall{RequestID: "a"}, workflows.HarnessProgress{
			OnWait: func(reason string) { held <- reason; <-release },
		})
		if err != nil {
			t.Error(err)
		}
		made <- turn
	}()
	if reason := storetest.Came(t, "a hold", held); reason != router.AtCap.String() {
		t.Errorf("held for %q", reason)
	}
	if _, err := a.HarnessTurn(t.Context(), id, workflows.HarnessCall{RequestID: "b"}, ignore); !errors.Is(err, workflows.ErrTurnUnderWay) {
		t.Errorf("a second call got %v", err)
	}
	// Being held is no silence.
	reply, err := a.Outside(t.Context(), id.String())
	if err != nil || reply.Outcome != workflows.OutcomeOutside || reply.WaitMillis != 600_100 {
		t.Errorf("while a call is held: %+v, %v", reply, err)
	}
	close(release)
	if turn := storetest.Came(t, "the turn", made); len(turn.OutputIDs) != 4 {
		t.Fatalf("made %+v", turn)
	}
}

func TestHarnessWhoLeavesGivesItsPlaceBackAndMayComeAgain(t *testing.T) {
	f := newFixture(t)
	id := f.session(harnessed(8))
	p := &placements{}
	// The first call hangs after three tokens, of which one is checkpointed.
	a := f.worker(newEngines(t, step{tokens: 3, end: endsLost}), p, 1)
	ctx, leave := context.WithCancel(t.Context())
	_, err := a.HarnessTurn(ctx, id, workflows.HarnessCall{RequestID: "a"}, workflows.HarnessProgress{
		OnWait: func(string) {}, OnTokens: func([]int32, []float32) { leave() },
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	if ends := p.ends(); len(ends) != 1 || !ends[0].Failed {
		t.Fatalf("the router was told %+v", ends)
	}
	if turn := f.call(a, id, workflows.HarnessCall{RequestID: "a"}); turn.Turn != 0 || turn.Repeated || len(turn.OutputIDs) != 8 {
		t.Fatalf("made %+v", turn)
	}
	if rows := f.checkpointRows(); rows != 0 {
		t.Fatalf("%d checkpoints are left of a committed turn", rows)
	}
}

func TestHarnessEndsItsSession(t *testing.T) {
	f := newFixture(t)
	a := f.worker(newEngines(t), &placements{}, testCheckpointTokens)
	reward := 0.25
	for _, c := range []struct {
		name   string
		finish store.Finish
		scorer *task.Scorer
		scored bool
	}{
		{"with a reward", store.Finish{Status: router.Completed, Reward: &reward, Detail: json.RawMessage(`{"by":"me"}`)}, nil, false},
		{"by its scorer", store.Finish{Status: router.Truncated}, &task.Scorer{Kind: task.ScorerExactMatch, TokenIDs: []int32{1}}, true},
		{"with a reward beside a scorer", store.Finish{Status: router.Completed, Reward: &reward}, &task.Scorer{Kind: task.ScorerExactMatch, TokenIDs: []int32{1}}, false},
		{"as failed", store.Finish{Status: router.Failed, Problem: "the container died"}, nil, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			spec := harnessed(4)
			spec.Scorer = c.scorer
			id := f.session(spec)
			f.call(a, id, workflows.HarnessCall{RequestID: "a"})
			must(t, f.RequestFinish(t.Context(), id, c.finish))
			must(t, f.RequestFinish(t.Context(), id, c.finish))
			if _, err := a.HarnessTurn(t.Context(), id, workflows.HarnessCall{RequestID: "too late"}, ignore); !errors.Is(err, workflows.ErrSessionOver) {
				t.Fatalf("a call right after the end was asked for got %v", err)
			}
			if work, err := f.SessionForWork(t.Context(), id); err != nil || work.Turns != 1 {
				t.Fatalf("%d turns, %v: what came after the end was asked for counts", work.Turns, err)
			}
			var conflict *store.ConflictError
			if err := f.RequestFinish(t.Context(), id, store.Finish{Status: router.Truncated, Detail: json.RawMessage(`1`)}); !errors.As(err, &conflict) {
				t.Fatalf("another end got %v", err)
			}
			reply, err := a.Outside(t.Context(), id.String())
			must(t, err)
			if reply.Outcome != workflows.OutcomeOver || reply.Scored != c.scored || reply.End.Status != c.finish.Status.String() || reply.End.Problem != c.finish.Problem {
				t.Fatalf("over as %+v", reply)
			}
			if _, err := a.HarnessTurn(t.Context(), id, workflows.HarnessCall{RequestID: "late"}, ignore); !errors.Is(err, workflows.ErrSessionOver) {
				t.Fatalf("a call after the end was asked for got %v", err)
			}
			if (reply.End.Reward == nil) != (c.finish.Reward == nil) || string(reply.End.Detail) != string(c.finish.Detail) {
				t.Fatalf("over as %+v", reply.End)
			}
			reply.End.Session = id.String()
			must(t, a.Complete(t.Context(), reply.End))
			if _, err := a.HarnessTurn(t.Context(), id, workflows.HarnessCall{RequestID: "b"}, ignore); !errors.Is(err, workflows.ErrSessionOver) {
				t.Fatalf("a call after the end got %v", err)
			}
			if err := f.RequestFinish(t.Context(), id, c.finish); err != nil {
				t.Fatalf("asking for the same end again got %v", err)
			}
		})
	}
}

func TestFinishesThatMakeNoSense(t *testing.T) {
	f := newFixture(t)
	id := f.session(harnessed(4))
	reward := 1.0
	for path, finish := range map[string]store.Finish{
		"status":  {Status: router.Cancelled},
		"reward":  {Status: router.Failed, Reward: &reward},
		"problem": {Status: router.Completed, Problem: "none"},
	} {
		var field *store.FieldError
		if err := f.RequestFinish(t.Context(), id, finish); !errors.As(err, &field) || field.Path != path {
			t.Errorf("%+v got %v, want an error at %s", finish, err, path)
		}
	}
	if err := f.RequestFinish(t.Context(), uuid.New(), store.Finish{Status: router.Completed}); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("an unknown session got %v", err)
	}
}

func TestSilentHarnessEndsAsFailed(t *testing.T) {
	f := newFixture(t)
	spec := harnessed(4)
	spec.Environment.IdleSeconds = 0.001
	id := f.session(spec)
	a := f.worker(newEngines(t), &placements{}, testCheckpointTokens)
	for {
		reply, err := a.Outside(t.Context(), id.String())
		must(t, err)
		if reply.Outcome == workflows.OutcomeOver {
			if reply.End.Status != router.Failed.String() || reply.End.Problem == "" {
				t.Fatalf("over as %+v", reply.End)
			}
			return
		}
		if reply.WaitMillis < 1 || reply.WaitMillis > 101 {
			t.Fatalf("to be looked at again after %d ms", reply.WaitMillis)
		}
	}
}

// TestHarnessThatWaitedAtAnOwnerWhoIsGoneHasItsTime: the new owner knows of no call, and
// counts silence from when it began.
func TestHarnessThatWaitedAtAnOwnerWhoIsGoneHasItsTime(t *testing.T) {
	f := newFixture(t)
	id := f.session(harnessed(4))
	began := time.Now()
	a := f.worker(newEngines(t), &placements{}, testCheckpointTokens)
	f.call(a, id, workflows.HarnessCall{RequestID: "a"})
	_, err := f.conn.Exec(t.Context(), `update turns set committed_at = committed_at - interval '1 hour'`)
	must(t, err)
	_, err = f.conn.Exec(t.Context(), `update sessions set dispatched_at = dispatched_at - interval '1 hour'`)
	must(t, err)
	reply, err := a.Outside(t.Context(), id.String())
	if err != nil || reply.Outcome != workflows.OutcomeOutside || reply.WaitMillis < 600_000-time.Since(began).Milliseconds() {
		t.Errorf("at the new owner: %+v, %v", reply, err)
	}
	a.made = a.made.Add(-time.Hour)
	if reply, err = a.Outside(t.Context(), id.String()); err != nil || reply.End.Status != router.Failed.String() {
		t.Errorf("after an hour there: %+v, %v", reply, err)
	}
}

// TestRunTimeIsLimitedWhileTheContextIsCached: admission and holds come after a context
// was cached.
func TestRunTimeIsLimitedWhileTheContextIsCached(t *testing.T) {
	f := newFixture(t)
	spec := harnessed(4)
	spec.Limits.MaxRunSeconds = 1_800
	id := f.session(spec)
	a := f.worker(newEngines(t), &placements{}, testCheckpointTokens)
	f.call(a, id, workflows.HarnessCall{RequestID: "a"})
	began := `update sessions set first_admitted_at = statement_timestamp() - interval '1 hour', held_seconds = `
	_, err := f.conn.Exec(t.Context(), began+`3000`)
	must(t, err)
	f.call(a, id, workflows.HarnessCall{RequestID: "b"})
	_, err = f.conn.Exec(t.Context(), began+`0`)
	must(t, err)
	var limit *workflows.LimitError
	if made, err := a.HarnessTurn(t.Context(), id, workflows.HarnessCall{RequestID: "c"}, ignore); !errors.As(err, &limit) {
		t.Errorf("after an hour of 30 minutes: %+v, %v", made, err)
	}
}
