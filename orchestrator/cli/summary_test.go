package cli

import (
	"testing"
	"time"

	"holdfast/api/wire"
)

func TestSummaryCountsWhatTheSamplesSay(t *testing.T) {
	begin := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	sample := func(class, status string, endMinute float64, held float64, prompt, cached int64) wire.Sample {
		return wire.Sample{
			Class: class, Status: status, ReleasedAt: begin, EndedAt: begin.Add(time.Duration(endMinute * float64(time.Minute))),
			Usage: wire.Usage{Turns: 2, PromptTokens: prompt, CachedTokens: cached}, Times: wire.Times{HeldSeconds: held},
		}
	}
	got := summarise(map[string]int64{"agent": 4, "rlvr": 2}, []wire.Sample{
		sample("agent", "completed", 0.5, 0, 100, 0),  // before the middle half
		sample("agent", "completed", 1.5, 3, 100, 90), // in it
		sample("agent", "failed", 1.6, 0, 0, 0),
		sample("rlvr", "completed", 2.5, 1, 100, 60), // in it
		sample("rlvr", "completed", 3.5, 0, 100, 50), // after it
		sample("agent", "completed", 4, 0, 100, 100),
	})
	want := Summary{
		Released: 6, Completed: 5, Failed: 1, Turns: 12, SamplesPerMin: 1.25, Held: 2,
		// Released 2/3 and 1/3, completed in the middle half 1/2 and 1/2.
		TVPP: 16.67, PrefixHit: 0.6, WallS: 240,
	}
	if got != want {
		t.Fatalf("summary\n got %+v\nwant %+v", got, want)
	}
}

func TestTotalVariation(t *testing.T) {
	for name, tc := range map[string]struct {
		p, q map[string]int64
		want float64
	}{
		"equal shares of other counts": {map[string]int64{"a": 2, "b": 1}, map[string]int64{"a": 20, "b": 10}, 0},
		"disjoint":                     {map[string]int64{"a": 5}, map[string]int64{"b": 5}, 100},
		"one side empty":               {map[string]int64{}, map[string]int64{"b": 5}, 0},
		"a quarter moved":              {map[string]int64{"a": 1, "b": 3}, map[string]int64{"a": 1, "b": 1}, 25},
	} {
		if got := totalVariationPP(tc.p, tc.q); got < tc.want-1e-9 || got > tc.want+1e-9 {
			t.Errorf("%s: %g pp, want %g", name, got, tc.want)
		}
	}
}

func TestThousands(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", -1234567: "-1,234,567", 12345678: "12,345,678"} {
		if got := thousands(n); got != want {
			t.Errorf("thousands(%d) = %q, want %q", n, got, want)
		}
	}
}
