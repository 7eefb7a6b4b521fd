package policy

import (
	"fmt"

	"holdfast/router"
	"holdfast/router/sim"
)

// RequestCeiling is what the vLLM Router offers: cache-aware placement with a
// static ceiling on requests in flight per instance. A turn goes to the instance
// that holds its prefix, or its group's; others go where the fewest wait and run.
// What does not fit under the ceiling waits at its instance, first come first served.
func RequestCeiling(ceiling int) sim.Spec {
	return sim.Spec{Name: "request-ceiling", New: func(sim.Truth) (sim.Policy, error) {
		if ceiling < 1 {
			return nil, fmt.Errorf("request ceiling %d is below 1", ceiling)
		}
		l := newLedger()
		p := &requestCeiling{ledger: &l, ceiling: ceiling, queues: make(map[*node]*fifo), queued: make(map[*node]int)}
		return driven{&l, p}, nil
	}}
}

type requestCeiling struct {
	*ledger
	ceiling int
	queues  map[*node]*fifo
	queued  map[*node]int
	// orphans wait for any instance.
	orphans fifo
}

func (p *requestCeiling) ask(s *session) {
	n := s.home
	if n == nil {
		n = p.groupHome(s)
	}
	if n == nil {
		n = p.least(func(n *node) int64 { return int64(n.inFlight + p.queued[n]) })
	}
	if n == nil {
		p.orphans.push(s)
		return
	}
	p.moveHome(s, n)
	q := p.queues[n]
	if q == nil {
		q = &fifo{}
		p.queues[n] = q
	}
	q.push(s)
	p.queued[n]++
	p.serve(n)
}

func (p *requestCeiling) serve(n *node) {
	q := p.queues[n]
	for q != nil && n.inFlight < p.ceiling {
		s := q.pop()
		if s == nil {
			return
		}
		p.queued[n]--
		p.send(s, n)
	}
}

func (p *requestCeiling) changed() {
	for len(p.nodes) > 0 {
		s := p.orphans.pop()
		if s == nil {
			break
		}
		p.ask(s)
	}
	for _, n := range p.nodes {
		p.serve(n)
	}
}

// left moves a turn that waited at an instance now gone to the others.
func (p *requestCeiling) left(s *session) {
	p.orphans.drop(s)
	if s.home == nil || !s.waiting {
		return
	}
	p.queues[s.home].drop(s)
	p.queued[s.home]--
	p.orphans.push(s)
}

// SessionCeiling bounds the sessions of each instance: a new one is let in, first
// come first served, where fewer than the ceiling live; its later turns always
// pass, to the same instance.
func SessionCeiling(ceiling int) sim.Spec {
	return ceilings("session-ceiling", func(n *node, _ router.ClassID) bool { return len(n.sessions) < ceiling }, false)
}

// Safe128K is the session ceiling under which no session can ever be evicted, if
// each grew to a context of 131,072 tokens: floor(0.95 x capacity / 131,072).
func Safe128K() sim.Spec {
	return ceilings("safe-128k", func(n *node, _ router.ClassID) bool {
		return int64(len(n.sessions)) < n.capacityTokens*95/100/131_072
	}, false)
}

// ClassCeilings bounds the sessions of each class at each instance. A class at
// its ceiling does not block the others.
func ClassCeilings(ceiling map[router.ClassID]int) sim.Spec {
	return ceilings("class-ceilings", func(n *node, class router.ClassID) bool {
		return n.byClass[class] < ceiling[class]
	}, true)
}

// Partition gives some classes a share of the instances to themselves.
type Partition struct {
	Classes []router.ClassID
	// Instances are indices in order of id; Ceiling bounds sessions per instance.
	Instances []int
	Ceiling   int
}

// Partitioned divides the instances between classes.
func Partitioned(parts []Partition) sim.Spec {
	spec := sim.Spec{Name: "partitioned"}
	spec.New = func(sim.Truth) (sim.Policy, error) {
		l := newLedger()
		fits := func(n *node, class router.ClassID) bool {
			for _, part := range parts {
				for _, c := range part.Classes {
					if c != class {
						continue
					}
					for _, i := range part.Instances {
						if i < len(l.nodes) && l.nodes[i] == n && len(n.sessions) < part.Ceiling {
							return true
						}
					}
				}
			}
			return false
		}
		return driven{&l, newCeilingPolicy(&l, fits, true)}, nil
	}
	return spec
}

func ceilings(name string, fits func(*node, router.ClassID) bool, perClass bool) sim.Spec {
	return sim.Spec{Name: name, New: func(sim.Truth) (sim.Policy, error) {
		l := newLedger()
		return driven{&l, newCeilingPolicy(&l, fits, perClass)}, nil
	}}
}

// ceilingPolicy holds new sessions until an instance has a place for them.
type ceilingPolicy struct {
	*ledger
	fits func(*node, router.ClassID) bool
	// queues are one for all classes, or one per class in order of appearance.
	perClass bool
	queues   []*classQueue
}

type classQueue struct {
	class router.ClassID
	fifo
}

func newCeilingPolicy(l *ledger, fits func(*node, router.ClassID) bool, perClass bool) *ceilingPolicy {
	return &ceilingPolicy{ledger: l, fits: fits, perClass: perClass}
}

func (p *ceilingPolicy) queueOf(class router.ClassID) *classQueue {
	if !p.perClass {
		class = ""
	}
	for _, q := range p.queues {
		if q.class == class {
			return q
		}
	}
	q := &classQueue{class: class}
	p.queues = append(p.queues, q)
	return q
}

func (p *ceilingPolicy) ask(s *session) {
	if s.home != nil {
		p.send(s, s.home)
		return
	}
	q := p.queueOf(s.class)
	q.push(s)
	p.serve(q)
}

func (p *ceilingPolicy) serve(q *classQueue) {
	for {
		s := q.peek()
		if s == nil {
			return
		}
		n := p.place(s)
		if n == nil {
			return
		}
		q.pop()
		p.send(s, n)
	}
}

// place is where a new session goes: to its group's prompt if there is room, else
// where the fewest sessions are.
func (p *ceilingPolicy) place(s *session) *node {
	if n := p.groupHome(s); n != nil && p.fits(n, s.class) {
		return n
	}
	var best *node
	for _, n := range p.nodes {
		if p.fits(n, s.class) && (best == nil || len(n.sessions) < len(best.sessions)) {
			best = n
		}
	}
	return best
}

func (p *ceilingPolicy) changed() {
	for _, q := range p.queues {
		p.serve(q)
	}
}

func (p *ceilingPolicy) left(s *session) { p.queueOf(s.class).drop(s) }
