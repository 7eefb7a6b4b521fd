package policy

import (
	"holdfast/router"
	"holdfast/router/sim"
)

// PrimeRLLike is a class-blind controller of the number of sessions, after
// prime-rl's: it grows while less than 0.6 of the KV memory is in use, grows more
// slowly up to 0.8, shrinks above 0.9, and is cut to 0.8 on preemption and to 0.9
// on a waiting queue. Sessions are pinned to their instance.
func PrimeRLLike() sim.Spec {
	return sim.Spec{
		Name:  "prime-rl-like",
		Wants: sim.Wants{Snapshots: true},
		New: func(sim.Truth) (sim.Policy, error) {
			l := newLedger()
			p := &primeRL{ledger: &l, limits: make(map[router.InstanceID]*primeLimit)}
			fits := func(n *node, _ router.ClassID) bool { return len(n.sessions) < int(p.limitOf(n.id).sessions) }
			p.ceilingPolicy = newCeilingPolicy(&l, fits, false)
			return driven{&l, p}, nil
		},
	}
}

// Figures of PrimeRLLike. The controller waits primeSettleNanos after a change, so
// that it sees its effect.
const (
	primeStartSessions = 16
	primeSettleNanos   = 30_000_000_000
)

type primeRL struct {
	*ledger
	*ceilingPolicy
	limits map[router.InstanceID]*primeLimit
}

type primeLimit struct {
	sessions    float64
	preemptions int64
	changedAt   router.Nanos
}

func (p *primeRL) limitOf(id router.InstanceID) *primeLimit {
	l := p.limits[id]
	if l == nil {
		l = &primeLimit{sessions: primeStartSessions}
		p.limits[id] = l
	}
	return l
}

func (p *primeRL) ask(s *session)  { p.ceilingPolicy.ask(s) }
func (p *primeRL) changed()        { p.ceilingPolicy.changed() }
func (p *primeRL) left(s *session) { p.ceilingPolicy.left(s) }

func (p *primeRL) observed(ev *router.Snapshot) {
	n := p.ledger.find(ev.Instance)
	if n == nil {
		return
	}
	l := p.limitOf(ev.Instance)
	preempted := ev.Preemptions > l.preemptions
	l.preemptions = ev.Preemptions
	if p.ledger.now-l.changedAt < primeSettleNanos {
		return
	}
	blockTokens := float64(n.blockTokens)
	used := float64(ev.UsedBlocks) * blockTokens / float64(n.capacityTokens)
	before := l.sessions
	// A limit that does not bind says nothing about what would fit.
	binds := len(n.sessions) >= int(l.sessions)
	switch {
	case preempted:
		l.sessions *= 0.8
	case ev.Waiting > 0:
		l.sessions *= 0.9
	case used > 0.9:
		l.sessions *= 0.95
	case used < 0.6 && binds:
		l.sessions *= 1.1
	case used < 0.8 && binds:
		l.sessions++
	}
	l.sessions = max(1, l.sessions)
	if l.sessions != before {
		l.changedAt = p.ledger.now
	}
}
