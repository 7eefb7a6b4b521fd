package policy

import "holdfast/router/sim"

// immediate is a policy without admission: every turn is placed at once, and only
// a pool without instances makes turns wait.
type immediate struct {
	*ledger
	choose  func(s *session) *node
	waiting fifo
}

func newImmediate(name string, choose func(*ledger) func(*session) *node) sim.Spec {
	return sim.Spec{Name: name, New: func(sim.Truth) (sim.Policy, error) {
		l := newLedger()
		p := &immediate{ledger: &l, choose: choose(&l)}
		return driven{&l, p}, nil
	}}
}

func (p *immediate) ask(s *session) {
	p.waiting.push(s)
	p.changed()
}

func (p *immediate) changed() {
	for len(p.nodes) > 0 {
		s := p.waiting.pop()
		if s == nil {
			return
		}
		p.send(s, p.choose(s))
	}
}

func (p *immediate) left(s *session) { p.waiting.drop(s) }

// RoundRobin sends each turn to the next instance, whatever is cached where.
func RoundRobin() sim.Spec {
	return newImmediate("round-robin", func(l *ledger) func(*session) *node {
		next := 0
		return func(*session) *node {
			next++
			return l.nodes[next%len(l.nodes)]
		}
	})
}

// LeastLoaded sends each turn to the instance with the fewest turns in flight.
func LeastLoaded() sim.Spec {
	return newImmediate("least-loaded", func(l *ledger) func(*session) *node {
		return func(*session) *node { return l.least(inFlight) }
	})
}

// sticky keeps a session where it is and places new ones by a load key.
func sticky(name string, key func(*node) int64) sim.Spec {
	return newImmediate(name, func(l *ledger) func(*session) *node {
		return func(s *session) *node {
			if s.home != nil {
				return s.home
			}
			return l.least(key)
		}
	})
}

// StickyLeastLoaded pins a session to the instance that held the least context
// when it came.
func StickyLeastLoaded() sim.Spec { return sticky("sticky-least-loaded", tokens) }

// StickyLeastInFlight pins a session to the instance with the fewest turns in
// flight when it came.
func StickyLeastInFlight() sim.Spec { return sticky("sticky-least-in-flight", inFlight) }

// Permissive is cache-aware placement under a ceiling that never binds: all that
// the trainer releases is let in, a session stays where its prefix is, a group's
// members join each other, and other sessions go where the fewest are.
func Permissive() sim.Spec {
	return newImmediate("permissive", func(l *ledger) func(*session) *node {
		return func(s *session) *node {
			if s.home != nil {
				return s.home
			}
			if n := l.groupHome(s); n != nil && balanced(l, n) {
				return n
			}
			return l.least(sessions)
		}
	})
}

// balanced says that a node has not far more turns in flight than the emptiest,
// by the thresholds that vLLM Router's cache-aware policy has as defaults (32
// requests and a factor of 1.1).
func balanced(l *ledger, n *node) bool {
	least := l.least(inFlight).inFlight
	return n.inFlight-least <= 32 || float64(n.inFlight) <= 1.1*float64(least)
}
