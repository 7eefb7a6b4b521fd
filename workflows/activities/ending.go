package activities

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
	"holdfast/workflows"
	"holdfast/workflows/task"
)

// Score gives the reward of a finished session by its task's scorer.
func (a *Activities) Score(ctx context.Context, session string) (workflows.ScoreReply, error) {
	id, err := uuid.Parse(session)
	if err != nil {
		return workflows.ScoreReply{}, fmt.Errorf("scoring: session id: %w", err)
	}
	work, err := a.cfg.Store.SessionForWork(ctx, id)
	if err != nil {
		return workflows.ScoreReply{}, fmt.Errorf("scoring session %s: %w", id, err)
	}
	scorer := work.Spec.Scorer
	if scorer == nil {
		return workflows.ScoreReply{}, nil
	}
	switch scorer.Kind {
	case task.ScorerEnvironment:
		if work.Spec.Environment == nil || work.Spec.Environment.Reward == nil {
			return workflows.ScoreReply{Problem: "the environment gave no reward"}, nil
		}
		return scored(*work.Spec.Environment.Reward, map[string]any{"scorer": scorer.Kind})
	case task.ScorerExactMatch:
		tokens, err := a.cfg.Store.Context(ctx, id)
		if err != nil {
			return workflows.ScoreReply{}, fmt.Errorf("scoring session %s: %w", id, err)
		}
		reward := 0.0
		if tail := len(tokens) - len(scorer.TokenIDs); tail >= 0 && slices.Equal(tokens[tail:], scorer.TokenIDs) {
			reward = 1
		}
		return scored(reward, map[string]any{"scorer": scorer.Kind, "expected_tokens": len(scorer.TokenIDs)})
	}
	return workflows.ScoreReply{Problem: fmt.Sprintf("scorer kind %q is unknown", scorer.Kind)}, nil
}

func scored(reward float64, detail map[string]any) (workflows.ScoreReply, error) {
	text, err := json.Marshal(detail)
	if err != nil {
		return workflows.ScoreReply{}, fmt.Errorf("encoding the score's detail: %w", err)
	}
	return workflows.ScoreReply{Reward: &reward, Detail: text}, nil
}

// Complete writes the end of a session, once, and gives back what it held.
func (a *Activities) Complete(ctx context.Context, end workflows.Completion) error {
	id, err := uuid.Parse(end.Session)
	if err != nil {
		return fmt.Errorf("completing: session id: %w", err)
	}
	status, err := parseStatus(end.Status)
	if err != nil {
		return fmt.Errorf("completing session %s: %w", id, err)
	}
	began := time.Now()
	_, sample, err := a.cfg.Store.EndSession(ctx, store.Ending{
		SessionID: id, Status: status, Reward: end.Reward, ScoreDetail: end.Detail, Problem: end.Problem,
	})
	if err != nil {
		return fmt.Errorf("completing session %s: %w", id, err)
	}
	a.contexts.drop(id)
	a.cfg.Engines.Forget(router.SessionID(id))
	a.tell(ctx, &router.SessionEnded{Session: router.SessionID(id), Status: sample.Status})
	a.cfg.Logger.Debug("session ended", "session", id, "status", sample.Status, "took", time.Since(began))
	return nil
}

func parseStatus(text string) (router.EndStatus, error) {
	for _, s := range []router.EndStatus{router.Completed, router.Truncated, router.Stale, router.Failed, router.Cancelled} {
		if s.String() == text {
			return s, nil
		}
	}
	return 0, fmt.Errorf("%q is no end status", text)
}
