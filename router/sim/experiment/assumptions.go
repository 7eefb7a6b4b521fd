package experiment

import (
	"context"
	"fmt"
	"io"
	"math"
	"text/tabwriter"

	"holdfast/router/sim"
	"holdfast/router/sim/instance"
	"holdfast/router/sim/policy"
)

// AssumptionRow is one policy with another engine.
type AssumptionRow struct {
	Config         string  `json:"config"`
	Assumption     string  `json:"assumption"`
	Policy         string  `json:"policy"`
	Ceiling        string  `json:"ceiling,omitempty"`
	BalancedPerMin float64 `json:"balanced_per_min"`
	VsSessionPct   float64 `json:"gain_vs_session_pct"`
	PrefixHit      float64 `json:"prefix_hit"`
	// Rank is the place by balanced rate, 1 for the best.
	Rank int `json:"rank"`
}

// AssumptionResult shows whether the order of policies depends on figures of the
// engine that were fitted and not measured.
type AssumptionResult struct {
	Rows []AssumptionRow `json:"rows"`
	// Swaps are the pairs of policies that stand in another order than with the
	// cache as it was fitted; none means that the order is the same.
	Swaps []Swap `json:"swaps"`
}

// Swap is a pair of policies, the better one under the fitted cache first, of
// which the other is better under the assumption.
type Swap struct {
	Config     string `json:"config"`
	Assumption string `json:"assumption"`
	Better     string `json:"better"`
	Other      string `json:"other"`
	// FittedPercent is by how much it is better there, AssumedPercent by how much it
	// is worse here.
	FittedPercent  float64 `json:"fitted_pct"`
	AssumedPercent float64 `json:"assumed_pct"`
}

// swaps compares the order of policies under each assumption with that of the
// first, which is the cache as fitted.
func swaps(fitted, assumed []AssumptionRow) []Swap {
	var list []Swap
	for i := range fitted {
		for j := range fitted {
			before := fitted[i].BalancedPerMin / fitted[j].BalancedPerMin
			after := assumed[i].BalancedPerMin / assumed[j].BalancedPerMin
			if before > 1 && after < 1 {
				list = append(list, Swap{assumed[i].Config, assumed[i].Assumption, fitted[i].Policy, fitted[j].Policy, 100 * (before - 1), 100 * (1 - after)})
			}
		}
	}
	return list
}

// assumption changes one figure of the engine; the session ceilings follow by
// the factor.
type assumption struct {
	name    string
	ceiling float64
	change  func(*instance.Params)
}

func cacheOf(share float64) assumption {
	return assumption{fmt.Sprintf("cache %.0f %%", 100*share), share, func(p *instance.Params) {
		p.CapacityBlocks = int(float64(p.CapacityBlocks) * share)
	}}
}

// Assumptions compares the main policies with caches of 80, 100 and 120 %, and
// with a prefill whose cost per token does not grow with the position.
func Assumptions(ctx context.Context, o Options) (*AssumptionResult, error) {
	setups, err := o.setups()
	if err != nil {
		return nil, err
	}
	flat := assumption{"flat prefill cost", 1, func(p *instance.Params) { p.PrefillDoublingTokens = 0 }}
	result := &AssumptionResult{}
	for _, s := range setups {
		var fitted []AssumptionRow
		for _, a := range []assumption{cacheOf(1), cacheOf(0.8), cacheOf(1.2), flat} {
			rows, err := o.under(ctx, s, a)
			if err != nil {
				return nil, err
			}
			if fitted == nil {
				fitted = rows
			}
			result.Rows = append(result.Rows, rows...)
			result.Swaps = append(result.Swaps, swaps(fitted, rows)...)
		}
	}
	return result, nil
}

func (o *Options) under(ctx context.Context, s Setup, a assumption) ([]AssumptionRow, error) {
	runs := o.batch(s.Name + ", " + a.name)
	change := func(c *sim.Config) {
		for i := range c.Instances {
			a.change(&c.Instances[i])
		}
	}
	center := int(math.Round(float64(s.BestSessions)*a.ceiling/4)) * 4
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
	var rows []AssumptionRow
	for i := range best {
		row := AssumptionRow{Config: s.Name, Assumption: a.name, Policy: best[i].Policy, Ceiling: best[i].Ceiling,
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
func (r *AssumptionResult) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "config\tassumption\tpolicy\tceiling\tbal/min\tvs session\thit\trank\t")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%.2f\t%+.1f %%\t%.3f\t%d\t\n", row.Config, row.Assumption, row.Policy, row.Ceiling, row.BalancedPerMin, row.VsSessionPct, row.PrefixHit, row.Rank)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(r.Swaps) == 0 {
		_, err := fmt.Fprintln(w, "The order of policies is the same throughout.")
		return err
	}
	for _, s := range r.Swaps {
		if _, err := fmt.Fprintf(w, "%s, %s: %s is %.1f %% below %s; with the fitted cache it is %.1f %% above\n",
			s.Config, s.Assumption, s.Better, s.AssumedPercent, s.Other, s.FittedPercent); err != nil {
			return err
		}
	}
	return nil
}
