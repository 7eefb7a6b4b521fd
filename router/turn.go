package router

// turnRequested takes a turn in. Where the answer is not known at once the turn
// joins the held ones, and Step answers after it has reconsidered them.
func (c *Core) turnRequested(ev *TurnRequested, out []Decision) []Decision {
	s := c.sessions[ev.Session]
	if s != nil && ev.Turn == 0 && s.turn > 0 {
		// The id is used again: what was before is over and tells nothing.
		out = c.endSession(s, Cancelled, out)
		s = nil
	}
	if s == nil {
		s = c.newSession(ev.Session, c.classOf(ev.Class))
	}
	if s.asked && ev.Turn <= s.turn {
		return c.repeat(s, ev, out)
	}
	since := c.now
	if s.asked {
		// The end of the turn before was lost.
		if s.protected() {
			c.recall(s)
		} else {
			since = s.heldSince
			c.dequeue(s)
			s.phase = unplaced
		}
	}
	c.takePrompt(s, ev)
	if s.protected() {
		if c.cfg.Admission == AdmitAll {
			return c.placeAnew(s, out)
		}
		hit := c.hitAt(s, s.inst)
		why := c.lossOfProtection(s, hit)
		if why == 0 {
			return c.continueTurn(s, hit, out)
		}
		out = append(out, c.endProtection(s, why))
		s.moved = why != PrefixEvicted
	}
	c.hold(s, since)
	c.answer = s
	return out
}

// takePrompt records what the request says.
func (c *Core) takePrompt(s *session, ev *TurnRequested) {
	s.turn, s.asked, s.started = ev.Turn, true, false
	s.promptTokens = sane(ev.PromptTokens)
	s.deadline, s.freshBy = ev.Deadline, ev.FreshBy
	s.previousTokens = s.contextTokens
	if c.now-s.lastEndedAt >= nanos(c.cfg.EventLagSeconds) {
		s.settledTokens = s.contextTokens
	}
	s.settledTokens = min(s.settledTokens, s.promptTokens)
	c.renewChain(s, ev)
	if ev.Avoid != "" {
		s.avoid, s.avoidUntil = c.findInstance(ev.Avoid), c.now+nanos(c.cfg.AvoidSeconds)
	}
	if s.protected() {
		// Nothing grew between turns; what a tool added comes all at once.
		c.integrate(s, s.contextTokens)
		c.grow(s, s.promptTokens)
		return
	}
	s.contextTokens = s.promptTokens
	if s.group == nil {
		c.enterGroup(s, ev.Group)
		s.sharedTokens = 0
		if s.group != nil {
			s.sharedTokens = min(sane(ev.SharedTokens), s.promptTokens)
		}
	}
}

// maxTokens bounds every length that an event may claim: far beyond any context,
// and small enough for sums over all sessions.
const maxTokens = 1 << 40

// sane clamps a length to what arithmetic can bear. A wrong length is the
// sender's fault and misleads one session; it must not break the others.
func sane(tokens int64) int64 { return min(max(0, tokens), maxTokens) }

// renewChain takes the blocks that a new turn brings. A context that was rewritten
// from some block on is not expected to be cached beyond it; one that was hashed
// anew under other weights, or of which blocks were missed, is not judged by the
// index before a turn has shown what is there.
func (c *Core) renewChain(s *session, ev *TurnRequested) {
	had := s.chain.Blocks()
	kept := c.extendChain(s, ev)
	if ev.KnownBlocks > had || kept == 0 && had > 0 {
		s.indexed = false
	} else if kept < had && s.home != nil {
		same := int64(kept) * s.home.blockTokens
		s.settledTokens, s.previousTokens = min(s.settledTokens, same), min(s.previousTokens, same)
	}
}

func (c *Core) extendChain(s *session, ev *TurnRequested) (kept int) {
	if ev.KnownBlocks > maxTokens {
		return s.chain.Blocks()
	}
	return s.chain.Extend(ev.KnownBlocks, ev.NewBlocks)
}

// repeat answers a turn that is asked for again while it waits or runs; nothing
// changes but the wishes that came with it.
func (c *Core) repeat(s *session, ev *TurnRequested, out []Decision) []Decision {
	if ev.Turn == s.turn && len(ev.NewBlocks) > 0 && (s.phase == held || ev.KnownBlocks+len(ev.NewBlocks) > s.chain.Blocks()) {
		// While it was held its blocks may have been named anew, under other weights.
		c.renewChain(s, ev)
	}
	if s.protected() {
		return append(out, c.admitted(s, ev.Turn))
	}
	if ev.Turn == s.turn && (ev.Deadline != s.deadline || ev.FreshBy != s.freshBy) {
		c.dequeue(s)
		s.deadline, s.freshBy = ev.Deadline, ev.FreshBy
		s.key = s.base - c.urgency(s)
		c.enqueue(s)
		c.dirty = true
	}
	c.answer = s
	return out
}

// admitted is the Admit that a protected session's turn runs under, told again.
func (c *Core) admitted(s *session, turn int) Decision {
	d := Decision{Kind: Admit, Reason: s.admitReason, At: c.now, Session: s.id, Class: s.class.id, Turn: turn, Instance: s.inst.id}
	d.Numbers = c.numbersAt(s, s.inst)
	d.Numbers.PredictedCachedTokens, d.Numbers.CostSeconds = s.sentHitTokens, s.sentCostSeconds
	return d
}

// lossOfProtection is why a protected session's turn may not simply go to its
// instance, or 0.
func (c *Core) lossOfProtection(s *session, hitTokens int64) Reason {
	w := s.inst
	switch {
	case !w.joined:
		return InstanceGone
	case !w.fits(s):
		return Outgrown
	case c.avoids(s, w) && c.hasOther(s, w):
		return InstanceGone
	case c.evicted(s, hitTokens):
		return PrefixEvicted
	}
	return 0
}

// avoids tells whether the session still keeps away from an instance.
func (c *Core) avoids(s *session, w *instance) bool { return s.avoid == w && c.now < s.avoidUntil }

// hasOther tells whether another usable instance fits the session.
func (c *Core) hasOther(s *session, w *instance) bool {
	for _, o := range c.instances {
		if o != w && c.usable(o) && o.fits(s) {
			return true
		}
	}
	return false
}

// evicted tells whether too little of the session's prefix is still cached for
// its protection to mean anything. Without evidence it is not.
func (c *Core) evicted(s *session, hitTokens int64) bool {
	w := s.inst
	if c.cfg.ReadmitBelowShare == 0 || w.observability != Fresh || s.home != w || s.homeEpoch != w.cacheEpoch {
		return false
	}
	settled := s.settledTokens / w.blockTokens
	expected := settled * w.blockTokens
	if expected == 0 {
		return false
	}
	var cached int64
	switch {
	case w.indexTrusted() && s.indexed && s.chain.Tells(int(settled)):
		// Blocks that the caller did not name cannot be found.
		expected = min(expected, int64(s.chain.Blocks())*w.blockTokens)
		cached = hitTokens
	case s.cachedBlocks >= 0 && s.cachedAt >= s.lastEndedAt:
		cached = s.cachedBlocks * w.blockTokens
	default:
		return false
	}
	if float64(cached) >= c.cfg.ReadmitBelowShare*float64(expected) {
		return false
	}
	w.pressure.observe(expected, min(cached, expected))
	return true
}

// continueTurn sends a protected session's turn to its instance, or moves the
// session when it would start much earlier elsewhere and nobody waits for that
// place.
func (c *Core) continueTurn(s *session, hit int64, out []Decision) []Decision {
	w := s.inst
	if c.cfg.RerouteMarginSeconds > 0 && c.queued == 0 {
		cost := c.cost(s, w, hit)
		if cost > c.cfg.RerouteMarginSeconds {
			if o := c.cheaper(s, cost-c.cfg.RerouteMarginSeconds); o != nil {
				return c.move(s, o, out)
			}
		}
	}
	d := c.admitDecision(s, w, Continuation, hit)
	c.send(s, w, Continuation, hit)
	return append(out, d)
}

// cheaper finds the instance with admission headroom whose cost is lowest and
// below the limit.
func (c *Core) cheaper(s *session, limitSeconds float64) *instance {
	var best *instance
	c.matchAll(s)
	for _, o := range c.instances {
		if o == s.inst || c.verdict(s, o, false) != 0 {
			continue
		}
		if cost := c.cost(s, o, o.hitTokens); cost < limitSeconds {
			best, limitSeconds = o, cost
		}
	}
	return best
}

func (c *Core) move(s *session, o *instance, out []Decision) []Decision {
	c.detach(s)
	d := c.admitDecision(s, o, ColdReroute, o.hitTokens)
	c.attach(s, o)
	c.send(s, o, ColdReroute, o.hitTokens)
	return append(out, d)
}

// send records that the turn goes to the engine.
func (c *Core) send(s *session, w *instance, why Reason, hitTokens int64) {
	s.sent = true
	s.sentHitTokens, s.sentCostSeconds = hitTokens, c.cost(s, w, hitTokens)
	w.inFlight++
	s.admitReason = why
	s.started = false
	s.backlogTokens = max(0, s.promptTokens-hitTokens)
	w.backlogTokens += s.backlogTokens
	s.expectCachedTokens = 0
	if s.home == w && s.homeEpoch == w.cacheEpoch {
		s.expectCachedTokens = s.settledTokens / w.blockTokens * w.blockTokens
	}
	s.dispatchEpoch = w.cacheEpoch
	s.moved = false
}

func (c *Core) turnStarted(ev *TurnStarted) {
	s := c.sessions[ev.Session]
	if s == nil || !s.sent || s.started || ev.Turn != s.turn {
		return
	}
	s.started = true
	c.endBacklog(s)
	c.prefilled(s, true)
}

func (c *Core) turnEnded(ev *TurnEnded) {
	s := c.sessions[ev.Session]
	if s == nil || !s.sent || ev.Turn != s.turn || ev.Instance != "" && ev.Instance != s.inst.id {
		return
	}
	w := s.inst
	c.recall(s)
	s.asked = false
	c.prefilled(s, !ev.Failed)
	if ev.Failed {
		return
	}
	prompt := s.promptTokens
	if ev.PromptTokens > 0 {
		prompt = sane(ev.PromptTokens)
	}
	c.grow(s, prompt+sane(ev.OutputTokens))
	s.lastEndedAt = c.now
	s.home, s.homeEpoch = w, s.dispatchEpoch
	s.indexed = w.indexTrusted() && s.homeEpoch == w.cacheEpoch && s.chain.Blocks() > 0
	if s.indexed {
		c.index.Witness(w.slot, &s.chain)
	}
	if ev.CachedTokens < 0 {
		return
	}
	w.measurePrefill(prompt-min(ev.CachedTokens, prompt), ev.PrefillNanos)
	if s.expectCachedTokens > 0 && s.dispatchEpoch == w.cacheEpoch {
		w.pressure.observe(s.expectCachedTokens, min(ev.CachedTokens, s.expectCachedTokens))
	}
}

func (c *Core) sessionEnded(ev *SessionEnded, out []Decision) []Decision {
	s := c.sessions[ev.Session]
	if s == nil {
		return out
	}
	return c.endSession(s, ev.Status, out)
}

// endSession releases everything the session holds. Only sessions that ended by
// themselves teach how long sessions are.
func (c *Core) endSession(s *session, status EndStatus, out []Decision) []Decision {
	if s.phase == held {
		c.dequeue(s)
		s.phase = unplaced
	}
	if s.protected() {
		out = append(out, c.endProtection(s, SessionOver))
	}
	if s.entered && (status == Completed || status == Truncated) {
		if s.partial {
			s.class.lifetimes.EndResumed(s.observedTokens)
		} else {
			s.class.lifetimes.End(s.observedTokens, seconds(s.residency), s.tokenSeconds)
		}
		if c.looksAhead() {
			s.class.ahead.End(s.contextTokens)
		}
	}
	c.dropSession(s)
	c.dirty = true
	return out
}

// sessionRestored puts a session of a dead owner back where it was.
func (c *Core) sessionRestored(ev *SessionRestored) {
	if c.sessions[ev.Session] != nil {
		return
	}
	s := c.newSession(ev.Session, c.classOf(ev.Class))
	s.turn = ev.Turn
	s.promptTokens = sane(ev.PromptTokens)
	s.contextTokens, s.previousTokens, s.settledTokens = s.promptTokens, s.promptTokens, 0
	c.enterGroup(s, ev.Group)
	if s.group != nil {
		s.sharedTokens = min(sane(ev.SharedTokens), s.promptTokens)
	}
	s.residency, s.partial = ev.ResidencyNanos, ev.Instance != "" || ev.ResidencyNanos > 0
	s.readmit = ev.Instance != "" || ev.ResidencyNanos > 0 || ev.AdmittedAt > 0
	if ev.Instance == "" {
		if ev.HeldSince > 0 {
			s.asked = true
			c.hold(s, min(ev.HeldSince, c.now))
		} else {
			c.retier(s)
		}
		return
	}
	w := c.findInstance(ev.Instance)
	if w == nil {
		w = c.addInstance(ev.Instance)
	}
	c.attach(s, w)
	if ev.AdmittedAt > 0 {
		s.residency += max(0, c.now-ev.AdmittedAt)
	}
	s.home, s.homeEpoch = w, w.cacheEpoch
	if ev.InFlight {
		s.asked = true
		c.send(s, w, Continuation, s.promptTokens)
		s.started = true
	}
}
