package wire

import (
	"time"

	"github.com/google/uuid"
)

// NewInstance registers an engine, or announces a known one anew.
type NewInstance struct {
	ID         string  `json:"id" doc:"Name of the instance in its pool." minLength:"1" maxLength:"128"`
	URL        string  `json:"url" doc:"Base URL of the engine, http or https; it is asked for its capacity before anything is stored." maxLength:"2048"`
	Kind       string  `json:"kind,omitzero" enum:"vllm,sglang,openai,simulated" default:"vllm" doc:"What the engine speaks."`
	TTLSeconds float64 `json:"ttl_seconds,omitzero" minimum:"0" maximum:"86400" doc:"After so long without registration or heartbeat the instance counts as gone; 0 or absent means never."`
	// What an engine does not say of itself, such as an OpenAI-compatible server.
	CapacityBlocks   int64     `json:"capacity_blocks,omitzero" minimum:"0" maximum:"1099511627776" doc:"KV cache in blocks, for an engine that does not tell; what the engine tells counts first."`
	BlockTokens      int       `json:"block_tokens,omitzero" minimum:"0" maximum:"65536" doc:"Tokens in a block, for an engine that does not tell."`
	MaxContextTokens int64     `json:"max_context_tokens,omitzero" minimum:"0" maximum:"1073741824" doc:"Context limit, for an engine that does not tell."`
	KVEvents         *KVEvents `json:"kv_events,omitzero" doc:"Where the engine publishes what its KV cache holds; absent if it does not."`
	Ranks            int       `json:"ranks,omitzero" minimum:"0" maximum:"1024" doc:"Data-parallel ranks behind the URL; 0 or absent means 1."`
	Control          string    `json:"control,omitzero" enum:"manage,observe" default:"manage" doc:"Who changes its weights: Holdfast pauses, resets and resumes it, or only looks on while the trainer does."`
}

// KVEvents is where an engine publishes what its KV cache holds.
type KVEvents struct {
	Endpoint       string `json:"endpoint" maxLength:"1024" doc:"ZMQ endpoint such as tcp://10.0.0.7:5557; rank r is at port + r."`
	Bind           bool   `json:"bind,omitzero" doc:"Holdfast listens at the endpoint and the engine connects to it."`
	ReplayEndpoint string `json:"replay_endpoint,omitzero" maxLength:"1024" doc:"ZMQ endpoint that gives missed events again."`
	Topic          string `json:"topic,omitzero" maxLength:"256" doc:"Prefix of the topics to listen to; absent means all."`
}

// Instance is one inference engine of a pool.
type Instance struct {
	Pool                   string    `json:"pool"`
	ID                     string    `json:"id"`
	URL                    string    `json:"url"`
	Kind                   string    `json:"kind"`
	State                  string    `json:"state" enum:"active,draining,removed"`
	Expired                bool      `json:"expired" doc:"Its time to live has run out."`
	CapacityBlocks         int64     `json:"capacity_blocks" doc:"KV cache in blocks of block_tokens tokens."`
	BlockTokens            int       `json:"block_tokens"`
	MaxContextTokens       int64     `json:"max_context_tokens"`
	MaxRunning             int       `json:"max_running,omitzero" doc:"The engine's own limit on requests in one batch; absent if unknown."`
	PrefillTokensPerSecond float64   `json:"prefill_tokens_per_second,omitzero" doc:"A prior until turns have been measured; absent if unknown."`
	PolicyVersion          int64     `json:"policy_version"`
	TTLSeconds             float64   `json:"ttl_seconds,omitzero"`
	KVEvents               *KVEvents `json:"kv_events,omitzero"`
	Ranks                  int       `json:"ranks"`
	Control                string    `json:"control" enum:"manage,observe"`
	CreatedAt              time.Time `json:"created_at"`
	SeenAt                 time.Time `json:"seen_at"`
}

// InstanceList lists a pool's instances by id, removed ones excepted.
type InstanceList struct {
	Pool      string     `json:"pool"`
	Instances []Instance `json:"instances" nullable:"false"`
}

// Drain starts or ends draining.
type Drain struct {
	Draining *bool `json:"draining,omitzero" doc:"false ends draining; absent means true."`
}

// RouterView is what a pool's router knows and why it decided as it did.
type RouterView struct {
	Pool      string           `json:"pool"`
	At        time.Time        `json:"at"`
	Epoch     int64            `json:"epoch"`
	Instances []RouterInstance `json:"instances" nullable:"false"`
	Classes   []RouterClass    `json:"classes" nullable:"false"`
	Held      []RouterHeld     `json:"held" nullable:"false" doc:"Held turns in the order in which they would be admitted; at most 1,000."`
	HeldTotal int              `json:"held_total"`
	Recent    []RouterDecision `json:"recent" nullable:"false" doc:"The last decisions, newest first."`
	Text      string           `json:"text" doc:"The router's whole state in its stable text form."`
}

// RouterInstance is one instance as the router accounts for it.
type RouterInstance struct {
	ID             string        `json:"id"`
	Draining       bool          `json:"draining"`
	Observability  string        `json:"observability" enum:"fresh,degraded,blind"`
	PolicyVersion  int64         `json:"policy_version"`
	BaseCap        int           `json:"base_cap" doc:"Sessions, from the footprint estimate."`
	Cap            int           `json:"cap" doc:"Sessions, after pressure."`
	Protected      int           `json:"protected" doc:"Sessions observed or pending there."`
	Pending        int           `json:"pending" doc:"Of these, admitted and not yet in a snapshot."`
	CapacityBlocks int64         `json:"capacity_blocks"`
	ReservedBlocks int64         `json:"reserved_blocks"`
	Quotas         []RouterQuota `json:"quotas" nullable:"false"`
	Receipts       *Receipts     `json:"receipts,omitzero" doc:"Cached tokens promised by the router against those reported by the engine."`
	Index          *IndexHealth  `json:"index,omitzero" doc:"How well its KV events are followed; absent where it publishes none."`
}

// Receipts compares the cached prompt tokens that turns were placed by with those
// that the engine reported.
type Receipts struct {
	Turns           int64 `json:"turns" doc:"Turns whose engine reported cached tokens."`
	PredictedTokens int64 `json:"predicted_tokens"`
	CachedTokens    int64 `json:"cached_tokens"`
	ErrorTokens     int64 `json:"error_tokens" doc:"Absolute differences, summed turn by turn."`
	Alarm           bool  `json:"alarm" doc:"Promised blocks are never found."`
}

// IndexHealth is the state of one instance's part of the prefix index.
type IndexHealth struct {
	Trusted      bool       `json:"trusted" doc:"The picture of the cache is complete. If not, it lacks blocks; it never claims blocks that are not there."`
	Reason       string     `json:"reason,omitzero"`
	Alarm        string     `json:"alarm,omitzero" doc:"A difference in configuration that makes hits impossible."`
	Blocks       int64      `json:"blocks"`
	LastEventAt  *time.Time `json:"last_event_at,omitzero"`
	Events       uint64     `json:"events"`
	Gaps         uint64     `json:"gaps" doc:"In the sequence of events."`
	Replays      uint64     `json:"replays" doc:"Missed events asked for again."`
	Resyncs      uint64     `json:"resyncs" doc:"Times all locations were dropped."`
	DecodeErrors uint64     `json:"decode_errors"`
}

// RouterQuota is one class's share of an instance.
type RouterQuota struct {
	Class       string `json:"class"`
	QuotaBlocks int64  `json:"quota_blocks"`
	UsedBlocks  int64  `json:"used_blocks"`
	Cap         int    `json:"cap" doc:"Sessions."`
	Sessions    int    `json:"sessions"`
}

// RouterClass is one class's estimates.
type RouterClass struct {
	Class            string  `json:"class"`
	Share            float64 `json:"share" doc:"rho of the contract."`
	MeanBlocks       float64 `json:"mean_blocks" doc:"k-bar: residency-weighted mean footprint."`
	ResidencySeconds float64 `json:"residency_seconds" doc:"T-bar: mean residency."`
	Sessions         int     `json:"sessions"`
	Held             int     `json:"held"`
}

// RouterHeld is one held turn.
type RouterHeld struct {
	Session      uuid.UUID `json:"session" format:"uuid"`
	Class        string    `json:"class"`
	Turn         int       `json:"turn"`
	PromptTokens int64     `json:"prompt_tokens"`
	HeldSeconds  float64   `json:"held_seconds"`
	Reason       string    `json:"reason"`
}

// RouterDecision is one decision with its reason and numbers.
type RouterDecision struct {
	At       time.Time      `json:"at"`
	Kind     string         `json:"kind"`
	Reason   string         `json:"reason"`
	Session  *uuid.UUID     `json:"session,omitzero" format:"uuid"`
	Turn     int            `json:"turn,omitzero"`
	Class    string         `json:"class,omitzero"`
	Instance string         `json:"instance,omitzero"`
	Numbers  map[string]any `json:"numbers,omitzero" doc:"What the decision was made from."`
}

// Health is the answer of /healthz and /readyz.
type Health struct {
	Status string        `json:"status" enum:"ok,unready"`
	Checks []HealthCheck `json:"checks,omitzero" nullable:"false"`
}

// HealthCheck is one thing that readiness depends on.
type HealthCheck struct {
	Name     string `json:"name"`
	OK       bool   `json:"ok"`
	Required bool   `json:"required" doc:"The service is not ready without it."`
	Problem  string `json:"problem,omitzero"`
}
