package store

import (
	"context"
	"encoding/json"
	"time"

	"github.com/google/uuid"

	"holdfast/router"
)

// SegmentKind is the closed set of what a stretch of tokens is.
type SegmentKind string

// Segment kinds.
const (
	SegmentPrompt    SegmentKind = "prompt"
	SegmentAppended  SegmentKind = "appended"
	SegmentGenerated SegmentKind = "generated"
)

// Segment is a stretch of a sample's tokens.
type Segment struct {
	Kind  SegmentKind
	Turn  int
	Start int
	Count int
	// PolicyVersion generated the tokens; for the other kinds it is the one of the
	// turn that read them.
	PolicyVersion int64
}

// SampleTokens are a sample's tokens. TokenIDs and LossMask are of equal length;
// Logprobs is as long, 0 where LossMask is 0, or nil if none were asked for.
type SampleTokens struct {
	TokenIDs []int32
	// LossMask is 1 where the policy generated the token.
	LossMask []uint8
	Logprobs []float32
	Segments []Segment
}

// Sample is the finished product of one session. Sessions of every status have
// one, so that a trainer which counts samples never waits for ever.
type Sample struct {
	// Seq is the place in the run's completion order, from 1 without gaps; Cursor
	// is its opaque form.
	Seq            int64
	Cursor         Cursor
	SessionID      uuid.UUID
	RunID          uuid.UUID
	BatchID        uuid.UUID
	TaskID         uuid.UUID // the group's id as well
	ExternalTaskID string
	Member         int
	GroupSize      int
	Class          string
	Status         router.EndStatus
	Reward         *float64
	ScoreDetail    json.RawMessage
	FinishReason   string
	Problem        string
	// PolicyVersion is the one of the release; the other two span the turns and
	// equal it in a session without turns.
	PolicyVersion    int64
	MinPolicyVersion int64
	MaxPolicyVersion int64
	Usage            Usage
	Times            Times
	Instances        []string
	Metadata         json.RawMessage
	ReleasedAt       time.Time
	FirstAdmittedAt  *time.Time
	EndedAt          time.Time
	// Tokens is nil unless asked for.
	Tokens *SampleTokens
}

// SampleQuery asks for samples in completion order.
type SampleQuery struct {
	RunID uuid.UUID
	// Consumer names who reads, such as "trainer"; empty reads without a trace.
	Consumer string
	// After is where the last page ended; empty means the consumer's
	// acknowledged place, or the beginning. What the consumer has acknowledged is
	// skipped in any case.
	After Cursor
	// Limit is at most 1,000; 0 means 100.
	Limit int
	// MaxBytes bounds the packed size of the page's tokens (9 bytes a token); a
	// page holds at least one sample. 0 means 64 MiB.
	MaxBytes int64
	// Statuses to return; empty means all.
	Statuses   []router.EndStatus
	WithTokens bool
}

// SamplePage is a piece of a run's samples.
type SamplePage struct {
	Samples []Sample
	// Next continues after this page, also when it is empty.
	Next Cursor
	// More: a further page is ready now.
	More bool
}

// Samples returns the next page and notes the delivery. Errors: ErrUnknownCursor,
// ErrNotFound.
func (s *Store) Samples(ctx context.Context, query SampleQuery) (SamplePage, error) {
	return SamplePage{}, errUnfinished
}

// Ack records that the consumer has everything up to the cursor. An older cursor
// than the last acknowledged changes nothing. Errors: ErrUnknownCursor (also for
// one beyond what was delivered to that consumer), ErrNotFound.
func (s *Store) Ack(ctx context.Context, runID uuid.UUID, consumer string, cursor Cursor) (Consumer, error) {
	return Consumer{}, errUnfinished
}

// Consumer is a reader's place in a run's samples.
type Consumer struct {
	RunID        uuid.UUID
	Name         string
	Delivered    Cursor
	Acknowledged Cursor
	// DeliveredSeq and AcknowledgedSeq are the same places as numbers.
	DeliveredSeq    int64
	AcknowledgedSeq int64
	UpdatedAt       time.Time
}

// Consumers lists the readers of a run.
func (s *Store) Consumers(ctx context.Context, runID uuid.UUID) ([]Consumer, error) {
	return nil, errUnfinished
}

// Cursor is an opaque place in the samples of one run.
type Cursor string
