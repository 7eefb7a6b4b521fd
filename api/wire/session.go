package wire

import (
	"encoding/json"
	"time"

	"github.com/google/uuid"
)

// Usage counts what a session used of the engines, over all its turns.
type Usage struct {
	Turns         int     `json:"turns"`
	PromptTokens  int64   `json:"prompt_tokens" doc:"Sent to engines, over all turns."`
	CachedTokens  int64   `json:"cached_tokens" doc:"Of these, found in prefix caches."`
	OutputTokens  int64   `json:"output_tokens"`
	ContextTokens int64   `json:"context_tokens" doc:"Length of the context at the end."`
	Rewrites      int     `json:"rewrites,omitzero" doc:"How often a harness rewrote its history after the first turn; the sample then has one sequence more."`
	EarlierTokens int64   `json:"earlier_tokens,omitzero" doc:"Lengths of the sequences that rewrites left, summed."`
	TokenSeconds  float64 `json:"token_seconds" doc:"Context length integrated over residency."`

	Resumes           int   `json:"resumes" doc:"Model calls that went on from the partial output of one that was cut."`
	TokensRegenerated int64 `json:"tokens_regenerated" doc:"Sampled again because an earlier copy was lost with its worker; not part of output_tokens."`
}

// Times says where a session's time went.
type Times struct {
	HeldSeconds      float64 `json:"held_seconds"`
	ResidencySeconds float64 `json:"residency_seconds"`
	QueueSeconds     float64 `json:"queue_seconds"`
	PrefillSeconds   float64 `json:"prefill_seconds"`
	DecodeSeconds    float64 `json:"decode_seconds"`
	ToolSeconds      float64 `json:"tool_seconds"`
	ScoreSeconds     float64 `json:"score_seconds"`
}

// Session is one rollout as the audit trail shows it.
type Session struct {
	ID              uuid.UUID       `json:"id" format:"uuid"`
	Run             uuid.UUID       `json:"run" format:"uuid"`
	Pool            string          `json:"pool"`
	Batch           uuid.UUID       `json:"batch" format:"uuid"`
	Task            uuid.UUID       `json:"task" format:"uuid"`
	TaskID          string          `json:"task_id" doc:"The trainer's own name for the task."`
	Member          int             `json:"member" doc:"Place in the group, from 0."`
	GroupSize       int             `json:"group_size"`
	Class           string          `json:"class"`
	State           string          `json:"state" enum:"queued,dispatched,held,active,ended"`
	Status          string          `json:"status,omitzero" enum:"completed,truncated,stale,failed,cancelled" doc:"Absent until the session has ended."`
	PolicyVersion   int64           `json:"policy_version" doc:"The one of the release."`
	Instance        string          `json:"instance,omitzero" doc:"Where it is admitted."`
	Instances       []string        `json:"instances" nullable:"false" doc:"All instances it has visited."`
	HoldReason      string          `json:"hold_reason,omitzero"`
	QueueReason     string          `json:"queue_reason,omitzero" doc:"Why a queued session is not started: too many undelivered samples, or max_concurrency."`
	Holds           int             `json:"holds" doc:"How often it was held."`
	CancelRequested bool            `json:"cancel_requested"`
	CancelReason    string          `json:"cancel_reason,omitzero"`
	Usage           Usage           `json:"usage"`
	Times           Times           `json:"times"`
	ReleasedAt      time.Time       `json:"released_at"`
	DispatchedAt    *time.Time      `json:"dispatched_at,omitzero"`
	FirstAdmittedAt *time.Time      `json:"first_admitted_at,omitzero"`
	HeldSince       *time.Time      `json:"held_since,omitzero"`
	EndedAt         *time.Time      `json:"ended_at,omitzero"`
	SampleSeq       int64           `json:"sample_seq,omitzero" doc:"Place in the run's completion order, once it has ended."`
	Reward          *float64        `json:"reward,omitzero"`
	ScoreDetail     json.RawMessage `json:"score_detail,omitzero"`
	Problem         string          `json:"problem,omitzero" doc:"What went wrong."`
	Restarts        int             `json:"restarts,omitzero" doc:"How often it was begun again because new weights had made it too old."`
	DeadlineAt      *time.Time      `json:"deadline_at,omitzero" doc:"When its group's deadline passes; absent for none."`
}

// SessionPage lists sessions of a run in release order.
type SessionPage struct {
	Sessions []Session `json:"sessions" nullable:"false"`
	Next     string    `json:"next,omitzero" doc:"The after parameter of the following page; absent on the last one."`
}

// Turn is one committed model call.
type Turn struct {
	Turn                  int       `json:"turn" doc:"Counts from 0."`
	Instance              string    `json:"instance"`
	Epoch                 int64     `json:"epoch" doc:"Of the pool's owner that admitted it."`
	PolicyVersion         int64     `json:"policy_version" doc:"The one the turn ended under; a sample's segments say it for each stretch."`
	PromptTokens          int64     `json:"prompt_tokens" doc:"The context before the turn."`
	PredictedCachedTokens int64     `json:"predicted_cached_tokens" doc:"What the router expected to be cached. Of several calls this and cached_tokens are the last one's."`
	CachedTokens          *int64    `json:"cached_tokens,omitzero" doc:"What the engine found cached; absent if it did not tell."`
	OutputTokens          int64     `json:"output_tokens"`
	AppendedTokens        int64     `json:"appended_tokens" doc:"Added by the environment before this call."`
	StartedAt             time.Time `json:"started_at"`
	CommittedAt           time.Time `json:"committed_at"`
	QueueSeconds          float64   `json:"queue_seconds"`
	PrefillSeconds        float64   `json:"prefill_seconds"`
	DecodeSeconds         float64   `json:"decode_seconds"`
	TotalSeconds          float64   `json:"total_seconds"`
	ToolSeconds           float64   `json:"tool_seconds" doc:"In the environment before this call."`
	FinishReason          string    `json:"finish_reason"`
	KeptTokens            *int64    `json:"kept_tokens,omitzero" doc:"Where a harness rewrote its history before this call: how many tokens of the context before it were kept."`
	Attempts              int       `json:"attempts" doc:"Calls made for this turn, failed ones included."`
	Resumes               int       `json:"resumes" doc:"Of these, calls that went on from partial output."`
	TokensRegenerated     int64     `json:"tokens_regenerated" doc:"Sampled again because an earlier copy was lost with its worker; not part of output_tokens."`
}

// TurnPage is a piece of a session's turns.
type TurnPage struct {
	Session uuid.UUID `json:"session" format:"uuid"`
	Turns   []Turn    `json:"turns" nullable:"false"`
	Next    *int      `json:"next,omitzero" doc:"The after parameter of the following page; absent on the last one."`
}

// Event is one entry of a session's history.
type Event struct {
	Seq    int64           `json:"seq" doc:"Counts from 1 within the session."`
	At     time.Time       `json:"at"`
	Kind   string          `json:"kind" enum:"released,dispatched,held,admitted,protection_ended,turn,tool,retry,scored,cancel_requested,restarted,ended"`
	Detail json.RawMessage `json:"detail,omitzero" doc:"Numbers and reasons of the event."`
}

// Delivery tells when a consumer was first given a session's sample, and when it
// acknowledged it.
type Delivery struct {
	Consumer       string     `json:"consumer"`
	DeliveredAt    *time.Time `json:"delivered_at,omitzero"`
	AcknowledgedAt *time.Time `json:"acknowledged_at,omitzero"`
}

// EventPage is a piece of a session's history.
type EventPage struct {
	Session    uuid.UUID  `json:"session" format:"uuid"`
	Events     []Event    `json:"events" nullable:"false"`
	Next       *int64     `json:"next,omitzero" doc:"The after parameter of the following page; absent on the last one."`
	Deliveries []Delivery `json:"deliveries" nullable:"false" doc:"Of the sample, to every consumer."`
}

// Cancel asks a session to end as cancelled.
type Cancel struct {
	Reason string `json:"reason,omitzero" maxLength:"256" doc:"Kept in the session's history."`
}
