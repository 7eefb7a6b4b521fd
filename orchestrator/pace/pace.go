// Package pace says how many more tasks a trainer may release now, per class, so
// that samples stay within the staleness bound, the pool stays busy, and the shares
// of what is released stay those of the contract.
//
// Advise is a pure function of counted and measured figures: it reads no clock and
// remembers nothing, so that equal figures give equal advice, also after a restart.
// It releases nothing itself, and a trainer is free to do otherwise. It never gives
// one class less of its share in order to give another one more: the tightest class
// limits them all.
package pace

import "math"

// Factor is the closed set of what bounds an advice.
type Factor int

// Factors. ColdStart: too little was measured so far.
const (
	ColdStart Factor = iota + 1
	Staleness
	Undelivered
	Backlog
	Ended
)

// String returns the factor's name on the wire.
func (f Factor) String() string {
	switch f {
	case ColdStart:
		return "cold_start"
	case Staleness:
		return "staleness"
	case Undelivered:
		return "undelivered"
	case Backlog:
		return "backlog"
	case Ended:
		return "ended"
	}
	return "unknown"
}

const (
	// HorizonShare is the part of the time to the bound that is counted on: rates and
	// intervals are means, and work that ends late is lost.
	HorizonShare = 0.7
	// ColdStartUnits of each class are released before anything was measured.
	ColdStartUnits = 8
	// LeastEnded is how many endings make a rate or a latency.
	LeastEnded = 8
	// StallSeconds without an ending, with nothing outstanding, tell before the first
	// version that the trainer waits.
	StallSeconds = 30.0
	// MostSessions bounds one advice.
	MostSessions = 20_000
)

// Class is what is known of one class of the contract. Counts are sessions.
type Class struct {
	Name string
	// Share is rho.
	Share float64
	// Released counts from when the present shares came into force.
	Released int64
	// Outstanding were released and have not ended: Q.
	Outstanding int64
	// EndedInWindow ended in the window that BusySeconds measures.
	EndedInWindow int64
	// ServiceP99Seconds runs from first admission to end.
	ServiceP99Seconds float64
}

// State is what is known of a run and its pool.
type State struct {
	Classes []Class
	// RunEnded: nothing can be released.
	RunEnded       bool
	MaxConcurrency int64
	// Held wait for admission, UnderWay are dispatched and not held.
	Held, UnderWay int64
	// StalenessBound is eta in policy versions, nil for none.
	StalenessBound *int
	// VersionSeconds is the mean time between policy versions, 0 if unknown;
	// VersionAgeSeconds the time since the present one came into force.
	VersionSeconds    float64
	VersionAgeSeconds float64
	// BusySeconds of the window had a session under way; ServiceMeanSeconds is the mean
	// time from first admission to end in it.
	BusySeconds, ServiceMeanSeconds float64
	// SecondsSinceEnded is the time since the last ending.
	SecondsSinceEnded float64
	// Unacknowledged are usable samples that the furthest consumer has not
	// acknowledged; StepSamples what it acknowledged between two versions at most, 0
	// if unknown.
	Unacknowledged int64
	StepSamples    int64
	// Undelivered are samples of any status that wait for the slowest consumer, which
	// UndeliveredLimit bounds; 0 for no limit.
	Undelivered, UndeliveredLimit int64
}

// Ask is what a trainer tells of itself.
type Ask struct {
	// GroupSize and SpareMembers make the unit that is released together.
	GroupSize, SpareMembers int64
	// StepSamples is how many usable samples one step consumes, 0 if it is to be
	// measured.
	StepSamples int64
	// AskAgainSeconds is how long the advice must keep the pool busy.
	AskAgainSeconds float64
}

// ClassAdvice is the advice for one class.
type ClassAdvice struct {
	Name     string
	Sessions int64
	// Groups of the unit make up Sessions.
	Groups int64
}

// Advice says what may be released now, and what it follows from. A room that is
// nil does not bind.
type Advice struct {
	Classes  []ClassAdvice
	Sessions int64
	// Limit is the tightest factor, LimitClass the class that makes it so tight,
	// empty for all of them together.
	Limit      Factor
	LimitClass string
	// StalenessRoom, UndeliveredRoom and BacklogRoom are in sessions; the smallest
	// counts.
	StalenessRoom, UndeliveredRoom, BacklogRoom *int64
	// Idle: one unit is advised although a room is smaller, since nothing is
	// outstanding and the trainer waits.
	Idle bool
	// HorizonSeconds is the time until what is released now would be too stale,
	// nil if unknown.
	HorizonSeconds *float64
	// EndingsPerSecond while busy, 0 if unknown.
	EndingsPerSecond float64
	// TargetBacklog is what should be outstanding.
	TargetBacklog int64
	StepSamples   int64
}

// Advise returns what may be released now.
//
// The total is the smallest of three rooms, of which the derivation is our own:
//
//	staleness    min over b of min(mu h' s / s99_b - Q, (mu_b h + u - Q_b) / rho_b),
//	             h = 0.7 ((eta+1) tau - age), h' = min(h, 0.7 max(1, eta) tau)
//	undelivered  ((eta+1) B - U) (g+s)/g - Q, and what the contract's undelivered_limit leaves
//	backlog      K + mu a - Q
//
// What is released now is generated at the present version or a later one, and is
// within the bound if it ends before eta+1 more versions have come: in (eta+1) tau -
// age seconds, if versions come every tau seconds and the present one is age seconds
// old. Until then mu h sessions end, and Q of them are outstanding already. But those
// that take long must end as well: with n under way on a pool that is shared, a session
// takes n/mu on the mean (Little's law), and the p99 of class b takes s99_b/s times as
// long, which is to be less than h. Since whatever is released later slows down what is
// under way, h' is the least that a session has left if it is released at the end of a
// version. A class that piles up limits all classes, so that shares stay rho; u, one
// unit, is rounding.
//
// The second room is the same bound counted in samples instead of seconds, as in
// AReaL (arXiv 2505.24298, section 5.1: N_r <= (i + eta + 1) B): B samples make a
// step, U wait to be acknowledged. K is what the pool works at, a the time until the
// trainer asks again; g and s are size and spare members of a group.
//
// A trainer that waits for samples makes no versions. So with nothing outstanding one
// unit is always advised if nothing waits for it either, or the version is overdue.
func Advise(state *State, ask Ask) Advice {
	unit := ask.GroupSize + ask.SpareMembers
	a := Advice{Classes: make([]ClassAdvice, len(state.Classes)), StepSamples: ask.StepSamples}
	for i := range state.Classes {
		a.Classes[i].Name = state.Classes[i].Name
	}
	if state.RunEnded {
		a.Limit = Ended
		return a
	}
	if a.StepSamples == 0 {
		a.StepSamples = state.StepSamples
	}
	r := reading{State: state, ask: ask, unit: unit, step: a.StepSamples}
	r.measure()
	a.EndingsPerSecond = r.perSecond
	total := r.rooms(&a)
	if total < unit && r.idle() {
		total, a.Idle = unit, true
	}
	a.Sessions = apportion(state.Classes, unit, min(total, MostSessions), a.Classes)
	return a
}

// reading is a state with what follows from it.
type reading struct {
	*State
	ask         Ask
	unit, step  int64
	outstanding int64
	perSecond   float64
}

func (r *reading) measure() {
	var ended int64
	for i := range r.Classes {
		r.outstanding += r.Classes[i].Outstanding
		ended += r.Classes[i].EndedInWindow
	}
	if ended >= LeastEnded && r.BusySeconds > 0 {
		r.perSecond = float64(ended) / r.BusySeconds
	}
}

// rooms fills in the rooms and returns the smallest, at least 0.
func (r *reading) rooms(a *Advice) int64 {
	backlog, factor := r.backlogRoom(a)
	a.BacklogRoom = &backlog
	least := backlog
	a.Limit = factor
	if room, ok := r.undeliveredRoom(); ok {
		a.UndeliveredRoom = &room
		if room <= least {
			least, a.Limit = room, Undelivered
		}
	}
	if room, class, ok := r.stalenessRoom(a); ok {
		a.StalenessRoom = &room
		if room <= least {
			least, a.Limit, a.LimitClass = room, Staleness, class
		}
	}
	return least
}

// backlogRoom is what the pool can use until it is asked again.
func (r *reading) backlogRoom(a *Advice) (room int64, factor Factor) {
	factor = Backlog
	target := float64(r.MaxConcurrency)
	switch clockless := r.StalenessBound != nil && r.VersionSeconds == 0; {
	case r.perSecond == 0 || clockless:
		factor = ColdStart
		first := float64(r.unit * ColdStartUnits * int64(len(r.Classes)))
		if r.StalenessBound != nil && r.step > 0 {
			// More than one step would share the pool for longer than a version lasts.
			first = max(0, r.inSessions(r.step-r.Unacknowledged))
		}
		target = min(target, first)
	case r.Held > 0:
		// The pool works at what it can; what is held only gets older.
		target = float64(r.UnderWay) + r.perSecond*r.ask.AskAgainSeconds
	default:
		target += r.perSecond * r.ask.AskAgainSeconds
	}
	a.TargetBacklog = whole(target)
	return max(0, a.TargetBacklog-r.outstanding), factor
}

// undeliveredRoom counts steps instead of seconds; ok is false where nothing bounds.
func (r *reading) undeliveredRoom() (room int64, ok bool) {
	if r.StalenessBound != nil && r.step > 0 {
		room, ok = whole(r.inSessions(int64(*r.StalenessBound+1)*r.step-r.Unacknowledged))-r.outstanding, true
	}
	if r.UndeliveredLimit > 0 {
		left := r.UndeliveredLimit - r.Undelivered - r.outstanding
		if !ok || left < room {
			room, ok = left, true
		}
	}
	return max(0, room), ok
}

// inSessions is how many sessions are released for that many usable samples.
func (r *reading) inSessions(samples int64) float64 {
	return float64(samples) * float64(r.unit) / float64(r.ask.GroupSize)
}

// remaining is the time until the bound, in seconds.
func (r *reading) remaining() float64 {
	return max(0, float64(*r.StalenessBound+1)*r.VersionSeconds-r.VersionAgeSeconds)
}

// stalenessRoom is what can yet end before the bound, and the class that says so;
// ok is false where nothing bounds or nothing is known.
func (r *reading) stalenessRoom(a *Advice) (room int64, class string, ok bool) {
	if r.StalenessBound == nil || r.VersionSeconds == 0 || r.perSecond == 0 {
		return 0, "", false
	}
	remaining := r.remaining()
	a.HorizonSeconds = &remaining
	if remaining == 0 {
		return 0, "", true
	}
	horizon := remaining * HorizonShare
	shared := min(horizon, HorizonShare*float64(max(1, *r.StalenessBound))*r.VersionSeconds)
	least := r.perSecond*horizon - float64(r.outstanding)
	limit := func(c *Class, room float64) {
		if room < least {
			least, class = room, c.Name
		}
	}
	for i := range r.Classes {
		c := &r.Classes[i]
		if c.Share == 0 {
			continue
		}
		perSecond := c.Share * r.perSecond
		if c.EndedInWindow >= LeastEnded {
			perSecond = float64(c.EndedInWindow) / r.BusySeconds
			if c.ServiceP99Seconds > r.ServiceMeanSeconds {
				limit(c, r.perSecond*shared*r.ServiceMeanSeconds/c.ServiceP99Seconds-float64(r.outstanding))
			}
		}
		limit(c, (perSecond*horizon+float64(r.unit)-float64(c.Outstanding))/c.Share)
	}
	return max(0, whole(least)), class, true
}

// idle tells that the trainer waits for what it is not advised to release.
func (r *reading) idle() bool {
	if r.outstanding > 0 {
		return false
	}
	if r.Unacknowledged == 0 {
		return true
	}
	if r.StalenessBound != nil && r.VersionSeconds > 0 {
		return r.remaining() == 0
	}
	return r.SecondsSinceEnded >= StallSeconds
}

// whole rounds down, and keeps what is beyond every bound within an int64.
func whole(x float64) int64 { return int64(math.Floor(max(-1e15, min(x, 1e15)))) }
