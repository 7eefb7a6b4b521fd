package wire

import (
	"time"

	"github.com/google/uuid"
)

// ClassBacklog is where the released samples of one class are: released = ended
// + backlog (A = N + Q), backlog = queued + pending + held + active, ended = the
// sum of the five statuses.
type ClassBacklog struct {
	Class                    string   `json:"class"`
	Released                 int64    `json:"released" doc:"A: samples released so far."`
	Ended                    int64    `json:"ended" doc:"N: samples that have ended, whatever their status."`
	Backlog                  int64    `json:"backlog" doc:"Q: samples released and not ended."`
	Queued                   int64    `json:"queued" doc:"Waiting for the contract's max_concurrency."`
	Pending                  int64    `json:"pending" doc:"Dispatched, not yet asking for a first turn."`
	Held                     int64    `json:"held" doc:"Asking for a turn that the router does not admit yet."`
	Active                   int64    `json:"active" doc:"Admitted: in a model call, a tool gap or scoring."`
	Completed                int64    `json:"completed"`
	Truncated                int64    `json:"truncated"`
	Stale                    int64    `json:"stale"`
	Failed                   int64    `json:"failed"`
	Cancelled                int64    `json:"cancelled"`
	OverBound                int64    `json:"over_bound" doc:"Completed and truncated samples that are older than the contract's staleness bound: stale_policy finish lets them be."`
	Restarts                 int64    `json:"restarts" doc:"How often sessions were begun again because new weights had made them too old."`
	Expired                  int64    `json:"expired" doc:"Stale samples of groups whose deadline had passed."`
	OldestHoldSeconds        float64  `json:"oldest_hold_seconds"`
	OldestQueuedSeconds      float64  `json:"oldest_queued_seconds" doc:"Age since its release of the oldest session that is queued."`
	OldestOutstandingSeconds float64  `json:"oldest_outstanding_seconds" doc:"Age since its release of the oldest session that has not ended."`
	LiveTokenSeconds         float64  `json:"live_token_seconds" doc:"Context length integrated over the residency so far of sessions under way."`
	LiveBlockSeconds         *float64 `json:"live_block_seconds,omitzero" doc:"The same in KV blocks; absent while no instance of the pool tells its block size."`
	FreshnessBudgetSeconds   *float64 `json:"freshness_budget_seconds,omitzero" doc:"The class's budget from release to end; absent for none."`
	WithinFreshnessBudget    *bool    `json:"within_freshness_budget,omitzero" doc:"Whether oldest_outstanding_seconds is within it; absent without a budget."`
	DrainSeconds             *float64 `json:"drain_seconds,omitzero" doc:"Backlog over the class's rate of endings in the last ten minutes; absent while nothing has ended in them."`
	// Groups of one member count too.
	GroupsEnded         int64 `json:"groups_ended" doc:"Groups whose members have all ended."`
	GroupsWithoutSignal int64 `json:"groups_without_signal" doc:"Those of them with two usable members or more that all have the same reward."`
	// Paused is the run's: one reason holds for all classes.
	Paused string `json:"paused,omitzero" doc:"Why no queued session is started at the moment, such as undelivered samples 512 of 500; absent when they are."`
}

// Backlog is one snapshot of a run.
type Backlog struct {
	Run     uuid.UUID      `json:"run" format:"uuid"`
	At      time.Time      `json:"at"`
	Classes []ClassBacklog `json:"classes" nullable:"false"`
	Total   ClassBacklog   `json:"total" doc:"Sums over the classes; the oldest hold and the longest drain of any."`
	// Undelivered is what back-pressure goes by.
	Undelivered      int64      `json:"undelivered" doc:"Ended samples that the slowest consumer has not acknowledged; without a consumer all of them; of whole groups only, if that is what it reads."`
	UndeliveredLimit *int       `json:"undelivered_limit,omitzero" doc:"The contract's; absent means unbounded."`
	PausedAt         *time.Time `json:"paused_at,omitzero" doc:"Since when no queued session is started; absent when they are."`
}

// ClassMixture is one class's part in the mixture.
type ClassMixture struct {
	Class          string  `json:"class"`
	Rho            float64 `json:"rho" doc:"Target share of the current contract."`
	Released       int64   `json:"released"`
	ReleasedShare  float64 `json:"released_share"`
	Completed      int64   `json:"completed" doc:"Completed and truncated samples."`
	CompletedShare float64 `json:"completed_share"`
	Consumed       int64   `json:"consumed" doc:"Those of them that a consumer has acknowledged."`
	ConsumedShare  float64 `json:"consumed_share"`
	Stale          int64   `json:"stale" doc:"Samples that ended as stale: released, and neither completed nor lost."`
	OverBound      int64   `json:"over_bound" doc:"Of the completed ones, those older than the contract's staleness bound."`
}

// MixtureSpan compares what was asked for, released, completed and consumed over
// a stretch of time. Distances are total variation, D_TV = 1/2 sum |p - q|, in
// percentage points; 0 while one side is empty.
type MixtureSpan struct {
	Classes      []ClassMixture `json:"classes" nullable:"false"`
	TVReleasedPP float64        `json:"tv_released_pp" doc:"Completed against released: what the service did to the mixture, in percentage points."`
	TVConsumedPP float64        `json:"tv_consumed_pp" doc:"Consumed against rho: what the trainer got, in percentage points."`
	TVRhoPP      float64        `json:"tv_rho_pp" doc:"Completed against rho, in percentage points."`
}

// Mixture is the mixture of a run, over all of it and over a window if asked for.
type Mixture struct {
	Run    uuid.UUID    `json:"run" format:"uuid"`
	Total  MixtureSpan  `json:"total"`
	From   *time.Time   `json:"from,omitzero" doc:"Begin of the window; absent when it is open or none was asked for."`
	To     *time.Time   `json:"to,omitzero"`
	Window *MixtureSpan `json:"window,omitzero" doc:"Absent when no window was asked for."`
}

// ClassMetrics describes a class's sessions that ended in a window. Rates and
// latencies count completed and truncated ones, usage counts all.
type ClassMetrics struct {
	Class                  string   `json:"class"`
	Samples                int64    `json:"samples"`
	SamplesPerMinute       float64  `json:"samples_per_minute"`
	LatencyP50Seconds      float64  `json:"latency_p50_seconds" doc:"From release to end."`
	LatencyP95Seconds      float64  `json:"latency_p95_seconds"`
	LatencyP99Seconds      float64  `json:"latency_p99_seconds"`
	HeldP50Seconds         float64  `json:"held_p50_seconds"`
	HeldP95Seconds         float64  `json:"held_p95_seconds"`
	HeldP99Seconds         float64  `json:"held_p99_seconds"`
	HeldSessions           int64    `json:"held_sessions" doc:"Sessions that were held at least once."`
	Turns                  int64    `json:"turns"`
	PromptTokens           int64    `json:"prompt_tokens"`
	CachedTokens           int64    `json:"cached_tokens"`
	OutputTokens           int64    `json:"output_tokens"`
	PrefixHit              float64  `json:"prefix_hit" doc:"Cached over prompt tokens, 0 to 1."`
	ColdPrefillTokens      int64    `json:"cold_prefill_tokens" doc:"Prompt tokens that were not cached."`
	TokenSeconds           float64  `json:"token_seconds" doc:"Context length integrated over residency: block-seconds times the tokens per block."`
	BlockSeconds           *float64 `json:"block_seconds,omitzero" doc:"Block-time: token_seconds in KV blocks of the pool's instances; absent while none tells its block size."`
	ResidencySeconds       float64  `json:"residency_seconds"`
	Stale                  int64    `json:"stale" doc:"Samples that ended as stale."`
	OverBound              int64    `json:"over_bound" doc:"Completed and truncated samples that are older than the contract's staleness bound."`
	FreshnessBudgetSeconds *float64 `json:"freshness_budget_seconds,omitzero" doc:"The class's budget from release to end; absent for none, and in the total."`
	OverFreshnessBudget    int64    `json:"over_freshness_budget" doc:"Completed and truncated samples that took longer than their class's budget."`
	WithinFreshnessBudget  *bool    `json:"within_freshness_budget,omitzero" doc:"Whether latency_p95_seconds is within it; absent without a budget."`
	TokensGenerated        int64    `json:"tokens_generated" doc:"Sampled for the turns of these sessions: output_tokens and tokens_regenerated."`
	TokensRegenerated      int64    `json:"tokens_regenerated" doc:"Sampled again because an earlier copy was lost with its worker."`
	Resumes                int64    `json:"resumes" doc:"Model calls that went on from the partial output of one that was cut."`
}

// Metrics is a run's account over a window.
type Metrics struct {
	Run     uuid.UUID      `json:"run" format:"uuid"`
	From    time.Time      `json:"from"`
	To      time.Time      `json:"to"`
	Classes []ClassMetrics `json:"classes" nullable:"false"`
	Total   ClassMetrics   `json:"total"`
}
