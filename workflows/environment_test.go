package workflows

import (
	"context"
	"errors"
	"slices"
	"testing"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/temporal"
)

// stepped admits a session that has an environment.
func stepped(ref TurnRef) (AdmitReply, error) {
	return AdmitReply{Outcome: OutcomeAdmitted, Turn: ref.Turn, Stepped: true}, nil
}

func answers(TurnRef) (TurnReply, error) { return TurnReply{Outcome: OutcomeStep}, nil }

// doneAfter is an environment that ends the episode with the given step.
func doneAfter(count int, end TurnReply) func(context.Context, StepRef) (TurnReply, error) {
	return func(_ context.Context, ref StepRef) (TurnReply, error) {
		if ref.Step < count {
			return TurnReply{Outcome: OutcomeMore}, nil
		}
		return end, nil
	}
}

// TestEnvironmentAnswersEveryTurn: the reset comes before turn 0, a step after each
// turn, and the environment is released once, before scoring, whatever its end.
func TestEnvironmentAnswersEveryTurn(t *testing.T) {
	reward := 0.5
	for name, c := range map[string]struct {
		end    TurnReply
		status string
		order  []string
	}{
		"completed": {TurnReply{Outcome: OutcomeOver, Status: "completed", Scored: true}, "completed", []string{"release", "score"}},
		"truncated": {TurnReply{Outcome: OutcomeOver, Status: "truncated"}, "truncated", []string{"release"}},
		"failed":    {TurnReply{Outcome: OutcomeOver, Status: "failed", Problem: "timeout"}, "failed", []string{"release"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &script{admit: stepped, turn: answers, step: doneAfter(3, c.end), score: func() (ScoreReply, error) { return ScoreReply{Reward: &reward}, nil }}
			env := newEnvironment(t, s)
			env.ExecuteWorkflow(SessionWorkflow, SessionInput{Session: "s1"})
			if err := env.GetWorkflowError(); err != nil {
				t.Fatal(err)
			}
			end := wantEnd(t, s, c.status)
			if !slices.Equal(s.turns, []int{0, 1, 2}) || !slices.Equal(s.steps, []int{0, 1, 2, 3}) || !slices.Equal(s.order, c.order) || !end.Stepped || end.Problem != c.end.Problem {
				t.Fatalf("turns %v, steps %v, then %v, ended as %+v", s.turns, s.steps, s.order, end)
			}
		})
	}
}

// TestEnvironmentThatCannotBeginMakesNoTurn also fails to release it, which changes nothing.
func TestEnvironmentThatCannotBeginMakesNoTurn(t *testing.T) {
	s := &script{admit: stepped, turn: answers, step: doneAfter(0, TurnReply{Outcome: OutcomeOver, Status: "failed", Problem: "disabled"}),
		release: func() error { return errors.New("the server is away") }}
	env := newEnvironment(t, s)
	env.ExecuteWorkflow(SessionWorkflow, SessionInput{Session: "s1"})
	if err := env.GetWorkflowError(); err != nil {
		t.Fatal(err)
	}
	if end := wantEnd(t, s, "failed"); end.Problem != "disabled" || len(s.turns) != 0 || len(s.order) != releaseAttempts {
		t.Fatalf("turns %v, then %v, ended as %+v", s.turns, s.order, end)
	}
}

func TestCancelledStepReleasesItsEnvironment(t *testing.T) {
	s := &script{admit: stepped, turn: answers}
	env := newEnvironment(t, s)
	s.step = func(_ context.Context, ref StepRef) (TurnReply, error) {
		if ref.Step == 0 {
			return TurnReply{Outcome: OutcomeMore}, nil
		}
		env.CancelWorkflow()
		return TurnReply{}, temporal.NewCanceledError()
	}
	env.ExecuteWorkflow(SessionWorkflow, SessionInput{Session: "s1"})
	if err := env.GetWorkflowError(); err != nil {
		t.Fatal(err)
	}
	wantEnd(t, s, "cancelled")
	if !slices.Equal(s.order, []string{"release"}) {
		t.Fatalf("after the cancellation came %v", s.order)
	}
}

// TestEnvironmentIsKnownAfterContinueAsNew: a run that goes on between turns still
// releases what an earlier run has opened.
func TestEnvironmentIsKnownAfterContinueAsNew(t *testing.T) {
	const turns = 200
	s := &script{admit: stepped, turn: answers, step: doneAfter(turns, TurnReply{Outcome: OutcomeOver, Status: "completed"})}
	input, runs := SessionInput{Session: "s1"}, 0
	for {
		runs++
		env := newEnvironment(t, s)
		// A turn with its step writes twelve events on a real server, none here.
		first := len(s.turns)
		env.SetOnActivityStartedListener(func(*activity.Info, context.Context, converter.EncodedValues) {
			env.SetCurrentHistoryLength(12 * (len(s.turns) - first))
		})
		env.ExecuteWorkflow(SessionWorkflow, input)
		err := env.GetWorkflowError()
		if err == nil {
			break
		}
		if input = continuation(t, err); !input.Stepped || len(s.order) != 0 {
			t.Fatalf("it goes on with %+v, after %v", input, s.order)
		}
	}
	wantEnd(t, s, "completed")
	if runs != 2 || len(s.turns) != turns || !slices.Equal(s.order, []string{"release"}) || len(s.admitted) != 1 {
		t.Fatalf("%d runs with %d turns under %d admissions, then %v", runs, len(s.turns), len(s.admitted), s.order)
	}
}
