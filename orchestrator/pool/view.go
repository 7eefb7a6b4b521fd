package pool

import (
	"cmp"
	"context"
	"slices"

	"holdfast/router"
)

// Bounds of what a View shows.
const (
	viewHeld   = 1_000
	viewRecent = 200
)

// View is what an operator sees of a pool's router.
type View struct {
	Report router.Report
	// Held explains held turns, longest held first, at most 1,000 of HeldTotal.
	Held      []router.Decision
	HeldTotal int
	// Recent holds the latest decisions, newest first.
	Recent []router.Decision
	// Text is the core's whole state in its stable text form.
	Text string
}

// View looks at the core between two commands. It costs a walk over all sessions.
func (l *Loop) View(ctx context.Context) (View, error) {
	return look(ctx, l, func() View {
		v := View{Report: l.core.Report(), Text: l.core.Describe(), Recent: l.recent.newestFirst()}
		for session, state := range l.turns {
			if state.placement.Admitted {
				continue
			}
			if d, known := l.core.Explain(session); known && d.Kind == router.Hold {
				v.Held = append(v.Held, d)
			}
		}
		v.HeldTotal = len(v.Held)
		slices.SortFunc(v.Held, func(a, b router.Decision) int {
			if c := cmp.Compare(b.Numbers.HeldNanos, a.Numbers.HeldNanos); c != 0 {
				return c
			}
			return slices.Compare(a.Session[:], b.Session[:])
		})
		v.Held = v.Held[:min(len(v.Held), viewHeld)]
		return v
	})
}

// history keeps the latest decisions in a ring.
type history struct {
	ring []router.Decision
	next int
}

func (h *history) add(d router.Decision) {
	if len(h.ring) < viewRecent {
		h.ring = append(h.ring, d)
		return
	}
	h.ring[h.next] = d
	h.next = (h.next + 1) % viewRecent
}

func (h *history) newestFirst() []router.Decision {
	ordered := append(slices.Clone(h.ring[h.next:]), h.ring[:h.next]...)
	slices.Reverse(ordered)
	return ordered
}
