package store

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// SegmentKind is the closed set of what a stretch of tokens is.
type SegmentKind string

// Segment kinds.
const (
	SegmentPrompt    SegmentKind = "prompt"
	SegmentAppended  SegmentKind = "appended"
	SegmentGenerated SegmentKind = "generated"
	// SegmentKept is what a sequence has in common with the one before it; the tokens
	// that the policy sampled in it count there.
	SegmentKept SegmentKind = "kept"
)

// Segment is a stretch of a sample's tokens.
type Segment struct {
	Kind  SegmentKind
	Turn  int
	Start int
	Count int
	// PolicyVersion generated the tokens; for the other kinds it is the one of the
	// turn that read them, and for the task's prompt the one of the release.
	PolicyVersion int64
}

// SampleTokens are a sample's tokens: one sequence, or several where a harness
// rewrote its history. TokenIDs and LossMask are of equal length; Logprobs is as long,
// 0 where LossMask is 0, or nil if none were asked for.
type SampleTokens struct {
	TokenIDs []int32
	// LossMask is 1 where the policy generated the token in this very sequence.
	LossMask []uint8
	Logprobs []float32
	Segments []Segment
	// Kept is how many tokens a sequence after the first shares with the one before it.
	Kept int
	// Earlier are the sequences that rewrites left, oldest first: TokenIDs and the
	// others are the last one, which the session ended with.
	Earlier []SampleTokens
}

const (
	selectPromptsSQL = `
select s.session_id,` + promptColumns + `from sessions s join tasks t using (task_id) where s.session_id = any($1)`

	selectSegmentsSQL = `
select session_id, turn, kind, policy_version, start_tokens, tokens, ids, logprobs
from segments where session_id = any($1) order by session_id, turn, part`
)

// loadTokens fills the samples' tokens and checks them: a sample whose arrays do
// not agree is not delivered.
func loadTokens(ctx context.Context, tx pgx.Tx, samples []Sample) error {
	ids := make([]uuid.UUID, len(samples))
	bySession := make(map[uuid.UUID]*Sample, len(samples))
	for i := range samples {
		ids[i] = samples[i].SessionID
		bySession[ids[i]] = &samples[i]
		samples[i].Tokens = newSampleTokens(int(samples[i].Usage.ContextTokens))
	}
	batch := &pgx.Batch{}
	batch.Queue(selectPromptsSQL, ids).Query(func(rows pgx.Rows) error { return addPrompts(rows, bySession) })
	batch.Queue(selectSegmentsSQL, ids).Query(func(rows pgx.Rows) error { return addSegments(rows, bySession) })
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return fmt.Errorf("reading tokens: %w", err)
	}
	for i := range samples {
		if err := samples[i].checkTokens(); err != nil {
			return fmt.Errorf("sample of session %s: %w", samples[i].SessionID, err)
		}
	}
	return nil
}

func newSampleTokens(count int) *SampleTokens {
	return &SampleTokens{TokenIDs: make([]int32, 0, count), LossMask: make([]uint8, 0, count)}
}

func addPrompts(rows pgx.Rows, bySession map[uuid.UUID]*Sample) error {
	for rows.Next() {
		var id uuid.UUID
		var p storedPrompt
		if err := rows.Scan(&id, &p.synthetic, &p.count, &p.packed); err != nil {
			return err
		}
		sample := bySession[id]
		if sample.Usage.ContextTokens == 0 {
			// It ended before an engine had tokenised the prompt.
			continue
		}
		t := sample.Tokens
		var err error
		if t.TokenIDs, err = p.appendTo(t.TokenIDs); err != nil {
			return err
		}
		if count := len(t.TokenIDs); count > 0 {
			t.LossMask = append(t.LossMask, make([]uint8, count)...)
			t.Segments = append(t.Segments, Segment{Kind: SegmentPrompt, Count: count, PolicyVersion: sample.PolicyVersion})
		}
	}
	return rows.Err()
}

func addSegments(rows pgx.Rows, bySession map[uuid.UUID]*Sample) error {
	for rows.Next() {
		var id uuid.UUID
		var segment Segment
		var packedIDs, packedLogprobs []byte
		err := rows.Scan(&id, &segment.Turn, &segment.Kind, &segment.PolicyVersion, &segment.Start, &segment.Count, &packedIDs, &packedLogprobs)
		if err != nil {
			return err
		}
		if err := bySession[id].Tokens.add(segment, packedIDs, packedLogprobs); err != nil {
			return fmt.Errorf("session %s, turn %d: %w", id, segment.Turn, err)
		}
	}
	return rows.Err()
}

// add appends a segment, which begins where the tokens end or, after a rewrite, before that.
func (t *SampleTokens) add(segment Segment, packedIDs, packedLogprobs []byte) (err error) {
	switch {
	case segment.Start > len(t.TokenIDs):
		return fmt.Errorf("a segment begins at token %d, the one before ends at %d", segment.Start, len(t.TokenIDs))
	case segment.Start < len(t.TokenIDs) && segment.Turn == 0:
		t.cut(segment.Start)
	case segment.Start < len(t.TokenIDs):
		t.rewrite(&segment)
	}
	if segment.Count == 0 {
		return nil
	}
	if t.TokenIDs, err = unpackTokens(t.TokenIDs, packedIDs, segment.Count); err != nil {
		return err
	}
	generated := uint8(0)
	if segment.Kind == SegmentGenerated {
		generated = 1
	}
	for range segment.Count {
		t.LossMask = append(t.LossMask, generated)
	}
	if packedLogprobs != nil {
		// Zeros stand where nothing was generated, or nothing was asked for.
		t.Logprobs = append(t.Logprobs, make([]float32, segment.Start-len(t.Logprobs))...)
		if t.Logprobs, err = unpackLogprobs(t.Logprobs, packedLogprobs, segment.Count); err != nil {
			return err
		}
	}
	t.Segments = append(t.Segments, segment)
	return nil
}

// cut drops what follows the first tokens of a prompt, which was never sent.
func (t *SampleTokens) cut(tokens int) {
	t.TokenIDs, t.LossMask, t.Segments = t.TokenIDs[:tokens], t.LossMask[:tokens], t.Segments[:0]
	if tokens > 0 {
		// The prompt was the only segment.
		t.Segments = t.Segments[:1]
		t.Segments[0].Count = tokens
	}
}

// rewrite begins a new sequence, which has its first tokens in common with the one
// that it leaves.
func (t *SampleTokens) rewrite(first *Segment) {
	left := *t
	left.Earlier = nil
	kept := first.Start
	*t = SampleTokens{
		TokenIDs: slices.Clone(left.TokenIDs[:kept]), LossMask: make([]uint8, kept), Kept: kept, Earlier: append(t.Earlier, left),
	}
	if kept > 0 {
		t.Segments = []Segment{{Kind: SegmentKept, Turn: first.Turn, Count: kept, PolicyVersion: first.PolicyVersion}}
	}
}

// checkTokens pads the log-probabilities to full length and refuses arrays that
// do not agree with each other or with what was counted.
func (s *Sample) checkTokens() error {
	t := s.Tokens
	earlier := int64(0)
	for i := range t.Earlier {
		if err := t.Earlier[i].check(); err != nil {
			return fmt.Errorf("sequence %d: %w", i, err)
		}
		earlier += int64(len(t.Earlier[i].TokenIDs))
	}
	if err := t.check(); err != nil {
		return err
	}
	if int64(len(t.TokenIDs)) != s.Usage.ContextTokens || earlier != s.Usage.EarlierTokens {
		return fmt.Errorf("%d token ids after %d of earlier sequences, counted were %d after %d", len(t.TokenIDs), earlier, s.Usage.ContextTokens, s.Usage.EarlierTokens)
	}
	if s.Reward != nil && (math.IsNaN(*s.Reward) || math.IsInf(*s.Reward, 0)) {
		return fmt.Errorf("the reward is %v", *s.Reward)
	}
	return nil
}

func (t *SampleTokens) check() error {
	if t.Logprobs != nil {
		t.Logprobs = append(t.Logprobs, make([]float32, len(t.TokenIDs)-len(t.Logprobs))...)
	}
	if len(t.LossMask) != len(t.TokenIDs) {
		return fmt.Errorf("%d token ids and %d mask entries", len(t.TokenIDs), len(t.LossMask))
	}
	for i, logprob := range t.Logprobs {
		if math.IsNaN(float64(logprob)) || math.IsInf(float64(logprob), 0) {
			return fmt.Errorf("log-probability %d is %v", i, logprob)
		}
	}
	return nil
}
