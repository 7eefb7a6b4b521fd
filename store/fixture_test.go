package store_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
	"holdfast/workflows/task"
)

const pool = "main"

// contract is the paper's mixture, as its trainer wrote it.
func contract(maxConcurrency int) store.Contract {
	return store.Contract{
		Classes:        []store.ClassShare{{Class: "agent", Share: 0.486}, {Class: "rlvr", Share: 0.331}, {Class: "rlhf", Share: 0.182}},
		MaxConcurrency: maxConcurrency,
	}
}

// fixture is a store with one run, one pool owner and two instances.
type fixture struct {
	*store.Store
	t     testing.TB
	url   string
	run   store.Run
	epoch int64
	// clock is the router's: every decision is a little later than the one before.
	clock time.Time
}

func newFixture(t testing.TB, maxConcurrency int) *fixture {
	t.Helper()
	url := storetest.URL(t)
	f := &fixture{Store: storetest.Open(t, url), t: t, url: url, clock: time.Now()}
	var err error
	f.run, err = f.CreateRun(t.Context(), store.NewRun{Name: "test", Pool: pool, Contract: contract(maxConcurrency)})
	must(t, err)
	for _, id := range []string{"w1", "w2"} {
		_, err = f.RegisterInstance(t.Context(), instance(id))
		must(t, err)
	}
	epoch, ok, err := f.AcquirePool(t.Context(), pool, "test", 60)
	must(t, err)
	if !ok {
		t.Fatal("a fresh pool has an owner")
	}
	f.epoch = epoch
	return f
}

func instance(id string) store.Instance {
	return store.Instance{Pool: pool, ID: id, URL: "http://127.0.0.1:1/" + id, Kind: "vllm", CapacityBlocks: 1_000, BlockTokens: 16, MaxContextTokens: 4_096}
}

func must(t storetest.Failer, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// prompted is a task with that many members and a prompt of three tokens.
func prompted(class string, members int) *task.Spec {
	return &task.Spec{Class: class, GroupSize: members, Prompt: task.Prompt{TokenIDs: []int32{1, 2, 3}}, Sampling: task.Sampling{MaxTokens: 8}}
}

// submission is a batch of those tasks, whose body is their JSON.
func submission(t storetest.Failer, runID uuid.UUID, key string, tasks ...*task.Spec) store.BatchSubmission {
	t.Helper()
	body, err := json.Marshal(tasks)
	must(t, err)
	next := 0
	return store.BatchSubmission{
		RunID: runID, IdempotencyKey: key,
		Next: func() (*task.Spec, error) {
			if next == len(tasks) {
				return nil, io.EOF
			}
			next++
			return tasks[next-1], nil
		},
		BodyHash: func() []byte { sum := sha256.Sum256(body); return sum[:] },
	}
}

func (f *fixture) submit(key string, tasks ...*task.Spec) store.Batch {
	f.t.Helper()
	batch, replayed, err := f.SubmitBatch(f.t.Context(), submission(f.t, f.run.ID, key, tasks...))
	must(f.t, err)
	if replayed {
		f.t.Fatalf("batch %s is a replay", key)
	}
	return batch
}

// dispatch dispatches all it can and returns the sessions that are dispatched.
func (f *fixture) dispatch() []uuid.UUID {
	f.t.Helper()
	_, err := f.DispatchQueued(f.t.Context(), f.run.ID, 1_000)
	must(f.t, err)
	sessions, err := f.Sessions(f.t.Context(), store.SessionQuery{RunID: f.run.ID, State: store.SessionDispatched, Limit: 1_000})
	must(f.t, err)
	ids := make([]uuid.UUID, len(sessions))
	for i, session := range sessions {
		ids[i] = session.ID
	}
	return ids
}

func (f *fixture) tick(seconds float64) int64 {
	f.clock = f.clock.Add(time.Duration(seconds * float64(time.Second)))
	return f.clock.UnixNano()
}

func (f *fixture) admit(id uuid.UUID, turn int, instance string) store.DecisionRecord {
	return store.DecisionRecord{Decision: router.Decision{Kind: router.Admit, Reason: router.NewSession, At: f.tick(0.001),
		Session: router.SessionID(id), Turn: turn, Instance: router.InstanceID(instance), Numbers: router.Numbers{Cap: 4, PredictedCachedTokens: 2}}}
}

func (f *fixture) hold(id uuid.UUID, turn int, reason router.Reason) store.DecisionRecord {
	return store.DecisionRecord{Decision: router.Decision{Kind: router.Hold, Reason: reason, At: f.tick(0.001),
		Session: router.SessionID(id), Turn: turn, Numbers: router.Numbers{Cap: 4, Protected: 4}}}
}

func (f *fixture) decide(records ...store.DecisionRecord) {
	f.t.Helper()
	must(f.t, f.RecordDecisions(f.t.Context(), pool, f.epoch, records))
}

// turn is a commit of the given turn that appends one token, except at turn 0,
// and generates two.
func turn(id uuid.UUID, number int) store.TurnCommit {
	commit := store.TurnCommit{
		SessionID: id, Turn: number, Instance: "w1", Epoch: 1, PolicyVersion: 0,
		Generated: []int32{int32(100 + number), int32(200 + number)}, Logprobs: []float32{-0.5, -float32(number)},
		PromptTokens: int64(3 + 3*number), CachedTokens: int64(2 * number), PredictedCachedTokens: 2,
		StartedAt: time.Now(), QueueSeconds: 0.25, PrefillSeconds: 0.5, DecodeSeconds: 1, TotalSeconds: 1.75, FinishReason: "length",
	}
	if number > 0 {
		commit.Appended = []int32{int32(50 + number)}
		commit.ToolSeconds = 2
	}
	return commit
}

func (f *fixture) commit(id uuid.UUID, number int) {
	f.t.Helper()
	already, err := f.CommitTurn(f.t.Context(), turn(id, number))
	must(f.t, err)
	if already {
		f.t.Fatalf("turn %d of session %s was committed before", number, id)
	}
}

func (f *fixture) end(id uuid.UUID, status router.EndStatus) store.Sample {
	f.t.Helper()
	already, sample, err := f.EndSession(f.t.Context(), store.Ending{SessionID: id, Status: status})
	must(f.t, err)
	if already {
		f.t.Fatalf("session %s had ended before", id)
	}
	return sample
}

func (f *fixture) verify() {
	f.t.Helper()
	must(f.t, f.VerifyCounters(f.t.Context(), f.run.ID))
}

// conn is a connection of its own to the test's database.
func (f *fixture) conn() *pgx.Conn {
	f.t.Helper()
	conn, err := pgx.Connect(context.Background(), f.url)
	must(f.t, err)
	f.t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// exec changes the database behind the store's back; $1 in the statement is the run.
func (f *fixture) exec(statement string) {
	f.t.Helper()
	var args []any
	if strings.Contains(statement, "$1") {
		args = append(args, f.run.ID)
	}
	_, err := f.conn().Exec(f.t.Context(), statement, args...)
	must(f.t, err)
}

// now is the database's clock.
func (f *fixture) now() (now time.Time) {
	f.t.Helper()
	must(f.t, f.conn().QueryRow(f.t.Context(), `select clock_timestamp()`).Scan(&now))
	return now
}
