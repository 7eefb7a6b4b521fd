package cli

import (
	"context"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/workflows/task"
)

const killedSessions = 50

// mixedTasks are 50 sessions of three classes that crowd two small engines.
func mixedTasks() []task.Spec {
	var specs []task.Spec
	for i := range killedSessions {
		spec := task.Spec{
			ID: fmt.Sprintf("task-%02d", i), Prompt: task.Prompt{Synthetic: &task.Synthetic{Tokens: 1_500, Seed: uint64(i)}},
			Environment: &task.Environment{Kind: task.EnvironmentReplay, TimeScale: 20},
		}
		switch i % 5 {
		case 0, 1:
			spec.Class = "agent"
			for range 8 {
				spec.Environment.Turns = append(spec.Environment.Turns, task.ReplayTurn{OutputTokens: 120, GapSeconds: 4, AppendTokens: 200})
			}
		case 2, 3:
			spec.Class = "rlvr"
			spec.Environment.Turns = []task.ReplayTurn{{OutputTokens: 3_000}}
		case 4:
			spec.Class = "rlhf"
			spec.Environment.Turns = []task.ReplayTurn{{OutputTokens: 800}}
		}
		specs = append(specs, spec)
	}
	return specs
}

// balanced checks A = N + Q for every class, as one snapshot shows them.
func balanced(t *testing.T, b wire.Backlog) {
	t.Helper()
	for _, c := range append(b.Classes, b.Total) {
		ended := c.Completed + c.Truncated + c.Stale + c.Failed + c.Cancelled
		under := c.Queued + c.Pending + c.Held + c.Active
		if c.Released != c.Ended+c.Backlog || c.Ended != ended || c.Backlog != under {
			t.Fatalf("class %q: A %d, N %d (statuses %d), Q %d (states %d)", c.Class, c.Released, c.Ended, ended, c.Backlog, under)
		}
	}
}

// TestKilledProcessTreeLosesNothing kills everything with SIGKILL in the middle of
// a run, twice, and expects every session to end exactly once.
func TestKilledProcessTreeLosesNothing(t *testing.T) {
	ctx := within(t, 10*time.Minute)
	args := []string{"dev", "--listen", "127.0.0.1:0", "--data-dir", openDir(t), "--engines", "2",
		"--engine-capacity-tokens", "24000", "--time-scale", "20", "--lease-ttl", "4s", "--log-level", "error"}
	p := startHoldfast(t, args...)
	run, err := p.client.CreateRun(ctx, demoRun("killed", "default"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.client.SubmitBatch(ctx, run.ID, "only", client.NewBatch{Tasks: client.Tasks(mixedTasks())}); err != nil {
		t.Fatal(err)
	}
	seen := map[uuid.UUID]int64{}
	for _, ended := range []int64{5, 20} {
		consumeUntil(ctx, t, p, run.ID, seen, func(b wire.Backlog) bool { return b.Total.Ended >= ended && b.Total.Backlog > 0 })
		p.killTree(t)
		p = startHoldfast(t, args...)
		batch, err := p.client.SubmitBatch(ctx, run.ID, "only", client.NewBatch{Tasks: client.Tasks(mixedTasks())})
		if err != nil || !batch.Replayed {
			t.Fatalf("submitting the same batch again after the kill: replayed %v, error %v", batch.Replayed, err)
		}
	}
	last := consumeUntil(ctx, t, p, run.ID, seen, func(b wire.Backlog) bool { return b.Total.Backlog == 0 })
	if last.Total.Released != killedSessions || last.Total.Completed != killedSessions {
		t.Fatalf("of %d released %d completed: %+v", last.Total.Released, last.Total.Completed, last.Total)
	}
	if len(seen) != killedSessions {
		t.Fatalf("%d distinct samples were delivered, want %d", len(seen), killedSessions)
	}
	checkTranscripts(ctx, t, p, run.ID)

	tree := descendants(t, p.cmd.Process.Pid)
	if err := p.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-p.exited:
		if err != nil {
			t.Fatalf("after an interrupt it ended with %v\n%s", err, p.text())
		}
	case <-time.After(10 * time.Second):
		t.Fatalf("still running 10 s after an interrupt\n%s", p.text())
	}
	waitGone(t, tree)
}

// consumeUntil reads samples as a trainer, acknowledging every second page only,
// and checks the accounts, until the condition holds.
func consumeUntil(ctx context.Context, t *testing.T, p *process, run uuid.UUID, seen map[uuid.UUID]int64, enough func(wire.Backlog) bool) wire.Backlog {
	t.Helper()
	for pages, after := 0, ""; ; {
		page, err := p.client.Samples(ctx, run, client.SamplesQuery{Consumer: "trainer", After: after, Limit: 4, Wait: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range page.Samples {
			if seq, again := seen[s.ID]; again && seq != s.Seq {
				t.Fatalf("sample %s came as number %d and as number %d", s.ID, seq, s.Seq)
			}
			seen[s.ID] = s.Seq
		}
		after = page.Next
		if pages++; pages%2 == 0 && len(page.Samples) > 0 {
			if _, err := p.client.Ack(ctx, run, "trainer", page.Next); err != nil {
				t.Fatal(err)
			}
		}
		backlog, err := p.client.Backlog(ctx, run)
		if err != nil {
			t.Fatal(err)
		}
		balanced(t, backlog)
		if enough(backlog) && (backlog.Total.Backlog > 0 || int64(len(seen)) == backlog.Total.Ended) {
			return backlog
		}
	}
}

// checkTranscripts checks that every sample has exactly the tokens that its task
// asked for: nothing lost, nothing generated twice into it.
func checkTranscripts(ctx context.Context, t *testing.T, p *process, run uuid.UUID) {
	t.Helper()
	want := map[string]int{}
	for _, spec := range mixedTasks() {
		for i, turn := range spec.Environment.Turns {
			want[spec.ID] += turn.OutputTokens
			if i+1 < len(spec.Environment.Turns) {
				want[spec.ID] += turn.AppendTokens
			}
		}
		want[spec.ID] += spec.Prompt.Synthetic.Tokens
	}
	page, err := p.client.Samples(ctx, run, client.SamplesQuery{Limit: 1_000})
	if err != nil {
		t.Fatal(err)
	}
	if len(page.Samples) != killedSessions {
		t.Fatalf("the run has %d samples, want %d", len(page.Samples), killedSessions)
	}
	for _, s := range page.Samples {
		ids, mask, logprobs, err := s.Packed.Unpack()
		if err != nil {
			t.Fatal(err)
		}
		generated := 0
		for _, m := range mask {
			generated += int(m)
		}
		if len(ids) != want[s.TaskID] || len(logprobs) != len(ids) || int64(generated) != s.Usage.OutputTokens {
			t.Fatalf("%s: %d tokens, %d log-probabilities, %d generated of %d: want %d tokens", s.TaskID, len(ids), len(logprobs), generated, s.Usage.OutputTokens, want[s.TaskID])
		}
	}
}
