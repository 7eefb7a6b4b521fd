package service

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"

	"holdfast/orchestrator/pool"
	"holdfast/router"
	"holdfast/store"
)

// reconcileInterval is how long a session that ended behind the router's back may
// hold a place.
const reconcileInterval = 30 * time.Second

// reconciler tells the router of sessions that ended without its knowledge: an
// earlier owner's worker may complete a session after this owner has restored it.
type reconciler struct {
	store  *store.Store
	loop   *pool.Loop
	forget func(router.SessionID)
	log    *slog.Logger
}

// run reconciles until ctx ends.
func (r *reconciler) run(ctx context.Context) error {
	return every(ctx, reconcileInterval, r.log, "comparing the router's sessions with the store", r.once)
}

// once asks the store about every session that the router knows.
func (r *reconciler) once(ctx context.Context) error {
	known, err := r.loop.Sessions(ctx)
	if err != nil || len(known) == 0 {
		return err
	}
	ids := make([]uuid.UUID, len(known))
	for i, id := range known {
		ids[i] = uuid.UUID(id)
	}
	ended, err := r.store.EndedAmong(ctx, ids)
	if err != nil {
		return err
	}
	for _, e := range ended {
		if err := r.loop.Tell(ctx, &router.SessionEnded{Session: router.SessionID(e.ID), Status: e.Status}); err != nil {
			return fmt.Errorf("telling the router of session %s: %w", e.ID, err)
		}
		r.forget(router.SessionID(e.ID))
	}
	return nil
}
