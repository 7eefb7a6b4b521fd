package policy

import (
	"holdfast/router"
	"holdfast/router/sim"
)

// OracleConfig sets how an oracle uses what it knows.
type OracleConfig struct {
	// FillShare of the cache is what the sessions may hold at any time within the
	// horizon.
	FillShare float64
	// HorizonSeconds is how far ahead it looks.
	HorizonSeconds float64
	// Lookahead is how many sessions behind one that does not fit may go before it.
	Lookahead int
	// ReadmitBelowShare of its context still cached, a continuation must be admitted again.
	ReadmitBelowShare float64
	// PeriodSeconds between admissions, unless a session leaves.
	PeriodSeconds float64
}

// DefaultOracle is the best of those compared on the tuning seeds.
func DefaultOracle() OracleConfig {
	return OracleConfig{FillShare: 0.96, HorizonSeconds: 750, Lookahead: 8, ReadmitBelowShare: 0.5, PeriodSeconds: 5}
}

const oracleGridPoints = 12

// Oracle knows the true footprint and the future of every session, and what is
// cached where. It admits the next session in the trainer's order as soon as the
// sessions at an instance, as they will grow and end within the horizon, leave
// room for it. A continuation of which less than half is still cached must be
// admitted again, ahead of new sessions. It is no router: it shows what knowing
// would be worth.
func Oracle(cfg OracleConfig) sim.Spec {
	return sim.Spec{
		Name:  "oracle",
		Wants: sim.Wants{TickSeconds: cfg.PeriodSeconds},
		New: func(truth sim.Truth) (sim.Policy, error) {
			l := newLedger()
			return driven{&l, &oracle{ledger: &l, cfg: cfg, truth: truth}}, nil
		},
	}
}

type oracle struct {
	*ledger
	cfg   OracleConfig
	truth sim.Truth
	// again are continuations that lost their prefix, fresh new sessions.
	again, fresh fifo
	at           router.Nanos
}

// profile is what something holds at each point of the grid, in tokens.
type profile [oracleGridPoints]int64

func (p *oracle) ask(s *session) {
	switch {
	case s.home == nil && s.turn > 0:
		p.again.push(s)
	case s.home == nil:
		p.fresh.push(s)
	case float64(p.truth.CachedTokens(s.id, s.home.id)) < p.cfg.ReadmitBelowShare*float64(s.tokens):
		p.moveHome(s, nil)
		p.again.push(s)
	default:
		p.send(s, s.home)
		return
	}
	p.changed()
}

func (p *oracle) left(s *session) {
	p.again.drop(s)
	p.fresh.drop(s)
	p.at = 0
}

// changed admits what fits, at most once in a while unless a session left.
func (p *oracle) changed() {
	if p.at != 0 && float64(p.now-p.at) < p.cfg.PeriodSeconds*1e9 || len(p.nodes) == 0 {
		return
	}
	p.at = p.now + 1
	if p.again.peek() == nil && p.fresh.peek() == nil {
		return
	}
	held := make([]profile, len(p.nodes))
	for i, n := range p.nodes {
		pace := p.paceOf(n)
		for _, s := range n.sessions {
			p.project(&held[i], s, n, pace)
		}
	}
	p.admitFrom(&p.again, held)
	if p.again.peek() == nil {
		p.admitFrom(&p.fresh, held)
	}
}

func (p *oracle) admitFrom(q *fifo, held []profile) {
	q.peek()
	passed := 0
	for i := q.head; i < len(q.items) && passed <= p.cfg.Lookahead; i++ {
		s := q.items[i]
		if s == nil {
			continue
		}
		at := p.place(s, held)
		if at < 0 {
			passed++
			continue
		}
		q.items[i] = nil
		p.project(&held[at], s, p.nodes[at], p.paceOf(p.nodes[at]))
		p.send(s, p.nodes[at])
	}
}

// place is the instance whose peak would be lowest, -1 if none has room. The
// group's prompt is preferred where it is.
func (p *oracle) place(s *session, held []profile) int {
	best, bestPeak := -1, 0.0
	near := p.groupHome(s)
	for i, n := range p.nodes {
		own := held[i]
		p.project(&own, s, n, p.paceOf(n))
		var peak int64
		for _, x := range own {
			peak = max(peak, x)
		}
		share := float64(peak) / float64(n.capacityTokens)
		if share > p.cfg.FillShare {
			continue
		}
		if n == near {
			return i
		}
		if best < 0 || share < bestPeak {
			best, bestPeak = i, share
		}
	}
	return best
}

// project adds a session's future at an instance to a profile.
func (p *oracle) project(into *profile, s *session, n *node, pace float64) {
	future := p.truth.Session(s.id)
	step := p.cfg.HorizonSeconds / (oracleGridPoints - 1)
	// Members share the group's prompt: only the first of them holds it.
	context := float64(future.ContextTokens) - float64(p.sharedElsewhere(s, n))
	j, t := 0, 0.0
	for i, turn := range future.Turns {
		left := float64(turn.OutputTokens)
		if i == 0 {
			context += float64(future.DoneTokens)
			left -= float64(future.DoneTokens)
		}
		end := t + left*pace
		for ; j < oracleGridPoints && float64(j)*step < end; j++ {
			into[j] += int64(context + (float64(j)*step-t)/pace)
		}
		context += left
		t = end + turn.GapSeconds
		for ; j < oracleGridPoints && float64(j)*step < t; j++ {
			into[j] += int64(context)
		}
		context += float64(turn.AppendTokens)
		if j == oracleGridPoints {
			return
		}
	}
}

func (p *oracle) sharedElsewhere(s *session, n *node) int64 {
	if s.shared == 0 {
		return 0
	}
	for _, o := range n.sessions {
		if o == s {
			return 0
		}
		if o.group == s.group {
			return s.shared
		}
	}
	return 0
}

func (p *oracle) paceOf(n *node) float64 {
	if pace := p.truth.SecondsPerToken(n.id); pace > 0 {
		return pace
	}
	return 0.02
}
