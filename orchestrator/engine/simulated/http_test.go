package simulated

import (
	"bufio"
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
)

// completion is the response as a client would declare it.
type completion struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	Model   string `json:"model"`
	Choices []struct {
		Index          int     `json:"index"`
		Text           string  `json:"text"`
		FinishReason   *string `json:"finish_reason"`
		TokenIDs       []int32 `json:"token_ids"`
		PromptTokenIDs []int32 `json:"prompt_token_ids"`
		Logprobs       *struct {
			TokenLogprobs []float64 `json:"token_logprobs"`
			Tokens        []string  `json:"tokens"`
		} `json:"logprobs"`
	} `json:"choices"`
	Usage *struct {
		PromptTokens     int `json:"prompt_tokens"`
		CompletionTokens int `json:"completion_tokens"`
		TotalTokens      int `json:"total_tokens"`
		Details          struct {
			CachedTokens *int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
}

func post(t *testing.T, s *Server, body string) *httptest.ResponseRecorder {
	t.Helper()
	recorder := httptest.NewRecorder()
	request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/completions", strings.NewReader(body))
	request.Header.Set("X-Request-Id", "r7")
	s.Handler().ServeHTTP(recorder, request)
	if recorder.Code != http.StatusOK {
		t.Fatalf("%s: %d %s", body, recorder.Code, recorder.Body)
	}
	return recorder
}

func decode(t *testing.T, text []byte) completion {
	t.Helper()
	var c completion
	decoder := json.NewDecoder(bytes.NewReader(text))
	if err := decoder.Decode(&c); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return c
}

func TestDocumentOfATextPrompt(t *testing.T) {
	s := newTestServer(t, Config{TimeScale: 1e5, Model: "m"})
	prompt := strings.Repeat("the quick brown fox ", 20)
	body := `{"model":"m","prompt":` + string(must(json.Marshal(prompt))) + `,"max_tokens":7,"ignore_eos":true,"logprobs":1,"user":"x"}`
	for turn := range 2 {
		c := decode(t, post(t, s, body).Body.Bytes())
		if c.ID != "cmpl-r7" || c.Object != "text_completion" || c.Model != "m" || c.Created == 0 || len(c.Choices) != 1 {
			t.Fatalf("got %+v", c)
		}
		choice := c.Choices[0]
		if choice.FinishReason == nil || *choice.FinishReason != "length" || len(strings.Fields(choice.Text)) != 7 || choice.TokenIDs != nil || choice.PromptTokenIDs != nil {
			t.Errorf("got %+v", choice)
		}
		if l := choice.Logprobs; l == nil || len(l.TokenLogprobs) != 7 || strings.Join(l.Tokens, "") != choice.Text || slices.Max(l.TokenLogprobs) > 0 {
			t.Errorf("log-probabilities %+v of %q", l, choice.Text)
		}
		u := c.Usage
		if u == nil || u.CompletionTokens != 7 || u.TotalTokens != u.PromptTokens+7 || u.PromptTokens < 80 || u.Details.CachedTokens == nil {
			t.Fatalf("usage %+v", u)
		}
		if got, want := *u.Details.CachedTokens, turn*((u.PromptTokens-1)/16*16); got != want {
			t.Errorf("turn %d: %d tokens cached, want %d", turn, got, want)
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestPromptTokensComeBackOnlyWhenAsked(t *testing.T) {
	s := newTestServer(t, Config{TimeScale: 1e5})
	for body, want := range map[string]struct{ ids, prompt int }{
		`{"prompt":[5,6,7],"max_tokens":4,"ignore_eos":true}`:                                                           {0, 0},
		`{"prompt":[5,6,7],"max_tokens":4,"ignore_eos":true,"return_token_ids":true}`:                                   {4, 3},
		`{"prompt":[[5,6,7]],"max_tokens":4,"ignore_eos":true,"return_token_ids":true,"return_prompt_token_ids":false}`: {4, 0},
	} {
		c := decode(t, post(t, s, body).Body.Bytes()).Choices[0]
		if len(c.TokenIDs) != want.ids || len(c.PromptTokenIDs) != want.prompt || want.prompt > 0 && !slices.Equal(c.PromptTokenIDs, []int32{5, 6, 7}) {
			t.Errorf("%s: ids %v, prompt %v", body, c.TokenIDs, c.PromptTokenIDs)
		}
		if c.Logprobs != nil {
			t.Errorf("%s: log-probabilities nobody asked for", body)
		}
	}
}

// TestStreamEqualsDocument: the chunks of a stream add up to the document.
func TestStreamEqualsDocument(t *testing.T) {
	s := newTestServer(t, Config{TimeScale: 500})
	const body = `{"prompt":[1,2,3],"max_tokens":300,"ignore_eos":true,"logprobs":0,"seed":9,"return_token_ids":true`
	want := decode(t, post(t, s, body+"}").Body.Bytes()).Choices[0]
	response := post(t, s, body+`,"stream":true,"stream_options":{"include_usage":true},"stream_interval":16}`)
	if got := response.Header().Get("Content-Type"); !strings.HasPrefix(got, "text/event-stream") {
		t.Errorf("content type %q", got)
	}
	var ids []int32
	var logprobs []float64
	var usage, finished, done bool
	chunks := 0
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		switch {
		case !ok && lines.Text() != "":
			t.Fatalf("line %q", lines.Text())
		case !ok:
			continue
		case done:
			t.Fatalf("%q after the end", data)
		case data == "[DONE]":
			done = true
			continue
		}
		c := decode(t, []byte(data))
		if len(c.Choices) == 0 {
			usage = c.Usage != nil && c.Usage.CompletionTokens == 300
			continue
		}
		choice := c.Choices[0]
		if prompt := len(choice.PromptTokenIDs) > 0; prompt != (chunks == 0) {
			t.Errorf("chunk %d has %d prompt tokens", chunks, len(choice.PromptTokenIDs))
		}
		chunks++
		ids = append(ids, choice.TokenIDs...)
		logprobs = append(logprobs, choice.Logprobs.TokenLogprobs...)
		finished = choice.FinishReason != nil
	}
	if !done || !usage || !finished || chunks > 20 {
		t.Errorf("done %v, usage %v, finished %v, %d chunks", done, usage, finished, chunks)
	}
	if !slices.Equal(ids, want.TokenIDs) || !slices.Equal(logprobs, want.Logprobs.TokenLogprobs) {
		t.Errorf("the stream brings %d tokens and %d log-probabilities, other than the document's", len(ids), len(logprobs))
	}
}

func TestOutputsOfFreeLengthStopByThemselves(t *testing.T) {
	s := newTestServer(t, Config{TimeScale: 1e5, MeanOutputTokens: 100})
	stopped, total := 0, 0
	const runs = 200
	for i := range runs {
		body := `{"prompt":[1,` + string(must(json.Marshal(i))) + `],"max_tokens":300,"min_tokens":5,"return_token_ids":true}`
		c := decode(t, post(t, s, body).Body.Bytes()).Choices[0]
		n := len(c.TokenIDs)
		if n < 5 || n > 300 || *c.FinishReason == "length" && n != 300 {
			t.Fatalf("%d tokens, finish %s", n, *c.FinishReason)
		}
		if *c.FinishReason == "stop" {
			stopped++
		}
		total += n
	}
	// Exponential with mean 100 and cut at 300: 95 % stop, the mean is 95.
	if mean := total / runs; stopped < runs*85/100 || stopped == runs || mean < 75 || mean > 115 {
		t.Errorf("%d of %d stopped, mean length %d", stopped, runs, mean)
	}
}

func FuzzCompletionRequest(f *testing.F) {
	for _, seed := range []string{
		`{"prompt":[1,2,3],"max_tokens":4,"stream":true,"stream_options":{"include_usage":true},"seed":1,"stop_token_ids":[3]}`,
		`{"prompt":"text","logprobs":1,"temperature":0.5,"n":1,"cache_salt":"x","priority":0}`,
		`{"prompt":[["a"]]}`,
	} {
		f.Add([]byte(seed))
	}
	cfg := Config{Engine: smallEngine()}.withDefaults()
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := parseCompletion(body, nil, &cfg)
		if err != nil {
			return
		}
		if !json.Valid(body) {
			t.Fatalf("accepted %q", body)
		}
		if len(r.Prompt) == 0 || r.MaxTokens < 1 || len(r.Prompt)+r.MaxTokens > cfg.Engine.MaxContextTokens || r.MinTokens > r.MaxTokens {
			t.Fatalf("accepted %q as %+v", body, r)
		}
	})
}
