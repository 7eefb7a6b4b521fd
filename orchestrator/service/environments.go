package service

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"

	"holdfast/orchestrator/environment"
	"holdfast/store"
)

const (
	// sweepInterval is how often environments of sessions that have ended are looked
	// for, and sweepIdle how long they have been called by nobody. Each session
	// releases its own at its end; what is left is of those that could not.
	sweepInterval = 30 * time.Second
	sweepIdle     = time.Minute
)

// sweeper closes environments that live on in this process though their session has
// ended. Those of sessions that are held, for however long, stay.
type sweeper struct {
	store        *store.Store
	environments *environment.Registry
	log          *slog.Logger
}

// run sweeps until ctx ends.
func (s *sweeper) run(ctx context.Context) error {
	return every(ctx, sweepInterval, s.log, "closing the environments of sessions that have ended",
		func(ctx context.Context) error { return s.once(ctx, sweepIdle) })
}

// once closes what is left of sessions that have ended.
func (s *sweeper) once(ctx context.Context, idle time.Duration) error {
	var ids []uuid.UUID
	for _, id := range s.environments.Idle(idle) {
		if session, err := uuid.Parse(id); err == nil {
			ids = append(ids, session)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	ended, err := s.store.EndedAmong(ctx, ids)
	if err != nil {
		return err
	}
	left := make([]string, len(ended))
	for i, e := range ended {
		left[i] = e.ID.String()
	}
	if err := s.environments.Drop(ctx, left); err != nil {
		return fmt.Errorf("closing %d environments of sessions that have ended: %w", len(left), err)
	}
	return nil
}
