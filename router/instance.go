package router

import (
	"cmp"
	"slices"

	"holdfast/router/forecast"
	"holdfast/router/quota"
)

// instance is what the core knows of one inference engine.
type instance struct {
	id InstanceID
	// slot numbers the instance in the prefix index; level is the index of its
	// limit among the distinct limits of the pool.
	slot, level int
	// joined is false for a placeholder: restored sessions name it, it has not
	// been announced yet.
	joined, draining bool
	observability    Observability
	policyVersion    int64

	capacityBlocks   int64
	blockTokens      int64
	maxContextTokens int64
	limitTokens      int64
	budgetBlocks     int64

	// The session ledger at this instance.
	sessions       []*session
	pending        int
	byClass        []int
	reservedBlocks int64
	liveBlocks     int64
	// placeBlocks is the part of liveBlocks that groups share; ahead sums what is
	// expected of the sessions beside it.
	placeBlocks int64
	ahead       forecast.Profile

	// Prefill: measured throughput and the backlog of turns not yet started.
	backlogTokens  int64
	inFlight       int
	prefillTokens  float64
	prefillSeconds float64

	baseCap, cap int
	pressure     pressure

	shares     []quota.Share
	shareStamp uint64
	// demandStamp changes with the demand at this instance alone.
	demandStamp uint64

	lastSnapshotAt Nanos
	running        int
	waiting        int
	usedBlocks     int64
	preemptions    int64

	// cacheEpoch counts resets; indexSeen: block events have come since the last.
	cacheEpoch uint64
	indexSeen  bool

	lastDeparture    Nanos
	departureSeconds float64
	admissions       uint64
	lastAdmission    uint64

	// Scratch of one evaluation.
	open      bool
	hitTokens int64
}

// protected is |O_w| + |P_w|.
func (w *instance) protected() int { return len(w.sessions) }

// blocksOf is the number of blocks that hold so many tokens here.
func (w *instance) blocksOf(tokens int64) int64 {
	return max(1, (tokens+w.blockTokens-1)/w.blockTokens)
}

// prefillRate is mu_w in tokens per second.
func (w *instance) prefillRate() float64 { return w.prefillTokens / w.prefillSeconds }

// backlogSeconds is d_w.
func (w *instance) backlogSeconds() float64 { return float64(w.backlogTokens) / w.prefillRate() }

// measurePrefill moves mu_w. The memory is some fifty turns.
func (w *instance) measurePrefill(tokens int64, took Nanos) {
	const keep = 0.98
	if tokens < 512 || took <= 0 {
		return // too small to tell throughput from overhead
	}
	w.prefillTokens = w.prefillTokens*keep + float64(tokens)
	w.prefillSeconds = w.prefillSeconds*keep + seconds(took)
}

// noteDeparture measures how often a place becomes free here.
func (w *instance) noteDeparture(now Nanos) {
	if w.lastDeparture > 0 {
		w.departureSeconds += (seconds(now-w.lastDeparture) - w.departureSeconds) / 8
	}
	w.lastDeparture = now
}

// usable tells whether the instance takes new sessions at all.
func (c *Core) usable(w *instance) bool {
	return w.joined && !w.draining && w.policyVersion >= c.newestVersion-c.cfg.MaxVersionLag
}

// indexTrusted tells whether the prefix index's silence about an instance means
// something.
func (w *instance) indexTrusted() bool { return w.indexSeen && w.observability != Blind }

func (c *Core) findInstance(id InstanceID) *instance { return c.byInstance[id] }

// addInstance makes an instance known, as a placeholder until it joins.
func (c *Core) addInstance(id InstanceID) *instance {
	w := &instance{id: id, level: -1, blockTokens: 16, byClass: make([]int, len(c.classList)),
		prefillTokens: c.cfg.PrefillTokensPerSecond, prefillSeconds: 1}
	if n := len(c.freeSlots); n > 0 {
		w.slot = c.freeSlots[n-1]
		c.freeSlots = c.freeSlots[:n-1]
	} else {
		w.slot = len(c.instances)
	}
	c.byInstance[id] = w
	at, _ := slices.BinarySearchFunc(c.instances, id, func(w *instance, id InstanceID) int { return cmp.Compare(w.id, id) })
	c.instances = slices.Insert(c.instances, at, w)
	c.growScratch()
	return w
}

func (c *Core) instanceJoined(ev *InstanceJoined, out []Decision) []Decision {
	w := c.findInstance(ev.Instance)
	if w == nil {
		w = c.addInstance(ev.Instance)
	}
	first := !w.joined
	w.joined = true
	w.capacityBlocks = max(1, sane(ev.CapacityBlocks))
	w.blockTokens = max(1, min(int64(ev.BlockTokens), 1<<20))
	w.maxContextTokens = ev.MaxContextTokens
	w.limitTokens = w.capacityBlocks * w.blockTokens
	if ev.MaxContextTokens > 0 {
		w.limitTokens = min(w.limitTokens, ev.MaxContextTokens)
	}
	w.budgetBlocks = max(1, int64(float64(w.capacityBlocks)*c.cfg.ProtectedShare))
	if first {
		rate := c.cfg.PrefillTokensPerSecond
		if ev.PrefillTokensPerSecond > 0 {
			rate = ev.PrefillTokensPerSecond
		}
		w.prefillTokens, w.prefillSeconds = rate, 1
	}
	c.setVersion(w, ev.PolicyVersion)
	c.rebuildTiers()
	c.refitPlaces(w)
	c.refitAll(w)
	before := w.cap
	w.baseCap = c.baseCapOf(w)
	if first || w.cap > w.baseCap || !w.pressure.contracted {
		w.cap = w.baseCap
	}
	w.demandStamp++
	c.dirty = true
	if first || w.cap != before {
		out = append(out, c.capDecision(w, InstanceChanged))
	}
	return c.tellStranded(out)
}

// tellStranded says of held sessions that no instance is large enough for them
// any more: they must not wait in silence.
func (c *Core) tellStranded(out []Decision) []Decision {
	for _, cl := range c.classList {
		q := &cl.queues[len(c.limits)]
		for _, s := range q.sessions[q.head:] {
			if s.reason != NoInstance {
				out = append(out, c.holdDecision(s))
			}
		}
	}
	return out
}

func (c *Core) setVersion(w *instance, version int64) {
	w.policyVersion = version
	c.newestVersion = max(c.newestVersion, version)
}

func (c *Core) instanceLeft(ev *InstanceLeft, out []Decision) []Decision {
	w := c.findInstance(ev.Instance)
	if w == nil {
		return out
	}
	w.joined = false
	leaving := append(c.scratchSessions[:0], w.sessions...)
	slices.SortFunc(leaving, func(a, b *session) int { return cmp.Compare(a.seq, b.seq) })
	for _, s := range leaving {
		out = append(out, c.endProtection(s, InstanceGone))
		s.asked = false
		s.moved = true
	}
	clear(leaving)
	c.scratchSessions = leaving[:0]
	c.dropInstance(w)
	c.newestVersion = 0
	for _, o := range c.instances {
		c.newestVersion = max(c.newestVersion, o.policyVersion)
	}
	c.rebuildTiers()
	c.dirty = true
	return c.tellStranded(out)
}

// dropInstance forgets an instance that holds no session, if it is still known.
func (c *Core) dropInstance(w *instance) {
	if c.byInstance[w.id] != w {
		return
	}
	c.index.Clear(w.slot)
	c.freeSlots = append(c.freeSlots, w.slot)
	delete(c.byInstance, w.id)
	c.instances = slices.DeleteFunc(c.instances, func(o *instance) bool { return o == w })
}

func (c *Core) instanceDraining(ev *InstanceDraining) {
	if w := c.findInstance(ev.Instance); w != nil {
		w.draining = ev.Draining
		c.dirty = true
	}
}

// instanceReset forgets what was cached. Sessions keep their protection: the
// cache was cleared on purpose, which says nothing about its size.
func (c *Core) instanceReset(ev *InstanceReset) {
	w := c.findInstance(ev.Instance)
	if w == nil {
		return
	}
	c.setVersion(w, ev.PolicyVersion)
	c.forgetCache(w)
	c.dirty = true
}

// forgetCache begins a new epoch of an instance's cache: nothing is known to be
// in it, and what sessions left there before is not missed.
func (c *Core) forgetCache(w *instance) {
	w.cacheEpoch++
	w.pressure.restart()
	c.index.Clear(w.slot)
	w.indexSeen = false
	for _, s := range w.sessions {
		s.cachedBlocks = -1
	}
	c.coolPlaces(w)
}

// endProtection takes a session out of O and P and says so.
func (c *Core) endProtection(s *session, why Reason) Decision {
	d := Decision{Kind: ProtectionEnded, Reason: why, At: c.now, Session: s.id, Class: s.class.id, Turn: s.turn, Instance: s.inst.id}
	d.Numbers = c.numbersAt(s, s.inst)
	c.detach(s)
	return d
}

// rebuildTiers recomputes which instances can take which waiting sessions, after
// an instance or its limits changed.
func (c *Core) rebuildTiers() {
	c.limits = c.limits[:0]
	for _, w := range c.instances {
		if w.joined {
			c.limits = append(c.limits, w.limitTokens)
		}
	}
	slices.Sort(c.limits)
	c.limits = slices.Compact(c.limits)
	for _, w := range c.instances {
		w.level = -1
		if w.joined {
			w.level, _ = slices.BinarySearch(c.limits, w.limitTokens)
		}
	}
	waiting := c.scratchSessions[:0]
	for _, cl := range c.classList {
		for tier := range cl.queues {
			q := &cl.queues[tier]
			waiting = append(waiting, q.sessions[q.head:]...)
		}
		cl.waitingByTier = make([]int, len(c.limits)+1)
		cl.queues = make([]waitQueue, len(c.limits)+1)
		for tier := range cl.queues {
			cl.queues[tier] = waitQueue{class: cl, tier: tier}
		}
	}
	// Counting commutes, so map order does not matter here.
	for _, s := range c.sessions {
		if s.waiting() {
			s.tier = c.tierOf(s)
			s.class.waitingByTier[s.tier]++
		}
	}
	c.queued = 0
	for _, s := range waiting {
		c.enqueue(s)
	}
	clear(waiting)
	c.scratchSessions = waiting[:0]
	c.demandStamp++
}

// tierOf is the index of the smallest limit that leaves room for the prompt and
// one token more; the number of limits if none does.
func (c *Core) tierOf(s *session) int {
	need := max(s.promptTokens, s.contextTokens) + 1
	for tier, limit := range c.limits {
		if need <= limit {
			return tier
		}
	}
	return len(c.limits)
}

// fits tells whether the session's context fits the instance.
func (w *instance) fits(s *session) bool {
	return max(s.promptTokens, s.contextTokens)+1 <= w.limitTokens
}
