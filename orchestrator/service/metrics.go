package service

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"holdfast/orchestrator/pool"
)

// metrics are the figures of one pool's owner.
type metrics struct {
	owner     prometheus.Gauge
	events    prometheus.Counter
	decisions *prometheus.CounterVec
	record    prometheus.Histogram
}

func newMetrics(registerer prometheus.Registerer, poolName string) (*metrics, error) {
	labels := prometheus.Labels{"pool": poolName}
	m := &metrics{
		owner: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "holdfast_pool_owner", ConstLabels: labels,
			Help: "1 while this process owns the pool's router. If no replica shows 1 for longer than the lease, look at the database and at the replicas' logs.",
		}),
		events: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "holdfast_router_events_total", ConstLabels: labels,
			Help: "Events fed to the router. If it stands still while sessions are live, the owner is stuck: restart it, nothing is lost.",
		}),
		decisions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "holdfast_router_decisions_total", ConstLabels: labels,
			Help: "Router decisions by kind and reason. Many holds with no_instance: look at the engines. Many cap_changed with pressure: the pool is too small for what is admitted.",
		}, []string{"kind", "reason"}),
		record: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "holdfast_router_record_seconds", ConstLabels: labels,
			Help:    "Time to make one round of decisions durable. If it grows beyond 50 ms, every admission waits for it: look at the database's disk.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 14),
		}),
	}
	for _, c := range []prometheus.Collector{m.owner, m.events, m.decisions, m.record} {
		if err := registerer.Register(c); err != nil {
			return nil, fmt.Errorf("registering metrics: %w", err)
		}
	}
	return m, nil
}

func (m *metrics) observe(b pool.Batch) {
	m.events.Add(float64(b.Events))
	for i := range b.ByReason {
		m.decisions.WithLabelValues(b.ByReason[i].Kind.String(), b.ByReason[i].Reason.String()).Inc()
	}
	if b.Recorded > 0 {
		m.record.Observe(b.RecordDuration.Seconds())
	}
}
