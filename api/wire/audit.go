package wire

import (
	"encoding/json"
	"time"
)

// Audit is everything that is known of one session and its sample, in one document.
type Audit struct {
	Session Session `json:"session" doc:"Where it stands, where its time went, what came of it."`
	Release Release `json:"release"`
	Holds   []Hold  `json:"holds" nullable:"false" doc:"Every stretch in which it waited for a turn, and why."`
	// Admissions are the router's decisions for it.
	Admissions []Admission `json:"admissions" nullable:"false" doc:"Where it was admitted and by which numbers. A turn that stays where the one before ran needs no admission of its own."`
	Turns      []Turn      `json:"turns" nullable:"false" doc:"Every model call: placement, predicted and actual cached tokens, policy version, attempts."`
	Retries    int         `json:"retries" doc:"Calls of engines that had to be made again, over all turns."`
	Moves      int         `json:"moves" doc:"How often it went on at another instance."`
	Score      *Score      `json:"score,omitzero" doc:"Absent unless it was scored."`
	Deliveries []Delivery  `json:"deliveries" nullable:"false" doc:"To every consumer: the first page that held the sample, and the acknowledgement that covered it. A cursor that was acknowledged covers all before it."`
	Events     []Event     `json:"events" nullable:"false" doc:"The whole history in order."`
	More       bool        `json:"more,omitzero" doc:"There are more events or turns than an audit holds: read them page by page."`
	// The two are far from each other in time: tokens go first.
	HistoryPruned    bool `json:"history_pruned,omitzero" doc:"Events and turns are gone, and with them holds and admissions; their sums are in session."`
	TranscriptPruned bool `json:"transcript_pruned,omitzero" doc:"The sample's tokens are gone."`
}

// Release says how a session came about.
type Release struct {
	At             time.Time  `json:"at"`
	BatchSeq       int64      `json:"batch_seq" doc:"Place of its batch in the run."`
	IdempotencyKey string     `json:"idempotency_key" doc:"The batch's."`
	PolicyVersion  int64      `json:"policy_version"`
	DispatchedAt   *time.Time `json:"dispatched_at,omitzero"`
	QueuedSeconds  float64    `json:"queued_seconds" doc:"From the release until it was started, or until its end."`
}

// Hold is a stretch in which a session waited for a turn.
type Hold struct {
	Turn    int             `json:"turn"`
	Reason  string          `json:"reason"`
	From    time.Time       `json:"from"`
	To      *time.Time      `json:"to,omitzero" doc:"Absent while it is held."`
	Seconds float64         `json:"seconds" doc:"0 while it is held."`
	Numbers json.RawMessage `json:"numbers,omitzero" doc:"The router's, when it decided."`
}

// Admission is the router's decision to run a turn at an instance.
type Admission struct {
	Turn      int             `json:"turn"`
	At        time.Time       `json:"at"`
	Instance  string          `json:"instance"`
	MovedFrom string          `json:"moved_from,omitzero" doc:"The instance before, if it was another."`
	Reason    string          `json:"reason"`
	Epoch     int64           `json:"epoch"`
	Numbers   json.RawMessage `json:"numbers,omitzero"`
}

// Score says how a sample was scored.
type Score struct {
	At      *time.Time      `json:"at,omitzero" doc:"Absent where the history does not say it."`
	Seconds float64         `json:"seconds"`
	Reward  *float64        `json:"reward,omitzero"`
	Detail  json.RawMessage `json:"detail,omitzero"`
}
