package experiment

import (
	"context"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"

	"holdfast/router"
	"holdfast/router/sim"
	"holdfast/router/sim/chart"
	"holdfast/router/sim/policy"
)

// The host tier of the paper's Figure 5: 1.3 TB for each replica, and an estimate
// of the bandwidth to it (docs/engine-model.md).
const (
	hostTierBytes          = 1.3e12
	hostTierBytesPerSecond = 160e9
	// paperOffloadPercent is the paper's gain in requests per minute and replica.
	paperOffloadPercent = 35.6
)

// OffloadRow is one policy with or without a tier in host memory.
type OffloadRow struct {
	Config            string  `json:"config"`
	Policy            string  `json:"policy"`
	HostTier          bool    `json:"host_tier"`
	BalancedPerMin    float64 `json:"balanced_per_min"`
	RequestsPerMinute float64 `json:"rpm_per_instance"`
	// GainPercent is in requests per minute over the same policy without the tier.
	GainPercent   float64 `json:"rpm_gain_pct"`
	PrefixHit     float64 `json:"prefix_hit"`
	HostHitTokens float64 `json:"host_tokens"`
	KVShare       float64 `json:"kv_used_share"`
}

// OffloadResult shows admission together with offload.
type OffloadResult struct {
	Rows []OffloadRow `json:"rows"`
}

// offloadPolicies are run with and without the tier.
func offloadPolicies(s Setup) []sim.Spec {
	specs := []sim.Spec{policy.SessionCeiling(s.BestSessions), policy.Permissive(), policy.MISATPaper(), policy.MISAT(), policy.Holdfast()}
	for _, share := range offloadBudgets {
		cfg := router.DefaultConfig()
		cfg.ProtectedShare = share
		cfg.ReadmitBelowShare = 0
		specs = append(specs, policy.Core(fmt.Sprintf("holdfast, budget %.1f C", share), cfg))
	}
	return specs
}

// offloadBudgets are protected budgets beyond the device's cache, which only a
// tier behind it can honour. What the device evicts is not lost then, so that
// sessions keep their protection.
var offloadBudgets = []float64{1.1, 1.3, 1.6}

func withHostTier(c *sim.Config) {
	for i := range c.Instances {
		c.Instances[i] = c.Instances[i].WithHostTier(hostTierBytes, hostTierBytesPerSecond)
	}
}

// Offload adds a tier in host memory to the engines, nothing else.
func Offload(ctx context.Context, o Options) (*OffloadResult, error) {
	setups, err := o.setups()
	if err != nil {
		return nil, err
	}
	result := &OffloadResult{}
	for _, s := range setups {
		runs := o.batch(s.Name + " offload")
		specs := offloadPolicies(s)
		var plain, tiered [][]**sim.Result
		for _, spec := range specs {
			var without, with []**sim.Result
			for _, seed := range o.seeds() {
				series := func(c *sim.Config) { c.SeriesSeconds = 300 }
				without = append(without, runs.add(spec, o.config(s, Stationary, seed, series)))
				with = append(with, runs.add(spec, o.config(s, Stationary, seed, func(c *sim.Config) { series(c); withHostTier(c) })))
			}
			plain, tiered = append(plain, without), append(tiered, with)
		}
		if err := runs.run(ctx); err != nil {
			return nil, err
		}
		for i, spec := range specs {
			before, after := offloadRow(s, spec.Name, plain[i]), offloadRow(s, spec.Name, tiered[i])
			after.HostTier = true
			after.GainPercent = 100 * (after.RequestsPerMinute/before.RequestsPerMinute - 1)
			result.Rows = append(result.Rows, before, after)
		}
	}
	return result, nil
}

func offloadRow(s Setup, name string, places []**sim.Result) OffloadRow {
	r := summarize(s, Stationary, name, "", places)
	row := OffloadRow{Config: s.Name, Policy: name, BalancedPerMin: r.BalancedPerMinute,
		RequestsPerMinute: r.RequestsPerMinute / float64(s.Instances), PrefixHit: r.PrefixHit}
	points := 0.0
	for _, x := range r.results {
		row.HostHitTokens += float64(x.HostTokens) / float64(len(r.results))
		for _, p := range x.Series {
			if p.AtSeconds > x.SimulatedSeconds-x.MeasuredSeconds {
				for _, at := range p.Instances {
					row.KVShare += at.UsedShare
					points++
				}
			}
		}
	}
	row.KVShare /= max(1, points)
	return row
}

// WriteText prints the comparison.
func (r *OffloadResult) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "config\tpolicy\thost tier\tbal/min\trequests/min per instance\tgain\thit\tKV in use\t")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%s\t%v\t%.2f\t%.1f\t%+.1f %%\t%.3f\t%.2f\t\n", row.Config, row.Policy, row.HostTier, row.BalancedPerMin,
			row.RequestsPerMinute, row.GainPercent, row.PrefixHit, row.KVShare)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "the paper, Step3.7, MISA-T with a tier of 1.3 TB: %+.1f %% requests/min per replica\n", paperOffloadPercent)
	return err
}

// offloadFigure is KV in use, running requests and hit rate with and without the
// tier, as in the paper's Figure 5.
func offloadFigure(ctx context.Context, o Options) (Figure, error) {
	s, seed := Step(), o.seeds()[0]
	runs := o.batch("figure: offload")
	series := func(c *sim.Config) { c.SeriesSeconds = 120 }
	plain := runs.add(policy.MISAT(), o.config(s, Stationary, seed, series))
	tiered := runs.add(policy.MISAT(), o.config(s, Stationary, seed, func(c *sim.Config) { series(c); withHostTier(c) }))
	if err := runs.run(ctx); err != nil {
		return Figure{}, err
	}
	panels := []chart.Panel{
		{Title: "Step-like, misa-t: KV in use by running requests", XLabel: "hours", YLabel: "share", YMin: 0, YMax: 1},
		{Title: "Running requests per instance", XLabel: "hours", YLabel: "requests"},
		{Title: "Prefix hit", XLabel: "hours", YLabel: "share", YMin: 0.8, YMax: 1},
	}
	for i, place := range []**sim.Result{plain, tiered} {
		name := []string{"without offload", "with a host tier"}[i]
		lines := slices.Repeat([]chart.Line{{Name: name, Color: i}}, len(panels))
		for _, p := range (*place).Series {
			n := float64(len(p.Instances))
			var values [3]float64
			for _, at := range p.Instances {
				values[0] += at.UsedShare / n
				values[1] += float64(at.Running) / n
				values[2] += at.Hit / n
			}
			for j := range lines {
				lines[j].X, lines[j].Y = append(lines[j].X, p.AtSeconds/3600), append(lines[j].Y, values[j])
			}
		}
		for j := range panels {
			panels[j].Lines = append(panels[j].Lines, lines[j])
		}
	}
	return Figure{"offload", chart.SVG(panels...)}, nil
}
