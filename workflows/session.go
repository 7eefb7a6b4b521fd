// Package workflows holds the deterministic workflow code: one Temporal workflow
// per session, from release to completion.
//
// A workflow decides the order of things and survives the death of every
// process. It does not talk to engines, the router or Postgres: activities do,
// and they answer with references and counts, never with tokens. It never admits
// a session by itself.
package workflows

import (
	"errors"
	"fmt"
	"time"

	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"holdfast/router"
)

// Session runs one session: admit (which may hold for hours), then turns with
// tool gaps between them, recorded or of a real environment, then scoring and completion. Its workflow id is the
// session id, so that starting it twice is harmless.
func Session(ctx workflow.Context, in SessionInput) error {
	s := &session{
		input:  in,
		grants: workflow.GetSignalChannel(ctx, GrantSignal),
	}
	end, err := s.run(ctx)
	if err != nil {
		if workflow.IsContinueAsNewError(err) {
			return err
		}
		end = s.endOf(ctx, err)
	}
	s.release(ctx)
	return s.complete(ctx, end)
}

// session is the state of one workflow run.
type session struct {
	input  SessionInput
	grants workflow.ReceiveChannel
	// released: its environment has been.
	released bool
}

// run goes through the turns and returns how the session ends. Its error is a
// cancellation, a continue-as-new, or an activity that gave up.
func (s *session) run(ctx workflow.Context) (Completion, error) {
	admitted := s.input.Admitted
	for turn := s.input.Turn; ; {
		if !admitted {
			reply, err := s.admit(ctx, turn)
			if err != nil {
				return Completion{}, err
			}
			switch reply.Outcome {
			case OutcomeOver:
				return Completion{Status: reply.Status, Problem: reply.Problem}, nil
			case OutcomeOutside:
				return s.outside(ctx)
			}
			turn = reply.Turn
			if reply.Stepped && turn == 0 {
				if over, err := s.step(ctx, 0); err != nil || over.Outcome == OutcomeOver {
					return s.finish(ctx, over, err)
				}
			}
		}
		reply, err := s.turn(ctx, turn)
		if err != nil {
			return Completion{}, err
		}
		switch reply.Outcome {
		case OutcomeHeld:
			// The turn's activity enqueued the session with the router, so the
			// wait starts here and admission is asked again only by the safety timer.
			if err := s.awaitGrant(ctx, turn); err != nil {
				return Completion{}, err
			}
			admitted = true
		case OutcomeMore, OutcomeStep:
			turn++
			admitted = true
			if over, err := s.gap(ctx, turn, reply); err != nil || over.Outcome == OutcomeOver {
				return s.finish(ctx, over, err)
			}
			if workflow.GetInfo(ctx).GetCurrentHistoryLength() >= historyEventsLimit {
				return Completion{}, s.continueAsNew(ctx, turn, true)
			}
		case OutcomeOver:
			return s.finish(ctx, reply, nil)
		default:
			return Completion{}, fmt.Errorf("turn %d: unknown outcome %q", turn, reply.Outcome)
		}
	}
}

// admit asks for admission and waits while held.
func (s *session) admit(ctx workflow.Context, turn int) (AdmitReply, error) {
	var reply AdmitReply
	err := workflow.ExecuteActivity(workflow.WithActivityOptions(ctx, bookkeepingOptions()),
		AdmitActivity, TurnRef{Session: s.input.Session, Turn: turn}).Get(ctx, &reply)
	if err != nil {
		return reply, err
	}
	s.input.Stepped = s.input.Stepped || reply.Stepped
	switch reply.Outcome {
	case OutcomeAdmitted, OutcomeOver, OutcomeOutside:
		return reply, nil
	case OutcomeHeld:
		return reply, s.awaitGrant(ctx, reply.Turn)
	}
	return reply, fmt.Errorf("admit turn %d: unknown outcome %q", turn, reply.Outcome)
}

// awaitGrant waits for the router's signal for this turn. When the safety timer
// fires first it continues as new, so that a hold of any length costs one run a
// bounded number of history events; the new run enqueues the session again.
func (s *session) awaitGrant(ctx workflow.Context, turn int) error {
	timerCtx, cancelTimer := workflow.WithCancel(ctx)
	defer cancelTimer()
	safety := workflow.NewTimer(timerCtx, holdSafetyInterval)
	granted, expired := false, false
	selector := workflow.NewSelector(ctx)
	selector.AddReceive(s.grants, func(c workflow.ReceiveChannel, _ bool) {
		var grant Grant
		c.Receive(ctx, &grant)
		granted = grant.Turn == turn
	})
	selector.AddFuture(safety, func(workflow.Future) { expired = true })
	selector.AddReceive(ctx.Done(), func(workflow.ReceiveChannel, bool) {})
	for !granted && !expired && ctx.Err() == nil {
		selector.Select(ctx)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if !granted {
		return s.continueAsNew(ctx, turn, false)
	}
	return nil
}

// turn runs one model call to its commit.
func (s *session) turn(ctx workflow.Context, turn int) (TurnReply, error) {
	var reply TurnReply
	err := workflow.ExecuteActivity(workflow.WithActivityOptions(ctx, longOptions(turnTimeout)),
		TurnActivity, TurnRef{Session: s.input.Session, Turn: turn}).Get(ctx, &reply)
	return reply, err
}

// gap is the time in the tool before a turn: a recorded one, or the environment's
// answer, which may end the session.
func (s *session) gap(ctx workflow.Context, turn int, before TurnReply) (TurnReply, error) {
	if before.Outcome == OutcomeStep {
		return s.step(ctx, turn)
	}
	return TurnReply{Outcome: OutcomeMore}, workflow.Sleep(ctx, time.Duration(before.GapMillis)*time.Millisecond)
}

// step resets the session's environment, or has it answer the turn before. Its
// failures are replies; it is tried again only where it could not be made at all, and
// a step that was made is not made twice.
func (s *session) step(ctx workflow.Context, step int) (TurnReply, error) {
	var reply TurnReply
	err := workflow.ExecuteActivity(workflow.WithActivityOptions(ctx, longOptions(stepTimeout)),
		StepActivity, StepRef{Session: s.input.Session, Step: step}).Get(ctx, &reply)
	return reply, err
}

// release gives the environment back, once, however the session ends. It runs on a
// context of its own like complete, and does not change the end.
func (s *session) release(ctx workflow.Context) {
	if !s.input.Stepped || s.released {
		return
	}
	s.released = true
	detached, cancel := workflow.NewDisconnectedContext(ctx)
	defer cancel()
	options := bookkeepingOptions()
	options.RetryPolicy.MaximumAttempts = releaseAttempts
	err := workflow.ExecuteActivity(workflow.WithActivityOptions(detached, options),
		ReleaseActivity, s.input.Session).Get(detached, nil)
	if err != nil {
		workflow.GetLogger(ctx).Warn("releasing the session's environment failed", "error", err)
	}
}

// finish scores the session where its task asks for that.
func (s *session) finish(ctx workflow.Context, reply TurnReply, err error) (Completion, error) {
	if err != nil {
		return Completion{}, err
	}
	// Scoring may take long, and needs the environment no more.
	s.release(ctx)
	end := Completion{Status: reply.Status, Problem: reply.Problem}
	if !reply.Scored {
		return end, nil
	}
	return s.score(ctx, end)
}

// score lets the task's scorer give the reward.
func (s *session) score(ctx workflow.Context, end Completion) (Completion, error) {
	var score ScoreReply
	err := workflow.ExecuteActivity(workflow.WithActivityOptions(ctx, longOptions(scoreTimeout)),
		ScoreActivity, s.input.Session).Get(ctx, &score)
	if err != nil {
		return Completion{}, err
	}
	if score.Problem != "" {
		return Completion{Status: router.Failed.String(), Problem: score.Problem, ScoreSeconds: score.Seconds}, nil
	}
	end.Reward, end.Detail, end.ScoreSeconds = score.Reward, score.Detail, score.Seconds
	return end, nil
}

// endOf turns an error of run into the status that it stands for.
func (s *session) endOf(ctx workflow.Context, err error) Completion {
	if temporal.IsCanceledError(err) || ctx.Err() != nil {
		return Completion{Status: router.Cancelled.String()}
	}
	var application *temporal.ApplicationError
	if errors.As(err, &application) {
		return Completion{Status: router.Failed.String(), Problem: application.Message()}
	}
	return Completion{Status: router.Failed.String(), Problem: err.Error()}
}

// complete writes the end of the session. It runs on a context of its own, since
// a cancelled session must be counted too, and retries until the store answers.
func (s *session) complete(ctx workflow.Context, end Completion) error {
	end.Session, end.Stepped = s.input.Session, s.input.Stepped
	detached, cancel := workflow.NewDisconnectedContext(ctx)
	defer cancel()
	err := workflow.ExecuteActivity(workflow.WithActivityOptions(detached, bookkeepingOptions()),
		CompleteActivity, end).Get(detached, nil)
	var application *temporal.ApplicationError
	if errors.As(err, &application) && application.Type() == RestartError {
		return workflow.NewContinueAsNewError(detached, SessionWorkflow, SessionInput{Session: s.input.Session})
	}
	return err
}

// continueAsNew starts a fresh history at the given turn. Signals received and
// not yet read are dropped on purpose: the new run asks the router again.
func (s *session) continueAsNew(ctx workflow.Context, turn int, admitted bool) error {
	for s.grants.ReceiveAsync(nil) {
	}
	next := SessionInput{Session: s.input.Session, Turn: turn, Admitted: admitted, Stepped: s.input.Stepped}
	return workflow.NewContinueAsNewError(ctx, SessionWorkflow, next)
}

// longOptions suits an activity that may take long: its worker's death shows in its
// heartbeats, and a cancellation waits until it has stopped.
func longOptions(limit time.Duration) workflow.ActivityOptions {
	options := bookkeepingOptions()
	options.StartToCloseTimeout, options.HeartbeatTimeout = limit, heartbeatTimeout
	options.WaitForCancellation = true
	return options
}

// bookkeepingOptions suits an activity that reads and writes rows: tried again
// without end while the store or the pool's owner is away, since giving up would
// turn an outage into failed samples.
func bookkeepingOptions() workflow.ActivityOptions {
	return workflow.ActivityOptions{
		StartToCloseTimeout: bookkeepingTimeout,
		RetryPolicy: &temporal.RetryPolicy{
			InitialInterval:    200 * time.Millisecond,
			BackoffCoefficient: 2,
			MaximumInterval:    15 * time.Second,
		},
	}
}
