package activities

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/testsuite"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
	"holdfast/workflows"
)

// TestBrokenStreamGoesOnElsewhere breaks the stream around checkpoints of the real
// size and elsewhere: the sample is the one of an engine that never failed, nothing
// is generated twice, and the second engine is asked for the rest only.
func TestBrokenStreamGoesOnElsewhere(t *testing.T) {
	const wanted = 3*checkpointTokens + 10
	f := newFixture(t)
	for _, at := range []int{0, 1, checkpointTokens - 1, checkpointTokens, checkpointTokens + 1, 2*checkpointTokens - 1, 2 * checkpointTokens, 2*checkpointTokens + 1, wanted - 1} {
		for _, chunk := range []int{1, 7, checkpointTokens} {
			t.Run(fmt.Sprintf("%d in pieces of %d", at, chunk), func(t *testing.T) {
				e := newEngines(t, step{tokens: at, end: endsBroken})
				e.chunkTokens = chunk
				p := &placements{}
				a := f.worker(e, p, 0)
				id := f.session(single(wanted))
				reply, err := a.turn(t.Context(), id, 0, &pulse{})
				if status := parsed(t, reply, err); status != router.Truncated {
					t.Errorf("the session ended as %v", status)
				}
				if rows := f.checkpointRows(); rows != 0 {
					t.Errorf("%d checkpoints are left after the commit", rows)
				}
				sample := f.end(a, id, reply)
				checkSample(t, e, &sample, wanted)
				turn := f.onlyTurn(id)
				resumes := 1
				if at == 0 {
					resumes = 0
				}
				if turn.TurnEffort != (store.TurnEffort{Attempts: 2, Resumes: resumes}) || e.sampledAgain() != 0 || turn.Instance != "w2" {
					t.Errorf("turn %+v, %d tokens were sampled again", turn, e.sampledAgain())
				}
				if turn.PromptTokens != promptTokens || turn.CachedTokens > promptTokens || turn.TotalSeconds < 2 {
					t.Errorf("turn %+v", turn)
				}
				if q := p.questions[1]; q.PromptTokens != int64(promptTokens+at) || q.Avoid != "w1" || q.KnownBlocks+len(q.NewBlocks) != (promptTokens+at)/16 {
					t.Errorf("the router was asked %+v", q)
				}
				second := e.requests[1]
				if second.MaxTokens != wanted-at || len(second.Prompt) != promptTokens+at || second.RequestID == e.requests[0].RequestID {
					t.Errorf("the second call asks for %d tokens after %d as %q", second.MaxTokens, len(second.Prompt), second.RequestID)
				}
				ends := p.ends()
				if len(ends) != 2 || !ends[0].Failed || ends[1].Failed || ends[1].PromptTokens+ends[1].OutputTokens != promptTokens+wanted {
					t.Errorf("the router was told %+v", ends)
				}
			})
		}
	}
}

// lost starts a turn in a worker that dies when it has sent the call's tokens, and
// returns once the checkpoints that it can have written are durable.
func (f *fixture) lost(e *engines, p Router, id uuid.UUID, durable int, pu *pulse) (letGo func() (workflows.TurnReply, error)) {
	f.t.Helper()
	a := f.worker(e, p, testCheckpointTokens)
	type answer struct {
		reply workflows.TurnReply
		err   error
	}
	answered := make(chan answer, 1)
	// A worker that is lost ends with its process; here it must not outlive the test.
	ctx, cancel := context.WithCancel(context.Background())
	f.t.Cleanup(cancel)
	go func() {
		reply, err := a.turn(ctx, id, 0, pu)
		answered <- answer{reply, err}
	}()
	storetest.Came(f.t, "the call that hangs", e.hung)
	f.eventually(func() bool { return f.durable(id) >= durable })
	return func() (workflows.TurnReply, error) {
		close(e.release)
		got := storetest.Came(f.t, "the lost worker's answer", answered)
		return got.reply, got.err
	}
}

func (f *fixture) durable(id uuid.UUID) int {
	partial, err := f.PartialTurn(context.Background(), id, 0)
	must(f.t, err)
	return len(partial.IDs)
}

func (f *fixture) eventually(holds func() bool) {
	f.t.Helper()
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	deadline := time.After(storetest.Patience)
	for !holds() {
		select {
		case <-ticker.C:
		case <-deadline:
			f.t.Fatal("it did not come to hold")
		}
	}
}

// TestLostWorkersTurnGoesOnFromItsCheckpoint: what the lost worker had saved is kept,
// what it had not is generated again and counted, and when it turns out to live after
// all it changes nothing.
func TestLostWorkersTurnGoesOnFromItsCheckpoint(t *testing.T) {
	const wanted = 5*testCheckpointTokens + 3
	f := newFixture(t)
	for _, at := range []int{1, testCheckpointTokens, testCheckpointTokens + 1, 2*testCheckpointTokens + 9, 5*testCheckpointTokens + 1} {
		t.Run(fmt.Sprint(at), func(t *testing.T) {
			// The newest token is never saved while it may be the last.
			durable := at - testCheckpointTokens
			p := &placements{}
			e := newEngines(t, step{tokens: at, end: endsLost})
			id := f.session(single(wanted))
			first := &pulse{}
			letGo := f.lost(e, p, id, durable, first)
			heard := first.progress()
			if heard.Tokens != at || heard.Attempts != 1 {
				t.Errorf("the lost worker's heartbeat says %+v", heard)
			}
			saved := f.durable(id)

			a := f.worker(e, p, testCheckpointTokens)
			reply, err := a.turn(t.Context(), id, 0, &pulse{earlier: heard})
			if status := parsed(t, reply, err); status != router.Truncated {
				t.Errorf("the session ended as %v", status)
			}
			turn := f.onlyTurn(id)
			resumes := 0
			if saved > 0 {
				resumes = 1
			}
			want := store.TurnEffort{Attempts: 2, Resumes: resumes, TokensRegenerated: int64(at - saved)}
			if turn.TurnEffort != want || e.sampledAgain() != want.TokensRegenerated || saved < durable {
				t.Errorf("turn %+v, want %+v; %d tokens were saved, at least %d should be; %d were sampled again", turn.TurnEffort, want, saved, durable, e.sampledAgain())
			}
			late, err := letGo()
			must(t, err)
			if late != reply {
				t.Errorf("the lost worker answers %+v, the other one %+v", late, reply)
			}
			if rows := f.checkpointRows(); rows != 0 {
				t.Errorf("%d checkpoints are left", rows)
			}
			sample := f.end(a, id, reply)
			checkSample(t, e, &sample, wanted)
			if sample.Usage.TokensRegenerated != want.TokensRegenerated {
				t.Errorf("usage %+v", sample.Usage)
			}
		})
	}
}

// TestHeartbeatsTellTheNextWorker goes through Temporal's own activity environment:
// the details of the lost worker's last heartbeat arrive.
func TestHeartbeatsTellTheNextWorker(t *testing.T) {
	f := newFixture(t)
	e := newEngines(t)
	a := f.worker(e, &placements{}, testCheckpointTokens)
	id := f.session(single(50))
	var suite testsuite.WorkflowTestSuite
	environment := suite.NewTestActivityEnvironment()
	environment.RegisterActivityWithOptions(a.Turn, activity.RegisterOptions{Name: workflows.TurnActivity})
	environment.SetHeartbeatDetails(progress{Tokens: 40, Attempts: 3, Resumes: 1, TokensRegenerated: 5})
	value, err := environment.ExecuteActivity(workflows.TurnActivity, workflows.TurnRef{Session: id.String()})
	must(t, err)
	var reply workflows.TurnReply
	must(t, value.Get(&reply))
	if turn := f.onlyTurn(id); turn.TurnEffort != (store.TurnEffort{Attempts: 4, Resumes: 1, TokensRegenerated: 45}) {
		t.Errorf("turn %+v", turn.TurnEffort)
	}
	sample := f.end(a, id, reply)
	checkSample(t, e, &sample, 50)
}

// TestWeightUpdateCutsATurn: what was sampled before the update keeps its version,
// what comes after has the new one, and a cut is no failure however often it happens.
func TestWeightUpdateCutsATurn(t *testing.T) {
	f := newFixture(t)
	const wanted = 40
	var cuts []step
	for range 10 {
		cuts = append(cuts, step{tokens: 3, end: endsCut, newVersionAtEnd: true})
	}
	for name, test := range map[string]struct {
		script   []step
		silent   bool
		attempts int
		segments int
	}{
		"cut":                {[]step{{tokens: 17, end: endsCut, newVersionAtEnd: true}}, false, 2, 2},
		"cut before a token": {[]step{{tokens: 0, end: endsCut}, {tokens: 0, end: endsCut, newVersionAtEnd: true}}, false, 3, 1},
		"cut many times":     {cuts, false, 11, 11},
		"cut by the same":    {[]step{{tokens: 17, end: endsCut}}, false, 2, 1},
		"kept in the engine": {[]step{{newVersionAfter: 25}}, false, 1, 2},
		"said by the engine": {[]step{{tokens: 17, end: endsCut, newVersionAtEnd: true}}, true, 2, 2},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEngines(t, test.script...)
			e.silent = test.silent
			p := &placements{}
			a := f.worker(e, p, testCheckpointTokens)
			id := f.session(single(wanted))
			reply, err := a.turn(t.Context(), id, 0, &pulse{})
			parsed(t, reply, err)
			sample := f.end(a, id, reply)
			checkSample(t, e, &sample, wanted)
			if len(sample.Tokens.Segments) != 1+test.segments {
				t.Errorf("segments %+v", sample.Tokens.Segments)
			}
			if turn := f.onlyTurn(id); turn.Attempts != test.attempts || turn.Instance != "w1" || turn.PolicyVersion != e.version {
				t.Errorf("turn %+v", turn)
			}
			for _, end := range p.ends() {
				if end.Failed {
					t.Errorf("the router was told that a cut call failed: %+v", end)
				}
			}
		})
	}
}

// TestEndlessCutsEndTheTurn: an engine that gives up every call is not called for ever.
func TestEndlessCutsEndTheTurn(t *testing.T) {
	f := newFixture(t)
	script := make([]step, 1_000)
	for i := range script {
		script[i] = step{end: endsCut}
	}
	e := newEngines(t, script...)
	a := f.worker(e, &placements{}, testCheckpointTokens)
	id := f.session(single(40))
	reply, err := a.turn(t.Context(), id, 0, &pulse{})
	if status := parsed(t, reply, err); status != router.Failed || len(e.requests) != maxCuts+a.cfg.EngineAttempts {
		t.Errorf("%v after %d calls", status, len(e.requests))
	}
	f.end(a, id, reply)
}

// TestProgressOutweighsFailures: calls that each bring a checkpoint's worth are no
// reason to give up, calls that bring nothing are.
func TestProgressOutweighsFailures(t *testing.T) {
	f := newFixture(t)
	for _, test := range []struct {
		tokens, calls int
		want          router.EndStatus
	}{
		{testCheckpointTokens, 10, router.Truncated},
		{1, 4, router.Failed},
	} {
		script := make([]step, 9)
		for i := range script {
			script[i] = step{tokens: test.tokens, end: endsBroken}
		}
		e := newEngines(t, script...)
		a := f.worker(e, &placements{}, testCheckpointTokens)
		id := f.session(single(10 * testCheckpointTokens))
		reply, err := a.turn(t.Context(), id, 0, &pulse{})
		if status := parsed(t, reply, err); status != test.want || len(e.requests) != test.calls {
			t.Errorf("%d tokens a call: %v after %d calls", test.tokens, status, len(e.requests))
		}
		f.end(a, id, reply)
		if rows := f.checkpointRows(); rows != 0 {
			t.Errorf("%d checkpoints outlived the session", rows)
		}
	}
}

// TestWholeOutputNeedsNoFurtherCall: the last token came, what broke was the rest.
func TestWholeOutputNeedsNoFurtherCall(t *testing.T) {
	f := newFixture(t)
	const wanted = 20
	stop := tokenAt(promptTokens+wanted-1, 1)
	for name, test := range map[string]struct {
		script []step
		limit  int
		eos    bool
		want   router.EndStatus
	}{
		"the end marker is lost":       {[]step{{end: endsUnmarked}}, wanted, false, router.Truncated},
		"the end marker after a stop":  {[]step{{end: endsUnmarked}}, 2 * wanted, true, router.Completed},
		"the stop token and no reason": {[]step{{tokens: wanted, end: endsBroken}}, 2 * wanted, false, router.Completed},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEngines(t, test.script...)
			if test.eos {
				e.lastToken = promptTokens + wanted - 1
			}
			spec := single(test.limit)
			if name == "the stop token and no reason" {
				spec.Sampling.StopTokens = []int32{stop}
			}
			a := f.worker(e, &placements{}, testCheckpointTokens)
			id := f.session(spec)
			reply, err := a.turn(t.Context(), id, 0, &pulse{})
			if status := parsed(t, reply, err); status != test.want || len(e.requests) != 1 {
				t.Errorf("%v after %d calls", status, len(e.requests))
			}
			sample := f.end(a, id, reply)
			checkSample(t, e, &sample, wanted)
		})
	}
}

// TestContradictingStreamIsNotTrusted: an engine that counts other tokens than it
// sent has lost some, so all of that call is generated again.
func TestContradictingStreamIsNotTrusted(t *testing.T) {
	f := newFixture(t)
	e := newEngines(t, step{tokens: 2 * testCheckpointTokens, end: endsBroken}, step{end: endsContradicting})
	const wanted = 5 * testCheckpointTokens
	a := f.worker(e, &placements{}, testCheckpointTokens)
	registry := prometheus.NewRegistry()
	var err error
	a.cfg.Counters, err = NewCounters(registry, "main")
	must(t, err)
	id := f.session(single(wanted))
	reply, err := a.turn(t.Context(), id, 0, &pulse{})
	parsed(t, reply, err)
	sample := f.end(a, id, reply)
	checkSample(t, e, &sample, wanted)
	want := store.TurnEffort{Attempts: 3, Resumes: 2, TokensRegenerated: 3 * testCheckpointTokens}
	if turn := f.onlyTurn(id); turn.TurnEffort != want || e.sampledAgain() != want.TokensRegenerated {
		t.Errorf("turn %+v, want %+v", turn.TurnEffort, want)
	}
	families, err := registry.Gather()
	must(t, err)
	for _, family := range families {
		counted := family.GetMetric()[0].GetCounter().GetValue()
		if expected := map[string]float64{
			"holdfast_tokens_generated_total":   wanted + 3*testCheckpointTokens,
			"holdfast_tokens_regenerated_total": 3 * testCheckpointTokens,
			"holdfast_turns_resumed_total":      2,
		}[family.GetName()]; counted != expected {
			t.Errorf("%s is %v, want %v", family.GetName(), counted, expected)
		}
	}
}

// TestEndedSessionLeavesNoCheckpoints: a cancelled turn's output is saved at once, in
// case another worker is to go on, and goes with the session.
func TestEndedSessionLeavesNoCheckpoints(t *testing.T) {
	f := newFixture(t)
	e := newEngines(t, step{tokens: testCheckpointTokens + 5, end: endsLost}, step{tokens: 5, end: endsBroken}, step{end: endsUnfit})
	a := f.worker(e, &placements{}, testCheckpointTokens)
	id := f.session(single(100))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := a.turn(ctx, id, 0, &pulse{})
		ended <- err
	}()
	storetest.Came(t, "the call that hangs", e.hung)
	// Nothing is being written any more, which the database could take in behind the rest.
	f.eventually(func() bool { return f.durable(id) >= testCheckpointTokens })
	cancel()
	if err := storetest.Came(t, "the cancelled turn", ended); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled turn: %v", err)
	}
	if saved := f.durable(id); saved != testCheckpointTokens+5 {
		t.Errorf("%d tokens were saved", saved)
	}
	f.end(a, id, over(router.Cancelled, ""))

	// The same for a turn that its engine refuses half-way.
	id = f.session(single(100))
	reply, err := a.turn(t.Context(), id, 0, &pulse{})
	if status := parsed(t, reply, err); status != router.Failed || f.durable(id) != 5 {
		t.Errorf("%v with %d tokens saved", status, f.durable(id))
	}
	f.end(a, id, reply)
	if rows := f.checkpointRows(); rows != 0 {
		t.Errorf("%d checkpoints outlived their sessions", rows)
	}
}
