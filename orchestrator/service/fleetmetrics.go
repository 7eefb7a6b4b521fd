package service

import (
	"github.com/prometheus/client_golang/prometheus"

	"holdfast/orchestrator/fleet"
)

// fleetMetrics shows what the fleet sees of each instance, read when a page is
// asked for.
type fleetMetrics struct {
	statuses func() []fleet.Status

	up, observability                *prometheus.Desc
	breakerOpened, breakerRefused    *prometheus.Desc
	trusted, alarm, indexed          *prometheus.Desc
	events, gaps, resyncs            *prometheus.Desc
	predicted, cached, absoluteError *prometheus.Desc
	receiptAlarm                     *prometheus.Desc
}

func newFleetMetrics(pool string, statuses func() []fleet.Status) *fleetMetrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("holdfast_"+name, help, append([]string{"instance"}, labels...), prometheus.Labels{"pool": pool})
	}
	return &fleetMetrics{
		statuses:       statuses,
		up:             desc("instance_up", "1 while the engine answers. If 0, its sessions were placed elsewhere or are held: look at the engine."),
		observability:  desc("instance_observability", "1 for the state the instance is in. degraded: metrics are late, caps are frozen; blind: the router goes by its own ledger alone.", "state"),
		breakerOpened:  desc("breaker_opened_total", "Times the engine failed so often that it was left alone for a while."),
		breakerRefused: desc("breaker_refused_total", "Model calls that were not made because of that."),
		trusted:        desc("kv_index_trusted", "1 while the picture of the engine's prefix cache is complete. If 0 for long: see reason and alarm in GET /pools/POOL/router."),
		alarm:          desc("kv_index_alarm", "1 while cache events cannot match what engines report: block size, salt or cache groups differ. Placement then ignores prefixes."),
		indexed:        desc("kv_index_blocks", "Blocks known to be cached on the instance."),
		events:         desc("kv_events_total", "Cache events applied."),
		gaps:           desc("kv_event_gaps_total", "Gaps found in the sequence of cache events. Those that a replay heals cost nothing."),
		resyncs:        desc("kv_index_resyncs_total", "Times all locations of the instance were dropped, since events could not be had again."),
		predicted:      desc("receipt_predicted_tokens_total", "Cached prompt tokens that turns were placed by."),
		cached:         desc("receipt_cached_tokens_total", "Cached prompt tokens that the engine then reported."),
		absoluteError:  desc("receipt_error_tokens_total", "Absolute differences between the two, turn by turn."),
		receiptAlarm:   desc("receipt_alarm", "1 while promised blocks are never found by the engine."),
	}
}

// Describe implements prometheus.Collector.
func (m *fleetMetrics) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(m, ch) }

// Collect implements prometheus.Collector.
func (m *fleetMetrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
	}
	for _, s := range m.statuses() {
		id := string(s.Instance)
		gauge(m.up, flag(s.Up), id)
		gauge(m.observability, 1, id, s.State.String())
		count(m.breakerOpened, float64(s.Breaker.Opened), id)
		count(m.breakerRefused, float64(s.Breaker.Refused), id)
		count(m.predicted, float64(s.Receipts.PredictedTokens), id)
		count(m.cached, float64(s.Receipts.CachedTokens), id)
		count(m.absoluteError, float64(s.Receipts.AbsoluteErrorTokens), id)
		gauge(m.receiptAlarm, flag(s.Receipts.Alarm), id)
		if s.Events == nil {
			continue
		}
		gauge(m.trusted, flag(s.Events.Trusted), id)
		gauge(m.alarm, flag(s.Events.Alarm != ""), id)
		gauge(m.indexed, float64(s.Events.OwnHashes), id)
		count(m.events, float64(s.Events.Events), id)
		count(m.gaps, float64(s.Events.Gaps), id)
		count(m.resyncs, float64(s.Events.Resyncs), id)
	}
}

func flag(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
