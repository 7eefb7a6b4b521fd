package activities

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"holdfast/orchestrator/engine"
	"holdfast/router"
	"holdfast/store"
	"holdfast/workflows"
	"holdfast/workflows/task"
)

// queuedInterval is how often a call looks whether its session has left the queue.
const queuedInterval = 500 * time.Millisecond

// callers knows the sessions in which a harness's call is under way.
type callers struct {
	mu   sync.Mutex
	busy map[uuid.UUID]bool
}

// enter claims the session for one call.
func (c *callers) enter(session uuid.UUID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.busy[session] {
		return false
	}
	if c.busy == nil {
		c.busy = make(map[uuid.UUID]bool)
	}
	c.busy[session] = true
	return true
}

func (c *callers) leave(session uuid.UUID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.busy, session)
}

func (c *callers) isBusy(session uuid.UUID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.busy[session]
}

// HarnessTurn makes one model call for a harness: admission, which may take as long
// as a hold lasts, placement, generation and commit, as for a session of our own.
// Repeating a request that made a turn gives that turn. Refusals: ErrNotFound of the
// store, and the errors of package workflows; when ctx ends, its own.
func (a *Activities) HarnessTurn(ctx context.Context, id uuid.UUID, call workflows.HarnessCall, progress workflows.HarnessProgress) (workflows.HarnessTurn, error) {
	if !a.callers.enter(id) {
		return workflows.HarnessTurn{}, workflows.ErrTurnUnderWay
	}
	defer a.callers.leave(id)
	tracked, release := a.running.track(ctx, id)
	defer release()
	turn, err := a.harnessTurn(tracked, id, &call, progress)
	if err != nil {
		if errors.Is(err, context.Canceled) && ctx.Err() == nil {
			// It is the session that ended under the call, not the caller that left.
			err = workflows.ErrSessionOver
		}
		return workflows.HarnessTurn{}, fmt.Errorf("session %s: %w", id, err)
	}
	return turn, nil
}

func (a *Activities) harnessTurn(ctx context.Context, id uuid.UUID, call *workflows.HarnessCall, progress workflows.HarnessProgress) (workflows.HarnessTurn, error) {
	sc, err := a.harnessContext(ctx, id, progress.OnWait)
	if err != nil {
		return workflows.HarnessTurn{}, err
	}
	turn, before := sc.work.Turns, sc.tokens
	if request := sc.harness.madeBy(call, turn); request != "" {
		made, err := a.turnOfRequest(ctx, sc, request, call, progress.OnText)
		a.contexts.put(sc)
		return made, err
	}
	if call.RequestID == "" {
		call.RequestID = contentRequest(call.Content, turn)
	}
	next, err := a.next(ctx, sc, call)
	var request engine.Request
	if err == nil {
		sc.tokens = next.tokens
		request = a.engineRequest(sc, turn)
		err = a.roomFor(sc, turn, call, &request)
	}
	if err != nil {
		sc.tokens = before
		a.contexts.put(sc)
		return workflows.HarnessTurn{}, err
	}
	if next.rewritten {
		sc.chain, sc.work.PromptTokens = blockChain{}, min(sc.work.PromptTokens, next.kept)
	}
	sc.output = newOutput(store.PartialTurn{}, a.cfg.CheckpointTokens)
	g := a.newGeneration(sc, turn, request)
	g.onHold = func(reason router.Reason) { progress.OnWait(reason.String()) }
	v := a.newVoice(ctx, call, toolFormat(call, &sc.work.Spec), progress.OnText)
	g.onTokens = func(ids []int32, logprobs []float32) {
		v.hear(ids)
		if progress.OnTokens != nil {
			progress.OnTokens(ids, logprobs)
		}
	}
	reply, err := g.run(ctx)
	v.hush()
	if err != nil {
		// The caller has left; what it was given goes back to the router.
		if g.placement.Admitted {
			a.tell(context.WithoutCancel(ctx), &router.TurnEnded{Session: router.SessionID(id), Turn: turn, Instance: g.placement.Instance, CachedTokens: -1, Failed: true})
		}
		return workflows.HarnessTurn{}, err
	}
	if reply != nil {
		return workflows.HarnessTurn{}, &workflows.CallFailedError{Problem: reply.Problem, Refused: g.refused}
	}
	return a.keepTurn(ctx, g, call, &next, v)
}

// keepTurn commits a generated turn and gives it to the harness. A turn whose text
// cannot be told now is kept all the same: asked for again, it is read again.
func (a *Activities) keepTurn(ctx context.Context, g *generation, call *workflows.HarnessCall, next *nextContext, v *voice) (workflows.HarnessTurn, error) {
	sc, turn := g.sc, g.turn
	stopped := g.finish == engine.FinishStop && len(g.out.ids) > 0
	var said message
	var unread error
	if v != nil {
		said, unread = v.message(ctx, turn, g.out.ids, stopped)
	}
	commit := g.commit(next.kept)
	commit.RequestID = call.RequestID
	if next.rewritten {
		kept := int64(next.kept)
		commit.Kept = &kept
	}
	if next.seen != nil && unread == nil {
		commit.Seen = next.seen(&said)
	}
	already, err := a.commit(ctx, commit)
	switch {
	case errors.Is(err, store.ErrSessionEnded):
		return workflows.HarnessTurn{}, workflows.ErrSessionOver
	case err != nil:
		return workflows.HarnessTurn{}, err
	case already:
		// Another owner was quicker, on the same request or another one.
		made, err := a.turnOfRequest(ctx, sc, call.RequestID, call, nil)
		if errors.Is(err, store.ErrNotFound) {
			err = workflows.ErrTurnUnderWay
		}
		return made, err
	}
	// Also to a caller that has left meanwhile: the turn is over.
	a.tell(context.WithoutCancel(ctx), g.ended())
	a.cfg.Engines.Receipt(g.placement.Instance, g.placement.PredictedCachedTokens, int64(g.result.CachedTokens))
	made := workflows.HarnessTurn{
		Turn: turn, OutputIDs: g.out.ids, Logprobs: g.out.logprobs, FinishReason: g.finish.String(), PromptTokens: commit.PromptTokens,
		CachedTokens: commit.CachedTokens, PolicyVersion: commit.PolicyVersion, Instance: commit.Instance,
	}
	said.put(&made)
	if call.WithPromptIDs {
		made.PromptIDs = slices.Clone(sc.tokens)
	}
	if next.rewritten && turn > 0 {
		sc.harness.earlierTokens += sc.work.ContextTokens
	}
	sc.tokens = append(sc.tokens, g.out.ids...)
	sc.output, sc.harness.requests[call.RequestID] = nil, true
	sc.harness.seen, sc.harness.stop = commit.Seen, -1
	if stopped {
		sc.harness.stop = g.out.ids[len(g.out.ids)-1]
	}
	sc.work.Turns, sc.work.ContextTokens = turn+1, int64(len(sc.tokens))
	a.contexts.put(sc)
	if unread != nil {
		return workflows.HarnessTurn{}, &workflows.CallFailedError{Problem: unread.Error()}
	}
	return made, nil
}

// harnessContext returns the session as it stands, once it has left the queue.
func (a *Activities) harnessContext(ctx context.Context, id uuid.UUID, onWait func(string)) (*sessionContext, error) {
	if sc := a.contexts.takeAny(id); sc != nil {
		return sc, a.renewRunTime(ctx, sc)
	}
	for {
		waitsFor := string(store.SessionQueued)
		work, err := a.cfg.Store.SessionForWork(ctx, id)
		switch {
		case err != nil:
			return nil, err
		case !work.Spec.External():
			return nil, workflows.ErrNotHarness
		case work.State == store.SessionEnded, work.CancelRequested, work.FinishRequested:
			return nil, workflows.ErrSessionOver
		case work.State != store.SessionQueued:
			sc, err := a.beginHarnessed(ctx, work)
			if !errors.Is(err, engine.ErrNotCalled) {
				return sc, err
			}
			waitsFor = router.NoInstance.String()
		}
		onWait(waitsFor)
		timer := time.NewTimer(queuedInterval)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, ctx.Err()
		}
	}
}

// beginHarnessed reads the context of a session that has left the queue. The call may
// come before the workflow has had the prompt tokenised.
func (a *Activities) beginHarnessed(ctx context.Context, work store.WorkSession) (*sessionContext, error) {
	problem, err := a.tokenizePrompt(ctx, &work)
	if err != nil {
		return nil, err
	}
	if problem != "" {
		return nil, &workflows.CallFailedError{Problem: problem}
	}
	tokens, err := a.cfg.Store.Context(ctx, work.ID)
	if err != nil {
		return nil, err
	}
	state, err := a.cfg.Store.HarnessState(ctx, work.ID)
	if err != nil {
		return nil, err
	}
	work.PromptTokens = min(work.PromptTokens, state.PromptTokens)
	return &sessionContext{work: work, tokens: tokens, harness: newHarnessState(&state, tokens)}, nil
}

// turnOfRequest gives a turn that was made before, as it was given then.
func (a *Activities) turnOfRequest(ctx context.Context, sc *sessionContext, request string, call *workflows.HarnessCall, onText func(string)) (workflows.HarnessTurn, error) {
	turn, ids, logprobs, err := a.cfg.Store.TurnOfRequest(ctx, sc.work.ID, request)
	if err != nil {
		return workflows.HarnessTurn{}, err
	}
	made := workflows.HarnessTurn{
		Turn: turn.Turn, OutputIDs: ids, Logprobs: logprobs, FinishReason: turn.FinishReason, PromptTokens: turn.PromptTokens,
		CachedTokens: turn.CachedTokens, PolicyVersion: turn.PolicyVersion, Instance: turn.Instance, Repeated: true,
	}
	if before := len(sc.tokens) - len(ids); call.WithPromptIDs && turn.Turn == sc.work.Turns-1 && before >= 0 {
		made.PromptIDs = slices.Clone(sc.tokens[:before])
	}
	v := a.newVoice(ctx, call, toolFormat(call, &sc.work.Spec), onText)
	if v == nil {
		return made, nil
	}
	v.hush()
	said, err := v.message(ctx, turn.Turn, ids, turn.FinishReason == engine.FinishStop.String() && len(ids) > 0)
	if err != nil {
		return workflows.HarnessTurn{}, &workflows.CallFailedError{Problem: err.Error()}
	}
	said.put(&made)
	return made, nil
}

// roomFor applies the call's sampling, and refuses it where a limit leaves no room.
func (a *Activities) roomFor(sc *sessionContext, turn int, call *workflows.HarnessCall, request *engine.Request) error {
	if reply, over := a.overAt(&sc.work, turn, int64(len(sc.tokens))); over {
		if reply.Status == router.Cancelled.String() {
			return workflows.ErrSessionOver
		}
		problem := reply.Problem
		if problem == "" {
			problem = "a limit of the task on turns, context or run time is reached"
		}
		return &workflows.LimitError{Limit: problem}
	}
	if call.MaxTokens > 0 {
		request.MaxTokens = min(call.MaxTokens, a.room(sc))
	}
	if request.MaxTokens < 1 {
		return &workflows.LimitError{Limit: fmt.Sprintf("the context of %d tokens leaves no room for output", len(sc.tokens))}
	}
	if call.MinTokens > 0 {
		request.MinTokens = min(call.MinTokens, request.MaxTokens)
	}
	if call.Temperature != nil {
		request.Temperature = *call.Temperature
	}
	if call.TopP != nil {
		request.TopP = *call.TopP
	}
	if call.Seed != nil {
		request.Seed = call.Seed
	}
	if call.StopTokenIDs != nil {
		request.StopTokenIDs = call.StopTokenIDs
	}
	if call.Logprobs != nil {
		request.WithLogprobs = *call.Logprobs
	}
	if call.IgnoreEOS != nil {
		request.IgnoreEOS = *call.IgnoreEOS
	}
	return nil
}

// Outside tells whether a harness's session is over: because it asked for that, or
// because it has been silent for too long.
func (a *Activities) Outside(ctx context.Context, session string) (workflows.OutsideReply, error) {
	id, err := uuid.Parse(session)
	if err != nil {
		return workflows.OutsideReply{}, fmt.Errorf("looking after a harness: session id: %w", err)
	}
	work, err := a.cfg.Store.SessionForWork(ctx, id)
	if err != nil {
		return workflows.OutsideReply{}, fmt.Errorf("looking after the harness of session %s: %w", id, err)
	}
	if work.State == store.SessionEnded || work.CancelRequested {
		return workflows.OutsideReply{Outcome: workflows.OutcomeOver, End: workflows.Completion{Status: router.Cancelled.String()}}, nil
	}
	h, err := a.cfg.Store.Harness(ctx, id)
	if err != nil {
		return workflows.OutsideReply{}, fmt.Errorf("looking after the harness of session %s: %w", id, err)
	}
	if h.Finish != nil {
		// A call under way ends, and the next one finds that the session is over.
		a.running.cancel(id)
		a.contexts.drop(id)
		return workflows.OutsideReply{
			Outcome: workflows.OutcomeOver,
			End: workflows.Completion{
				Status: h.Finish.Status.String(), Reward: h.Finish.Reward, Detail: h.Finish.Detail, Problem: h.Finish.Problem,
			},
			Scored: h.Finish.Reward == nil && h.Finish.Status != router.Failed && work.Spec.Scorer != nil && work.Spec.Scorer.Kind != task.ScorerEnvironment,
		}, nil
	}
	patience := time.Duration(idleSeconds(&work.Spec) * float64(time.Second))
	// A call that waited at an owner that is gone is coming again: nobody here knows of it.
	silent := min(h.Now.Sub(h.QuietSince), time.Since(a.made))
	switch {
	case a.callers.isBusy(id):
		silent = 0
	case silent >= patience:
		return workflows.OutsideReply{Outcome: workflows.OutcomeOver, End: workflows.Completion{
			Status: router.Failed.String(), Problem: fmt.Sprintf("the harness was silent for %.0f s", silent.Seconds()),
		}}, nil
	}
	// A little longer, so that the next look does not come just too early.
	return workflows.OutsideReply{Outcome: workflows.OutcomeOutside, WaitMillis: (patience - silent).Milliseconds() + 100}, nil
}

func idleSeconds(spec *task.Spec) float64 {
	if s := spec.Environment.IdleSeconds; s > 0 {
		return s
	}
	return task.DefaultIdleSeconds
}
