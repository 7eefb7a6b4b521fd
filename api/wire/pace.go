package wire

import (
	"time"

	"github.com/google/uuid"
)

// ClassPace is what may be released of one class now.
type ClassPace struct {
	Class             string  `json:"class"`
	ReleaseSessions   int64   `json:"release_sessions" doc:"How many more sessions may be released now, spare members included."`
	ReleaseGroups     int64   `json:"release_groups" doc:"The same in tasks of group_size members."`
	Rho               float64 `json:"rho" doc:"Target share of the current contract."`
	Released          int64   `json:"released" doc:"Sessions released since the contract's shares became what they are."`
	ReleasedShare     float64 `json:"released_share"`
	Backlog           int64   `json:"backlog" doc:"Q: sessions released and not ended."`
	EndedInWindow     int64   `json:"ended_in_window" doc:"Sessions among the run's last 1,000 endings of the last half hour."`
	ServiceP99Seconds float64 `json:"service_p99_seconds" doc:"Of those, from first admission to end."`
}

// Pace says how many more sessions may be released now, so that samples stay within
// the staleness bound, the pool stays busy and the shares of what is released stay
// rho. Following it is up to the trainer; nothing is refused for not following it.
type Pace struct {
	Run             uuid.UUID   `json:"run" format:"uuid"`
	At              time.Time   `json:"at"`
	PolicyVersion   int64       `json:"policy_version" doc:"The pool's."`
	ReleaseSessions int64       `json:"release_sessions" doc:"Sum over the classes."`
	Classes         []ClassPace `json:"classes" nullable:"false"`
	LimitedBy       string      `json:"limited_by" enum:"cold_start,staleness,undelivered,backlog,ended" doc:"The tightest of the rooms: staleness (more could not end before it is too old), undelivered (enough waits for the trainer), backlog (the pool has enough to do), cold_start (too little was measured yet to allow more than a first wave), ended (the run has ended)."`
	LimitedByClass  string      `json:"limited_by_class,omitzero" doc:"The class whose endings limit all classes, since advice never changes the shares."`
	Idle            bool        `json:"idle,omitzero" doc:"One group is advised beyond the rooms: nothing is outstanding and the trainer waits."`
	Why             string      `json:"why" doc:"The same for people, with the numbers."`

	StalenessRoomSessions   *int64 `json:"staleness_room_sessions,omitzero" doc:"Absent where nothing bounds it or too little is known."`
	UndeliveredRoomSessions *int64 `json:"undelivered_room_sessions,omitzero" doc:"Absent where nothing bounds it."`
	BacklogRoomSessions     *int64 `json:"backlog_room_sessions,omitzero"`

	TargetBacklogSessions int64    `json:"target_backlog_sessions" doc:"What should be outstanding to keep the pool busy until the trainer asks again."`
	StalenessBound        *int     `json:"staleness_bound,omitzero" doc:"eta, in policy versions; absent means unbounded."`
	HorizonSeconds        *float64 `json:"horizon_seconds,omitzero" doc:"Until more than staleness_bound further versions are expected."`
	VersionSeconds        float64  `json:"version_seconds" doc:"Mean time between the pool's last versions; 0 before the second."`
	VersionAgeSeconds     float64  `json:"version_age_seconds" doc:"How long the present version is in force, or since the run's first release."`
	EndingsPerSecond      float64  `json:"endings_per_second" doc:"Of all classes, over the time in which any session was under way; 0 if too few have ended."`
	StepSamples           int64    `json:"step_samples" doc:"Usable samples of one step: as asked, or the most that was acknowledged between two versions; 0 if unknown."`
	UnacknowledgedSamples int64    `json:"unacknowledged_samples" doc:"Usable samples that the furthest consumer has not acknowledged."`
	GroupSize             int64    `json:"group_size"`
	SpareMembers          int64    `json:"spare_members" doc:"Released with each group; the contract's."`
}
