package router

// pressure is one instance's fast loop: how far its hit rate fell below that of
// its last healthy window, and whether its engine's queue persists.
type pressure struct {
	// This window: reusable prompt tokens, and those found cached.
	expectedTokens, cachedTokens int64
	// reference is h*, hit h^ of the last judged window, gap G_w.
	reference, hit, gap float64
	learned             bool
	degradedWindows     int
	// queuedSince is when the engine's queue began to persist, 0 if it does not.
	queuedSince Nanos
	// contracted: the current cap is below the base cap because of pressure.
	contracted     bool
	lastContractAt Nanos
	lastRecoverAt  Nanos
}

// observe counts prompt tokens that a working cache would have found, and those
// it did find.
func (p *pressure) observe(expectedTokens, cachedTokens int64) {
	p.expectedTokens += expectedTokens
	p.cachedTokens += cachedTokens
}

// restart begins a new window after the cache was cleared; what was healthy
// stays known.
func (p *pressure) restart() {
	p.expectedTokens, p.cachedTokens, p.degradedWindows = 0, 0, 0
}

// noteQueue follows the engine's waiting queue.
func (c *Core) noteQueue(w *instance) {
	persists := w.waiting > 2 && float64(w.waiting) > c.cfg.Pressure.QueueShare*float64(w.running)
	switch {
	case !persists:
		w.pressure.queuedSince = 0
	case w.pressure.queuedSince == 0:
		w.pressure.queuedSince = max(1, c.now)
	}
}

// judge ends every instance's window.
func (c *Core) judge(out []Decision) []Decision {
	for _, w := range c.instances {
		if !w.joined {
			continue
		}
		if w.observability != Fresh {
			w.pressure.restart()
			w.pressure.queuedSince = 0
			continue
		}
		c.judgeHits(w)
		out = c.steer(w, out)
	}
	return out
}

// judgeHits compares the window's hit rate with the healthy reference. A window
// in which it is already rising again does not confirm anything; a healthy one
// teaches the reference.
func (c *Core) judgeHits(w *instance) {
	p, cfg := &w.pressure, &c.cfg.Pressure
	if p.expectedTokens < cfg.MinTokens || p.expectedTokens == 0 {
		return
	}
	const slopeTolerance = 0.01
	previous := p.hit
	p.hit = float64(p.cachedTokens) / float64(p.expectedTokens)
	p.expectedTokens, p.cachedTokens = 0, 0
	if !p.learned {
		p.learned, p.reference, p.gap = true, p.hit, 0
		return
	}
	p.gap = max(0, p.reference-p.hit)
	if p.gap < cfg.HitGap {
		p.degradedWindows = 0
		p.reference += 0.2 * (p.hit - p.reference)
		return
	}
	// What was healthy is forgotten slowly, so that a workload that simply reuses
	// less does not stay under pressure for ever.
	p.reference += 0.02 * (p.hit - p.reference)
	if p.hit <= previous+slopeTolerance || p.degradedWindows == 0 {
		p.degradedWindows++
	}
}

// steer contracts the current cap under confirmed pressure and gives it back step
// by step without.
func (c *Core) steer(w *instance, out []Decision) []Decision {
	p, cfg := &w.pressure, &c.cfg.Pressure
	if !cfg.Enabled || c.cfg.StaticCap > 0 {
		return out
	}
	queued := p.queuedSince > 0 && c.now-p.queuedSince >= nanos(cfg.QueueSeconds)
	if p.degradedWindows >= cfg.ConfirmWindows || queued {
		if p.contracted && c.now-p.lastContractAt < nanos(cfg.CooldownSeconds) {
			return out
		}
		share := min(max(cfg.ContractShare, p.gap), cfg.MaxContractShare)
		from := min(w.cap, max(1, w.protected()))
		target := max(1, int(float64(from)*(1-share)), int(float64(w.baseCap)*cfg.MinCapShare))
		p.contracted, p.lastContractAt, p.lastRecoverAt = true, c.now, c.now
		p.degradedWindows = 0
		if target < w.cap {
			w.cap = target
			out = append(out, c.capDecision(w, Pressure))
		}
		return out
	}
	if !p.contracted || p.degradedWindows > 0 || c.now-p.lastRecoverAt < nanos(cfg.RecoverSeconds) {
		return out
	}
	p.lastRecoverAt = c.now
	w.cap = min(w.baseCap, w.cap+max(1, int(float64(w.baseCap)*cfg.RecoverShare)))
	p.contracted = w.cap < w.baseCap
	c.dirty = true
	return append(out, c.capDecision(w, Recovery))
}
