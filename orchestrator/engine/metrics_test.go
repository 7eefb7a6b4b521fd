package engine

import (
	"os"
	"reflect"
	"testing"
)

func TestMetricsUnderOldAndNewNames(t *testing.T) {
	for _, test := range []struct {
		file string
		want Metrics
	}{
		{"testdata/llmd_metrics.txt", Metrics{
			PromptTokens: 1131, CachedPromptTokens: -1, GeneratedTokens: 13, PrefixQueries: 1131, PrefixHits: 96,
			CapacityBlocks: 64, BlockTokens: 16,
		}},
		{"testdata/vllm_metrics_old.txt", Metrics{
			Running: 7, Waiting: 2, KVUsage: 0.5, Preemptions: 7, PromptTokens: 1234567, CachedPromptTokens: -1,
			GeneratedTokens: 5000, PrefixQueries: 1000, PrefixHits: 900, CapacityBlocks: 14001, BlockTokens: 16, Asleep: true,
			Ranks: []RankMetrics{{Rank: 0, Running: 3, KVUsage: 0.25}, {Rank: 1, Running: 4, Waiting: 2, KVUsage: 0.75}},
		}},
	} {
		page, err := os.ReadFile(test.file)
		if err != nil {
			t.Fatal(err)
		}
		got, err := parseMetrics(page)
		if err != nil || !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s:\n got %+v, %v\nwant %+v", test.file, got, err, test.want)
		}
	}
}

func TestMetricsThatAreNone(t *testing.T) {
	for _, page := range []string{"", "<html>", "up 1\n", "vllm:num_requests_running{ 1\n"} {
		if m, err := parseMetrics([]byte(page)); err == nil {
			t.Errorf("%q: %+v", page, m)
		}
	}
	m, err := parseMetrics([]byte("vllm:num_requests_running NaN\nvllm:kv_cache_usage_perc +Inf\nvllm:num_requests_waiting -3\nvllm:prompt_tokens_total 1e300\nvllm:cache_config_info{num_gpu_blocks=\"None\",block_size=\"16\"} 1\n"))
	if err != nil || m.Running != 0 || m.Waiting != 0 || m.KVUsage != 1 || m.CapacityBlocks != 0 {
		t.Errorf("%+v, %v", m, err)
	}
}

func FuzzMetrics(f *testing.F) {
	page, err := os.ReadFile("testdata/vllm_metrics_old.txt")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(page)
	f.Fuzz(func(t *testing.T, page []byte) {
		m, err := parseMetrics(page)
		if err == nil && (m.Running < 0 || m.Waiting < 0 || m.KVUsage < 0 || m.KVUsage > 1 || m.CapacityBlocks < 0 || m.BlockTokens < 0) {
			t.Fatalf("%+v", m)
		}
	})
}
