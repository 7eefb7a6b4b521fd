// Package residency estimates how much KV space a session of one class holds
// and for how long, while many sessions are still running.
//
// Counting only finished sessions misleads exactly when it matters: at a cold
// start the short ones finish first, the estimate is too low and the cap derived
// from it explodes. This estimator therefore counts exposure: every session,
// finished or not, adds the growth (tokens) and time (seconds) it spent at each
// footprint, and a finished one adds one ending there. Endings over growth is
// the hazard of ending at that footprint, right under censoring and under late
// entry alike (the piecewise exponential occurrence/exposure estimate). From
// hazards and paces the expected life of a new session is put together level by
// level; levels nobody has reached yet follow the class's own hazard, and with
// too few endings a neutral prior.
//
// In a steady state the result is the residency-weighted mean footprint,
// sum Z / sum T, which was the best cap reference of those compared.
//
// The package keeps no clock and knows no session: the caller integrates.
package residency

import (
	"math"
	"math/bits"
)

// Config sets the prior and the memory. All fields must be positive.
type Config struct {
	// PriorTokens is the growth after which a session of an unknown class is
	// expected to end, and PriorSeconds the time it takes to get there.
	PriorTokens  float64
	PriorSeconds float64
	// PriorSessions is the prior's weight, in sessions.
	PriorSessions float64
	// WindowSessions is the memory: the weight of an ending has fallen to 1/e
	// after so many further ones.
	WindowSessions float64
}

// Estimate is what is expected of a session of the class.
type Estimate struct {
	// FootprintTokens is k-bar in tokens, ResidencySeconds T-bar; their product is
	// the block-time Z (in token seconds).
	FootprintTokens  float64
	ResidencySeconds float64
	// Endings is the weight of finished sessions behind it, at most WindowSessions.
	Endings float64
}

const (
	firstEdgeTokens = 256
	binCount        = 28
)

// edges[i] is the upper edge of bin i in tokens: two bins to an octave.
var edges = func() (e [binCount]float64) {
	for i := range e {
		e[i] = firstEdgeTokens * math.Pow(2, float64(i)/2)
	}
	return e
}()

// bin holds the exposure at one range of footprints.
type bin struct {
	entries      float64 // sessions that began here
	endings      float64 // sessions that finished here
	growthTokens float64
	seconds      float64
	tokenSeconds float64
}

// Estimator is the estimate of one class. The zero value is not usable; see New.
type Estimator struct {
	cfg  Config
	bins [binCount]bin
	// done* are the sums over finished sessions alone, for the uncorrected estimate.
	doneSessions, doneSeconds, doneTokenSeconds float64
}

// New returns an estimator that knows only its prior.
func New(cfg Config) *Estimator { return &Estimator{cfg: cfg} }

// Enter counts a session that begins its first residency with that footprint.
func (e *Estimator) Enter(tokens int64) { e.bins[binOf(tokens)].entries++ }

// Advance counts residency: the footprint went from one size to another within
// that many seconds, taken as linear growth. A footprint that shrank counts as
// time at the new size.
func (e *Estimator) Advance(fromTokens, toTokens int64, seconds float64) {
	if toTokens <= fromTokens {
		b := &e.bins[binOf(toTokens)]
		b.seconds += seconds
		b.tokenSeconds += seconds * float64(toTokens)
		return
	}
	from, to := float64(fromTokens), float64(toTokens)
	secondsPerToken := seconds / (to - from)
	for i := binOf(fromTokens); i < binCount; i++ {
		upper := min(to, edges[i])
		if i == binCount-1 {
			upper = to
		}
		grown := upper - from
		if grown > 0 {
			b := &e.bins[i]
			b.growthTokens += grown
			b.seconds += grown * secondsPerToken
			b.tokenSeconds += grown * secondsPerToken * (from + upper) / 2
			from = upper
		}
		if from >= to {
			return
		}
	}
}

// End counts a session that finished by itself at that footprint after a life of
// so many seconds and token seconds. Sessions that were cancelled or failed are
// not ended: what was seen of them stays as censored exposure.
func (e *Estimator) End(tokens int64, seconds, tokenSeconds float64) {
	keep := 1 - 1/e.cfg.WindowSessions
	for i := range e.bins {
		b := &e.bins[i]
		b.entries *= keep
		b.endings *= keep
		b.growthTokens *= keep
		b.seconds *= keep
		b.tokenSeconds *= keep
	}
	e.doneSessions = e.doneSessions*keep + 1
	e.doneSeconds = e.doneSeconds*keep + seconds
	e.doneTokenSeconds = e.doneTokenSeconds*keep + tokenSeconds
	e.bins[binOf(tokens)].endings++
}

// Endings is the weight of finished sessions in memory.
func (e *Estimator) Endings() float64 { return e.doneSessions }

// Finished is the plain mean over finished sessions, blind to those still
// running; it is what the paper's moving window gives. Without any it is the prior.
func (e *Estimator) Finished() Estimate {
	if e.doneSeconds <= 0 {
		return Estimate{FootprintTokens: e.cfg.PriorTokens, ResidencySeconds: e.cfg.PriorSeconds}
	}
	return Estimate{
		FootprintTokens:  e.doneTokenSeconds / e.doneSeconds,
		ResidencySeconds: e.doneSeconds / e.doneSessions,
		Endings:          e.doneSessions,
	}
}

// Expect is the censoring-aware estimate for sessions that can grow to at most
// maxTokens.
func (e *Estimator) Expect(maxTokens int64) Estimate {
	var entries, endings, growth, seconds float64
	for i := range e.bins {
		b := &e.bins[i]
		entries += b.entries
		endings += b.endings
		growth += b.growthTokens
		seconds += b.seconds
	}
	if entries == 0 {
		return Estimate{FootprintTokens: e.cfg.PriorTokens, ResidencySeconds: e.cfg.PriorSeconds}
	}
	m := e.cfg.PriorSessions
	classHazard := (endings + m) / (growth + m*e.cfg.PriorTokens)
	classSecondsPerToken := (seconds + m*e.cfg.PriorSeconds) / (growth + m*e.cfg.PriorTokens)
	life := walk{hazard: classHazard, secondsPerToken: classSecondsPerToken, maxTokens: float64(maxTokens)}
	for i := range e.bins {
		life.through(i, &e.bins[i], e.bins[i].entries/entries)
	}
	return Estimate{
		FootprintTokens:  life.tokenSeconds / life.seconds,
		ResidencySeconds: life.seconds,
		Endings:          endings,
	}
}

// walk accumulates the expected life of one session from the lowest bin up.
type walk struct {
	hazard, secondsPerToken float64
	maxTokens               float64
	alive                   float64 // expected number of sessions at the lower edge
	seconds, tokenSeconds   float64
}

// through lets the sessions alive and the share that begins in this bin pass it.
// One traversal's worth of the class's own hazard and pace is mixed in, so that
// a bin seen once or never does not decide alone.
func (w *walk) through(i int, b *bin, begin float64) {
	lower := 0.0
	if i > 0 {
		lower = edges[i-1]
	}
	upper := min(edges[i], w.maxTokens)
	width := upper - lower
	if width <= 0 {
		width = 1
	}
	hazard := (b.endings + w.hazard*width) / (b.growthTokens + width)
	pace := (b.seconds + w.secondsPerToken*width) / (b.growthTokens + width)
	level := (b.tokenSeconds + w.secondsPerToken*width*(lower+upper)/2) / (b.seconds + w.secondsPerToken*width)
	// Those who begin inside the bin are taken to begin in its middle.
	wholeSurvive, halfSurvive := math.Exp(-hazard*width), math.Exp(-hazard*width/2)
	grown := w.alive*(1-wholeSurvive)/hazard + begin*(1-halfSurvive)/hazard
	w.seconds += grown * pace
	w.tokenSeconds += grown * pace * level
	w.alive = w.alive*wholeSurvive + begin*halfSurvive
	if edges[i] >= w.maxTokens {
		w.alive = 0
	}
}

// binOf is the bin that holds a footprint.
func binOf(tokens int64) int {
	if tokens < firstEdgeTokens {
		return 0
	}
	octave := bits.Len64(uint64(tokens)) - bits.Len64(firstEdgeTokens)
	i := 1 + 2*octave
	if i >= binCount {
		return binCount - 1
	}
	if float64(tokens) >= edges[i] {
		i++
	}
	return min(i, binCount-1)
}
