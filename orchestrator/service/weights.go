package service

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

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

// weightStatus is what the coordinator is at, ok while this process owns the pool.
func (s *Service) weightStatus() (status weights.Status, ok bool) {
	o := s.owned.current()
	if o == nil {
		return weights.Status{}, false
	}
	return o.updates.Status(), true
}

// weightMetrics shows where weight updates stand, read when a page is asked for.
type weightMetrics struct {
	status            func() (weights.Status, bool)
	openSecs, unasked *prometheus.Desc
}

func newWeightMetrics(pool string, status func() (weights.Status, bool)) *weightMetrics {
	labels := prometheus.Labels{"pool": pool}
	return &weightMetrics{
		status: status,
		openSecs: prometheus.NewDesc("holdfast_weight_update_open_seconds",
			"Age of the open weight update by its state; absent if none is. Beyond your trainer's time to load, and at once in state failed, see GET /pools/POOL/weight-updates: engines are paused meanwhile.", []string{"state"}, labels),
		unasked: prometheus.NewDesc("holdfast_weights_changed_unasked_total",
			"Times an engine reported other weights than it was known to have. If that is not how your trainer works, look for who loads them.", nil, labels),
	}
}

// Describe implements prometheus.Collector.
func (m *weightMetrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- m.openSecs
	ch <- m.unasked
}

// Collect implements prometheus.Collector.
func (m *weightMetrics) Collect(ch chan<- prometheus.Metric) {
	status, ok := m.status()
	if !ok {
		return
	}
	if status.State != "" {
		ch <- prometheus.MustNewConstMetric(m.openSecs, prometheus.GaugeValue, time.Since(status.BeganAt).Seconds(), string(status.State))
	}
	ch <- prometheus.MustNewConstMetric(m.unasked, prometheus.CounterValue, float64(status.Unasked))
}
