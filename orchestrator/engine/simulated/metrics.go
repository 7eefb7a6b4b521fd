package simulated

import (
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

// collector exports the model's state under vLLM's names.
type collector struct{ server *Server }

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
func (c collector) Describe(out chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, out) }

// Collect implements prometheus.Collector.
func (c collector) Collect(out chan<- prometheus.Metric) {
	s := c.server
	var stats instance.Stats
	var l latencies
	histograms := map[*prometheus.Desc]prometheus.Metric{}
	model := s.cfg.Model
	s.core.look(func() {
		stats = s.core.model.Stats()
		l = s.core.latency
		for desc, h := range map[*prometheus.Desc]*histogram{descFirst: &l.first, descTotal: &l.total, descQueue: &l.queue, descInference: &l.inference} {
			count, buckets := h.cumulative()
			histograms[desc] = prometheus.MustNewConstHistogram(desc, count, h.sum, buckets, model, "0")
		}
	})
	gauge := func(d *prometheus.Desc, v float64) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, model, "0")
	}
	counter := func(d *prometheus.Desc, v int64) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), model, "0")
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
		out <- prometheus.MustNewConstMetric(descSuccess, prometheus.CounterValue, float64(n), reason, model, "0")
	}
	for state, v := range map[string]float64{"awake": 1, "weights_offloaded": 0, "discard_all": 0} {
		out <- prometheus.MustNewConstMetric(descSleep, prometheus.GaugeValue, v, state, model, "0")
	}
	for _, h := range histograms {
		out <- h
	}
	out <- prometheus.MustNewConstMetric(descConfig, prometheus.GaugeValue, 1,
		strconv.Itoa(s.cfg.Engine.BlockTokens), strconv.Itoa(s.cfg.Engine.CapacityBlocks), "True", "0")
}
