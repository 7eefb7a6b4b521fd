package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func newOpenAIClient(t *testing.T, handler http.HandlerFunc) *OpenAI {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	c, err := NewOpenAI(OpenAIConfig{URL: server.URL, Model: "m"})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func ids(text string) []int32 { return Bytes{}.Encode(nil, text) }

func textRequest(prompt string, maxTokens int) Request {
	return Request{Prompt: ids(prompt), MaxTokens: maxTokens, WithLogprobs: true, DataParallelRank: -1}
}

func textChunk(text, finish string) string {
	quoted, err := json.Marshal(text)
	if err != nil {
		panic(err)
	}
	if finish != "null" {
		finish = `"` + finish + `"`
	}
	return fmt.Sprintf(`data: {"choices":[{"index":0,"text":%s,"finish_reason":%s}],"usage":null}`+"\n\n", quoted, finish)
}

// TestOpenAITextBecomesIDs replays what servers send, and says that the ids are not
// the sampled ones.
func TestOpenAITextBecomesIDs(t *testing.T) {
	read := func(file string) string {
		text, err := os.ReadFile("testdata/" + file)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	for name, test := range map[string]struct {
		body   string
		text   string
		finish FinishReason
	}{
		"llm-d, streamed":            {read("llmd_sse_completion.txt"), "Testing@, ", FinishStop},
		"llm-d, one document":        {read("llmd_completion.json"), "Testing, ", FinishStop},
		"llm-d, chat":                {read("llmd_chat.json"), "The ", FinishStop},
		"Ollama":                     {textChunk("né", "null") + textChunk("e", "null") + textChunk("", "length") + `data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}` + "\n\ndata: [DONE]\n\n", "née", FinishLength},
		"TGI, without an end marker": {textChunk("a", "null") + textChunk("b", "eos_token"), "ab", FinishStop},
		"no output":                  {textChunk("", "stop") + "data: [DONE]\n\n", "", FinishStop},
	} {
		t.Run(name, func(t *testing.T) {
			client := newOpenAIClient(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, test.body) })
			result, err := client.Generate(t.Context(), textRequest("hi", 100), nil)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(result.OutputIDs, ids(test.text)) || result.FinishReason != test.finish || !result.IDsReencoded || result.Logprobs != nil || result.CachedTokens != -1 || result.PromptTokens != 2 {
				t.Errorf("got %+v", result)
			}
		})
	}
}

// TestOpenAILimitsAreOurs: the server counts in tokens of its own, so that limit and
// stop tokens are enforced by leaving.
func TestOpenAILimitsAreOurs(t *testing.T) {
	for name, test := range map[string]struct {
		chunks  []string
		request func(*Request)
		text    string
		finish  FinishReason
	}{
		"limit":                     {[]string{"abc", "def"}, func(r *Request) { r.MaxTokens = 5 }, "abcde", FinishLength},
		"limit in a character":      {[]string{"abé"}, func(r *Request) { r.MaxTokens = 3 }, "ab", FinishLength},
		"limit at a chunk's end":    {[]string{"abc", "def"}, func(r *Request) { r.MaxTokens = 3 }, "abc", FinishLength},
		"stop token":                {[]string{"ab.", "cd"}, func(r *Request) { r.StopTokenIDs = ids(".") }, "ab.", FinishStop},
		"stop token before minimum": {[]string{"a.b", "c.d"}, func(r *Request) { r.StopTokenIDs, r.MinTokens = ids("."), 3 }, "a.bc.", FinishStop},
	} {
		t.Run(name, func(t *testing.T) {
			left := make(chan struct{})
			client := newOpenAIClient(t, func(w http.ResponseWriter, r *http.Request) {
				defer close(left)
				_, _ = io.Copy(io.Discard, r.Body)
				for _, chunk := range test.chunks {
					fmt.Fprint(w, textChunk(chunk, "null"))
				}
				_ = http.NewResponseController(w).Flush()
				<-r.Context().Done()
			})
			r := textRequest("hi", 100)
			test.request(&r)
			result, err := client.Generate(t.Context(), r, nil)
			if err != nil || !slices.Equal(result.OutputIDs, ids(test.text)) || result.FinishReason != test.finish {
				t.Errorf("%+v, %v", result, err)
			}
			receive(t, "the server to see that the client has left", left)
		})
	}
}

func TestOpenAIRequest(t *testing.T) {
	var asked map[string]any
	client := newOpenAIClient(t, func(w http.ResponseWriter, r *http.Request) {
		if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
			t.Error(err)
		}
		fmt.Fprint(w, textChunk("x", "stop")+"data: [DONE]\n\n")
	})
	seed := int64(3)
	if _, err := client.Generate(t.Context(), Request{Prompt: ids("é\"\n"), MaxTokens: 9, Temperature: 0.5, TopP: 0.9, Seed: &seed, IgnoreEOS: true}, nil); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"model": "m", "prompt": "é\"\n", "max_tokens": 9.0, "temperature": 0.5, "top_p": 0.9, "seed": 3.0, "ignore_eos": true,
		"stream": true, "stream_options": map[string]any{"include_usage": true},
	}
	if !reflect.DeepEqual(asked, want) {
		t.Errorf("asked %v", asked)
	}
	for name, prompt := range map[string][]int32{"a token that is no byte": {104, 300}, "half a character": {0xc3}, "a negative id": {-1}} {
		var e *Error
		if _, err := client.Generate(t.Context(), Request{Prompt: prompt, MaxTokens: 1}, nil); !errors.As(err, &e) || e.Class != FailTurn {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOpenAIFailuresAreSorted(t *testing.T) {
	for name, test := range map[string]struct {
		body    string
		class   Class
		partial int
	}{
		"dropped":             {textChunk("ab", "null"), RetryElsewhere, 2},
		"done without finish": {textChunk("ab", "null") + "data: [DONE]\n\n", RetryElsewhere, 2},
		"empty":               {"", RetryElsewhere, 0},
		"half a document":     {`{"choices":[{"text":"a"`, RetryElsewhere, 0},
		"error in the stream": {textChunk("ab", "null") + `data: {"error":{"message":"boom","code":500}}` + "\n\n", RetryElsewhere, 2},
		"error as a string":   {`data: {"error":"boom"}` + "\n\n", RetryElsewhere, 0},
		"not JSON":            {"data: {]\n\n", RetryElsewhere, 0},
	} {
		t.Run(name, func(t *testing.T) {
			client := newOpenAIClient(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, test.body) })
			result, err := client.Generate(t.Context(), textRequest("hi", 100), nil)
			var e *Error
			if !errors.As(err, &e) || e.Class != test.class || len(result.OutputIDs) != test.partial {
				t.Errorf("%+v, %v", result, err)
			}
		})
	}
}

func TestOpenAICancelClosesTheConnection(t *testing.T) {
	closed := make(chan struct{})
	client := newOpenAIClient(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, textChunk("ab", "null"))
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		close(closed)
	})
	ctx, cancel := context.WithCancel(t.Context())
	result, err := client.Generate(ctx, textRequest("hi", 100), func(Progress) { cancel() })
	var e *Error
	if !errors.As(err, &e) || e.Class != Cancelled || len(result.OutputIDs) != 2 {
		t.Errorf("%+v, %v", result, err)
	}
	receive(t, "the server to see that the connection is closed", closed)
}

func TestOpenAIWhatServersSayOfThemselves(t *testing.T) {
	models := `{"data":[{"id":"first"},{"id":"second"}]}`
	for name, test := range map[string]struct {
		routes map[string]string
		want   Info
	}{
		"llama.cpp": {map[string]string{"/health": `{"status":"ok"}`, "/v1/models": models, "/props": `{"default_generation_settings":{"n_ctx":8192},"total_slots":4,"build_info":"b5000"}`}, Info{Model: "first", Version: "b5000", MaxContextTokens: 8192, MaxRunning: 4}},
		"Ollama":    {map[string]string{"/v1/models": models, "/api/version": `{"version":"0.9.0"}`}, Info{Model: "first", Version: "0.9.0"}},
		"TGI":       {map[string]string{"/health": "", "/v1/models": models, "/info": `{"max_total_tokens":4096,"max_concurrent_requests":128,"version":"3.0.0"}`}, Info{Model: "first", Version: "3.0.0", MaxContextTokens: 4096, MaxRunning: 128}},
		"bare":      {map[string]string{"/v1/models": models}, Info{Model: "first"}},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				body, ok := test.routes[r.URL.Path]
				if !ok {
					w.WriteHeader(http.StatusNotFound)
				}
				fmt.Fprint(w, body)
			}))
			defer server.Close()
			client, err := NewClient("openai", server.URL)
			if err != nil {
				t.Fatal(err)
			}
			info, err := client.Discover(t.Context())
			if err != nil || info != test.want {
				t.Errorf("%+v, %v", info, err)
			}
			if err := client.Health(t.Context()); err != nil {
				t.Errorf("health: %v", err)
			}
			if _, err := client.Metrics(t.Context()); !errors.Is(err, ErrNoMetrics) {
				t.Errorf("metrics: %v", err)
			}
			if _, ok := ControllerOf(client); ok {
				t.Error("a text server has no control")
			}
		})
	}
}

func FuzzOpenAIStream(f *testing.F) {
	for _, file := range []string{"llmd_sse_completion.txt", "llmd_completion.json", "llmd_chat.json", "llmd_generate_sse.txt"} {
		text, err := os.ReadFile("testdata/" + file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text, int32(5))
	}
	f.Add([]byte(textChunk("né", "null")+textChunk("", "stop")), int32(2))
	f.Fuzz(func(t *testing.T, text []byte, stop int32) {
		r := textRequest("hi", 7)
		r.StopTokenIDs = []int32{stop}
		g := textGeneration{codec: Bytes{}, collected: collected{request: &r, started: time.Now()}}
		err := g.read(strings.NewReader(string(text)), func() {})
		if err != nil {
			return
		}
		if len(g.result.OutputIDs) > 7 {
			t.Fatalf("%d ids", len(g.result.OutputIDs))
		}
		if _, err := (Bytes{}).Decode(g.result.OutputIDs); err != nil && stop < 128 {
			t.Fatalf("the output cannot be sent back: %v", err)
		}
	})
}
