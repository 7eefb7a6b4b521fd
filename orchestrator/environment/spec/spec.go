// Package spec holds what a trainer says about the environment of a session and
// about its scorer, as it stands in a task, in the store and in a worker.
//
// It is a leaf, so that the task format can carry its types without knowing how
// environments are run: it holds values, their JSON and their validation.
// Secrets are not part of it, since a task is stored and shown: Credential is a
// name that the operator's configuration maps to a token.
package spec

import (
	"encoding/json"

	"holdfast/orchestrator/toolcall"
)

// Kind is the closed set of environments that this package describes. Replayed
// traces are described by the task format itself.
type Kind string

// Environment kinds.
const (
	// HTTP is an environment server that is reset, stepped and closed by POST.
	HTTP Kind = "http"
	// MCP offers the tools of a Model Context Protocol server.
	MCP Kind = "mcp"
	// Exec runs a program for each step in a directory of the session's own.
	Exec Kind = "exec"
)

// Limits of what a task may ask for.
const (
	MaxSeconds          = 3_600.0
	MaxURLBytes         = 2_048
	MaxTaskBytes        = 256 << 10
	MaxArguments        = 256
	MaxArgumentBytes    = 64 << 10
	MaxVariables        = 64
	MaxFiles            = 64
	MaxFilesBytes       = 1 << 20
	MaxNameBytes        = 128
	MaxObservationBytes = 1 << 20
	MinMemoryBytes      = 16 << 20
	MaxMemoryBytes      = 1 << 48 // of addresses: some runtimes reserve terabytes
	MaxProcesses        = 4_096
	MaxFileBytes        = 16 << 30
	MaxOutputBytes      = 256 << 20
	MaxScorerTokens     = 4_096
	MaxAnswers          = 256
	MaxAnswerBytes      = 64 << 10
	MaxBatchSamples     = 256
)

// Defaults for what a task leaves out.
const (
	DefaultTimeoutSeconds   = 60.0
	DefaultObservationBytes = 16 << 10
	DefaultWallSeconds      = 30.0
	DefaultCPUSeconds       = 30
	DefaultMemoryBytes      = 2 << 30
	DefaultProcesses        = 64
	DefaultFileBytes        = 64 << 20
	DefaultOutputBytes      = 8 << 20
	DefaultBatchSamples     = 32
)

// Environment says who answers the model between turns. Exactly the member that
// Kind names is set.
type Environment struct {
	Kind Kind         `json:"kind"`
	HTTP *HTTPServer  `json:"http,omitempty"`
	MCP  *MCPServer   `json:"mcp,omitempty"`
	Exec *ExecProgram `json:"exec,omitempty"`
	// ToolFormat is how the model writes tool calls; empty means it writes none
	// and each of its messages is one action.
	ToolFormat toolcall.Format `json:"tool_format,omitempty"`
	// ObservationBytes is how much of each text of an observation is kept: what
	// is longer loses its middle. 0 means DefaultObservationBytes.
	ObservationBytes int `json:"observation_bytes,omitempty"`
}

// HTTPServer is an environment server.
type HTTPServer struct {
	// URL is the address below which /reset, /step and /close are.
	URL string `json:"url"`
	// TimeoutSeconds bounds each call; 0 means DefaultTimeoutSeconds.
	TimeoutSeconds float64 `json:"timeout_seconds,omitempty"`
	// Credential names a bearer token of the operator's configuration.
	Credential string `json:"credential,omitempty"`
	// Task is a JSON object passed to reset as it is.
	Task json.RawMessage `json:"task,omitempty"`
}

// MCPServer is a tool server: a program that speaks over its standard input and
// output, or an address that speaks streamable HTTP. Exactly one is set.
type MCPServer struct {
	// Program lives as long as the session; its WallSeconds are not used.
	Program *Program `json:"program,omitempty"`
	URL     string   `json:"url,omitempty"`
	// TimeoutSeconds bounds connecting and each call; 0 means DefaultTimeoutSeconds.
	TimeoutSeconds float64 `json:"timeout_seconds,omitempty"`
	// Credential names a bearer token of the operator's configuration.
	Credential string `json:"credential,omitempty"`
	// Tools restricts what the model may call; absent means everything.
	Tools []string `json:"tools,omitempty"`
}

// Input is what a program reads from its standard input.
type Input string

// Inputs.
const (
	// InputText: the model's text, or the argument that Tool.Argument names.
	InputText Input = "text"
	// InputJSON: the action with episode_id and step, as the http kind sends it.
	InputJSON Input = "json"
)

// Output is how a program's standard output is read.
type Output string

// Outputs.
const (
	// OutputText: standard output and error as they come are the observation;
	// exit status and limits reached are told to the model.
	OutputText Output = "text"
	// OutputJSON: standard output is one JSON object as the http kind answers it;
	// an exit status other than 0 and a limit reached are failures.
	OutputJSON Output = "json"
)

// ExecProgram is run once for each step, in a directory that lasts as long as
// the session: files stay, processes do not.
type ExecProgram struct {
	Program Program `json:"program"`
	// Input is InputText if empty.
	Input Input `json:"input,omitempty"`
	// Output is OutputText if empty.
	Output Output `json:"output,omitempty"`
	// Tool makes the program a tool: it is run once for each call of that name,
	// and a message without calls ends the episode. Without it, it is run once
	// for each message.
	Tool *ExecTool `json:"tool,omitempty"`
	// Files are written into the directory at reset, by relative path.
	Files map[string]string `json:"files,omitempty"`
}

// ExecTool describes the program to the model.
type ExecTool struct {
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
	// Parameters is a JSON schema of the call's arguments.
	Parameters json.RawMessage `json:"parameters,omitempty"`
	// Argument names the string argument that InputText feeds to the program.
	Argument string `json:"argument,omitempty"`
}

// Program is a command with what it may use.
type Program struct {
	// Command is the program and its arguments; no shell reads it.
	Command []string `json:"command"`
	// Env is added to the few variables that every program gets.
	Env map[string]string `json:"env,omitempty"`
	// Network lets the program reach the network where it would be cut off.
	Network bool   `json:"network,omitempty"`
	Limits  Limits `json:"limits,omitzero"`
}

// Limits of a program; 0 means the default. Memory (address space), CPU time and
// file size are per process, processes are counted together.
type Limits struct {
	WallSeconds float64 `json:"wall_seconds,omitempty"`
	CPUSeconds  int     `json:"cpu_seconds,omitempty"`
	MemoryBytes int64   `json:"memory_bytes,omitempty"`
	Processes   int     `json:"processes,omitempty"`
	FileBytes   int64   `json:"file_bytes,omitempty"`
	OutputBytes int64   `json:"output_bytes,omitempty"`
}

// WithDefaults fills in what is zero.
func (l Limits) WithDefaults() Limits {
	setDefault(&l.WallSeconds, DefaultWallSeconds)
	setDefault(&l.CPUSeconds, DefaultCPUSeconds)
	setDefault(&l.MemoryBytes, DefaultMemoryBytes)
	setDefault(&l.Processes, DefaultProcesses)
	setDefault(&l.FileBytes, DefaultFileBytes)
	setDefault(&l.OutputBytes, DefaultOutputBytes)
	return l
}

func setDefault[N int | int64 | float64](value *N, fallback N) {
	if *value == 0 {
		*value = fallback
	}
}

// ScorerKind is the closed set of scorers.
type ScorerKind string

// Scorer kinds.
const (
	// ScorerEnvironment takes the reward that the environment gave last.
	ScorerEnvironment ScorerKind = "environment"
	// ScorerExactMatch compares the last turn with ids or texts.
	ScorerExactMatch ScorerKind = "exact_match"
	// ScorerNumericMatch compares the number that the last turn ends with.
	ScorerNumericMatch ScorerKind = "numeric_match"
	// ScorerHTTP asks a server.
	ScorerHTTP ScorerKind = "http"
	// ScorerExec runs a program for each sample.
	ScorerExec ScorerKind = "exec"
)

// Extract says which part of the last turn's text an exact match looks at.
type Extract string

// Extracts.
const (
	// ExtractText: all of it, without white space around it.
	ExtractText Extract = "text"
	// ExtractLastLine: the last line that is not empty.
	ExtractLastLine Extract = "last_line"
	// ExtractBoxed: what the last \boxed{...} holds; without one, nothing matches.
	ExtractBoxed Extract = "boxed"
)

// Scorer says how a finished session is scored. The members below Kind belong to
// one kind each.
type Scorer struct {
	Kind ScorerKind `json:"kind"`
	// TokenIDs belongs to exact_match: the last turn's ids end with them.
	TokenIDs []int32 `json:"token_ids,omitempty"`
	// Answers belongs to exact_match: the text equals one of them.
	Answers []string `json:"answers,omitempty"`
	// Extract belongs to exact_match with Answers; empty means ExtractText.
	Extract Extract `json:"extract,omitempty"`
	// IgnoreCase belongs to exact_match with Answers.
	IgnoreCase bool `json:"ignore_case,omitempty"`
	// Target belongs to numeric_match: the number, as text, so that a fraction
	// is exact.
	Target string `json:"target,omitempty"`
	// AbsoluteTolerance and RelativeTolerance belong to numeric_match: the larger
	// of AbsoluteTolerance and RelativeTolerance times |target| is allowed.
	AbsoluteTolerance float64 `json:"absolute_tolerance,omitempty"`
	RelativeTolerance float64 `json:"relative_tolerance,omitempty"`
	// HTTP belongs to kind http.
	HTTP *HTTPScorer `json:"http,omitempty"`
	// Program belongs to kind exec.
	Program *Program `json:"program,omitempty"`
}

// HTTPScorer is a server that scores samples in batches.
type HTTPScorer struct {
	// URL receives the samples by POST.
	URL string `json:"url"`
	// TimeoutSeconds bounds each call; 0 means DefaultTimeoutSeconds.
	TimeoutSeconds float64 `json:"timeout_seconds,omitempty"`
	// Credential names a bearer token of the operator's configuration.
	Credential string `json:"credential,omitempty"`
	// BatchSamples is how many samples one call holds at most; 0 means
	// DefaultBatchSamples.
	BatchSamples int `json:"batch_samples,omitempty"`
	// Task is a JSON object sent along with the samples as it is.
	Task json.RawMessage `json:"task,omitempty"`
}
