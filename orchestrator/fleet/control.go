package fleet

import (
	"context"

	"holdfast/orchestrator/engine"
	"holdfast/router"
)

// Controller gives the calls of an instance's engine that a weight update needs;
// ok is false for an instance that is not registered or whose kind of engine has none.
func (f *Fleet) Controller(id router.InstanceID) (controller engine.Controller, ok bool) {
	m := f.member(id)
	if m == nil {
		return nil, false
	}
	return engine.ControllerOf(m.client)
}

// CacheCleared forgets what an instance had told of its cache, after a reset or new
// weights: an engine that is idle or paused does not tell of it itself. What it
// caches from now on is of the given policy version; the registry says so later.
func (f *Fleet) CacheCleared(ctx context.Context, id router.InstanceID, policyVersion int64) {
	m := f.member(id)
	if m == nil {
		return
	}
	m.mu.Lock()
	m.info.PolicyVersion = policyVersion
	m.mu.Unlock()
	if m.events != nil {
		// An error is the router's: the event stream then tells it again by itself.
		_ = m.events.Clear(ctx)
	}
}
