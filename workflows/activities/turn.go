package activities

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/pool"
	"holdfast/router"
	"holdfast/store"
	"holdfast/workflows"
)

// commitPatience is how long a generated turn is kept while the store is away,
// before it is given up and generated again from its last checkpoint.
const commitPatience = 10 * time.Minute

// Turn runs one model call: placement, generation, commit. It answers held when
// the router keeps the turn, in which case nothing was generated.
func (a *Activities) Turn(ctx context.Context, ref workflows.TurnRef) (workflows.TurnReply, error) {
	id, err := uuid.Parse(ref.Session)
	if err != nil {
		return workflows.TurnReply{}, fmt.Errorf("turn %d: session id: %w", ref.Turn, err)
	}
	ctx, release := a.running.track(ctx, id)
	defer release()
	p := &pulse{earlier: a.earlierProgress(ctx)}
	defer p.beat(ctx)()
	reply, err := a.turn(ctx, id, ref.Turn, p)
	if err != nil {
		return workflows.TurnReply{}, fmt.Errorf("session %s, turn %d: %w", id, ref.Turn, err)
	}
	return reply, nil
}

func (a *Activities) turn(ctx context.Context, id uuid.UUID, turn int, p *pulse) (workflows.TurnReply, error) {
	sc, err := a.load(ctx, id, turn)
	if err != nil {
		return workflows.TurnReply{}, err
	}
	if reply, ok := a.overBefore(&sc.work, turn); ok {
		if sc.work.Spec.Stepped() != nil && turn > 0 {
			return a.overStepped(ctx, &sc.work, reply)
		}
		return reply, nil
	}
	if turn < sc.work.Turns {
		return a.afterCommitted(ctx, &sc.work, turn)
	}
	if sc.output == nil {
		sc.output = newOutput(store.PartialTurn{}, a.cfg.CheckpointTokens)
	}
	sc.output.recall(p.earlier)
	p.follow(sc.output)
	committed := len(sc.tokens)
	if err := a.appendBefore(ctx, sc, turn); err != nil {
		return workflows.TurnReply{}, err
	}
	g := a.newGeneration(sc, turn, a.engineRequest(sc, turn))
	reply, err := g.run(ctx)
	if err != nil || reply != nil {
		if reply != nil && reply.Outcome == workflows.OutcomeHeld {
			sc.tokens = sc.tokens[:committed]
			a.contexts.put(sc)
		}
		return derefReply(reply), err
	}
	already, err := a.commit(ctx, g.commit(committed))
	if errors.Is(err, store.ErrSessionEnded) {
		return over(router.Cancelled, ""), nil
	}
	if err != nil {
		// Where the session has begun again this is an activity of the run that was left,
		// which nobody hears; or its context was, and the next try reads the store.
		return workflows.TurnReply{}, err
	}
	if already {
		// Another worker was quicker; what it committed stands, and the cache
		// entry with our tokens is dropped.
		return a.reload(ctx, id, turn)
	}
	a.tell(ctx, g.ended())
	a.cfg.Engines.Receipt(g.placement.Instance, g.placement.PredictedCachedTokens, int64(g.result.CachedTokens))
	sc.tokens = append(sc.tokens, g.out.ids...)
	sc.output = nil
	sc.work.Turns, sc.work.ContextTokens = turn+1, int64(len(sc.tokens))
	answer, err := a.after(ctx, &sc.work, turn, g.finish)
	if err == nil && answer.Outcome != workflows.OutcomeOver {
		a.contexts.put(sc)
	}
	return answer, err
}

// appendBefore appends to the context what came from the tool before a turn.
func (a *Activities) appendBefore(ctx context.Context, sc *sessionContext, turn int) error {
	if sc.work.Spec.Stepped() == nil {
		sc.tokens = appendToolResult(sc.tokens, &sc.work, turn)
		sc.gapSeconds = gapAfter(&sc.work.Spec, turn-1).Seconds()
		return nil
	}
	observation, err := a.observedBefore(ctx, &sc.work, turn)
	if err != nil {
		return err
	}
	sc.tokens = append(sc.tokens, observation.IDs...)
	sc.gapSeconds = observation.Seconds
	return nil
}

// load returns the session before its turn, from the cache or from the store, with
// what is left of a turn that was cut.
func (a *Activities) load(ctx context.Context, id uuid.UUID, turn int) (*sessionContext, error) {
	if sc := a.contexts.take(id, turn); sc != nil {
		return sc, a.renewRunTime(ctx, sc)
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
	if err != nil {
		return nil, err
	}
	partial, err := a.cfg.Store.PartialTurn(ctx, id, turn)
	if err != nil {
		return nil, err
	}
	sc.output = newOutput(partial, a.cfg.CheckpointTokens)
	return sc, nil
}

// renewRunTime reads again how long a session has run, which its cached context cannot
// know, if its task limits that.
func (a *Activities) renewRunTime(ctx context.Context, sc *sessionContext) error {
	if sc.work.Spec.Limits.MaxRunSeconds == 0 {
		return nil
	}
	work, err := a.cfg.Store.SessionForWork(ctx, sc.work.ID)
	if err != nil {
		return err
	}
	sc.work.FirstAdmittedAt, sc.work.HeldSeconds = work.FirstAdmittedAt, work.HeldSeconds
	return nil
}

// commit writes a generated turn and keeps trying while the store is away: the
// tokens exist only here.
func (a *Activities) commit(ctx context.Context, commit store.TurnCommit) (already bool, err error) {
	deadline := time.Now().Add(commitPatience)
	for tries := 1; ; tries++ {
		already, err = a.cfg.Store.CommitTurn(ctx, commit)
		var field *store.FieldError
		if err == nil || errors.Is(err, store.ErrSessionEnded) || errors.Is(err, store.ErrSessionRestarted) || errors.Is(err, store.ErrNotFound) ||
			errors.Is(err, store.ErrTurnOutOfOrder) || errors.Is(err, store.ErrTurnOfOtherRequest) || errors.As(err, &field) || time.Now().After(deadline) {
			return already, err
		}
		if ctx.Err() != nil {
			// This worker must stop, and the turn is whole: nobody should have to
			// generate its end again.
			parting, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.partingPatience)
			defer cancel()
			return a.cfg.Store.CommitTurn(parting, commit)
		}
		a.cfg.Logger.Warn("committing a turn failed, trying again", "session", commit.SessionID, "turn", commit.Turn, "tries", tries, "error", err)
		// If the wait ends early, so does the next try, and the last one follows.
		_ = a.pause(ctx, tries)
	}
}

// after says what follows a committed turn.
func (a *Activities) after(ctx context.Context, work *store.WorkSession, turn int, finish engine.FinishReason) (workflows.TurnReply, error) {
	if work.Spec.Stepped() != nil {
		if finish == engine.FinishStop {
			return workflows.TurnReply{Outcome: workflows.OutcomeStep}, nil
		}
		// A message that was cut is not one that an environment could answer.
		return a.overStepped(ctx, work, over(router.Truncated, ""))
	}
	if turns := turnsOf(&work.Spec); turns != nil {
		if turn+1 < len(turns) {
			return workflows.TurnReply{Outcome: workflows.OutcomeMore, GapMillis: gapAfter(&work.Spec, turn).Milliseconds()}, nil
		}
		finish = engine.FinishStop
	}
	status := router.Completed
	if finish != engine.FinishStop {
		status = router.Truncated
	}
	reply := over(status, "")
	reply.Scored = work.Spec.Scorer != nil
	return reply, nil
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
	return a.after(ctx, work, turn, finish)
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

func derefReply(reply *workflows.TurnReply) workflows.TurnReply {
	if reply == nil {
		return workflows.TurnReply{}
	}
	return *reply
}
