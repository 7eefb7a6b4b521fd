package activities

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"
	"go.temporal.io/sdk/activity"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/pool"
	"holdfast/router"
	"holdfast/store"
	"holdfast/workflows"
)

const (
	// heartbeatInterval is well below the workflow's heartbeat time-out.
	heartbeatInterval = 5 * time.Second
	// retryBase and retryLimit bound the jittered waits between tries of one turn.
	retryBase  = 250 * time.Millisecond
	retryLimit = 15 * time.Second
	// commitPatience is how long a generated turn is kept while the store is away,
	// before it is given up and generated again.
	commitPatience = 10 * time.Minute
)

// Turn runs one model call: placement, generation, commit. It answers held when
// the router keeps the turn, in which case nothing was generated.
func (a *Activities) Turn(ctx context.Context, ref workflows.TurnRef) (workflows.TurnReply, error) {
	id, err := uuid.Parse(ref.Session)
	if err != nil {
		return workflows.TurnReply{}, fmt.Errorf("turn %d: session id: %w", ref.Turn, err)
	}
	ctx, release := a.running.track(ctx, id)
	defer release()
	defer heartbeat(ctx)()
	reply, err := a.turn(ctx, id, ref.Turn)
	if err != nil {
		return workflows.TurnReply{}, fmt.Errorf("session %s, turn %d: %w", id, ref.Turn, err)
	}
	return reply, nil
}

func (a *Activities) turn(ctx context.Context, id uuid.UUID, turn int) (workflows.TurnReply, error) {
	sc, err := a.load(ctx, id, turn)
	if err != nil {
		return workflows.TurnReply{}, err
	}
	if reply, ok := a.overBefore(&sc.work, turn); ok {
		return reply, nil
	}
	if turn < sc.work.Turns {
		return a.afterCommitted(ctx, &sc.work, turn)
	}
	committed := len(sc.tokens)
	sc.tokens = appendToolResult(sc.tokens, &sc.work, turn)
	placement, result, attempts, reply, err := a.generate(ctx, sc, turn)
	if err != nil || reply != nil {
		if reply != nil && reply.Outcome == workflows.OutcomeHeld {
			sc.tokens = sc.tokens[:committed]
			a.contexts.put(sc)
		}
		return derefReply(reply), err
	}
	commit := turnCommit(sc, turn, committed, placement, result, attempts)
	commit.Epoch = a.cfg.Epoch
	already, err := a.commit(ctx, commit)
	if errors.Is(err, store.ErrSessionEnded) {
		return over(router.Cancelled, ""), nil
	}
	if err != nil {
		return workflows.TurnReply{}, err
	}
	if already {
		// Another worker was quicker; what it committed stands, and the cache
		// entry with our tokens is dropped.
		return a.reload(ctx, id, turn)
	}
	a.tell(ctx, &router.TurnEnded{
		Session: router.SessionID(id), Turn: turn, Instance: placement.Instance,
		PromptTokens: int64(len(sc.tokens)), CachedTokens: int64(result.CachedTokens), OutputTokens: int64(len(result.OutputIDs)),
		QueueNanos: nanos(result.QueueSeconds), PrefillNanos: nanos(result.TimeToFirstTokenSeconds - result.QueueSeconds),
	})
	a.cfg.Engines.Receipt(placement.Instance, placement.PredictedCachedTokens, int64(result.CachedTokens))
	sc.tokens = append(sc.tokens, result.OutputIDs...)
	sc.work.Turns, sc.work.ContextTokens = turn+1, int64(len(sc.tokens))
	answer := after(&sc.work, turn, result.FinishReason)
	if answer.Outcome == workflows.OutcomeMore {
		a.contexts.put(sc)
	}
	return answer, nil
}

// load returns the session before its turn, from the cache or from the store.
func (a *Activities) load(ctx context.Context, id uuid.UUID, turn int) (*sessionContext, error) {
	if sc := a.contexts.take(id, turn); sc != nil {
		return sc, nil
	}
	work, err := a.cfg.Store.SessionForWork(ctx, id)
	if err != nil {
		return nil, err
	}
	sc := &sessionContext{work: work}
	if turn < work.Turns || work.State == store.SessionEnded {
		return sc, nil
	}
	if turn > work.Turns {
		return nil, fmt.Errorf("only %d turns are committed", work.Turns)
	}
	if turn == 0 {
		sc.tokens, err = a.cfg.Store.PromptTokens(ctx, work.TaskID)
	} else {
		sc.tokens, err = a.cfg.Store.Context(ctx, id)
	}
	return sc, err
}

// generate asks for placement and calls the engine until it answers. A non-nil
// reply ends the activity without a generated turn.
func (a *Activities) generate(ctx context.Context, sc *sessionContext, turn int) (pool.Placement, engine.Result, int, *workflows.TurnReply, error) {
	request := a.engineRequest(sc, turn)
	var avoid router.InstanceID
	for failures, attempts := 0, 1; ; attempts++ {
		ask := a.turnRequest(&sc.work, turn, int64(len(sc.tokens)), avoid)
		policyVersion, blockTokens := a.cfg.Engines.Hashing()
		sc.chain.describe(&ask, sc.tokens, policyVersion, blockTokens)
		placement, err := a.cfg.Router.RequestTurn(ctx, ask)
		if err != nil {
			return placement, engine.Result{}, attempts, nil, err
		}
		if !placement.Admitted {
			return placement, engine.Result{}, attempts, &workflows.TurnReply{Outcome: workflows.OutcomeHeld}, nil
		}
		result, err := a.cfg.Engines.Generate(ctx, placement.Instance, router.SessionID(sc.work.ID), request, a.onFirstToken(ctx, sc.work.ID, turn))
		if err == nil {
			err = unfinished(result)
		}
		if err == nil {
			return placement, result, attempts, nil, nil
		}
		if ctx.Err() != nil {
			// The session is cancelled or this worker is going down: its end, or the
			// next try's question, tells the router.
			return placement, engine.Result{}, attempts, nil, ctx.Err()
		}
		a.tell(ctx, &router.TurnEnded{Session: router.SessionID(sc.work.ID), Turn: turn, Instance: placement.Instance, CachedTokens: -1, Failed: true})
		a.cfg.Logger.Warn("model call failed", "session", sc.work.ID, "turn", turn, "instance", placement.Instance, "attempt", attempts, "error", err)
		var engineErr *engine.Error
		if errors.As(err, &engineErr) {
			if engineErr.Class == engine.FailTurn {
				reply := over(router.Failed, err.Error())
				return placement, engine.Result{}, attempts, &reply, nil
			}
			avoid = ""
			if engineErr.Class == engine.RetryElsewhere {
				avoid = placement.Instance
			}
		}
		if failures++; failures >= a.cfg.EngineAttempts {
			reply := over(router.Failed, fmt.Sprintf("%d calls of this turn failed, the last at %s: %v", failures, placement.Instance, err))
			return placement, engine.Result{}, attempts, &reply, nil
		}
		if err := pause(ctx, failures); err != nil {
			return placement, engine.Result{}, attempts, nil, err
		}
	}
}

// unfinished is the error of a generation that an engine gave up without failing
// the call: what it returned is no turn.
func unfinished(result engine.Result) error {
	if result.FinishReason == engine.FinishStop || result.FinishReason == engine.FinishLength {
		return nil
	}
	return &engine.Error{Class: engine.RetryElsewhere, Message: fmt.Sprintf("the generation ended with finish reason %q after %d tokens", result.FinishReason, len(result.OutputIDs))}
}

// engineRequest is the model call of a turn.
func (a *Activities) engineRequest(sc *sessionContext, turn int) engine.Request {
	spec := &sc.work.Spec
	limit := outputTokens(spec, turn)
	if room := a.cfg.Engines.MaxContextTokens() - int64(len(sc.tokens)); room > 0 && int64(limit) > room {
		limit = int(room)
	}
	if limits := spec.Limits.MaxContextTokens; limits > 0 {
		limit = min(limit, limits-len(sc.tokens))
	}
	request := engine.Request{
		RequestID: fmt.Sprintf("%s-%d", sc.work.ID, turn), SessionID: sc.work.ID.String(),
		Prompt: sc.tokens, MaxTokens: limit, MinTokens: min(spec.Sampling.MinTokens, limit), IgnoreEOS: spec.Sampling.IgnoreEOS,
		Temperature: 1, TopP: 1, Seed: spec.Sampling.Seed, StopTokenIDs: spec.Sampling.StopTokens,
		WithLogprobs: spec.Sampling.Logprobs == nil || *spec.Sampling.Logprobs, DataParallelRank: -1,
	}
	if spec.Sampling.Temperature != nil {
		request.Temperature = *spec.Sampling.Temperature
	}
	if spec.Sampling.TopP != nil {
		request.TopP = *spec.Sampling.TopP
	}
	if turnsOf(spec) != nil {
		request.MinTokens, request.IgnoreEOS = limit, true
	}
	return request
}

// onFirstToken tells the router when the engine begins to answer.
func (a *Activities) onFirstToken(ctx context.Context, session uuid.UUID, turn int) func(engine.Progress) {
	told := false
	return func(p engine.Progress) {
		if !told && p.OutputTokens > 0 {
			told = true
			a.tell(ctx, &router.TurnStarted{Session: router.SessionID(session), Turn: turn})
		}
	}
}

// commit writes a generated turn and keeps trying while the store is away: the
// tokens exist only here.
func (a *Activities) commit(ctx context.Context, commit store.TurnCommit) (already bool, err error) {
	deadline := time.Now().Add(commitPatience)
	for tries := 1; ; tries++ {
		already, err = a.cfg.Store.CommitTurn(ctx, commit)
		var field *store.FieldError
		if err == nil || errors.Is(err, store.ErrSessionEnded) || errors.Is(err, store.ErrNotFound) ||
			errors.Is(err, store.ErrTurnOutOfOrder) || errors.As(err, &field) || time.Now().After(deadline) {
			return already, err
		}
		a.cfg.Logger.Warn("committing a turn failed, trying again", "session", commit.SessionID, "turn", commit.Turn, "tries", tries, "error", err)
		if pauseErr := pause(ctx, tries); pauseErr != nil {
			return false, pauseErr
		}
	}
}

func turnCommit(sc *sessionContext, turn, committed int, placement pool.Placement, result engine.Result, attempts int) store.TurnCommit {
	return store.TurnCommit{
		SessionID: sc.work.ID, Turn: turn, Instance: string(placement.Instance), PolicyVersion: sc.work.PolicyVersion,
		Appended: sc.tokens[committed:], Generated: result.OutputIDs, Logprobs: result.Logprobs,
		PromptTokens: int64(len(sc.tokens)), PredictedCachedTokens: placement.PredictedCachedTokens, CachedTokens: int64(result.CachedTokens),
		StartedAt:    time.Now().Add(-time.Duration(result.TotalSeconds * float64(time.Second))),
		QueueSeconds: result.QueueSeconds, PrefillSeconds: max(0, result.TimeToFirstTokenSeconds-result.QueueSeconds),
		DecodeSeconds: max(0, result.TotalSeconds-result.TimeToFirstTokenSeconds), TotalSeconds: result.TotalSeconds,
		ToolSeconds:  gapAfter(&sc.work.Spec, turn-1).Seconds(),
		FinishReason: result.FinishReason.String(), TurnEffort: store.TurnEffort{Attempts: attempts},
	}
}

// after says what follows a committed turn.
func after(work *store.WorkSession, turn int, finish engine.FinishReason) workflows.TurnReply {
	if turns := turnsOf(&work.Spec); turns != nil {
		if turn+1 < len(turns) {
			return workflows.TurnReply{Outcome: workflows.OutcomeMore, GapMillis: gapAfter(&work.Spec, turn).Milliseconds()}
		}
		finish = engine.FinishStop
	}
	status := router.Completed
	if finish != engine.FinishStop {
		status = router.Truncated
	}
	reply := over(status, "")
	reply.Scored = work.Spec.Scorer != nil
	return reply
}

// afterCommitted says what follows a turn that an earlier try committed.
func (a *Activities) afterCommitted(ctx context.Context, work *store.WorkSession, turn int) (workflows.TurnReply, error) {
	turns, err := a.cfg.Store.SessionTurns(ctx, work.ID, turn-1, 1)
	if err != nil {
		return workflows.TurnReply{}, err
	}
	if len(turns) == 0 || turns[0].Turn != turn {
		return workflows.TurnReply{}, fmt.Errorf("the turn counts as committed but has no row")
	}
	// The worker that committed may have died before it told the router.
	a.tell(ctx, &router.TurnEnded{
		Session: router.SessionID(work.ID), Turn: turn, Instance: router.InstanceID(turns[0].Instance),
		PromptTokens: turns[0].PromptTokens, CachedTokens: turns[0].CachedTokens, OutputTokens: turns[0].OutputTokens,
	})
	finish := engine.FinishStop
	if turns[0].FinishReason != engine.FinishStop.String() {
		finish = engine.FinishLength
	}
	return after(work, turn, finish), nil
}

func (a *Activities) reload(ctx context.Context, id uuid.UUID, turn int) (workflows.TurnReply, error) {
	work, err := a.cfg.Store.SessionForWork(ctx, id)
	if err != nil {
		return workflows.TurnReply{}, err
	}
	return a.afterCommitted(ctx, &work, turn)
}

// tell feeds the router; when this process has lost the pool, the new owner reads
// the same from the store.
func (a *Activities) tell(ctx context.Context, event router.Event) {
	if err := a.cfg.Router.Tell(ctx, event); err != nil && !errors.Is(err, pool.ErrNotOwner) && ctx.Err() == nil {
		a.cfg.Logger.Warn("telling the router failed", "error", err)
	}
}

// heartbeat keeps the activity alive until the returned function is called.
func heartbeat(ctx context.Context) (stop func()) {
	done := make(chan struct{})
	go func() {
		ticker := time.NewTicker(heartbeatInterval)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				activity.RecordHeartbeat(ctx)
			case <-done:
				return
			case <-ctx.Done():
				return
			}
		}
	}()
	return func() { close(done) }
}

// pause waits before the next try, longer each time and with jitter.
func pause(ctx context.Context, tries int) error {
	limit := min(retryBase<<min(tries-1, 10), retryLimit)
	timer := time.NewTimer(limit/2 + rand.N(limit/2))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func nanos(seconds float64) router.Nanos { return router.Nanos(max(0, seconds) * 1e9) }

func derefReply(reply *workflows.TurnReply) workflows.TurnReply {
	if reply == nil {
		return workflows.TurnReply{}
	}
	return *reply
}
