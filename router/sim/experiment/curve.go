package experiment

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"holdfast/router/sim"
	"holdfast/router/sim/policy"
)

// CurvePoint is one policy at one outer concurrency.
type CurvePoint struct {
	Config           string  `json:"config"`
	OuterPerInstance int     `json:"outer_per_instance"`
	Policy           string  `json:"policy"`
	Ceiling          string  `json:"ceiling,omitempty"`
	BalancedPerMin   float64 `json:"balanced_per_min"`
	PrefixHit        float64 `json:"prefix_hit"`
	// OverPermissive is the ratio to placement without admission at the same outer
	// concurrency.
	OverPermissive float64 `json:"over_permissive"`
}

// CurveResult is gain against outer concurrency.
type CurveResult struct {
	Points []CurvePoint `json:"points"`
}

// publishedCurve is ThunderAgent's rollout speed-up over vLLM on 8 x H20 by the
// trainer's concurrency, as its integration into verl reports it: parity up to
// publishedParity.
var publishedCurve = []struct{ concurrency, speedup float64 }{{64, 1}, {128, 1}, {256, 1}, {384, 1.94}, {512, 2.40}}

const publishedParity = 256

// Curve runs policies over the trainer's outer concurrency. The request ceiling
// is the best of a short sweep at each point.
func Curve(ctx context.Context, o Options) (*CurveResult, error) {
	setups, err := o.setups()
	if err != nil {
		return nil, err
	}
	result := &CurveResult{}
	for _, s := range setups {
		list := []candidate{
			fixed(policy.Permissive()),
			swept("request-ceiling", []int{s.OuterPerInstance / 5, s.OuterPerInstance * 2 / 5}, policy.RequestCeiling),
			fixed(policy.ThunderAgentLike()), fixed(policy.MISAT()), fixed(policy.Holdfast()),
		}
		for _, eighths := range []int{1, 2, 3, 4, 6, 8, 12} {
			outer := s.OuterPerInstance * eighths / 8
			points, err := o.curveAt(ctx, s, list, outer)
			if err != nil {
				return nil, err
			}
			result.Points = append(result.Points, points...)
		}
	}
	return result, nil
}

func (o *Options) curveAt(ctx context.Context, s Setup, list []candidate, outer int) ([]CurvePoint, error) {
	runs := o.batch(fmt.Sprintf("%s, %d samples per instance", s.Name, outer))
	change := func(c *sim.Config) { c.Trainer.OuterConcurrency = outer * len(c.Instances) }
	rows, err := o.bestOf(ctx, runs, s, Stationary, list, change)
	if err != nil {
		return nil, err
	}
	var points []CurvePoint
	for _, row := range rows {
		points = append(points, CurvePoint{Config: s.Name, OuterPerInstance: outer, Policy: row.Policy, Ceiling: row.Ceiling,
			BalancedPerMin: row.BalancedPerMinute, PrefixHit: row.PrefixHit})
	}
	for i := range points {
		points[i].OverPermissive = points[i].BalancedPerMin / points[0].BalancedPerMin
	}
	return points, nil
}

// WriteText prints the curves.
func (r *CurveResult) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "config\tsamples per instance\tpolicy\tceiling\tbal/min\tover permissive\thit\t")
	for _, p := range r.Points {
		fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%.2f\t%.2fx\t%.3f\t\n", p.Config, p.OuterPerInstance, p.Policy, p.Ceiling, p.BalancedPerMin, p.OverPermissive, p.PrefixHit)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprint(w, "ThunderAgent on 8 x H20, published, over concurrency:")
	for _, point := range publishedCurve {
		if err == nil {
			_, err = fmt.Fprintf(w, " %g: %.2fx", point.concurrency, point.speedup)
		}
	}
	if err == nil {
		_, err = fmt.Fprintln(w)
	}
	return err
}
