package experiment

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"

	"holdfast/router/sim"
	"holdfast/router/sim/policy"
)

// The regimes of the paper in small: one seed, short, few policies. What is
// asserted here are the directions that every longer run confirms.
func TestPaperInSmall(t *testing.T) {
	o := Options{Seeds: TuningSeeds[:1], Setups: []string{"qwen"}, MeasureSeconds: 2 * 3600,
		Policies: []string{"session-ceiling", "permissive", "misa-t", "holdfast", "oracle"}}
	result, err := Paper(t.Context(), o, []Regime{Stationary})
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]Row{}
	for _, row := range result.Rows {
		rows[row.Policy] = row
	}
	session, holdfast := rows["session-ceiling"], rows["holdfast"]
	if holdfast.GainVsSessionPercent < 5 {
		t.Errorf("Holdfast gains %.1f %% over the best session ceiling (%s), want at least 5", holdfast.GainVsSessionPercent, session.Ceiling)
	}
	if holdfast.OfOraclePercent < 95 || holdfast.OfBoundPercent > 100 {
		t.Errorf("Holdfast reaches %.1f %% of the oracle and %.1f %% of the bound", holdfast.OfOraclePercent, holdfast.OfBoundPercent)
	}
	if holdfast.TVPoints > 1.5 {
		t.Errorf("Holdfast bends the mixture by %.2f points", holdfast.TVPoints)
	}
	for class, seconds := range holdfast.P95Seconds {
		if seconds > 1.05*session.P95Seconds[class] {
			t.Errorf("p95 of %s is %.0f s under Holdfast, %.0f s under the best session ceiling", class, seconds, session.P95Seconds[class])
		}
	}
	if row := rows["permissive"]; row.PrefixHit > 0.25 || row.BalancedPerMinute > 0.6*session.BalancedPerMinute {
		t.Errorf("overload completes %.2f samples/min at a hit rate of %.3f: no collapse", row.BalancedPerMinute, row.PrefixHit)
	}
	if row := rows["misa-t"]; row.PrefixHit < 0.95 {
		t.Errorf("misa-t has a hit rate of %.3f", row.PrefixHit)
	}
	optimumInside(t, result.Sweeps)
	checkBars(t, result)
	checkJSON(t, result)
	var text bytes.Buffer
	if err := result.WriteText(&text); err != nil || !strings.Contains(text.String(), "holdfast") {
		t.Errorf("the table lacks Holdfast (%v)", err)
	}
}

// optimumInside demands that no sweep has its best ceiling at either end.
func optimumInside(t *testing.T, points []SweepPoint) {
	t.Helper()
	best := 0
	for i := range points {
		if points[i].BalancedPerMinute > points[best].BalancedPerMinute {
			best = i
		}
	}
	if best == 0 || best == len(points)-1 {
		t.Errorf("the best session ceiling, %s, lies at the end of its sweep", points[best].Ceiling)
	}
}

// checkBars demands the bars that do not need more seeds, and a page that tells them.
func checkBars(t *testing.T, result *PaperResult) {
	t.Helper()
	told := map[string]Bar{}
	for _, b := range result.Bars {
		told[b.Name] = b
	}
	for _, name := range []string{"overload: prefix hit on sessions' own contexts", "misa-t: prefix hit", "holdfast of the oracle, %",
		"holdfast: TV, points", "best other policy of the oracle, %"} {
		if b, ok := told[name]; !ok || !b.Met {
			t.Errorf("bar %q: %+v", name, b)
		}
	}
	if b := told["overload: prefix hit"]; b.Met {
		t.Error("with groups of 8 an overloaded cache still holds their prompts: that bar cannot be met")
	}
	var page bytes.Buffer
	if err := result.WriteMarkdown(&page); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| holdfast |", "| overload: prefix hit |", "**no**", "| session-ceiling (48) |"} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	for _, line := range strings.Split(page.String(), "\n") {
		if strings.HasPrefix(line, "|") && strings.Count(line, "|") != 8 && strings.Count(line, "|") != 21 {
			t.Errorf("a row of %d columns: %s", strings.Count(line, "|")-1, line)
		}
	}
}

func TestBarsAreJudged(t *testing.T) {
	latency := map[string]float64{"agent": 100, "rlvr": 100, "rlhf": 100}
	slow := map[string]float64{"agent": 100, "rlvr": 112, "rlhf": 90}
	r := &PaperResult{
		Bounds: []Bounds{{"qwen", Drifting, 14}},
		Rows: []Row{
			{Config: "qwen", Regime: Drifting, Policy: "session-ceiling", BalancedPerMinute: 10, P95Seconds: latency, P99Seconds: latency},
			{Config: "qwen", Regime: Drifting, Policy: "partitioned", BalancedPerMinute: 11.5},
			{Config: "qwen", Regime: Drifting, Policy: "holdfast", BalancedPerMinute: 11, GainVsSessionPercent: 10, OfOraclePercent: 100.5, TVPoints: 1.2, P95Seconds: slow, P99Seconds: slow},
			{Config: "qwen", Regime: Drifting, Policy: "oracle", BalancedPerMinute: 10.9},
			{Config: "step", Regime: Drifting, Policy: "holdfast", BalancedPerMinute: 99},
		},
	}
	want := map[string]bool{
		"holdfast over the session ceiling, %":                            true,
		"holdfast: worst p95 of a class against the session ceiling's, %": false,
		"holdfast: worst p99 of a class against the session ceiling's, %": false,
		"holdfast over partitioned, %":                                    false,
		"holdfast of the oracle, %":                                       true,
		"holdfast: TV, points":                                            false,
		"best other policy of the oracle, %":                              false,
	}
	bars := r.judge()
	if len(bars) != len(want) {
		t.Fatalf("%d bars, want %d: %+v", len(bars), len(want), bars)
	}
	for _, b := range bars {
		if met, ok := want[b.Name]; !ok || met != b.Met {
			t.Errorf("%+v", b)
		}
	}
}

func TestSwapsAreChangesOfOrder(t *testing.T) {
	rows := func(rates ...float64) []AssumptionRow {
		list := make([]AssumptionRow, len(rates))
		for i, rate := range rates {
			list[i] = AssumptionRow{Policy: string(rune('a' + i)), BalancedPerMin: rate}
		}
		return list
	}
	if got := swaps(rows(3, 2, 1), rows(30, 20, 10)); len(got) != 0 {
		t.Errorf("the same order: %+v", got)
	}
	got := swaps(rows(3, 2, 1), rows(3, 1, 2))
	if len(got) != 1 || got[0].Better != "b" || got[0].Other != "c" || got[0].FittedPercent != 100 || got[0].AssumedPercent != 50 {
		t.Errorf("%+v", got)
	}
}

// checkJSON demands the fields that other programs read.
func checkJSON(t *testing.T, result *PaperResult) {
	t.Helper()
	text, err := json.Marshal(result)
	if err != nil {
		t.Fatal(err)
	}
	var decoded struct {
		Rows []map[string]any `json:"rows"`
	}
	if err := json.Unmarshal(text, &decoded); err != nil {
		t.Fatal(err)
	}
	for _, field := range []string{"config", "regime", "policy", "samples_per_min", "balanced_per_min", "gain_vs_request_pct", "gain_vs_session_pct",
		"prefix_hit", "tv_pp", "p95_s", "p99_s", "group_p99_s", "oldest_hold_s", "seeds", "sd"} {
		if _, ok := decoded.Rows[0][field]; !ok {
			t.Errorf("a row has no %s", field)
		}
	}
}

func TestStressInSmall(t *testing.T) {
	o := Options{Seeds: TuningSeeds[:1], Setups: []string{"qwen"}, MeasureSeconds: 2 * 3600, Scenarios: []string{
		"labels confused 50 %", "snapshots 15 s late, reordered", "cache events lost 10 %", "tool gaps x10 for 10 min", "instance lost for 20 min",
	}}
	result, err := Stress(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if len(result.Rows) != 6 {
		t.Fatalf("%d rows, want 6", len(result.Rows))
	}
	for _, row := range result.Rows {
		t.Logf("%s: %.1f %% of undisturbed, recovered %.1f %%, oldest hold %.2fx, %.1f reversals/h", row.Scenario, row.UndisturbedPercent, row.RecoveredPercent, row.OldestHoldRatio, row.CapReversalsPerHour)
		// An instance of four is gone for a sixth of the time: 4 % of the capacity, and a
		// thousand seconds of refilling.
		if row.UndisturbedPercent < 90 {
			t.Errorf("%s: %.1f %% of the undisturbed rate", row.Scenario, row.UndisturbedPercent)
		}
		if row.RecoveredPercent > 0 && row.RecoveredPercent < 92 {
			t.Errorf("%s: %.1f %% of the undisturbed rate after 15 minutes", row.Scenario, row.RecoveredPercent)
		}
		if row.OldestHoldRatio > 2 {
			t.Errorf("%s: the oldest hold is %.1f times the session ceiling's", row.Scenario, row.OldestHoldRatio)
		}
		if row.CapReversalsPerHour > 8 {
			t.Errorf("%s: caps turn %.1f times an hour", row.Scenario, row.CapReversalsPerHour)
		}
	}
}

func TestSeedsForTuningAreNotJudged(t *testing.T) {
	for _, a := range TuningSeeds {
		for _, b := range JudgingSeeds {
			if a == b {
				t.Errorf("seed %d is of both kinds", a)
			}
		}
	}
}

func TestGainIsPairedAndItsIntervalRight(t *testing.T) {
	row := func(values ...float64) *Row {
		r := &Row{}
		for _, v := range values {
			r.results = append(r.results, &sim.Result{BalancedPerMinute: v})
		}
		return r
	}
	// Gains of 10, 20 and 30 %: mean 20, sd 10, t(2) = 4.303.
	mean, half := gain(row(11, 24, 13), row(10, 20, 10))
	if math.Abs(mean-20) > 1e-9 || math.Abs(half-4.303*10/math.Sqrt(3)) > 1e-6 {
		t.Errorf("gain %.3f +- %.3f, want 20 +- %.3f", mean, half, 4.303*10/math.Sqrt(3))
	}
	if mean, _ := gain(row(1), nil); mean != 0 {
		t.Errorf("gain %v over nothing", mean)
	}
}

func TestUnknownConfigurationIsRefused(t *testing.T) {
	if _, err := Paper(t.Context(), Options{Setups: []string{"llama"}}, []Regime{Stationary}); err == nil {
		t.Error("accepted")
	}
}

// BenchmarkQwenLike reports simulated seconds per wall second on one core.
func BenchmarkQwenLike(b *testing.B) {
	for _, spec := range []sim.Spec{policy.SessionCeiling(48), policy.Holdfast()} {
		b.Run(spec.Name, func(b *testing.B) {
			simulated := 0.0
			for b.Loop() {
				cfg, err := Qwen().Config(Stationary, TuningSeeds[0])
				if err != nil {
					b.Fatal(err)
				}
				r, err := sim.Run(cfg, spec)
				if err != nil {
					b.Fatal(fmt.Errorf("running %s: %w", spec.Name, err))
				}
				simulated += r.SimulatedSeconds
			}
			b.ReportMetric(simulated/b.Elapsed().Seconds(), "simulated-s/s")
			b.ReportMetric(0, "ns/op")
		})
	}
}
