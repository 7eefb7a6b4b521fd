package client

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"holdfast/api/wire"
)

// BeginWeightUpdate begins an update of a pool's weights. Asking the same again is harmless.
func (c *Client) BeginWeightUpdate(ctx context.Context, pool string, update wire.NewWeightUpdate) (wire.WeightUpdate, error) {
	return do[wire.WeightUpdate](ctx, c, call{
		method: http.MethodPost, path: []string{"pools", pool, "weight-updates"}, body: jsonBody(update), repeatable: true,
	})
}

// WeightUpdate reads one update.
func (c *Client) WeightUpdate(ctx context.Context, pool string, version int64) (wire.WeightUpdate, error) {
	return do[wire.WeightUpdate](ctx, c, c.get(weightPath(pool, version)...))
}

// WeightUpdates lists the history of a pool's policy versions, newest first, below
// a version if before is positive; limit 0 means the service's.
func (c *Client) WeightUpdates(ctx context.Context, pool string, before int64, limit int) (wire.WeightUpdatePage, error) {
	k := c.get("pools", pool, "weight-updates")
	k.query = values("before", number(int(before)), "limit", number(limit))
	return do[wire.WeightUpdatePage](ctx, c, k)
}

// CommitWeightUpdate asks for a version to come into force, once its weights are
// loaded. Repeating it is harmless.
func (c *Client) CommitWeightUpdate(ctx context.Context, pool string, version int64, commit wire.CommitWeights) (wire.WeightUpdate, error) {
	return do[wire.WeightUpdate](ctx, c, call{
		method: http.MethodPost, path: append(weightPath(pool, version), "commit"), body: jsonBody(commit), repeatable: true,
	})
}

// CancelWeightUpdate gives an update up. Repeating it is harmless.
func (c *Client) CancelWeightUpdate(ctx context.Context, pool string, version int64) (wire.WeightUpdate, error) {
	return do[wire.WeightUpdate](ctx, c, call{method: http.MethodPost, path: append(weightPath(pool, version), "cancel"), repeatable: true})
}

func weightPath(pool string, version int64) []string {
	return []string{"pools", pool, "weight-updates", strconv.FormatInt(version, 10)}
}

// weightPollInterval is how often AwaitWeightUpdate reads.
const weightPollInterval = 200 * time.Millisecond

// AwaitWeightUpdate reads an update until it is in the state that is waited for. One
// that stops in another state is returned with an error that says why.
func (c *Client) AwaitWeightUpdate(ctx context.Context, pool string, version int64, state string) (wire.WeightUpdate, error) {
	ticker := time.NewTicker(weightPollInterval)
	defer ticker.Stop()
	for {
		update, err := c.WeightUpdate(ctx, pool, version)
		if err != nil || update.State == state {
			return update, err
		}
		switch update.State {
		case "failed":
			return update, fmt.Errorf("weight update %d failed in step %s: %s", version, update.FailedStep, update.Problem)
		case "committed", "cancelled", "paused":
			return update, fmt.Errorf("weight update %d is %s, not %s", version, update.State, state)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return update, fmt.Errorf("weight update %d is still %s: %w", version, update.State, ctx.Err())
		}
	}
}
