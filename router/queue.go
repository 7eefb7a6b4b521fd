package router

import (
	"cmp"
	"slices"
)

// waitQueue holds the held sessions of one class and tier in two orders at once.
//
// sessions is the order within the class: by key, which deadlines may move
// forward. slots is the order between classes: each held session brings one slot
// at the place it would have without deadlines, and each admission uses up the
// oldest slot, whichever session it admits. So deadlines decide which session of
// a class goes next, never which class.
type waitQueue struct {
	class    *class
	tier     int
	sessions []*session
	slots    []slot
	// head is where both begin; what is before it has been taken.
	head int

	// Scratch of one evaluation: the position looked at, and why it stopped.
	cursor   int
	stopped  bool
	capBound bool
}

type slot struct {
	base Nanos
	seq  uint64
}

func (a slot) compare(b slot) int {
	if a.base != b.base {
		return cmp.Compare(a.base, b.base)
	}
	return cmp.Compare(a.seq, b.seq)
}

func (q *waitQueue) len() int { return len(q.sessions) - q.head }

// insert places a session at its key and its slot at its base.
func (q *waitQueue) insert(s *session) {
	at := q.position(s)
	q.sessions = slices.Insert(q.sessions, at, s)
	sl := slot{base: s.base, seq: s.seq}
	at, _ = slices.BinarySearchFunc(q.slots[q.head:], sl, slot.compare)
	q.slots = slices.Insert(q.slots, q.head+at, sl)
}

// position is where the session is, or would be.
func (q *waitQueue) position(s *session) int {
	at, _ := slices.BinarySearchFunc(q.sessions[q.head:], s, func(o, s *session) int {
		if o.before(s) {
			return -1
		}
		if s.before(o) {
			return 1
		}
		return 0
	})
	return q.head + at
}

// remove takes out a session that leaves without being admitted. It gives up the
// earliest slot that is not before its own place, which keeps every remaining
// session's slot no earlier than its place.
func (q *waitQueue) remove(s *session) {
	q.removeAt(q.position(s))
	at, _ := slices.BinarySearchFunc(q.slots[q.head:], slot{base: s.base, seq: s.seq}, slot.compare)
	q.removeSlot(q.head + min(at, len(q.slots)-q.head-1))
}

// take takes out the session at position at, which is admitted, with the oldest slot.
func (q *waitQueue) take(at int) *session {
	s := q.sessions[at]
	if at == q.head {
		q.sessions[at] = nil
		q.head++
		q.compact()
		return s
	}
	q.removeAt(at)
	q.removeSlot(q.head)
	return s
}

func (q *waitQueue) removeAt(at int) { q.sessions = slices.Delete(q.sessions, at, at+1) }
func (q *waitQueue) removeSlot(at int) {
	q.slots = slices.Delete(q.slots, at, at+1)
}

// compact gives the room before the head back once it is half of the queue.
func (q *waitQueue) compact() {
	if q.head < 64 && q.head < len(q.sessions) || 2*q.head < len(q.sessions) {
		return
	}
	n := copy(q.sessions, q.sessions[q.head:])
	clear(q.sessions[n:])
	q.sessions = q.sessions[:n]
	q.slots = q.slots[:copy(q.slots, q.slots[q.head:])]
	q.head = 0
}

// enqueue puts a held session into its class's queue.
func (c *Core) enqueue(s *session) {
	s.class.queues[s.tier].insert(s)
	c.queued++
}

// dequeue takes a held session out of where it waits, without admitting it.
func (c *Core) dequeue(s *session) {
	if s.parked {
		c.unparkOne(s)
		return
	}
	s.class.queues[s.tier].remove(s)
	c.queued--
}

// hold makes a turn wait: it fixes the session's place in the order.
func (c *Core) hold(s *session, since Nanos) {
	s.phase = held
	s.reason = 0
	s.heldSince = since
	c.retier(s)
	c.nextSeq++
	s.seq = c.nextSeq
	s.base = since
	if s.readmit {
		s.base -= nanos(c.cfg.ReadmitBoostSeconds)
	}
	s.key = s.base - c.urgency(s)
	s.parked = false
	c.enqueue(s)
	c.dirty = true
}

// urgency is how far a deadline moves a session forward within its class.
func (c *Core) urgency(s *session) Nanos {
	due := s.deadline
	if s.freshBy != 0 && (due == 0 || s.freshBy < due) {
		due = s.freshBy
	}
	if due == 0 {
		return 0
	}
	horizon := nanos(c.cfg.DeadlineHorizonSeconds)
	return min(max(0, horizon-(due-s.heldSince)), nanos(c.cfg.DeadlineBoostSeconds))
}

// ahead counts what goes before the session in the order: the sessions of its
// queue before it, and the slots of other queues before the one it will use.
func (c *Core) ahead(s *session) int {
	n := 0
	own := slot{base: s.base, seq: s.seq}
	mine := &s.class.queues[s.tier]
	if !s.parked {
		at := mine.position(s)
		n, own = at-mine.head, mine.slots[at]
	}
	for _, cl := range c.classList {
		for tier := range cl.queues {
			q := &cl.queues[tier]
			if q.len() == 0 || q == mine && !s.parked || tier == len(c.limits) && s.tier < tier {
				continue // what fits no instance competes with nobody
			}
			at, _ := slices.BinarySearchFunc(q.slots[q.head:], own, slot.compare)
			n += at
		}
	}
	return n
}
