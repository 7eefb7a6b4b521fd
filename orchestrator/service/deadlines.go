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
	return every(ctx, deadlineInterval, k.log, "keeping deadlines", k.once)
}

func (k *deadlineKeeper) once(ctx context.Context) error {
	concerned, err := k.store.ExpireDeadlines(ctx, k.pool, k.epoch)
	if concerned > 0 {
		k.log.Info("deadlines of groups have passed", "sessions", concerned)
		k.messages.notify()
	}
	if errors.Is(err, store.ErrFenced) {
		return nil // the lease's keeper finds out as well, and ends the term
	}
	return err
}
