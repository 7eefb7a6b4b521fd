// Package toolcall reads tool calls out of what a model wrote and writes the
// results of tools back, in formats that have a name.
//
// It is pure: text in, values out. A call that cannot be read is no failure of
// the service but something to tell the model, so reading never ends with an
// error: it gives the calls that are well-formed and a *MalformedError for each
// that is not, which RenderProblems turns into messages.
//
// Not here: streams of half-finished calls, the tokens of a chat template (those
// are the engine's), and formats without a written definition.
package toolcall

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// Format is the closed set of ways in which a model writes tool calls.
type Format string

const (
	// OpenAI: the text is a message of the chat completions API as JSON, with its
	// tool_calls. A text that is no such message has no calls.
	OpenAI Format = "openai"
	// Hermes: each call is a JSON object with name and arguments between the tags
	// <tool_call> and </tool_call>, anywhere in the text.
	Hermes Format = "hermes"
)

// Formats lists every format, for error messages.
func Formats() []Format { return []Format{OpenAI, Hermes} }

func (f Format) String() string { return string(f) }

// Limits of what is read from one message. What lies beyond is malformed.
const (
	MaxCalls          = 64
	MaxArgumentsBytes = 1 << 20
	MaxNameBytes      = 256
)

// Tool is what a model is told about one tool.
type Tool struct {
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
	// Parameters is a JSON schema of the arguments; absent means none are taken.
	Parameters json.RawMessage `json:"parameters,omitempty"`
}

// Call is one well-formed call.
type Call struct {
	// ID ties the result to the call. Where the format has none it is made from
	// turn and position, so that reading the same text again gives the same id.
	ID   string `json:"id"`
	Name string `json:"name"`
	// Arguments is always a JSON object.
	Arguments json.RawMessage `json:"arguments"`
}

// Result is what a tool, or whoever stands for it, has to say about one call.
type Result struct {
	CallID  string `json:"call_id"`
	Name    string `json:"name,omitempty"`
	Content string `json:"content"`
	// IsError marks a tool that reports a failure. The model is told by Content.
	IsError bool `json:"is_error,omitempty"`
}

// Message is one message of a chat history.
type Message struct {
	Role       string `json:"role"`
	Content    string `json:"content"`
	Name       string `json:"name,omitempty"`
	ToolCallID string `json:"tool_call_id,omitempty"`
}

// Parsed is what one message of the model holds.
type Parsed struct {
	// Content is the text beside the calls.
	Content string
	Calls   []Call
	// Problems are the calls that could not be read, in order of appearance.
	Problems []*MalformedError
}

// MalformedError is a call that the model wrote and that cannot be read.
type MalformedError struct {
	// CallID is the call's own id, or one made like Call.ID.
	CallID string
	// Name is the tool's name as far as it could be read.
	Name string
	// Problem says what is wrong, in words that help to write it better.
	Problem string
}

func (e *MalformedError) Error() string {
	if e.Name != "" {
		return fmt.Sprintf("malformed call of the tool %q: %s", e.Name, e.Problem)
	}
	return "malformed tool call: " + e.Problem
}

// Parse reads the calls of the model's turn-th message, counted from 0. A format
// that is not known counts as one without calls; specs are validated before.
func Parse(format Format, text string, turn int) Parsed {
	switch format {
	case OpenAI:
		return parseOpenAI(text, turn)
	case Hermes:
		return parseHermes(text, turn)
	}
	return Parsed{Content: text}
}

// add takes a call over into p, or the problem it has.
func (p *Parsed) add(call Call, problem string) {
	if problem == "" && len(p.Calls) >= MaxCalls {
		problem = fmt.Sprintf("a message may hold at most %d calls", MaxCalls)
	}
	if problem != "" {
		// A flood of bad calls is one problem, told once.
		if len(p.Problems) < MaxCalls {
			p.Problems = append(p.Problems, &MalformedError{CallID: call.ID, Name: call.Name, Problem: problem})
		}
		return
	}
	p.Calls = append(p.Calls, call)
}

// position numbers the next call of p.
func (p *Parsed) position() int { return len(p.Calls) + len(p.Problems) }

func madeID(turn, position int) string {
	return fmt.Sprintf("call_%d_%d", turn, position)
}

// checkName bounds a name that is looked up, logged and shown.
func checkName(name string) (problem string) {
	switch {
	case name == "":
		return "name is missing"
	case len(name) > MaxNameBytes:
		return fmt.Sprintf("name must be at most %d bytes long", MaxNameBytes)
	}
	return ""
}

// readArguments accepts a JSON object, the same as a JSON string (which is how
// the chat completions API writes it), and nothing, which means no arguments.
func readArguments(raw json.RawMessage) (object json.RawMessage, problem string) {
	raw = bytes.TrimSpace(raw)
	if len(raw) > MaxArgumentsBytes {
		return nil, fmt.Sprintf("arguments must be at most %d bytes long", MaxArgumentsBytes)
	}
	if len(raw) > 0 && raw[0] == '"' {
		var text string
		if err := json.Unmarshal(raw, &text); err != nil {
			return nil, "arguments are not valid JSON: " + err.Error()
		}
		raw = json.RawMessage(strings.TrimSpace(text))
	}
	if len(raw) == 0 || string(raw) == "null" {
		return json.RawMessage("{}"), ""
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(raw, &members); err != nil {
		if raw[0] != '{' && json.Valid(raw) {
			return nil, "arguments must be a JSON object"
		}
		return nil, "arguments are not valid JSON: " + err.Error()
	}
	return bytes.Clone(raw), ""
}

// Describe gives tools in the form of the chat completions API, which is what
// engines' chat templates take.
func Describe(tools []Tool) (json.RawMessage, error) {
	type function struct {
		Type     string `json:"type"`
		Function Tool   `json:"function"`
	}
	described := make([]function, len(tools))
	for i, tool := range tools {
		described[i] = function{Type: "function", Function: tool}
	}
	raw, err := json.Marshal(described)
	if err != nil {
		return nil, fmt.Errorf("describing tools: %w", err)
	}
	return raw, nil
}
