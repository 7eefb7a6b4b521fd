package router

// Decision is one thing the core decided. Decisions are plain values: the
// caller persists them and then acts on them, in order.
type Decision struct {
	Kind    DecisionKind
	Reason  Reason
	At      Nanos
	Session SessionID
	Class   ClassID
	Turn    int
	// Instance is the one admitted to, lost or changed; for a Hold the best
	// candidate that refused, if any.
	Instance InstanceID
	Numbers  Numbers
}

// Numbers are the quantities a decision was made from, so that "why is this
// session held, why there" can be answered from the stored event alone.
type Numbers struct {
	// BaseCap and Cap are the instance's K_w in sessions; Protected is |O|+|P|
	// and Pending |P| before this decision.
	BaseCap, Cap       int
	Protected, Pending int
	// ClassCap and ClassProtected are the class's cap and use at the instance, in
	// sessions; ClassQuotaBlocks is M_{w,b}. They bind in the modes with classes and
	// are there for information in AdmitSessions.
	ClassCap, ClassProtected int
	ClassQuotaBlocks         int64
	// ReservedBlocks is the sum of reservations (with forecasts: the peak expected
	// within the horizon), ReserveBlocks this session's own
	// k~_s, BudgetBlocks is C_w. Headroom is BudgetBlocks - ReservedBlocks, which
	// may be negative.
	ReservedBlocks, ReserveBlocks, BudgetBlocks int64
	// KBarBlocks and TBarSeconds are the class's references; Demand is N_{w,b}.
	KBarBlocks  float64
	TBarSeconds float64
	Demand      int
	// PromptTokens is L; PredictedCachedTokens is H at Instance.
	PromptTokens, PredictedCachedTokens int64
	// LargestContextTokens is the largest context limit in the pool; a Hold for
	// NoInstance with PromptTokens at or above it needs another instance.
	LargestContextTokens int64
	// CostSeconds is c = d + (L - H) / mu at Instance; QueueSeconds is its d;
	// RunnerUp and RunnerUpCostSeconds are the next best candidate, if any.
	CostSeconds, QueueSeconds float64
	RunnerUp                  InstanceID
	RunnerUpCostSeconds       float64
	// HeldNanos is the time this session has been held so far in this hold;
	// AheadInOrder is the number of sessions before it in the order.
	HeldNanos    Nanos
	AheadInOrder int
}
