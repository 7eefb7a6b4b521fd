package workflows

import (
	"time"

	"go.temporal.io/sdk/workflow"
)

// outside spans a session whose loop a harness runs: its turns are calls to the
// API, which asks the router itself. The workflow waits for the end that the harness
// asks for, and notices when it has been silent for too long.
func (s *session) outside(ctx workflow.Context) (Completion, error) {
	finish := workflow.GetSignalChannel(ctx, FinishSignal)
	for {
		var reply OutsideReply
		err := workflow.ExecuteActivity(workflow.WithActivityOptions(ctx, bookkeepingOptions()),
			OutsideActivity, s.input.Session).Get(ctx, &reply)
		if err != nil {
			return Completion{}, err
		}
		if reply.Outcome == OutcomeOver {
			if reply.Scored {
				return s.score(ctx, reply.End)
			}
			return reply.End, nil
		}
		if workflow.GetInfo(ctx).GetCurrentHistoryLength() >= historyEventsLimit {
			return Completion{}, s.continueAsNew(ctx, 0, false)
		}
		if err := awaitFinish(ctx, finish, time.Duration(reply.WaitMillis)*time.Millisecond); err != nil {
			return Completion{}, err
		}
	}
}

// awaitFinish returns when the harness has asked for the end or has had its time.
func awaitFinish(ctx workflow.Context, finish workflow.ReceiveChannel, patience time.Duration) error {
	timerCtx, cancelTimer := workflow.WithCancel(ctx)
	defer cancelTimer()
	selector := workflow.NewSelector(ctx)
	selector.AddReceive(finish, func(c workflow.ReceiveChannel, _ bool) { c.Receive(ctx, nil) })
	selector.AddFuture(workflow.NewTimer(timerCtx, patience), func(workflow.Future) {})
	selector.AddReceive(ctx.Done(), func(workflow.ReceiveChannel, bool) {})
	selector.Select(ctx)
	return ctx.Err()
}
