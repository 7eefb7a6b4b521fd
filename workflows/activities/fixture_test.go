package activities

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
	"holdfast/workflows"
	"holdfast/workflows/task"
)

const (
	promptTokens = 3
	// testCheckpointTokens stands for 2,048 where the number does not matter.
	testCheckpointTokens = 16
)

// fixture is a store with one run.
type fixture struct {
	*store.Store
	t       testing.TB
	url     string
	conn    *pgx.Conn
	run     uuid.UUID
	batches int
}

func must(t storetest.Failer, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	url := storetest.URL(t)
	f := &fixture{Store: storetest.Open(t, url), t: t, url: url}
	run, err := f.CreateRun(t.Context(), store.NewRun{Name: "test", Pool: "main", Contract: store.Contract{
		Classes: []store.ClassShare{{Class: "agent", Share: 1}}, MaxConcurrency: 10_000,
	}})
	must(t, err)
	f.run = run.ID
	f.conn, err = pgx.Connect(t.Context(), url)
	must(t, err)
	t.Cleanup(func() { _ = f.conn.Close(context.Background()) })
	return f
}

// single is a task of one turn.
func single(maxTokens int) *task.Spec {
	return &task.Spec{Class: "agent", Prompt: task.Prompt{TokenIDs: make([]int32, promptTokens)}, Sampling: task.Sampling{MaxTokens: maxTokens}}
}

// session releases and dispatches a session of the task.
func (f *fixture) session(spec *task.Spec) uuid.UUID {
	f.t.Helper()
	ctx := context.Background()
	f.batches++
	next := func() func() (*task.Spec, error) {
		given := false
		return func() (*task.Spec, error) {
			if given {
				return nil, io.EOF
			}
			given = true
			return spec, nil
		}
	}
	body, err := json.Marshal(spec)
	must(f.t, err)
	batch, _, err := f.SubmitBatch(ctx, store.BatchSubmission{
		RunID: f.run, IdempotencyKey: fmt.Sprint(f.batches), Next: next(),
		BodyHash: func() []byte { sum := sha256.Sum256(body); return sum[:] },
	})
	must(f.t, err)
	_, err = f.DispatchQueued(ctx, f.run, 10)
	must(f.t, err)
	sessions, err := f.Sessions(ctx, store.SessionQuery{RunID: f.run, BatchID: &batch.ID})
	must(f.t, err)
	return sessions[0].ID
}

// worker is a process that runs activities.
func (f *fixture) worker(e Engines, r Router, checkpointTokens int) *Activities {
	f.t.Helper()
	return f.workerOn(f.Store, e, r, checkpointTokens)
}

// workerOn has connections of its own, with which it can be cut off.
func (f *fixture) workerOn(s *store.Store, e Engines, r Router, checkpointTokens int) *Activities {
	f.t.Helper()
	counters, err := NewCounters(prometheus.NewRegistry(), "main")
	must(f.t, err)
	a, err := New(Config{
		Store: s, Router: r, Engines: e, Epoch: 1, ContextCacheBytes: 1 << 20, EngineAttempts: 4,
		CheckpointTokens: checkpointTokens, Counters: counters, Logger: slog.New(slog.DiscardHandler),
	})
	must(f.t, err)
	a.retryBase, a.partingPatience = time.Microsecond, storetest.Patience
	return a
}

// end ends the session as its workflow would.
func (f *fixture) end(a *Activities, id uuid.UUID, reply workflows.TurnReply) store.Sample {
	f.t.Helper()
	must(f.t, a.Complete(context.Background(), workflows.Completion{Session: id.String(), Status: reply.Status, Problem: reply.Problem}))
	sample, err := storetest.SampleOf(context.Background(), f.Store, id)
	must(f.t, err)
	return sample
}

func (f *fixture) checkpointRows() (rows int) {
	f.t.Helper()
	must(f.t, f.conn.QueryRow(context.Background(), `select count(*) from turn_checkpoints`).Scan(&rows))
	return rows
}

func (f *fixture) onlyTurn(id uuid.UUID) store.Turn {
	f.t.Helper()
	turns, err := f.SessionTurns(context.Background(), id, -1, 10)
	must(f.t, err)
	if len(turns) != 1 {
		f.t.Fatalf("%d turns are committed", len(turns))
	}
	return turns[0]
}

// checkSample compares a sample of one turn with what the engine sampled last at
// every place.
func checkSample(t storetest.Failer, e *engines, sample *store.Sample, wantTokens int) {
	t.Helper()
	tokens := sample.Tokens
	if len(tokens.TokenIDs) != promptTokens+wantTokens || len(tokens.LossMask) != len(tokens.TokenIDs) || len(tokens.Logprobs) != len(tokens.TokenIDs) {
		t.Fatalf("%d ids, %d mask entries, %d log-probabilities, want %d", len(tokens.TokenIDs), len(tokens.LossMask), len(tokens.Logprobs), promptTokens+wantTokens)
	}
	for place := promptTokens; place < len(tokens.TokenIDs); place++ {
		version := e.versions[place]
		if tokens.TokenIDs[place] != tokenAt(place, version) || tokens.Logprobs[place] != logprobAt(place, version) || tokens.LossMask[place] != 1 {
			t.Fatalf("place %d holds token %d (%v, mask %d), sampled was %d (%v) under version %d", place, tokens.TokenIDs[place], tokens.Logprobs[place],
				tokens.LossMask[place], tokenAt(place, version), logprobAt(place, version), version)
		}
	}
	oldest, newest := int64(1<<62), int64(0)
	for i, segment := range tokens.Segments {
		if segment.Kind != store.SegmentGenerated {
			continue
		}
		if i > 1 && tokens.Segments[i-1].PolicyVersion == segment.PolicyVersion {
			t.Fatalf("two segments of one version follow each other: %+v", tokens.Segments)
		}
		for place := segment.Start; place < segment.Start+segment.Count; place++ {
			if e.versions[place] != segment.PolicyVersion {
				t.Fatalf("place %d is said to be of version %d, it is of %d: %+v", place, segment.PolicyVersion, e.versions[place], tokens.Segments)
			}
		}
		oldest, newest = min(oldest, segment.PolicyVersion), max(newest, segment.PolicyVersion)
	}
	if sample.MinPolicyVersion != oldest || sample.MaxPolicyVersion != newest {
		t.Fatalf("versions %d to %d, segments say %d to %d", sample.MinPolicyVersion, sample.MaxPolicyVersion, oldest, newest)
	}
}

func parsed(t storetest.Failer, reply workflows.TurnReply, err error) router.EndStatus {
	t.Helper()
	must(t, err)
	if reply.Outcome != workflows.OutcomeOver {
		t.Fatalf("the turn ended with %+v", reply)
	}
	status, err := router.ParseEndStatus(reply.Status)
	must(t, err)
	return status
}
