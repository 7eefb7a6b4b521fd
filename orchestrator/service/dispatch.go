package service

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"holdfast/store"
)

const (
	dispatchBatch = 500
	// dispatchIdle bounds how late a missed notification is noticed.
	dispatchIdle = 5 * time.Second
)

// dispatcher moves released sessions under way as the contracts' concurrency allows.
type dispatcher struct {
	store    *store.Store
	pool     string
	listener *store.Listener
	messages wake
	log      *slog.Logger
}

// run dispatches until ctx ends.
func (d *dispatcher) run(ctx context.Context) error {
	for {
		notified := d.listener.WaitFor(store.DispatchTopic())
		if err := d.dispatch(ctx); err != nil && ctx.Err() == nil {
			d.log.Warn("dispatching failed, trying again", "error", err)
		}
		timer := time.NewTimer(dispatchIdle)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-notified:
		case <-timer.C:
		}
		timer.Stop()
	}
}

func (d *dispatcher) dispatch(ctx context.Context) error {
	runs, err := d.store.Runs(ctx, store.RunQuery{Pool: d.pool, State: store.RunActive})
	if err != nil {
		return fmt.Errorf("listing active runs: %w", err)
	}
	for _, run := range runs {
		for {
			n, err := d.store.DispatchQueued(ctx, run.ID, dispatchBatch)
			if err != nil {
				return fmt.Errorf("dispatching run %s: %w", run.ID, err)
			}
			if n > 0 {
				d.messages.notify()
			}
			if n < dispatchBatch {
				break
			}
		}
	}
	return nil
}
