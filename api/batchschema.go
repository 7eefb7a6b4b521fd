package api

import (
	"reflect"
	"slices"

	"github.com/danielgtaylor/huma/v2"

	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/toolcall"
	"holdfast/store"
	"holdfast/workflows/task"
)

// batchRequestBody documents the body that batchBody reads. The shape of a task
// comes from task.Spec itself; package task checks it, and its bounds are
// repeated here so that a client can check before it sends.
func batchRequestBody(registry huma.Registry) *huma.RequestBody {
	spec := registry.Schema(reflect.TypeFor[task.Spec](), true, "Task")
	describeTasks(registry)
	most := store.MaxBatchTasks
	schema := &huma.Schema{
		Type: huma.TypeObject, AdditionalProperties: false, Required: []string{"tasks"},
		Properties: map[string]*huma.Schema{
			"policy_version": {Type: huma.TypeInteger, Format: "int64", Nullable: true, Minimum: float(0),
				Description: "Version of the weights that the tasks are released at; absent means the pool's current one, which is also the highest allowed. Must stand before tasks."},
			"tasks": {Type: huma.TypeArray, Items: spec, MinItems: integer(1), MaxItems: &most},
		},
	}
	return &huma.RequestBody{
		Required:    true,
		Description: "Read as a stream and released as a whole.",
		Content:     map[string]*huma.MediaType{jsonMediaType: {Schema: schema}},
	}
}

func float(v float64) *float64 { return &v }

func integer(v int) *int { return &v }

// bound documents one field of a task.
type bound struct {
	text       string
	least      *float64
	most       *float64
	mostLength *int
	mostItems  *int
	enum       []any
}

// taskBounds says what package task allows, by schema and field.
var taskBounds = map[string]map[string]bound{
	"Task": {
		"id":               {text: "The trainer's own name for the task, unique in its batch; absent means the service numbers it.", mostLength: integer(task.MaxExternalIDBytes)},
		"class":            {text: "One of the classes that the run's contract declares.", mostLength: integer(task.MaxClassBytes)},
		"prompt":           {text: "The context before the first turn, in exactly one of its forms."},
		"group_size":       {text: "Members: sessions run for the task, each its own sample. 0 or absent means 1.", least: float(0), most: float(task.MaxGroupSize)},
		"sampling":         {text: "Parameters of each model call."},
		"limits":           {text: "A session that reaches one ends as truncated."},
		"deadline_seconds": {text: "So long after the release members that have not ended end as stale: wall time, with the queue and holds. 0 or absent means never.", least: float(0), most: float(task.MaxDeadlineSeconds)},
		"environment":      {text: "Answers the model between turns; absent means one turn."},
		"scorer":           {text: "Gives the reward; absent means the sample carries none."},
		"metadata":         {text: "Echoed back with the sample; at most 64 KiB."},
	},
	"TaskPrompt": {
		"token_ids": {text: "The engine's own token ids.", mostItems: integer(task.MaxPromptTokens)},
		"text":      {text: "Tokenised by the engine."},
		"messages":  {text: "A chat history; template and tokeniser are the engine's."},
		"synthetic": {text: "Token ids made from seeds, for replaying numeric traces."},
	},
	"TaskSynthetic": {
		"tokens":        {text: "Length of the prompt.", least: float(1), most: float(task.MaxPromptTokens)},
		"shared_tokens": {text: "Length of the prefix common to all prompts with the same shared_seed.", least: float(0), most: float(task.MaxPromptTokens)},
	},
	"TaskSampling": {
		"max_tokens":  {text: "Output tokens of one call; required unless a replay environment gives them.", least: float(0), most: float(task.MaxOutputTokens)},
		"min_tokens":  {least: float(0), most: float(task.MaxOutputTokens)},
		"temperature": {least: float(0), most: float(task.MaxTemperature)},
		"seed":        {text: "Member m of the group samples with seed + m, in every turn; a harness's call that names a seed samples with that one."},
		"logprobs":    {text: "Log-probabilities of generated tokens; absent means true."},
	},
	"TaskLimits": {
		"max_turns":          {text: "Model calls; 0 or absent means the service's own limit.", least: float(0), most: float(task.MaxTurns)},
		"max_context_tokens": {text: "Prompt plus everything appended and generated.", least: float(0)},
		"max_run_seconds":    {text: "Wall time from admission, holds not counted.", least: float(0), most: float(task.MaxRunSeconds)},
	},
	"TaskEnvironment": {
		"kind":              {enum: []any{string(task.EnvironmentReplay), string(task.EnvironmentExternal), string(task.EnvironmentHTTP), string(task.EnvironmentMCP), string(task.EnvironmentExec)}},
		"turns":             {text: "Kind replay: one entry per model call, in order."},
		"time_scale":        {text: "Kind replay: trace seconds per wall second; 0 or absent means 1.", least: float(0), most: float(task.MaxTimeScale)},
		"reward":            {text: "Kind replay: the trajectory's recorded reward."},
		"rewrites":          {text: "Kind external: what follows when the harness rewrites its history; absent means sequence.", enum: []any{string(task.RewritesSequence), string(task.RewritesRefuse)}},
		"idle_seconds":      {text: "Kind external: after so long without a turn the session ends as failed; 0 or absent means 600.", least: float(0), most: float(task.MaxGapSeconds)},
		"http":              {text: "Kind http: the environment server."},
		"mcp":               {text: "Kind mcp: the tool server."},
		"exec":              {text: "Kind exec: the program that is run for each step."},
		"tool_format":       {text: "How the model writes tool calls; absent means hermes for kind external, and that it writes none for http, mcp and exec.", enum: []any{string(toolcall.OpenAI), string(toolcall.Hermes)}},
		"observation_bytes": {text: "Kinds http, mcp and exec: how much of each text is kept; 0 or absent means 16,384.", least: float(0), most: float(spec.MaxObservationBytes)},
	},
	"TaskHTTPServer": {
		"url":             {text: "The address below which /reset, /step and /close are; its host must be one that the operator allows.", mostLength: integer(spec.MaxURLBytes)},
		"timeout_seconds": {text: "Of each call; 0 or absent means 60.", least: float(0), most: float(spec.MaxSeconds)},
		"credential":      {text: "Names a bearer token of the operator's configuration.", mostLength: integer(spec.MaxNameBytes)},
		"task":            {text: "A JSON object passed to reset as it is."},
	},
	"TaskMCPServer": {
		"program":         {text: "A server that speaks over its standard streams; exactly one of program and url is given."},
		"url":             {text: "A server that speaks streamable HTTP; its host must be one that the operator allows.", mostLength: integer(spec.MaxURLBytes)},
		"timeout_seconds": {text: "Of connecting and of each call; 0 or absent means 60.", least: float(0), most: float(spec.MaxSeconds)},
		"credential":      {text: "Names a bearer token of the operator's configuration.", mostLength: integer(spec.MaxNameBytes)},
		"tools":           {text: "What the model may call; absent means everything.", mostItems: integer(spec.MaxArguments)},
	},
	"TaskExecProgram": {
		"program": {text: "Run in a directory that lasts as long as the session."},
		"input":   {text: "What the program reads; absent means text.", enum: []any{string(spec.InputText), string(spec.InputJSON)}},
		"output":  {text: "How its output is read; absent means text.", enum: []any{string(spec.OutputText), string(spec.OutputJSON)}},
		"tool":    {text: "Makes the program a tool, which is run once for each call."},
		"files":   {text: "Written into the directory at reset, by relative path."},
	},
	"TaskExecTool": {
		"name":        {text: "What the model calls it.", mostLength: integer(spec.MaxNameBytes)},
		"description": {text: "Told to the model."},
		"parameters":  {text: "A JSON schema of the call's arguments."},
		"argument":    {text: "Input text: the string argument that the program reads."},
	},
	"TaskReplayTurn": {
		"output_tokens": {least: float(1), most: float(task.MaxOutputTokens)},
		"gap_seconds":   {text: "How long the tool runs after this call.", least: float(0), most: float(task.MaxGapSeconds)},
		"append_tokens": {text: "Tokens appended after this call.", least: float(0), most: float(task.MaxReplayAppendTokens)},
	},
	"TaskScorer": {
		"kind":               {enum: []any{string(task.ScorerEnvironment), string(task.ScorerExactMatch), string(task.ScorerNumericMatch), string(task.ScorerHTTP), string(task.ScorerExec)}},
		"token_ids":          {text: "Kind exact_match: what the last turn must end with.", mostItems: integer(spec.MaxScorerTokens)},
		"answers":            {text: "Kind exact_match, instead of token_ids: the last turn's text must equal one of them.", mostItems: integer(spec.MaxAnswers)},
		"extract":            {text: "Kind exact_match with answers: the part of the text that counts; absent means all of it.", enum: []any{string(spec.ExtractText), string(spec.ExtractLastLine), string(spec.ExtractBoxed)}},
		"ignore_case":        {text: "Kind exact_match with answers."},
		"target":             {text: "Kind numeric_match: the number that the text must end with, as text, so that a fraction is exact."},
		"absolute_tolerance": {text: "Kind numeric_match: the larger of this and relative_tolerance times the target is allowed.", least: float(0)},
		"relative_tolerance": {text: "Kind numeric_match.", least: float(0), most: float(1)},
		"http":               {text: "Kind http: the server that gives the reward."},
		"program":            {text: "Kind exec: the program that gives the reward."},
	},
	"TaskHTTPScorer": {
		"url":             {text: "Receives samples by POST; its host must be one that the operator allows.", mostLength: integer(spec.MaxURLBytes)},
		"timeout_seconds": {text: "Of each call; 0 or absent means 60.", least: float(0), most: float(spec.MaxSeconds)},
		"credential":      {text: "Names a bearer token of the operator's configuration.", mostLength: integer(spec.MaxNameBytes)},
		"batch_samples":   {text: "Samples of one call at most; a session is scored by itself, so that calls hold one.", least: float(0), most: float(spec.MaxBatchSamples)},
		"task":            {text: "A JSON object sent along as it is."},
	},
	"TaskProgram": {
		"command": {text: "The program and its arguments; no shell reads it.", mostItems: integer(spec.MaxArguments)},
		"env":     {text: "Added to the few variables that every program gets."},
		"network": {text: "Lets the program reach the network where it would be cut off."},
		"limits":  {text: "What is 0 or absent has its default."},
	},
	"TaskProgramLimits": {
		"wall_seconds": {least: float(0), most: float(spec.MaxSeconds)},
		"cpu_seconds":  {least: float(0), most: float(spec.MaxSeconds)},
		"memory_bytes": {text: "Address space of each process; 0 or absent means 2 GiB.", least: float(0), most: float(spec.MaxMemoryBytes)},
		"processes":    {least: float(0), most: float(spec.MaxProcesses)},
		"file_bytes":   {least: float(0), most: float(spec.MaxFileBytes)},
		"output_bytes": {least: float(0), most: float(spec.MaxOutputBytes)},
	},
}

// describeTasks completes the schemas that huma derived from task.Spec.
func describeTasks(registry huma.Registry) {
	for name, fields := range taskBounds {
		schema := registry.Map()[name]
		for field, b := range fields {
			property := schema.Properties[field]
			property.Description = b.text
			property.Minimum, property.Maximum = b.least, b.most
			property.MaxLength, property.MaxItems, property.Enum = b.mostLength, b.mostItems, b.enum
		}
	}
	// These structs are never absent in Go, but may be in JSON.
	spec := registry.Map()["Task"]
	spec.Required = slices.DeleteFunc(spec.Required, func(name string) bool { return name == "sampling" || name == "limits" })
}
