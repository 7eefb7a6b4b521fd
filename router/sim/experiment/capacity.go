package experiment

import (
	"context"
	"fmt"
	"io"
	"math"
	"text/tabwriter"

	"holdfast/router/sim"
	"holdfast/router/sim/policy"
)

// CapacityRow is one policy with a cache of another size.
type CapacityRow struct {
	Config         string  `json:"config"`
	CapacityPct    float64 `json:"capacity_pct"`
	Policy         string  `json:"policy"`
	Ceiling        string  `json:"ceiling,omitempty"`
	BalancedPerMin float64 `json:"balanced_per_min"`
	VsSessionPct   float64 `json:"gain_vs_session_pct"`
	PrefixHit      float64 `json:"prefix_hit"`
	// Rank is the place by balanced rate, 1 for the best.
	Rank int `json:"rank"`
}

// CapacityResult shows whether the order of policies depends on the cache size.
type CapacityResult struct {
	Rows []CapacityRow `json:"rows"`
}

// Capacity compares the main policies with caches of 80, 100 and 120 %. The
// session ceilings move with the cache.
func Capacity(ctx context.Context, o Options) (*CapacityResult, error) {
	setups, err := o.setups()
	if err != nil {
		return nil, err
	}
	result := &CapacityResult{}
	for _, s := range setups {
		for _, factor := range []float64{0.8, 1, 1.2} {
			rows, err := o.capacityAt(ctx, s, factor)
			if err != nil {
				return nil, err
			}
			result.Rows = append(result.Rows, rows...)
		}
	}
	return result, nil
}

func (o *Options) capacityAt(ctx context.Context, s Setup, factor float64) ([]CapacityRow, error) {
	runs := o.batch(fmt.Sprintf("%s with %.0f %% of the cache", s.Name, 100*factor))
	change := func(c *sim.Config) {
		for i := range c.Instances {
			c.Instances[i].CapacityBlocks = int(float64(c.Instances[i].CapacityBlocks) * factor)
		}
	}
	center := int(math.Round(float64(s.BestSessions)*factor/4)) * 4
	list := []candidate{
		swept("session-ceiling", every(center-8, center+8, 4), policy.SessionCeiling),
		fixed(policy.Permissive()), fixed(policy.ThunderAgentLike()), fixed(policy.PrimeRLLike()),
		fixed(policy.SessionAdmission()), fixed(policy.MISA()), fixed(policy.MISAT()), fixed(policy.Holdfast()),
		fixed(policy.Oracle(policy.DefaultOracle())),
	}
	best, err := o.bestOf(ctx, runs, s, Stationary, list, change)
	if err != nil {
		return nil, err
	}
	var rows []CapacityRow
	for i := range best {
		row := CapacityRow{Config: s.Name, CapacityPct: 100 * factor, Policy: best[i].Policy, Ceiling: best[i].Ceiling,
			BalancedPerMin: best[i].BalancedPerMinute, PrefixHit: best[i].PrefixHit, Rank: 1}
		row.VsSessionPct, _ = gain(&best[i], &best[0])
		for j := range best {
			if best[j].BalancedPerMinute > row.BalancedPerMin {
				row.Rank++
			}
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// bestOf judges every candidate and returns the row of its best variant.
func (o *Options) bestOf(ctx context.Context, runs *batch, s Setup, regime Regime, list []candidate, change func(*sim.Config)) ([]Row, error) {
	places := make([][][]**sim.Result, len(list))
	for i, c := range list {
		places[i] = make([][]**sim.Result, len(c.variants))
		for v, variant := range c.variants {
			for _, seed := range o.seeds() {
				places[i][v] = append(places[i][v], runs.add(variant.spec, o.config(s, regime, seed, change)))
			}
		}
	}
	if err := runs.run(ctx); err != nil {
		return nil, err
	}
	var rows []Row
	for i, c := range list {
		var best Row
		for v, variant := range c.variants {
			row := summarize(s, regime, c.name, variant.ceiling, places[i][v])
			if v == 0 || row.BalancedPerMinute > best.BalancedPerMinute {
				best = row
			}
		}
		rows = append(rows, best)
	}
	return rows, nil
}

// WriteText prints the ranks.
func (r *CapacityResult) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "config\tcache\tpolicy\tceiling\tbal/min\tvs session\thit\trank\t")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%.0f %%\t%s\t%s\t%.2f\t%+.1f %%\t%.3f\t%d\t\n", row.Config, row.CapacityPct, row.Policy, row.Ceiling, row.BalancedPerMin, row.VsSessionPct, row.PrefixHit, row.Rank)
	}
	return t.Flush()
}
