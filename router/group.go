package router

import "slices"

// group is the set of sessions that are members of one task and share its prompt.
type group struct {
	id GroupID
	// live counts the members in the ledger; places are the instances where some
	// of them are admitted.
	live   int
	places []*place
	// leader is the member whose prefill the others wait for, until leaderUntil;
	// waiters are those. A group waits for a leader that never reports a first
	// token at most once: then impatient is set.
	leader      *session
	leaderUntil Nanos
	waiters     []*session
	impatient   bool
}

// place is the group's presence at one instance: its shared blocks count there
// once, for as long as any member is admitted.
type place struct {
	inst         *instance
	members      int
	sharedTokens int64
	sharedBlocks int64
	// warm: a member's prefill has been done there since the last reset.
	warm bool
}

func (g *group) placeAt(w *instance) *place {
	for _, p := range g.places {
		if p.inst == w {
			return p
		}
	}
	return nil
}

// enterGroup makes the session a member of its group.
func (c *Core) enterGroup(s *session, id GroupID) {
	if id == (GroupID{}) || s.group != nil {
		return
	}
	g := c.groups[id]
	if g == nil {
		if n := len(c.freeGroups); n > 0 {
			g = c.freeGroups[n-1]
			c.freeGroups = c.freeGroups[:n-1]
		} else {
			g = &group{}
		}
		*g = group{id: id, places: g.places[:0], waiters: g.waiters[:0]}
		c.groups[id] = g
	}
	g.live++
	s.group = g
}

// leaveGroup forgets the member, and the group with its last one.
func (c *Core) leaveGroup(s *session) {
	g := s.group
	if g == nil {
		return
	}
	s.group = nil
	g.live--
	if g.live > 0 {
		return
	}
	delete(c.groups, g.id)
	c.freeGroups = append(c.freeGroups, g)
}

// joinPlace counts an admitted member at its instance, and the group's shared
// blocks with the first.
func (c *Core) joinPlace(s *session, w *instance) {
	if s.group == nil {
		return
	}
	p := s.group.placeAt(w)
	if p == nil {
		if n := len(c.freePlaces); n > 0 {
			p = c.freePlaces[n-1]
			c.freePlaces = c.freePlaces[:n-1]
		} else {
			p = &place{}
		}
		shared := s.sharedTokens / w.blockTokens
		*p = place{inst: w, sharedTokens: s.sharedTokens, sharedBlocks: shared}
		s.group.places = append(s.group.places, p)
		w.reservedBlocks += shared
		w.liveBlocks += shared
		w.placeBlocks += shared
	}
	p.members++
	s.place = p
}

// leavePlace is its inverse, and ends a wait for this member's prefill.
func (c *Core) leavePlace(s *session, w *instance) {
	g := s.group
	if g == nil {
		return
	}
	if g.leader == s {
		c.releaseSiblings(g)
	}
	p := s.place
	s.place = nil
	p.members--
	if p.members > 0 {
		return
	}
	w.reservedBlocks -= p.sharedBlocks
	w.liveBlocks -= p.sharedBlocks
	w.placeBlocks -= p.sharedBlocks
	at := slices.Index(g.places, p)
	last := len(g.places) - 1
	g.places[at] = g.places[last]
	g.places = g.places[:last]
	p.inst = nil
	c.freePlaces = append(c.freePlaces, p)
}

// refitPlaces recounts shared blocks after the instance's block size changed.
func (c *Core) refitPlaces(w *instance) {
	for _, s := range w.sessions {
		p := s.place
		if p == nil {
			continue
		}
		blocks := p.sharedTokens / w.blockTokens
		w.reservedBlocks += blocks - p.sharedBlocks
		w.liveBlocks += blocks - p.sharedBlocks
		w.placeBlocks += blocks - p.sharedBlocks
		p.sharedBlocks = blocks
	}
}

// coolPlaces forgets which shared prompts are cached at a reset instance.
func (c *Core) coolPlaces(w *instance) {
	for _, s := range w.sessions {
		if s.place != nil {
			s.place.warm = false
		}
	}
}

// sharedBlocksOf is how many of a session's blocks a place of its group accounts for.
func (p *place) sharedBlocksOf(s *session) int64 {
	if p == nil {
		return 0
	}
	return min(p.sharedBlocks, s.sharedTokens/p.inst.blockTokens)
}

// asking is what a session that asks for admission to w would add to its
// reservations: its own blocks and, for the first member of a group, the shared.
func (c *Core) asking(s *session, w *instance) int64 {
	blocks := w.blocksOf(s.class.kBarTokens)
	if c.cfg.Reserve != ReserveMean {
		blocks = max(blocks, w.blocksOf(s.contextTokens))
	}
	if s.group == nil {
		return blocks
	}
	shared := s.sharedTokens / w.blockTokens
	if p := s.group.placeAt(w); p != nil {
		return max(1, blocks-p.sharedBlocksOf(s))
	}
	return max(1, blocks-shared) + shared
}

// waitsForSibling tells whether a session should let the first member of its
// group prefill the shared prompt before it asks.
func (c *Core) waitsForSibling(s *session) bool {
	g := s.group
	return g != nil && g.leader != nil && g.leader != s && !s.readmit &&
		s.sharedTokens >= max(1, c.cfg.SiblingMinTokens) && c.now < g.leaderUntil
}

// lead makes a newly admitted member the one that its siblings wait for, if the
// shared prompt is nowhere cached yet.
func (c *Core) lead(s *session, costSeconds float64) {
	g := s.group
	if g == nil || g.leader != nil || g.impatient || s.sharedTokens < max(1, c.cfg.SiblingMinTokens) {
		return
	}
	for _, p := range g.places {
		if p.warm {
			return
		}
	}
	g.leader = s
	g.leaderUntil = c.now + nanos(min(c.cfg.SiblingWaitSeconds, 1+3*costSeconds))
	c.warming = append(c.warming, g)
}

// prefilled tells the group that a member's prefill ended, well or not.
func (c *Core) prefilled(s *session, well bool) {
	g := s.group
	if g == nil {
		return
	}
	if well {
		s.place.warm = true
	}
	if g.leader == s {
		c.releaseSiblings(g)
	}
}

// park takes a queued session out of the order until its sibling has prefilled.
func (c *Core) park(s *session) {
	s.class.queues[s.tier].remove(s)
	c.queued--
	s.parked = true
	s.reason = WaitingForSibling
	s.group.waiters = append(s.group.waiters, s)
}

func (c *Core) unparkOne(s *session) {
	g := s.group
	g.waiters = slices.DeleteFunc(g.waiters, func(o *session) bool { return o == s })
	s.parked = false
}

// releaseSiblings lets the members that waited ask again, each at its old place
// in the order.
func (c *Core) releaseSiblings(g *group) {
	g.leader = nil
	c.warming = slices.DeleteFunc(c.warming, func(o *group) bool { return o == g })
	for i, s := range g.waiters {
		s.parked = false
		c.enqueue(s)
		g.waiters[i] = nil
	}
	g.waiters = g.waiters[:0]
	c.dirty = true
}

// expireLeaders ends waits that have lasted too long.
func (c *Core) expireLeaders() {
	for i := 0; i < len(c.warming); {
		if g := c.warming[i]; c.now >= g.leaderUntil {
			g.impatient = true
			c.releaseSiblings(g) // removes it from the list
			continue
		}
		i++
	}
}
