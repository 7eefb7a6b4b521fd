package activities

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
	"holdfast/workflows"
)

// Complete writes the end of a session, once, and gives back what it held.
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
	if err != nil {
		return fmt.Errorf("completing session %s: %w", id, err)
	}
	if end.Stepped {
		if err := a.cfg.Store.DropObservations(ctx, id); err != nil {
			return fmt.Errorf("completing session %s: %w", id, err)
		}
	}
	a.contexts.drop(id)
	a.cfg.Engines.Forget(router.SessionID(id))
	a.tell(ctx, &router.SessionEnded{Session: router.SessionID(id), Status: sample.Status})
	a.cfg.Logger.Debug("session ended", "session", id, "status", sample.Status, "took", time.Since(began))
	return nil
}
