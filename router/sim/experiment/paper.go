package experiment

import (
	"context"
	"fmt"
	"math"
	"slices"

	"holdfast/router/sim"
)

// Row is one policy in one regime of one configuration: means over seeds.
type Row struct {
	Config string `json:"config"`
	Regime Regime `json:"regime"`
	Policy string `json:"policy"`
	// Ceiling is the best setting of a swept policy.
	Ceiling string `json:"ceiling,omitempty"`

	SamplesPerMinute  float64            `json:"samples_per_min"`
	ByClass           map[string]float64 `json:"samples_per_min_by_class"`
	BalancedPerMinute float64            `json:"balanced_per_min"`
	// SD is the standard deviation of BalancedPerMinute over seeds.
	SD float64 `json:"sd"`
	// The gains are on BalancedPerMinute, paired by seed, with the half-width of
	// the 95 % confidence interval over seeds.
	GainVsRequestPercent   float64 `json:"gain_vs_request_pct"`
	GainVsRequestHalfWidth float64 `json:"gain_vs_request_ci95_pct"`
	GainVsSessionPercent   float64 `json:"gain_vs_session_pct"`
	GainVsSessionHalfWidth float64 `json:"gain_vs_session_ci95_pct"`
	OfOraclePercent        float64 `json:"of_oracle_pct"`
	OfBoundPercent         float64 `json:"of_bound_pct"`

	// OwnHit leaves prompts out that sessions share; see sim.Result.
	PrefixHit              float64            `json:"prefix_hit"`
	OwnHit                 float64            `json:"own_prefix_hit"`
	PrefillTokensPerSecond float64            `json:"prefill_tps"`
	DecodeTokensPerSecond  float64            `json:"decode_tps"`
	RequestsPerMinute      float64            `json:"rpm"`
	TVPoints               float64            `json:"tv_pp"`
	TVFromStartPoints      float64            `json:"tv_from_start_pp"`
	P50Seconds             map[string]float64 `json:"p50_s"`
	P95Seconds             map[string]float64 `json:"p95_s"`
	P99Seconds             map[string]float64 `json:"p99_s"`
	GroupP99Seconds        float64            `json:"group_p99_s"`
	OldestHoldSeconds      float64            `json:"oldest_hold_s"`
	Preemptions            float64            `json:"preemptions"`
	ColdPrefillTokens      float64            `json:"cold_prefill_tokens"`
	BlockSeconds           float64            `json:"block_seconds_per_sample"`
	CapReversalsPerHour    float64            `json:"cap_reversals_per_hour"`
	// IterationSeconds and ConsumedTVPoints (against rho) are of end-to-end runs.
	IterationSeconds float64 `json:"iteration_s,omitempty"`
	ConsumedTVPoints float64 `json:"consumed_tv_pp,omitempty"`
	Seeds            int     `json:"seeds"`

	results []*sim.Result
}

// SweepPoint is one setting of a swept policy.
type SweepPoint struct {
	Config            string  `json:"config"`
	Regime            Regime  `json:"regime"`
	Policy            string  `json:"policy"`
	Ceiling           string  `json:"ceiling"`
	BalancedPerMinute float64 `json:"balanced_per_min"`
	PrefixHit         float64 `json:"prefix_hit"`
}

// Bounds is the fluid bound of one regime.
type Bounds struct {
	Config           string  `json:"config"`
	Regime           Regime  `json:"regime"`
	SamplesPerMinute float64 `json:"samples_per_min"`
}

// PaperResult is what the comparison of policies found.
type PaperResult struct {
	Rows   []Row        `json:"rows"`
	Sweeps []SweepPoint `json:"sweeps"`
	Bounds []Bounds     `json:"bounds"`
	Bars   []Bar        `json:"bars"`
	Seeds  []uint64     `json:"judging_seeds"`
}

// endToEndSweep is how many of the best session and request ceilings of the
// stationary regime an end-to-end run tries again.
const endToEndSweep = 3

// Paper compares all policies on both configurations in the given regimes.
func Paper(ctx context.Context, o Options, regimes []Regime) (*PaperResult, error) {
	setups, err := o.setups()
	if err != nil {
		return nil, err
	}
	result := &PaperResult{Seeds: o.seeds()}
	for _, s := range setups {
		for _, regime := range regimes {
			if err := o.compare(ctx, result, s, regime); err != nil {
				return nil, fmt.Errorf("comparing policies on %s, %s: %w", s.Name, regime, err)
			}
		}
	}
	result.Bars = result.judge()
	return result, nil
}

// compare judges every policy in one regime.
func (o *Options) compare(ctx context.Context, result *PaperResult, s Setup, regime Regime) error {
	bound, err := boundOf(s, regime, o.seeds()[0])
	if err != nil {
		return err
	}
	result.Bounds = append(result.Bounds, Bounds{s.Name, regime, bound})
	list := o.chosen(candidates(s, regime), regime)
	runs := o.batch(fmt.Sprintf("%s %s", s.Name, regime))
	places := make([][][]**sim.Result, len(list))
	for i := range list {
		list[i].variants = result.narrowed(s, regime, list[i])
		places[i] = make([][]**sim.Result, len(list[i].variants))
		for v, variant := range list[i].variants {
			for _, seed := range o.seedsOf(regime) {
				places[i][v] = append(places[i][v], runs.add(variant.spec, o.config(s, regime, seed, nil)))
			}
		}
	}
	if err := runs.run(ctx); err != nil {
		return err
	}
	var rows []Row
	for i, c := range list {
		var best Row
		for v, variant := range c.variants {
			row := summarize(s, regime, c.name, variant.ceiling, places[i][v])
			if len(c.variants) > 1 {
				result.Sweeps = append(result.Sweeps, SweepPoint{s.Name, regime, c.name, variant.ceiling, row.BalancedPerMinute, row.PrefixHit})
			}
			if v == 0 || row.BalancedPerMinute > best.BalancedPerMinute {
				best = row
			}
		}
		rows = append(rows, best)
	}
	relate(rows, bound)
	result.Rows = append(result.Rows, rows...)
	return nil
}

// seedsOf are fewer for end-to-end runs, which are several times longer.
func (o *Options) seedsOf(regime Regime) []uint64 {
	seeds := o.seeds()
	if regime == EndToEnd {
		return seeds[:(len(seeds)+2)/3]
	}
	return seeds
}

// narrowed limits the end-to-end sweeps to the settings that were best in the
// stationary regime, if that was run before.
func (r *PaperResult) narrowed(s Setup, regime Regime, c candidate) []variant {
	if regime != EndToEnd || len(c.variants) == 1 {
		return c.variants
	}
	var known []SweepPoint
	for _, p := range r.Sweeps {
		if p.Config == s.Name && p.Regime == Stationary && p.Policy == c.name {
			known = append(known, p)
		}
	}
	if len(known) == 0 {
		return c.variants
	}
	slices.SortStableFunc(known, func(a, b SweepPoint) int {
		switch {
		case a.BalancedPerMinute > b.BalancedPerMinute:
			return -1
		case a.BalancedPerMinute < b.BalancedPerMinute:
			return 1
		}
		return 0
	})
	var kept []variant
	for _, v := range c.variants {
		for _, p := range known[:min(endToEndSweep, len(known))] {
			if p.Ceiling == v.ceiling {
				kept = append(kept, v)
			}
		}
	}
	return kept
}

// ungroupedPolicies are those whose figures without groups tell something.
var ungroupedPolicies = []string{"request-ceiling", "session-ceiling", "permissive", "misa-t", "holdfast", "oracle"}

func (o *Options) chosen(all []candidate, regime Regime) []candidate {
	return slices.DeleteFunc(all, func(c candidate) bool {
		return len(o.Policies) > 0 && !slices.Contains(o.Policies, c.name) ||
			regime == Ungrouped && !slices.Contains(ungroupedPolicies, c.name)
	})
}

func boundOf(s Setup, regime Regime, seed uint64) (float64, error) {
	cfg, err := s.Config(regime, seed)
	if err != nil {
		return 0, err
	}
	tasks := boundSamples / GroupSize
	if regime == Ungrouped {
		tasks = boundSamples
	}
	b, err := sim.Bound(cfg, tasks)
	return b.SamplesPerMinute, err
}

// boundSamples is the number of samples of two full swings of the drift.
const boundSamples = 3000

// relate fills in what compares rows with each other.
func relate(rows []Row, bound float64) {
	find := func(name string) *Row {
		for i := range rows {
			if rows[i].Policy == name {
				return &rows[i]
			}
		}
		return nil
	}
	request, session, oracle := find("request-ceiling"), find("session-ceiling"), find("oracle")
	for i := range rows {
		r := &rows[i]
		r.GainVsRequestPercent, r.GainVsRequestHalfWidth = gain(r, request)
		r.GainVsSessionPercent, r.GainVsSessionHalfWidth = gain(r, session)
		if oracle != nil {
			r.OfOraclePercent = 100 * r.BalancedPerMinute / oracle.BalancedPerMinute
		}
		if bound > 0 {
			r.OfBoundPercent = 100 * r.BalancedPerMinute / bound
		}
	}
}

// gain is the mean over seeds of the gain in balanced rate, in percent, and the
// half-width of its 95 % confidence interval.
func gain(r, base *Row) (mean, halfWidth float64) {
	if base == nil || len(r.results) != len(base.results) {
		return 0, 0
	}
	gains := make([]float64, len(r.results))
	for i := range r.results {
		gains[i] = 100 * (r.results[i].BalancedPerMinute/base.results[i].BalancedPerMinute - 1)
	}
	mean, sd := meanSD(gains)
	return mean, studentT95(len(gains)-1) * sd / math.Sqrt(float64(len(gains)))
}

// studentT95 is the two-sided 95 % quantile of Student's t.
func studentT95(degrees int) float64 {
	table := []float64{0, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228}
	if degrees < len(table) {
		return table[max(0, degrees)]
	}
	return 1.96
}

func meanSD(x []float64) (mean, sd float64) {
	for _, v := range x {
		mean += v / float64(len(x))
	}
	if len(x) < 2 {
		return mean, 0
	}
	for _, v := range x {
		sd += (v - mean) * (v - mean)
	}
	return mean, math.Sqrt(sd / float64(len(x)-1))
}
