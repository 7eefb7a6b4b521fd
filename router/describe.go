package router

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
)

// Describe is the whole state in one stable text form: equal states give equal
// texts. Lines are sorted by what they name. It is meant for tests, for the
// operator and for comparing two runs, not to be parsed.
func (c *Core) Describe() string { return string(c.AppendText(nil)) }

// AppendText appends what Describe returns to b.
func (c *Core) AppendText(b []byte) []byte {
	b = fmt.Appendf(b, "pool t=%s version=%d sessions=%d queued=%d waiting=%d footprint=%s index=%d refused=%d\n",
		stamp(c.now), c.newestVersion, len(c.sessions), c.queued, c.waitingCount,
		short(c.footprintTokens), c.index.Blocks(), c.index.Refused())
	for _, cl := range sortedBy(c.classList, func(a, b *class) int { return cmpString(a.id, b.id) }) {
		b = fmt.Appendf(b, "class %s k=%d T=%s share=%s arrivals=%s endings=%s waiting=%v queue=%s\n",
			cl.id, cl.kBarTokens, short(cl.tBarSeconds), short(cl.shareSeconds),
			short(cl.arrivals), short(cl.lifetimes.Endings()), cl.waitingByTier, cl.queueText())
	}
	for _, w := range c.instances {
		b = c.appendInstance(b, w)
	}
	groups := make([]*group, 0, len(c.groups))
	for _, g := range c.groups {
		groups = append(groups, g)
	}
	slices.SortFunc(groups, func(a, b *group) int { return bytes.Compare(a.id[:], b.id[:]) })
	for _, g := range groups {
		b = appendGroup(b, g)
	}
	sessions := make([]*session, 0, len(c.sessions))
	for _, s := range c.sessions {
		sessions = append(sessions, s)
	}
	slices.SortFunc(sessions, func(a, b *session) int { return bytes.Compare(a.id[:], b.id[:]) })
	for _, s := range sessions {
		b = c.appendSession(b, s)
	}
	return b
}

func (c *Core) appendInstance(b []byte, w *instance) []byte {
	state := "joined"
	switch {
	case !w.joined:
		state = "absent"
	case w.draining:
		state = "draining"
	case w.observability == Degraded:
		state = "degraded"
	case w.observability == Blind:
		state = "blind"
	}
	b = fmt.Appendf(b, "instance %s %s v%d cap=%d/%d protected=%d pending=%d reserved=%d live=%d budget=%d backlog=%d inflight=%d mu=%s index=%d",
		w.id, state, w.policyVersion, w.cap, w.baseCap, w.protected(), w.pending,
		w.reservedBlocks, w.liveBlocks, w.budgetBlocks, w.backlogTokens, w.inFlight,
		short(w.prefillRate()), c.index.InstanceBlocks(w.slot))
	if c.looksAhead() {
		b = fmt.Appendf(b, " ahead=%d", c.reservedNow(w))
	}
	p := &w.pressure
	b = fmt.Appendf(b, " hit=%s/%s degraded=%d contracted=%t", short(p.hit), short(p.reference), p.degradedWindows, p.contracted)
	for _, cl := range sortedBy(c.classList, func(a, b *class) int { return cmpString(a.id, b.id) }) {
		b = fmt.Appendf(b, " %s:%d/N%d", cl.id, w.byClass[cl.index], c.demand(w, cl))
		if c.classCapped() {
			share := c.sharesOf(w)[cl.index]
			b = fmt.Appendf(b, "/K%d/M%d", share.Cap, share.QuotaBlocks)
		}
	}
	return append(b, '\n')
}

func appendGroup(b []byte, g *group) []byte {
	b = fmt.Appendf(b, "group %s live=%d", hex.EncodeToString(g.id[:]), g.live)
	if g.leader != nil {
		b = fmt.Appendf(b, " leader=%s until=%s", hex.EncodeToString(g.leader.id[:]), stamp(g.leaderUntil))
	}
	for _, p := range sortedBy(g.places, func(a, b *place) int { return cmpString(a.inst.id, b.inst.id) }) {
		b = fmt.Appendf(b, " %s:members=%d,shared=%d,warm=%t", p.inst.id, p.members, p.sharedBlocks, p.warm)
	}
	for _, s := range g.waiters {
		b = fmt.Appendf(b, " waits=%s", hex.EncodeToString(s.id[:]))
	}
	return append(b, '\n')
}

func (c *Core) appendSession(b []byte, s *session) []byte {
	b = fmt.Appendf(b, "session %s %s %s turn=%d asked=%t L=%d context=%d chain=%d",
		hex.EncodeToString(s.id[:]), s.class.id, s.phase, s.turn, s.asked, s.promptTokens, s.contextTokens, s.chain.Blocks())
	switch {
	case s.protected():
		b = fmt.Appendf(b, " at=%s reserve=%d own=%d backlog=%d started=%t", s.inst.id, s.reserveBlocks, s.ownBlocks, s.backlogTokens, s.started)
	case s.phase == held:
		b = fmt.Appendf(b, " since=%s key=%s tier=%d reason=%s parked=%t", stamp(s.heldSince), stamp(s.key), s.tier, s.reason, s.parked)
	}
	if s.residency > 0 {
		b = fmt.Appendf(b, " T=%s Z=%s", stamp(s.residency), short(s.tokenSeconds))
	}
	return append(b, '\n')
}

func (cl *class) queueText() string {
	b := []byte{'['}
	for tier := range cl.queues {
		q := &cl.queues[tier]
		for _, s := range q.sessions[q.head:] {
			if len(b) > 1 {
				b = append(b, ' ')
			}
			b = append(b, hex.EncodeToString(s.id[:])...)
		}
	}
	return string(append(b, ']'))
}

// stamp writes a time in seconds to the millisecond.
func stamp(n Nanos) string { return strconv.FormatFloat(seconds(n), 'f', 3, 64) + "s" }

// short writes a quantity to six digits, which hides nothing that decides.
func short(v float64) string { return strconv.FormatFloat(v, 'g', 6, 64) }

func sortedBy[T any](list []T, compare func(a, b T) int) []T {
	sorted := slices.Clone(list)
	slices.SortFunc(sorted, compare)
	return sorted
}

func cmpString[S ~string](a, b S) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}
