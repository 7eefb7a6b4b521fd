package simulated

import "github.com/prometheus/client_golang/prometheus"

// sglangCollector exports the model's state under SGLang's names.
type sglangCollector struct{ server *Server }

func describeSGLang(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("sglang:"+name, help, []string{"model_name", "engine_type", "tp_rank", "pp_rank", "dp_rank"}, nil)
}

var (
	sglangRunning   = describeSGLang("num_running_reqs", "The number of running requests.")
	sglangQueue     = describeSGLang("num_queue_reqs", "The number of requests in the waiting queue.")
	sglangUsage     = describeSGLang("token_usage", "The token usage.")
	sglangUsed      = describeSGLang("num_used_tokens", "The number of used tokens.")
	sglangCapacity  = describeSGLang("max_total_num_tokens", "Maximum total number of tokens in the KV cache pool.")
	sglangPage      = describeSGLang("page_size", "Number of tokens per KV cache page.")
	sglangHitRate   = describeSGLang("cache_hit_rate", "The prefix cache hit rate.")
	sglangRate      = describeSGLang("gen_throughput", "The generation throughput (token/s).")
	sglangCached    = describeSGLang("cached_tokens_total", "Number of cached prompt tokens.")
	sglangPrompt    = describeSGLang("prompt_tokens_total", "Number of prefill tokens processed.")
	sglangGenerated = describeSGLang("generation_tokens_total", "Number of generation tokens processed.")
	sglangEvicted   = describeSGLang("evicted_tokens_total", "The number of tokens evicted from the KV cache.")
	sglangRetracted = describeSGLang("num_retractions_total", "Number of times a request was retracted.")
	sglangRequests  = describeSGLang("num_requests_total", "Number of requests processed.")
	sglangAborted   = describeSGLang("num_aborted_requests_total", "Number of requests aborted.")
	sglangFirst     = describeSGLang("time_to_first_token_seconds", "Histogram of time to first token in engine seconds.")
	sglangTotal     = describeSGLang("e2e_request_latency_seconds", "Histogram of end to end request latency in engine seconds.")
	sglangQueueTime = describeSGLang("queue_time_seconds", "Histogram of queueing time in engine seconds.")
)

// Describe implements prometheus.Collector.
func (c sglangCollector) Describe(out chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, out) }

// Collect implements prometheus.Collector.
func (c sglangCollector) Collect(out chan<- prometheus.Metric) {
	cfg := &c.server.cfg
	size := cfg.Engine.BlockTokens
	for _, rank := range c.server.snapshots() {
		stats, l := &rank.stats, &rank.latency
		labels := []string{cfg.Model, "unified", "0", "0", rank.rank}
		for desc, v := range map[*prometheus.Desc]float64{
			sglangRunning: float64(stats.Running()), sglangQueue: float64(stats.Waiting),
			sglangUsage:    float64(stats.UsedBlocks()) / float64(stats.TotalBlocks),
			sglangUsed:     float64(stats.UsedBlocks() * size),
			sglangCapacity: float64(stats.TotalBlocks * size), sglangPage: float64(size),
			sglangHitRate: ratio(stats.CachedTokens, stats.PromptTokens), sglangRate: rank.throughput(cfg),
		} {
			out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, v, labels...)
		}
		for desc, v := range map[*prometheus.Desc]int64{
			sglangCached: stats.CachedTokens, sglangPrompt: stats.PromptTokens, sglangGenerated: stats.GeneratedTokens,
			sglangEvicted: rank.evicted * int64(size), sglangRetracted: stats.Preemptions,
			sglangRequests: stats.Finished + stats.Aborted, sglangAborted: stats.Aborted,
		} {
			out <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(v), labels...)
		}
		for desc, h := range map[*prometheus.Desc]*histogram{sglangFirst: &l.first, sglangTotal: &l.total, sglangQueueTime: &l.queue} {
			count, buckets := h.cumulative()
			out <- prometheus.MustNewConstHistogram(desc, count, h.sum, buckets, labels...)
		}
	}
}
