package policy

import (
	"math"

	"holdfast/router/sim"
)

// Figures of PrebleLike.
const (
	// prebleWindowSeconds is the memory of an instance's load.
	prebleWindowSeconds = 180
	// prebleImbalance is the ratio of loads beyond which a hit is given up.
	prebleImbalance = 2
)

// PrebleLike explores and exploits, after Preble's E2: a turn whose prefix is
// believed to be cached for more than half goes where it is cached, unless that
// instance carries more than twice the load of the least loaded one; any other
// goes to the least loaded. Load is the prompt tokens to compute and the tokens
// generated in the last three minutes. There is no admission.
func PrebleLike() sim.Spec {
	return newImmediate("preble-like", func(l *ledger) func(*session) *node {
		p := &preble{ledger: l, load: make(map[*node]*decayed), cached: make(map[*session]preblePlace)}
		return p.choose
	})
}

type preble struct {
	*ledger
	load map[*node]*decayed
	// cached is where a session's prefix was put, and how much had been put at that
	// instance by then.
	cached map[*session]preblePlace
	stored map[*node]int64
}

type preblePlace struct {
	n        *node
	storedAt int64
	tokens   int64
}

// decayed is a sum that forgets.
type decayed struct {
	value float64
	at    int64
}

func (d *decayed) add(now int64, x float64) {
	d.value = d.now(now) + x
	d.at = now
}

func (d *decayed) now(now int64) float64 {
	return d.value * math.Exp(-float64(now-d.at)/1e9/prebleWindowSeconds)
}

func (p *preble) loadOf(n *node) *decayed {
	d := p.load[n]
	if d == nil {
		d = &decayed{}
		p.load[n] = d
	}
	return d
}

func (p *preble) choose(s *session) *node {
	if p.stored == nil {
		p.stored = make(map[*node]int64)
	}
	least := p.nodes[0]
	for _, n := range p.nodes[1:] {
		if p.loadOf(n).now(p.now) < p.loadOf(least).now(p.now) {
			least = n
		}
	}
	target, hit := least, int64(0)
	// Believed cached: not more has been stored there since than fits.
	if at, ok := p.cached[s]; ok && s.home == at.n && p.stored[at.n]-at.storedAt < at.n.capacityTokens && at.tokens*2 > s.tokens {
		if p.loadOf(at.n).now(p.now) <= prebleImbalance*p.loadOf(least).now(p.now)+float64(s.tokens) {
			target, hit = at.n, at.tokens
		}
	}
	p.loadOf(target).add(p.now, float64(s.tokens-hit))
	p.stored[target] += s.tokens - hit
	p.cached[s] = preblePlace{target, p.stored[target], s.tokens}
	return target
}
