package router

import (
	"math"

	"holdfast/router/forecast"
)

// Admission by forecast (ReserveAhead): a session passes iff the footprint
// expected of all protected sessions together, with its own, stays within the
// protected budget at every point of the horizon. Each session's expectation
// follows from its class's life table and what it holds now. The group's shared
// prompt is counted once, for as long as a member is admitted.

// unseenNanos after its admission a session counts as not observed.
const unseenNanos Nanos = 60e9

// looksAhead tells whether reservations are forecasts.
func (c *Core) looksAhead() bool { return c.cfg.Reserve == ReserveAhead }

// foresee brings a protected session's expected footprint in step with what is
// known of it. Where sessions are not observed they may have grown since: then the
// class's reference is the least that is assumed. The same goes for a session that
// should have shown up in a snapshot by now and has not.
func (c *Core) foresee(s *session, sharedBlocks int64) {
	if !c.looksAhead() {
		return
	}
	w := s.inst
	tokens := s.contextTokens
	if w.observability != Fresh || s.phase == pending && c.now-s.attachedAt > unseenNanos {
		tokens = max(tokens, s.class.kBarTokens)
	}
	expected := s.class.ahead.Expect(tokens, min(tokens, sharedBlocks*w.blockTokens))
	for h, tokens := range expected {
		if tokens < s.ahead[h] {
			c.dirty = true // it is nearer to its end: somebody may fit now
		}
		w.ahead[h] = w.ahead[h] - s.ahead[h] + tokens
	}
	s.ahead = expected
}

// unforesee takes a departing session out of its instance's forecast. The last one
// leaves nothing behind, not even what rounding has gathered.
func (c *Core) unforesee(s *session) {
	s.inst.ahead.Sub(&s.ahead)
	if len(s.inst.sessions) == 0 {
		s.inst.ahead = forecast.Profile{}
	}
	s.ahead = forecast.Profile{}
}

// learnAhead renews every class's forecasts, and sums the instances' up anew, so
// that rounding does not gather.
func (c *Core) learnAhead() {
	if !c.looksAhead() {
		return
	}
	for _, cl := range c.classList {
		cl.ahead.Learn()
	}
	for _, w := range c.instances {
		w.ahead = forecast.Profile{}
		for _, s := range w.sessions {
			s.ahead = forecast.Profile{}
		}
	}
}

// peakTokens is the largest footprint expected at the instance within the horizon.
func (w *instance) peakTokens() float64 { return w.ahead.Peak() + float64(w.placeBlocks*w.blockTokens) }

// peakTokensWith is the same if the session were admitted as well.
func (c *Core) peakTokensWith(s *session, w *instance) float64 {
	tokens := max(s.promptTokens, s.contextTokens)
	var shared int64
	if s.group != nil {
		shared = min(tokens, s.group.placeAt(w).sharedBlocksOf(s)*w.blockTokens)
	}
	own := s.class.ahead.Expect(tokens, shared)
	return w.ahead.PeakWith(&own) + float64(w.placeBlocks*w.blockTokens)
}

// reservedNow is what the protected sessions reserve of the budget, in blocks.
func (c *Core) reservedNow(w *instance) int64 {
	if c.looksAhead() {
		return w.blocksOfPeak(w.peakTokens())
	}
	return w.reservedBlocks
}

// reservesAt is what a session that asks for admission to w would add, in blocks.
func (c *Core) reservesAt(s *session, w *instance) int64 {
	if c.looksAhead() {
		return max(0, w.blocksOfPeak(c.peakTokensWith(s, w))-w.blocksOfPeak(w.peakTokens()))
	}
	return c.asking(s, w)
}

func (w *instance) blocksOfPeak(tokens float64) int64 {
	return int64(math.Ceil(tokens / float64(w.blockTokens)))
}
