package router

// Candidate is one instance that admission lets pass, as a placement policy
// sees it.
type Candidate struct {
	Instance InstanceID
	// CostSeconds is d_w + (L - H_w) / mu_w, QueueSeconds its d_w.
	CostSeconds, QueueSeconds float64
	// CachedTokens is H_w.
	CachedTokens int64
	// Protected and Cap in sessions, ReservedBlocks and BudgetBlocks: how full it is.
	Protected, Cap               int
	ReservedBlocks, BudgetBlocks int64
	// InFlight is the number of turns that have been sent and have not ended.
	InFlight int
	// LastAdmission orders instances by when they last took a session, oldest first.
	LastAdmission uint64
}

// Request is the turn to place.
type Request struct {
	Session      SessionID
	Class        ClassID
	Turn         int
	PromptTokens int64
	// SlackSeconds is the configured width of a tie.
	SlackSeconds float64
}

// Placement is a policy that chooses one of at least one candidates, by index.
// It must be a pure function. Candidates come ordered by instance id.
type Placement struct {
	Name   string
	Choose func(r *Request, candidates []Candidate) int
}

// LowestCost takes the lowest c = d + (L - H) / mu. Among costs within the slack
// it takes the instance with the smallest share of its budget reserved, then the
// one that has waited longest for a session, so that ties go round.
var LowestCost = Placement{Name: "lowest_cost", Choose: func(r *Request, candidates []Candidate) int {
	lowest := candidates[0].CostSeconds
	for i := range candidates {
		lowest = min(lowest, candidates[i].CostSeconds)
	}
	best := -1
	for i := range candidates {
		c := &candidates[i]
		if c.CostSeconds > lowest+r.SlackSeconds {
			continue
		}
		if best < 0 || c.emptierThan(&candidates[best]) {
			best = i
		}
	}
	return best
}}

// LeastLoaded takes the instance with the fewest turns in flight, whatever is
// cached where.
var LeastLoaded = Placement{Name: "least_loaded", Choose: func(_ *Request, candidates []Candidate) int {
	best := 0
	for i := range candidates {
		c, b := &candidates[i], &candidates[best]
		if c.InFlight < b.InFlight || c.InFlight == b.InFlight && c.LastAdmission < b.LastAdmission {
			best = i
		}
	}
	return best
}}

func (c *Candidate) emptierThan(o *Candidate) bool {
	mine := float64(c.ReservedBlocks) / float64(max(1, c.BudgetBlocks))
	other := float64(o.ReservedBlocks) / float64(max(1, o.BudgetBlocks))
	if mine != other {
		return mine < other
	}
	return c.LastAdmission < o.LastAdmission
}
