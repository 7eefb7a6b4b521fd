package workflows

import (
	"testing"
	"time"
)

func outsideAll(TurnRef) (AdmitReply, error) { return AdmitReply{Outcome: OutcomeOutside}, nil }

func TestHarnessEndsItsSessionWithASignal(t *testing.T) {
	reward := 0.5
	finished := false
	s := &script{admit: outsideAll, outside: func() (OutsideReply, error) {
		if !finished {
			return OutsideReply{Outcome: OutcomeOutside, WaitMillis: time.Hour.Milliseconds()}, nil
		}
		return OutsideReply{Outcome: OutcomeOver, End: Completion{Status: "completed", Reward: &reward}}, nil
	}}
	env := newEnvironment(t, s)
	began := env.Now()
	env.RegisterDelayedCallback(func() { finished = true; env.SignalWorkflow(FinishSignal, nil) }, 10*time.Minute)
	env.ExecuteWorkflow(SessionWorkflow, SessionInput{Session: "s1"})
	if err := env.GetWorkflowError(); err != nil {
		t.Fatal(err)
	}
	end := wantEnd(t, s, "completed")
	if end.Reward == nil || *end.Reward != reward || len(s.turns) != 0 {
		t.Fatalf("ended as %+v after turns %v", end, s.turns)
	}
	if took := env.Now().Sub(began); took >= time.Hour {
		t.Fatalf("the signal was heard only after %s", took)
	}
}

func TestSilentHarnessIsLookedAtWhenItsTimeIsUpAndScoredByItsTask(t *testing.T) {
	looks := 0
	reward := 1.0
	s := &script{
		admit: outsideAll,
		outside: func() (OutsideReply, error) {
			if looks++; looks < 4 {
				return OutsideReply{Outcome: OutcomeOutside, WaitMillis: 1_000}, nil
			}
			return OutsideReply{Outcome: OutcomeOver, End: Completion{Status: "truncated"}, Scored: true}, nil
		},
		score: func() (ScoreReply, error) { return ScoreReply{Reward: &reward}, nil },
	}
	env := newEnvironment(t, s)
	began := env.Now()
	env.ExecuteWorkflow(SessionWorkflow, SessionInput{Session: "s1"})
	if err := env.GetWorkflowError(); err != nil {
		t.Fatal(err)
	}
	if end := wantEnd(t, s, "truncated"); end.Reward == nil || *end.Reward != 1 {
		t.Fatalf("ended as %+v", end)
	}
	if took := env.Now().Sub(began); took < 3*time.Second {
		t.Fatalf("three waits of a second took %s", took)
	}
}

func TestCancelEndsAHarnessSession(t *testing.T) {
	s := &script{admit: outsideAll, outside: func() (OutsideReply, error) {
		return OutsideReply{Outcome: OutcomeOutside, WaitMillis: time.Hour.Milliseconds()}, nil
	}}
	env := newEnvironment(t, s)
	env.RegisterDelayedCallback(env.CancelWorkflow, time.Minute)
	env.ExecuteWorkflow(SessionWorkflow, SessionInput{Session: "s1"})
	if err := env.GetWorkflowError(); err != nil {
		t.Fatal(err)
	}
	wantEnd(t, s, "cancelled")
}
