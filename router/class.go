package router

import (
	"holdfast/router/forecast"
	"holdfast/router/residency"
)

// class is one workload class: its demand, its queues and its references.
type class struct {
	id    ClassID
	index int

	// waitingByTier counts held and unplaced sessions by the smallest instance
	// that fits them; see tierOf.
	waitingByTier []int
	queues        []waitQueue // by tier

	lifetimes *residency.Estimator
	// ahead forecasts footprints, for ReserveAhead only.
	ahead *forecast.Table
	// arrivals is the class's decayed share in the sessions that asked so far.
	arrivals float64
	// kBarTokens and tBarSeconds are k-bar_b and T-bar_b as of the last slow loop;
	// shareSeconds is T-bar_b with the neutral prior mixed in, as the quotas use it.
	kBarTokens   int64
	tBarSeconds  float64
	shareSeconds float64
}

// classOf finds a class or makes it. Labels that are missing, or beyond the
// bound on classes, count as the default class.
func (c *Core) classOf(id ClassID) *class {
	if id == "" {
		id = c.cfg.DefaultClass
	}
	if cl := c.classes[id]; cl != nil {
		return cl
	}
	if len(c.classList) >= c.cfg.MaxClasses {
		id = c.cfg.DefaultClass
		if cl := c.classes[id]; cl != nil {
			return cl
		}
	}
	f := &c.cfg.Footprint
	cl := &class{
		id: id, index: len(c.classList),
		waitingByTier: make([]int, len(c.limits)+1),
		queues:        make([]waitQueue, len(c.limits)+1),
		lifetimes: residency.New(residency.Config{
			PriorTokens: f.PriorTokens, PriorSeconds: f.PriorSeconds,
			PriorSessions: f.PriorSessions, WindowSessions: f.WindowSessions,
		}),
		kBarTokens:   int64(f.PriorTokens),
		tBarSeconds:  f.PriorSeconds,
		shareSeconds: f.PriorSeconds,
	}
	if c.looksAhead() {
		cl.ahead = forecast.New(c.cfg.Forecast)
	}
	for tier := range cl.queues {
		cl.queues[tier] = waitQueue{class: cl, tier: tier}
	}
	c.classes[id] = cl
	c.classList = append(c.classList, cl)
	for _, w := range c.instances {
		w.byClass = append(w.byClass, 0)
	}
	c.growScratch()
	c.demandStamp++
	return cl
}

// countArrival moves the arrival shares towards a class that just brought a new
// session. The memory is that of the lifetimes, for all classes together.
func (c *Core) countArrival(cl *class) {
	keep := 1 - 1/(c.cfg.Footprint.WindowSessions*float64(len(c.classList)))
	for _, other := range c.classList {
		other.arrivals *= keep
	}
	cl.arrivals++
}

// countWaiting keeps the demand of held and unplaced sessions. It must run with
// the session's tier and class as they were when it was counted in.
func (c *Core) countWaiting(s *session, delta int) {
	s.class.waitingByTier[s.tier] += delta
	c.waitingCount += delta
	c.demandStamp++
}

// retier counts a waiting session anew after its context changed.
func (c *Core) retier(s *session) {
	c.countWaiting(s, -1)
	s.tier = c.tierOf(s)
	c.countWaiting(s, 1)
}

// demand is N_{w,b}: sessions of the class that are active or pending at the
// instance, and those held or unplaced that it could take.
func (c *Core) demand(w *instance, cl *class) int {
	n := w.byClass[cl.index]
	for tier := 0; tier <= w.level && tier < len(cl.waitingByTier); tier++ {
		n += cl.waitingByTier[tier]
	}
	return n
}
