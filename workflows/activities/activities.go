// Package activities does what session workflows ask for: it asks the pool's
// router for placement, calls engines, and writes turns and endings.
//
// Activities may run twice and on different processes; each is idempotent by
// session and turn. They keep nothing that cannot be read again: the context
// cache only saves reading a long transcript at every turn.
package activities

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"time"

	"github.com/google/uuid"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/worker"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/pool"
	"holdfast/orchestrator/scoring"
	"holdfast/router"
	"holdfast/store"
	"holdfast/workflows"
)

// Router decides where turns run; the pool's loop.
type Router interface {
	RequestTurn(ctx context.Context, request router.TurnRequested) (pool.Placement, error)
	// AwaitTurn waits out holds, of which it tells.
	AwaitTurn(ctx context.Context, request router.TurnRequested, onHold func(router.Reason)) (pool.Placement, error)
	Tell(ctx context.Context, event router.Event) error
}

// Engines reaches the pool's instances by id.
type Engines interface {
	// Generate runs one model call. Its errors are *engine.Error or ctx's own.
	Generate(ctx context.Context, instance router.InstanceID, session router.SessionID, request engine.Request, onProgress func(engine.Progress)) (engine.Result, error)
	// Forget drops a session that has ended from what is known of the instances.
	Forget(session router.SessionID)
	// MaxContextTokens is the largest context that any instance takes, 0 while none is known.
	MaxContextTokens() int64
	// Hashing is the policy version and block size, in tokens, under which contexts
	// are hashed for the prefix index; a size of 0 means that no instance tells what it caches.
	Hashing() (policyVersion int64, blockTokens int)
	// PolicyVersion is that of an instance's weights, 0 if nobody has told.
	PolicyVersion(instance router.InstanceID) int64
	// Receipt compares the cached tokens that a turn was placed by with what its
	// engine reported, -1 if it did not.
	Receipt(instance router.InstanceID, predictedTokens, cachedTokens int64)
	// Tokenize and Detokenize ask any engine for the ids of a prompt, and for the text
	// of generated ids; see engine.Tokenizer. With the cause engine.ErrNotCalled no
	// engine could be asked.
	Tokenize(ctx context.Context, request engine.TokenizeRequest) ([]int32, error)
	Detokenize(ctx context.Context, ids []int32, ended bool) (string, error)
}

// Config sets up Activities.
type Config struct {
	Store   *store.Store
	Router  Router
	Engines Engines
	// Epoch is the ownership under which this process writes.
	Epoch int64
	// ContextCacheBytes bounds the token contexts kept between turns.
	ContextCacheBytes int64
	// EngineAttempts bounds the tries of one turn that engines answered with errors;
	// an instance that cannot be reached at all does not count, since the router
	// then holds the turn until one can.
	EngineAttempts int
	// CheckpointTokens is how many generated tokens make a checkpoint; 0 means 2,048.
	CheckpointTokens int
	// Environments are those of sessions; nil means that tasks may have none that are
	// stepped.
	Environments Environments
	// Scoring says what scorers may do and reach.
	Scoring  scoring.Config
	Counters *Counters
	Logger   *slog.Logger
}

// Activities are the activities of one pool's owner.
type Activities struct {
	cfg      Config
	contexts *contextCache
	running  *running
	callers  callers
	scorers  *scoring.Scorers
	// programs holds a place for each scorer's program: as many as there are processors.
	programs slots
	// steppers holds a place for each step of an exec environment.
	steppers slots
	// made is when this process began to run the pool's activities.
	made time.Time
	// retryBase and partingPatience are constants but for tests.
	retryBase, partingPatience time.Duration
}

// New returns activities that are ready to be registered.
func New(cfg Config) (*Activities, error) {
	if cfg.Store == nil || cfg.Router == nil || cfg.Engines == nil || cfg.Counters == nil || cfg.Logger == nil {
		return nil, errors.New("activities: store, router, engines, counters and logger are required")
	}
	if cfg.EngineAttempts < 1 || cfg.ContextCacheBytes < 1 {
		return nil, errors.New("activities: engine attempts and context cache bytes must be positive")
	}
	if cfg.CheckpointTokens == 0 {
		cfg.CheckpointTokens = checkpointTokens
	}
	if cfg.CheckpointTokens < 0 {
		return nil, errors.New("activities: checkpoint tokens must not be negative")
	}
	contexts, err := newContextCache(cfg.ContextCacheBytes)
	if err != nil {
		return nil, fmt.Errorf("activities: %w", err)
	}
	return &Activities{made: time.Now(), cfg: cfg, contexts: contexts, running: newRunning(), scorers: scoring.NewScorers(cfg.Scoring), programs: make(slots, runtime.GOMAXPROCS(0)), steppers: make(slots, programsPerProcessor*runtime.GOMAXPROCS(0)), retryBase: retryBase, partingPatience: partingPatience}, nil
}

// Register gives the activities to a worker under their fixed names.
func (a *Activities) Register(w worker.ActivityRegistry) {
	w.RegisterActivityWithOptions(a.Admit, activity.RegisterOptions{Name: workflows.AdmitActivity})
	w.RegisterActivityWithOptions(a.Turn, activity.RegisterOptions{Name: workflows.TurnActivity})
	w.RegisterActivityWithOptions(a.Step, activity.RegisterOptions{Name: workflows.StepActivity})
	w.RegisterActivityWithOptions(a.Release, activity.RegisterOptions{Name: workflows.ReleaseActivity})
	w.RegisterActivityWithOptions(a.Outside, activity.RegisterOptions{Name: workflows.OutsideActivity})
	w.RegisterActivityWithOptions(a.Score, activity.RegisterOptions{Name: workflows.ScoreActivity})
	w.RegisterActivityWithOptions(a.Complete, activity.RegisterOptions{Name: workflows.CompleteActivity})
}

// CancelRunning ends the session's model call if this process is making one, so
// that the engine stops before Temporal's cancellation arrives with a heartbeat.
func (a *Activities) CancelRunning(session uuid.UUID) { a.running.cancel(session) }

// Admit enqueues a session's turn with the router and answers admitted or held.
func (a *Activities) Admit(ctx context.Context, ref workflows.TurnRef) (workflows.AdmitReply, error) {
	id, err := uuid.Parse(ref.Session)
	if err != nil {
		return workflows.AdmitReply{}, fmt.Errorf("admitting: session id: %w", err)
	}
	work, err := a.cfg.Store.SessionForWork(ctx, id)
	if err != nil {
		return workflows.AdmitReply{}, fmt.Errorf("admitting session %s: %w", id, err)
	}
	a.contexts.dropOlder(id, work.Restarts)
	stepped := work.Spec.Stepped() != nil
	tokenize, measured := a.tokenizePrompt, promptAwaitsTools(&work)
	if measured {
		tokenize = a.measurePrompt
	}
	if problem, err := tokenize(ctx, &work); err != nil || problem != "" {
		return workflows.AdmitReply{Outcome: workflows.OutcomeOver, Status: router.Failed.String(), Problem: problem}, err
	}
	if over, ok := a.overBefore(&work, ref.Turn); ok {
		return workflows.AdmitReply{Outcome: workflows.OutcomeOver, Status: over.Status, Problem: over.Problem}, nil
	}
	if work.Spec.External() {
		return workflows.AdmitReply{Outcome: workflows.OutcomeOutside}, nil
	}
	if ref.Turn < work.Turns {
		// The workflow has fallen behind the store (it was started anew): it goes on
		// with what follows the last committed turn, which holds no new admission.
		return workflows.AdmitReply{Outcome: workflows.OutcomeAdmitted, Turn: work.Turns - 1, Stepped: stepped}, nil
	}
	request := a.turnRequest(&work, ref.Turn, a.promptTokens(&work, ref.Turn), "")
	var sc *sessionContext
	if !measured {
		if sc, err = a.hashBeforeAdmission(ctx, id, &request); err != nil {
			return workflows.AdmitReply{}, fmt.Errorf("admitting session %s: %w", id, err)
		}
	}
	placement, err := a.cfg.Router.RequestTurn(ctx, request)
	if err != nil {
		return workflows.AdmitReply{}, fmt.Errorf("admitting session %s: %w", id, err)
	}
	if sc != nil {
		a.contexts.put(sc)
	}
	if placement.Admitted {
		return workflows.AdmitReply{Outcome: workflows.OutcomeAdmitted, Turn: ref.Turn, Stepped: stepped}, nil
	}
	return workflows.AdmitReply{Outcome: workflows.OutcomeHeld, Turn: ref.Turn, Stepped: stepped}, nil
}

// turnRequest is what the router needs to know of a turn.
func (a *Activities) turnRequest(work *store.WorkSession, turn int, promptTokens int64, avoid router.InstanceID) router.TurnRequested {
	request := router.TurnRequested{
		Session:              router.SessionID(work.ID),
		Class:                router.ClassID(work.Class),
		Turn:                 turn,
		PromptTokens:         promptTokens,
		ExpectedOutputTokens: int64(outputTokens(&work.Spec, turn)),
		Avoid:                avoid,
	}
	if work.GroupSize > 1 {
		request.Group = router.GroupID(work.TaskID)
		request.SharedTokens = int64(work.PromptTokens)
	}
	return request
}

// promptTokens is L of a turn: the context so far and what is appended before it.
func (a *Activities) promptTokens(work *store.WorkSession, turn int) int64 {
	if turn == 0 {
		return int64(work.PromptTokens)
	}
	return work.ContextTokens + int64(appendedTokens(&work.Spec, turn))
}

// overBefore tells whether the session ends before this turn is even asked for.
func (a *Activities) overBefore(work *store.WorkSession, turn int) (workflows.TurnReply, bool) {
	switch {
	case work.State == store.SessionEnded, work.CancelRequested:
		// An ending that is written already stands; completing again changes nothing.
		return over(router.Cancelled, ""), true
	case turn < work.Turns:
		return workflows.TurnReply{}, false
	}
	return a.overAt(work, turn, a.promptTokens(work, turn))
}

// overAt tells whether a limit ends the session before a turn whose prompt has so
// many tokens.
func (a *Activities) overAt(work *store.WorkSession, turn int, prompt int64) (workflows.TurnReply, bool) {
	limits := work.Spec.Limits
	if limit := a.cfg.Engines.MaxContextTokens(); limit > 0 && prompt >= limit {
		if turn == 0 {
			return over(router.Failed, fmt.Sprintf("the prompt of %d tokens leaves no room in the pool's context of %d tokens", prompt, limit)), true
		}
		return over(router.Truncated, ""), true
	}
	if limits.MaxContextTokens > 0 && prompt >= int64(limits.MaxContextTokens) {
		return over(router.Truncated, ""), true
	}
	if limits.MaxTurns > 0 && turn >= limits.MaxTurns {
		return over(router.Truncated, ""), true
	}
	if limits.MaxRunSeconds > 0 && work.FirstAdmittedAt != nil {
		ran := time.Since(*work.FirstAdmittedAt).Seconds() - work.HeldSeconds
		if ran >= limits.MaxRunSeconds {
			return over(router.Truncated, ""), true
		}
	}
	return workflows.TurnReply{}, false
}

func over(status router.EndStatus, problem string) workflows.TurnReply {
	return workflows.TurnReply{Outcome: workflows.OutcomeOver, Status: status.String(), Problem: problem}
}
