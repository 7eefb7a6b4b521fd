package wire

import (
	"time"

	"github.com/google/uuid"
)

// ClassShare is one class of a contract with its target share.
type ClassShare struct {
	Class                  string  `json:"class" doc:"Name of the class: letters, digits, dots, dashes, underscores." minLength:"1" maxLength:"64"`
	Share                  float64 `json:"share" doc:"Target share rho of the class among released samples, as a fraction of 1."`
	FreshnessBudgetSeconds float64 `json:"freshness_budget_seconds,omitzero" minimum:"0" maximum:"2592000" doc:"The class's own freshness budget; absent or 0 means the contract's."`
}

// NewContract is what a trainer asks of a run: the mixture, and how much of it
// may be under way.
type NewContract struct {
	Classes                []ClassShare `json:"classes" nullable:"false" doc:"Classes with their shares. A sum within 0.005 of 1 is normalised; any other sum is refused."`
	MaxConcurrency         int          `json:"max_concurrency" minimum:"1" maximum:"100000" doc:"Sessions of the run dispatched at a time."`
	StalenessBound         *int         `json:"staleness_bound,omitzero" minimum:"0" maximum:"10000" doc:"How many policy versions a sample may lag behind the pool's; absent means unbounded."`
	StalePolicy            string       `json:"stale_policy,omitzero" doc:"What becomes of a session under way that new weights make older than the bound: finish (the default) lets it go on and its sample tell its staleness, end ends it with status stale, restart begins it again from its prompt under the new weights (a session whose harness runs its loop is ended instead)."`
	MaxRestarts            *int         `json:"max_restarts,omitzero" minimum:"1" maximum:"100" doc:"With restart: how often one session may be begun again; absent means 2. After that it ends as stale."`
	FreshnessBudgetSeconds float64      `json:"freshness_budget_seconds,omitzero" minimum:"0" maximum:"2592000" doc:"How long a sample may take from release to end. Backlog and metrics tell whether each class is within it; nothing is ended for it. Absent or 0 means none."`
	GroupPolicy            string       `json:"group_policy,omitzero" doc:"What happens to a group with an unusable (failed or stale) member: partial (the default) delivers the members that are usable, refill releases another one in its place, end cancels the others."`
	GroupRefills           *int         `json:"group_refills,omitzero" minimum:"0" maximum:"1024" doc:"With refill: how many members may be released anew for one group; absent means as many as its size. Beyond that the group is delivered as it is."`
	SpareMembers           int          `json:"spare_members,omitzero" minimum:"0" maximum:"1024" doc:"Members released with every group of two or more beyond its size. Once as many as its size are usable, the rest is cancelled."`
	// UndeliveredLimit is back-pressure.
	UndeliveredLimit *int `json:"undelivered_limit,omitzero" minimum:"1" maximum:"100000000" doc:"Ended samples that may wait for the slowest consumer's acknowledgement (all of them while there is no consumer; whole groups only, if it reads those). At the limit no queued session is started until they are down to three quarters of it; sessions under way go on. Must be more than the trainer holds unacknowledged at a time. Absent means unbounded."`
}

// Contract is one version of a run's contract.
type Contract struct {
	Version                int          `json:"version" doc:"Counts from 1."`
	Classes                []ClassShare `json:"classes" nullable:"false" doc:"Classes with shares that sum to 1."`
	Given                  []ClassShare `json:"given" nullable:"false" doc:"The shares as the trainer wrote them."`
	MaxConcurrency         int          `json:"max_concurrency" doc:"Sessions of the run dispatched at a time."`
	StalenessBound         *int         `json:"staleness_bound,omitzero" doc:"Absent means unbounded."`
	StalePolicy            string       `json:"stale_policy" enum:"finish,end,restart"`
	MaxRestarts            *int         `json:"max_restarts,omitzero" doc:"Absent unless stale_policy is restart."`
	FreshnessBudgetSeconds float64      `json:"freshness_budget_seconds,omitzero"`
	GroupPolicy            string       `json:"group_policy" enum:"partial,refill,end"`
	GroupRefills           *int         `json:"group_refills,omitzero" doc:"Absent means as many as a group's size."`
	SpareMembers           int          `json:"spare_members"`
	// UndeliveredLimit is back-pressure.
	UndeliveredLimit *int      `json:"undelivered_limit,omitzero" doc:"Absent means unbounded."`
	CreatedAt        time.Time `json:"created_at"`
}

// ContractHistory is all versions of a run's contract, oldest first.
type ContractHistory struct {
	Run      uuid.UUID  `json:"run" format:"uuid"`
	Versions []Contract `json:"versions" nullable:"false"`
}

// NewRun opens a run.
type NewRun struct {
	Name     string      `json:"name" doc:"For people; need not be unique." minLength:"1" maxLength:"256"`
	Pool     string      `json:"pool" doc:"Pool of engines that serves the run; created if it is new. It serves one active run at a time." minLength:"1" maxLength:"64"`
	Contract NewContract `json:"contract"`
}

// Run is one training run with its current contract.
type Run struct {
	ID        uuid.UUID  `json:"id" format:"uuid"`
	Name      string     `json:"name"`
	Pool      string     `json:"pool"`
	State     string     `json:"state" enum:"active,ended"`
	Contract  Contract   `json:"contract"`
	CreatedAt time.Time  `json:"created_at"`
	EndedAt   *time.Time `json:"ended_at,omitzero"`
}

// RunPage lists runs, newest first.
type RunPage struct {
	Runs []Run `json:"runs" nullable:"false"`
	// Next is the before parameter of the following page.
	Next string `json:"next,omitzero" doc:"The before parameter of the following page; absent on the last one."`
}

// Batch is a set of tasks released together.
type Batch struct {
	ID              uuid.UUID      `json:"id" format:"uuid"`
	Run             uuid.UUID      `json:"run" format:"uuid"`
	Seq             int64          `json:"seq" doc:"Place among the batches of the run, from 1."`
	IdempotencyKey  string         `json:"idempotency_key"`
	PolicyVersion   int64          `json:"policy_version" doc:"Version of the weights that the tasks were released at."`
	Tasks           int            `json:"tasks"`
	Sessions        int            `json:"sessions" doc:"Members of all tasks together, spare ones included: the samples to expect, save for refills."`
	SessionsByClass map[string]int `json:"sessions_by_class"`
	CreatedAt       time.Time      `json:"created_at"`
	Replayed        bool           `json:"replayed,omitzero" doc:"The key had been used with this very body before; nothing was released anew."`
}

// Policy is the version of a pool's weights.
type Policy struct {
	Pool          string `json:"pool"`
	PolicyVersion int64  `json:"policy_version"`
}

// NewPolicy announces weights that the trainer has put into the pool's engines.
type NewPolicy struct {
	PolicyVersion int64 `json:"policy_version" minimum:"0" maximum:"9007199254740991" doc:"Never lower than the current one."`
}

// Pool is a set of instances that serve one model and share one router.
type Pool struct {
	Name          string `json:"name"`
	PolicyVersion int64  `json:"policy_version"`
	Owner         string `json:"owner,omitzero" doc:"Process that runs the pool's router; absent while none does."`
	Epoch         int64  `json:"epoch" doc:"Counts changes of owner."`
}

// PoolList lists all pools by name.
type PoolList struct {
	Pools []Pool `json:"pools" nullable:"false"`
}
