package policy

import (
	"cmp"
	"slices"

	"holdfast/router/sim"
)

// Thresholds of ThunderAgentLike, as shares of an instance's cache.
const (
	thunderPauseAbove = 0.95
	thunderDrainTo    = 0.80
)

// ThunderAgentLike schedules whole programs by their token footprint, after
// ThunderAgent: above 0.95 of an instance's cache it pauses sessions between
// turns, those with the least context first because they are the cheapest to
// compute again, until 0.80 is left; below 0.80 it resumes paused sessions,
// shortest first, anywhere, and then lets new ones in. It knows neither classes nor
// a mixture.
func ThunderAgentLike() sim.Spec {
	return sim.Spec{
		Name:  "thunderagent-like",
		Wants: sim.Wants{Snapshots: true, TickSeconds: 5},
		New: func(sim.Truth) (sim.Policy, error) {
			l := newLedger()
			return driven{&l, &thunder{ledger: &l, lastHome: make(map[*session]*node)}}, nil
		},
	}
}

type thunder struct {
	*ledger
	// paused sessions whose next turn waits, and new ones.
	resumable []*session
	fresh     fifo
	lastHome  map[*session]*node
}

func (p *thunder) ask(s *session) {
	switch {
	case s.home != nil:
		p.send(s, s.home)
	case s.paused:
		p.resumable = append(p.resumable, s)
		p.fill()
	default:
		p.fresh.push(s)
		p.fill()
	}
}

func (p *thunder) changed() {
	for _, n := range p.nodes {
		if p.share(n, 0) > thunderPauseAbove {
			p.drainNode(n)
		}
	}
	p.fill()
}

func (p *thunder) share(n *node, more int64) float64 {
	return float64(n.tokens+more) / float64(n.capacityTokens)
}

// drainNode pauses sessions that are between turns.
func (p *thunder) drainNode(n *node) {
	var idle []*session
	for _, s := range n.sessions {
		if !s.inFlight {
			idle = append(idle, s)
		}
	}
	slices.SortStableFunc(idle, func(a, b *session) int { return cmp.Compare(a.tokens, b.tokens) })
	for _, s := range idle {
		if p.share(n, 0) <= thunderDrainTo {
			return
		}
		s.paused = true
		p.lastHome[s] = n
		p.moveHome(s, nil)
	}
}

// fill resumes and admits while there is room below the lower threshold.
func (p *thunder) fill() {
	slices.SortStableFunc(p.resumable, func(a, b *session) int { return cmp.Compare(a.tokens, b.tokens) })
	for len(p.resumable) > 0 {
		s := p.resumable[0]
		n := p.roomFor(s)
		if n == nil {
			return
		}
		p.resumable = slices.Delete(p.resumable, 0, 1)
		s.paused = false
		delete(p.lastHome, s)
		p.send(s, n)
	}
	for s := p.fresh.peek(); s != nil; s = p.fresh.peek() {
		n := p.roomFor(s)
		if n == nil {
			return
		}
		p.fresh.pop()
		p.send(s, n)
	}
}

// roomFor is the instance a session resumes at: where it was, if that has room,
// else the emptiest.
func (p *thunder) roomFor(s *session) *node {
	if n := p.lastHome[s]; n != nil && p.share(n, s.tokens) <= thunderDrainTo {
		return n
	}
	n := p.least(tokens)
	if n == nil || p.share(n, s.tokens) > thunderDrainTo {
		return nil
	}
	return n
}

func (p *thunder) left(s *session) {
	p.fresh.drop(s)
	delete(p.lastHome, s)
	p.resumable = slices.DeleteFunc(p.resumable, func(o *session) bool { return o == s })
}
