package store

import "time"

// residency accounts for the time a session commits KV space of an engine: from
// its admission until it is held again, loses its protection or ends, tool gaps
// included.
type residency struct {
	// admittedAt is the start of the present admission, nil while there is none.
	admittedAt *time.Time
	// seconds were gathered in earlier admissions.
	seconds float64
	// tokenSeconds integrates contextTokens over the residency up to tokenMark.
	tokenSeconds  float64
	tokenMark     *time.Time
	contextTokens int64
}

// start begins an admission unless one is under way.
func (r *residency) start(at time.Time) {
	if r.admittedAt == nil {
		r.admittedAt, r.tokenMark = &at, &at
	}
}

// stop ends the present admission, if any.
func (r *residency) stop(at time.Time) {
	if r.admittedAt == nil {
		return
	}
	r.seconds += secondsBetween(*r.admittedAt, at)
	r.tokenSeconds += secondsBetween(*r.tokenMark, at) * float64(r.contextTokens)
	r.admittedAt, r.tokenMark = nil, nil
}

// secondsBetween never is negative: the router's clock and the database's differ
// by a little.
func secondsBetween(from, to time.Time) float64 {
	return max(0, to.Sub(from).Seconds())
}
