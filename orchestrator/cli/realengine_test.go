//go:build realengine

package cli

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/orchestrator/enginetest"
	"holdfast/workflows/task"
)

// realTasks are Agent, RLVR and RLHF sessions for a server that takes text: prompts
// are the bytes of text, and tools append nothing.
func realTasks() []task.Spec {
	var specs []task.Spec
	add := func(class string, count int, turns ...task.ReplayTurn) {
		for i := range count {
			id := fmt.Sprintf("%s-%d", class, i)
			specs = append(specs, task.Spec{
				ID: id, Class: class, Prompt: task.Prompt{TokenIDs: enginetest.ASCII("the story of " + id + " begins")},
				Environment: &task.Environment{Kind: task.EnvironmentReplay, Turns: turns},
			})
		}
	}
	add("agent", 4, task.ReplayTurn{OutputTokens: 120, GapSeconds: 0.3}, task.ReplayTurn{OutputTokens: 80, GapSeconds: 0.5}, task.ReplayTurn{OutputTokens: 150, GapSeconds: 0.2}, task.ReplayTurn{OutputTokens: 60})
	add("rlvr", 4, task.ReplayTurn{OutputTokens: 1_200})
	add("rlhf", 4, task.ReplayTurn{OutputTokens: 300})
	return specs
}

// endlessTask generates for longer than the test takes.
func endlessTask() task.Spec {
	return task.Spec{
		ID: "endless", Class: "rlvr", Prompt: task.Prompt{TokenIDs: enginetest.ASCII("a story without an end")},
		Environment: &task.Environment{Kind: task.EnvironmentReplay, Turns: []task.ReplayTurn{{OutputTokens: 16_000}}},
	}
}

// TestServiceOnARealEngine runs the whole service in front of real inference: a cancel
// in mid-generation stops the engine, and a crash of the engine in the middle loses
// no session and no token.
func TestServiceOnARealEngine(t *testing.T) {
	ctx := within(t, 6*time.Minute)
	server := enginetest.Start(t, enginetest.Endless)
	p := startHoldfast(t, "dev", "--listen", "127.0.0.1:0", "--data-dir", openDir(t), "--engines", "0", "--engine-silence", "45s", "--log-level", "warn")
	if _, err := p.client.RegisterInstance(ctx, "default", wire.NewInstance{
		ID: "real", URL: server.URL, Kind: "openai", CapacityBlocks: enginetest.Parallel * enginetest.ContextTokens / 32, BlockTokens: 32, MaxContextTokens: enginetest.ContextTokens,
	}); err != nil {
		t.Fatal(err)
	}
	run, err := p.client.CreateRun(ctx, demoRun("real", "default"))
	if err != nil {
		t.Fatal(err)
	}

	cancelled := cancelInMidGeneration(ctx, t, p, server, run.ID)

	if _, err := p.client.SubmitBatch(ctx, run.ID, "work", client.NewBatch{Tasks: client.Tasks(realTasks())}); err != nil {
		t.Fatal(err)
	}
	seen := map[uuid.UUID]int64{}
	consumeUntil(ctx, t, p, run.ID, seen, func(b wire.Backlog) bool { return b.Total.Ended >= 3 && b.Total.Active > 0 })
	server.Kill()
	server.Restart(t)
	last := consumeUntil(ctx, t, p, run.ID, seen, func(b wire.Backlog) bool { return b.Total.Backlog == 0 })
	want := int64(len(realTasks()))
	if last.Total.Released != want+1 || last.Total.Completed != want || last.Total.Cancelled != 1 || int64(len(seen)) != want+1 {
		t.Fatalf("of %d sessions and one cancelled: %+v, %d samples\n%s", want, last.Total, len(seen), p.text())
	}
	checkRealSamples(ctx, t, p, run.ID, cancelled)
	server.AwaitIdle(t)
}

// cancelInMidGeneration releases a session, cancels it while the engine works on it,
// and waits until the engine has stopped.
func cancelInMidGeneration(ctx context.Context, t *testing.T, p *process, server *enginetest.Server, run uuid.UUID) uuid.UUID {
	t.Helper()
	if _, err := p.client.SubmitBatch(ctx, run, "endless", client.NewBatch{Tasks: client.Tasks([]task.Spec{endlessTask()})}); err != nil {
		t.Fatal(err)
	}
	page, err := p.client.Sessions(ctx, run, client.SessionsQuery{})
	if err != nil || len(page.Sessions) != 1 {
		t.Fatalf("%+v, %v", page, err)
	}
	id := page.Sessions[0].ID
	// A model that is being loaded works too, but not for that long.
	idle := server.CPUTicks(t)
	enginetest.Await(t, 2*time.Minute, "the engine to generate", func() bool { return server.CPUTicks(t) > idle+150 })
	if _, err := p.client.CancelSession(ctx, id, "seen enough"); err != nil {
		t.Fatal(err)
	}
	server.AwaitIdle(t)
	enginetest.Await(t, time.Minute, "the session to end", func() bool {
		b, err := p.client.Backlog(ctx, run)
		if err != nil {
			t.Fatal(err)
		}
		return b.Total.Cancelled == 1 && b.Total.Backlog == 0
	})
	return id
}

// checkRealSamples: every sample holds its prompt and exactly the tokens asked for,
// all of which the model can have said.
func checkRealSamples(ctx context.Context, t *testing.T, p *process, run, cancelled uuid.UUID) {
	t.Helper()
	prompts, outputs := map[string]int{}, map[string]int{}
	for _, spec := range realTasks() {
		prompts[spec.ID] = len(spec.Prompt.TokenIDs)
		for _, turn := range spec.Environment.Turns {
			outputs[spec.ID] += turn.OutputTokens
		}
	}
	page, err := p.client.Samples(ctx, run, client.SamplesQuery{Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range page.Samples {
		if s.ID == cancelled {
			continue
		}
		ids, mask, _, err := s.Packed.Unpack()
		if err != nil {
			t.Fatal(err)
		}
		var generated []int32
		for i, m := range mask {
			if m != 0 {
				generated = append(generated, ids[i])
			}
		}
		if len(generated) != outputs[s.TaskID] || len(ids) != prompts[s.TaskID]+outputs[s.TaskID] {
			t.Errorf("%s: %d tokens, %d of them generated, want %d", s.TaskID, len(ids), len(generated), outputs[s.TaskID])
		}
		if err := enginetest.Speaks(generated); err != nil {
			t.Errorf("%s: %v", s.TaskID, err)
		}
	}
}
