package store_test

import (
	"errors"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
)

func TestCommitTurnIsIdempotentAndInOrder(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	f.decide(f.admit(id, 0, "w1"))
	if _, err := f.CommitTurn(ctx, turn(id, 1)); !errors.Is(err, store.ErrTurnOutOfOrder) {
		t.Errorf("turn 1 before turn 0: %v", err)
	}
	f.commit(id, 0)
	repeated := turn(id, 0)
	repeated.Generated, repeated.Logprobs = []int32{7}, nil
	already, err := f.CommitTurn(ctx, repeated)
	if err != nil || !already {
		t.Errorf("repeated: %v, %v", already, err)
	}
	f.commit(id, 1)
	f.end(id, router.Truncated)
	if already, err := f.CommitTurn(ctx, turn(id, 1)); err != nil || !already {
		t.Errorf("repeated after the end: %v, %v", already, err)
	}
	if _, err := f.CommitTurn(ctx, turn(id, 2)); !errors.Is(err, store.ErrSessionEnded) {
		t.Errorf("a turn after the end: %v", err)
	}
	if _, err := f.CommitTurn(ctx, turn(uuid.New(), 0)); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("a turn of an unknown session: %v", err)
	}
	whole, err := f.Context(ctx, id)
	must(t, err)
	if !slices.Equal(whole, []int32{1, 2, 3, 100, 200, 51, 101, 201}) {
		t.Errorf("context %v", whole)
	}
	turns, err := f.SessionTurns(ctx, id, 0, 10)
	must(t, err)
	if len(turns) != 1 || turns[0].Turn != 1 || turns[0].CachedTokens != 2 || turns[0].AppendedTokens != 1 || turns[0].OutputTokens != 2 || turns[0].Attempts != 1 {
		t.Errorf("turns after the first: %+v", turns)
	}
	if _, err := f.SessionTurns(ctx, uuid.New(), -1, 10); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("turns of an unknown session: %v", err)
	}
	f.verify()
}

// TestConcurrentCommitsOfOneTurn: two workers that both think they run the turn
// leave one turn.
func TestConcurrentCommitsOfOneTurn(t *testing.T) {
	f := newFixture(t, 10)
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	f.decide(f.admit(id, 0, "w1"))
	for number := range 10 {
		var fresh atomic.Int64
		var wait sync.WaitGroup
		for range 4 {
			wait.Go(func() {
				already, err := f.CommitTurn(t.Context(), turn(id, number))
				if err != nil {
					t.Error(err)
				}
				if !already {
					fresh.Add(1)
				}
			})
		}
		wait.Wait()
		if fresh.Load() != 1 {
			t.Errorf("turn %d was fresh %d times", number, fresh.Load())
		}
	}
	if session := f.session(id); session.Usage.Turns != 10 || session.Usage.ContextTokens != 3+10*2+9 {
		t.Errorf("usage %+v", session.Usage)
	}
	f.verify()
}

func TestCommitTurnRefusesWhatTrainingCannotUse(t *testing.T) {
	f := newFixture(t, 10)
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	f.decide(f.admit(id, 0, "w1"))
	for _, test := range []struct {
		path   string
		change func(*store.TurnCommit)
	}{
		{"logprobs", func(c *store.TurnCommit) { c.Logprobs = c.Logprobs[:1] }},
		{"logprobs[1]", func(c *store.TurnCommit) { c.Logprobs[1] = float32(math.Inf(-1)) }},
		{"logprobs[0]", func(c *store.TurnCommit) { c.Logprobs[0] = float32(math.NaN()) }},
		{"cached_tokens", func(c *store.TurnCommit) { c.CachedTokens = c.PromptTokens + 1 }},
		{"decode_seconds", func(c *store.TurnCommit) { c.DecodeSeconds = -1 }},
		{"total_seconds", func(c *store.TurnCommit) { c.TotalSeconds = math.NaN() }},
	} {
		commit := turn(id, 0)
		test.change(&commit)
		_, err := f.CommitTurn(t.Context(), commit)
		var field *store.FieldError
		if !errors.As(err, &field) || field.Path != test.path {
			t.Errorf("%v, want a refusal of %s", err, test.path)
		}
	}
	odd := turn(id, 0)
	odd.Generated, odd.Logprobs, odd.CachedTokens, odd.FinishReason, odd.Attempts = nil, nil, -1, "stop\x00\xff", 3
	_, err := f.CommitTurn(t.Context(), odd)
	must(t, err)
	turns, err := f.SessionTurns(t.Context(), id, -1, 10)
	must(t, err)
	if turns[0].CachedTokens != -1 || turns[0].OutputTokens != 0 || turns[0].Attempts != 3 {
		t.Errorf("turn %+v", turns[0])
	}
	f.verify()
}
