package experiment

import "holdfast/router/sim"

// summarize averages the runs of one policy over seeds.
func summarize(s Setup, regime Regime, name, ceiling string, places []**sim.Result) Row {
	r := Row{
		Config: s.Name, Regime: regime, Policy: name, Ceiling: ceiling, Seeds: len(places),
		ByClass: map[string]float64{}, P50Seconds: map[string]float64{}, P95Seconds: map[string]float64{}, P99Seconds: map[string]float64{},
	}
	var balanced []float64
	for _, place := range places {
		r.results = append(r.results, *place)
		balanced = append(balanced, (*place).BalancedPerMinute)
	}
	r.BalancedPerMinute, r.SD = meanSD(balanced)
	mean := func(of func(*sim.Result) float64) float64 {
		var sum float64
		for _, x := range r.results {
			sum += of(x)
		}
		return sum / float64(len(r.results))
	}
	r.SamplesPerMinute = mean(func(x *sim.Result) float64 { return x.SamplesPerMinute })
	r.PrefixHit = mean(func(x *sim.Result) float64 { return x.PrefixHit })
	r.PrefillTokensPerSecond = mean(func(x *sim.Result) float64 { return x.PrefillTokensPerSecond })
	r.DecodeTokensPerSecond = mean(func(x *sim.Result) float64 { return x.DecodeTokensPerSecond })
	r.RequestsPerMinute = mean(func(x *sim.Result) float64 { return x.RequestsPerMinute })
	r.OwnHit = mean(func(x *sim.Result) float64 { return x.OwnHit })
	r.TVPoints = mean(func(x *sim.Result) float64 { return x.TVPoints })
	r.TVFromStartPoints = mean(func(x *sim.Result) float64 { return x.TVFromStartPoints })
	r.GroupP99Seconds = mean(func(x *sim.Result) float64 { return x.GroupP99Seconds })
	r.OldestHoldSeconds = mean(func(x *sim.Result) float64 { return x.OldestHoldSeconds })
	r.Preemptions = mean(func(x *sim.Result) float64 { return float64(x.Preemptions) })
	r.ColdPrefillTokens = mean(func(x *sim.Result) float64 { return float64(x.ColdPrefillTokens) })
	r.BlockSeconds = mean(func(x *sim.Result) float64 { return x.BlockSeconds })
	r.CapReversalsPerHour = mean(func(x *sim.Result) float64 { return x.CapReversalsPerHour })
	for b, c := range r.results[0].Classes {
		of := func(pick func(*sim.ClassResult) float64) float64 {
			return mean(func(x *sim.Result) float64 { return pick(&x.Classes[b]) })
		}
		r.ByClass[c.Name] = of(func(c *sim.ClassResult) float64 { return c.SamplesPerMinute })
		r.P50Seconds[c.Name] = of(func(c *sim.ClassResult) float64 { return c.P50Seconds })
		r.P95Seconds[c.Name] = of(func(c *sim.ClassResult) float64 { return c.P95Seconds })
		r.P99Seconds[c.Name] = of(func(c *sim.ClassResult) float64 { return c.P99Seconds })
	}
	if len(r.results[0].Iterations) > 0 {
		r.IterationSeconds = mean(meanIteration)
		r.ConsumedTVPoints = mean(func(x *sim.Result) float64 { return x.Iterations[len(x.Iterations)-1].TVPoints })
	}
	return r
}

func meanIteration(x *sim.Result) float64 {
	var sum float64
	for _, it := range x.Iterations {
		sum += it.Seconds
	}
	return sum / float64(len(x.Iterations))
}
