package sim

import (
	"holdfast/router"
	"holdfast/router/sim/workload"
)

// Policy is what the simulator drives: the router core's own contract. It is
// told events, each with its time, and appends decisions to out. Only Admit
// changes the world; CapChanged is recorded; the rest is for the reader.
//
// A policy must answer every TurnRequested with exactly one Admit, then or later.
type Policy interface {
	Step(ev router.Event, out []router.Decision) []router.Decision
}

// Wants says which observations a policy reads, so that a run does not pay for
// those that nobody looks at.
type Wants struct {
	Snapshots bool
	Blocks    bool
	// TickSeconds is the period of Tick events, 0 for none.
	TickSeconds float64
}

// Spec names a policy and makes one for a run.
type Spec struct {
	Name  string
	Wants Wants
	// New makes a policy in its initial state. Only an oracle may read the truth.
	New func(Truth) (Policy, error)
}

// Truth is what no router can know: the future of a session. It exists for the
// oracle that other policies are measured against.
type Truth interface {
	// Session reports the future of a session that has not ended.
	Session(id router.SessionID) TrueSession
	// CachedTokens is how much of a session's context an instance has cached now.
	CachedTokens(id router.SessionID, at router.InstanceID) int
	// SecondsPerToken is the duration of a decode step of an instance as it is now.
	SecondsPerToken(at router.InstanceID) float64
}

// TrueSession is the future of one session at one time.
type TrueSession struct {
	// ContextTokens is what it holds now; Turns are those not yet finished, and
	// DoneTokens is how much of the first of them is generated.
	ContextTokens int
	Turns         []workload.Turn
	DoneTokens    int
}
