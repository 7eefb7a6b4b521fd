// Package sim is a discrete-event simulator of a rollout pool: a trainer that
// releases samples, engines that serve their turns, and a routing policy between
// them that sees only what a router would see, late. It runs the very router core
// of this project, and the policies it is compared with, in virtual time.
//
// One run is a function of its Config: equal configurations give equal results,
// down to Result.Fingerprint. All randomness comes from the seed; sessions are
// drawn by sample number, so that two policies under one seed see the same work
// whatever order they serve it in.
//
// Truth and observation are kept apart. The world (engines, sessions, clock)
// is the truth; a policy is told of turns as they are asked and answered, because
// a router passes them on itself, and of everything else through snapshots
// and cache events that are delayed, lost and reordered as configured.
//
// Non-goals: the content of tokens, network bandwidth, and wall-clock time.
package sim
