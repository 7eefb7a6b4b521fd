package simulated

import (
	"slices"
	"sort"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"holdfast/router/sim/instance"
)

// latencies are the distributions that vLLM exports, in engine seconds.
type latencies struct {
	first, total, queue, inference histogram
	stopped, length, aborted       uint64
}

func newLatencies() latencies {
	bounds := []float64{0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000}
	return latencies{newHistogram(bounds), newHistogram(bounds), newHistogram(bounds), newHistogram(bounds), 0, 0, 0}
}

func (l *latencies) observeFirst(e *instance.Event) {
	l.queue.observe(float64(e.QueueNanos) / 1e9)
	l.first.observe(float64(e.QueueNanos+e.PrefillNanos) / 1e9)
}

func (l *latencies) observeEnd(x *call, e *instance.Event) {
	decode := float64(e.At-x.firstAt) / 1e9
	prefill := float64(e.PrefillNanos) / 1e9
	l.inference.observe(prefill + decode)
	l.total.observe(float64(e.QueueNanos)/1e9 + prefill + decode)
	if x.stopped {
		l.stopped++
	} else {
		l.length++
	}
}

// histogram is a Prometheus histogram guarded by the core's lock.
type histogram struct {
	bounds []float64
	counts []uint64 // one more than bounds
	sum    float64
}

func newHistogram(bounds []float64) histogram {
	return histogram{bounds: bounds, counts: make([]uint64, len(bounds)+1)}
}

func (h *histogram) observe(v float64) {
	h.counts[sort.SearchFloat64s(h.bounds, v)]++
	h.sum += v
}

func (h *histogram) cumulative() (count uint64, buckets map[float64]uint64) {
	buckets = make(map[float64]uint64, len(h.bounds))
	for i, b := range h.bounds {
		count += h.counts[i]
		buckets[b] = count
	}
	return count + h.counts[len(h.bounds)], buckets
}

// snapshot is what a metrics page shows of one rank.
type snapshot struct {
	rank    string
	stats   instance.Stats
	latency latencies
	evicted int64   // blocks
	at      float64 // engine seconds
}

// snapshots copies the figures of every rank. Histograms are copied too.
func (s *Server) snapshots() (list []snapshot) {
	s.eachRank(func(c *core) {
		c.look(func() {
			list = append(list, snapshot{strconv.Itoa(s.cfg.FirstRank + c.rank), c.model.Stats(), c.latency.clone(), c.chains.evicted, float64(c.model.Now()) / 1e9})
		})
	})
	return list
}

func (l latencies) clone() latencies {
	for _, h := range []*histogram{&l.first, &l.total, &l.queue, &l.inference} {
		h.counts = slices.Clone(h.counts)
	}
	return l
}

// vllmCollector exports the model's state under vLLM's names.
type vllmCollector struct{ server *Server }

var engineLabels = []string{"model_name", "engine"}

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("vllm:"+name, help, append(labels, engineLabels...), nil)
}

var (
	descRunning     = describe("num_requests_running", "Number of requests in model execution batches.")
	descWaiting     = describe("num_requests_waiting", "Number of requests waiting to be processed.")
	descUsage       = describe("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
	descQueries     = describe("prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens.")
	descHits        = describe("prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.")
	descPreemptions = describe("num_preemptions_total", "Cumulative number of preemption from the engine.")
	descPrompt      = describe("prompt_tokens_total", "Number of prefill tokens processed.")
	descCached      = describe("prompt_tokens_cached_total", "Number of prompt tokens found in the prefix cache.")
	descGenerated   = describe("generation_tokens_total", "Number of generation tokens processed.")
	descSuccess     = describe("request_success_total", "Count of successfully processed requests.", "finished_reason")
	descSleep       = describe("engine_sleep_state", "Engine sleep state; awake = 1 means the engine serves.", "sleep_state")
	descFirst       = describe("time_to_first_token_seconds", "Histogram of time to first token in engine seconds.")
	descTotal       = describe("e2e_request_latency_seconds", "Histogram of end to end request latency in engine seconds.")
	descQueue       = describe("request_queue_time_seconds", "Histogram of time spent in the waiting queue in engine seconds.")
	descInference   = describe("request_inference_time_seconds", "Histogram of time spent in prefill and decode in engine seconds.")
	descConfig      = prometheus.NewDesc("vllm:cache_config_info", "Information of the LLMEngine CacheConfig",
		[]string{"block_size", "num_gpu_blocks", "enable_prefix_caching", "engine"}, nil)
)

// Describe implements prometheus.Collector.
func (c vllmCollector) Describe(out chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, out) }

// Collect implements prometheus.Collector.
func (c vllmCollector) Collect(out chan<- prometheus.Metric) {
	level := c.server.sleepLevel()
	for _, rank := range c.server.snapshots() {
		c.collect(out, &rank, level)
	}
}

func (c vllmCollector) collect(out chan<- prometheus.Metric, rank *snapshot, sleepLevel int) {
	cfg, stats, l := &c.server.cfg, &rank.stats, &rank.latency
	labels := []string{cfg.Model, rank.rank}
	gauge := func(d *prometheus.Desc, v float64) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v int64) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	gauge(descRunning, float64(stats.Running()))
	gauge(descWaiting, float64(stats.Waiting))
	gauge(descUsage, float64(stats.UsedBlocks())/float64(stats.TotalBlocks))
	counter(descQueries, stats.PromptTokens)
	counter(descHits, stats.CachedTokens)
	counter(descPreemptions, stats.Preemptions)
	counter(descPrompt, stats.PromptTokens)
	counter(descCached, stats.CachedTokens)
	counter(descGenerated, stats.GeneratedTokens)
	for reason, n := range map[string]uint64{"stop": l.stopped, "length": l.length, "abort": l.aborted} {
		out <- prometheus.MustNewConstMetric(descSuccess, prometheus.CounterValue, float64(n), reason, cfg.Model, rank.rank)
	}
	for level, state := range []string{"awake", "weights_offloaded", "discard_all"} {
		v := 0.0
		if level == sleepLevel {
			v = 1
		}
		out <- prometheus.MustNewConstMetric(descSleep, prometheus.GaugeValue, v, state, cfg.Model, rank.rank)
	}
	for desc, h := range map[*prometheus.Desc]*histogram{descFirst: &l.first, descTotal: &l.total, descQueue: &l.queue, descInference: &l.inference} {
		count, buckets := h.cumulative()
		out <- prometheus.MustNewConstHistogram(desc, count, h.sum, buckets, labels...)
	}
	out <- prometheus.MustNewConstMetric(descConfig, prometheus.GaugeValue, 1,
		strconv.Itoa(cfg.Engine.BlockTokens), strconv.Itoa(cfg.Engine.CapacityBlocks), "True", rank.rank)
}
