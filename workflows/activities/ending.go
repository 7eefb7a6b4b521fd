package activities

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"go.temporal.io/sdk/temporal"

	"holdfast/router"
	"holdfast/store"
	"holdfast/workflows"
)

// Complete writes the end of a session, once, and gives back what it held. Where the
// contract wants a stale session to begin again its error is a workflows.RestartError.
func (a *Activities) Complete(ctx context.Context, end workflows.Completion) error {
	id, err := uuid.Parse(end.Session)
	if err != nil {
		return fmt.Errorf("completing: session id: %w", err)
	}
	status, err := router.ParseEndStatus(end.Status)
	if err != nil {
		return fmt.Errorf("completing session %s: %w", id, err)
	}
	began := time.Now()
	_, sample, err := a.cfg.Store.EndSession(ctx, store.Ending{
		SessionID: id, Status: status, Reward: end.Reward, ScoreDetail: end.Detail, ScoreSeconds: end.ScoreSeconds, Problem: end.Problem,
	})
	if errors.Is(err, store.ErrSessionRestarted) {
		a.letGo(ctx, id, status)
		return temporal.NewNonRetryableApplicationError("the session begins again", workflows.RestartError, nil)
	}
	if err != nil {
		return fmt.Errorf("completing session %s: %w", id, err)
	}
	if end.Stepped {
		if err := a.cfg.Store.DropObservations(ctx, id); err != nil {
			return fmt.Errorf("completing session %s: %w", id, err)
		}
	}
	a.letGo(ctx, id, sample.Status)
	a.cfg.Logger.Debug("session ended", "session", id, "status", sample.Status, "took", time.Since(began))
	return nil
}

// letGo gives back what this process keeps of a session and what the router has
// reserved for it.
func (a *Activities) letGo(ctx context.Context, id uuid.UUID, status router.EndStatus) {
	a.contexts.drop(id)
	a.cfg.Engines.Forget(router.SessionID(id))
	a.tell(ctx, &router.SessionEnded{Session: router.SessionID(id), Status: status})
}
