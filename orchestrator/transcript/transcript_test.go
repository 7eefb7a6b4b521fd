package transcript

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"holdfast/orchestrator/toolcall"
)

func parse(t *testing.T, text string) []Message {
	t.Helper()
	messages, err := Parse(json.RawMessage(text))
	if err != nil {
		t.Fatal(err)
	}
	return messages
}

// TestWhatLibrariesReshapeIsTheSameMessage: harnesses send back what they got through
// their own types.
func TestWhatLibrariesReshapeIsTheSameMessage(t *testing.T) {
	calls := []toolcall.Call{{ID: "c1", Name: "look", Arguments: json.RawMessage(`{"at":"door","n":1}`)}}
	for _, c := range []struct {
		name, back string
		answer     Message
		same       bool
	}{
		{"as it was", `[{"role":"assistant","content":"hi"}]`, Answer("hi", nil), true},
		{"in parts", `[{"role":"assistant","content":[{"type":"text","text":"h"},{"type":"text","text":"i"}]}]`, Answer("hi", nil), true},
		{"with more fields", `[{"content":"hi","role":"assistant","refusal":null,"audio":null,"name":"x","reasoning_content":null}]`, Answer("hi", nil), true},
		{"calls, content null, spaces and order", `[{"role":"assistant","content":null,"tool_calls":[{"type":"function","id":"c1","function":{"name":"look","arguments":"{ \"n\": 1, \"at\": \"door\" }"}}]}]`, Answer("", calls), true},
		{"calls, blank content", `[{"role":"assistant","content":"\n","tool_calls":[{"id":"c1","function":{"name":"look","arguments":"{\"at\":\"door\",\"n\":1}"}}]}]`, Answer("", calls), true},
		{"another text", `[{"role":"assistant","content":"hi "}]`, Answer("hi", nil), false},
		{"another role", `[{"role":"user","content":"hi"}]`, Answer("hi", nil), false},
		{"another argument", `[{"role":"assistant","tool_calls":[{"id":"c1","function":{"name":"look","arguments":"{\"at\":\"door\",\"n\":2}"}}]}]`, Answer("", calls), false},
		{"another id", `[{"role":"assistant","tool_calls":[{"id":"c2","function":{"name":"look","arguments":"{\"at\":\"door\",\"n\":1}"}}]}]`, Answer("", calls), false},
		{"without its call", `[{"role":"assistant","content":""}]`, Answer("", calls), false},
	} {
		got := Digest(nil, parse(t, c.back))
		if want := Digest(nil, []Message{c.answer}); bytes.Equal(got, want) != c.same {
			t.Errorf("%s: the same is %v, want %v", c.name, !c.same, c.same)
		}
	}
}

func TestDigestKeepsChatsApart(t *testing.T) {
	tools := json.RawMessage(`[{"type":"function"}]`)
	seen := map[string]string{}
	for name, digest := range map[string][]byte{
		"one":       Digest(nil, parse(t, `[{"role":"user","content":"a"}]`)),
		"two":       Digest(nil, parse(t, `[{"role":"user","content":"a"},{"role":"user","content":""}]`)),
		"tools":     Digest(tools, parse(t, `[{"role":"user","content":"a"}]`)),
		"an answer": Digest(nil, parse(t, `[{"role":"tool","tool_call_id":"1","content":"a"}]`)),
		"of 2":      Digest(nil, parse(t, `[{"role":"tool","tool_call_id":"2","content":"a"}]`)),
		"text":      DigestText("a"),
	} {
		if other, twice := seen[string(digest)]; twice {
			t.Errorf("%s and %s have one digest", name, other)
		}
		seen[string(digest)] = name
	}
	if !bytes.Equal(DigestText("ab", "c"), DigestText("a", "bc")) {
		t.Error("a text depends on its pieces")
	}
}

func TestMessagesThatMakeNoSense(t *testing.T) {
	for text, path := range map[string]string{
		`{}`: "", `[]`: "", `[7]`: "[0]", `[{"role":"user"},{"content":"x"}]`: "[1].role", `[{"role":"user","content":7}]`: "[0].content",
	} {
		var field *FieldError
		if _, err := Parse(json.RawMessage(text)); !errors.As(err, &field) || field.Path != path {
			t.Errorf("%s got %v, want an error at %q", text, err, path)
		}
	}
}

// FuzzScreen: however a text arrives, what is shown is the beginning of the content
// that the whole text turns out to have.
func FuzzScreen(f *testing.F) {
	for _, text := range []string{
		"hello", "\n\n<tool_call>{\"name\":\"a\"}</tool_call>", "look:\n<tool_call>{\"name\":\"a\"}</tool_call> done", "a < b <tool", "<tool_calls",
		`{"content":"x","tool_calls":[{"function":{"name":"n"}}]}`, "<think><tool_call></think>x<tool_call>{\"name\":\"a\"}</tool_call>", " {", "<tool_call>broken",
	} {
		f.Add(text, 3)
	}
	f.Fuzz(func(t *testing.T, text string, step int) {
		if !utf8.ValidString(text) || step < 1 {
			return
		}
		for _, format := range []toolcall.Format{"", toolcall.Hermes, toolcall.OpenAI} {
			screen := Screen{Format: format}
			var shown strings.Builder
			for end := 0; end < len(text); end += step {
				shown.WriteString(screen.Grow(text[:end]))
			}
			content, calls := Read(format, text, 0)
			rest, ok := screen.End(text, content)
			if !ok || shown.String()+rest != content {
				t.Fatalf("%s: shown %q and %q of %q, content %q, %d calls", format, shown.String(), rest, text, content, len(calls))
			}
		}
	})
}
