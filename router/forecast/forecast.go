// Package forecast says how much KV the sessions of a class will hold some time
// from now, from what sessions of the class have done before.
//
// What a session holds at the moment says too little: a session with a short
// prompt and a long answer is admitted with next to nothing and grows for half an
// hour, so an instance filled by current footprints overflows later, all at once.
// Reserving the mean footprint for everybody says too little as well, because it
// ignores which of them are about to grow and which to end. This package keeps a
// life table per class: at each footprint, how fast sessions grow and how often
// they end. From it follows for a session of any footprint the probability S(h)
// that it is still there after h seconds and what it then holds, and their product
// is the expected footprint.
//
// Running sessions count as well as finished ones (occurrence over exposure), so
// that a cold start, where short sessions finish first, does not mislead.
//
// The package keeps no clock and knows no instance: the router adds profiles up.
package forecast

import (
	"errors"
	"fmt"
	"math"
)

// Points is the number of times ahead at which a profile is known: now, and
// 1/64, 1/32, ... 1 of the horizon. Early points are dense because sessions
// change fast at first.
const Points = 8

// Profile is an expected footprint in tokens at each point.
type Profile [Points]float64

// Add adds another profile.
func (p *Profile) Add(o *Profile) {
	for h := range p {
		p[h] += o[h]
	}
}

// Sub takes another profile away.
func (p *Profile) Sub(o *Profile) {
	for h := range p {
		p[h] -= o[h]
	}
}

// Peak is the largest footprint at any point, in tokens.
func (p *Profile) Peak() float64 {
	peak := p[0]
	for _, v := range p[1:] {
		peak = max(peak, v)
	}
	return peak
}

// PeakWith is the peak of the sum of two profiles.
func (p *Profile) PeakWith(o *Profile) float64 {
	peak := p[0] + o[0]
	for h := 1; h < Points; h++ {
		peak = max(peak, p[h]+o[h])
	}
	return peak
}

// Config sets horizon, memory and prior. All fields must be positive.
type Config struct {
	// HorizonSeconds is how far ahead profiles look.
	HorizonSeconds float64
	// WindowSessions is the memory: the weight of what was seen has fallen to 1/e
	// after so many further endings in the class.
	WindowSessions float64
	// PriorTokensPerSecond and PriorLifeTokens describe a class without history:
	// how fast its sessions grow, and by how much before they end. PriorWeightTokens
	// is how much growth at each footprint the prior stands for.
	PriorTokensPerSecond float64
	PriorLifeTokens      float64
	PriorWeightTokens    float64
}

// DefaultConfig is the setting that did best in the simulator.
func DefaultConfig() Config {
	return Config{
		HorizonSeconds: 900, WindowSessions: 64,
		PriorTokensPerSecond: 33, PriorLifeTokens: 50_000, PriorWeightTokens: 2_000,
	}
}

// Validate reports every field that cannot work.
func (c Config) Validate() error {
	var errs []error
	for _, f := range []struct {
		name  string
		value float64
	}{
		{"HorizonSeconds", c.HorizonSeconds}, {"WindowSessions", c.WindowSessions}, {"PriorTokensPerSecond", c.PriorTokensPerSecond},
		{"PriorLifeTokens", c.PriorLifeTokens}, {"PriorWeightTokens", c.PriorWeightTokens},
	} {
		if !(f.value > 0 && f.value < 1e12) {
			errs = append(errs, fmt.Errorf("forecast: %s = %v is out of range", f.name, f.value))
		}
	}
	return errors.Join(errs...)
}

const (
	binTokens = 4096
	binCount  = 64
	// Rates of a bin lean on the class's mean with these weights, so that a bin
	// seldom visited does not speak for itself.
	leanSeconds = 80
	leanTokens  = 2 * binTokens
)

// bin is what was seen at one range of footprints.
type bin struct {
	growthTokens float64
	seconds      float64
	endings      float64
}

// ahead is the forecast for a session at a bin's centre, as of a learning.
type ahead struct {
	learned uint64
	// alive is S(h), tokens the expected footprint S(h) x size.
	alive, tokens Profile
}

// Table is the life table of one class. The zero value is not usable; see New.
type Table struct {
	cfg  Config
	bins [binCount]bin
	// Since the last Learn: its number, growth in tokens/s and endings per token.
	learned      uint64
	pace, hazard [binCount]float64
	// through is the chance to grow through a whole bin without an end.
	through [binCount]float64
	// ahead is worked out for the bins that are asked for.
	ahead [binCount]ahead
}

// New returns a table that knows only its prior.
func New(cfg Config) *Table {
	t := &Table{cfg: cfg}
	for i := range t.bins {
		t.bins[i] = bin{
			growthTokens: cfg.PriorWeightTokens,
			seconds:      cfg.PriorWeightTokens / cfg.PriorTokensPerSecond,
			endings:      cfg.PriorWeightTokens / cfg.PriorLifeTokens,
		}
	}
	t.Learn()
	return t
}

func binOf(tokens int64) int { return int(min(max(0, tokens)/binTokens, binCount-1)) }

// Advance counts exposure: a session went from one footprint to another within
// that many seconds, gaps between turns included, taken as linear growth. A
// footprint that shrank counts as time at the new size.
func (t *Table) Advance(fromTokens, toTokens int64, seconds float64) {
	if toTokens <= fromTokens {
		t.bins[binOf(toTokens)].seconds += seconds
		return
	}
	secondsPerToken := seconds / float64(toTokens-fromTokens)
	for at, i := fromTokens, binOf(fromTokens); at < toTokens; i++ {
		upper := toTokens
		if i < binCount-1 {
			upper = min(upper, int64(i+1)*binTokens)
		}
		grown := float64(upper - at)
		t.bins[i].growthTokens += grown
		t.bins[i].seconds += grown * secondsPerToken
		at = upper
	}
}

// End counts a session that finished by itself at that footprint, and lets what
// was seen before fade.
func (t *Table) End(tokens int64) {
	keep := 1 - 1/max(2, t.cfg.WindowSessions)
	for i := range t.bins {
		b := &t.bins[i]
		b.growthTokens *= keep
		b.seconds *= keep
		b.endings *= keep
	}
	t.bins[binOf(tokens)].endings++
}

// Learn brings the forecasts in step with what was seen. Call it every few
// seconds, and add profiles up anew after it.
func (t *Table) Learn() {
	var all bin
	for i := range t.bins {
		all.growthTokens += t.bins[i].growthTokens
		all.seconds += t.bins[i].seconds
		all.endings += t.bins[i].endings
	}
	meanPace := all.growthTokens / max(all.seconds, 1e-9)
	meanHazard := all.endings / max(all.growthTokens, 1e-9)
	for i := range t.bins {
		b := &t.bins[i]
		t.pace[i] = (b.growthTokens + leanSeconds*meanPace) / (b.seconds + leanSeconds)
		t.hazard[i] = (b.endings + leanTokens*meanHazard) / (b.growthTokens + leanTokens)
		t.through[i] = math.Exp(-t.hazard[i] * binTokens)
	}
	t.learned++
}

// walk follows a session from a bin's centre through the bins above.
func (t *Table) walk(from int) ahead {
	a := ahead{learned: t.learned}
	size, alive, elapsed := (float64(from)+0.5)*binTokens, 1.0, 0.0
	i := from
	for h := range Points {
		due := t.cfg.HorizonSeconds * pointShare(h)
		for elapsed < due && t.pace[i] > 0 {
			grown := t.pace[i] * (due - elapsed)
			room := float64(i+1)*binTokens - size
			within := grown < room || i == binCount-1
			if !within {
				grown = room
			}
			size += grown
			if grown == binTokens {
				alive *= t.through[i]
			} else {
				alive *= math.Exp(-t.hazard[i] * grown)
			}
			if within {
				break
			}
			elapsed += grown / t.pace[i]
			i++
		}
		elapsed = due
		a.alive[h], a.tokens[h] = alive, alive*size
	}
	return a
}

// at is the forecast at a bin's centre.
func (t *Table) at(i int) *ahead {
	if t.ahead[i].learned != t.learned {
		t.ahead[i] = t.walk(i)
	}
	return &t.ahead[i]
}

// pointShare is how far ahead point h lies, as a share of the horizon.
func pointShare(h int) float64 {
	if h == 0 {
		return 0
	}
	return 1 / float64(int(1)<<(Points-1-h))
}

// Expect is the profile of a session that holds so many tokens, of which
// sharedTokens are counted elsewhere (a group's prompt that a sibling holds).
func (t *Table) Expect(tokens, sharedTokens int64) (p Profile) {
	i := binOf(tokens)
	a := t.at(i)
	offset := float64(tokens-sharedTokens) - (float64(i)+0.5)*binTokens
	for h := range p {
		if v := a.tokens[h] + offset*a.alive[h]; v > 0 {
			p[h] = v
		}
	}
	return p
}
