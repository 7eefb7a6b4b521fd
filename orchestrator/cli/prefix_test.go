package cli

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/api/client"
	"holdfast/workflows/task"
)

// groupedAgents are replayed agent sessions in groups of four that share a prompt.
func groupedAgents(groups, turns int) []task.Spec {
	var specs []task.Spec
	for g := range groups {
		spec := task.Spec{
			Class: "agent", GroupSize: 4, Prompt: task.Prompt{Synthetic: &task.Synthetic{Tokens: 900 + 37*g, Seed: uint64(g + 1)}},
			Environment: &task.Environment{Kind: task.EnvironmentReplay},
		}
		for turn := range turns {
			spec.Environment.Turns = append(spec.Environment.Turns, task.ReplayTurn{OutputTokens: 20 + turn, AppendTokens: 90 + 3*g, GapSeconds: 0.1})
		}
		specs = append(specs, spec)
	}
	return specs
}

// finish waits for n samples of a run and returns their turns and cached and prompt tokens.
func (s *inProcess) finish(ctx context.Context, t *testing.T, run uuid.UUID, n int) (prompt, cached int64) {
	t.Helper()
	reader := s.client.Read(run, client.SamplesQuery{})
	for range n {
		sample, err := reader.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if sample.Status != "completed" {
			t.Fatalf("sample %s is %s: %s", sample.ID, sample.Status, sample.Problem)
		}
		prompt += sample.Usage.PromptTokens
		cached += sample.Usage.CachedTokens
	}
	return prompt, cached
}

func TestCachedTokensAreAsPromised(t *testing.T) {
	s := startInProcess(t, 2)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	if err := s.engines.register(ctx, s.store, "default"); err != nil {
		t.Fatal(err)
	}
	run, err := s.client.CreateRun(ctx, demoRun("prefix", "default"))
	if err != nil {
		t.Fatal(err)
	}
	specs := groupedAgents(6, 12)
	if _, err := s.client.SubmitBatch(ctx, run.ID, "prefix", client.NewBatch{Tasks: client.Tasks(specs)}); err != nil {
		t.Fatal(err)
	}
	prompt, cached := s.finish(ctx, t, run.ID, 4*len(specs))
	view, err := s.client.Router(ctx, "default")
	if err != nil {
		t.Fatal(err)
	}
	var predicted, reported, wrong, turns int64
	for _, in := range view.Instances {
		if in.Index == nil || !in.Index.Trusted || in.Index.Alarm != "" || in.Index.Resyncs != 0 || in.Receipts.Alarm {
			t.Errorf("instance %s: index %+v, receipts %+v", in.ID, in.Index, in.Receipts)
		}
		predicted += in.Receipts.PredictedTokens
		reported += in.Receipts.CachedTokens
		wrong += in.Receipts.ErrorTokens
		turns += in.Receipts.Turns
	}
	hits := fmt.Sprintf("%d turns, %d prompt tokens: %.2f %% predicted, %.2f %% reported, %.2f %% wrong turn by turn", turns, prompt,
		100*float64(predicted)/float64(prompt), 100*float64(reported)/float64(prompt), 100*float64(wrong)/float64(prompt))
	t.Log(hits)
	if reported != cached || turns != int64(len(specs)*4*12) {
		t.Errorf("the samples report %d cached tokens, the receipts of %d turns %d", cached, turns, reported)
	}
	if difference := predicted - reported; difference > prompt/50 || -difference > prompt/50 {
		t.Errorf("predicted and reported hit differ by more than 2 %%: %s", hits)
	}
	if float64(reported)/float64(prompt) < 0.8 {
		t.Errorf("hardly anything was cached, so that little was compared: %s", hits)
	}
}
