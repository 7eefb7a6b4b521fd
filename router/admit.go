package router

import "math"

// The admission cycle, run whenever something may have made room:
//
//  1. Open: the instances that take new sessions and are below their cap.
//  2. In the order between classes (oldest slot first), look at the head of each
//     class's queue. Filter the open instances for it: large enough, class below
//     its cap, reservation fits. If some are left, placement chooses, and the
//     session is admitted.
//  3. If none is left, every instance where only blocks were missing is closed to
//     everybody behind, so that whoever is first gets the next room there; where
//     its class is at its cap, others may pass.
//  4. When nobody within quota can be admitted, classes at their cap may borrow
//     what is still open, in the same order, one session at a time.
//
// The cycle ends when all instances are closed or all queues are stopped, and so
// costs a few heads times the open instances, however many sessions are held.

// verdict is why an instance refuses a session now, or 0.
func (c *Core) verdict(s *session, w *instance, borrow bool) Reason {
	if !c.usable(w) || !w.fits(s) || c.avoids(s, w) && c.hasOther(s, w) {
		return NoInstance
	}
	if c.cfg.Admission == AdmitAll {
		return 0
	}
	if w.protected() >= w.cap {
		return AtCap
	}
	if !borrow && c.classCapped() && int64(w.byClass[s.class.index]) >= c.sharesOf(w)[s.class.index].Cap {
		return AtClassCap
	}
	if !c.blocksFit(s, w) {
		return NoBlocks
	}
	return 0
}

// classCapped tells whether class caps apply at all.
func (c *Core) classCapped() bool { return c.cfg.Admission >= AdmitSpace }

// blocksFit checks the reservations against the protected budget. An empty
// instance takes any session that fits its context: one whose reservation alone
// exceeds the budget would otherwise starve.
func (c *Core) blocksFit(s *session, w *instance) bool {
	if c.cfg.Reserve == ReserveNone || w.protected() == 0 {
		return true
	}
	if c.looksAhead() {
		return w.blocksOfPeak(c.peakTokensWith(s, w)) <= w.budgetBlocks
	}
	return w.reservedBlocks+c.asking(s, w) <= w.budgetBlocks
}

// reconsider admits every held session that can be, in order.
func (c *Core) reconsider(out []Decision) []Decision {
	c.passedOver = false
	for again := true; again && c.queued > 0; {
		again = false
		if !c.openInstances() {
			return out
		}
		var admitted bool
		c.rewindQueues(false)
		for q := c.nextQueue(); q != nil; q = c.nextQueue() {
			if out, admitted = c.tryHead(q, false, out); admitted {
				again = true
			}
		}
		if again || !c.cfg.Borrow || !c.classCapped() {
			// Each admission moves the class caps a little: look once more.
			continue
		}
		c.rewindQueues(true)
		for q := c.nextQueue(); q != nil && !again; q = c.nextQueue() {
			out, again = c.tryHead(q, true, out)
		}
	}
	return out
}

// openInstances marks the instances that may take somebody.
func (c *Core) openInstances() bool {
	any := false
	for _, w := range c.instances {
		w.open = c.usable(w) && (c.cfg.Admission == AdmitAll || w.protected() < w.cap)
		any = any || w.open
	}
	c.findTopLevel()
	return any
}

// findTopLevel notes the largest level that is still open: queues of sessions
// that need more have nothing to look at.
func (c *Core) findTopLevel() {
	c.topOpenLevel = -1
	for _, w := range c.instances {
		if w.open && w.level > c.topOpenLevel {
			c.topOpenLevel = w.level
		}
	}
}

// rewindQueues starts a pass over the queues: all of them, or those that only
// their class caps stopped.
func (c *Core) rewindQueues(capBoundOnly bool) {
	for _, cl := range c.classList {
		for tier := range cl.queues {
			q := &cl.queues[tier]
			q.cursor = 0
			q.stopped = q.len() == 0 || capBoundOnly && !q.capBound
			q.capBound = false
		}
	}
}

// nextQueue is the queue whose next slot is the oldest among those not stopped.
func (c *Core) nextQueue() *waitQueue {
	var next *waitQueue
	for _, cl := range c.classList {
		for tier := 0; tier <= c.topOpenLevel && tier < len(cl.queues); tier++ {
			q := &cl.queues[tier]
			if q.stopped || q.cursor >= q.len() {
				continue
			}
			if next == nil || q.slots[q.head+q.cursor].compare(next.slots[next.head+next.cursor]) < 0 {
				next = q
			}
		}
	}
	return next
}

// tryHead looks at a queue's next session: it is admitted, or stops the queue, or
// is passed over because it waits for something of its own.
func (c *Core) tryHead(q *waitQueue, borrow bool, out []Decision) ([]Decision, bool) {
	s := q.sessions[q.head+q.cursor]
	if c.waitsForSibling(s) {
		c.park(s)
		return out, false
	}
	found, capBound := c.filter(s, borrow)
	if !found {
		q.capBound = q.capBound || capBound
		if c.now < s.avoidUntil {
			q.cursor++ // what it keeps away from may still take the next one
			c.passedOver = true
		} else {
			q.stopped = true
		}
		return out, false
	}
	w := c.place(s)
	if s.readmit && c.worthWaiting(s, w) {
		s.reason = WaitingForWarm
		q.cursor++
		c.passedOver = true
		return out, false
	}
	q.take(q.head + q.cursor)
	c.queued--
	return append(out, c.admit(s, w)), true
}

// filter collects the open instances that take the session as candidates. If
// there are none it closes those that lacked only blocks.
func (c *Core) filter(s *session, borrow bool) (found, capBound bool) {
	c.passing = c.passing[:0]
	c.short = c.short[:0]
	for _, w := range c.instances {
		if !w.open {
			continue
		}
		switch c.verdict(s, w, borrow) {
		case 0:
			c.passing = append(c.passing, w)
		case AtCap:
			w.open = false
		case AtClassCap:
			capBound = true
		case NoBlocks:
			c.short = append(c.short, w)
		}
	}
	if len(c.passing) > 0 {
		return true, false
	}
	for _, w := range c.short {
		w.open = false
	}
	c.findTopLevel()
	return false, capBound
}

// place lets the placement policy choose among the passing instances. Members of
// a group stay where its prompt is cached as long as admission lets them.
func (c *Core) place(s *session) *instance {
	c.matchAll(s)
	if g := s.group; g != nil && !s.readmit {
		warm := 0
		for _, w := range c.passing {
			if p := g.placeAt(w); p != nil && p.warm {
				c.passing[warm] = w
				warm++
			}
		}
		if warm > 0 {
			c.passing = c.passing[:warm]
		}
	}
	c.candidates = c.candidates[:0]
	for _, w := range c.passing {
		c.candidates = append(c.candidates, Candidate{
			Instance: w.id, CostSeconds: c.cost(s, w, w.hitTokens), QueueSeconds: w.backlogSeconds(),
			CachedTokens: w.hitTokens, Protected: w.protected(), Cap: w.cap,
			ReservedBlocks: c.reservedNow(w), BudgetBlocks: w.budgetBlocks,
			InFlight: w.inFlight, LastAdmission: w.lastAdmission,
		})
	}
	c.request = Request{Session: s.id, Class: s.class.id, Turn: s.turn, PromptTokens: s.promptTokens, SlackSeconds: c.cfg.PlacementSlackSeconds}
	chosen := c.cfg.Placement.Choose(&c.request, c.candidates)
	if chosen < 0 || chosen >= len(c.passing) {
		chosen = 0
	}
	c.chosen = chosen
	return c.passing[chosen]
}

// admit gives the session its place and says so.
func (c *Core) admit(s *session, w *instance) Decision {
	why := NewSession
	if s.moved {
		why = ColdReroute
	} else if s.readmit {
		why = Readmission
	}
	hit := w.hitTokens
	d := c.admitDecision(s, w, why, hit)
	d.Numbers.HeldNanos = c.now - s.heldSince
	c.runnerUp(&d.Numbers)
	c.attach(s, w)
	c.send(s, w, why, hit)
	c.lead(s, d.Numbers.CostSeconds)
	return d
}

// placeAnew sends a turn wherever it is cheapest: placement without admission.
func (c *Core) placeAnew(s *session, out []Decision) []Decision {
	c.passing = c.passing[:0]
	for _, w := range c.instances {
		if c.verdict(s, w, false) == 0 {
			c.passing = append(c.passing, w)
		}
	}
	if len(c.passing) == 0 {
		if w := s.inst; w.joined && w.fits(s) {
			return c.continueTurn(s, c.hitAt(s, w), out)
		}
		out = append(out, c.endProtection(s, InstanceGone))
		c.hold(s, c.now)
		c.answer = s
		return out
	}
	w, why := c.place(s), Continuation
	hit := w.hitTokens
	if w != s.inst {
		why = ColdReroute
		c.detach(s)
	}
	d := c.admitDecision(s, w, why, hit)
	c.runnerUp(&d.Numbers)
	if w != s.inst {
		c.attach(s, w)
	}
	c.send(s, w, why, hit)
	return append(out, d)
}

// worthWaiting is the hold-versus-cold rule for a session that lost its
// protection while its prefix survives at an instance that does not take it now:
// wait there iff delta + q_hit - q_cold < H / F, and no longer than H / F in all.
func (c *Core) worthWaiting(s *session, cold *instance) bool {
	var warm *instance
	for _, w := range c.instances {
		if c.usable(w) && w.fits(s) && !c.avoids(s, w) && (warm == nil || w.hitTokens > warm.hitTokens) {
			warm = w
		}
	}
	if warm == nil || warm == cold || warm.hitTokens <= cold.hitTokens || warm.departureSeconds <= 0 {
		return false
	}
	saved := float64(warm.hitTokens-cold.hitTokens) / warm.prefillRate()
	if seconds(c.now-s.heldSince) >= saved {
		return false
	}
	return warm.departureSeconds+warm.backlogSeconds()-cold.backlogSeconds() < saved
}

// cost is c = d_w + (L - H) / mu_w in seconds.
func (c *Core) cost(s *session, w *instance, hitTokens int64) float64 {
	return w.backlogSeconds() + float64(max(0, s.promptTokens-hitTokens))/w.prefillRate()
}

// matchAll sets every instance's hitTokens for the session's prompt.
func (c *Core) matchAll(s *session) {
	if s.chain.Blocks() > 0 {
		c.index.MatchAll(&s.chain, c.matches)
	}
	for _, w := range c.instances {
		w.hitTokens = c.hitOf(s, w, c.matches[w.slot])
	}
}

// hitAt is H of the session's prompt at one instance.
func (c *Core) hitAt(s *session, w *instance) int64 {
	matched := 0
	if s.chain.Blocks() > 0 && w.indexTrusted() {
		matched = c.index.MatchOne(&s.chain, w.slot, int(s.previousTokens/w.blockTokens))
	}
	return c.hitOf(s, w, matched)
}

// hitOf is H where the index found so many blocks. The ledger speaks where the
// index knows nothing: of an instance whose events have not come, and of what a
// session left at its instance before the index heard of it.
func (c *Core) hitOf(s *session, w *instance, matchedBlocks int) int64 {
	if s.chain.Blocks() == 0 || !w.indexTrusted() {
		return c.ledgerHit(s, w)
	}
	hit := min(int64(matchedBlocks)*w.blockTokens, s.promptTokens)
	if s.home == w && !s.indexed {
		hit = max(hit, min(s.leftAt(w)/w.blockTokens*w.blockTokens, s.promptTokens))
	}
	return hit
}

// ledgerHit guesses H without the index: what the session left there itself, or
// its group's shared prompt.
func (c *Core) ledgerHit(s *session, w *instance) int64 {
	hit := s.leftAt(w)
	if s.group != nil {
		if p := s.group.placeAt(w); p != nil && p.warm {
			hit = max(hit, s.sharedTokens)
		}
	}
	return min(hit/w.blockTokens*w.blockTokens, s.promptTokens)
}

// leftAt is what the session's turns left in an instance's cache, as far as
// snapshots do not say that it is gone.
func (s *session) leftAt(w *instance) int64 {
	if s.home != w || s.homeEpoch != w.cacheEpoch {
		return 0
	}
	if s.cachedBlocks >= 0 && s.cachedAt >= s.lastEndedAt {
		return min(s.previousTokens, s.cachedBlocks*w.blockTokens)
	}
	return s.previousTokens
}

// admitDecision is an Admit with its numbers, as they were before it.
func (c *Core) admitDecision(s *session, w *instance, why Reason, hitTokens int64) Decision {
	d := Decision{Kind: Admit, Reason: why, At: c.now, Session: s.id, Class: s.class.id, Turn: s.turn, Instance: w.id}
	d.Numbers = c.numbersAt(s, w)
	d.Numbers.PredictedCachedTokens = hitTokens
	d.Numbers.CostSeconds = c.cost(s, w, hitTokens)
	return d
}

// runnerUp notes the second best candidate of the latest placement.
func (c *Core) runnerUp(n *Numbers) {
	second := -1
	for i := range c.candidates {
		if i != c.chosen && (second < 0 || c.candidates[i].CostSeconds < c.candidates[second].CostSeconds) {
			second = i
		}
	}
	if second >= 0 {
		n.RunnerUp, n.RunnerUpCostSeconds = c.candidates[second].Instance, c.candidates[second].CostSeconds
	}
}

// numbersAt collects what a decision about the session at an instance is made from.
func (c *Core) numbersAt(s *session, w *instance) Numbers {
	n := Numbers{
		BaseCap: w.baseCap, Cap: w.cap, Protected: w.protected(), Pending: w.pending,
		ClassProtected: w.byClass[s.class.index],
		ReservedBlocks: c.reservedNow(w), BudgetBlocks: w.budgetBlocks,
		KBarBlocks:  float64(s.class.kBarTokens) / float64(w.blockTokens),
		TBarSeconds: s.class.tBarSeconds, Demand: c.demand(w, s.class),
		PromptTokens: s.promptTokens, QueueSeconds: w.backlogSeconds(),
	}
	if s.inst == w {
		n.ReserveBlocks = s.reserveBlocks
	} else {
		n.ReserveBlocks = c.reservesAt(s, w)
	}
	if c.cfg.Admission != AdmitAll {
		share := c.sharesOf(w)[s.class.index]
		n.ClassCap, n.ClassQuotaBlocks = int(min(share.Cap, math.MaxInt32)), share.QuotaBlocks
	}
	return n
}

// holdDecision says why a held session is held now.
func (c *Core) holdDecision(s *session) Decision {
	d := Decision{Kind: Hold, Reason: NoInstance, At: c.now, Session: s.id, Class: s.class.id, Turn: s.turn}
	var best *instance
	for _, w := range c.instances {
		why := c.verdict(s, w, false)
		if why == 0 {
			why = BehindOthers
		}
		if why == NoInstance {
			continue
		}
		rank, bestRank := nearness(why), nearness(d.Reason)
		if rank > bestRank || rank == bestRank && w.freePlaces() > best.freePlaces() {
			best, d.Reason = w, why
		}
	}
	if best != nil {
		d.Instance = best.id
		d.Numbers = c.numbersAt(s, best)
		hit := c.hitAt(s, best)
		d.Numbers.PredictedCachedTokens = hit
		d.Numbers.CostSeconds = c.cost(s, best, hit)
	} else {
		d.Numbers = Numbers{PromptTokens: s.promptTokens, TBarSeconds: s.class.tBarSeconds}
		if n := len(c.limits); n > 0 {
			d.Numbers.LargestContextTokens = c.limits[n-1]
		}
	}
	switch {
	case s.parked:
		d.Reason = WaitingForSibling
	case d.Reason == BehindOthers && s.reason == WaitingForWarm:
		d.Reason = WaitingForWarm
	}
	s.reason = d.Reason
	d.Numbers.HeldNanos = c.now - s.heldSince
	d.Numbers.AheadInOrder = c.ahead(s)
	return d
}

// nearness orders refusals by how little is missing for admission.
func nearness(refusal Reason) int {
	switch refusal {
	case AtCap:
		return 1
	case NoBlocks:
		return 2
	case AtClassCap:
		return 3
	case BehindOthers:
		return 4
	}
	return 0
}

func (w *instance) freePlaces() int { return w.cap - w.protected() }
