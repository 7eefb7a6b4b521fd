package wire

import "encoding/json"

// NewTurn is one model call that a harness asks for in its session.
type NewTurn struct {
	RequestID string `json:"request_id" minLength:"1" maxLength:"128" doc:"Tells the call from others of its session: sent again, it gives the turn that it made."`
	// One of the four, or none for a context that goes on unchanged.
	TokenIDs       []int32 `json:"token_ids,omitzero" doc:"The whole context. One that does not begin with all that the session has so far rewrites it: the session goes on in a new sequence."`
	AppendTokenIDs []int32 `json:"append_token_ids,omitzero" doc:"What follows the session's context."`
	PackedIDs      []byte  `json:"packed_token_ids,omitzero" doc:"token_ids as base64 of little-endian int32."`
	PackedAppend   []byte  `json:"packed_append_token_ids,omitzero" doc:"append_token_ids as base64 of little-endian int32."`

	MaxTokens    int      `json:"max_tokens,omitzero" minimum:"0" doc:"Absent: the task's, as for everything below."`
	MinTokens    int      `json:"min_tokens,omitzero" minimum:"0"`
	Temperature  *float64 `json:"temperature,omitzero" minimum:"0"`
	TopP         *float64 `json:"top_p,omitzero"`
	Seed         *int64   `json:"seed,omitzero"`
	StopTokenIDs []int32  `json:"stop_token_ids,omitzero"`
	Logprobs     *bool    `json:"logprobs,omitzero"`
	IgnoreEOS    *bool    `json:"ignore_eos,omitzero"`

	Encoding string `json:"encoding,omitzero" enum:"json,packed" doc:"Of the answer; packed gives base64 of little-endian int32 and float32. Absent means json."`
	Stream   bool   `json:"stream,omitzero" doc:"Answer as server-sent events: wait, tokens, turn, error."`
}

// HarnessTurn is the turn that a harness's call made. While the call waits, blank
// lines are sent to keep the connection; an error that comes later stands in problem.
type HarnessTurn struct {
	Turn           int       `json:"turn" doc:"Counts from 0."`
	TokenIDs       []int32   `json:"token_ids,omitzero" doc:"What was generated."`
	Logprobs       []float32 `json:"logprobs,omitzero" doc:"One per generated token; absent if not asked for."`
	PackedIDs      []byte    `json:"packed_token_ids,omitzero"`
	PackedLogprobs []byte    `json:"packed_logprobs,omitzero"`
	FinishReason   string    `json:"finish_reason" enum:"stop,length"`
	PromptTokens   int64     `json:"prompt_tokens"`
	CachedTokens   *int64    `json:"cached_tokens,omitzero" doc:"Absent if the engine did not tell."`
	OutputTokens   int64     `json:"output_tokens"`
	PolicyVersion  int64     `json:"policy_version"`
	Instance       string    `json:"instance"`
	Repeated       bool      `json:"repeated,omitzero" doc:"An earlier call of the same request made the turn."`
	Problem        *Problem  `json:"problem,omitzero" doc:"Instead of all others: why there is no turn, where the answer had begun already."`
}

// FinishSession is how a harness ends its session.
type FinishSession struct {
	Status  string          `json:"status,omitzero" enum:"completed,truncated,failed" default:"completed" doc:"failed: the harness or its environment broke; that is no reward of zero."`
	Reward  *float64        `json:"reward,omitzero" doc:"Absent: the task's scorer gives it, if it has one."`
	Detail  json.RawMessage `json:"detail,omitzero" doc:"Given back with the sample as score_detail; at most 64 KiB."`
	Problem string          `json:"problem,omitzero" maxLength:"4096" doc:"With status failed: what went wrong."`
}
