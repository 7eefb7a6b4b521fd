package store

import (
	"context"
	"time"

	"github.com/google/uuid"
)

// TurnCommit is one finished model call with the tokens it added.
type TurnCommit struct {
	SessionID uuid.UUID
	// Turn counts from 0; it must be the number of turns committed before.
	Turn     int
	Instance string
	Epoch    int64
	// PolicyVersion is the one the tokens were generated under.
	PolicyVersion int64
	// Prompt belongs to turn 0 of a task whose prompt the engine tokenised: the
	// ids it used. Appended are the ids that the environment added before this
	// call, Generated those that the call produced.
	Prompt    []int32
	Appended  []int32
	Generated []int32
	// Logprobs of Generated: as many, all finite; or none.
	Logprobs []float32
	// PromptTokens were sent with the call. CachedTokens of them came from the
	// prefix cache, -1 if the engine did not tell; PredictedCachedTokens is what
	// the router expected.
	PromptTokens          int64
	PredictedCachedTokens int64
	CachedTokens          int64
	// StartedAt is when the call was sent.
	StartedAt      time.Time
	QueueSeconds   float64
	PrefillSeconds float64
	DecodeSeconds  float64
	TotalSeconds   float64
	// ToolSeconds passed in the environment between the turn before and this call.
	ToolSeconds  float64
	FinishReason string
	// Attempts counts the calls made for this turn, failed ones included; 0 means 1.
	Attempts int
}

// CommitTurn makes a turn durable: the turn, its token segments and the session's
// totals, in one round trip. Repeating it changes nothing and reports
// alreadyCommitted. Refusals: ErrSessionEnded, ErrTurnOutOfOrder, ErrNotFound,
// *FieldError for log-probabilities that are not finite or not as many as tokens.
func (s *Store) CommitTurn(ctx context.Context, commit TurnCommit) (alreadyCommitted bool, err error) {
	return false, errUnfinished
}

// Turn is one committed model call.
type Turn struct {
	Turn                  int
	Instance              string
	Epoch                 int64
	PolicyVersion         int64
	PromptTokens          int64
	PredictedCachedTokens int64
	// CachedTokens is -1 if the engine did not tell.
	CachedTokens   int64
	OutputTokens   int64
	AppendedTokens int64
	StartedAt      time.Time
	CommittedAt    time.Time
	QueueSeconds   float64
	PrefillSeconds float64
	DecodeSeconds  float64
	TotalSeconds   float64
	ToolSeconds    float64
	FinishReason   string
	Attempts       int
}

// SessionTurns returns turns after the given one (-1 for the first page), in
// order; limit is at most 1,000. An unknown session is ErrNotFound.
func (s *Store) SessionTurns(ctx context.Context, sessionID uuid.UUID, after, limit int) ([]Turn, error) {
	return nil, errUnfinished
}
