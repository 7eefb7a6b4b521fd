package router

import (
	"errors"
	"fmt"
	"math"

	"holdfast/router/forecast"
)

// CheckInvariants recounts everything that the core keeps incrementally, from the
// sessions alone, and reports every difference. Tests call it after each Step; the
// service may call it on a copy of a bad day.
func (c *Core) CheckInvariants() error {
	k := checker{core: c}
	for _, w := range c.instances {
		k.instance(w)
	}
	k.waiting()
	k.queues()
	k.groups()
	return errors.Join(k.errs...)
}

type checker struct {
	core *Core
	errs []error
}

// equal compares a kept count with the recounted one; what formats args.
func (k *checker) equal(got, want int64, what string, args ...any) {
	if got != want {
		k.errs = append(k.errs, fmt.Errorf("router invariant: %s is %d, recounted %d", fmt.Sprintf(what, args...), got, want))
	}
}

func (k *checker) that(ok bool, format string, args ...any) {
	if !ok {
		k.errs = append(k.errs, fmt.Errorf("router invariant: "+format, args...))
	}
}

// instance recounts one instance's sums.
func (k *checker) instance(w *instance) {
	var pendingCount, inFlight, reserved, own, backlog, listed, shared int64
	var ahead forecast.Profile
	byClass := make([]int, len(k.core.classList))
	for _, s := range k.core.sessions {
		if s.inst != w {
			continue
		}
		listed++
		k.that(s.protected(), "session %x at %s is %s", s.id, w.id, s.phase)
		k.that(s.instIndex < len(w.sessions) && w.sessions[s.instIndex] == s, "session %x is not where %s lists it", s.id, w.id)
		byClass[s.class.index]++
		reserved += s.reserveBlocks
		own += s.ownBlocks
		ahead.Add(&s.ahead)
		backlog += s.backlogTokens
		if s.phase == pending {
			pendingCount++
		}
		if s.sent {
			inFlight++
		}
		k.that(s.sent == s.asked, "session %x at %s: asked %t, sent %t", s.id, w.id, s.asked, s.sent)
		k.that(s.reserveBlocks >= 1 && s.ownBlocks >= 1, "session %x reserves %d and holds %d blocks", s.id, s.reserveBlocks, s.ownBlocks)
		k.that(s.group == nil && s.place == nil || s.group != nil && s.place != nil && s.place == s.group.placeAt(w), "session %x at %s: its group's place is another", s.id, w.id)
		k.that(s.sent || s.backlogTokens == 0, "session %x has backlog without a turn", s.id)
	}
	for _, g := range k.core.groups {
		if p := g.placeAt(w); p != nil {
			reserved += p.sharedBlocks
			own += p.sharedBlocks
			shared += p.sharedBlocks
		}
	}
	k.equal(int64(len(w.sessions)), listed, "%s sessions", w.id)
	k.equal(int64(w.pending), pendingCount, "%s pending", w.id)
	k.equal(int64(w.inFlight), inFlight, "%s in flight", w.id)
	k.equal(w.reservedBlocks, reserved, "%s reserved blocks", w.id)
	k.equal(w.liveBlocks, own, "%s live blocks", w.id)
	k.equal(w.placeBlocks, shared, "%s shared blocks", w.id)
	for h := range ahead {
		k.that(math.Abs(ahead[h]-w.ahead[h]) < 1+1e-6*ahead[h], "%s expects %.1f tokens at point %d, recounted %.1f", w.id, w.ahead[h], h, ahead[h])
	}
	k.equal(w.backlogTokens, backlog, "%s backlog tokens", w.id)
	for i, cl := range k.core.classList {
		k.equal(int64(w.byClass[i]), int64(byClass[i]), "%s protected %s", w.id, cl.id)
		k.equal(int64(k.core.demand(w, cl)), int64(k.core.recountDemand(w, cl)), "%s N %s", w.id, cl.id)
	}
	if w.joined {
		k.that(w.cap >= 1 && w.cap <= w.baseCap, "%s cap is %d of %d", w.id, w.cap, w.baseCap)
	}
}

// recountDemand is N_{w,b} by its definition: the class's unfinished sessions that
// are active or pending at w, and those held or unplaced that w could take.
func (c *Core) recountDemand(w *instance, cl *class) int {
	n := 0
	for _, s := range c.sessions {
		if s.class == cl && (s.inst == w || s.waiting() && w.joined && w.fits(s)) {
			n++
		}
	}
	return n
}

// waiting recounts held and unplaced sessions by class and tier.
func (k *checker) waiting() {
	c := k.core
	counts := make(map[*class][]int)
	total := 0
	for _, s := range c.sessions {
		k.that(s.protected() == (s.inst != nil), "session %x is %s with instance %t", s.id, s.phase, s.inst != nil)
		if !s.waiting() {
			continue
		}
		k.equal(int64(s.tier), int64(c.tierOf(s)), "session %x tier", s.id)
		if counts[s.class] == nil {
			counts[s.class] = make([]int, len(c.limits)+1)
		}
		counts[s.class][s.tier]++
		total++
	}
	k.equal(int64(c.waitingCount), int64(total), "waiting sessions")
	for _, cl := range c.classList {
		for tier, n := range cl.waitingByTier {
			want := 0
			if counts[cl] != nil {
				want = counts[cl][tier]
			}
			k.equal(int64(n), int64(want), "waiting %s tier %d", cl.id, tier)
		}
	}
}

// queues checks both orders of each queue, and that each held session waits in
// exactly one place.
func (k *checker) queues() {
	c := k.core
	places := make(map[*session]int)
	queued := 0
	for _, cl := range c.classList {
		for tier := range cl.queues {
			q := &cl.queues[tier]
			k.equal(int64(len(q.slots)), int64(len(q.sessions)), "slots of %s tier %d", cl.id, tier)
			for i, s := range q.sessions[q.head:] {
				queued++
				places[s]++
				k.that(s.class == cl && s.tier == tier && s.phase == held && !s.parked, "session %x is in the wrong queue", s.id)
				k.that(i == 0 || q.sessions[q.head+i-1].before(s), "queue of %s is out of order at %d", cl.id, i)
				k.that(i == 0 || q.slots[q.head+i-1].compare(q.slots[q.head+i]) < 0, "slots of %s are out of order at %d", cl.id, i)
			}
		}
	}
	k.equal(int64(c.queued), int64(queued), "queued sessions")
	for _, g := range c.groups {
		for _, s := range g.waiters {
			places[s]++
			k.that(s.parked && s.phase == held && s.group == g, "session %x waits with the wrong group", s.id)
		}
	}
	for _, s := range c.sessions {
		want := 0
		if s.phase == held {
			want = 1
			k.that(s.asked, "session %x is held without a turn", s.id)
		}
		k.equal(int64(places[s]), int64(want), "places where session %x waits", s.id)
	}
}

// groups recounts members.
func (k *checker) groups() {
	live := make(map[*group]int)
	at := make(map[*group]map[*instance]int)
	for _, s := range k.core.sessions {
		if s.group == nil {
			continue
		}
		live[s.group]++
		if s.inst != nil {
			if at[s.group] == nil {
				at[s.group] = make(map[*instance]int)
			}
			at[s.group][s.inst]++
		}
	}
	k.equal(int64(len(k.core.groups)), int64(len(live)), "groups")
	for _, g := range k.core.groups {
		k.equal(int64(g.live), int64(live[g]), "group %x live", g.id)
		k.equal(int64(len(g.places)), int64(len(at[g])), "group %x places", g.id)
		for _, p := range g.places {
			k.equal(int64(p.members), int64(at[g][p.inst]), "group %x members at %s", g.id, p.inst.id)
		}
		k.that(g.leader == nil || g.leader.group == g && g.leader.protected(), "group %x is led by a session not admitted", g.id)
		k.that(g.leader != nil || len(g.waiters) == 0, "group %x waits for nobody", g.id)
	}
}
