// Package residency estimates how much KV space a session of one class holds
// and for how long, while many sessions are still running.
//
// Counting only finished sessions misleads exactly when it matters: at a cold
// start the short ones finish first, the estimate is too low and the cap derived
// from it explodes. This estimator therefore keeps a life table over footprints:
// for each range of footprints, how many sessions passed through it, how many
// finished in it and how much time was spent in it, running sessions included.
// From the chance to finish and the time in each range, the expected life of a
// new session is put together range by range (the actuarial estimate, which
// counts a session still in a range as half a passage). Ranges that nobody has
// reached yet follow the class's own rates, and with little history a prior.
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

// bin is the life table's entry for one range of footprints.
type bin struct {
	entries      float64 // sessions that began here
	resumed      float64 // sessions whose earlier life was not seen
	passages     float64 // sessions that grew beyond it
	endings      float64 // sessions that finished here
	seconds      float64
	tokenSeconds float64
}

// Estimator is the estimate of one class. The zero value is not usable; see New.
type Estimator struct {
	cfg  Config
	bins [binCount]bin
	// growthTokens is the growth of all sessions, finished or not.
	growthTokens float64
	// done* are the sums over finished sessions alone, for the uncorrected estimate.
	doneSessions, doneSeconds, doneTokenSeconds float64
}

// New returns an estimator that knows only its prior.
func New(cfg Config) *Estimator { return &Estimator{cfg: cfg} }

// Enter counts a session that begins its first residency with that footprint.
func (e *Estimator) Enter(tokens int64) { e.bins[binOf(tokens)].entries++ }

// Resume counts a session whose life is seen only from here on: it tells what
// becomes of sessions of that size, not how they begin.
func (e *Estimator) Resume(tokens int64) { e.bins[binOf(tokens)].resumed++ }

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
	e.growthTokens += to - from
	for i := binOf(fromTokens); ; i++ {
		upper := min(to, edges[i])
		if i == binCount-1 {
			upper = to
		}
		b := &e.bins[i]
		grown := max(0, upper-from)
		b.seconds += grown * secondsPerToken
		b.tokenSeconds += grown * secondsPerToken * (from + upper) / 2
		if i == binCount-1 || to < edges[i] {
			return
		}
		b.passages++
		from = upper
	}
}

// End counts a session that finished by itself at that footprint after a life of
// so many seconds and token seconds. Sessions that were cancelled or failed are
// not ended: what was seen of them stays as censored exposure.
func (e *Estimator) End(tokens int64, seconds, tokenSeconds float64) {
	e.EndResumed(tokens)
	e.doneSessions++
	e.doneSeconds += seconds
	e.doneTokenSeconds += tokenSeconds
}

// EndResumed counts the end of a session that was resumed.
func (e *Estimator) EndResumed(tokens int64) {
	keep := 1 - 1/e.cfg.WindowSessions
	for i := range e.bins {
		b := &e.bins[i]
		b.entries *= keep
		b.resumed *= keep
		b.passages *= keep
		b.endings *= keep
		b.seconds *= keep
		b.tokenSeconds *= keep
	}
	e.growthTokens *= keep
	e.doneSessions *= keep
	e.doneSeconds *= keep
	e.doneTokenSeconds *= keep
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
	var entries, endings, seconds float64
	for i := range e.bins {
		b := &e.bins[i]
		entries += b.entries
		endings += b.endings
		seconds += b.seconds
	}
	if entries == 0 {
		return Estimate{FootprintTokens: e.cfg.PriorTokens, ResidencySeconds: e.cfg.PriorSeconds}
	}
	m := e.cfg.PriorSessions
	life := walk{
		hazard:          (endings + m) / (e.growthTokens + m*e.cfg.PriorTokens),
		secondsPerToken: (seconds + m*e.cfg.PriorSeconds) / (e.growthTokens + m*e.cfg.PriorTokens),
		maxTokens:       max(1, float64(maxTokens)),
	}
	for i := range e.bins {
		life.through(i, &e.bins[i], e.bins[i].entries/entries)
	}
	return Estimate{
		FootprintTokens:  life.tokenSeconds / life.seconds,
		ResidencySeconds: life.seconds,
		Endings:          endings,
	}
}

// walk puts the expected life of one session together from the lowest range up.
type walk struct {
	// hazard of ending, per token of growth, and pace of the class as a whole.
	hazard, secondsPerToken float64
	maxTokens               float64
	alive                   float64 // share of sessions that reach the range from below
	came                    float64 // passages out of the range below
	seconds, tokenSeconds   float64
}

// mixedPassages at the class's own rates are mixed into each range, so that a
// range seen once or never does not decide alone.
const mixedPassages = 0.5

// through lets the sessions that come from below, and the share that begins
// here, pass one range.
func (w *walk) through(i int, b *bin, begin float64) {
	lower := 0.0
	if i > 0 {
		lower = edges[i-1]
	}
	if lower >= w.maxTokens && begin == 0 {
		return
	}
	upper := max(min(edges[i], w.maxTokens), lower+1)
	width := upper - lower
	// Those who came and neither passed nor finished are still in it. (They fade
	// with the window as all counts do: in a steady state none are left over.)
	still := max(0, b.entries+b.resumed+w.came-b.passages-b.endings)
	w.came = b.passages
	visits := b.passages + b.endings + still/2
	mixedSeconds := mixedPassages * w.secondsPerToken * width
	ends := (b.endings + mixedPassages*(1-math.Exp(-w.hazard*width))) / (visits + mixedPassages)
	stay := (b.seconds + mixedSeconds) / (visits + mixedPassages)
	level := (b.tokenSeconds + mixedSeconds*(lower+upper)/2) / (b.seconds + mixedSeconds)
	here := w.alive + begin
	w.seconds += here * stay
	w.tokenSeconds += here * stay * level
	w.alive = here * (1 - min(1, ends))
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
