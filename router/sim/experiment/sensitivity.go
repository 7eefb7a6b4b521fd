package experiment

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"holdfast/router"
	"holdfast/router/sim"
	"holdfast/router/sim/policy"
)

// SensitivityRow is the router core with one parameter changed.
type SensitivityRow struct {
	Config    string  `json:"config"`
	Parameter string  `json:"parameter"`
	Value     float64 `json:"value"`
	Default   float64 `json:"default"`
	// ChangePercent is the change of the balanced rate against the default.
	BalancedPerMin      float64 `json:"balanced_per_min"`
	ChangePercent       float64 `json:"change_pct"`
	HalfWidthPercent    float64 `json:"ci95_pct"`
	PrefixHit           float64 `json:"prefix_hit"`
	TVPoints            float64 `json:"tv_pp"`
	OldestHoldSeconds   float64 `json:"oldest_hold_s"`
	CapReversalsPerHour float64 `json:"cap_reversals_per_hour"`
}

// SensitivityResult is the list of parameters.
type SensitivityResult struct {
	Regime Regime           `json:"regime"`
	Rows   []SensitivityRow `json:"rows"`
}

// knob is one parameter of the core and the values it is tried at.
type knob struct {
	name   string
	values []float64
	at     func(*router.Config) *float64
}

func knobs() []knob {
	return []knob{
		{"protected share of the cache", []float64{0.8, 0.9, 1.0, 1.05}, func(c *router.Config) *float64 { return &c.ProtectedShare }},
		{"forecast horizon, s", []float64{120, 300, 1800}, func(c *router.Config) *float64 { return &c.Forecast.HorizonSeconds }},
		{"forecast window, sessions", []float64{32, 128, 200}, func(c *router.Config) *float64 { return &c.Forecast.WindowSessions }},
		{"forecast prior pace, tokens/s", []float64{15, 70}, func(c *router.Config) *float64 { return &c.Forecast.PriorTokensPerSecond }},
		{"forecast prior life, tokens", []float64{20_000, 100_000}, func(c *router.Config) *float64 { return &c.Forecast.PriorLifeTokens }},
		{"forecast prior weight, tokens", []float64{500, 8000}, func(c *router.Config) *float64 { return &c.Forecast.PriorWeightTokens }},
		{"readmit below share", []float64{0, 0.25, 0.75, 0.95}, func(c *router.Config) *float64 { return &c.ReadmitBelowShare }},
		{"readmit boost, s", []float64{0, 600, 14400}, func(c *router.Config) *float64 { return &c.ReadmitBoostSeconds }},
		{"class floor share", []float64{0, 0.05, 0.2}, func(c *router.Config) *float64 { return &c.ClassFloorShare }},
		{"event lag, s", []float64{0, 5}, func(c *router.Config) *float64 { return &c.EventLagSeconds }},
		{"placement slack, s", []float64{0, 0.5, 2}, func(c *router.Config) *float64 { return &c.PlacementSlackSeconds }},
		{"reroute margin, s", []float64{0, 1, 20}, func(c *router.Config) *float64 { return &c.RerouteMarginSeconds }},
		{"sibling wait, s", []float64{0, 5, 120}, func(c *router.Config) *float64 { return &c.SiblingWaitSeconds }},
		{"footprint window, sessions", []float64{32, 64, 512}, func(c *router.Config) *float64 { return &c.Footprint.WindowSessions }},
		{"footprint prior, tokens", []float64{8192, 131072}, func(c *router.Config) *float64 { return &c.Footprint.PriorTokens }},
		{"footprint prior, s", []float64{75, 1200}, func(c *router.Config) *float64 { return &c.Footprint.PriorSeconds }},
		{"neutral sessions", []float64{4, 64}, func(c *router.Config) *float64 { return &c.Footprint.NeutralSessions }},
		{"cap margin", []float64{1, 1.5, 4}, func(c *router.Config) *float64 { return &c.Caps.Margin }},
		{"cap period, s", []float64{5, 40}, func(c *router.Config) *float64 { return &c.Caps.PeriodSeconds }},
		{"cap rise share", []float64{0.01, 0.1, 1}, func(c *router.Config) *float64 { return &c.Caps.RiseShare }},
		{"pressure hit gap", []float64{0.02, 0.1, 1}, func(c *router.Config) *float64 { return &c.Pressure.HitGap }},
		{"pressure window, s", []float64{5, 40}, func(c *router.Config) *float64 { return &c.Pressure.WindowSeconds }},
		{"pressure queue share", []float64{0.02, 0.5}, func(c *router.Config) *float64 { return &c.Pressure.QueueShare }},
		{"pressure queue time, s", []float64{10, 120}, func(c *router.Config) *float64 { return &c.Pressure.QueueSeconds }},
		{"largest contraction", []float64{0.1, 0.6}, func(c *router.Config) *float64 { return &c.Pressure.MaxContractShare }},
		{"least cap share", []float64{0.1, 0.6}, func(c *router.Config) *float64 { return &c.Pressure.MinCapShare }},
		{"pressure contraction", []float64{0.01, 0.1, 0.2}, func(c *router.Config) *float64 { return &c.Pressure.ContractShare }},
		{"pressure cooldown, s", []float64{10, 120}, func(c *router.Config) *float64 { return &c.Pressure.CooldownSeconds }},
		{"recovery share", []float64{0.01, 0.1}, func(c *router.Config) *float64 { return &c.Pressure.RecoverShare }},
		{"recovery period, s", []float64{5, 40}, func(c *router.Config) *float64 { return &c.Pressure.RecoverSeconds }},
	}
}

// Sensitivity changes one parameter of the default policy at a time, under drift,
// where the controller has most to do.
func Sensitivity(ctx context.Context, o Options) (*SensitivityResult, error) {
	setups, err := o.setups()
	if err != nil {
		return nil, err
	}
	type trial struct {
		row    SensitivityRow
		places []**sim.Result
	}
	result := &SensitivityResult{Regime: Drifting}
	for _, s := range setups {
		runs := o.batch(s.Name + " sensitivity")
		add := func(cfg router.Config) (places []**sim.Result) {
			for _, seed := range o.seeds() {
				places = append(places, runs.add(policy.Core("holdfast", cfg), o.config(s, Drifting, seed, nil)))
			}
			return places
		}
		base := add(router.DefaultConfig())
		var trials []trial
		for _, k := range knobs() {
			for _, value := range k.values {
				cfg := router.DefaultConfig()
				t := trial{row: SensitivityRow{Config: s.Name, Parameter: k.name, Value: value, Default: *k.at(&cfg)}}
				*k.at(&cfg) = value
				t.places = add(cfg)
				trials = append(trials, t)
			}
		}
		if err := runs.run(ctx); err != nil {
			return nil, err
		}
		normal := summarize(s, Drifting, "holdfast", "", base)
		for _, t := range trials {
			r := summarize(s, Drifting, "holdfast", "", t.places)
			t.row.BalancedPerMin, t.row.PrefixHit, t.row.TVPoints = r.BalancedPerMinute, r.PrefixHit, r.TVPoints
			t.row.OldestHoldSeconds, t.row.CapReversalsPerHour = r.OldestHoldSeconds, r.CapReversalsPerHour
			t.row.ChangePercent, t.row.HalfWidthPercent = gain(&r, &normal)
			result.Rows = append(result.Rows, t.row)
		}
	}
	return result, nil
}

// WriteText prints the list.
func (r *SensitivityResult) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "config\tparameter\tdefault\tvalue\tbal/min\tchange\t±95%\thit\tTV pp\toldest hold s\treversals/h\t")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%s\t%g\t%g\t%.2f\t%+.1f %%\t%.1f\t%.3f\t%.2f\t%.0f\t%.1f\t\n", row.Config, row.Parameter, row.Default, row.Value,
			row.BalancedPerMin, row.ChangePercent, row.HalfWidthPercent, row.PrefixHit, row.TVPoints, row.OldestHoldSeconds, row.CapReversalsPerHour)
	}
	return t.Flush()
}
