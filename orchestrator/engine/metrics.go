package engine

import (
	"bytes"
	"fmt"
	"math"
	"strconv"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// parseMetrics reads vLLM's Prometheus page, under the names of its older and
// newer versions. Series of several engines behind one page are added up, the
// share of KV in use is their mean.
func parseMetrics(page []byte) (Metrics, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(page))
	if err != nil {
		return Metrics{}, fmt.Errorf("parsing the metrics page: %w", err)
	}
	running, ok := sum(families, "vllm:num_requests_running")
	if !ok {
		return Metrics{}, fmt.Errorf("the metrics page has no vllm:num_requests_running")
	}
	total := func(names ...string) int64 { v, _ := sum(families, names...); return toInt64(v) }
	m := Metrics{
		Running:            int(toInt64(running)),
		Waiting:            int(total("vllm:num_requests_waiting")),
		Preemptions:        total("vllm:num_preemptions_total", "vllm:num_preemptions"),
		PromptTokens:       total("vllm:prompt_tokens_total", "vllm:prompt_tokens"),
		GeneratedTokens:    total("vllm:generation_tokens_total", "vllm:generation_tokens"),
		PrefixQueries:      total("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries"),
		PrefixHits:         total("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits"),
		CachedPromptTokens: -1,
	}
	if cached, ok := sum(families, "vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_cached"); ok {
		m.CachedPromptTokens = toInt64(cached)
	}
	if usage := first(families, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"); usage != nil {
		for _, series := range usage.Metric {
			m.KVUsage += value(series)
		}
		m.KVUsage = min(max(m.KVUsage/float64(len(usage.Metric)), 0), 1)
		if math.IsNaN(m.KVUsage) {
			m.KVUsage = 0
		}
	}
	readCacheConfig(families, &m)
	if asleep := first(families, "vllm:engine_sleep_state"); asleep != nil {
		for _, series := range asleep.Metric {
			// One series per state; awake is 1 while the engine serves.
			if label(series, "sleep_state") == "awake" && value(series) == 0 {
				m.Asleep = true
			}
		}
	}
	return m, nil
}

// readCacheConfig reads the size of the cache, which vLLM exports as labels.
func readCacheConfig(families map[string]*dto.MetricFamily, m *Metrics) {
	config := first(families, "vllm:cache_config_info")
	if config == nil {
		return
	}
	for _, series := range config.Metric {
		blocks, err := strconv.ParseInt(label(series, "num_gpu_blocks"), 10, 64)
		size, sizeErr := strconv.ParseInt(label(series, "block_size"), 10, 32)
		if err != nil || sizeErr != nil || blocks < 0 || size < 0 || blocks > math.MaxInt64/64 {
			continue // "None" until the engine has measured its memory.
		}
		m.CapacityBlocks += blocks
		m.BlockTokens = int(size)
	}
}

func first(families map[string]*dto.MetricFamily, names ...string) *dto.MetricFamily {
	for _, name := range names {
		if f := families[name]; f != nil && len(f.Metric) > 0 {
			return f
		}
	}
	return nil
}

// sum adds the series of the first of the names that the page has.
func sum(families map[string]*dto.MetricFamily, names ...string) (float64, bool) {
	f := first(families, names...)
	if f == nil {
		return 0, false
	}
	var s float64
	for _, series := range f.Metric {
		s += value(series)
	}
	return s, true
}

func value(m *dto.Metric) float64 {
	switch {
	case m.Gauge != nil:
		return m.Gauge.GetValue()
	case m.Counter != nil:
		return m.Counter.GetValue()
	case m.Untyped != nil:
		return m.Untyped.GetValue()
	}
	return 0
}

func label(m *dto.Metric, name string) string {
	for _, l := range m.Label {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// toInt64 saturates, so that a page with nonsense in it stays harmless.
func toInt64(v float64) int64 {
	switch {
	case math.IsNaN(v) || v <= 0:
		return 0
	case v >= math.MaxInt64:
		return math.MaxInt64
	}
	return int64(v)
}
