package router

// Event is one thing the core is told. The concrete types below are the closed
// set; they are passed by pointer so that a caller can reuse them, and the core
// keeps no reference to an event or to a slice inside it after Step returns.
type Event interface{ at() Nanos }

// InstanceJoined announces an instance, or announces a known one anew (a changed
// capacity, policy version or limit; its sessions and locations stay).
type InstanceJoined struct {
	At       Nanos
	Instance InstanceID
	// CapacityBlocks is the KV cache size in blocks of BlockTokens tokens.
	CapacityBlocks int64
	BlockTokens    int
	// MaxContextTokens bounds prompt plus output of one session there.
	MaxContextTokens int64
	// MaxRunning is the engine's own limit on requests in one batch, 0 if unknown. It
	// is for the record: a limit that binds shows as a queue, which counts as pressure.
	MaxRunning int
	// PrefillTokensPerSecond is a prior for mu until turns have been measured.
	PrefillTokensPerSecond float64
	PolicyVersion          int64
}

// InstanceLeft tells that an instance is gone, with its cache.
type InstanceLeft struct {
	At       Nanos
	Instance InstanceID
}

// InstanceDraining starts or ends draining: no new sessions, continuations pass.
type InstanceDraining struct {
	At       Nanos
	Instance InstanceID
	Draining bool
}

// InstanceReset tells that the instance's cache was cleared (weight sync,
// restart in place) while its sessions live on.
type InstanceReset struct {
	At            Nanos
	Instance      InstanceID
	PolicyVersion int64
}

// TurnRequested asks where a turn may run. Exactly one Admit follows for it, in
// the same Step or, after Hold decisions, in a later one; asking again for the
// same turn while it is held or admitted and not yet ended is idempotent.
type TurnRequested struct {
	At      Nanos
	Session SessionID
	Class   ClassID
	// Group is the zero value for a task of one member.
	Group GroupID
	// Turn counts model calls of the session from 0.
	Turn int
	// PromptTokens is L: all context tokens sent with this turn.
	PromptTokens int64
	// SharedTokens is the length of the prefix that group members share.
	SharedTokens int64
	// ExpectedOutputTokens is the caller's limit on this turn's output, 0 if unknown.
	// It is for the record: a limit is no forecast, and the core decides nothing by it.
	ExpectedOutputTokens int64
	// KnownBlocks full blocks of the context were passed with earlier turns of
	// this session; NewBlocks are the chain hashes of the full blocks after them.
	// A caller without token ids passes none: the session ledger alone then serves.
	KnownBlocks int
	NewBlocks   []BlockHash
	// Deadline and FreshBy are the trainer's wishes, 0 for none. They order the
	// waiting within a class; they never change the mixture nor drop a task.
	Deadline Nanos
	FreshBy  Nanos
	// Avoid names an instance that just failed this turn, if any.
	Avoid InstanceID
}

// TurnStarted tells that the engine began to answer (first token seen).
type TurnStarted struct {
	At      Nanos
	Session SessionID
	Turn    int
}

// TurnEnded tells how an admitted turn went. The session stays protected.
type TurnEnded struct {
	At       Nanos
	Session  SessionID
	Turn     int
	Instance InstanceID
	// CachedTokens of the prompt came from the prefix cache; -1 if not reported.
	PromptTokens int64
	CachedTokens int64
	OutputTokens int64
	// QueueNanos and PrefillNanos are as measured, 0 if unknown.
	QueueNanos   Nanos
	PrefillNanos Nanos
	// Failed: the instance did not answer; the turn will be asked again.
	Failed bool
}

// SessionEnded releases everything the session holds, held or admitted.
type SessionEnded struct {
	At      Nanos
	Session SessionID
	Status  EndStatus
}

// SnapshotSession is one session in an instance's snapshot.
type SnapshotSession struct {
	Session SessionID
	// Tokens of context observed so far, and the blocks of it still cached (-1 unknown).
	Tokens       int64
	CachedBlocks int64
	Running      bool
}

// Snapshot is an instance's session ledger and load as seen at TakenAt, which
// may lie well before At. Snapshots may be lost, late and out of order; an older
// one than the last applied is ignored.
type Snapshot struct {
	At       Nanos
	TakenAt  Nanos
	Instance InstanceID
	Sessions []SnapshotSession
	// Running and Waiting are the engine's request counts, UsedBlocks its KV use.
	Running    int
	Waiting    int
	UsedBlocks int64
	// Preemptions is the engine's running total.
	Preemptions int64
}

// BlocksStored and BlocksRemoved keep the prefix index in step with an
// instance's cache, per data-parallel rank and cache group.
type BlocksStored struct {
	At       Nanos
	Instance InstanceID
	Rank     int
	Group    int
	Blocks   []BlockHash
}

// BlocksRemoved drops locations; see BlocksStored.
type BlocksRemoved struct {
	At       Nanos
	Instance InstanceID
	Rank     int
	Group    int
	Blocks   []BlockHash
}

// BlocksCleared drops every location of one instance (all ranks and groups).
type BlocksCleared struct {
	At       Nanos
	Instance InstanceID
}

// Observability is how much the service sees of an instance.
type Observability uint8

// Observability states: fresh trusts snapshots; degraded freezes caps and uses
// the router's own ledger; blind does so without snapshots or index at all.
const (
	Fresh Observability = iota
	Degraded
	Blind
)

// ObservabilityChanged tells that an instance's observations went stale or recovered.
type ObservabilityChanged struct {
	At       Nanos
	Instance InstanceID
	State    Observability
}

// SessionRestored rebuilds the ledger after a failover, before any other event
// of that session: an admitted session keeps its instance and protection, a held
// one its place in the order. Restore all sessions before the next event of
// another kind; it is the one that admits held sessions again.
type SessionRestored struct {
	At           Nanos
	Session      SessionID
	Class        ClassID
	Group        GroupID
	Turn         int
	PromptTokens int64
	SharedTokens int64
	// Instance is where the session was admitted, empty if it was held.
	Instance   InstanceID
	AdmittedAt Nanos
	HeldSince  Nanos
	// ResidencyNanos is the residency gathered in earlier admissions.
	ResidencyNanos Nanos
	// InFlight: a turn was at the engine when the owner died.
	InFlight bool
}

// Tick lets time pass: windows roll, caps recover, held sessions are re-evaluated.
type Tick struct{ At Nanos }

func (e *InstanceJoined) at() Nanos       { return e.At }
func (e *InstanceLeft) at() Nanos         { return e.At }
func (e *InstanceDraining) at() Nanos     { return e.At }
func (e *InstanceReset) at() Nanos        { return e.At }
func (e *TurnRequested) at() Nanos        { return e.At }
func (e *TurnStarted) at() Nanos          { return e.At }
func (e *TurnEnded) at() Nanos            { return e.At }
func (e *SessionEnded) at() Nanos         { return e.At }
func (e *Snapshot) at() Nanos             { return e.At }
func (e *BlocksStored) at() Nanos         { return e.At }
func (e *BlocksRemoved) at() Nanos        { return e.At }
func (e *BlocksCleared) at() Nanos        { return e.At }
func (e *ObservabilityChanged) at() Nanos { return e.At }
func (e *SessionRestored) at() Nanos      { return e.At }
func (e *Tick) at() Nanos                 { return e.At }
