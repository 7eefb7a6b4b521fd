package store

import (
	"context"
	"time"

	"github.com/google/uuid"
)

// RunState is the closed set of a run's states.
type RunState string

// Run states.
const (
	RunActive RunState = "active"
	RunEnded  RunState = "ended"
)

// NewRun is what a trainer gives to open a run.
type NewRun struct {
	Name     string
	Pool     string
	Contract Contract
}

// Run is one training run with its current contract.
type Run struct {
	ID        uuid.UUID
	Name      string
	Pool      string
	State     RunState
	Contract  ContractVersion
	CreatedAt time.Time
	EndedAt   *time.Time
}

// RunQuery selects runs, newest first.
type RunQuery struct {
	// Pool and State select; empty means any.
	Pool  string
	State RunState
	// Before continues a listing: runs created before that run.
	Before *uuid.UUID
	// Limit is at most 1,000; 0 means 100.
	Limit int
}

// CreateRun opens a run and creates its pool if it is new. A pool has one active
// run at a time: a second one is refused with *ConflictError. A contract that
// does not hold is refused with *FieldError, its path below "contract.".
func (s *Store) CreateRun(ctx context.Context, run NewRun) (Run, error) {
	return Run{}, errUnfinished
}

// Run returns one run, or ErrNotFound.
func (s *Store) Run(ctx context.Context, id uuid.UUID) (Run, error) {
	return Run{}, errUnfinished
}

// Runs lists runs, newest first.
func (s *Store) Runs(ctx context.Context, query RunQuery) ([]Run, error) {
	return nil, errUnfinished
}

// EndRun closes a run for good: it accepts no more batches, its queued sessions
// end as cancelled at once, and those under way are asked to cancel. Its samples
// stay readable. Ending it again changes nothing.
func (s *Store) EndRun(ctx context.Context, id uuid.UUID) (Run, error) {
	return Run{}, errUnfinished
}

// PutContract makes a new version of the run's contract current. It holds for
// what is released from then on; a class that is no longer declared accepts no
// new tasks, while what was released of it goes on. A contract equal to the
// current one makes no new version.
func (s *Store) PutContract(ctx context.Context, runID uuid.UUID, contract Contract) (ContractVersion, error) {
	return ContractVersion{}, errUnfinished
}

// ContractHistory returns all versions of the run's contract, oldest first.
func (s *Store) ContractHistory(ctx context.Context, runID uuid.UUID) ([]ContractVersion, error) {
	return nil, errUnfinished
}
