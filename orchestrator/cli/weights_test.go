package cli

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/workflows/task"
)

// TestWeightUpdateInTheMiddleOfARun commits new weights while sessions generate:
// every sample is whole, and its segments tell which weights sampled what.
func TestWeightUpdateInTheMiddleOfARun(t *testing.T) {
	ctx := within(t, 5*time.Minute)
	s := startInProcess(t, 2)
	if err := s.engines.register(ctx, s.store, "default"); err != nil {
		t.Fatal(err)
	}
	run, err := s.client.CreateRun(ctx, demoRun("weights", "default"))
	if err != nil {
		t.Fatal(err)
	}
	reader := s.client.Read(run.ID, client.SamplesQuery{Consumer: "trainer"})
	const sessions, outputTokens = 6, 40_000
	for i, update := range []wire.NewWeightUpdate{{PolicyVersion: 1, Mode: "abort"}, {PolicyVersion: 2, Mode: "keep", Cache: "salt"}} {
		t.Run(update.Mode, func(t *testing.T) {
			before := update.PolicyVersion - 1
			specs := make([]task.Spec, sessions)
			for n := range specs {
				specs[n] = task.Spec{Class: "agent", Prompt: task.Prompt{Synthetic: &task.Synthetic{Tokens: 300, Seed: uint64(10*i + n + 1)}},
					Environment: &task.Environment{Kind: task.EnvironmentReplay, Turns: []task.ReplayTurn{{OutputTokens: outputTokens, AppendTokens: 8}, {OutputTokens: 8}}}}
			}
			if _, err := s.client.SubmitBatch(ctx, run.ID, update.Mode, client.NewBatch{Tasks: client.Tasks(specs)}); err != nil {
				t.Fatal(err)
			}
			generated := func() (tokens int64) {
				for _, server := range s.engines.servers {
					tokens += server.Stats().GeneratedTokens
				}
				return tokens
			}
			start := generated()
			s.slow(t, 50)
			eventually(t, time.Minute, "all sessions generate", func() bool {
				under := 0
				for _, server := range s.engines.servers {
					for _, request := range server.Requests() {
						if request.Progress.OutputTokens >= 200 {
							under++
						}
					}
				}
				return under == sessions
			})
			s.weights(ctx, t, "begin", "--mode", update.Mode, "--cache", cmp.Or(update.Cache, "reset"), fmt.Sprint(update.PolicyVersion))
			paused := generated()
			s.slow(t, 1)
			view, err := s.client.Router(ctx, "default")
			if err != nil || view.Instances[0].Observability != "degraded" {
				t.Errorf("while paused the router shows %+v, %v", view.Instances, err)
			}
			if out := s.weights(ctx, t, "commit", fmt.Sprint(update.PolicyVersion)); !strings.Contains(out, "committed") {
				t.Fatalf("committing said %q", out)
			}
			if paused >= start+sessions*outputTokens {
				t.Fatalf("all %d tokens were there before the commit, so nothing was cut", paused-start)
			}
			for range sessions {
				sample, err := reader.Next(ctx)
				if err != nil {
					t.Fatal(err)
				}
				checkVersions(t, sample, before, update.PolicyVersion, outputTokens)
			}
		})
	}
	// What follows looks into sessions that end only because they are stopped.
	s.slow(t, 50)
	t.Run("stale", func(t *testing.T) { s.endStale(ctx, t, run.ID, reader) })
	t.Run("restart", func(t *testing.T) { s.restartStale(ctx, t, run.ID, reader) })
	t.Run("deadline", func(t *testing.T) { s.passDeadline(ctx, t, run.ID, reader) })
	if err := s.store.VerifyCounters(ctx, run.ID); err != nil {
		t.Error(err)
	}
	if out := s.weights(ctx, t, "status"); !strings.Contains(out, "at policy version 5") || !strings.Contains(out, "version 1: committed, requested, mode abort") {
		t.Errorf("the status is %q", out)
	}
}

// endStale commits weights that leave a contract no patience with older sessions:
// each ends as stale, the one that comes after them completes.
func (s *inProcess) endStale(ctx context.Context, t *testing.T, run uuid.UUID, reader *client.Reader) {
	contract := demoRun("", "").Contract
	contract.StalenessBound, contract.StalePolicy = new(int), "end"
	if _, err := s.client.PutContract(ctx, run, contract); err != nil {
		t.Fatal(err)
	}
	spec := task.Spec{Class: "rlvr", GroupSize: 3, Prompt: task.Prompt{Synthetic: &task.Synthetic{Tokens: 100, Seed: 99}},
		Environment: &task.Environment{Kind: task.EnvironmentReplay, Turns: []task.ReplayTurn{{OutputTokens: 90_000}}}}
	if _, err := s.client.SubmitBatch(ctx, run, "stale", client.NewBatch{Tasks: client.Tasks([]task.Spec{spec})}); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "the sessions generate", func() bool {
		return s.engines.servers[0].Stats().Running()+s.engines.servers[1].Stats().Running() == 3
	})
	s.weights(ctx, t, "begin", "3")
	s.weights(ctx, t, "commit", "3")
	update, err := s.client.WeightUpdate(ctx, "default", 3)
	if err != nil || update.SessionsOverBound != 3 || update.SessionsEnded != 3 {
		t.Fatalf("update %+v, %v", update, err)
	}
	spec.GroupSize, spec.Environment.Turns[0].OutputTokens = 1, 5
	if _, err := s.client.SubmitBatch(ctx, run, "fresh", client.NewBatch{Tasks: client.Tasks([]task.Spec{spec})}); err != nil {
		t.Fatal(err)
	}
	ended := map[string]int{}
	for range 4 {
		sample, err := reader.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		ended[sample.Status]++
		if sample.Status == "stale" && (!strings.HasPrefix(sample.Problem, "stale: 1 behind the policy version, the contract allows 0") || sample.Reward != nil) {
			t.Errorf("a stale sample has problem %q and reward %v", sample.Problem, sample.Reward)
		}
	}
	if ended["stale"] != 3 || ended["completed"] != 1 {
		t.Errorf("ended %v", ended)
	}
}

// restartStale commits weights twice while a contract begins stale sessions again
// once: the session runs anew after the first and ends as stale after the second.
func (s *inProcess) restartStale(ctx context.Context, t *testing.T, run uuid.UUID, reader *client.Reader) {
	contract := demoRun("", "").Contract
	restarts := 1
	contract.StalenessBound, contract.StalePolicy, contract.MaxRestarts = new(int), "restart", &restarts
	if _, err := s.client.PutContract(ctx, run, contract); err != nil {
		t.Fatal(err)
	}
	spec := task.Spec{Class: "rlvr", Prompt: task.Prompt{Synthetic: &task.Synthetic{Tokens: 100, Seed: 98}},
		Environment: &task.Environment{Kind: task.EnvironmentReplay, Turns: []task.ReplayTurn{{OutputTokens: 90_000}}}}
	batch, err := s.client.SubmitBatch(ctx, run, "restart", client.NewBatch{Tasks: client.Tasks([]task.Spec{spec})})
	if err != nil {
		t.Fatal(err)
	}
	for attempt, version := range []string{"4", "5"} {
		eventually(t, time.Minute, "attempt "+fmt.Sprint(attempt)+" generates", func() bool {
			page, err := s.client.Sessions(ctx, run, client.SessionsQuery{Batch: batch.ID})
			return err == nil && len(page.Sessions) == 1 && page.Sessions[0].Restarts == attempt && page.Sessions[0].State == "active" &&
				s.engines.servers[0].Stats().Running()+s.engines.servers[1].Stats().Running() == 1
		})
		s.weights(ctx, t, "begin", version)
		s.weights(ctx, t, "commit", version)
	}
	sample, err := reader.Next(ctx)
	if err != nil || sample.Status != "stale" || sample.Restarts != 1 || sample.Batch != batch.ID {
		t.Errorf("sample %+v, %v", sample, err)
	}
}

// passDeadline lets a deadline pass in the middle of a model call.
func (s *inProcess) passDeadline(ctx context.Context, t *testing.T, run uuid.UUID, reader *client.Reader) {
	spec := task.Spec{Class: "rlvr", DeadlineSeconds: 1, Prompt: task.Prompt{Synthetic: &task.Synthetic{Tokens: 100, Seed: 97}},
		Environment: &task.Environment{Kind: task.EnvironmentReplay, Turns: []task.ReplayTurn{{OutputTokens: 90_000}}}}
	if _, err := s.client.SubmitBatch(ctx, run, "deadline", client.NewBatch{Tasks: client.Tasks([]task.Spec{spec})}); err != nil {
		t.Fatal(err)
	}
	sample, err := reader.Next(ctx)
	if err != nil || sample.Status != "stale" || !strings.Contains(sample.Problem, "deadline") {
		t.Errorf("sample %+v, %v", sample, err)
	}
	eventually(t, time.Minute, "the engines are idle", func() bool {
		return s.engines.servers[0].Stats().Running()+s.engines.servers[1].Stats().Running() == 0
	})
}

// weights runs a subcommand of holdfast weights against the service.
func (s *inProcess) weights(ctx context.Context, t *testing.T, args ...string) string {
	t.Helper()
	began := false
	root := newRoot(&began)
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetErr(&out)
	root.SetArgs(append([]string{"weights"}, append(args, "--url", "http://"+s.api.Addr())...))
	if err := root.ExecuteContext(ctx); err != nil {
		t.Fatalf("weights %v: %v\n%s", args, err, out.String())
	}
	return out.String()
}

// checkVersions checks a sample that began under one version and ended under the next.
func checkVersions(t *testing.T, sample *wire.Sample, before, after int64, outputTokens int) {
	t.Helper()
	if sample.Status != "completed" || sample.Usage.Turns != 2 || sample.MinPolicyVersion != before || sample.MaxPolicyVersion != after || sample.Staleness != 1 {
		t.Errorf("sample of status %s, %d turns, versions %d to %d, staleness %d (%s)", sample.Status, sample.Usage.Turns, sample.MinPolicyVersion, sample.MaxPolicyVersion, sample.Staleness, sample.Problem)
	}
	ids, mask, logprobs, err := sample.Packed.Unpack()
	if err != nil || len(ids) != 300+outputTokens+8+8 || len(mask) != len(ids) || len(logprobs) != len(ids) {
		t.Fatalf("%d tokens, %d of mask, %d logprobs, %v", len(ids), len(mask), len(logprobs), err)
	}
	generated := map[int64]int{}
	last := int64(0)
	for _, segment := range sample.Segments {
		if segment.Kind != "generated" {
			continue
		}
		if segment.PolicyVersion < last {
			t.Errorf("versions go backwards in %+v", sample.Segments)
		}
		last = segment.PolicyVersion
		generated[last] += segment.Count
	}
	if generated[before] == 0 || generated[after] == 0 || generated[before]+generated[after] != outputTokens+8 {
		t.Errorf("generated by version: %v", generated)
	}
}
