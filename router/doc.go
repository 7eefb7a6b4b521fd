// Package router decides which session of a shared pool is admitted to which
// inference engine and which one is held: MISA-T (arXiv 2608.11152), admission as
// a commitment of KV space over time, shared between workload classes without
// changing the trainer's task mixture.
//
// The package is pure: Step takes an event that carries its own time and returns
// decisions. There is no clock, goroutine, lock, input or output, log or random
// source here, and map order never reaches a decision, so equal events give equal
// decisions, in the service and in the simulator alike.
//
// It does not create, drop, relabel or reorder away a task, does not talk to
// engines, and changes nothing inside them.
package router
