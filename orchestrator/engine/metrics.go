package engine

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strconv"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// parseMetrics reads vLLM's Prometheus page, under the names of its older and
// newer versions. Series of several engines behind one page are added up, the
// share of KV in use is their mean.
func parseMetrics(page []byte) (Metrics, error) {
	families, err := parseFamilies(page)
	if err != nil {
		return Metrics{}, err
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
	usage := first(families, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
	m.KVUsage = mean(usage)
	readCacheConfig(families, &m)
	m.Ranks = readRanks(families, "engine", "vllm:num_requests_running", "vllm:num_requests_waiting", usage)
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

func parseFamilies(page []byte) (map[string]*dto.MetricFamily, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(page))
	if err != nil {
		return nil, fmt.Errorf("parsing the metrics page: %w", err)
	}
	return families, nil
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

// readRanks splits the load by the label that numbers an instance's data-parallel
// ranks; nil if there is one rank.
func readRanks(families map[string]*dto.MetricFamily, rankLabel, running, waiting string, usage *dto.MetricFamily) []RankMetrics {
	var ranks []RankMetrics
	each := func(family *dto.MetricFamily, take func(rank *RankMetrics, v float64)) {
		if family == nil {
			return
		}
		for _, series := range family.Metric {
			number, err := strconv.ParseUint(label(series, rankLabel), 10, 16)
			if err != nil {
				continue
			}
			i, found := slices.BinarySearchFunc(ranks, int(number), func(r RankMetrics, n int) int { return r.Rank - n })
			if !found {
				ranks = slices.Insert(ranks, i, RankMetrics{Rank: int(number)})
			}
			take(&ranks[i], value(series))
		}
	}
	each(families[running], func(r *RankMetrics, v float64) { r.Running += int(toInt64(v)) })
	each(families[waiting], func(r *RankMetrics, v float64) { r.Waiting += int(toInt64(v)) })
	each(usage, func(r *RankMetrics, v float64) { r.KVUsage = share(v) })
	if len(ranks) < 2 {
		return nil
	}
	return ranks
}

// mean is the mean of a family's series as a share of 1.
func mean(family *dto.MetricFamily) float64 {
	if family == nil {
		return 0
	}
	var total float64
	for _, series := range family.Metric {
		total += value(series)
	}
	return share(total / float64(len(family.Metric)))
}

// share brings a value with nonsense in it between 0 and 1.
func share(v float64) float64 {
	if math.IsNaN(v) {
		return 0
	}
	return min(max(v, 0), 1)
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
