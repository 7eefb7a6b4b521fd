package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/orchestrator/engine/simulated"
	"holdfast/workflows/task"
)

// recorder stands before an engine and keeps what that was given and what it generated.
type recorder struct {
	*httptest.Server
	mu      sync.Mutex
	prompts [][]int32
	outputs [][]int32
}

func recordEngine(t *testing.T, engineURL string) *recorder {
	t.Helper()
	r := &recorder{}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, asked *http.Request) {
		body, err := io.ReadAll(asked.Body)
		if err != nil {
			return
		}
		request, err := http.NewRequestWithContext(asked.Context(), asked.Method, engineURL+asked.URL.RequestURI(), bytes.NewReader(body))
		if err != nil {
			t.Error(err)
			return
		}
		request.Header = asked.Header.Clone()
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		defer response.Body.Close()
		w.Header().Set("Content-Type", response.Header.Get("Content-Type"))
		w.WriteHeader(response.StatusCode)
		text, err := io.ReadAll(io.TeeReader(response.Body, w))
		if err == nil && asked.URL.Path == "/v1/completions" {
			r.keep(t, body, text)
		}
	}))
	t.Cleanup(r.Close)
	return r
}

// keep reads the ids of a call and of the events that answered it.
func (r *recorder) keep(t *testing.T, body, events []byte) {
	var asked struct{ Prompt []int32 }
	if err := json.Unmarshal(body, &asked); err != nil {
		t.Error(err)
	}
	var output []int32
	for line := range strings.Lines(string(events)) {
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: {")
		if !ok {
			continue
		}
		var event struct {
			Choices []struct {
				TokenIDs []int32 `json:"token_ids"`
			}
		}
		if err := json.Unmarshal([]byte("{"+data), &event); err != nil {
			t.Error(err)
		}
		for _, choice := range event.Choices {
			output = append(output, choice.TokenIDs...)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prompts, r.outputs = append(r.prompts, asked.Prompt), append(r.outputs, output)
}

// calls returns what was kept, and keeps no more of it.
func (r *recorder) calls() (prompts, outputs [][]int32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	prompts, outputs = r.prompts, r.outputs
	r.prompts, r.outputs = nil, nil
	return prompts, outputs
}

// losing is a transport that loses an answer after it has come.
type losing struct {
	mu   sync.Mutex
	lose int
}

func (l *losing) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := http.DefaultTransport.RoundTrip(request)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil || l.lose == 0 {
		return response, err
	}
	l.lose--
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return nil, err
	}
	response.Body.Close()
	return nil, errors.New("the connection broke")
}

// openAISession opens a run with one session, and a client of OpenAI's own library for
// it, which knows a base URL, a key and a model.
func (s *inProcess) openAISession(ctx context.Context, t *testing.T, engineURL, name string) (run, session uuid.UUID, c openai.Client, l *losing) {
	t.Helper()
	if _, err := s.client.RegisterInstance(ctx, "default", wire.NewInstance{ID: "recorded", URL: engineURL, Kind: engineKindSimulated}); err != nil {
		t.Fatal(err)
	}
	opened, err := s.client.CreateRun(ctx, demoRun(name, "default"))
	if err != nil {
		t.Fatal(err)
	}
	spec := task.Spec{
		Class: "agent", Prompt: task.Prompt{Text: "The harness writes the prompt."}, Sampling: task.Sampling{MaxTokens: 400},
		Environment: &task.Environment{Kind: task.EnvironmentExternal},
	}
	if _, err := s.client.SubmitBatch(ctx, opened.ID, name, client.NewBatch{Tasks: client.Tasks([]task.Spec{spec})}); err != nil {
		t.Fatal(err)
	}
	page, err := s.client.Sessions(ctx, opened.ID, client.SessionsQuery{})
	if err != nil || len(page.Sessions) != 1 {
		t.Fatalf("%d sessions, error %v", len(page.Sessions), err)
	}
	session, l = page.Sessions[0].ID, &losing{}
	return opened.ID, session, openai.NewClient(
		option.WithBaseURL("http://"+s.api.Addr()+"/v1/sessions/"+session.String()), option.WithAPIKey("any"), option.WithHTTPClient(&http.Client{Transport: l}),
	), l
}

// adder is an agent with one tool, written as its library's guide writes agents.
type adder struct {
	t      *testing.T
	client openai.Client
	params openai.ChatCompletionNewParams
	stream bool
	pieces int
}

func newAdder(t *testing.T, c openai.Client, stream bool) *adder {
	return &adder{t: t, client: c, stream: stream, params: openai.ChatCompletionNewParams{
		Model:    "default",
		Messages: []openai.ChatCompletionMessageParamUnion{openai.SystemMessage("You can add.")},
		Tools: []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(openai.FunctionDefinitionParam{
			Name: "add", Description: openai.String("Adds two numbers."),
			Parameters: openai.FunctionParameters{"type": "object", "properties": map[string]any{"a": map[string]string{"type": "integer"}, "b": map[string]string{"type": "integer"}}},
		})},
	}}
}

func (a *adder) complete(ctx context.Context) *openai.ChatCompletion {
	a.t.Helper()
	if !a.stream {
		completion, err := a.client.Chat.Completions.New(ctx, a.params)
		if err != nil {
			a.t.Fatal(err)
		}
		return completion
	}
	params := a.params
	params.StreamOptions.IncludeUsage = openai.Bool(true)
	stream := a.client.Chat.Completions.NewStreaming(ctx, params)
	defer stream.Close()
	var whole openai.ChatCompletionAccumulator
	for stream.Next() {
		chunk := stream.Current()
		if len(chunk.Choices) > 0 && chunk.Choices[0].Delta.Content != "" {
			a.pieces++
			if strings.Contains(chunk.Choices[0].Delta.Content, "<tool") {
				a.t.Errorf("a call was streamed as content: %q", chunk.Choices[0].Delta.Content)
			}
		}
		if !whole.AddChunk(chunk) {
			a.t.Fatalf("chunk %s does not go on from the others", chunk.RawJSON())
		}
	}
	if err := stream.Err(); err != nil {
		a.t.Fatal(err)
	}
	return &whole.ChatCompletion
}

// say asks, carries out the tool calls, and returns what the model says in the end.
func (a *adder) say(ctx context.Context, text string) string {
	a.t.Helper()
	a.params.Messages = append(a.params.Messages, openai.UserMessage(text))
	for range 4 {
		completion := a.complete(ctx)
		choice := completion.Choices[0]
		if completion.Usage.CompletionTokens == 0 || completion.Usage.PromptTokens == 0 {
			a.t.Errorf("usage %+v", completion.Usage)
		}
		a.params.Messages = append(a.params.Messages, choice.Message.ToParam())
		if choice.FinishReason != "tool_calls" {
			return choice.Message.Content
		}
		for _, call := range choice.Message.ToolCalls {
			var numbers struct{ A, B int }
			if err := json.Unmarshal([]byte(call.Function.Arguments), &numbers); err != nil || call.Function.Name != "add" || numbers.A+numbers.B != 42 {
				a.t.Fatalf("the model calls %s with %s", call.Function.Name, call.Function.Arguments)
			}
			a.params.Messages = append(a.params.Messages, openai.ToolMessage("The sum is 42.", call.ID))
		}
	}
	a.t.Fatal("the model calls tools without end")
	return ""
}

var adderScript = simulated.Script{
	{After: "19 and 23?", Say: "Let me add them. <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 19, \"b\": 23}}\n</tool_call>"},
	{After: "The sum is 42.", Say: "They make 42 \u2014 as \u00e9ver."},
	{After: "Double it.", Say: "84."},
	{After: "Halve it.", Say: "42 again."},
	{After: "Are you done?", Say: "Yes."},
}

// TestHarnessThroughOpenAIsOwnClient: an agent with a tool, asked in both ways, whose
// answers get lost now and then and which rewrites its history once. What is delivered
// is what the engine was given and generated, token by token.
func TestHarnessThroughOpenAIsOwnClient(t *testing.T) {
	s := startInProcess(t, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	if err := s.engines.servers[0].SetScript(adderScript); err != nil {
		t.Fatal(err)
	}
	recorded := recordEngine(t, s.engines.servers[0].URL())
	for name, stream := range map[string]bool{"at once": false, "streamed": true} {
		t.Run(name, func(t *testing.T) {
			run, session, c, lossy := s.openAISession(ctx, t, recorded.URL, name)
			a := newAdder(t, c, stream)
			if got := a.say(ctx, "What are 19 and 23?"); got != "They make 42 \u2014 as \u00e9ver." {
				t.Errorf("it says %q", got)
			}
			lossy.lose = 1
			if got := a.say(ctx, "Double it."); got != "84." {
				t.Errorf("it says %q", got)
			}
			// Compaction: the history becomes a summary.
			a.params.Messages = []openai.ChatCompletionMessageParamUnion{a.params.Messages[0]}
			if got := a.say(ctx, "So far we have 84. Halve it."); got != "42 again." {
				t.Errorf("it says %q", got)
			}
			if got := a.say(ctx, "Are you done?"); got != "Yes." {
				t.Errorf("it says %q", got)
			}
			if stream && a.pieces < 5 {
				t.Errorf("%d pieces were streamed", a.pieces)
			}
			if _, err := s.client.CompleteSession(ctx, session, wire.FinishSession{Status: "completed"}); err != nil {
				t.Fatal(err)
			}
			checkRecorded(t, s.await(ctx, t, run), recorded)
			if _, err := s.client.EndRun(ctx, run); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// checkRecorded compares a sample of two sequences, of three turns and two, with what
// went to and fro.
func checkRecorded(t *testing.T, sample *wire.Sample, recorded *recorder) {
	t.Helper()
	prompts, outputs := recorded.calls()
	if len(prompts) != 5 || sample.Status != "completed" || sample.Usage.Turns != 5 || len(sample.Sequences) != 2 || sample.Usage.Rewrites != 1 {
		t.Fatalf("%d calls, sample %+v", len(prompts), sample)
	}
	next := 0
	for i, turns := range []int{3, 2} {
		ids, mask, logprobs, err := sample.Sequences[i].Arrays()
		if err != nil {
			t.Fatal(err)
		}
		want, wantMask := prompts[next], make([]uint8, len(prompts[next]))
		for turn := range turns {
			if !slices.Equal(prompts[next], want) {
				t.Fatalf("prompt %d is not the one before it with its output and what is new:\n%v\n%v", next, prompts[next], want)
			}
			want = slices.Concat(want, outputs[next])
			wantMask = append(wantMask, bytes.Repeat([]byte{1}, len(outputs[next]))...)
			if next++; turn < turns-1 {
				if len(prompts[next]) <= len(want) {
					t.Fatalf("prompt %d has %d tokens after %d", next, len(prompts[next]), len(want))
				}
				wantMask = append(wantMask, make([]uint8, len(prompts[next])-len(want))...)
				want = slices.Concat(want, prompts[next][len(want):])
			}
		}
		if !slices.Equal(ids, want) || !slices.Equal(mask, wantMask) || len(logprobs) != len(ids) {
			t.Errorf("sequence %d is\n%v with mask\n%v, want\n%v with\n%v", i, ids, mask, want, wantMask)
		}
	}
	if kept := sample.Sequences[1].KeptTokens; kept == 0 || !slices.Equal(prompts[3][:kept], prompts[2][:kept]) || prompts[3][kept] == prompts[2][kept] {
		t.Errorf("the second sequence keeps %d tokens", kept)
	}
}

func TestOpenAIsOwnClientReadsRefusalsAndTexts(t *testing.T) {
	s := startInProcess(t, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	run, session, c, _ := s.openAISession(ctx, t, s.engines.servers[0].URL(), "texts")
	models, err := c.Models.List(ctx)
	if err != nil || len(models.Data) != 1 || models.Data[0].ID != "default" {
		t.Fatalf("models %+v, %v", models, err)
	}
	text, err := c.Completions.New(ctx, openai.CompletionNewParams{Model: "default", Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("Once upon")}, MaxTokens: openai.Int(6)})
	if err != nil || text.Choices[0].Text == "" || text.Usage.CompletionTokens > 6 {
		t.Fatalf("%+v, %v", text, err)
	}
	var refused *openai.Error
	_, err = c.Completions.New(ctx, openai.CompletionNewParams{Model: "default", Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("x")}, N: openai.Int(2)})
	if !errors.As(err, &refused) || refused.StatusCode != 400 || refused.Param != "n" || refused.Code != "invalid-request" {
		t.Fatalf("two answers got %v", err)
	}
	if _, err := s.client.CompleteSession(ctx, session, wire.FinishSession{Status: "completed"}); err != nil {
		t.Fatal(err)
	}
	s.await(ctx, t, run)
	_, err = c.Completions.New(ctx, openai.CompletionNewParams{Model: "default", Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("x")}})
	if !errors.As(err, &refused) || refused.StatusCode != 409 {
		t.Fatalf("a call after the end got %v", err)
	}
}
