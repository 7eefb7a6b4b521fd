// Package task holds what a trainer asks for: one task of a batch with its
// prompt, sampling, limits, environment and scorer, as they stand in a request
// body, in the store and in a worker.
//
// It is a leaf, but for the description of environments and scorers: it knows JSON
// and nothing of Temporal, Postgres or HTTP. It checks a task by itself; what needs the run (is the class declared?) or the
// pool (does the prompt fit the context?) is checked by whoever knows them.
package task

import (
	"encoding/json"

	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/toolcall"
)

// Limits of one task. They bound what one request can ask of the service, not
// what an engine can do; the pool's context limit is checked apart.
const (
	MaxPromptTokens       = 1 << 20
	MaxOutputTokens       = 1 << 20
	MaxTurns              = 10_000
	MaxGroupSize          = 1_024
	MaxGapSeconds         = 86_400.0
	MaxRunSeconds         = 30 * 86_400.0
	MaxDeadlineSeconds    = 30 * 86_400.0
	MaxExternalIDBytes    = 256
	MaxMetadataBytes      = 64 << 10
	MaxReplayAppendTokens = 1 << 20
)

// Spec is one task as a trainer submits it. Exactly one of Prompt's forms is
// set. GroupSize sessions ("members") are run for it, each its own sample.
type Spec struct {
	// ID is the trainer's own name for the task, unique within its batch, at
	// most MaxExternalIDBytes bytes; empty means the service numbers it.
	ID string `json:"id,omitempty"`
	// Class is one of the classes that the run's contract declares.
	Class string `json:"class"`
	// Prompt is the context before the first turn.
	Prompt Prompt `json:"prompt"`
	// GroupSize is the number of members, 1 if absent.
	GroupSize int `json:"group_size,omitempty"`
	// Sampling is passed to the engine on every turn.
	Sampling Sampling `json:"sampling"`
	// Limits end a session as truncated when they are reached.
	Limits Limits `json:"limits"`
	// DeadlineSeconds after the release members that have not ended end as stale, in
	// wall time, holds and the queue included; 0 means never.
	DeadlineSeconds float64 `json:"deadline_seconds,omitempty"`
	// Environment answers the model between turns; absent means one turn.
	Environment *Environment `json:"environment,omitempty"`
	// Scorer gives the reward; absent means the sample carries none.
	Scorer *Scorer `json:"scorer,omitempty"`
	// Metadata is echoed back with the sample, at most MaxMetadataBytes.
	Metadata json.RawMessage `json:"metadata,omitempty"`
}

// Prompt is the context before the first turn in one of four forms.
type Prompt struct {
	// TokenIDs are the engine's own token ids.
	TokenIDs []int32 `json:"token_ids,omitempty"`
	// Text is tokenised by the engine.
	Text string `json:"text,omitempty"`
	// Messages is a chat history; template and tokeniser are the engine's.
	Messages json.RawMessage `json:"messages,omitempty"`
	// Synthetic stands for token ids that are made from seeds: what replayed
	// numeric traces carry, since they hold lengths and no text.
	Synthetic *Synthetic `json:"synthetic,omitempty"`
}

// Synthetic describes a prompt by its lengths. The first SharedTokens ids are
// a function of SharedSeed alone, so that prompts with the same SharedSeed
// share that prefix (a system prompt, a group's prompt); the rest are a
// function of Seed.
type Synthetic struct {
	Tokens       int    `json:"tokens"`
	Seed         uint64 `json:"seed"`
	SharedTokens int    `json:"shared_tokens,omitempty"`
	SharedSeed   uint64 `json:"shared_seed,omitempty"`
}

// Sampling holds the parameters of each model call. Zero values mean the
// engine's defaults, except MaxTokens, which must be positive unless a replay
// environment gives every turn's output length.
type Sampling struct {
	MaxTokens   int      `json:"max_tokens,omitempty"`
	MinTokens   int      `json:"min_tokens,omitempty"`
	IgnoreEOS   bool     `json:"ignore_eos,omitempty"`
	Temperature *float64 `json:"temperature,omitempty"`
	TopP        *float64 `json:"top_p,omitempty"`
	// Seed is that of member 0: member m of the group samples with Seed + m.
	Seed       *int64  `json:"seed,omitempty"`
	StopTokens []int32 `json:"stop_token_ids,omitempty"`
	// Logprobs asks for the log-probability of every generated token; absent
	// means true, since training needs them.
	Logprobs *bool `json:"logprobs,omitempty"`
}

// Limits of a session; zero means the service's own limit.
type Limits struct {
	// MaxTurns is the number of model calls after which the session is truncated.
	MaxTurns int `json:"max_turns,omitempty"`
	// MaxContextTokens bounds prompt plus everything appended and generated.
	MaxContextTokens int `json:"max_context_tokens,omitempty"`
	// MaxRunSeconds bounds wall time from admission, holds not counted.
	MaxRunSeconds float64 `json:"max_run_seconds,omitempty"`
}

// EnvironmentKind is the closed set of environments.
type EnvironmentKind string

// Environment kinds.
const (
	EnvironmentReplay EnvironmentKind = "replay"
	// EnvironmentExternal leaves the loop to a harness, which asks for one turn after
	// the other and says when the session is over.
	EnvironmentExternal EnvironmentKind = "external"
	// Environments that the service resets and steps itself; see package spec.
	EnvironmentHTTP EnvironmentKind = EnvironmentKind(spec.HTTP)
	EnvironmentMCP  EnvironmentKind = EnvironmentKind(spec.MCP)
	EnvironmentExec EnvironmentKind = EnvironmentKind(spec.Exec)
)

// environmentKinds lists them for error messages.
var environmentKinds = []EnvironmentKind{EnvironmentReplay, EnvironmentExternal, EnvironmentHTTP, EnvironmentMCP, EnvironmentExec}

// Rewrites is the closed set of what can follow when a harness rewrites its history.
type Rewrites string

const (
	// RewritesSequence goes on in a new sequence of tokens.
	RewritesSequence Rewrites = "sequence"
	// RewritesRefuse refuses the call.
	RewritesRefuse Rewrites = "refuse"
)

// DefaultIdleSeconds is how long a harness may be silent where its task does not say.
const DefaultIdleSeconds = 600

// Environment says who answers the model between turns.
type Environment struct {
	Kind EnvironmentKind `json:"kind"`
	// Turns belongs to kind replay: one entry per model call, in order.
	Turns []ReplayTurn `json:"turns,omitempty"`
	// TimeScale belongs to kind replay: trace seconds per wall second by which
	// gaps are shortened; 0 means 1. A demo runs engines and gaps at one scale.
	TimeScale float64 `json:"time_scale,omitempty"`
	// Reward belongs to kind replay: the trajectory's recorded reward, if any.
	Reward *float64 `json:"reward,omitempty"`
	// IdleSeconds belongs to kind external: after so long without a turn the session
	// ends as failed; 0 means DefaultIdleSeconds. Time spent held or generating does not count.
	IdleSeconds float64 `json:"idle_seconds,omitempty"`
	// Rewrites belongs to kind external: what happens when the harness rewrites its
	// history; empty means RewritesSequence.
	Rewrites Rewrites `json:"rewrites,omitempty"`
	// What follows belongs to the kinds that are stepped; package spec describes it.
	HTTP             *spec.HTTPServer  `json:"http,omitempty"`
	MCP              *spec.MCPServer   `json:"mcp,omitempty"`
	Exec             *spec.ExecProgram `json:"exec,omitempty"`
	ToolFormat       toolcall.Format   `json:"tool_format,omitempty"`
	ObservationBytes int               `json:"observation_bytes,omitempty"`
}

// stepped is the environment as package spec describes it, or nil for other kinds.
func (e *Environment) stepped() *spec.Environment {
	switch e.Kind {
	case EnvironmentHTTP, EnvironmentMCP, EnvironmentExec:
		return &spec.Environment{
			Kind: spec.Kind(e.Kind), HTTP: e.HTTP, MCP: e.MCP, Exec: e.Exec, ToolFormat: e.ToolFormat, ObservationBytes: e.ObservationBytes,
		}
	}
	return nil
}

// ReplayTurn is one model call of a recorded session: it generates exactly
// OutputTokens tokens; then, unless it is the last, the tool runs for
// GapSeconds and AppendTokens tokens are appended before the next call.
type ReplayTurn struct {
	OutputTokens int     `json:"output_tokens"`
	GapSeconds   float64 `json:"gap_seconds,omitempty"`
	AppendTokens int     `json:"append_tokens,omitempty"`
}

// Scorer says how a finished session is scored. Package spec describes its kinds,
// their fields and their bounds.
type Scorer = spec.Scorer

// Scorer kinds.
const (
	ScorerEnvironment  = spec.ScorerEnvironment
	ScorerExactMatch   = spec.ScorerExactMatch
	ScorerNumericMatch = spec.ScorerNumericMatch
	ScorerHTTP         = spec.ScorerHTTP
	ScorerExec         = spec.ScorerExec
)

// External tells whether a harness outside runs the session's loop.
func (s *Spec) External() bool {
	return s.Environment != nil && s.Environment.Kind == EnvironmentExternal
}

// Stepped returns the environment that the service resets and steps between the
// session's turns, or nil where the task has none of that kind.
func (s *Spec) Stepped() *spec.Environment {
	if s.Environment == nil {
		return nil
	}
	return s.Environment.stepped()
}

// Members returns the number of sessions the task asks for.
func (s *Spec) Members() int {
	if s.GroupSize == 0 {
		return 1
	}
	return s.GroupSize
}
