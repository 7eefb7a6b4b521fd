package cli

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/orchestrator/config"
	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/environment/spec"
	"holdfast/workflows/task"
)

// scoredTasks are single turns from prompts of text and of messages, one for each
// kind of scorer and some whose scorer fails. The seed makes the output of a prompt
// the same in every batch, for a member of the same number.
func scoredTasks(server string) []task.Spec {
	seed := int64(7)
	sampling := task.Sampling{MaxTokens: 200, MinTokens: 200, IgnoreEOS: true, Seed: &seed}
	shell := func(script string) *task.Scorer {
		return &task.Scorer{Kind: task.ScorerExec, Program: &spec.Program{Command: []string{"/bin/sh", "-c", script}}}
	}
	text := task.Prompt{Text: "What is 17 + 25? Say it in the language of the toy."}
	chat := task.Prompt{Messages: json.RawMessage(`[{"role":"system","content":"Be brief."},{"role":"user","content":"6 times 7?"}]`)}
	return []task.Spec{
		{ID: "server", Class: "agent", GroupSize: 3, Prompt: text, Sampling: sampling, Metadata: json.RawMessage(`{"row":3}`),
			Scorer: &task.Scorer{Kind: task.ScorerHTTP, HTTP: &spec.HTTPScorer{URL: server + "/score", Credential: "judge"}}},
		{ID: "program", Class: "agent", Prompt: chat, Sampling: sampling, Scorer: shell(`grep -q '"token_ids":\[' && echo '{"reward":0.5}'`)},
		{ID: "server dies", Class: "agent", Prompt: text, Sampling: sampling,
			Scorer: &task.Scorer{Kind: task.ScorerHTTP, HTTP: &spec.HTTPScorer{URL: server + "/broken"}}},
		{ID: "program dies", Class: "agent", Prompt: text, Sampling: sampling, Scorer: shell(`exit 3`)},
	}
}

// TestTextIsTokenisedAndScored runs the whole service: prompts of text and messages
// in, rewards of every kind of scorer out. What the server was shown tells the number
// that the text ends with, which a second batch asks for.
func TestTextIsTokenisedAndScored(t *testing.T) {
	var mu sync.Mutex
	shown := map[string]string{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			Samples []struct {
				ID       string          `json:"id"`
				Text     string          `json:"text"`
				Metadata json.RawMessage `json:"metadata"`
			} `json:"samples"`
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || r.URL.Path != "/score" || r.Header.Get("Authorization") != "Bearer secret" {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		// Members of a group that end together come in one call.
		var results []any
		mu.Lock()
		defer mu.Unlock()
		for _, sample := range body.Samples {
			shown[sample.ID] = sample.Text
			results = append(results, map[string]any{"id": sample.ID, "reward": 0.75, "detail": map[string]int{"length": len(sample.Text)}})
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"results": results})
	}))
	defer server.Close()
	s := startInProcess(t, 2, func(cfg *config.Config) {
		root, err := os.MkdirTemp("", "holdfast-commands-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(root) })
		if err := os.Chmod(root, 0o711); err != nil { // programs run as another account than root
			t.Fatal(err)
		}
		cfg.Environments = config.Environments{CommandsDir: filepath.Join(root, "commands"), AllowedHosts: []string{"127.0.0.1"}, Credentials: []string{"judge:secret"}}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	if err := s.engines.register(ctx, s.store, "default"); err != nil {
		t.Fatal(err)
	}
	run, err := s.client.CreateRun(ctx, demoRun("scoring", "default"))
	if err != nil {
		t.Fatal(err)
	}
	tasks := scoredTasks(server.URL)
	if _, err := s.client.SubmitBatch(ctx, run.ID, "first", client.NewBatch{Tasks: client.Tasks(tasks)}); err != nil {
		t.Fatal(err)
	}
	reader := s.client.Read(run.ID, client.SamplesQuery{})
	samples := readByTask(ctx, t, reader, 6)
	for id, want := range map[string]struct {
		status, problem string
		reward          float64
	}{
		"server": {status: "truncated", reward: 0.75}, "program": {status: "truncated", reward: 0.5},
		"server dies":  {status: "failed", problem: "refused (status 400)"},
		"program dies": {status: "failed", problem: "3"},
	} {
		for _, sample := range samples[id] {
			scored := want.problem == ""
			if sample.Status != want.status || (sample.Reward != nil) != scored || scored && *sample.Reward != want.reward || !strings.Contains(sample.Problem, want.problem) {
				t.Errorf("%s: sample is %s with reward %v: %s", id, sample.Status, sample.Reward, sample.Problem)
			}
		}
	}
	s.checkPrompts(ctx, t, tasks, samples)

	mu.Lock()
	defer mu.Unlock()
	var first string
	for _, sample := range samples["server"] {
		if sample.Member == 0 {
			first = shown[sample.ID.String()]
		}
	}
	if len(shown) != 3 || first == "" {
		t.Fatalf("the server was shown %q", shown)
	}
	// The toy's numbers are words of their own.
	words := strings.Fields(first)
	slices.Reverse(words)
	number := words[slices.IndexFunc(words, func(w string) bool { return strings.Trim(w, "0123456789") == "" })]
	again := []task.Spec{tasks[0], tasks[0]}
	again[0].ID, again[0].GroupSize, again[0].Scorer = "right", 1, &task.Scorer{Kind: task.ScorerNumericMatch, Target: number}
	again[1].ID, again[1].GroupSize, again[1].Scorer = "wrong", 1, &task.Scorer{Kind: task.ScorerNumericMatch, Target: number + "1"}
	if _, err := s.client.SubmitBatch(ctx, run.ID, "second", client.NewBatch{Tasks: client.Tasks(again)}); err != nil {
		t.Fatal(err)
	}
	samples = readByTask(ctx, t, reader, 2)
	right, wrong := samples["right"][0], samples["wrong"][0]
	if right.Reward == nil || *right.Reward != 1 || wrong.Reward == nil || *wrong.Reward != 0 {
		t.Fatalf("the number %s of %q was scored as %+v and %+v", number, first, right.Reward, wrong.Reward)
	}
}

// readByTask waits for n samples.
func readByTask(ctx context.Context, t *testing.T, reader *client.Reader, n int) map[string][]wire.Sample {
	t.Helper()
	samples := map[string][]wire.Sample{}
	for range n {
		sample, err := reader.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		samples[sample.TaskID] = append(samples[sample.TaskID], *sample)
	}
	return samples
}

// checkPrompts compares the samples' prompts with what an engine makes of the tasks'.
func (s *inProcess) checkPrompts(ctx context.Context, t *testing.T, tasks []task.Spec, samples map[string][]wire.Sample) {
	t.Helper()
	direct, err := engine.NewVLLM(engine.VLLMConfig{URL: s.engines.servers[0].URL()})
	if err != nil {
		t.Fatal(err)
	}
	for i := range tasks {
		want, err := direct.Tokenize(ctx, engine.TokenizeRequest{Text: tasks[i].Prompt.Text, Messages: tasks[i].Prompt.Messages, AddGenerationPrompt: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, sample := range samples[tasks[i].ID] {
			ids, mask, _, err := sample.Arrays()
			if err != nil || len(ids) != len(want)+200 || !slices.Equal(ids[:len(want)], want) || slices.Contains(mask[:len(want)], 1) || slices.Contains(mask[len(want):], 0) {
				t.Errorf("%s: %d ids, %d are the prompt's, %v", tasks[i].ID, len(ids), len(want), err)
			}
		}
	}
}
