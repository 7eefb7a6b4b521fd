package experiment

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"

	"holdfast/router/sim"
	"holdfast/router/sim/policy"
	"holdfast/router/sim/workload"
)

// StressRow is Holdfast under one disturbance, beside the best session ceiling
// under the same one and Holdfast without it.
type StressRow struct {
	Config   string `json:"config"`
	Scenario string `json:"scenario"`
	// UndisturbedPercent is the balanced rate as a share of Holdfast's without the
	// disturbance, SessionPercent the gain over the session ceiling with it.
	BalancedPerMin     float64 `json:"balanced_per_min"`
	UndisturbedPercent float64 `json:"of_undisturbed_pct"`
	SessionPercent     float64 `json:"gain_vs_session_pct"`
	// RecoveredPercent is the rate from 15 minutes after the disturbance on, as a
	// share of the undisturbed rate in the same time, for those that end; of the
	// oracle's for those that stay. 0 where it does not apply.
	RecoveredPercent float64 `json:"recovered_pct,omitempty"`
	PrefixHit        float64 `json:"prefix_hit"`
	TVPoints         float64 `json:"tv_pp"`
	// OldestHoldRatio is the oldest hold over the session ceiling's.
	OldestHoldSeconds   float64 `json:"oldest_hold_s"`
	OldestHoldRatio     float64 `json:"oldest_hold_vs_session"`
	CapReversalsPerHour float64 `json:"cap_reversals_per_hour"`
	Seeds               int     `json:"seeds"`
}

// StressResult is the list of disturbances.
type StressResult struct {
	Rows []StressRow `json:"rows"`
}

// scenario is one disturbance.
type scenario struct {
	name string
	// change disturbs a run; endsSeconds is when the disturbance is over, 0 if it lasts
	// for the whole run.
	change      func(*sim.Config)
	composed    func(*sim.Composed)
	endsSeconds float64
	// lasting: from endsSeconds on the work itself is different.
	lasting bool
}

// disturbedAt is when a passing disturbance begins, after the warm-up.
const disturbedAtSeconds = 2 * 3600

// recoverySeconds is how long throughput may take to be back.
const recoverySeconds = 900

func scenarios() []scenario {
	fault := func(kind sim.FaultKind, seconds, factor float64) func(*sim.Config) {
		return func(c *sim.Config) {
			c.Faults = append(c.Faults, sim.Fault{Kind: kind, StartSeconds: disturbedAtSeconds, EndSeconds: disturbedAtSeconds + seconds, Factor: factor})
		}
	}
	observed := func(change func(*sim.Observation)) func(*sim.Config) {
		return func(c *sim.Config) { change(&c.Observed) }
	}
	list := []scenario{{name: "undisturbed"}}
	for _, share := range []float64{0.05, 0.2, 0.5} {
		list = append(list, scenario{name: fmt.Sprintf("labels confused %.0f %%", 100*share), change: func(c *sim.Config) { c.Labels.Confused = share }})
	}
	list = append(list, scenario{name: "labels missing 100 %", change: func(c *sim.Config) { c.Labels.Missing = 1 }},
		scenario{name: "session ids used again", change: func(c *sim.Config) { c.Labels.ReuseIDs = true }})
	for _, seconds := range []float64{1, 5, 15} {
		list = append(list, scenario{name: fmt.Sprintf("snapshots %.0f s late, reordered", seconds), change: observed(func(o *sim.Observation) {
			o.SnapshotDelaySeconds, o.SnapshotJitterSeconds = seconds, seconds
		})})
	}
	return append(list,
		scenario{name: "snapshots lost 30 %", change: observed(func(o *sim.Observation) { o.SnapshotLoss = 0.3 })},
		scenario{name: "cache events lost 10 %", change: observed(func(o *sim.Observation) { o.BlockLoss = 0.1 })},
		scenario{name: "tool gaps x10 for 10 min", change: fault(sim.SlowTools, 600, 10), endsSeconds: disturbedAtSeconds + 600},
		scenario{name: "instance lost for 20 min", change: fault(sim.InstanceLost, 1200, 1), endsSeconds: disturbedAtSeconds + 1200},
		scenario{name: "weight sync of 20 s", change: fault(sim.WeightSync, 20, 1), endsSeconds: disturbedAtSeconds + 20},
		scenario{name: "context limit x0.75 for 10 min", change: fault(sim.ContextLimit, 600, 0.75), endsSeconds: disturbedAtSeconds + 600},
		scenario{name: "lengths x2 from sample 1,600 on", composed: func(c *sim.Composed) {
			c.ShiftFrom, c.Shift = 1600, workload.Factors{Lengths: 2, Gaps: 1}
		}, endsSeconds: disturbedAtSeconds, lasting: true},
		scenario{name: "cold start", change: func(c *sim.Config) { c.MeasureSeconds, c.WarmUpSeconds = 2*3600, 0 }},
	)
}

// scenarios are those chosen, the undisturbed one first.
func (o *Options) scenarios() []scenario {
	all := scenarios()
	if len(o.Scenarios) == 0 {
		return all
	}
	chosen := all[:1]
	for _, sc := range all[1:] {
		if slices.Contains(o.Scenarios, sc.name) {
			chosen = append(chosen, sc)
		}
	}
	return chosen
}

// stressRuns are the runs of one scenario.
type stressRuns struct {
	scenario
	holdfast, session, oracle []**sim.Result
}

// Stress runs Holdfast under each disturbance.
func Stress(ctx context.Context, o Options) (*StressResult, error) {
	setups, err := o.setups()
	if err != nil {
		return nil, err
	}
	result := &StressResult{}
	for _, s := range setups {
		runs := o.batch(s.Name + " stress")
		var list []stressRuns
		for _, sc := range o.scenarios() {
			r := stressRuns{scenario: sc}
			for _, seed := range o.seeds() {
				cfg := o.disturbed(s, sc, seed)
				r.holdfast = append(r.holdfast, runs.add(policy.Holdfast(), cfg))
				r.session = append(r.session, runs.add(policy.SessionCeiling(s.BestSessions), cfg))
				if sc.lasting {
					r.oracle = append(r.oracle, runs.add(policy.Oracle(policy.DefaultOracle()), cfg))
				}
			}
			list = append(list, r)
		}
		if err := runs.run(ctx); err != nil {
			return nil, err
		}
		for i := range list {
			result.Rows = append(result.Rows, list[i].row(s, &list[0]))
		}
	}
	return result, nil
}

// disturbed is a run of the stationary regime under a scenario.
func (o *Options) disturbed(s Setup, sc scenario, seed uint64) func() (sim.Config, error) {
	return func() (sim.Config, error) {
		cfg, err := o.config(s, Stationary, seed, nil)()
		if err != nil {
			return cfg, err
		}
		if sc.composed != nil {
			composed := s.composed(Stationary, seed)
			sc.composed(&composed)
			if cfg.Source, err = composed.Source(); err != nil {
				return cfg, err
			}
		}
		cfg.SeriesSeconds = 300
		if sc.change != nil {
			sc.change(&cfg)
		}
		return cfg, nil
	}
}

func (r *stressRuns) row(s Setup, undisturbed *stressRuns) StressRow {
	mine := summarize(s, Stationary, "holdfast", "", r.holdfast)
	session := summarize(s, Stationary, "session-ceiling", "", r.session)
	normal := summarize(s, Stationary, "holdfast", "", undisturbed.holdfast)
	row := StressRow{
		Config: s.Name, Scenario: r.name, BalancedPerMin: mine.BalancedPerMinute,
		UndisturbedPercent: 100 * mine.BalancedPerMinute / normal.BalancedPerMinute,
		PrefixHit:          mine.PrefixHit, TVPoints: mine.TVPoints, OldestHoldSeconds: mine.OldestHoldSeconds,
		OldestHoldRatio:     mine.OldestHoldSeconds / math.Max(1, session.OldestHoldSeconds),
		CapReversalsPerHour: mine.CapReversalsPerHour, Seeds: len(r.holdfast),
	}
	row.SessionPercent, _ = gain(&mine, &session)
	if r.endsSeconds > 0 {
		base := undisturbed.holdfast
		if r.lasting {
			base = r.oracle
		}
		row.RecoveredPercent = 100 * rateFrom(r.holdfast, r.endsSeconds+recoverySeconds) / rateFrom(base, r.endsSeconds+recoverySeconds)
	}
	return row
}

// rateFrom is the mean rate of completed samples from a time on.
func rateFrom(places []**sim.Result, fromSeconds float64) float64 {
	var sum float64
	for _, place := range places {
		series := (*place).Series
		var first, last *sim.Point
		for i := range series {
			if first == nil && series[i].AtSeconds >= fromSeconds {
				first = &series[i]
			}
			last = &series[i]
		}
		if first == nil || first == last {
			continue
		}
		n := 0
		for b := range last.Completed {
			n += last.Completed[b] - first.Completed[b]
		}
		sum += float64(n) / (last.AtSeconds - first.AtSeconds)
	}
	return sum
}

// WriteText prints the list.
func (r *StressResult) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "config\tscenario\tbal/min\tof undisturbed\tvs session ceiling\trecovered\thit\tTV pp\toldest hold s\tvs session\treversals/h\t")
	for _, row := range r.Rows {
		recovered := "-"
		if row.RecoveredPercent > 0 {
			recovered = fmt.Sprintf("%.1f %%", row.RecoveredPercent)
		}
		fmt.Fprintf(t, "%s\t%s\t%.2f\t%.1f %%\t%+.1f %%\t%s\t%.3f\t%.2f\t%.0f\t%.2fx\t%.1f\t\n", row.Config, row.Scenario, row.BalancedPerMin,
			row.UndisturbedPercent, row.SessionPercent, recovered, row.PrefixHit, row.TVPoints, row.OldestHoldSeconds, row.OldestHoldRatio, row.CapReversalsPerHour)
	}
	return t.Flush()
}
