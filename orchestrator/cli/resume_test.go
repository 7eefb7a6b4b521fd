package cli

import (
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/workflows/task"
)

// TestKilledGenerationGoesOn kills everything with SIGKILL in the middle of one long
// model call and expects the call to go on from its last checkpoint: the sample is
// whole, and far less than the first worker had generated is generated again.
func TestKilledGenerationGoesOn(t *testing.T) {
	const wanted, before = 9_000, 4_500
	ctx := within(t, 6*time.Minute)
	args := []string{"dev", "--listen", "127.0.0.1:0", "--data-dir", openDir(t), "--engines", "1", "--log-level", "error", "--time-scale"}
	// The first engine is slow, so that the call does not end before it is looked at.
	p := startHoldfast(t, append(args, "8")...)
	run, err := p.client.CreateRun(ctx, demoRun("resumed", "default"))
	if err != nil {
		t.Fatal(err)
	}
	spec := task.Spec{
		ID: "long", Class: "rlvr", Prompt: task.Prompt{Synthetic: &task.Synthetic{Tokens: 500, Seed: 1}},
		Environment: &task.Environment{Kind: task.EnvironmentReplay, TimeScale: 20, Turns: []task.ReplayTurn{{OutputTokens: wanted}}},
	}
	if _, err := p.client.SubmitBatch(ctx, run.ID, "only", client.NewBatch{Tasks: client.Tasks([]task.Spec{spec})}); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "half of the tokens", func() bool { return counter(t, p, "holdfast_tokens_generated_total") >= before })
	p.killTree(t)
	p = startHoldfast(t, append(args, "40")...)
	var samples []wire.Sample
	for len(samples) == 0 {
		page, err := p.client.Samples(ctx, run.ID, client.SamplesQuery{Limit: 10, Wait: 5 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		samples = page.Samples
	}
	sample := samples[0]
	ids, _, logprobs, err := sample.Packed.Unpack()
	if err != nil {
		t.Fatal(err)
	}
	if sample.Status != "completed" || sample.Usage.OutputTokens != wanted || len(ids) != 500+wanted || len(logprobs) != len(ids) {
		t.Errorf("%s with %d output tokens, %d ids, %d log-probabilities", sample.Status, sample.Usage.OutputTokens, len(ids), len(logprobs))
	}
	if sample.Usage.Resumes != 1 {
		t.Errorf("the call went on %d times from what there was: usage %+v", sample.Usage.Resumes, sample.Usage)
	}
	// The new process generates what the checkpoints lack, which is at most one of
	// them and the pieces of the stream around it, and the rest of the turn.
	if again := counter(t, p, "holdfast_tokens_generated_total"); again > wanted-before+2*2_048 {
		t.Errorf("the second process generated %d tokens, of %d the first one had at least %d", again, wanted, before)
	}
}

// counter reads one of the process's metrics.
func counter(t *testing.T, p *process, name string) int {
	t.Helper()
	_, after, _ := strings.Cut(p.text(), "API: ")
	scraper := http.Client{Timeout: 15 * time.Second}
	response, err := scraper.Get(strings.Fields(after)[0] + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) == 2 && strings.HasPrefix(line, name+"{") {
			value, err := strconv.ParseFloat(fields[1], 64)
			if err != nil {
				t.Fatal(err)
			}
			return int(value)
		}
	}
	return 0
}
