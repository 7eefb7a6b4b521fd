package router

import (
	"fmt"

	"holdfast/router/prefix"
)

// SessionID names one rollout for its whole life, across turns and restarts.
type SessionID [16]byte

// GroupID names the members of one task, which share its prompt.
type GroupID [16]byte

// InstanceID names one inference engine instance of the pool.
type InstanceID string

// ClassID names a workload class of the contract, such as agent, rlvr or rlhf.
// Classes are data: a run may declare others.
type ClassID string

// Nanos is a point in router time, or a length of it, in nanoseconds. The core
// has no clock: every event carries its time, and time never runs backwards
// inside one core (an earlier stamp is treated as the latest one seen).
type Nanos = int64

// BlockHash is the router's own 64-bit chain hash of one full block: it covers
// the block's token ids, all blocks before it and the policy version's salt.
// prefix.Hasher makes them.
type BlockHash = prefix.Hash

// EndStatus is how a session ended.
type EndStatus uint8

// End statuses. Completed and truncated sessions give training samples; the
// other three are counted apart and are never a reward of zero.
const (
	Completed EndStatus = iota + 1
	Truncated
	Stale
	Failed
	Cancelled
)

// String returns the status as it stands in the store and on the API.
func (s EndStatus) String() string {
	switch s {
	case Completed:
		return "completed"
	case Truncated:
		return "truncated"
	case Stale:
		return "stale"
	case Failed:
		return "failed"
	case Cancelled:
		return "cancelled"
	}
	return fmt.Sprintf("EndStatus(%d)", uint8(s))
}

// ParseEndStatus is the inverse of String.
func ParseEndStatus(text string) (EndStatus, error) {
	for s := Completed; s <= Cancelled; s++ {
		if s.String() == text {
			return s, nil
		}
	}
	return 0, fmt.Errorf("%q is no end status", text)
}

// DecisionKind is the closed set of what the core can decide.
type DecisionKind uint8

// Decision kinds.
const (
	// Admit sends one turn of a session to an instance, now.
	Admit DecisionKind = iota + 1
	// Hold keeps a turn waiting; the session stays in the demand ledger and is
	// re-evaluated by itself at every later event. It is never a rejection.
	Hold
	// ProtectionEnded tells that a session no longer counts against an
	// instance's cap; its next turn must regain admission.
	ProtectionEnded
	// CapChanged tells that an instance's base or current cap moved.
	CapChanged
)

// String returns the kind's name as it stands in stored events.
func (k DecisionKind) String() string {
	switch k {
	case Admit:
		return "admit"
	case Hold:
		return "hold"
	case ProtectionEnded:
		return "protection_ended"
	case CapChanged:
		return "cap_changed"
	}
	return fmt.Sprintf("DecisionKind(%d)", uint8(k))
}

// Reason is the closed set of why a decision fell as it did.
type Reason uint8

// Reasons of Admit.
const (
	// NewSession passed every filter of admission.
	NewSession Reason = iota + 1
	// Continuation is in O or P of the chosen instance.
	Continuation
	// Readmission is a session that had lost its protection and regained it.
	Readmission
	// ColdReroute is a protected session moved because its instance is gone,
	// draining or overflowing, or because waiting costs more than a prefill.
	ColdReroute
)

// Reasons of Hold.
const (
	// NoInstance: no instance is healthy, of the right policy version and large enough.
	NoInstance Reason = iota + 32
	// AtCap: every candidate has as many protected sessions as its cap allows.
	AtCap
	// AtClassCap: the class has used its quota at every candidate with headroom.
	AtClassCap
	// NoBlocks: the reservation does not fit the protected budget anywhere.
	NoBlocks
	// WaitingForWarm: waiting for the instance that holds the prefix is cheaper
	// than a cold prefill elsewhere.
	WaitingForWarm
	// BehindOthers: there is headroom, but sessions ahead in the order take it.
	BehindOthers
	// WaitingForSibling: the first member of the group is still prefilling the
	// shared prompt.
	WaitingForSibling
)

// Reasons of ProtectionEnded and CapChanged.
const (
	// SessionOver: the session ended.
	SessionOver Reason = iota + 64
	// PrefixEvicted: less than half of the prefix was still cached as the next turn came.
	PrefixEvicted
	// InstanceGone: the instance left, or just failed the session's turn.
	InstanceGone
	// LengthsMoved: the base cap follows the footprint estimate.
	LengthsMoved
	// Pressure: the current cap was contracted.
	Pressure
	// Recovery: the current cap took a step back towards the base cap.
	Recovery
	// InstanceChanged: capacity or limits of the instance were announced anew.
	InstanceChanged
	// Outgrown: the session's context no longer fits its instance.
	Outgrown
)

var reasonNames = map[Reason]string{
	NewSession: "new_session", Continuation: "continuation", Readmission: "readmission", ColdReroute: "cold_reroute",
	NoInstance: "no_instance", AtCap: "at_cap", AtClassCap: "at_class_cap", NoBlocks: "no_blocks",
	WaitingForWarm: "waiting_for_warm", BehindOthers: "behind_others", WaitingForSibling: "waiting_for_sibling",
	SessionOver: "session_over", PrefixEvicted: "prefix_evicted", InstanceGone: "instance_gone",
	LengthsMoved: "lengths_moved", Pressure: "pressure", Recovery: "recovery", InstanceChanged: "instance_changed",
	Outgrown: "outgrown",
}

// String returns the reason's name as it stands in stored events.
func (r Reason) String() string {
	if name, ok := reasonNames[r]; ok {
		return name
	}
	return fmt.Sprintf("Reason(%d)", uint8(r))
}
