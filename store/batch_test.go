package store_test

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"

	"holdfast/store"
	"holdfast/workflows/task"
)

func TestBatchIsReplayedByKey(t *testing.T) {
	f := newFixture(t, 1)
	ctx := t.Context()
	first := f.submit("key", prompted("agent", 2), prompted("rlvr", 1))
	again, replayed, err := f.SubmitBatch(ctx, submission(t, f.run.ID, "key", prompted("agent", 2), prompted("rlvr", 1)))
	must(t, err)
	if !replayed || again.ID != first.ID || again.Seq != 1 || again.Sessions != 3 || again.SessionsByClass["agent"] != 2 {
		t.Errorf("replayed %v: %+v", replayed, again)
	}
	_, _, err = f.SubmitBatch(ctx, submission(t, f.run.ID, "key", prompted("agent", 3)))
	if !errors.Is(err, store.ErrIdempotencyMismatch) {
		t.Errorf("another body with the same key: %v", err)
	}
	second := f.submit("other key", prompted("agent", 2), prompted("rlvr", 1))
	if second.ID == first.ID || second.Seq != 2 {
		t.Errorf("another key gives %+v", second)
	}
	f.verify()
}

// TestBatchIsAllOrNothing: whatever is wrong with the last task, nothing of the
// batch is stored, and the key stays free.
func TestBatchIsAllOrNothing(t *testing.T) {
	f := newFixture(t, 1)
	ctx := t.Context()
	broken := errors.New("the body broke off")
	tooMany := make([]*task.Spec, 0, 101)
	for range 101 {
		tooMany = append(tooMany, prompted("agent", 1_000))
	}
	named := func(id string) *task.Spec {
		spec := prompted("agent", 1)
		spec.ID = id
		return spec
	}
	metadata := func(text string) *task.Spec {
		spec := prompted("agent", 1)
		spec.Metadata = json.RawMessage(text)
		return spec
	}
	for _, test := range []struct {
		name  string
		tasks []*task.Spec
		after error
		path  string // of the *FieldError or *UnknownClassError
	}{
		{"no tasks", nil, nil, "tasks"},
		{"unknown class", []*task.Spec{prompted("agent", 1), prompted("agent", 1), prompted("poet", 1)}, nil, "tasks[2].class"},
		{"a repeated id", []*task.Spec{named("a"), named("b"), named("a")}, nil, "tasks[2].id"},
		{"an id with NUL", []*task.Spec{named("a\x00")}, nil, "tasks[0].id"},
		{"an id that is no text", []*task.Spec{named("\xff")}, nil, "tasks[0].id"},
		{"metadata that is no text", []*task.Spec{metadata("\"\xff\"")}, nil, "tasks[0]"},
		{"too many sessions", tooMany, nil, "tasks[100].group_size"},
		{"a body that breaks off", []*task.Spec{prompted("agent", 1)}, broken, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := submission(t, f.run.ID, "k", test.tasks...)
			next := s.Next
			s.Next = func() (*task.Spec, error) {
				spec, err := next()
				if err == io.EOF && test.after != nil {
					return nil, test.after
				}
				return spec, err
			}
			_, _, err := f.SubmitBatch(ctx, s)
			var field *store.FieldError
			var class *store.UnknownClassError
			switch {
			case test.after != nil:
				if !errors.Is(err, test.after) {
					t.Errorf("%v, want %v", err, test.after)
				}
			case errors.As(err, &field):
				if field.Path != test.path {
					t.Errorf("%v, want path %s", err, test.path)
				}
			case errors.As(err, &class):
				if class.Path != test.path || class.Class != "poet" {
					t.Errorf("%v, want path %s", err, test.path)
				}
			default:
				t.Errorf("%v, want a refusal of %s", err, test.path)
			}
			if _, err := f.Batch(ctx, store.BatchID(f.run.ID, "k")); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("the batch is there: %v", err)
			}
			sessions, err := f.Sessions(ctx, store.SessionQuery{RunID: f.run.ID})
			if err != nil || len(sessions) != 0 {
				t.Errorf("%d sessions are there, %v", len(sessions), err)
			}
			f.verify()
		})
	}
	f.submit("k", prompted("agent", 1))
}

func TestBatchRefusals(t *testing.T) {
	f := newFixture(t, 1)
	ctx := t.Context()
	must(t, f.AdvancePolicyVersion(ctx, pool, 5))
	six, minus := int64(6), int64(-1)
	for _, test := range []struct {
		name   string
		change func(*store.BatchSubmission)
		path   string
	}{
		{"no key", func(s *store.BatchSubmission) { s.IdempotencyKey = "" }, "idempotency_key"},
		{"a long key", func(s *store.BatchSubmission) { s.IdempotencyKey = strings.Repeat("k", 257) }, "idempotency_key"},
		{"a key with NUL", func(s *store.BatchSubmission) { s.IdempotencyKey = "a\x00b" }, "idempotency_key"},
		{"a policy version to come", func(s *store.BatchSubmission) { s.PolicyVersion = &six }, "policy_version"},
		{"a negative policy version", func(s *store.BatchSubmission) { s.PolicyVersion = &minus }, "policy_version"},
	} {
		s := submission(t, f.run.ID, "k", prompted("agent", 1))
		test.change(&s)
		_, _, err := f.SubmitBatch(ctx, s)
		var field *store.FieldError
		if !errors.As(err, &field) || field.Path != test.path {
			t.Errorf("%s: %v, want a refusal of %s", test.name, err, test.path)
		}
	}
	if _, _, err := f.SubmitBatch(ctx, submission(t, uuid.New(), "k", prompted("agent", 1))); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("an unknown run: %v", err)
	}
	four := int64(4)
	s := submission(t, f.run.ID, "older", prompted("agent", 1))
	s.PolicyVersion = &four
	older, _, err := f.SubmitBatch(ctx, s)
	must(t, err)
	if current := f.submit("current", prompted("agent", 1)); older.PolicyVersion != 4 || current.PolicyVersion != 5 {
		t.Errorf("policy versions %d and %d, want 4 and 5", older.PolicyVersion, current.PolicyVersion)
	}
}

// TestContractChangesWhileABodyArrives: what counts is the contract at the release.
func TestContractChangesWhileABodyArrives(t *testing.T) {
	f := newFixture(t, 1)
	ctx := t.Context()
	without := store.Contract{Classes: []store.ClassShare{{Class: "agent", Share: 1}}, MaxConcurrency: 1}
	for _, test := range []struct {
		class   string
		refused bool
	}{{"agent", false}, {"rlhf", true}} {
		_, err := f.PutContract(ctx, f.run.ID, contract(1))
		must(t, err)
		s := submission(t, f.run.ID, test.class, prompted("agent", 1), prompted(test.class, 1))
		next := s.Next
		s.Next = func() (*task.Spec, error) {
			spec, err := next()
			if err == io.EOF {
				_, putErr := f.PutContract(ctx, f.run.ID, without)
				must(t, putErr)
			}
			return spec, err
		}
		_, _, err = f.SubmitBatch(ctx, s)
		var unknown *store.UnknownClassError
		if errors.As(err, &unknown) != test.refused || (test.refused && unknown.Path != "tasks[1].class") || (!test.refused && err != nil) {
			t.Errorf("a batch with %s: %v", test.class, err)
		}
	}
	f.verify()
}

// TestBatchTakesStrangeJSON: what is valid JSON goes in and comes back as it was.
func TestBatchTakesStrangeJSON(t *testing.T) {
	f := newFixture(t, 1)
	deep := strings.Repeat("[", 2_000) + strings.Repeat("]", 2_000)
	for i, text := range []string{`"\u0000"`, `{"a":1,"a":2}`, `1e400`, `"\ud800"`, `{ "spaced" : "<&>" }`, deep} {
		spec := prompted("agent", 1)
		spec.Metadata = json.RawMessage(text)
		f.submit(fmt.Sprint(i), spec)
		sessions, err := f.Sessions(t.Context(), store.SessionQuery{RunID: f.run.ID, State: store.SessionQueued, Limit: 1_000})
		must(t, err)
		work, err := f.SessionForWork(t.Context(), sessions[len(sessions)-1].ID)
		must(t, err)
		if string(work.Spec.Metadata) != text {
			t.Errorf("metadata %.60s became %.60s", text, work.Spec.Metadata)
		}
	}
}

func TestPromptForms(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	synthetic := &task.Synthetic{Tokens: 40, Seed: 7, SharedTokens: 30, SharedSeed: 3}
	long := make([]int32, 100_000)
	for i := range long {
		long[i] = int32(i * 31 % 151_000)
	}
	forms := []*task.Spec{
		{Class: "agent", Prompt: task.Prompt{TokenIDs: long}},
		{Class: "agent", Prompt: task.Prompt{Synthetic: synthetic}},
		{Class: "agent", Prompt: task.Prompt{Text: "say <hello>"}},
		{Class: "agent", Prompt: task.Prompt{Messages: json.RawMessage(`[{"role":"user","content":"hi"}]`)}},
	}
	f.submit("forms", forms...)
	want := [][]int32{long, synthetic.AppendTokens(nil), nil, nil}
	for i, id := range f.dispatch() {
		work, err := f.SessionForWork(ctx, id)
		must(t, err)
		if work.PromptTokens != len(want[i]) || work.ContextTokens != int64(len(want[i])) {
			t.Errorf("form %d has %d prompt tokens, %d in context, want %d", i, work.PromptTokens, work.ContextTokens, len(want[i]))
		}
		if len(work.Spec.Prompt.TokenIDs) != 0 || work.Spec.Prompt.Text != forms[i].Prompt.Text || string(work.Spec.Prompt.Messages) != string(forms[i].Prompt.Messages) {
			t.Errorf("form %d came back as %+v", i, work.Spec.Prompt)
		}
		prompt, err := f.PromptTokens(ctx, work.TaskID)
		must(t, err)
		whole, err := f.Context(ctx, id)
		must(t, err)
		if !slices.Equal(prompt, want[i]) || !slices.Equal(whole, want[i]) {
			t.Errorf("form %d: the prompt's tokens changed", i)
		}
	}
	// The engine's own ids of a text prompt are kept with its task before the first turn.
	text := f.dispatchedByState(store.SessionDispatched)[2]
	work, err := f.SessionForWork(ctx, text)
	must(t, err)
	must(t, f.SetPromptTokens(ctx, work.TaskID, []int32{9, 8}))
	f.decide(f.admit(text, 0, "w1"))
	commit := turn(text, 0)
	commit.PromptTokens = 2
	_, err = f.CommitTurn(ctx, commit)
	must(t, err)
	whole, err := f.Context(ctx, text)
	must(t, err)
	if !slices.Equal(whole, []int32{9, 8, 100, 200}) {
		t.Errorf("context of the text prompt: %v", whole)
	}
}

func (f *fixture) dispatchedByState(state store.SessionState) []uuid.UUID {
	f.t.Helper()
	sessions, err := f.Sessions(f.t.Context(), store.SessionQuery{RunID: f.run.ID, State: state, Limit: 1_000})
	must(f.t, err)
	var ids []uuid.UUID
	for _, session := range sessions {
		ids = append(ids, session.ID)
	}
	return ids
}

// TestConcurrentSubmissions: one key from many clients at a time makes one batch,
// many keys make gapless batch numbers.
func TestConcurrentSubmissions(t *testing.T) {
	f := newFixture(t, 1)
	const clients, keys = 4, 5
	var wait sync.WaitGroup
	results := make(chan store.Batch, clients*keys)
	fresh := make(chan string, clients*keys)
	for client := range clients {
		for i := range keys {
			key := fmt.Sprint("key-", (i+client)%keys)
			s := submission(t, f.run.ID, key, prompted("agent", 2), prompted("rlhf", 1))
			wait.Go(func() {
				batch, replayed, err := f.SubmitBatch(t.Context(), s)
				if err != nil {
					t.Error(err)
					return
				}
				if !replayed {
					fresh <- key
				}
				results <- batch
			})
		}
	}
	wait.Wait()
	close(results)
	close(fresh)
	if len(fresh) != keys {
		t.Errorf("%d submissions were fresh, want %d", len(fresh), keys)
	}
	seqs := map[string]int64{}
	for batch := range results {
		if before, ok := seqs[batch.IdempotencyKey]; ok && before != batch.Seq {
			t.Errorf("%s is batch %d and %d", batch.IdempotencyKey, before, batch.Seq)
		}
		seqs[batch.IdempotencyKey] = batch.Seq
	}
	listed, err := f.Batches(t.Context(), f.run.ID, 0, 0)
	must(t, err)
	for i, batch := range listed {
		if batch.Seq != int64(i+1) {
			t.Errorf("batch %d has seq %d", i, batch.Seq)
		}
	}
	f.verify()
}

// TestSubmitAtTheLimit releases the largest batch there may be.
func TestSubmitAtTheLimit(t *testing.T) {
	f := newFixture(t, store.MaxConcurrency)
	n := 0
	s := store.BatchSubmission{RunID: f.run.ID, IdempotencyKey: "large", BodyHash: func() []byte { sum := sha256.Sum256(nil); return sum[:] },
		Next: func() (*task.Spec, error) {
			if n == store.MaxBatchTasks {
				return nil, io.EOF
			}
			n++
			spec := prompted([]string{"agent", "rlvr", "rlhf"}[n%3], 10)
			spec.ID = fmt.Sprint("task ", n)
			return spec, nil
		}}
	batch, _, err := f.SubmitBatch(t.Context(), s)
	must(t, err)
	if batch.Sessions != store.MaxBatchSessions {
		t.Errorf("%d sessions", batch.Sessions)
	}
	s.IdempotencyKey, n = "larger", -1
	var field *store.FieldError
	if _, _, err := f.SubmitBatch(t.Context(), s); !errors.As(err, &field) || field.Path != "tasks" {
		t.Errorf("one task more: %v", err)
	}
	dispatched, err := f.DispatchQueued(t.Context(), f.run.ID, 1_000)
	must(t, err)
	if dispatched != 1_000 {
		t.Errorf("dispatched %d", dispatched)
	}
}
