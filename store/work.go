package store

import (
	"context"
	"time"

	"github.com/google/uuid"

	"holdfast/workflows/task"
)

// WorkSession is what a worker needs to run a session.
type WorkSession struct {
	ID      uuid.UUID
	RunID   uuid.UUID
	Pool    string
	BatchID uuid.UUID
	// TaskID is the group's id as well.
	TaskID    uuid.UUID
	Member    int
	GroupSize int
	Class     string
	// Spec lacks prompt token ids, which PromptTokens returns.
	Spec task.Spec
	// PromptTokens is the number of prompt tokens, 0 if only the engine can tell.
	PromptTokens int
	// PolicyVersion is the one the task was released at.
	PolicyVersion int64
	State         SessionState
	// Turns is the number of turns committed, ContextTokens the tokens of prompt
	// and committed segments.
	Turns           int
	ContextTokens   int64
	CancelRequested bool
	// FirstAdmittedAt is nil until a turn was admitted; HeldSeconds counts holds
	// that are over.
	FirstAdmittedAt *time.Time
	HeldSeconds     float64
}

// SessionForWork returns one session for a worker, or ErrNotFound.
func (s *Store) SessionForWork(ctx context.Context, id uuid.UUID) (WorkSession, error) {
	return WorkSession{}, errUnfinished
}

// PromptTokens returns the token ids of a task's prompt: as given, or made from
// the seeds of a synthetic one; none for a prompt of text or messages.
func (s *Store) PromptTokens(ctx context.Context, taskID uuid.UUID) ([]int32, error) {
	return nil, errUnfinished
}

// Context returns all token ids of the session so far, in order: the prompt, then
// everything appended and generated.
func (s *Store) Context(ctx context.Context, sessionID uuid.UUID) ([]int32, error) {
	return nil, errUnfinished
}

// LiveSession is a session that the router must know: held, or active somewhere.
type LiveSession struct {
	ID            uuid.UUID
	RunID         uuid.UUID
	GroupID       uuid.UUID
	GroupSize     int
	Class         string
	State         SessionState
	PolicyVersion int64
	// Turn is the one that is asked for, running or next.
	Turn          int
	ContextTokens int64
	// PromptTokens is the length of the prompt that group members share.
	PromptTokens int64
	// Instance protects the session; empty if none does.
	Instance string
	// AdmittedAt is the start of the present admission, HeldSince of the present hold.
	AdmittedAt *time.Time
	HeldSince  *time.Time
	// ResidencySeconds was gathered in earlier admissions.
	ResidencySeconds float64
	// Granted: Turn was admitted and is not committed, so it may be at the engine.
	Granted bool
}

// LiveSessions returns the pool's held and active sessions, longest admitted or
// held first.
func (s *Store) LiveSessions(ctx context.Context, pool string) ([]LiveSession, error) {
	return nil, errUnfinished
}
