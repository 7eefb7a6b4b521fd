package activities

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"time"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/pool"
	"holdfast/router"
	"holdfast/store"
	"holdfast/workflows"
)

const (
	// retryBase and retryLimit bound the jittered waits between tries of one turn.
	retryBase  = 250 * time.Millisecond
	retryLimit = 15 * time.Second
	// maxCuts is how often an engine may cut a turn, as for a weight update, before
	// that counts as a failure. With the waits between them that is a quarter of an
	// hour of an engine that cuts every call at once.
	maxCuts = 64
)

// generation carries one turn from placement to the end of its output, through
// calls that fail or are cut.
type generation struct {
	a    *Activities
	sc   *sessionContext
	turn int
	out  *output
	save *saver
	// request is the call that would generate the turn at once.
	request engine.Request
	// placement and result are those of the last call.
	placement pool.Placement
	result    engine.Result
	finish    engine.FinishReason
	startedAt time.Time
	spent     spent
	// version is that of the weights, as last seen.
	version int64
	// failures and cuts happened in a row; cutsInAll bounds the latter.
	failures, cuts, cutsInAll int
	avoid                     router.InstanceID
	// refused: an engine would not take the request itself.
	refused bool
	// onHold waits for admission and is told of holds; nil leaves a held turn to the
	// workflow. onTokens, if set, sees the output grow.
	onHold   func(router.Reason)
	onTokens func(ids []int32, logprobs []float32)
}

// spent sums what the calls took.
type spent struct {
	queueSeconds, prefillSeconds, decodeSeconds, totalSeconds float64
}

func (s *spent) add(r *engine.Result) {
	s.queueSeconds += r.QueueSeconds
	s.prefillSeconds += prefillSeconds(r)
	s.decodeSeconds += max(0, r.TotalSeconds-r.TimeToFirstTokenSeconds)
	s.totalSeconds += r.TotalSeconds
}

func prefillSeconds(r *engine.Result) float64 {
	return max(0, r.TimeToFirstTokenSeconds-r.QueueSeconds)
}

// newGeneration prepares a turn that goes on from the context's output.
func (a *Activities) newGeneration(sc *sessionContext, turn int, request engine.Request) *generation {
	g := &generation{
		a: a, sc: sc, turn: turn, out: sc.output, request: request, startedAt: time.Now(),
		save: &saver{a: a, session: sc.work.ID, restarts: sc.work.Restarts, turn: turn, out: sc.output},
	}
	g.result.CachedTokens = -1
	g.placement.Instance = router.InstanceID(g.out.instance)
	return g
}

// run calls engines until the turn's output is whole. A non-nil reply ends the
// turn without that.
func (g *generation) run(ctx context.Context) (*workflows.TurnReply, error) {
	for !g.whole() {
		admitted, err := g.place(ctx)
		if err != nil {
			return nil, err
		}
		if !admitted {
			return &workflows.TurnReply{Outcome: workflows.OutcomeHeld}, nil
		}
		before := len(g.out.ids)
		end, err := g.call(ctx)
		if end == callFinished {
			g.finish = g.result.FinishReason
			break
		}
		g.out.broken()
		if ctx.Err() != nil {
			// The session is cancelled or this worker is going down: its end, or the
			// next try's question, tells the router.
			g.save.part(ctx)
			return nil, ctx.Err()
		}
		if g.whole() {
			break
		}
		// What is generated is kept before anything else is tried.
		g.save.save(ctx)
		reply, err := g.interrupted(ctx, end, err, len(g.out.ids)-before)
		if reply != nil || err != nil {
			return reply, err
		}
	}
	return nil, nil
}

// whole tells whether the output needs no further call, as when a stream broke after
// the last token.
func (g *generation) whole() (whole bool) {
	g.finish, whole = g.out.finished(&g.request)
	return whole
}

// place asks the router where the turn goes on, and says how long it has become.
func (g *generation) place(ctx context.Context) (admitted bool, err error) {
	prompt := g.out.next(g.request).Prompt
	ask := g.a.turnRequest(&g.sc.work, g.turn, int64(len(prompt)), g.avoid)
	policyVersion, blockTokens := g.a.cfg.Engines.Hashing()
	g.sc.chain.describe(&ask, prompt, policyVersion, blockTokens)
	if g.onHold != nil {
		g.placement, err = g.a.cfg.Router.AwaitTurn(ctx, ask, g.onHold)
	} else {
		g.placement, err = g.a.cfg.Router.RequestTurn(ctx, ask)
	}
	return g.placement.Admitted, err
}

// callEnd is the closed set of how a call can end.
type callEnd uint8

const (
	// callFinished: the output is whole.
	callFinished callEnd = iota + 1
	// callCut: the engine gave the call up on purpose; what came before goes on as a
	// new call.
	callCut
	// callFailed: so does what came before this.
	callFailed
)

func (e callEnd) String() string {
	switch e {
	case callFinished:
		return "finished"
	case callCut:
		return "cut"
	case callFailed:
		return "failed"
	}
	return fmt.Sprintf("callEnd(%d)", uint8(e))
}

// call makes one call to the placement's instance and takes in what it generates.
func (g *generation) call(ctx context.Context) (callEnd, error) {
	session, instance := router.SessionID(g.sc.work.ID), g.placement.Instance
	request := g.out.next(g.request)
	request.RequestID = fmt.Sprintf("%s-%d", g.sc.work.ID, g.turn)
	if number := g.out.begin(string(instance)); number > 1 {
		// An engine that still works on a lost call refuses its name.
		request.RequestID += "-" + strconv.Itoa(number)
	}
	started := false
	g.look()
	result, err := g.a.cfg.Engines.Generate(ctx, instance, session, request, func(p engine.Progress) {
		if !started && p.OutputTokens > 0 {
			started = true
			g.a.tell(ctx, &router.TurnStarted{Session: session, Turn: g.turn})
		}
		g.look()
		if g.grow(p.OutputIDs, p.Logprobs) {
			g.save.start(ctx)
		}
		if g.onTokens != nil {
			g.onTokens(g.out.ids, g.out.logprobs)
		}
	})
	g.save.settle()
	g.result = result
	g.spent.add(&result)
	g.grow(result.OutputIDs, result.Logprobs)
	end, err := judge(&result, err)
	if end == 0 {
		g.discard()
		if dropErr := g.save.drop(ctx); dropErr != nil {
			return callFailed, dropErr
		}
		return callFailed, err
	}
	if g.out.mixes(result.OutputIDs, result.Logprobs) {
		return callFailed, &engine.Error{Class: engine.RetryElsewhere, Message: "the engine's log-probabilities are not of the kind that the turn began with"}
	}
	if end == callFinished && len(g.out.ids)-g.out.callStart < len(result.OutputIDs) {
		end, err = callFailed, &engine.Error{Class: engine.RetryElsewhere, Message: "the stream ended before the log-probabilities of its last tokens"}
	}
	if version, ok := ownVersion(result.WeightVersion); ok {
		g.out.relabel(version)
	}
	return end, err
}

// look notes the version that the instance's weights have now. What only the end of
// a call tells was generated under the one seen before it.
func (g *generation) look() {
	// Where nobody tells a version, the tokens count as the release's.
	g.version = g.a.cfg.Engines.PolicyVersion(g.placement.Instance)
	if g.version == 0 {
		g.version = g.sc.work.PolicyVersion
	}
}

// grow takes in the call's output so far and tells whether a checkpoint is due.
func (g *generation) grow(ids []int32, logprobs []float32) (due bool) {
	growth := g.out.grow(ids, logprobs, g.version)
	g.a.cfg.Counters.count(growth)
	return growth.due
}

// discard drops what the call generated, and the block hashes that count it in.
func (g *generation) discard() {
	g.out.discard()
	g.sc.chain = blockChain{}
}

// judge sorts how a call ended. An end of 0 says that not even the tokens that came
// are to be trusted.
func judge(result *engine.Result, err error) (callEnd, error) {
	ended := result.FinishReason == engine.FinishStop || result.FinishReason == engine.FinishLength
	var engineErr *engine.Error
	switch {
	case err == nil && ended:
		return callFinished, nil
	case err == nil && result.FinishReason == engine.FinishAbort:
		return callCut, nil
	case err == nil:
		return callFailed, &engine.Error{Class: engine.RetryElsewhere, Message: fmt.Sprintf("the generation ended with finish reason %q after %d tokens", result.FinishReason, len(result.OutputIDs))}
	case ended && errors.As(err, &engineErr) && engineErr.Err == nil:
		// The stream came to its end and contradicts itself: tokens are missing.
		return 0, err
	case ended:
		// The connection broke between the last token and the stream's end marker.
		return callFinished, nil
	}
	return callFailed, err
}

// ownVersion reads the policy version in what an engine says of its weights.
func ownVersion(weightVersion string) (version int64, ok bool) {
	version, err := strconv.ParseInt(weightVersion, 10, 64)
	return version, err == nil && version > 0
}

// interrupted decides what follows a call that did not finish the turn, and waits.
// Without reply and error the turn is to be placed again.
func (g *generation) interrupted(ctx context.Context, end callEnd, err error, tokens int) (*workflows.TurnReply, error) {
	id := g.sc.work.ID
	log := g.a.cfg.Logger.With("session", id, "turn", g.turn, "instance", g.placement.Instance, "tokens", tokens, "tokens_so_far", len(g.out.ids))
	if end == callCut {
		g.avoid = ""
		g.a.tell(ctx, g.ended())
		g.cuts++
		if tokens > 0 {
			g.cuts = 1
		}
		if g.cutsInAll++; g.cutsInAll <= maxCuts {
			log.Info("an engine cut a model call; it goes on from there", "cuts", g.cutsInAll)
			return nil, g.a.pause(ctx, g.cuts)
		}
		err = fmt.Errorf("the engine cut the turn %d times", g.cutsInAll)
	} else {
		g.a.tell(ctx, &router.TurnEnded{Session: router.SessionID(id), Turn: g.turn, Instance: g.placement.Instance, CachedTokens: -1, Failed: true})
	}
	log.Warn("model call failed", "attempt", g.out.effort.Attempts, "error", err)
	var engineErr *engine.Error
	if errors.As(err, &engineErr) {
		if engineErr.Class == engine.FailTurn {
			g.refused = true
			reply := over(router.Failed, err.Error())
			return &reply, nil
		}
		g.avoid = ""
		if engineErr.Class == engine.RetryElsewhere {
			g.avoid = g.placement.Instance
		}
	}
	if tokens >= g.a.cfg.CheckpointTokens {
		// A call that brought the turn on by so much was none of those that lead nowhere.
		g.failures = 0
	}
	if errors.Is(err, engine.ErrNotCalled) {
		// Nothing was sent: the router hears that the instance is gone, and places the
		// turn elsewhere or holds it.
		return nil, g.a.pause(ctx, 1)
	}
	if g.failures++; g.failures >= g.a.cfg.EngineAttempts {
		reply := over(router.Failed, fmt.Sprintf("%d calls of this turn failed, the last at %s: %v", g.failures, g.placement.Instance, err))
		return &reply, nil
	}
	return nil, g.a.pause(ctx, g.failures)
}

// ended tells the router how the last call went, whose prompt is all that was
// there before it.
func (g *generation) ended() *router.TurnEnded {
	r := &g.result
	return &router.TurnEnded{
		Session: router.SessionID(g.sc.work.ID), Turn: g.turn, Instance: g.placement.Instance,
		PromptTokens: int64(len(g.sc.tokens) + g.out.callStart), CachedTokens: int64(r.CachedTokens), OutputTokens: int64(len(g.out.ids) - g.out.callStart),
		QueueNanos: nanos(r.QueueSeconds), PrefillNanos: nanos(prefillSeconds(r)),
	}
}

// commit is what the store is to keep of the turn. The first of the session's
// tokens that are not committed yet is at the given place.
func (g *generation) commit(committed int) store.TurnCommit {
	context := int64(len(g.sc.tokens))
	commit := store.TurnCommit{
		SessionID: g.sc.work.ID, Restarts: g.sc.work.Restarts, Turn: g.turn, Instance: string(g.placement.Instance), Epoch: g.a.cfg.Epoch,
		PolicyVersion: g.sc.work.PolicyVersion, Versions: g.out.versions,
		Appended: g.sc.tokens[committed:], Generated: g.out.ids, Logprobs: g.out.logprobs,
		PromptTokens: context, StartedAt: g.startedAt,
		// Of a call that went on from partial output both may reach into that.
		PredictedCachedTokens: min(g.placement.PredictedCachedTokens, context), CachedTokens: min(int64(g.result.CachedTokens), context),
		QueueSeconds: g.spent.queueSeconds, PrefillSeconds: g.spent.prefillSeconds, DecodeSeconds: g.spent.decodeSeconds, TotalSeconds: g.spent.totalSeconds,
		ToolSeconds:  g.sc.gapSeconds,
		FinishReason: g.finish.String(), TurnEffort: g.out.effort,
	}
	if last := len(g.out.versions) - 1; last >= 0 {
		commit.PolicyVersion = g.out.versions[last].PolicyVersion
	}
	return commit
}

// engineRequest is the model call of a whole turn.
func (a *Activities) engineRequest(sc *sessionContext, turn int) engine.Request {
	spec := &sc.work.Spec
	limit := min(outputTokens(spec, turn), a.room(sc))
	request := engine.Request{
		SessionID: sc.work.ID.String(),
		Prompt:    sc.tokens, MaxTokens: limit, MinTokens: min(spec.Sampling.MinTokens, limit), IgnoreEOS: spec.Sampling.IgnoreEOS,
		Temperature: 1, TopP: 1, Seed: memberSeed(&sc.work), StopTokenIDs: spec.Sampling.StopTokens,
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

// memberSeed is the task's seed for one member of its group, nil where the task has
// none. With one seed for all, every member would be the same answer, and the group
// would have no signal; vLLM counts on likewise for the answers of one request.
func memberSeed(work *store.WorkSession) *int64 {
	if work.Spec.Sampling.Seed == nil {
		return nil
	}
	seed := *work.Spec.Sampling.Seed + int64(work.Member)
	return &seed
}

// room is how many tokens the context may yet grow by.
func (a *Activities) room(sc *sessionContext) int {
	room := math.MaxInt32
	if limit := a.cfg.Engines.MaxContextTokens(); limit > int64(len(sc.tokens)) {
		room = int(limit) - len(sc.tokens)
	}
	if limit := sc.work.Spec.Limits.MaxContextTokens; limit > 0 {
		room = min(room, limit-len(sc.tokens))
	}
	return room
}

// pause waits before the next try, longer each time and with jitter.
func (a *Activities) pause(ctx context.Context, tries int) error {
	limit := min(a.retryBase<<min(tries-1, 10), retryLimit)
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
