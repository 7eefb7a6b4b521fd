package service

import (
	"context"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/fleet"
	"holdfast/orchestrator/weights"
	"holdfast/router"
	"holdfast/store"
)

// guarded are the fleet's engines behind the doors of weight updates: a request
// waits while its instance is paused, and carries the salt of the weights that it
// will be served by.
type guarded struct {
	*fleet.Fleet
	weights *weights.Coordinator
}

// Generate runs one model call; see fleet.Fleet.
func (g guarded) Generate(ctx context.Context, instance router.InstanceID, session router.SessionID, request engine.Request, onProgress func(engine.Progress)) (engine.Result, error) {
	pass, err := g.weights.Enter(ctx, instance)
	if err != nil {
		return engine.Result{}, err
	}
	defer pass.Leave()
	request.CacheSalt = pass.CacheSalt
	result, err := g.Fleet.Generate(ctx, instance, session, request, onProgress)
	result.WeightVersion = g.weights.Label(instance, pass, result.WeightVersion)
	return result, err
}

// PolicyVersion is that of an instance's weights now.
func (g guarded) PolicyVersion(instance router.InstanceID) int64 { return g.weights.Version(instance) }

// newCoordinator makes the term's coordinator of weight updates. engines may be
// reached only once it runs.
func (s *Service) newCoordinator(epoch int64, loop weights.Router, engines weights.Engines, instances []store.Instance) (*weights.Coordinator, error) {
	versions := make(map[router.InstanceID]int64, len(instances))
	for i := range instances {
		versions[router.InstanceID(instances[i].ID)] = instances[i].PolicyVersion
	}
	return weights.New(weights.Config{
		Pool: s.cfg.Pool, Epoch: epoch, Store: s.cfg.Store, Router: loop, Engines: engines, Versions: versions, Limits: s.cfg.Weights,
		Changed: func() <-chan struct{} { return s.cfg.Listener.WaitFor(store.WeightsTopic(s.cfg.Pool)) },
		Logger:  s.cfg.Logger.With("pool", s.cfg.Pool, "epoch", epoch),
	})
}
