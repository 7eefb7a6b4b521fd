package toolcall

import (
	"encoding/json"
	"strings"
)

// openAIMessage is an assistant's message, or an answer's choice without its
// wrapping. Content may be null beside calls.
type openAIMessage struct {
	Content   json.RawMessage   `json:"content"`
	ToolCalls []json.RawMessage `json:"tool_calls"`
}

type openAICall struct {
	ID       string `json:"id"`
	Type     string `json:"type"`
	Function struct {
		Name      string          `json:"name"`
		Arguments json.RawMessage `json:"arguments"`
	} `json:"function"`
}

// parseOpenAI takes a text that begins with { and speaks of "tool_calls" for a
// message; everything else is content, since a model may well answer with a JSON
// object of its own.
func parseOpenAI(text string, turn int) Parsed {
	trimmed := strings.TrimSpace(text)
	if !strings.HasPrefix(trimmed, "{") || !strings.Contains(trimmed, `"tool_calls"`) {
		return Parsed{Content: text}
	}
	var message openAIMessage
	if err := json.Unmarshal([]byte(trimmed), &message); err != nil {
		p := Parsed{Content: text}
		p.add(Call{ID: madeID(turn, 0)}, "the message is not valid JSON: "+err.Error())
		return p
	}
	p := Parsed{Content: openAIContent(message.Content)}
	for _, raw := range message.ToolCalls {
		p.add(readOpenAICall(raw, madeID(turn, p.position())))
	}
	return p
}

func readOpenAICall(raw json.RawMessage, id string) (call Call, problem string) {
	var read openAICall
	if err := json.Unmarshal(raw, &read); err != nil {
		return Call{ID: id}, "the call is not valid: " + err.Error()
	}
	call = Call{ID: read.ID, Name: read.Function.Name}
	if call.ID == "" {
		call.ID = id
	}
	if read.Type != "" && read.Type != "function" {
		return call, "type must be function"
	}
	if problem = checkName(call.Name); problem != "" {
		return call, problem
	}
	call.Arguments, problem = readArguments(read.Function.Arguments)
	return call, problem
}

// openAIContent is a message's text: a string, or the text parts of an array.
func openAIContent(raw json.RawMessage) string {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text
	}
	var parts []struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	if json.Unmarshal(raw, &parts) != nil {
		return ""
	}
	var b strings.Builder
	for _, part := range parts {
		if part.Type == "text" {
			b.WriteString(part.Text)
		}
	}
	return b.String()
}
