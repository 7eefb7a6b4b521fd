package engine

import (
	"errors"
	"math"

	dto "github.com/prometheus/client_model/go"
)

// sglangPage is SGLang's Prometheus page, without the series that tensor- and
// pipeline-parallel ranks repeat.
type sglangPage map[string]*dto.MetricFamily

// family finds a metric under the first of its names; where colons are not kept, as
// some collectors do, it is sglang_ instead of sglang:.
func (p sglangPage) family(names ...string) *dto.MetricFamily {
	for _, name := range names {
		if f := first(p, "sglang:"+name, "sglang_"+name); f != nil {
			return f
		}
	}
	return nil
}

func (p sglangPage) sum(names ...string) (float64, bool) {
	f := p.family(names...)
	if f == nil {
		return 0, false
	}
	return sum(map[string]*dto.MetricFamily{"": f}, "")
}

func (p sglangPage) total(names ...string) int64 {
	v, _ := p.sum(names...)
	return toInt64(v)
}

// parseSGLangMetrics reads SGLang's Prometheus page, under the names of its older
// and newer versions. Data-parallel ranks are added up, the share of KV in use is
// their mean.
func parseSGLangMetrics(text []byte) (Metrics, error) {
	families, err := parseFamilies(text)
	if err != nil {
		return Metrics{}, err
	}
	for _, f := range families {
		f.Metric = leaders(f.Metric)
	}
	page := sglangPage(families)
	running, ok := page.sum("num_running_reqs")
	if !ok {
		return Metrics{}, errors.New("the metrics page has no sglang:num_running_reqs")
	}
	usage := page.family("token_usage", "full_token_usage")
	m := Metrics{
		Running: int(toInt64(running)), Waiting: int(page.total("num_queue_reqs", "num_waiting_reqs")),
		KVUsage:            mean(usage),
		Preemptions:        page.total("num_retracted_requests_total", "num_retracted_requests"),
		PromptTokens:       page.total("prompt_tokens_total", "prompt_tokens"),
		GeneratedTokens:    page.total("generation_tokens_total", "generation_tokens"),
		CachedPromptTokens: -1,
	}
	if cached, ok := page.sum("cached_tokens_total", "cached_tokens"); ok {
		// SGLang counts them once per request, so the figures are those of a lookup too.
		m.CachedPromptTokens = toInt64(cached)
		m.PrefixQueries, m.PrefixHits = m.PromptTokens, m.CachedPromptTokens
	}
	capacity, capacityKnown := page.sum("max_total_num_tokens")
	if used, ok := page.sum("num_used_tokens", "kv_used_tokens"); ok && usage == nil && capacityKnown && capacity > 0 {
		m.KVUsage = share(used / capacity)
	}
	if size := page.family("page_size"); size != nil {
		m.BlockTokens = int(min(toInt64(value(size.Metric[0])), math.MaxInt32))
	}
	if m.BlockTokens > 0 && capacityKnown {
		m.CapacityBlocks = min(toInt64(capacity), 1<<40) / int64(m.BlockTokens)
	}
	if f := page.family("num_running_reqs"); f != nil {
		waiting := page.family("num_queue_reqs", "num_waiting_reqs")
		m.Ranks = readRanks(map[string]*dto.MetricFamily{"running": f, "waiting": waiting}, "dp_rank", "running", "waiting", usage)
	}
	return m, nil
}

// leaders leaves out the series of all but the first tensor- and pipeline-parallel
// rank, which repeat the same figures when every scheduler exports metrics.
func leaders(series []*dto.Metric) []*dto.Metric {
	kept := make([]*dto.Metric, 0, len(series))
	for _, s := range series {
		if leads(label(s, "tp_rank")) && leads(label(s, "pp_rank")) {
			kept = append(kept, s)
		}
	}
	if len(kept) == 0 {
		return series
	}
	return kept
}

func leads(rank string) bool { return rank == "" || rank == "0" }
