package api_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"holdfast/api"
	"holdfast/store"
	"holdfast/workflows"
)

// ask sends a call of the OpenAI-compatible surface.
func (s *service) ask(method, path, body string, header map[string]string) (*http.Response, string) {
	s.t.Helper()
	request, err := http.NewRequestWithContext(s.t.Context(), method, s.url+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	for name, value := range header {
		request.Header.Set(name, value)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return response, string(text)
}

type refusal struct {
	Error struct {
		Message, Type, Code string
		Param               *string
	}
}

const chatPath = "/v1/sessions/00000000-0000-4000-8000-000000000001/chat/completions"

var createdPattern = regexp.MustCompile(`"created":\d+`)

const textPath = "/v1/sessions/00000000-0000-4000-8000-000000000001/completions"

func TestOpenAICallsThatCannotBeDoneNameTheField(t *testing.T) {
	called := false
	s := start(t, func(c *api.Config) {
		c.Harness = &loops{turn: func(call workflows.HarnessCall, progress workflows.HarnessProgress) (workflows.HarnessTurn, error) {
			called = true
			return echo(call, progress)
		}}
	})
	chat := func(more string) string {
		return `{"model":"m","messages":[{"role":"user","content":"x"}]` + more + `}`
	}
	for _, c := range []struct{ path, body, param, says string }{
		{chatPath, `{`, "", "body is not valid JSON"},
		{chatPath, `{"model":"m"}`, "messages", "messages is missing"},
		{chatPath, chat(`,"temperature":"hot"`), "temperature", "temperature must be a number"},
		{chatPath, chat(`,"temperature":101`), "temperature", "temperature must be from 0 to 100"},
		{chatPath, chat(`,"top_p":0`), "top_p", "top_p must be above 0"},
		{chatPath, chat(`,"max_tokens":0`), "max_tokens", "max_tokens must be at least 1, is 0"},
		{chatPath, chat(`,"max_completion_tokens":4,"min_tokens":5`), "min_tokens", "min_tokens must be at most max_completion_tokens"},
		{chatPath, chat(`,"n":2`), "n", "n must be 1"},
		{chatPath, chat(`,"stop":"END"`), "stop", "stop is not served"},
		{chatPath, chat(`,"stop":["END"]`), "stop", "stop is not served"},
		{chatPath, chat(`,"stop_token_ids":[-1]`), "stop_token_ids[0]", "stop_token_ids[0] must be a token id"},
		{chatPath, chat(`,"presence_penalty":0.5`), "presence_penalty", "presence_penalty is not served"},
		{chatPath, chat(`,"logit_bias":{"5":1}`), "logit_bias", "logit_bias is not served"},
		{chatPath, chat(`,"response_format":{"type":"json_object"}`), "response_format", "response_format is not served"},
		{chatPath, chat(`,"logprobs":true,"top_logprobs":3`), "top_logprobs", "top_logprobs must be 0"},
		{chatPath, chat(`,"logprobs":1`), "logprobs", "logprobs must be true or false"},
		{chatPath, chat(`,"tools":[{}],"tool_choice":"required"`), "tool_choice", "tool_choice must be auto or none: the model cannot be made to call required"},
		{chatPath, chat(`,"tools":[{}],"tool_choice":{"type":"function","function":{"name":"a"}}`), "tool_choice", "tool_choice must be auto or none"},
		{chatPath, chat(`,"tools":{"a":1}`), "tools", "tools must be an array"},
		{chatPath, chat(`,"tools":{}`), "tools", "tools must be an array"},
		{chatPath, chat(`,"tools":[1]`), "tools[0]", "tools[0] must be an object"},
		{chatPath, chat(`,"tools":[{"type":"function","function":{"name":"a"}},{"type":"bogus"}]`), "tools[1].type", "tools[1].type must be function"},
		{chatPath, chat(`,"tools":[{"type":"function","function":{}}]`), "tools[0].function.name", "tools[0].function.name is missing"},
		{chatPath, chat(`,"tools":[{"type":"function","function":{"name":5}}]`), "tools[0]", "tools[0] must be an object"},
		{chatPath, chat(`,"repetition_penalty":1.3`), "repetition_penalty", "repetition_penalty is not served"},
		{chatPath, chat(`,"top_k":5`), "top_k", "top_k is not served"},
		{chatPath, chat(`,"guided_json":{"type":"object"}`), "guided_json", "guided_json is not served"},
		{chatPath, chat(`,"add_generation_prompt":false`), "add_generation_prompt", "add_generation_prompt must be true"},
		{chatPath, chat(`,"tools":[{"type":"function","function":{"name":"a"}}],"parallel_tool_calls":false`), "parallel_tool_calls", "parallel_tool_calls must be true"},
		{chatPath, chat(`,"functions":[{}]`), "functions", "functions is not served: use tools"},
		{chatPath, chat(`,"tool_format":"yaml"`), "tool_format", "tool_format must be one of"},
		{chatPath, chat(`,"prompt":"x"`), "prompt", "prompt belongs to /completions"},
		{textPath, `{"prompt":["a","b"]}`, "prompt", "prompt must be one prompt"},
		{textPath, `{"prompt":7}`, "prompt", "prompt must be text or token ids"},
		{textPath, `{}`, "prompt", "prompt must be text or token ids"},
		{textPath, `{"prompt":[1,-2]}`, "prompt[1]", "prompt[1] must be a token id, is -2"},
		{textPath, `{"prompt":"a","echo":true}`, "echo", "echo is not served"},
		{textPath, `{"prompt":"a","logprobs":5}`, "logprobs", "logprobs must be 0 or 1"},
		{"/v1/chat/completions", chat(""), "header.X-Holdfast-Session", "header.X-Holdfast-Session must name the session"},
	} {
		response, text := s.ask("POST", c.path, c.body, nil)
		var got refusal
		if err := json.Unmarshal([]byte(text), &got); err != nil {
			t.Fatalf("%s: %s", c.body, text)
		}
		param := ""
		if got.Error.Param != nil {
			param = *got.Error.Param
		}
		if response.StatusCode != 400 || got.Error.Type != "invalid_request_error" || param != c.param || !strings.HasPrefix(got.Error.Message, c.says) {
			t.Errorf("%s: %d %s, want %q at %q", c.body, response.StatusCode, text, c.says, c.param)
		}
	}
	if called {
		t.Error("a call that cannot be done was made")
	}
}

func TestOpenAIRefusalsSayWhetherToTryAgain(t *testing.T) {
	var refused error
	s := start(t, func(c *api.Config) {
		c.Harness = &loops{turn: func(workflows.HarnessCall, workflows.HarnessProgress) (workflows.HarnessTurn, error) {
			return workflows.HarnessTurn{}, refused
		}}
	})
	for _, c := range []struct {
		err               error
		status            int
		kind, code, again string
	}{
		{workflows.ErrSessionOver, 409, "conflict_error", "conflict", "false"},
		{workflows.ErrNotHarness, 409, "conflict_error", "conflict", "false"},
		{workflows.ErrTurnUnderWay, 409, "conflict_error", "turn-under-way", ""},
		{&workflows.LimitError{Limit: "no room"}, 409, "conflict_error", "limit-reached", "false"},
		{&workflows.InvalidCallError{Field: "messages[3].role", Problem: "is missing"}, 400, "invalid_request_error", "invalid-request", ""},
		{&workflows.CallFailedError{Problem: "3 calls failed"}, 502, "server_error", "engine-does-not-answer", ""},
		{fmt.Errorf("reading: %w", store.ErrNotFound), 404, "not_found_error", "not-found", ""},
		{api.ErrNotOwner, 503, "server_error", "not-owner", ""},
	} {
		refused = fmt.Errorf("calling: %w", c.err)
		response, text := s.ask("POST", textPath, `{"prompt":"x"}`, nil)
		var got refusal
		if err := json.Unmarshal([]byte(text), &got); err != nil {
			t.Fatal(err)
		}
		if response.StatusCode != c.status || got.Error.Type != c.kind || got.Error.Code != c.code || got.Error.Message == "" || response.Header.Get("X-Should-Retry") != c.again {
			t.Errorf("%v: %d, retry %q, %s", c.err, response.StatusCode, response.Header.Get("X-Should-Retry"), text)
		}
	}
}

// speaks is a turn with a call in it.
func speaks(call workflows.HarnessCall, progress workflows.HarnessProgress) (workflows.HarnessTurn, error) {
	made := workflows.HarnessTurn{
		Turn: 2, OutputIDs: []int32{7, 8}, Logprobs: []float32{-0.5, -0.25}, FinishReason: "stop", PromptTokens: 4, CachedTokens: 3, PolicyVersion: 9, Instance: "one", Text: "Let me look.",
	}
	if call.Chat != nil && call.Chat.Tools != nil {
		made.ToolCalls = []workflows.HarnessToolCall{{ID: "call_2_0", Name: "look", Arguments: json.RawMessage(`{"at":"door"}`)}}
	}
	if call.WithPromptIDs {
		made.PromptIDs = []int32{1, 2, 3, 4}
	}
	if progress.OnText != nil {
		progress.OnText("Let ")
		progress.OnText("me look.")
	}
	return made, nil
}

func TestOpenAIAnswers(t *testing.T) {
	var call workflows.HarnessCall
	s := start(t, func(c *api.Config) {
		c.Harness = &loops{turn: func(asked workflows.HarnessCall, progress workflows.HarnessProgress) (workflows.HarnessTurn, error) {
			call = asked
			return speaks(asked, progress)
		}}
	})
	const head = `"created":0,"model":"m"`
	const chat = `{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"look"}}],"max_completion_tokens":9,"logprobs":true,"return_token_ids":true,"metadata":{"a":"b"}`
	logprobs := `{"content":[{"token":"token_id:7","logprob":-0.5,"bytes":null,"top_logprobs":[]},{"token":"token_id:8","logprob":-0.25,"bytes":null,"top_logprobs":[]}],"refusal":null}`
	turn := `"holdfast":{"turn":2,"policy_version":9,"instance":"one"}`
	usage := `"usage":{"prompt_tokens":4,"completion_tokens":2,"total_tokens":6,"prompt_tokens_details":{"cached_tokens":3}}`
	for name, c := range map[string]struct{ path, body, want string }{
		"chat": {chatPath, chat + "}", `{"id":"chatcmpl-r1","object":"chat.completion",` + head + `,"prompt_token_ids":[1,2,3,4],"choices":[{"index":0,"message":{"role":"assistant","content":"Let me look.","tool_calls":[{"id":"call_2_0","type":"function","function":{"name":"look","arguments":"{\"at\":\"door\"}"}}]},"logprobs":` + logprobs + `,"finish_reason":"tool_calls","token_ids":[7,8]}],` + usage + `,` + turn + "}\n"},
		"chat, streamed": {chatPath, chat + `,"stream":true,"stream_options":{"include_usage":true}}`, strings.Join([]string{
			`{"id":"chatcmpl-r1","object":"chat.completion.chunk",` + head + `,"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}`,
			`{"id":"chatcmpl-r1","object":"chat.completion.chunk",` + head + `,"choices":[{"index":0,"delta":{"content":"Let "},"logprobs":null,"finish_reason":null}]}`,
			`{"id":"chatcmpl-r1","object":"chat.completion.chunk",` + head + `,"choices":[{"index":0,"delta":{"content":"me look."},"logprobs":null,"finish_reason":null}]}`,
			`{"id":"chatcmpl-r1","object":"chat.completion.chunk",` + head + `,"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"call_2_0","type":"function","function":{"name":"look","arguments":"{\"at\":\"door\"}"}}]},"logprobs":null,"finish_reason":null}]}`,
			`{"id":"chatcmpl-r1","object":"chat.completion.chunk",` + head + `,"prompt_token_ids":[1,2,3,4],"choices":[{"index":0,"delta":{},"logprobs":` + logprobs + `,"finish_reason":"tool_calls","token_ids":[7,8]}],` + turn + `}`,
			`{"id":"chatcmpl-r1","object":"chat.completion.chunk",` + head + `,"choices":[],` + usage + `}`,
			`[DONE]`, ``}, "\n\ndata: ")},
		"text with ids": {textPath, `{"model":"m","prompt":"x","return_token_ids":true}`, `{"id":"cmpl-r1","object":"text_completion",` + head + `,"choices":[{"index":0,"text":"Let me look.","logprobs":null,"finish_reason":"stop","token_ids":[7,8],"prompt_token_ids":[1,2,3,4]}],` + usage + `,` + turn + "}\n"},
		"text":          {textPath, `{"model":"m","prompt":"x","logprobs":0}`, `{"id":"cmpl-r1","object":"text_completion",` + head + `,"choices":[{"index":0,"text":"Let me look.","logprobs":{"text_offset":[],"token_logprobs":[-0.5,-0.25],"tokens":["token_id:7","token_id:8"],"top_logprobs":null},"finish_reason":"stop"}],` + usage + `,` + turn + "}\n"},
	} {
		_, text := s.ask("POST", c.path, c.body, map[string]string{"X-Request-Id": "r1"})
		want := c.want
		if strings.Contains(name, "streamed") {
			want = "data: " + strings.TrimSuffix(want, "data: ")
		}
		if got := createdPattern.ReplaceAllString(text, `"created":0`); got != want {
			t.Errorf("%s: %s\nwant %s", name, got, want)
		}
	}
	// What is asked for arrives; the same words are told by their digest, others apart.
	s.ask("POST", chatPath, chat+"}", map[string]string{"Idempotency-Key": "k1", "X-Holdfast-Tool-Format": "openai"})
	first := call
	if first.RequestID != "k1" || first.MaxTokens != 9 || first.Chat.ToolFormat != "openai" || string(first.Chat.Tools) != `[{"type":"function","function":{"name":"look"}}]` || first.Logprobs != nil {
		t.Errorf("the harness was asked %+v, %+v", first, first.Chat)
	}
	s.ask("POST", chatPath, chat+"}", nil)
	if again := call; again.RequestID != "" || again.Content != first.Content {
		t.Errorf("the same words: %q and %q", again.Content, first.Content)
	}
	s.ask("POST", chatPath, chat+`,"tool_choice":"none"}`, nil)
	if call.Content == first.Content || call.Chat.Tools != nil {
		t.Errorf("other words, and no tools: %+v", call.Chat)
	}
	s.ask("POST", textPath, `{"prompt":[[1,2,3]]}`, nil)
	if !slices.Equal(call.Context, []int32{1, 2, 3}) || !call.WithText {
		t.Errorf("a prompt of ids: %+v", call)
	}
}

func TestOpenAISessionIsNamedByPathHeaderOrKey(t *testing.T) {
	var session uuid.UUID
	s := start(t, func(c *api.Config) {
		c.Tokens = []api.Token{{Name: "trainer", Role: api.RoleTrainer, Secret: "trainer-secret-0001"}, {Name: "viewer", Role: api.RoleViewer, Secret: "viewer-secret-00001"}}
		c.Harness = &loops{turn: speaks, session: &session}
	})
	id := uuid.New()
	for _, c := range []struct {
		path, key, header string
		status            int
	}{
		{"/v1/sessions/" + id.String() + "/completions", "trainer-secret-0001", "", 200},
		{"/v1/completions", "trainer-secret-0001", id.String(), 200},
		{"/v1/completions", "trainer-secret-0001@" + id.String(), "", 200},
		{"/v1/completions", "trainer-secret-0002@" + id.String(), "", 401},
		{"/v1/completions", "viewer-secret-00001@" + id.String(), "", 403},
		{"/v1/completions", "trainer-secret-0001", "", 400},
		{"/v1/sessions/x/completions", "trainer-secret-0001", "", 404},
	} {
		session = uuid.Nil
		header := map[string]string{"Authorization": "Bearer " + c.key}
		if c.header != "" {
			header["X-Holdfast-Session"] = c.header
		}
		response, text := s.ask("POST", c.path, `{"prompt":"x"}`, header)
		if response.StatusCode != c.status || (c.status == 200) != (session == id) {
			t.Errorf("%s with %q: %d for session %s, %s", c.path, c.key, response.StatusCode, session, text)
		}
	}
	response, text := s.ask("GET", "/v1/models", "", map[string]string{"Authorization": "Bearer viewer-secret-00001"})
	if response.StatusCode != 200 || !strings.HasPrefix(text, `{"object":"list","data":[`) {
		t.Errorf("models: %d %s", response.StatusCode, text)
	}
}

func TestOpenAIPathsThatAreNotServed(t *testing.T) {
	s := start(t, nil)
	for _, c := range []struct {
		method, path string
		status       int
		kind, code   string
	}{
		{"POST", "/v1/embeddings", 404, "not_found_error", "not-found"},
		{"GET", "/v1/chat/completions", 405, "invalid_request_error", "method-not-allowed"},
	} {
		response, text := s.ask(c.method, c.path, `{}`, nil)
		var got refusal
		if err := json.Unmarshal([]byte(text), &got); err != nil || response.StatusCode != c.status || got.Error.Type != c.kind || got.Error.Code != c.code || got.Error.Message == "" {
			t.Errorf("%s %s: %d %s, %v", c.method, c.path, response.StatusCode, text, err)
		}
	}
	if response, text := s.ask("GET", "/v10", "", nil); response.Header.Get("Content-Type") != "application/problem+json" {
		t.Errorf("another path: %s", text)
	}
}

func TestOpenAIFailureAfterTheBeginning(t *testing.T) {
	s := start(t, func(c *api.Config) {
		c.Harness = &loops{turn: func(_ workflows.HarnessCall, progress workflows.HarnessProgress) (workflows.HarnessTurn, error) {
			progress.OnText("Let ")
			return workflows.HarnessTurn{}, workflows.ErrSessionOver
		}}
	})
	_, text := s.ask("POST", chatPath, `{"messages":[{"role":"user","content":"x"}],"stream":true}`, nil)
	if !strings.Contains(text, "\n\ndata: {\"error\":{\"message\":\"the session is over: GET /api/v1/sessions/") || strings.Contains(text, "[DONE]") {
		t.Errorf("streamed %s", text)
	}
}
