package pool

import "holdfast/router"

// stamp gives an event the time at which the core sees it. When it happened, where
// that matters, is a field of its own (Snapshot.TakenAt, SessionRestored.AdmittedAt).
func stamp(event router.Event, now router.Nanos) {
	switch e := event.(type) {
	case *router.InstanceJoined:
		e.At = now
	case *router.InstanceLeft:
		e.At = now
	case *router.InstanceDraining:
		e.At = now
	case *router.InstanceReset:
		e.At = now
	case *router.TurnRequested:
		e.At = now
	case *router.TurnStarted:
		e.At = now
	case *router.TurnEnded:
		e.At = now
	case *router.SessionEnded:
		e.At = now
	case *router.Snapshot:
		e.At = now
	case *router.BlocksStored:
		e.At = now
	case *router.BlocksRemoved:
		e.At = now
	case *router.BlocksCleared:
		e.At = now
	case *router.ObservabilityChanged:
		e.At = now
	case *router.SessionRestored:
		e.At = now
	case *router.Tick:
		e.At = now
	}
}
