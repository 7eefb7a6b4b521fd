package workflows

import (
	"context"
	"errors"
	"testing"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/testsuite"
	"go.temporal.io/sdk/workflow"
)

// TestASessionThatBeginsAgainContinuesAsNew: from its first turn, and asks for
// admission anew, although its workflow was cancelled.
func TestASessionThatBeginsAgainContinuesAsNew(t *testing.T) {
	var suite testsuite.WorkflowTestSuite
	env := suite.NewTestWorkflowEnvironment()
	env.SetTestTimeout(stuckAfter)
	env.RegisterWorkflowWithOptions(Session, workflow.RegisterOptions{Name: SessionWorkflow})
	var completions []Completion
	env.RegisterActivityWithOptions(func(_ context.Context, ref TurnRef) (AdmitReply, error) {
		return AdmitReply{Outcome: OutcomeAdmitted, Turn: ref.Turn}, nil
	}, activity.RegisterOptions{Name: AdmitActivity})
	env.RegisterActivityWithOptions(func(_ context.Context, ref TurnRef) (TurnReply, error) {
		if ref.Turn == 1 {
			env.CancelWorkflow()
		}
		return TurnReply{Outcome: OutcomeMore}, nil
	}, activity.RegisterOptions{Name: TurnActivity})
	env.RegisterActivityWithOptions(func(_ context.Context, end Completion) error {
		completions = append(completions, end)
		return temporal.NewNonRetryableApplicationError("the session begins again", RestartError, nil)
	}, activity.RegisterOptions{Name: CompleteActivity})

	env.ExecuteWorkflow(SessionWorkflow, SessionInput{Session: "s"})

	var next *workflow.ContinueAsNewError
	if err := env.GetWorkflowError(); !errors.As(err, &next) {
		t.Fatalf("the workflow ended with %v, want it to continue as new", err)
	}
	var input SessionInput
	if err := converter.GetDefaultDataConverter().FromPayloads(next.Input, &input); err != nil {
		t.Fatal(err)
	}
	if (input != SessionInput{Session: "s"}) {
		t.Errorf("it goes on with %+v, want it from the beginning", input)
	}
	if len(completions) != 1 || completions[0].Status != "cancelled" {
		t.Errorf("completions: %+v", completions)
	}
}
