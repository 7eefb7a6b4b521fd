package activities

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/scoring"
	"holdfast/store"
	"holdfast/workflows"
	"holdfast/workflows/task"
)

// scoreAttempts bounds how often a sample is scored when its scorer cannot be reached
// or is exhausted, on top of the tries that a call to a server makes by itself.
// Every other failure of a scorer is final.
const scoreAttempts = 4

// Score gives the reward of a finished session by its task's scorer. A scorer's
// failure is the reply's problem, which is no reward; errors are those that trying
// again later may mend: of the store, and of engines that are away while the last
// turn's text is needed.
func (a *Activities) Score(ctx context.Context, session string) (workflows.ScoreReply, error) {
	id, err := uuid.Parse(session)
	if err != nil {
		return workflows.ScoreReply{}, fmt.Errorf("scoring: session id: %w", err)
	}
	ctx, release := a.running.track(ctx, id)
	defer release()
	defer (&pulse{}).beat(ctx)()
	work, err := a.cfg.Store.SessionForWork(ctx, id)
	if err != nil {
		return workflows.ScoreReply{}, fmt.Errorf("scoring session %s: %w", id, err)
	}
	if work.CancelRequested {
		// The workflow hears of it in a moment, and ends the session as cancelled.
		return workflows.ScoreReply{}, fmt.Errorf("scoring session %s: it is to be cancelled", id)
	}
	if work.Spec.Scorer == nil {
		return workflows.ScoreReply{}, nil
	}
	began := time.Now()
	reply, err := a.score(ctx, &work)
	if err != nil {
		return workflows.ScoreReply{}, fmt.Errorf("scoring session %s: %w", id, err)
	}
	reply.Seconds = time.Since(began).Seconds()
	return reply, nil
}

func (a *Activities) score(ctx context.Context, work *store.WorkSession) (workflows.ScoreReply, error) {
	wanted := work.Spec.Scorer
	sample, problem, err := a.sampleToScore(ctx, work)
	if err != nil || problem != "" {
		return workflows.ScoreReply{Problem: problem}, err
	}
	if wanted.Kind == task.ScorerExec {
		leave, err := a.programs.enter(ctx)
		if err != nil {
			return workflows.ScoreReply{}, err
		}
		defer leave()
	}
	for attempt := 1; ; attempt++ {
		outcome := a.scorers.Score(ctx, *wanted, sample)
		switch {
		case ctx.Err() != nil:
			return workflows.ScoreReply{}, ctx.Err()
		case outcome.Failure == nil:
			return scored(wanted.Kind, outcome)
		case !outcome.Failure.Kind.Repeatable():
			return workflows.ScoreReply{Problem: outcome.Failure.Error()}, nil
		case attempt == scoreAttempts:
			return workflows.ScoreReply{Problem: fmt.Sprintf("%v, at each of %d attempts", outcome.Failure, attempt)}, nil
		}
		a.cfg.Logger.Warn("scoring failed, trying again", "session", work.ID, "attempt", attempt, "error", outcome.Failure)
		if err := a.pause(ctx, attempt); err != nil {
			return workflows.ScoreReply{}, err
		}
	}
}

// slots bound how many of something run at once.
type slots chan struct{}

// enter waits for a slot, which leave gives back.
func (s slots) enter(ctx context.Context) (leave func(), err error) {
	select {
	case s <- struct{}{}:
		return func() { <-s }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// sampleToScore is what the task's scorer looks at. A problem says that this session
// can never be scored.
func (a *Activities) sampleToScore(ctx context.Context, work *store.WorkSession) (sample scoring.Sample, problem string, err error) {
	sample = scoring.Sample{ID: work.ID.String(), Metadata: work.Spec.Metadata}
	if work.Spec.Environment != nil {
		sample.EnvironmentReward = work.Spec.Environment.Reward
	}
	if work.Spec.Stepped() != nil {
		if sample.EnvironmentReward, err = a.cfg.Store.EnvironmentReward(ctx, work.ID); err != nil {
			return sample, "", err
		}
	}
	if work.Spec.Scorer.Kind == task.ScorerEnvironment {
		return sample, "", nil
	}
	var finish string
	if sample.TokenIDs, finish, err = a.cfg.Store.LastOutput(ctx, work.ID); err != nil {
		return sample, "", err
	}
	if work.Spec.Scorer.TokenIDs != nil || len(sample.TokenIDs) == 0 {
		return sample, "", nil
	}
	err = a.askEngines(ctx, func() (err error) {
		sample.Text, err = a.cfg.Engines.Detokenize(ctx, sample.TokenIDs, finish == engine.FinishStop.String())
		return err
	})
	var final *finalError
	if errors.As(err, &final) {
		return sample, fmt.Sprintf("the scorer needs the text of the last turn: %v", final.error), nil
	}
	return sample, "", err
}

// finalError is an engines' answer that asking again does not change.
type finalError struct{ error }

func (e *finalError) Unwrap() error { return e.error }

// askEngines asks for something that any engine may answer, up to EngineAttempts
// times. Engines that are away are no answer: that error comes back as it is, for
// whoever can wait longer. Every other one is a *finalError.
func (a *Activities) askEngines(ctx context.Context, ask func() error) error {
	for attempt := 1; ; attempt++ {
		err := ask()
		var engineErr *engine.Error
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, engine.ErrNotCalled):
			return err
		case errors.As(err, &engineErr) && engineErr.Class == engine.FailTurn, attempt == a.cfg.EngineAttempts:
			return &finalError{err}
		}
		a.cfg.Logger.Warn("engines did not answer, trying again", "attempt", attempt, "error", err)
		if err := a.pause(ctx, attempt); err != nil {
			return err
		}
	}
}

// scored is the reply with a reward. A scorer without words of its own is named.
func scored(kind spec.ScorerKind, outcome scoring.Outcome) (workflows.ScoreReply, error) {
	detail := outcome.Detail
	if detail == nil {
		var err error
		if detail, err = json.Marshal(map[string]any{"scorer": kind}); err != nil {
			return workflows.ScoreReply{}, fmt.Errorf("encoding the score's detail: %w", err)
		}
	}
	return workflows.ScoreReply{Reward: &outcome.Reward, Detail: detail}, nil
}
