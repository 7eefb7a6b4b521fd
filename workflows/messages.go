package workflows

import "encoding/json"

// SessionInput starts a session's workflow, or continues it as new. It carries
// references and counts only; the task, the transcript and the placement are rows.
type SessionInput struct {
	Session string `json:"session"`
	// Turn is the next turn to run, counted from 0.
	Turn int `json:"turn,omitempty"`
	// Admitted is true when the session still holds its admission, so that the
	// turn's activity may ask for placement directly.
	Admitted bool `json:"admitted,omitempty"`
	// Stepped is true when the session has an environment that is to be released.
	Stepped bool `json:"stepped,omitempty"`
}

// Grant is the payload of GrantSignal.
type Grant struct {
	Turn int `json:"turn"`
}

// TurnRef names one turn of one session: the input of admit and turn activities.
type TurnRef struct {
	Session string `json:"session"`
	Turn    int    `json:"turn"`
}

// StepRef names one step of a session's environment: 0 is the reset, n answers the
// message of turn n-1. It is the input of step activities, which answer with a
// TurnReply: more, or over.
type StepRef struct {
	Session string `json:"session"`
	Step    int    `json:"step"`
}

// Outcome is the closed set of what an admit, turn or step activity can answer.
type Outcome string

// Outcomes.
const (
	// OutcomeAdmitted: the turn may run now.
	OutcomeAdmitted Outcome = "admitted"
	// OutcomeHeld: the router keeps the turn; a grant will be signalled.
	OutcomeHeld Outcome = "held"
	// OutcomeMore: the turn is committed and another follows after Gap.
	OutcomeMore Outcome = "more"
	// OutcomeStep: the turn is committed, and the environment is to answer it.
	OutcomeStep Outcome = "step"
	// OutcomeOver: no further turn; Status says how the session ends.
	OutcomeOver Outcome = "over"
	// OutcomeOutside: a harness runs the session's loop, and turns do not pass
	// through the workflow.
	OutcomeOutside Outcome = "outside"
)

// AdmitReply answers an admit activity.
type AdmitReply struct {
	Outcome Outcome `json:"outcome"`
	// Turn is where to go on, with OutcomeAdmitted and OutcomeHeld: the one asked
	// for, or the last committed one when the workflow had fallen behind the store.
	Turn int `json:"turn"`
	// Stepped: the session has an environment, whose reset comes before turn 0.
	Stepped bool `json:"stepped,omitempty"`
	// Status and Problem are set with OutcomeOver.
	Status  string `json:"status,omitempty"`
	Problem string `json:"problem,omitempty"`
}

// TurnReply answers a turn activity.
type TurnReply struct {
	Outcome Outcome `json:"outcome"`
	// GapMillis is the tool gap before the next turn, with OutcomeMore.
	GapMillis int64 `json:"gap_ms,omitempty"`
	// Scored is true when the task names a scorer, with OutcomeOver.
	Scored  bool   `json:"scored,omitempty"`
	Status  string `json:"status,omitempty"`
	Problem string `json:"problem,omitempty"`
}

// OutsideReply answers an outside activity.
type OutsideReply struct {
	// Outcome is OutcomeOutside while the harness is at work, or OutcomeOver.
	Outcome Outcome `json:"outcome"`
	// WaitMillis is how long the harness may yet be silent, with OutcomeOutside.
	WaitMillis int64 `json:"wait_ms,omitempty"`
	// End is how the session ends, with OutcomeOver; it is scored by its task's scorer
	// if Scored is true.
	End    Completion `json:"end,omitzero"`
	Scored bool       `json:"scored,omitempty"`
}

// ScoreReply answers a score activity. A nil reward means that there is none.
type ScoreReply struct {
	Reward *float64        `json:"reward,omitempty"`
	Detail json.RawMessage `json:"detail,omitempty"`
	// Problem is set when scoring itself failed: the session then ends as failed,
	// which is not a reward of zero.
	Problem string `json:"problem,omitempty"`
	// Seconds is how long scoring took.
	Seconds float64 `json:"seconds,omitempty"`
}

// Completion is the input of the complete activity.
type Completion struct {
	Session string          `json:"session"`
	Status  string          `json:"status"`
	Reward  *float64        `json:"reward,omitempty"`
	Detail  json.RawMessage `json:"detail,omitempty"`
	Problem string          `json:"problem,omitempty"`
	// ScoreSeconds is how long scoring took, 0 where nothing was scored.
	ScoreSeconds float64 `json:"score_seconds,omitempty"`
	// Stepped: the session had an environment, whose observations are kept no longer.
	Stepped bool `json:"stepped,omitempty"`
}
