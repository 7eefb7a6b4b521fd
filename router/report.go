package router

import "slices"

// Report is what an operator's view shows of the core: values only, no part of
// its state.
type Report struct {
	At            Nanos
	PolicyVersion int64
	Sessions      int
	// FootprintTokens is the pool's reference footprint for base caps.
	FootprintTokens float64
	// IndexBlocks are indexed, RefusedBlocks could not be.
	IndexBlocks   int
	RefusedBlocks uint64
	Classes       []ClassReport
	Instances     []InstanceReport
}

// ClassReport is one class in the whole pool. Classes are ordered by id.
type ClassReport struct {
	Class ClassID
	// KBarTokens and TBarSeconds are k-bar_b and T-bar_b, Endings the weight of
	// finished sessions behind them.
	KBarTokens  int64
	TBarSeconds float64
	Endings     float64
	// Active, Pending, Held and Unplaced count its sessions; OldestHoldNanos is the
	// age of the oldest hold.
	Active, Pending, Held, Unplaced int
	OldestHoldNanos                 Nanos
}

// InstanceReport is one instance. Instances are ordered by id.
type InstanceReport struct {
	Instance      InstanceID
	Joined        bool
	Draining      bool
	Observability Observability
	PolicyVersion int64
	// BaseCap and Cap in sessions; Protected is |O|+|P|, Pending |P|.
	BaseCap, Cap, Protected, Pending int
	// ReservedBlocks of BudgetBlocks; LiveBlocks is what sessions hold as far as known.
	ReservedBlocks, LiveBlocks, BudgetBlocks int64
	// Running, Waiting, UsedBlocks and Preemptions are as the last snapshot told.
	Running, Waiting        int
	UsedBlocks, Preemptions int64
	// PrefillTokensPerSecond is mu, QueueSeconds d.
	PrefillTokensPerSecond, QueueSeconds float64
	// Hit is h^, HealthyHit h*, Gap G of the last judged window; Contracted tells
	// that pressure holds the cap below its base.
	Hit, HealthyHit, Gap float64
	Contracted           bool
	Classes              []InstanceClassReport
}

// InstanceClassReport is one class at one instance, ordered by class id.
type InstanceClassReport struct {
	Class ClassID
	// Demand is N_{w,b}, Protected its sessions there, Cap and QuotaBlocks its share.
	Demand, Protected int
	Cap               int64
	QuotaBlocks       int64
}

// String returns the state's name as it stands in stored events.
func (o Observability) String() string {
	switch o {
	case Fresh:
		return "fresh"
	case Degraded:
		return "degraded"
	case Blind:
		return "blind"
	}
	return "unknown"
}

// Report tells how things stand. It allocates, and costs a walk over all sessions:
// it is for views, not for decisions.
func (c *Core) Report() Report {
	r := Report{
		At: c.now, PolicyVersion: c.newestVersion, Sessions: len(c.sessions), FootprintTokens: c.footprintTokens,
		IndexBlocks: c.index.Blocks(), RefusedBlocks: c.index.Refused(),
	}
	classes := sortedBy(c.classList, func(a, b *class) int { return cmpString(a.id, b.id) })
	for _, cl := range classes {
		r.Classes = append(r.Classes, ClassReport{
			Class: cl.id, KBarTokens: cl.kBarTokens, TBarSeconds: cl.tBarSeconds, Endings: cl.lifetimes.Endings(),
		})
	}
	// Counting commutes, so map order does not matter here.
	for _, s := range c.sessions {
		cr := &r.Classes[slices.Index(classes, s.class)]
		switch s.phase {
		case active:
			cr.Active++
		case pending:
			cr.Pending++
		case unplaced:
			cr.Unplaced++
		case held:
			cr.Held++
			cr.OldestHoldNanos = max(cr.OldestHoldNanos, c.now-s.heldSince)
		}
	}
	for _, w := range c.instances {
		r.Instances = append(r.Instances, c.reportInstance(w, classes))
	}
	return r
}

func (c *Core) reportInstance(w *instance, classes []*class) InstanceReport {
	p := &w.pressure
	r := InstanceReport{
		Instance: w.id, Joined: w.joined, Draining: w.draining, Observability: w.observability, PolicyVersion: w.policyVersion,
		BaseCap: w.baseCap, Cap: w.cap, Protected: w.protected(), Pending: w.pending,
		ReservedBlocks: c.reservedNow(w), LiveBlocks: w.liveBlocks, BudgetBlocks: w.budgetBlocks,
		Running: w.running, Waiting: w.waiting, UsedBlocks: w.usedBlocks, Preemptions: w.preemptions,
		PrefillTokensPerSecond: w.prefillRate(), QueueSeconds: w.backlogSeconds(),
		Hit: p.hit, HealthyHit: p.reference, Gap: p.gap, Contracted: p.contracted,
	}
	shares := c.sharesOf(w)
	for _, cl := range classes {
		r.Classes = append(r.Classes, InstanceClassReport{
			Class: cl.id, Demand: c.demand(w, cl), Protected: w.byClass[cl.index],
			Cap: shares[cl.index].Cap, QuotaBlocks: shares[cl.index].QuotaBlocks,
		})
	}
	return r
}

// Explain tells where a session stands now: a Hold with its present reason and
// numbers, or the Admit that its turn runs under. It reports false for a session
// that is not known or between turns.
func (c *Core) Explain(id SessionID) (Decision, bool) {
	s := c.sessions[id]
	switch {
	case s == nil || !s.asked:
		return Decision{}, false
	case s.phase == held:
		told := s.reason
		d := c.holdDecision(s)
		s.reason = told // looking must not change what is told later
		return d, true
	}
	return c.admitted(s, s.turn), true
}
