package client

import (
	"context"
	"net/http"

	"holdfast/api/wire"
)

// Pools lists all pools.
func (c *Client) Pools(ctx context.Context) (wire.PoolList, error) {
	return do[wire.PoolList](ctx, c, c.get("pools"))
}

// Policy reads the version of a pool's weights.
func (c *Client) Policy(ctx context.Context, pool string) (wire.Policy, error) {
	return do[wire.Policy](ctx, c, c.get("pools", pool, "policy"))
}

// PutPolicy tells that the pool's engines have new weights.
func (c *Client) PutPolicy(ctx context.Context, pool string, version int64) (wire.Policy, error) {
	return do[wire.Policy](ctx, c, call{
		method: http.MethodPut, path: []string{"pools", pool, "policy"}, body: jsonBody(wire.NewPolicy{PolicyVersion: version}), repeatable: true,
	})
}

// RegisterInstance adds an engine, or announces a known one anew.
func (c *Client) RegisterInstance(ctx context.Context, pool string, instance wire.NewInstance) (wire.Instance, error) {
	return do[wire.Instance](ctx, c, call{
		method: http.MethodPost, path: []string{"pools", pool, "instances"}, body: jsonBody(instance), repeatable: true,
	})
}

// Instances lists a pool's instances.
func (c *Client) Instances(ctx context.Context, pool string) (wire.InstanceList, error) {
	return do[wire.InstanceList](ctx, c, c.get("pools", pool, "instances"))
}

// HeartbeatInstance renews an instance's time to live.
func (c *Client) HeartbeatInstance(ctx context.Context, pool, instance string) error {
	return c.changeInstance(ctx, call{method: http.MethodPost, path: []string{"pools", pool, "instances", instance, "heartbeat"}})
}

// DrainInstance starts or ends draining.
func (c *Client) DrainInstance(ctx context.Context, pool, instance string, draining bool) error {
	return c.changeInstance(ctx, call{
		method: http.MethodPost, path: []string{"pools", pool, "instances", instance, "drain"}, body: jsonBody(wire.Drain{Draining: &draining}),
	})
}

// RemoveInstance takes an instance out of its pool.
func (c *Client) RemoveInstance(ctx context.Context, pool, instance string) error {
	return c.changeInstance(ctx, call{method: http.MethodDelete, path: []string{"pools", pool, "instances", instance}})
}

func (c *Client) changeInstance(ctx context.Context, k call) error {
	k.repeatable = true
	_, err := do[struct{}](ctx, c, k)
	return err
}

// Router reads what a pool's router knows; a process that does not run it
// answers with a problem of status 503.
func (c *Client) Router(ctx context.Context, pool string) (wire.RouterView, error) {
	return do[wire.RouterView](ctx, c, c.get("pools", pool, "router"))
}
