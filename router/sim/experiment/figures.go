package experiment

import (
	"context"
	"fmt"

	"holdfast/router/sim"
	"holdfast/router/sim/chart"
	"holdfast/router/sim/policy"
)

// Figure is one chart of the documentation.
type Figure struct {
	Name string
	SVG  []byte
}

// Figures runs what the charts of the documentation show and draws them.
func Figures(ctx context.Context, o Options) ([]Figure, error) {
	var figures []Figure
	for _, draw := range []func(context.Context, Options) (Figure, error){gainsFigure, iterationsFigure, capsFigure, offloadFigure, curveFigure} {
		figure, err := draw(ctx, o)
		if err != nil {
			return nil, err
		}
		figures = append(figures, figure)
	}
	return figures, nil
}

// gainsFigure is the gain of every policy over the session ceiling.
func gainsFigure(ctx context.Context, o Options) (Figure, error) {
	regimes := []Regime{Stationary, Drifting}
	result := o.Earlier
	if result == nil {
		var err error
		if result, err = Paper(ctx, o, regimes); err != nil {
			return Figure{}, err
		}
	}
	setups, err := o.setups()
	if err != nil {
		return Figure{}, err
	}
	var panels []chart.Panel
	for _, s := range setups {
		p := chart.Panel{Title: s.Name + "-like: gain in balanced samples/min over the best session ceiling", YLabel: "%", YMin: -80, YMax: 20}
		for i, regime := range regimes {
			group := chart.Bars{Name: string(regime), Color: i}
			for _, row := range result.Rows {
				if row.Config == s.Name && row.Regime == regime {
					if i == 0 {
						p.Labels = append(p.Labels, row.Policy)
					}
					group.Values = append(group.Values, row.GainVsSessionPercent)
				}
			}
			p.Bars = append(p.Bars, group)
		}
		panels = append(panels, p)
	}
	return Figure{"gains", chart.SVG(panels...)}, nil
}

// iterationsFigure is the end-to-end run: iteration times and consumed shares, as
// in the paper's Figure 3.
func iterationsFigure(ctx context.Context, o Options) (Figure, error) {
	s, seed := Step(), o.seeds()[0]
	runs := o.batch("figure: iterations")
	names := []string{"session ceiling", "request ceiling", "misa-t", "holdfast"}
	var places []**sim.Result
	for _, spec := range []sim.Spec{policy.SessionCeiling(s.BestSessions), policy.RequestCeiling(s.BestRequests), policy.MISAT(), policy.Holdfast()} {
		places = append(places, runs.add(spec, o.config(s, EndToEnd, seed, nil)))
	}
	if err := runs.run(ctx); err != nil {
		return Figure{}, err
	}
	base := meanIteration(*places[0])
	times := chart.Panel{Title: "Step-like, end to end: iteration time over the session ceiling's mean", XLabel: "iteration", YLabel: "normalized"}
	shares := chart.Panel{Title: "Holdfast: cumulative shares of consumed samples; dashed: target", XLabel: "iteration", YLabel: "share", YMin: 0, YMax: 0.7}
	for i, place := range places {
		line := chart.Line{Name: names[i], Color: i}
		for n, it := range (*place).Iterations {
			line.X, line.Y = append(line.X, float64(n+1)), append(line.Y, it.Seconds/base)
		}
		times.Lines = append(times.Lines, line)
	}
	holdfast := *places[len(places)-1]
	for b, class := range holdfast.Classes {
		line := chart.Line{Name: class.Name, Color: b}
		target := chart.Line{Name: class.Name + " target", Color: b, Dashed: true}
		for n, it := range holdfast.Iterations {
			line.X, line.Y = append(line.X, float64(n+1)), append(line.Y, it.Shares[b])
			target.X, target.Y = append(target.X, float64(n+1)), append(target.Y, class.Share)
		}
		shares.Lines = append(shares.Lines, line, target)
	}
	return Figure{"iterations", chart.SVG(times, shares)}, nil
}

// capsFigure is base and current cap with the hit rate over time under drift, as
// in the paper's Figure 4.
func capsFigure(ctx context.Context, o Options) (Figure, error) {
	s, seed := Qwen(), o.seeds()[0]
	runs := o.batch("figure: caps")
	series := func(c *sim.Config) { c.SeriesSeconds = 60 }
	names := []string{"misa-t-paper", "holdfast"}
	var places []**sim.Result
	for _, spec := range []sim.Spec{policy.MISATPaper(), policy.Holdfast()} {
		places = append(places, runs.add(spec, o.config(s, Drifting, seed, series)))
	}
	if err := runs.run(ctx); err != nil {
		return Figure{}, err
	}
	var panels []chart.Panel
	for i, place := range places {
		caps := chart.Panel{Title: fmt.Sprintf("Qwen-like, drift, %s: caps of one instance", names[i]), XLabel: "hours", YLabel: "sessions"}
		state := chart.Panel{Title: "Prefix hit and KV in use by running requests", XLabel: "hours", YLabel: "share", YMin: 0, YMax: 1}
		lines := [5]chart.Line{{Name: "base cap", Color: 0}, {Name: "current cap", Color: 1}, {Name: "sessions", Color: 7, Dashed: true},
			{Name: "prefix hit", Color: 2}, {Name: "KV in use", Color: 3}}
		for _, p := range (*place).Series {
			at := p.Instances[0]
			for j, v := range []float64{float64(at.BaseCap), float64(at.Cap), float64(at.Sessions), at.Hit, at.UsedShare} {
				lines[j].X, lines[j].Y = append(lines[j].X, p.AtSeconds/3600), append(lines[j].Y, v)
			}
		}
		caps.Lines, state.Lines = lines[:3], lines[3:]
		panels = append(panels, caps, state)
	}
	return Figure{"caps", chart.SVG(panels...)}, nil
}

// curveFigure is rate against outer concurrency.
func curveFigure(ctx context.Context, o Options) (Figure, error) {
	result, err := Curve(ctx, o)
	if err != nil {
		return Figure{}, err
	}
	setups, err := o.setups()
	if err != nil {
		return Figure{}, err
	}
	var panels []chart.Panel
	for _, s := range setups {
		p := chart.Panel{Title: s.Name + "-like: rate over outer concurrency", XLabel: "samples in flight per instance", YLabel: "balanced samples/min", YMin: 0, YMax: 16}
		index := map[string]int{}
		for _, point := range result.Points {
			if point.Config != s.Name {
				continue
			}
			i, ok := index[point.Policy]
			if !ok {
				i = len(p.Lines)
				index[point.Policy] = i
				p.Lines = append(p.Lines, chart.Line{Name: point.Policy, Color: i, Points: true})
			}
			p.Lines[i].X, p.Lines[i].Y = append(p.Lines[i].X, float64(point.OuterPerInstance)), append(p.Lines[i].Y, point.BalancedPerMin)
		}
		panels = append(panels, p)
	}
	panels = append(panels, speedups(result, setups))
	return Figure{"curve", chart.SVG(panels...)}, nil
}

// speedups is the outside check of the engine model in shape: the rate over that
// of placement without admission, beside the published curve of ThunderAgent on
// other machines. Concurrency is relative to the largest at which both are equal.
func speedups(result *CurveResult, setups []Setup) chart.Panel {
	p := chart.Panel{Title: "Rate over placement without admission; dashed: ThunderAgent on 8 x H20, published", XLabel: "concurrency over the largest at parity", YLabel: "ratio", YMin: 0, YMax: 7}
	for i, s := range setups {
		parity := 1
		for _, point := range result.Points {
			if point.Config == s.Name && point.Policy == "thunderagent-like" && point.OverPermissive < 1.1 {
				parity = max(parity, point.OuterPerInstance)
			}
		}
		for j, name := range []string{"thunderagent-like", "holdfast"} {
			line := chart.Line{Name: s.Name + " " + name, Color: 2*j + i, Points: true}
			for _, point := range result.Points {
				if point.Config == s.Name && point.Policy == name {
					line.X = append(line.X, float64(point.OuterPerInstance)/float64(parity))
					line.Y = append(line.Y, point.OverPermissive)
				}
			}
			p.Lines = append(p.Lines, line)
		}
	}
	published := chart.Line{Name: "published", Color: 6, Dashed: true, Points: true}
	for _, point := range publishedCurve {
		published.X = append(published.X, point.concurrency/publishedParity)
		published.Y = append(published.Y, point.speedup)
	}
	p.Lines = append(p.Lines, published)
	return p
}
