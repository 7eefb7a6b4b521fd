package router

import (
	"math"

	"holdfast/router/quota"
	"holdfast/router/residency"
)

// unbounded is the cap where none applies.
const unbounded = math.MaxInt32

// baseCapOf is C_w over the reference footprint: at least 1.
func (c *Core) baseCapOf(w *instance) int {
	if c.cfg.StaticCap > 0 {
		return c.cfg.StaticCap
	}
	if c.cfg.Admission == AdmitAll {
		return unbounded
	}
	reference := math.Max(1, c.footprintTokens/float64(w.blockTokens))
	if c.cfg.Footprint.FloorByLive && w.protected() > 0 {
		reference = math.Max(reference, float64(w.liveBlocks)/float64(w.protected()))
	}
	margin := 1 + (c.cfg.Caps.Margin-1)*c.confidence
	return int(min(max(1, margin*float64(w.budgetBlocks)/reference), unbounded))
}

// relearn is the slow loop: references and base caps follow what sessions turned
// out to need.
func (c *Core) relearn(out []Decision) []Decision {
	maxTokens := int64(1 << 20)
	if n := len(c.limits); n > 0 {
		maxTokens = c.limits[n-1]
	}
	c.learnClasses(maxTokens)
	c.learnAhead()
	c.dirty = true
	for _, w := range c.instances {
		c.refitAll(w)
		if !w.joined || w.observability != Fresh {
			continue // caps are frozen while we see badly
		}
		target := c.baseCapOf(w)
		rise := max(1, int(float64(w.baseCap)*c.cfg.Caps.RiseShare))
		target = min(target, w.baseCap+rise)
		if target == w.baseCap {
			continue
		}
		w.baseCap = target
		if !w.pressure.contracted || w.cap > target {
			w.cap = target
		}
		out = append(out, c.capDecision(w, LengthsMoved))
	}
	return out
}

// learnClasses refreshes k-bar_b, T-bar_b and the pool's reference footprint:
// the mean over classes weighted by how many sessions of each arrive, which is
// what the pool's content tends to, whichever finish first.
func (c *Core) learnClasses(maxTokens int64) {
	var tokenSeconds, residencySeconds, pooled, arrivals float64
	confidence := 1.0
	for _, cl := range c.classList {
		var e residency.Estimate
		weight := cl.arrivals
		if c.cfg.Footprint.CensoringAware {
			e = cl.lifetimes.Expect(maxTokens)
		} else {
			e = cl.lifetimes.Finished()
			weight = e.Endings
		}
		cl.kBarTokens, cl.tBarSeconds = max(1, int64(math.Ceil(e.FootprintTokens))), e.ResidencySeconds
		tokenSeconds += weight * e.FootprintTokens * e.ResidencySeconds
		residencySeconds += weight * e.ResidencySeconds
		pooled += cl.arrivals * e.ResidencySeconds
		arrivals += cl.arrivals
		if neutral := c.cfg.Footprint.NeutralSessions; neutral > 0 {
			confidence = min(confidence, cl.lifetimes.Endings()/neutral)
		}
	}
	if residencySeconds > 0 {
		c.footprintTokens = tokenSeconds / residencySeconds
	}
	if arrivals == 0 {
		return
	}
	neutral := pooled / arrivals
	c.confidence = confidence
	for _, cl := range c.classList {
		cl.shareSeconds = neutral + (cl.tBarSeconds-neutral)*confidence
	}
	c.demandStamp++
}

// sharesOf are the class quotas and caps at an instance, recomputed when demand
// or references changed.
func (c *Core) sharesOf(w *instance) []quota.Share {
	// Both stamps only grow, so their sum changes with either.
	stamp := c.demandStamp + w.demandStamp + 1
	if w.shareStamp == stamp && len(w.shares) == len(c.classList) {
		return w.shares
	}
	w.shareStamp = stamp
	for len(w.shares) < len(c.classList) {
		w.shares = append(w.shares, quota.Share{})
	}
	for i, cl := range c.classList {
		c.demands[i] = quota.Demand{
			Sessions:        int64(c.demand(w, cl)),
			FootprintBlocks: w.blocksOf(cl.kBarTokens),
			ResidencyTenths: int64(min(cl.shareSeconds, 1e9) * 10),
		}
	}
	c.divider.Divide(w.budgetBlocks, c.demands[:len(c.classList)], c.quotaRule, w.shares)
	return w.shares
}

// capDecision says that an instance's cap moved.
func (c *Core) capDecision(w *instance, why Reason) Decision {
	return Decision{Kind: CapChanged, Reason: why, At: c.now, Instance: w.id, Numbers: Numbers{
		BaseCap: w.baseCap, Cap: w.cap, Protected: w.protected(), Pending: w.pending,
		ReservedBlocks: c.reservedNow(w), BudgetBlocks: w.budgetBlocks,
		KBarBlocks: c.footprintTokens / float64(w.blockTokens),
	}}
}
