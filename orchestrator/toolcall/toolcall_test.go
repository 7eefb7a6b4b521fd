package toolcall

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for name, c := range map[string]struct {
		format   Format
		text     string
		content  string
		calls    []Call
		problems []string
	}{
		"hermes, one call": {
			Hermes, "I look.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"at\": \"door\"}}\n</tool_call>", "I look.\n",
			[]Call{{"call_3_0", "look", json.RawMessage(`{"at": "door"}`)}}, nil,
		},
		"hermes, two calls and text between": {
			Hermes, `<tool_call>{"name":"a","arguments":{}}</tool_call> then <tool_call>{"name":"b"}</tool_call>!`, " then !",
			[]Call{{"call_3_0", "a", json.RawMessage(`{}`)}, {"call_3_1", "b", json.RawMessage(`{}`)}}, nil,
		},
		"hermes, the closing tag inside a string": {
			Hermes, `<tool_call>{"name":"write","arguments":{"text":"</tool_call> <tool_call>"}}</tool_call>`, "",
			[]Call{{"call_3_0", "write", json.RawMessage(`{"text":"</tool_call> <tool_call>"}`)}}, nil,
		},
		"hermes, the last closing tag eaten by a stop sequence": {
			Hermes, `<tool_call>{"name":"a","arguments":{"x":1}}`, "",
			[]Call{{"call_3_0", "a", json.RawMessage(`{"x":1}`)}}, nil,
		},
		"hermes, arguments as a string": {
			Hermes, `<tool_call>{"name":"a","arguments":"{\"x\":1}"}</tool_call>`, "",
			[]Call{{"call_3_0", "a", json.RawMessage(`{"x":1}`)}}, nil,
		},
		"hermes, a thought calls nothing": {
			Hermes, `<think>maybe <tool_call>{"name":"a"}</tool_call></think><tool_call>{"name":"b"}</tool_call>`,
			`<think>maybe <tool_call>{"name":"a"}</tool_call></think>`,
			[]Call{{"call_3_0", "b", json.RawMessage(`{}`)}}, nil,
		},
		"hermes, a bad call beside a good one": {
			Hermes, `<tool_call>{"name":"a",</tool_call><tool_call>{"name":"b"}</tool_call>`, "",
			[]Call{{"call_3_1", "b", json.RawMessage(`{}`)}}, []string{"call_3_0: malformed tool call: between the tags there must be one JSON object"},
		},
		"hermes, cut off": {
			Hermes, `<tool_call>{"name":"a","argum`, "", nil, []string{"call_3_0: malformed tool call: the JSON object between the tags is not complete"},
		},
		"hermes, an opening tag forgotten to close": {
			Hermes, `<tool_call>{"name":"a"} <tool_call>{"name":"b"}</tool_call>`, "",
			[]Call{{"call_3_1", "b", json.RawMessage(`{}`)}}, []string{"call_3_0: malformed tool call: the JSON object must be followed by </tool_call>"},
		},
		"hermes, no name": {Hermes, `<tool_call>{"arguments":{}}</tool_call>`, "", nil, []string{"call_3_0: malformed tool call: name is missing"}},
		"hermes, arguments no object": {
			Hermes, `<tool_call>{"name":"a","arguments":[1]}</tool_call>`, "", nil,
			[]string{`call_3_0: malformed call of the tool "a": arguments must be a JSON object`},
		},
		"hermes, not an object": {Hermes, `<tool_call>7</tool_call>`, "", nil, []string{"call_3_0: malformed tool call: the call must be a JSON object"}},
		"hermes, no calls":      {Hermes, "just text </tool_call>", "just text </tool_call>", nil, nil},
		"openai, a message": {
			OpenAI, `{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"a","arguments":"{\"x\":1}"}}]}`, "",
			[]Call{{"c1", "a", json.RawMessage(`{"x":1}`)}}, nil,
		},
		"openai, content in parts, no id": {
			OpenAI, `{"content":[{"type":"text","text":"hi"}],"tool_calls":[{"function":{"name":"a","arguments":""}}]}`, "hi",
			[]Call{{"call_3_0", "a", json.RawMessage(`{}`)}}, nil,
		},
		"openai, arguments cut off": {
			OpenAI, `{"tool_calls":[{"id":"c1","function":{"name":"a","arguments":"{\"x\":"}}]}`, "", nil,
			[]string{`c1: malformed call of the tool "a": arguments are not valid JSON`},
		},
		"openai, another type":         {OpenAI, `{"tool_calls":[{"id":"c","type":"custom"}]}`, "", nil, []string{"c: malformed tool call: type must be function"}},
		"openai, a call of wrong type": {OpenAI, `{"tool_calls":[7]}`, "", nil, []string{"call_3_0: malformed tool call: the call is not valid"}},
		"openai, the message cut off":  {OpenAI, `{"tool_calls":[`, `{"tool_calls":[`, nil, []string{"call_3_0: malformed tool call: the message is not valid JSON"}},
		"openai, an answer in JSON":    {OpenAI, `{"answer": 4}`, `{"answer": 4}`, nil, nil},
		"openai, an answer in words":   {OpenAI, `Four.`, `Four.`, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got := Parse(c.format, c.text, 3)
			if got.Content != c.content {
				t.Errorf("content %q, want %q", got.Content, c.content)
			}
			if len(got.Calls)+len(c.calls) > 0 && !reflect.DeepEqual(got.Calls, c.calls) {
				t.Errorf("calls %+v, want %+v", got.Calls, c.calls)
			}
			if len(got.Problems) != len(c.problems) {
				t.Fatalf("problems %v, want %v", got.Problems, c.problems)
			}
			for i, problem := range got.Problems {
				if text := problem.CallID + ": " + problem.Error(); !strings.HasPrefix(text, c.problems[i]) {
					t.Errorf("problem %q, want it to begin with %q", text, c.problems[i])
				}
			}
		})
	}
}

func TestParseIsBounded(t *testing.T) {
	got := Parse(Hermes, strings.Repeat(`<tool_call>{"name":"a"}</tool_call>`, 3*MaxCalls), 0)
	if len(got.Calls) != MaxCalls || len(got.Problems) != MaxCalls {
		t.Errorf("%d calls and %d problems, want %d of each", len(got.Calls), len(got.Problems), MaxCalls)
	}
	huge := fmt.Sprintf(`<tool_call>{"name":"a","arguments":{"x":%q}}</tool_call>`, strings.Repeat("y", MaxArgumentsBytes))
	if got := Parse(Hermes, huge, 0); len(got.Calls) != 0 || len(got.Problems) != 1 {
		t.Errorf("arguments beyond the limit gave %d calls, %d problems", len(got.Calls), len(got.Problems))
	}
}

func TestRender(t *testing.T) {
	results := []Result{
		{CallID: "c1", Name: "look", Content: "a <b>door</b>\n</tool_response>\nfree"},
		{CallID: "c2", Name: "go", Content: "Error: no way", IsError: true},
	}
	hermes := Render(Hermes, results)
	want := "<tool_response>\n" + `{"name":"look","content":"a <b>door</b>\n<\/tool_response>\nfree"}` + "\n</tool_response>\n" +
		"<tool_response>\n" + `{"name":"go","content":"Error: no way"}` + "\n</tool_response>"
	if len(hermes) != 1 || hermes[0].Role != "user" || hermes[0].Content != want {
		t.Errorf("got %+v", hermes)
	}
	openAI := Render(OpenAI, results)
	if len(openAI) != 2 || openAI[1] != (Message{Role: "tool", Content: "Error: no way", Name: "go", ToolCallID: "c2"}) {
		t.Errorf("got %+v", openAI)
	}
	problems := RenderProblems(OpenAI, Parse(OpenAI, `{"tool_calls":[{"id":"c9","function":{"arguments":"{}"}}]}`, 0).Problems)
	if len(problems) != 1 || problems[0].ToolCallID != "c9" || problems[0].Content != "Error: malformed tool call: name is missing" {
		t.Errorf("got %+v", problems)
	}
	if got := Render(Hermes, nil); got != nil {
		t.Errorf("no results gave %+v", got)
	}
}

func TestDescribe(t *testing.T) {
	raw, err := Describe([]Tool{{Name: "look", Description: "Look at it.", Parameters: json.RawMessage(`{"type":"object"}`)}})
	if want := `[{"type":"function","function":{"name":"look","description":"Look at it.","parameters":{"type":"object"}}}]`; err != nil || string(raw) != want {
		t.Errorf("got %s, %v", raw, err)
	}
}

// FuzzParse holds for any text: no panic, bounded output, calls that are usable
// as they are, the same result twice, and a content that is made of the text.
func FuzzParse(f *testing.F) {
	for _, text := range []string{
		`<tool_call>{"name":"a","arguments":{"x":"</tool_call>"}}</tool_call> b`,
		`<tool_call>{"name":"a"`, `<tool_call><tool_call>{}</tool_call>`, `</think><tool_call>null`,
		`{"content":"x","tool_calls":[{"id":"c","function":{"name":"n","arguments":"{}"}},3]}`,
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, format := range Formats() {
			got := Parse(format, text, 1)
			if len(got.Calls) > MaxCalls || len(got.Problems) > MaxCalls {
				t.Fatalf("%d calls, %d problems", len(got.Calls), len(got.Problems))
			}
			for _, call := range got.Calls {
				var members map[string]json.RawMessage
				if call.ID == "" || call.Name == "" || json.Unmarshal(call.Arguments, &members) != nil || members == nil {
					t.Fatalf("call %+v is not usable", call)
				}
			}
			for _, problem := range got.Problems {
				if problem.CallID == "" || problem.Problem == "" {
					t.Fatalf("problem %+v says nothing", problem)
				}
			}
			if again := Parse(format, text, 1); !reflect.DeepEqual(got, again) {
				t.Fatalf("read twice: %+v and %+v", got, again)
			}
			if format == Hermes && len(got.Content) > len(text) {
				t.Fatalf("content %q from %q", got.Content, text)
			}
			if len(got.Calls)+len(got.Problems) == 0 && format == Hermes && got.Content != text {
				t.Fatalf("no calls, but %q became %q", text, got.Content)
			}
		}
	})
}

// FuzzRoundTrip writes a call as a model would and reads it back; then gives it a
// result and looks whether its text stayed inside its element.
func FuzzRoundTrip(f *testing.F) {
	f.Add("look", "</tool_call>", "</tool_response>")
	f.Fuzz(func(t *testing.T, name, value, content string) {
		arguments, err := json.Marshal(map[string]string{"value": value})
		// JSON writes what is no UTF-8 as replacement characters, which are longer.
		name = strings.ToValidUTF8(name, "\ufffd")
		if err != nil || checkName(name) != "" || len(arguments) > MaxArgumentsBytes {
			return
		}
		object, err := json.Marshal(Call{Name: name, Arguments: arguments})
		if err != nil {
			t.Fatal(err)
		}
		var want struct{ Name string }
		if err := json.Unmarshal(object, &want); err != nil {
			t.Fatal(err)
		}
		got := Parse(Hermes, hermesOpen+string(object)+hermesClose, 0)
		if len(got.Calls) != 1 || got.Calls[0].Name != want.Name || string(got.Calls[0].Arguments) != string(arguments) {
			t.Fatalf("wrote %s, read %+v", object, got)
		}
		text := Render(Hermes, []Result{{Name: name, Content: content}})[0].Content
		if strings.Count(text, hermesAnswerEnd) != 1 || !strings.HasSuffix(text, hermesAnswerEnd) {
			t.Fatalf("%q does not end where it should", text)
		}
		inner := strings.TrimSuffix(strings.TrimPrefix(text, hermesAnswer), hermesAnswerEnd)
		if !json.Valid([]byte(inner)) {
			t.Fatalf("%q is not JSON", inner)
		}
	})
}
