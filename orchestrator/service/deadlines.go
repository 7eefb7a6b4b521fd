package service

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"holdfast/store"
)

// deadlineInterval is how late a deadline may be noticed.
const deadlineInterval = 500 * time.Millisecond

// deadlineKeeper ends what is left of groups whose deadline has passed. Deadlines are
// times in the store, so whoever owns the pool keeps all of them, whatever died.
type deadlineKeeper struct {
	store    *store.Store
	pool     string
	epoch    int64
	messages wake
	log      *slog.Logger
}

// run keeps deadlines until ctx ends.
func (k *deadlineKeeper) run(ctx context.Context) error {
	ticker := time.NewTicker(deadlineInterval)
	defer ticker.Stop()
	for {
		concerned, err := k.store.ExpireDeadlines(ctx, k.pool, k.epoch)
		switch {
		case err != nil && ctx.Err() == nil && !errors.Is(err, store.ErrFenced):
			k.log.Warn("keeping deadlines failed, trying again", "error", err)
		case concerned > 0:
			k.log.Info("deadlines of groups have passed", "sessions", concerned)
			k.messages.notify()
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}
