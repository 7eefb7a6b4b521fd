package router

import (
	"fmt"

	"holdfast/router/forecast"
	"holdfast/router/prefix"
)

// phase is where a session stands in the ledger. A session is in exactly one.
type phase uint8

const (
	// unplaced: known and unfinished, in no instance, with no turn waiting. Its
	// next turn must gain admission.
	unplaced phase = iota
	// held: a turn waits for admission, in a class's queue or for a sibling.
	held
	// pending: admitted, not yet seen in a snapshot (P_w).
	pending
	// active: admitted and seen in a snapshot (O_w).
	active
)

func (p phase) String() string {
	switch p {
	case unplaced:
		return "unplaced"
	case held:
		return "held"
	case pending:
		return "pending"
	case active:
		return "active"
	}
	return fmt.Sprintf("phase(%d)", uint8(p))
}

// session is one entry of the session ledger.
type session struct {
	id    SessionID
	class *class
	group *group
	phase phase

	// turn is the latest one asked for; asked: it waits or is at the engine; sent:
	// it is at the engine.
	turn        int
	asked, sent bool
	// promptTokens is L of that turn; contextTokens the most the session is known
	// to hold, previousTokens what it held as the turn was asked for; settledTokens
	// leaves out of that what is too young for block events to have told of.
	promptTokens      int64
	contextTokens     int64
	previousTokens    int64
	settledTokens     int64
	sharedTokens      int64
	deadline, freshBy Nanos
	chain             prefix.Chain

	avoid      *instance
	avoidUntil Nanos

	// While held or unplaced.
	tier      int
	heldSince Nanos
	// base is the session's place in the order between classes, key the one within
	// its class; seq breaks ties by arrival.
	base, key Nanos
	seq       uint64
	reason    Reason
	parked    bool
	// readmit: it was admitted before; moved: it lost its instance, not its prefix.
	readmit, moved bool

	// While pending or active.
	inst        *instance
	instIndex   int
	attachedAt  Nanos
	admitReason Reason
	// place is its group's presence there, nil without a group.
	place *place
	// reserveBlocks and ownBlocks are what it adds to its instance's sums, without
	// the group's shared blocks.
	reserveBlocks, ownBlocks int64
	ahead                    forecast.Profile
	// backlogTokens are its predicted uncached prompt tokens until its turn starts.
	backlogTokens int64
	started       bool
	// sentHitTokens and sentCostSeconds are what its latest admission predicted.
	sentHitTokens   int64
	sentCostSeconds float64
	// expectCachedTokens is what a working cache would find of this turn's prompt.
	expectCachedTokens int64
	lastEndedAt        Nanos

	// home is the instance that last computed the session's KV, as of its cache's
	// epoch; it outlives protection.
	home      *instance
	homeEpoch uint64
	// indexed: the prefix index has seen a turn of the session end at home, under
	// the hashes that its chain has now, so that its silence means something.
	indexed bool
	// dispatchEpoch is the cache's epoch when the latest turn was sent.
	dispatchEpoch uint64

	// cachedBlocks as the last snapshot told, at cachedAt; -1 unknown.
	cachedBlocks int64
	cachedAt     Nanos

	// Residency: integrated up to observedAt at observedTokens.
	observedAt     Nanos
	observedTokens int64
	// observedContext is the same with the group's prompt counted whole.
	observedContext int64
	residency       Nanos
	tokenSeconds    float64
	// entered: its life is in its class's estimate; partial: only from a restoration on.
	entered, partial bool
}

// protected tells whether the session is in O or P of its instance.
func (s *session) protected() bool { return s.phase == pending || s.phase == active }

// waiting tells whether the session's demand counts at every instance that could
// take it.
func (s *session) waiting() bool { return s.phase == held || s.phase == unplaced }

// before is the order within a class: earlier key first, then arrival.
func (s *session) before(o *session) bool {
	if s.key != o.key {
		return s.key < o.key
	}
	return s.seq < o.seq
}

// newSession takes an entry from the free list or makes one.
func (c *Core) newSession(id SessionID, cl *class) *session {
	var s *session
	if n := len(c.freeSessions); n > 0 {
		s = c.freeSessions[n-1]
		c.freeSessions = c.freeSessions[:n-1]
	} else {
		s = &session{}
	}
	chain := s.chain
	chain.Reset()
	c.nextSeq++
	*s = session{id: id, class: cl, chain: chain, turn: -1, seq: c.nextSeq, cachedBlocks: -1}
	c.sessions[id] = s
	c.countArrival(cl)
	s.tier = c.tierOf(s)
	c.countWaiting(s, 1)
	return s
}

// dropSession forgets an entry that is in no queue and at no instance.
func (c *Core) dropSession(s *session) {
	c.countWaiting(s, -1)
	c.leaveGroup(s)
	delete(c.sessions, s.id)
	s.group, s.class, s.inst, s.avoid, s.home = nil, nil, nil, nil, nil
	c.freeSessions = append(c.freeSessions, s)
}

// attach admits a session to an instance: from here on it is in P_w.
func (c *Core) attach(s *session, w *instance) {
	c.countWaiting(s, -1)
	s.phase = pending
	s.inst, s.instIndex, s.attachedAt = w, len(w.sessions), c.now
	w.sessions = append(w.sessions, s)
	w.pending++
	w.byClass[s.class.index]++
	w.demandStamp++
	c.joinPlace(s, w)
	s.cachedBlocks = -1
	s.observedAt, s.observedTokens, s.observedContext = c.now, s.footprintTokens(), s.contextTokens
	if !s.entered {
		s.entered = true
		if s.partial {
			s.class.lifetimes.Resume(s.observedTokens)
		} else {
			s.class.lifetimes.Enter(s.observedTokens)
		}
	}
	w.admissions++
	c.admissionSeq++
	w.lastAdmission = c.admissionSeq
	c.refit(s)
}

// detach takes a session out of O and P of its instance and releases its
// reservation, once.
func (c *Core) detach(s *session) {
	w := s.inst
	c.integrate(s, s.contextTokens)
	if s.sent {
		c.recall(s)
	}
	last := len(w.sessions) - 1
	w.sessions[s.instIndex] = w.sessions[last]
	w.sessions[s.instIndex].instIndex = s.instIndex
	w.sessions[last] = nil
	w.sessions = w.sessions[:last]
	if s.phase == pending {
		w.pending--
	}
	w.byClass[s.class.index]--
	w.demandStamp++
	w.reservedBlocks -= s.reserveBlocks
	w.liveBlocks -= s.ownBlocks
	s.reserveBlocks, s.ownBlocks = 0, 0
	c.unforesee(s)
	c.leavePlace(s, w)
	w.noteDeparture(c.now)
	s.phase, s.inst = unplaced, nil
	s.readmit = true
	s.tier = c.tierOf(s)
	c.countWaiting(s, 1)
	c.dirty = true
	if !w.joined && len(w.sessions) == 0 {
		c.dropInstance(w)
	}
}

// refit brings a session's reservation and footprint in step with what is known.
func (c *Core) refit(s *session) {
	w := s.inst
	own := w.blocksOf(s.contextTokens)
	reserve := c.reservation(s, own, w)
	shared := s.place.sharedBlocksOf(s)
	own, reserve = max(1, own-shared), max(1, reserve-shared)
	if reserve < s.reserveBlocks || c.looksAhead() && c.passedOver {
		c.dirty = true // there may be room that was not there before
	}
	w.reservedBlocks += reserve - s.reserveBlocks
	w.liveBlocks += own - s.ownBlocks
	s.reserveBlocks, s.ownBlocks = reserve, own
	c.foresee(s, shared)
}

func (c *Core) refitAll(w *instance) {
	for _, s := range w.sessions {
		c.refit(s)
	}
}

// reservation is k~_s of an admitted session that holds so many blocks.
func (c *Core) reservation(s *session, blocks int64, w *instance) int64 {
	switch c.cfg.Reserve {
	case ReserveMean:
		return w.blocksOf(s.class.kBarTokens)
	case ReserveCurrent, ReserveAhead:
		if s.phase == active && w.observability == Fresh {
			return blocks
		}
	}
	return max(blocks, w.blocksOf(s.class.kBarTokens))
}

// footprintTokens is the context a session holds by itself, with the group's
// shared prompt divided by the members that share it at the instance.
func (s *session) footprintTokens() int64 {
	tokens := s.contextTokens
	if s.place == nil || s.place.members <= 1 {
		return tokens
	}
	members := int64(s.place.members)
	shared := min(s.sharedTokens, tokens)
	return tokens - shared + (shared+members-1)/members
}

// integrate adds residency since the last observation, with linear growth to
// the context now known.
func (c *Core) integrate(s *session, contextTokens int64) {
	s.contextTokens = contextTokens
	tokens := s.footprintTokens()
	passed := max(0, c.now-s.observedAt)
	s.class.lifetimes.Advance(s.observedTokens, tokens, seconds(passed))
	if c.looksAhead() {
		s.class.ahead.Advance(s.observedContext, contextTokens, seconds(passed))
	}
	s.residency += passed
	s.tokenSeconds += seconds(passed) * float64(s.observedTokens+tokens) / 2
	s.observedAt, s.observedTokens, s.observedContext = c.now, tokens, contextTokens
}

// grow records a larger or changed context of a protected session.
func (c *Core) grow(s *session, contextTokens int64) {
	c.integrate(s, contextTokens)
	c.refit(s)
}

// recall ends the accounting of a turn at the engine.
func (c *Core) recall(s *session) {
	s.sent = false
	s.inst.inFlight--
	c.endBacklog(s)
}

// endBacklog takes what is left of a turn's prefill out of its instance's backlog.
func (c *Core) endBacklog(s *session) {
	s.inst.backlogTokens -= s.backlogTokens
	s.backlogTokens = 0
}
