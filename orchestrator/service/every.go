package service

import (
	"context"
	"log/slog"
	"time"
)

// every does something at once and then at each interval, until ctx ends, whose error it
// returns. What fails is logged and tried again the next time.
func every(ctx context.Context, interval time.Duration, log *slog.Logger, doing string, do func(context.Context) error) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		if err := do(ctx); err != nil && ctx.Err() == nil {
			log.Warn(doing+" failed, trying again", "error", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}
