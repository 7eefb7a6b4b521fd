package workflows

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/testsuite"
	"go.temporal.io/sdk/workflow"
)

// script stands for the activities: what they answer, and what they were asked.
type script struct {
	admit    func(TurnRef) (AdmitReply, error)
	turn     func(TurnRef) (TurnReply, error)
	score    func() (ScoreReply, error)
	outside  func() (OutsideReply, error)
	step     func(ctx context.Context, ref StepRef) (TurnReply, error)
	release  func() error
	admitted []int
	turns    []int
	steps    []int
	// order is what happened around the environment, and when it was released.
	order []string
	ended []Completion
}

func (s *script) Admit(_ context.Context, ref TurnRef) (AdmitReply, error) {
	s.admitted = append(s.admitted, ref.Turn)
	return s.admit(ref)
}

func (s *script) Turn(_ context.Context, ref TurnRef) (TurnReply, error) {
	s.turns = append(s.turns, ref.Turn)
	return s.turn(ref)
}

func (s *script) Score(context.Context, string) (ScoreReply, error) {
	s.order = append(s.order, "score")
	return s.score()
}

func (s *script) Step(ctx context.Context, ref StepRef) (TurnReply, error) {
	s.steps = append(s.steps, ref.Step)
	return s.step(ctx, ref)
}

func (s *script) Release(context.Context, string) error {
	s.order = append(s.order, "release")
	if s.release == nil {
		return nil
	}
	return s.release()
}

func (s *script) Outside(context.Context, string) (OutsideReply, error) { return s.outside() }

func (s *script) Complete(_ context.Context, end Completion) error {
	s.ended = append(s.ended, end)
	return nil
}

// stuckAfter is how long, on the clock of the wall, nothing may happen in a workflow.
const stuckAfter = 2 * time.Minute

func newEnvironment(t *testing.T, s *script) *testsuite.TestWorkflowEnvironment {
	t.Helper()
	var suite testsuite.WorkflowTestSuite
	env := suite.NewTestWorkflowEnvironment()
	env.SetTestTimeout(stuckAfter)
	env.RegisterWorkflowWithOptions(Session, workflow.RegisterOptions{Name: SessionWorkflow})
	env.RegisterActivityWithOptions(s.Admit, activity.RegisterOptions{Name: AdmitActivity})
	env.RegisterActivityWithOptions(s.Turn, activity.RegisterOptions{Name: TurnActivity})
	env.RegisterActivityWithOptions(s.Score, activity.RegisterOptions{Name: ScoreActivity})
	env.RegisterActivityWithOptions(s.Step, activity.RegisterOptions{Name: StepActivity})
	env.RegisterActivityWithOptions(s.Release, activity.RegisterOptions{Name: ReleaseActivity})
	env.RegisterActivityWithOptions(s.Outside, activity.RegisterOptions{Name: OutsideActivity})
	env.RegisterActivityWithOptions(s.Complete, activity.RegisterOptions{Name: CompleteActivity})
	return env
}

func admitAll(ref TurnRef) (AdmitReply, error) {
	return AdmitReply{Outcome: OutcomeAdmitted, Turn: ref.Turn}, nil
}

func holdAll(ref TurnRef) (AdmitReply, error) {
	return AdmitReply{Outcome: OutcomeHeld, Turn: ref.Turn}, nil
}

// lastAfter answers more until the given number of turns is done.
func lastAfter(count int, gap time.Duration) func(TurnRef) (TurnReply, error) {
	return func(ref TurnRef) (TurnReply, error) {
		if ref.Turn+1 < count {
			return TurnReply{Outcome: OutcomeMore, GapMillis: gap.Milliseconds()}, nil
		}
		return TurnReply{Outcome: OutcomeOver, Status: "completed"}, nil
	}
}

// wantEnd checks that the session ended once and how.
func wantEnd(t *testing.T, s *script, status string) Completion {
	t.Helper()
	if len(s.ended) != 1 {
		t.Fatalf("the session was completed %d times: %+v", len(s.ended), s.ended)
	}
	if s.ended[0].Status != status || s.ended[0].Session != "s1" {
		t.Fatalf("the session ended as %+v, want status %s of s1", s.ended[0], status)
	}
	return s.ended[0]
}

func TestTurnsRunInOrderWithTheirGaps(t *testing.T) {
	s := &script{admit: admitAll, turn: lastAfter(3, 90*time.Second)}
	env := newEnvironment(t, s)
	began := env.Now()
	env.ExecuteWorkflow(SessionWorkflow, SessionInput{Session: "s1"})
	if err := env.GetWorkflowError(); err != nil {
		t.Fatal(err)
	}
	wantEnd(t, s, "completed")
	if len(s.turns) != 3 || s.turns[0] != 0 || s.turns[2] != 2 || len(s.admitted) != 1 {
		t.Fatalf("turns %v, admissions %v: want turns 0, 1, 2 under one admission", s.turns, s.admitted)
	}
	if took := env.Now().Sub(began); took < 180*time.Second {
		t.Fatalf("two gaps of 90 s took %s", took)
	}
}

func TestHeldSessionWaitsForItsOwnGrant(t *testing.T) {
	s := &script{admit: holdAll, turn: lastAfter(1, 0)}
	env := newEnvironment(t, s)
	var grantedAt time.Time
	env.RegisterDelayedCallback(func() { env.SignalWorkflow(GrantSignal, Grant{Turn: 7}) }, time.Hour)
	env.RegisterDelayedCallback(func() {
		if len(s.turns) != 0 {
			t.Error("the grant of another turn released the session")
		}
		grantedAt = env.Now()
		env.SignalWorkflow(GrantSignal, Grant{Turn: 0})
	}, 2*time.Hour)
	env.ExecuteWorkflow(SessionWorkflow, SessionInput{Session: "s1"})
	if err := env.GetWorkflowError(); err != nil {
		t.Fatal(err)
	}
	wantEnd(t, s, "completed")
	if grantedAt.IsZero() || len(s.turns) != 1 {
		t.Fatalf("turns run: %v", s.turns)
	}
}

func TestSafetyTimerEnqueuesAgainAndNeverAdmits(t *testing.T) {
	s := &script{admit: holdAll, turn: lastAfter(1, 0)}
	env := newEnvironment(t, s)
	env.ExecuteWorkflow(SessionWorkflow, SessionInput{Session: "s1", Turn: 4, Admitted: false})
	next := continuation(t, env.GetWorkflowError())
	if next != (SessionInput{Session: "s1", Turn: 4}) {
		t.Fatalf("continued as %+v", next)
	}
	if len(s.turns) != 0 || len(s.ended) != 0 {
		t.Fatalf("a safety timer ran turns %v or ended the session %v", s.turns, s.ended)
	}
}

func TestHeldTurnIsNotAdmittedAgainAfterItsGrant(t *testing.T) {
	s := &script{admit: admitAll}
	held := true
	s.turn = func(ref TurnRef) (TurnReply, error) {
		if held {
			held = false
			return TurnReply{Outcome: OutcomeHeld}, nil
		}
		return TurnReply{Outcome: OutcomeOver, Status: "completed"}, nil
	}
	env := newEnvironment(t, s)
	env.RegisterDelayedCallback(func() { env.SignalWorkflow(GrantSignal, Grant{Turn: 0}) }, time.Minute)
	env.ExecuteWorkflow(SessionWorkflow, SessionInput{Session: "s1"})
	if err := env.GetWorkflowError(); err != nil {
		t.Fatal(err)
	}
	wantEnd(t, s, "completed")
	if len(s.admitted) != 1 || len(s.turns) != 2 {
		t.Fatalf("admissions %v, turns %v: want one admission and the turn tried twice", s.admitted, s.turns)
	}
}

func TestCancelledSessionIsCounted(t *testing.T) {
	for name, s := range map[string]*script{
		"while held":   {admit: holdAll, turn: lastAfter(1, 0)},
		"in a gap":     {admit: admitAll, turn: lastAfter(2, 3*time.Hour)},
		"before turns": {admit: func(TurnRef) (AdmitReply, error) { return AdmitReply{Outcome: OutcomeOver, Status: "cancelled"}, nil }},
	} {
		t.Run(name, func(t *testing.T) {
			env := newEnvironment(t, s)
			env.RegisterDelayedCallback(env.CancelWorkflow, time.Hour)
			env.ExecuteWorkflow(SessionWorkflow, SessionInput{Session: "s1"})
			if err := env.GetWorkflowError(); err != nil {
				t.Fatal(err)
			}
			wantEnd(t, s, "cancelled")
		})
	}
}

func TestInfrastructureFailureIsItsOwnStatus(t *testing.T) {
	s := &script{admit: admitAll, turn: func(TurnRef) (TurnReply, error) {
		return TurnReply{}, temporal.NewNonRetryableApplicationError("engine refused the turn", "refused", errors.New("400"))
	}}
	env := newEnvironment(t, s)
	env.ExecuteWorkflow(SessionWorkflow, SessionInput{Session: "s1"})
	if err := env.GetWorkflowError(); err != nil {
		t.Fatal(err)
	}
	if end := wantEnd(t, s, "failed"); end.Reward != nil || end.Problem != "engine refused the turn" {
		t.Fatalf("ended as %+v: want a problem and no reward", end)
	}
}

func TestScoreReachesTheSample(t *testing.T) {
	reward := 0.25
	for name, tc := range map[string]struct {
		score  ScoreReply
		status string
		reward *float64
	}{
		"scored":         {ScoreReply{Reward: &reward}, "completed", &reward},
		"scoring failed": {ScoreReply{Problem: "the scorer is gone"}, "failed", nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := &script{
				admit: admitAll, score: func() (ScoreReply, error) { return tc.score, nil },
				turn: func(TurnRef) (TurnReply, error) {
					return TurnReply{Outcome: OutcomeOver, Status: "completed", Scored: true}, nil
				},
			}
			env := newEnvironment(t, s)
			env.ExecuteWorkflow(SessionWorkflow, SessionInput{Session: "s1"})
			if err := env.GetWorkflowError(); err != nil {
				t.Fatal(err)
			}
			end := wantEnd(t, s, tc.status)
			if (end.Reward == nil) != (tc.reward == nil) || (end.Reward != nil && *end.Reward != *tc.reward) {
				t.Fatalf("reward %v, want %v", end.Reward, tc.reward)
			}
		})
	}
}

func TestLongSessionContinuesAsNewBetweenTurns(t *testing.T) {
	s := &script{admit: admitAll, turn: lastAfter(400, time.Second)}
	input, runs := SessionInput{Session: "s1"}, 0
	for {
		runs++
		if runs > 10 {
			t.Fatal("a 400-turn session took more than ten runs")
		}
		env := newEnvironment(t, s)
		// Eleven events a turn is what a real server writes; the test environment
		// writes none, so the length is told to it as turns go by.
		first := len(s.turns)
		env.SetOnActivityStartedListener(func(*activity.Info, context.Context, converter.EncodedValues) {
			env.SetCurrentHistoryLength(11 * (len(s.turns) - first))
		})
		env.ExecuteWorkflow(SessionWorkflow, input)
		err := env.GetWorkflowError()
		if err == nil {
			break
		}
		input = continuation(t, err)
		if !input.Admitted || input.Turn != len(s.turns) {
			t.Fatalf("after %d turns it continued as %+v", len(s.turns), input)
		}
	}
	wantEnd(t, s, "completed")
	for i, turn := range s.turns {
		if turn != i {
			t.Fatalf("turn %d ran in place %d", turn, i)
		}
	}
	if len(s.turns) != 400 || len(s.admitted) != 1 || runs != 3 {
		t.Fatalf("%d turns, %d admissions, %d runs: want 400, 1, 3", len(s.turns), len(s.admitted), runs)
	}
}

// continuation returns the input with which a run continues as new.
func continuation(t *testing.T, err error) SessionInput {
	t.Helper()
	var next *workflow.ContinueAsNewError
	if !errors.As(err, &next) {
		t.Fatalf("the run ended with %v, want a continue-as-new", err)
	}
	var input SessionInput
	if err := converter.GetDefaultDataConverter().FromPayloads(next.Input, &input); err != nil {
		t.Fatal(err)
	}
	return input
}
