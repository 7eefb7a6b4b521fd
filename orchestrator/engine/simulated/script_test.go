package simulated

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"holdfast/orchestrator/engine"
)

// TestScriptedEngineSaysItsLines asks an engine with a script through the client of
// each dialect: whole outputs, outputs that are cut, and the rest of one that was cut.
func TestScriptedEngineSaysItsLines(t *testing.T) {
	script := Script{
		{After: "door", Say: `I knock. <tool_call>{"name":"knock","arguments":{}}</tool_call>`},
		{After: "door opens", With: "window", Say: "I look."},
		{After: "door opens", With: "at the", Say: "I go in 42 times — ça va."},
	}
	for _, dialect := range []Dialect{VLLM, SGLang} {
		t.Run(dialect.String(), func(t *testing.T) {
			s := newTestServer(t, Config{TimeScale: 1e5, Dialect: dialect, Script: script})
			server := httptest.NewServer(s.Handler())
			defer server.Close()
			client, err := engine.NewClient(dialect.String(), server.URL)
			if err != nil {
				t.Fatal(err)
			}
			tokenizer, _ := engine.TokenizerOf(client)
			say := func(prompt []int32, most int) (engine.Result, string) {
				t.Helper()
				result, err := client.Generate(t.Context(), engine.Request{RequestID: "r", SessionID: "s", Prompt: prompt, MaxTokens: most, Temperature: 1, TopP: 1, WithLogprobs: true, DataParallelRank: -1}, nil)
				if err != nil {
					t.Fatal(err)
				}
				text, err := tokenizer.Detokenize(t.Context(), result.OutputIDs, result.FinishReason == engine.FinishStop)
				if err != nil || len(result.Logprobs) != len(result.OutputIDs) {
					t.Fatal(text, err, len(result.Logprobs), len(result.OutputIDs))
				}
				return result, text
			}
			first := tokenize(nil, "<user> You are at the door.\n<assistant>", 151_936)
			result, text := say(first, 500)
			if text != script[0].Say || result.FinishReason != engine.FinishStop {
				t.Fatalf("it said %q and ended with %v", text, result.FinishReason)
			}
			second := append(append(first, result.OutputIDs...), tokenize(nil, "<user> The door opens.\n<assistant>", 151_936)...)
			part, begun := say(second, 7)
			if part.FinishReason != engine.FinishLength || len(part.OutputIDs) != 7 || !strings.HasPrefix(script[2].Say, begun) {
				t.Fatalf("with room for 7 tokens it said %q (%d tokens) and ended with %v", begun, len(part.OutputIDs), part.FinishReason)
			}
			if rest, text := say(append(second, part.OutputIDs...), 500); begun+text != script[2].Say || rest.FinishReason != engine.FinishStop {
				t.Fatalf("after %q it goes on with %q", begun, text)
			}
			if result, _ := say(tokenize(nil, "nothing of the kind", 151_936), 5); len(result.OutputIDs) == 0 {
				t.Fatal("no noise where no line fits")
			}
		})
	}
}

func TestScriptsAreCheckedAndReplaced(t *testing.T) {
	s := newTestServer(t, Config{})
	put := func(body string) int {
		w := httptest.NewRecorder()
		s.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodPut, "/simulated/script", bytes.NewBufferString(body)))
		return w.Code
	}
	for _, bad := range []string{`[{"after":"","say":"x"}]`, `[{"when":"x"}]`, `{}`} {
		if code := put(bad); code != http.StatusBadRequest {
			t.Errorf("%s got %d", bad, code)
		}
	}
	if code := put(`[{"after":"x","say":"y"}]`); code != http.StatusOK || len(*s.script.Load()) != 1 {
		t.Errorf("a script got %d", code)
	}
	if _, err := New(Config{Script: Script{{Say: "x"}}}); err == nil {
		t.Error("a line without after was taken")
	}
}
