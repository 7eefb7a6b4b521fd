// Package transcript compares the chat that a harness sends with the one that its
// session has seen, and says which part of a model's text may be shown while the rest
// of it is still to come.
//
// It is pure. A message is compared by what every harness keeps of it: role, content,
// tool calls with their ids, and the id of the call that a tool's message answers;
// names, refusals and whatever else libraries add or drop do not count. It knows no
// template and no token: those are the engine's.
package transcript

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"

	"holdfast/orchestrator/toolcall"
)

// MaxMessages bounds a chat.
const MaxMessages = 100_000

// Message is one message of a chat.
type Message struct {
	// Raw is the message as it came.
	Raw json.RawMessage
	// same is what two renderings of one message have in common, as JSON.
	same []byte
}

// FieldError says what is wrong with a chat, and where.
type FieldError struct {
	// Path is relative to the chat, such as [3].role.
	Path, Problem string
}

func (e *FieldError) Error() string { return e.Path + " " + e.Problem }

// sent is a message as the chat completions API writes it.
type sent struct {
	Role       string          `json:"role"`
	Content    json.RawMessage `json:"content"`
	ToolCalls  []sentCall      `json:"tool_calls"`
	ToolCallID string          `json:"tool_call_id"`
}

type sentCall struct {
	ID       string `json:"id"`
	Function struct {
		Name      string `json:"name"`
		Arguments string `json:"arguments"`
	} `json:"function"`
}

// compared is what counts of a message.
type compared struct {
	Role       string         `json:"role"`
	Content    string         `json:"content"`
	Calls      []comparedCall `json:"calls,omitempty"`
	ToolCallID string         `json:"tool_call_id,omitempty"`
}

type comparedCall struct {
	ID        string `json:"id"`
	Name      string `json:"name"`
	Arguments any    `json:"arguments"`
}

// Parse reads a JSON array of messages. Errors are *FieldError.
func Parse(raw json.RawMessage) ([]Message, error) {
	var all []json.RawMessage
	if err := json.Unmarshal(raw, &all); err != nil || len(all) == 0 {
		return nil, &FieldError{Problem: "must be an array of at least one message"}
	}
	if len(all) > MaxMessages {
		return nil, &FieldError{Problem: fmt.Sprintf("must have at most %d messages, has %d", MaxMessages, len(all))}
	}
	messages := make([]Message, len(all))
	for i, one := range all {
		var m sent
		if err := json.Unmarshal(one, &m); err != nil {
			return nil, &FieldError{Path: fmt.Sprintf("[%d]", i), Problem: "is no message: " + err.Error()}
		}
		if m.Role == "" {
			return nil, &FieldError{Path: fmt.Sprintf("[%d].role", i), Problem: "is missing"}
		}
		same, err := m.compared()
		if err != nil {
			return nil, &FieldError{Path: fmt.Sprintf("[%d].content", i), Problem: err.Error()}
		}
		messages[i] = Message{Raw: one, same: same}
	}
	return messages, nil
}

// Answer is the assistant's message as it is given to a harness.
func Answer(content string, calls []toolcall.Call) Message {
	m := compared{Role: "assistant", Content: content}
	for _, call := range calls {
		m.Calls = append(m.Calls, comparedCall{ID: call.ID, Name: call.Name, Arguments: value(string(call.Arguments))})
	}
	same, err := m.encode()
	if err != nil {
		panic("transcript: text and values that were JSON before must encode: " + err.Error())
	}
	return Message{same: same}
}

func (m *sent) compared() ([]byte, error) {
	c := compared{Role: m.Role, ToolCallID: m.ToolCallID}
	var err error
	if c.Content, err = content(m.Content); err != nil {
		return nil, err
	}
	for _, call := range m.ToolCalls {
		c.Calls = append(c.Calls, comparedCall{ID: call.ID, Name: call.Function.Name, Arguments: value(call.Function.Arguments)})
	}
	return c.encode()
}

// encode leaves blank text beside calls out: some libraries write it as null.
func (c *compared) encode() ([]byte, error) {
	if len(c.Calls) > 0 && strings.TrimSpace(c.Content) == "" {
		c.Content = ""
	}
	return json.Marshal(c)
}

// content is a message's text, whether it comes as a string or in parts of text. Parts
// of another kind, such as pictures, are refused: no rendering in ids would hold them.
func content(raw json.RawMessage) (text string, err error) {
	raw = bytes.TrimSpace(raw)
	switch {
	case len(raw) == 0, string(raw) == "null":
		return "", nil
	case raw[0] == '"':
		err = json.Unmarshal(raw, &text)
		return text, err
	}
	var pieces []struct {
		Type string  `json:"type"`
		Text *string `json:"text"`
	}
	if err := json.Unmarshal(raw, &pieces); err != nil {
		return "", fmt.Errorf("must be text or an array of parts")
	}
	var joined strings.Builder
	for _, piece := range pieces {
		if piece.Type != "text" || piece.Text == nil {
			return "", fmt.Errorf("has a part of type %q: only text is served", piece.Type)
		}
		joined.WriteString(*piece.Text)
	}
	return joined.String(), nil
}

// value is a JSON text's value, so that spaces and the order of members do not count;
// what is no JSON is its own text.
func value(text string) any {
	var v any
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()
	if err := decoder.Decode(&v); err != nil {
		return text
	}
	return v
}

// Digest identifies a chat with the tools it was shown with.
func Digest(tools json.RawMessage, messages []Message) []byte {
	hash := sha256.New()
	shown, err := json.Marshal(value(string(tools)))
	if err != nil {
		panic("transcript: a value that was JSON before must encode: " + err.Error())
	}
	fmt.Fprintf(hash, "chat %d ", len(shown))
	hash.Write(shown)
	for _, m := range messages {
		fmt.Fprintf(hash, "%d ", len(m.same))
		hash.Write(m.same)
	}
	return hash.Sum(nil)
}

// DigestText identifies a text that goes on without messages.
func DigestText(pieces ...string) []byte {
	hash := sha256.New()
	fmt.Fprint(hash, "text ")
	for _, piece := range pieces {
		hash.Write([]byte(piece))
	}
	return hash.Sum(nil)
}

// Join writes messages as they came as a JSON array, behind some others.
func Join(before []json.RawMessage, messages []Message) json.RawMessage {
	var b bytes.Buffer
	b.WriteByte('[')
	write := func(raw json.RawMessage) {
		if b.Len() > 1 {
			b.WriteByte(',')
		}
		b.Write(raw)
	}
	for _, raw := range before {
		write(raw)
	}
	for _, m := range messages {
		write(m.Raw)
	}
	b.WriteByte(']')
	return b.Bytes()
}
