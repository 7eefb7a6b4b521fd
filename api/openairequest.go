package api

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"holdfast/orchestrator/toolcall"
	"holdfast/workflows"
)

// openAIRequest is a call of the chat completions or of the completions API, with what
// vLLM adds to them. Members that are not here are ignored, as client libraries send
// many that change nothing.
type openAIRequest struct {
	Model    string          `json:"model"`
	Messages json.RawMessage `json:"messages"`
	Prompt   json.RawMessage `json:"prompt"`

	Tools             json.RawMessage `json:"tools"`
	ToolChoice        json.RawMessage `json:"tool_choice"`
	ParallelToolCalls *bool           `json:"parallel_tool_calls"`
	ToolFormat        string          `json:"tool_format"`

	MaxTokens           *int            `json:"max_tokens"`
	MaxCompletionTokens *int            `json:"max_completion_tokens"`
	MinTokens           *int            `json:"min_tokens"`
	Temperature         *float64        `json:"temperature"`
	TopP                *float64        `json:"top_p"`
	Seed                *int64          `json:"seed"`
	StopTokenIDs        []int32         `json:"stop_token_ids"`
	IgnoreEOS           *bool           `json:"ignore_eos"`
	Logprobs            json.RawMessage `json:"logprobs"`
	TopLogprobs         *int            `json:"top_logprobs"`

	Stream        bool `json:"stream"`
	StreamOptions *struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	ReturnTokenIDs bool `json:"return_token_ids"`

	// What follows must not ask for anything.
	N                 *int            `json:"n"`
	BestOf            *int            `json:"best_of"`
	Stop              json.RawMessage `json:"stop"`
	Echo              *bool           `json:"echo"`
	Suffix            *string         `json:"suffix"`
	FrequencyPenalty  *float64        `json:"frequency_penalty"`
	PresencePenalty   *float64        `json:"presence_penalty"`
	LogitBias         json.RawMessage `json:"logit_bias"`
	ResponseFormat    json.RawMessage `json:"response_format"`
	Functions         json.RawMessage `json:"functions"`
	FunctionCall      json.RawMessage `json:"function_call"`
	Audio             json.RawMessage `json:"audio"`
	RepetitionPenalty *float64        `json:"repetition_penalty"`
	TopK              *int            `json:"top_k"`
	MinP              *float64        `json:"min_p"`
	GuidedJSON        json.RawMessage `json:"guided_json"`
	GuidedRegex       json.RawMessage `json:"guided_regex"`
	GuidedChoice      json.RawMessage `json:"guided_choice"`
	GuidedGrammar     json.RawMessage `json:"guided_grammar"`
	Structured        json.RawMessage `json:"structured_outputs"`
	GenerationPrompt  *bool           `json:"add_generation_prompt"`
	TemplateValues    json.RawMessage `json:"chat_template_kwargs"`
	Template          json.RawMessage `json:"chat_template"`
	ContinueFinal     *bool           `json:"continue_final_message"`
}

func readOpenAIRequest(body []byte) (*openAIRequest, error) {
	var asked openAIRequest
	if err := unmarshalWith(body, &asked); err != nil {
		return nil, problemOf(err)
	}
	return &asked, nil
}

// contentOf identifies a call by its words, for callers that give it no name.
func contentOf(kind openAIKind, body []byte) string {
	hash := sha256.New()
	fmt.Fprintf(hash, "%s ", kind)
	hash.Write(body)
	return hex.EncodeToString(hash.Sum(nil)[:16])
}

// absent tells a member that asks for nothing.
func absent(raw json.RawMessage) bool {
	switch strings.TrimSpace(string(raw)) {
	case "", "null", "[]", "{}", `""`:
		return true
	}
	return false
}

// call is what the session's harness asks for.
func (r *openAIRequest) call(kind openAIKind, header http.Header) (workflows.HarnessCall, error) {
	call := workflows.HarnessCall{
		RequestID: header.Get("Idempotency-Key"), WithText: true, WithPromptIDs: r.ReturnTokenIDs, Temperature: r.Temperature, TopP: r.TopP, Seed: r.Seed,
		StopTokenIDs: r.StopTokenIDs, IgnoreEOS: r.IgnoreEOS,
	}
	if len(call.RequestID) > 128 || !plainText(call.RequestID) {
		return call, invalid("header.Idempotency-Key", "must be 1 to 128 bytes of text without U+0000")
	}
	for _, check := range []func(openAIKind) error{r.checkLengths, r.checkSampling, r.checkUnserved, r.checkLogprobs} {
		if err := check(kind); err != nil {
			return call, err
		}
	}
	for _, limit := range []*int{r.MaxTokens, r.MaxCompletionTokens} {
		if limit != nil {
			call.MaxTokens = *limit
		}
	}
	if r.MinTokens != nil {
		call.MinTokens = *r.MinTokens
	}
	if kind == openAIText {
		return call, r.putPrompt(&call)
	}
	return call, r.putChat(&call, header)
}

func (r *openAIRequest) checkLengths(openAIKind) error {
	for name, limit := range map[string]*int{"max_tokens": r.MaxTokens, "max_completion_tokens": r.MaxCompletionTokens} {
		switch {
		case limit == nil:
		case *limit < 1:
			return invalid("body."+name, fmt.Sprintf("must be at least 1, is %d", *limit))
		case r.MinTokens != nil && *r.MinTokens > *limit:
			return invalid("body.min_tokens", "must be at most "+name)
		}
	}
	if r.MinTokens != nil && *r.MinTokens < 0 {
		return invalid("body.min_tokens", "must not be negative")
	}
	return nil
}

func (r *openAIRequest) checkSampling(openAIKind) error {
	switch {
	case r.Temperature != nil && !(*r.Temperature >= 0 && *r.Temperature <= 100):
		return invalid("body.temperature", "must be from 0 to 100")
	case r.TopP != nil && !(*r.TopP > 0 && *r.TopP <= 1):
		return invalid("body.top_p", "must be above 0 and at most 1")
	}
	for i, id := range r.StopTokenIDs {
		if id < 0 {
			return invalid(fmt.Sprintf("body.stop_token_ids[%d]", i), fmt.Sprintf("must be a token id, is %d", id))
		}
	}
	return nil
}

// checkUnserved refuses what would change the answer and is not done.
func (r *openAIRequest) checkUnserved(kind openAIKind) error {
	const pool = "is not served: a session samples as its policy does"
	for _, member := range []struct {
		name    string
		asked   bool
		problem string
	}{
		{"n", r.N != nil && *r.N != 1, "must be 1: a session has one answer to each call"},
		{"best_of", r.BestOf != nil && *r.BestOf != 1, "must be 1: a session has one answer to each call"},
		{"stop", !absent(r.Stop), "is not served: stop_token_ids ends an output by token id"},
		{"echo", r.Echo != nil && *r.Echo, "is not served"},
		{"suffix", r.Suffix != nil && *r.Suffix != "", "is not served"},
		{"frequency_penalty", r.FrequencyPenalty != nil && *r.FrequencyPenalty != 0, pool},
		{"presence_penalty", r.PresencePenalty != nil && *r.PresencePenalty != 0, pool},
		{"repetition_penalty", r.RepetitionPenalty != nil && *r.RepetitionPenalty != 1, pool},
		{"top_k", r.TopK != nil && *r.TopK > 0, pool},
		{"min_p", r.MinP != nil && *r.MinP != 0, pool},
		{"logit_bias", !absent(r.LogitBias), pool},
		{"guided_json", !absent(r.GuidedJSON), pool},
		{"guided_regex", !absent(r.GuidedRegex), pool},
		{"guided_choice", !absent(r.GuidedChoice), pool},
		{"guided_grammar", !absent(r.GuidedGrammar), pool},
		{"structured_outputs", !absent(r.Structured), pool},
		{"response_format", !absent(r.ResponseFormat) && !plainFormat(r.ResponseFormat), "is not served: only text"},
		{"functions", !absent(r.Functions), "is not served: use tools"},
		{"function_call", !absent(r.FunctionCall), "is not served: use tools"},
		{"audio", !absent(r.Audio), "is not served"},
		{"chat_template", !absent(r.Template), "is not served: the template is the engine's"},
		{"chat_template_kwargs", !absent(r.TemplateValues), "is not served: the template is the engine's"},
		{"add_generation_prompt", r.GenerationPrompt != nil && !*r.GenerationPrompt, "must be true: an answer begins a message of its own"},
		{"continue_final_message", r.ContinueFinal != nil && *r.ContinueFinal, "is not served: an answer begins a message of its own"},
		{"prompt", kind == openAIChat && !absent(r.Prompt), "belongs to /completions"},
		{"messages", kind == openAIText && !absent(r.Messages), "belongs to /chat/completions"},
		{"tools", kind == openAIText && !absent(r.Tools), "belongs to /chat/completions"},
	} {
		if member.asked {
			return invalid("body."+member.name, member.problem)
		}
	}
	return nil
}

func plainFormat(raw json.RawMessage) bool {
	var format struct {
		Type string `json:"type"`
	}
	return json.Unmarshal(raw, &format) == nil && format.Type == "text"
}

// checkLogprobs: only that of the chosen token is there. It is recorded whether it is
// asked for or not.
func (r *openAIRequest) checkLogprobs(kind openAIKind) error {
	const only = "only the log-probability of the chosen token is there"
	if kind == openAIChat {
		var wanted *bool
		if r.Logprobs != nil && json.Unmarshal(r.Logprobs, &wanted) != nil {
			return invalid("body.logprobs", "must be true or false")
		}
		if r.TopLogprobs != nil && *r.TopLogprobs != 0 {
			return invalid("body.top_logprobs", "must be 0: "+only)
		}
		return nil
	}
	var wanted *int
	if r.Logprobs != nil && json.Unmarshal(r.Logprobs, &wanted) != nil {
		return invalid("body.logprobs", "must be a number")
	}
	if wanted != nil && (*wanted < 0 || *wanted > 1) {
		return invalid("body.logprobs", "must be 0 or 1: "+only)
	}
	return nil
}

// withLogprobs tells whether the answer is to have them.
func (r *openAIRequest) withLogprobs() bool {
	text := strings.TrimSpace(string(r.Logprobs))
	return text != "" && text != "null" && text != "false"
}

func (r *openAIRequest) putChat(call *workflows.HarnessCall, header http.Header) error {
	if r.Messages == nil {
		return invalid("body.messages", "is missing")
	}
	format := r.ToolFormat
	location := "body.tool_format"
	if format == "" {
		format, location = header.Get("X-Holdfast-Tool-Format"), "header.X-Holdfast-Tool-Format"
	}
	if format != "" && !slices.Contains(toolcall.Formats(), toolcall.Format(format)) {
		return invalid(location, fmt.Sprintf("must be one of %v", toolcall.Formats()))
	}
	call.Chat = &workflows.HarnessChat{Messages: r.Messages, ToolFormat: format}
	var choice string
	if json.Unmarshal(r.ToolChoice, &choice) != nil && !absent(r.ToolChoice) {
		choice = "a tool"
	}
	switch choice {
	case "", "auto":
	case "none":
		return nil
	default:
		return invalid("body.tool_choice", "must be auto or none: the model cannot be made to call "+choice)
	}
	tools, err := r.tools()
	if err != nil || len(tools) == 0 {
		return err
	}
	if r.ParallelToolCalls != nil && !*r.ParallelToolCalls {
		return invalid("body.parallel_tool_calls", "must be true: the model may write several calls")
	}
	call.Chat.Tools = r.Tools
	return nil
}

// tools are what the model may call, as functions with names.
func (r *openAIRequest) tools() (tools []json.RawMessage, err error) {
	if r.Tools != nil && json.Unmarshal(r.Tools, &tools) != nil {
		return nil, invalid("body.tools", "must be an array")
	}
	for i, raw := range tools {
		var tool struct {
			Type     string `json:"type"`
			Function struct {
				Name string `json:"name"`
			} `json:"function"`
		}
		location := fmt.Sprintf("body.tools[%d]", i)
		switch err := json.Unmarshal(raw, &tool); {
		case err != nil:
			return nil, invalid(location, "must be an object with type and function, whose name is text")
		case tool.Type != "function":
			return nil, invalid(location+".type", "must be function")
		case tool.Function.Name == "":
			return nil, invalid(location+".function.name", "is missing")
		}
	}
	return tools, nil
}

// putPrompt takes one prompt: text, token ids, or an array of one of these.
func (r *openAIRequest) putPrompt(call *workflows.HarnessCall) error {
	const location = "body.prompt"
	prompt := r.Prompt
	var several []json.RawMessage
	if json.Unmarshal(prompt, &several) == nil && len(several) > 0 && strings.ContainsAny(string(several[0][:1]), `["`) {
		if len(several) > 1 {
			return invalid(location, "must be one prompt: a session has one context")
		}
		prompt = several[0]
	}
	var text string
	if json.Unmarshal(prompt, &text) == nil && strings.HasPrefix(strings.TrimSpace(string(prompt)), `"`) {
		if text == "" {
			return invalid(location, "must not be empty")
		}
		call.Text = &text
		return nil
	}
	if err := json.Unmarshal(prompt, &call.Context); err != nil || len(call.Context) == 0 {
		return invalid(location, "must be text or token ids")
	}
	for i, id := range call.Context {
		if id < 0 {
			return invalid(fmt.Sprintf("%s[%d]", location, i), fmt.Sprintf("must be a token id, is %d", id))
		}
	}
	return nil
}
