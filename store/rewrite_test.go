package store_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
)

// sequenceOracle is what a session's sequences must become, kept the simple way.
type sequenceOracle struct {
	ids, mask [][]int32
	turns     int
}

// take adds a turn that keeps so much of the context, all of it if negative.
func (o *sequenceOracle) take(kept int, appended, generated []int32) {
	last := len(o.ids) - 1
	switch {
	case kept >= 0 && o.turns == 0:
		o.ids[last], o.mask[last] = o.ids[last][:kept], o.mask[last][:kept]
	case kept >= 0:
		o.ids = append(o.ids, slices.Clone(o.ids[last][:kept]))
		o.mask = append(o.mask, make([]int32, kept))
		last++
	}
	o.turns++
	o.ids[last] = append(slices.Concat(o.ids[last], appended), generated...)
	o.mask[last] = append(o.mask[last], make([]int32, len(appended))...)
	for range generated {
		o.mask[last] = append(o.mask[last], 1)
	}
}

// TestRewrittenContextsBecomeSequencesInWhichEachSampledTokenCountsOnce: turns that go
// on, drop tokens, replace them or begin anew, in random order.
func TestRewrittenContextsBecomeSequencesInWhichEachSampledTokenCountsOnce(t *testing.T) {
	f := newFixture(t, 100)
	random := rand.New(rand.NewPCG(1, 2))
	f.submit("one", repeat("agent", 12)...)
	for _, id := range f.dispatch() {
		f.decide(f.admit(id, 0, "w1"))
		o := &sequenceOracle{ids: [][]int32{{1, 2, 3}}, mask: [][]int32{{0, 0, 0}}}
		rewrites, sampled := 0, 0
		for number := range 1 + random.IntN(6) {
			commit := turn(id, number)
			commit.Appended, commit.CachedTokens = nil, 0
			for range random.IntN(4) {
				commit.Appended = append(commit.Appended, random.Int32N(1_000))
			}
			context := o.ids[len(o.ids)-1]
			kept, before := -1, len(context)
			if random.IntN(2) == 0 {
				kept = random.IntN(len(context) + 1)
				// What is kept to its end is no rewrite.
				if kept == len(context) || kept+len(commit.Appended) == 0 {
					kept = -1
				}
			}
			if kept >= 0 {
				tokens := int64(kept)
				commit.Kept, before = &tokens, kept
				if number > 0 {
					rewrites++
				}
			}
			commit.PromptTokens = int64(before + len(commit.Appended))
			if random.IntN(5) == 0 {
				commit.Generated, commit.Logprobs = nil, nil
			}
			sampled += len(commit.Generated)
			_, err := f.CommitTurn(t.Context(), commit)
			must(t, err)
			o.take(kept, commit.Appended, commit.Generated)
			got, err := f.Context(t.Context(), id)
			must(t, err)
			if want := o.ids[len(o.ids)-1]; !slices.Equal(got, want) {
				t.Fatalf("turn %d: the context is %v, want %v", number, got, want)
			}
		}
		f.end(id, router.Completed)
		sample, err := storetest.SampleOf(t.Context(), f.Store, id)
		must(t, err)
		sequences := append(slices.Clone(sample.Tokens.Earlier), *sample.Tokens)
		if len(sequences) != len(o.ids) || sample.Usage.Rewrites != rewrites || rewrites != len(o.ids)-1 {
			t.Fatalf("%d sequences and %d rewrites, want %d", len(sequences), sample.Usage.Rewrites, len(o.ids))
		}
		counted := 0
		for i, s := range sequences {
			mask := make([]int32, len(s.LossMask))
			for j, bit := range s.LossMask {
				mask[j] = int32(bit)
				counted += int(bit)
				if bit == 0 && s.Logprobs != nil && s.Logprobs[j] != 0 {
					t.Errorf("sequence %d: token %d has a log-probability and was not sampled in it", i, j)
				}
			}
			if !slices.Equal(s.TokenIDs, o.ids[i]) || !slices.Equal(mask, o.mask[i]) {
				t.Errorf("sequence %d: %v with mask %v, want %v with %v", i, s.TokenIDs, mask, o.ids[i], o.mask[i])
			}
			place := 0
			for _, segment := range s.Segments {
				if segment.Start != place {
					t.Errorf("sequence %d: a segment begins at %d, the one before ends at %d", i, segment.Start, place)
				}
				place += segment.Count
			}
			if place != len(s.TokenIDs) {
				t.Errorf("sequence %d: segments cover %d of %d tokens", i, place, len(s.TokenIDs))
			}
		}
		if counted != sampled {
			t.Errorf("%d tokens count, %d were sampled", counted, sampled)
		}
	}
}

func TestCommitRefusesARewriteThatKeepsMoreThanThereIs(t *testing.T) {
	f := newFixture(t, 10)
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	f.decide(f.admit(id, 0, "w1"))
	f.commit(id, 0)
	kept := int64(6)
	commit := turn(id, 1)
	commit.Kept, commit.PromptTokens = &kept, 7
	if _, err := f.CommitTurn(t.Context(), commit); !errors.Is(err, store.ErrTurnOutOfOrder) {
		t.Errorf("keeping 6 of 5 tokens: %v", err)
	}
	var field *store.FieldError
	commit.PromptTokens = 9
	if _, err := f.CommitTurn(t.Context(), commit); !errors.As(err, &field) || field.Path != "kept" {
		t.Errorf("a prompt of 9 tokens from 6 kept and 1 appended: %v", err)
	}
}
