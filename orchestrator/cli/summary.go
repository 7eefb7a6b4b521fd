package cli

import (
	"slices"
	"time"

	"holdfast/api/wire"
)

// Summary is the result of one run, computed from its samples alone, so that a
// run that was interrupted and finished later gives the same figures.
type Summary struct {
	Released  int `json:"released"`
	Completed int `json:"completed"`
	Failed    int `json:"failed"`
	Turns     int `json:"turns"`
	// SamplesPerMin is completed samples per minute of wall time.
	SamplesPerMin float64 `json:"samples_per_min"`
	// Held counts sessions that were held at least once.
	Held int `json:"held"`
	// TVPP is the distance between the shares completed and the shares released, in
	// percentage points, over the middle half of the run's time.
	TVPP float64 `json:"tv_pp"`
	// PrefixHit is cached over prompt tokens, 0 to 1.
	PrefixHit float64 `json:"prefix_hit"`
	// WallS is the time from the first release to the last ending, in seconds.
	WallS float64 `json:"wall_s"`
}

// summarise computes a run's summary from all its samples.
func summarise(released map[string]int64, samples []wire.Sample) Summary {
	var s Summary
	for _, n := range released {
		s.Released += int(n)
	}
	var prompt, cached int64
	var first, last time.Time
	for i := range samples {
		sample := &samples[i]
		switch sample.Status {
		case "completed":
			s.Completed++
		case "failed":
			s.Failed++
		}
		s.Turns += sample.Usage.Turns
		if sample.Times.HeldSeconds > 0 {
			s.Held++
		}
		prompt += sample.Usage.PromptTokens
		cached += sample.Usage.CachedTokens
		if first.IsZero() || sample.ReleasedAt.Before(first) {
			first = sample.ReleasedAt
		}
		if sample.EndedAt.After(last) {
			last = sample.EndedAt
		}
	}
	if prompt > 0 {
		s.PrefixHit = round(float64(cached)/float64(prompt), 4)
	}
	wall := last.Sub(first)
	s.WallS = round(wall.Seconds(), 1)
	if wall > 0 {
		s.SamplesPerMin = round(float64(s.Completed)/wall.Minutes(), 2)
	}
	s.TVPP = round(middleDrift(released, samples, first.Add(wall/4), last.Add(-wall/4)), 2)
	return s
}

// middleDrift is D_TV = 1/2 sum_b |p_b - q_b| in percentage points between the
// shares released (q) and the shares completed between from and to (p).
func middleDrift(released map[string]int64, samples []wire.Sample, from, to time.Time) float64 {
	completed := make(map[string]int64, len(released))
	for i := range samples {
		if s := &samples[i]; (s.Status == "completed" || s.Status == "truncated") && !s.EndedAt.Before(from) && s.EndedAt.Before(to) {
			completed[s.Class]++
		}
	}
	return totalVariationPP(completed, released)
}

// totalVariationPP compares two counts by class as shares, in percentage points.
func totalVariationPP(p, q map[string]int64) float64 {
	var sumP, sumQ int64
	classes := make([]string, 0, len(q))
	for class, n := range q {
		sumQ += n
		classes = append(classes, class)
	}
	for class, n := range p {
		sumP += n
		if _, ok := q[class]; !ok {
			classes = append(classes, class)
		}
	}
	if sumP == 0 || sumQ == 0 {
		return 0
	}
	slices.Sort(classes)
	distance := 0.0
	for _, class := range classes {
		d := float64(p[class])/float64(sumP) - float64(q[class])/float64(sumQ)
		distance += max(d, -d)
	}
	return 100 * distance / 2
}
