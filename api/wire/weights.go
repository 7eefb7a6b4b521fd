package wire

import "time"

// NewWeightUpdate begins an update of a pool's weights.
type NewWeightUpdate struct {
	PolicyVersion       int64   `json:"policy_version" minimum:"1" maximum:"9007199254740991" doc:"Greater than the pool's current one."`
	Mode                string  `json:"mode" enum:"abort,wait,keep,in_place" doc:"What happens to generations under way. abort ends them: their sessions go on from what they had, under the new weights. wait lets them finish first. keep freezes them and computes their cache anew afterwards; in_place freezes them with the cache of the old weights."`
	Cache               string  `json:"cache,omitzero" enum:"reset,salt" default:"reset" doc:"How prefixes of the old weights are kept from being used: reset empties the engines' caches, salt gives requests a cache salt of the new version. With mode in_place it must be salt."`
	Control             string  `json:"control,omitzero" enum:"manage,observe" default:"manage" doc:"observe: the trainer pauses, resets and resumes the engines itself; nothing is asked of them."`
	PauseTimeoutSeconds float64 `json:"pause_timeout_seconds,omitzero" minimum:"0.001" maximum:"86400" default:"300" doc:"How long an engine may take to pause before it counts as refusing."`
}

// CommitWeights brings a version into force.
type CommitWeights struct {
	Cache string `json:"cache,omitzero" enum:"reset,salt" doc:"Replaces what was chosen at the beginning, as when an engine cannot empty its cache."`
}

// WeightUpdate is one entry of a pool's history of policy versions.
type WeightUpdate struct {
	Pool                string     `json:"pool"`
	PolicyVersion       int64      `json:"policy_version"`
	FromVersion         int64      `json:"from_version" doc:"In force when it began."`
	Source              string     `json:"source" enum:"requested,announced,observed" doc:"Begun and committed here, told by PUT policy, or reported by an engine unasked."`
	Mode                string     `json:"mode,omitzero" doc:"Absent unless it was requested."`
	Cache               string     `json:"cache" enum:"reset,salt"`
	Control             string     `json:"control" enum:"manage,observe"`
	State               string     `json:"state" enum:"pausing,paused,committing,committed,cancelling,cancelled,failed" doc:"paused: load the weights, then commit. failed: some engines refused failed_step; see instances and ask again."`
	FailedStep          string     `json:"failed_step,omitzero" enum:"pause,commit,resume,cancel" doc:"pause: begin, commit or cancel again. commit: commit or cancel again. resume: the version is in force; commit again. cancel: cancel again."`
	Problem             string     `json:"problem,omitzero"`
	Attempt             int        `json:"attempt" doc:"Counts what was asked of it, from 1."`
	PauseTimeoutSeconds float64    `json:"pause_timeout_seconds,omitzero"`
	SessionsOverBound   int        `json:"sessions_over_bound" doc:"Sessions under way that were older than their contract's staleness bound when the version came into force."`
	SessionsEnded       int        `json:"sessions_ended" doc:"Of these, asked to end as stale; the others go on."`
	BeganAt             time.Time  `json:"began_at"`
	ChangedAt           time.Time  `json:"changed_at"`
	AdvancedAt          *time.Time `json:"advanced_at,omitzero" doc:"When the version came into force."`
	// Instances by name, as far as the update has met them.
	Instances []WeightInstance `json:"instances" nullable:"false"`
	Gone      int              `json:"gone" doc:"Instances that left or fell silent and are not waited for."`
}

// WeightInstance is one instance's place in an update.
type WeightInstance struct {
	Instance  string    `json:"instance"`
	State     string    `json:"state" enum:"pending,paused,prepared,resumed,refused,gone,observed" doc:"prepared: its cache is parted with and its weights are named."`
	Reached   string    `json:"reached" enum:"pending,paused,prepared,resumed" doc:"How far it came before it refused or left."`
	Problem   string    `json:"problem,omitzero"`
	ChangedAt time.Time `json:"changed_at"`
}

// WeightUpdatePage is a piece of a pool's history, newest first.
type WeightUpdatePage struct {
	Pool    string         `json:"pool"`
	Updates []WeightUpdate `json:"updates" nullable:"false"`
	Next    int64          `json:"next,omitzero" doc:"The before parameter of the following page; absent on the last one."`
}
