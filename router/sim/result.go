package sim

import (
	"math"
	"slices"
)

// Result is what one run is judged by. Everything but Fingerprint, Iterations and
// Series counts from the end of the warm-up.
type Result struct {
	Policy string
	Seed   uint64
	// Fingerprint covers every completion of the run, its time and its block-time.
	Fingerprint uint64
	// SimulatedSeconds is the whole run, MeasuredSeconds the part that counts.
	SimulatedSeconds float64
	MeasuredSeconds  float64
	Classes          []ClassResult

	// SamplesPerMinute is all completed samples; BalancedPerMinute is
	// min_b(N_b / rho_b), which skew between classes cannot raise.
	SamplesPerMinute  float64
	BalancedPerMinute float64
	// TVPoints is 1/2 sum |completed share - released share| in percentage points.
	TVPoints float64
	// TVFromStartPoints is the same over the whole run: it contains what is
	// unfinished at the end, which is not of the mixture released.
	TVFromStartPoints float64
	// OwnHit is the cached part of what continuations left in the cache themselves,
	// without prompts that they share with others.
	OwnHit float64
	// PrefixHit is cached over all prompt tokens. The rates are per second, with
	// hit tokens counted as prefilled; RequestsPerMinute counts turns.
	PrefixHit              float64
	PrefillTokensPerSecond float64
	DecodeTokensPerSecond  float64
	RequestsPerMinute      float64
	ColdPrefillTokens      int64
	RecomputedTokens       int64
	HostTokens             int64
	Preemptions            int64
	// BusyShare is the mean share of time in which engines ran steps.
	BusyShare float64

	// MeanLatencySeconds is from release to completion, over all classes.
	MeanLatencySeconds float64
	GroupP99Seconds    float64
	OldestHoldSeconds  float64
	// CapReversalsPerHour is the worst instance's.
	CapReversalsPerHour float64
	// BlockSeconds is the mean block-time of a completed sample, in engine blocks.
	BlockSeconds float64
	// Backlog is released and not completed at the end, per class in Classes.
	Backlog int

	Iterations []Iteration
	Series     []Point
}

// ClassResult is one class's part.
type ClassResult struct {
	Name                string
	Share               float64
	Released, Completed int
	SamplesPerMinute    float64
	P50Seconds          float64
	P95Seconds          float64
	P99Seconds          float64
	OldestHoldSeconds   float64
	// BlockSeconds and ResidencySeconds are means of Z_s and T_s.
	BlockSeconds     float64
	ResidencySeconds float64
	// Backlog is Q_b at the end.
	Backlog int
}

// Iteration is one training iteration of an end-to-end run.
type Iteration struct {
	Seconds    float64
	EndSeconds float64
	// Shares are the cumulative shares of what the trainer consumed, TVPoints
	// their distance from the target mixture.
	Shares   []float64
	TVPoints float64
}

// Point is one point of the time series.
type Point struct {
	AtSeconds float64
	Instances []InstancePoint
	// Completed is the number of samples so far, Backlog those released and not
	// completed, by class.
	Completed []int
	Backlog   []int
}

// InstancePoint is one instance at one point; Hit and Turns are since the last.
type InstancePoint struct {
	BaseCap, Cap     int
	Hit              float64
	Turns            int64
	Running, Waiting int
	Sessions         int
	UsedShare        float64
}

func (m *metrics) result(w *world) *Result {
	r := &Result{
		Policy: w.spec.Name, Seed: w.cfg.Seed, Fingerprint: m.print.Sum64(),
		SimulatedSeconds: float64(w.now) / 1e9, MeasuredSeconds: float64(w.now-m.startedAt) / 1e9,
		Iterations: m.iterations, Series: m.series,
	}
	for _, s := range w.sessions {
		if s != nil && s.state == asking {
			m.held(s, w.now-s.askedAt)
		}
	}
	m.engineFigures(w, r)
	m.classFigures(w, r)
	slices.Sort(m.groups)
	r.GroupP99Seconds = quantile(m.groups, 0.99)
	r.OldestHoldSeconds = float64(m.oldestHold) / 1e9
	for i := range m.caps {
		r.CapReversalsPerHour = max(r.CapReversalsPerHour, float64(m.caps[i].reversals)/(r.MeasuredSeconds/3600))
	}
	return r
}

func (m *metrics) engineFigures(w *world, r *Result) {
	var prompt, cached, generated, busy int64
	for i, e := range w.engines {
		d := subStats(e.stats(), m.before[i])
		prompt += d.PromptTokens
		cached += d.CachedTokens
		generated += d.GeneratedTokens
		busy += d.BusyNanos
		r.Preemptions += d.Preemptions
		r.RecomputedTokens += d.RecomputedTokens
		r.HostTokens += d.HostTokens
	}
	r.ColdPrefillTokens = prompt - cached
	if prompt > 0 {
		r.PrefixHit = float64(cached) / float64(prompt)
	}
	if m.ownTokens > 0 {
		r.OwnHit = float64(m.ownCachedTokens) / float64(m.ownTokens)
	}
	r.PrefillTokensPerSecond = float64(prompt) / r.MeasuredSeconds
	r.DecodeTokensPerSecond = float64(generated) / r.MeasuredSeconds
	r.RequestsPerMinute = 60 * float64(m.turns) / r.MeasuredSeconds
	r.BusyShare = float64(busy) / 1e9 / r.MeasuredSeconds / float64(len(w.engines))
}

func (m *metrics) classFigures(w *world, r *Result) {
	minutes := r.MeasuredSeconds / 60
	blockTokens := float64(w.cfg.Instances[0].BlockTokens)
	backlog := make([]int, len(w.classes))
	for _, s := range w.sessions {
		if s != nil {
			backlog[s.class]++
		}
	}
	var completed, released, total, releasedTotal int
	for b := range m.classes {
		completed += m.classes[b].completed
		released += m.classes[b].released
		total += m.classes[b].total
		releasedTotal += m.classes[b].releasedTotal
	}
	r.BalancedPerMinute = math.Inf(1)
	for b := range m.classes {
		c := &m.classes[b]
		slices.Sort(c.latencies)
		n := float64(max(1, c.completed))
		for _, seconds := range c.latencies {
			r.MeanLatencySeconds += seconds / float64(max(1, completed))
		}
		r.Classes = append(r.Classes, ClassResult{
			Name: w.classes[b].Name, Share: w.classes[b].Share, Released: c.released, Completed: c.completed,
			SamplesPerMinute: float64(c.completed) / minutes,
			P50Seconds:       quantile(c.latencies, 0.5), P95Seconds: quantile(c.latencies, 0.95), P99Seconds: quantile(c.latencies, 0.99),
			OldestHoldSeconds: float64(c.oldestHold) / 1e9,
			BlockSeconds:      c.tokenSeconds / blockTokens / n, ResidencySeconds: c.residencySeconds / n,
			Backlog: backlog[b],
		})
		r.Backlog += backlog[b]
		r.BlockSeconds += c.tokenSeconds / blockTokens / float64(max(1, completed))
		r.BalancedPerMinute = min(r.BalancedPerMinute, float64(c.completed)/w.classes[b].Share/minutes)
		r.TVPoints += 50 * math.Abs(float64(c.completed)/float64(max(1, completed))-float64(c.released)/float64(max(1, released)))
		r.TVFromStartPoints += 50 * math.Abs(float64(c.total)/float64(max(1, total))-float64(c.releasedTotal)/float64(max(1, releasedTotal)))
	}
	r.SamplesPerMinute = float64(completed) / minutes
}

// quantile of sorted values, by linear interpolation; 0 without any.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	at := q * float64(len(sorted)-1)
	i := int(at)
	if i+1 == len(sorted) {
		return sorted[i]
	}
	return sorted[i] + (at-float64(i))*(sorted[i+1]-sorted[i])
}
