package store

import (
	"context"
	"encoding/json"
	"time"

	"github.com/google/uuid"

	"holdfast/router"
)

// SessionState is the closed set of a session's states.
type SessionState string

// Session states.
const (
	// SessionQueued: released, waiting for the contract's max concurrency.
	SessionQueued SessionState = "queued"
	// SessionDispatched: its workflow is started or about to be; "pending" on the backlog.
	SessionDispatched SessionState = "dispatched"
	// SessionHeld: a turn was asked for and waits.
	SessionHeld SessionState = "held"
	// SessionActive: admitted, in a model call, a tool gap or scoring.
	SessionActive SessionState = "active"
	// SessionEnded: see its status.
	SessionEnded SessionState = "ended"
)

// Usage counts what a session used of the engines, over all its turns.
type Usage struct {
	Turns int
	// PromptTokens were sent, CachedTokens of them found in prefix caches.
	PromptTokens int64
	CachedTokens int64
	OutputTokens int64
	// ContextTokens is the length of the context at the end.
	ContextTokens int64
	// TokenSeconds integrates the context's length over the residency: block-seconds
	// times the tokens per block.
	TokenSeconds float64
}

// Times says where a session's time went.
type Times struct {
	HeldSeconds      float64
	ResidencySeconds float64
	QueueSeconds     float64
	PrefillSeconds   float64
	DecodeSeconds    float64
	ToolSeconds      float64
	ScoreSeconds     float64
}

// Session is one rollout as the audit trail shows it.
type Session struct {
	ID              uuid.UUID
	RunID           uuid.UUID
	Pool            string
	BatchID         uuid.UUID
	TaskID          uuid.UUID
	ExternalTaskID  string
	Member          int
	GroupSize       int
	Class           string
	State           SessionState
	Status          router.EndStatus // 0 until it has ended
	PolicyVersion   int64
	Instance        string
	Instances       []string
	HoldReason      string
	Holds           int
	CancelRequested bool
	CancelReason    string
	Usage           Usage
	Times           Times
	ReleasedAt      time.Time
	DispatchedAt    *time.Time
	FirstAdmittedAt *time.Time
	HeldSince       *time.Time
	EndedAt         *time.Time
	// SampleSeq, Reward, ScoreDetail and Problem are those of the sample.
	SampleSeq   int64
	Reward      *float64
	ScoreDetail json.RawMessage
	Problem     string
}

// SessionQuery selects sessions of a run in release order.
type SessionQuery struct {
	RunID uuid.UUID
	// BatchID narrows to one batch, TaskID to one task, Class and State further.
	BatchID *uuid.UUID
	TaskID  *uuid.UUID
	Class   string
	State   SessionState
	// After continues a listing after that session.
	After *uuid.UUID
	// Limit is at most 1,000; 0 means 100.
	Limit int
}

// SessionID is the id of one member of a task.
func SessionID(taskID uuid.UUID, member int) uuid.UUID {
	return uuid.Nil
}

// Session returns one session, or ErrNotFound.
func (s *Store) Session(ctx context.Context, id uuid.UUID) (Session, error) {
	return Session{}, errUnfinished
}

// Sessions lists sessions of a run.
func (s *Store) Sessions(ctx context.Context, query SessionQuery) ([]Session, error) {
	return nil, errUnfinished
}

// CancelSession ends a queued session as cancelled at once; one under way is
// marked and its workflow asked to cancel. A session that has ended is returned
// as it is.
func (s *Store) CancelSession(ctx context.Context, id uuid.UUID, reason string) (Session, error) {
	return Session{}, errUnfinished
}
