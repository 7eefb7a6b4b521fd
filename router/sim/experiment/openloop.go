package experiment

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"holdfast/router/sim"
	"holdfast/router/sim/policy"
)

// OpenLoopRow is the backlog of one policy when samples arrive by themselves.
type OpenLoopRow struct {
	Config string `json:"config"`
	Policy string `json:"policy"`
	// LoadPercent is the arrival rate as a share of the bound.
	LoadPercent      float64 `json:"load_pct"`
	SamplesPerMinute float64 `json:"samples_per_min"`
	// Backlog is the mean of Q over each quarter of the measured time, all classes;
	// ByClass the largest Q_b seen.
	Backlog [4]float64     `json:"backlog_by_quarter"`
	ByClass map[string]int `json:"largest_backlog_by_class"`
	Seeds   int            `json:"seeds"`
}

// OpenLoopResult shows whether Q_b stays bounded.
type OpenLoopResult struct {
	Rows []OpenLoopRow `json:"rows"`
}

// OpenLoop lets samples arrive at shares of the bound, for sixteen hours.
func OpenLoop(ctx context.Context, o Options) (*OpenLoopResult, error) {
	setups, err := o.setups()
	if err != nil {
		return nil, err
	}
	result := &OpenLoopResult{}
	for _, s := range setups {
		bound, err := boundOf(s, Stationary, o.seeds()[0])
		if err != nil {
			return nil, err
		}
		for _, load := range []float64{0.8, 0.85, 0.9} {
			change := func(c *sim.Config) {
				c.Trainer = sim.Trainer{ArrivalsPerSecond: load * bound / 60}
				c.MeasureSeconds, c.SeriesSeconds = 16*3600, 60
			}
			runs := o.batch(fmt.Sprintf("%s open loop at %.0f %%", s.Name, 100*load))
			specs := []sim.Spec{policy.SessionCeiling(s.BestSessions), policy.MISAT(), policy.Holdfast(), policy.Oracle(policy.DefaultOracle())}
			places := make([][]**sim.Result, len(specs))
			for i, spec := range specs {
				for _, seed := range o.seeds() {
					places[i] = append(places[i], runs.add(spec, o.config(s, Stationary, seed, change)))
				}
			}
			if err := runs.run(ctx); err != nil {
				return nil, err
			}
			for i, spec := range specs {
				result.Rows = append(result.Rows, openLoopRow(s, spec.Name, load, places[i]))
			}
		}
	}
	return result, nil
}

func openLoopRow(s Setup, name string, load float64, places []**sim.Result) OpenLoopRow {
	row := OpenLoopRow{Config: s.Name, Policy: name, LoadPercent: 100 * load, ByClass: map[string]int{}, Seeds: len(places)}
	for _, place := range places {
		r := *place
		row.SamplesPerMinute += r.SamplesPerMinute / float64(len(places))
		var points []sim.Point
		for _, p := range r.Series {
			if p.AtSeconds > r.SimulatedSeconds-r.MeasuredSeconds {
				points = append(points, p)
			}
		}
		for i, p := range points {
			for b, q := range p.Backlog {
				row.Backlog[4*i/len(points)] += float64(q) * 4 / float64(len(points)) / float64(len(places))
				row.ByClass[r.Classes[b].Name] = max(row.ByClass[r.Classes[b].Name], q)
			}
		}
	}
	return row
}

// WriteText prints the backlogs.
func (r *OpenLoopResult) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "config\tload\tpolicy\tsamples/min\tmean backlog, 1st quarter\t2nd\t3rd\t4th\tlargest agent\trlvr\trlhf\t")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%.0f %%\t%s\t%.2f\t%.0f\t%.0f\t%.0f\t%.0f\t%d\t%d\t%d\t\n", row.Config, row.LoadPercent, row.Policy, row.SamplesPerMinute,
			row.Backlog[0], row.Backlog[1], row.Backlog[2], row.Backlog[3], row.ByClass["agent"], row.ByClass["rlvr"], row.ByClass["rlhf"])
	}
	return t.Flush()
}
