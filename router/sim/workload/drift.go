package workload

import "math"

// Factors multiply what is drawn: Lengths all token counts except the system
// prompt, Gaps the tool gaps.
type Factors struct {
	Lengths float64
	Gaps    float64
}

// Steady leaves everything as it is drawn.
var Steady = Factors{Lengths: 1, Gaps: 1}

// Drift moves the factors up and down as samples go by: sample n has factor
// F^sin(2 pi n / PeriodSamples), that is between 1/F and F with geometric mean
// 1. Gaps run a quarter period behind lengths, so that all four combinations of
// short and long occur. Drift follows the sample's number and not the clock,
// since a policy that runs faster would otherwise be given different work.
type Drift struct {
	// Lengths and Gaps are the largest factors, 1.7 for instance; 1 is no drift.
	Lengths float64
	Gaps    float64
	// PeriodSamples is the number of samples of one full swing.
	PeriodSamples int64
}

// PaperDrift is the drift that comparisons use: lengths and gaps by 1.7 up and
// down over 1,500 samples.
var PaperDrift = Drift{Lengths: 1.7, Gaps: 1.7, PeriodSamples: 1_500}

// At returns the factors of sample n, counted from 0. The zero Drift is Steady.
func (d Drift) At(n int64) Factors {
	if d.PeriodSamples <= 0 {
		return Steady
	}
	phase := 2 * math.Pi * float64(n%d.PeriodSamples) / float64(d.PeriodSamples)
	return Factors{
		Lengths: math.Pow(d.Lengths, math.Sin(phase)),
		Gaps:    math.Pow(d.Gaps, math.Sin(phase-math.Pi/2)),
	}
}
