package service

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"holdfast/store"
)

// pressureMetrics read the back-pressure of the pool's active runs when they are
// scraped: it changes with every ending and acknowledgement, whoever serves them.
type pressureMetrics struct {
	pressures                  func(ctx context.Context) ([]store.BackPressure, error)
	undelivered, limit, paused *prometheus.Desc
	log                        *slog.Logger
}

// scrapeTimeout bounds what a scrape waits for the database.
const scrapeTimeout = 2 * time.Second

func newPressureMetrics(poolName string, log *slog.Logger, pressures func(ctx context.Context) ([]store.BackPressure, error)) *pressureMetrics {
	labels := prometheus.Labels{"pool": poolName}
	return &pressureMetrics{
		pressures: pressures, log: log,
		undelivered: prometheus.NewDesc("holdfast_run_undelivered_samples",
			"Ended samples that the slowest consumer has not acknowledged. If it only grows, the trainer does not keep up, or a consumer has gone: remove it.", []string{"run"}, labels),
		limit: prometheus.NewDesc("holdfast_run_undelivered_limit",
			"The contract's undelivered_limit; absent without one.", []string{"run"}, labels),
		paused: prometheus.NewDesc("holdfast_run_dispatch_paused",
			"1 while no queued session is started because of undelivered_limit. Engines run dry then: acknowledge sooner, or raise the limit.", []string{"run"}, labels),
	}
}

// Describe sends the metrics' descriptions.
func (m *pressureMetrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- m.undelivered
	ch <- m.limit
	ch <- m.paused
}

// Collect reads and sends; without an answer of the database the metrics are absent.
func (m *pressureMetrics) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	all, err := m.pressures(ctx)
	if err != nil {
		m.log.Warn("reading back-pressure for metrics failed", "error", err)
		return
	}
	for i := range all {
		run, paused := all[i].RunID.String(), 0.0
		if all[i].PausedAt != nil {
			paused = 1
		}
		ch <- prometheus.MustNewConstMetric(m.undelivered, prometheus.GaugeValue, float64(all[i].Undelivered), run)
		ch <- prometheus.MustNewConstMetric(m.paused, prometheus.GaugeValue, paused, run)
		if all[i].Limit != nil {
			ch <- prometheus.MustNewConstMetric(m.limit, prometheus.GaugeValue, float64(*all[i].Limit), run)
		}
	}
}
