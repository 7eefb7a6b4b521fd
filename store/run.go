package store

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// RunState is the closed set of a run's states.
type RunState string

// Run states.
const (
	RunActive RunState = "active"
	RunEnded  RunState = "ended"
)

const maxRunNameBytes = 256

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

const (
	insertRunSQL = `
insert into runs (run_id, pool, name, state, contract_version) values ($1, $2, $3, 'active', 1)`

	insertRunCountersSQL = `insert into run_counters (run_id) values ($1)`

	insertRunPruningSQL = `insert into run_pruning (run_id) values ($1)`

	runColumns = `
select r.run_id, r.name, r.pool, r.state, r.created_at, r.ended_at,
       v.version, v.max_concurrency, v.staleness_bound, v.group_policy, v.group_refills, v.spare_members, v.stale_policy, v.undelivered_limit, v.max_restarts, coalesce(v.freshness_budget_seconds, 0), v.created_at,
       (select array_agg(c.class order by c.ordinal) from contract_classes c where (c.run_id, c.version) = (v.run_id, v.version)),
       (select array_agg(c.share order by c.ordinal) from contract_classes c where (c.run_id, c.version) = (v.run_id, v.version)),
       (select array_agg(c.given_share order by c.ordinal) from contract_classes c where (c.run_id, c.version) = (v.run_id, v.version)),
       (select array_agg(coalesce(c.freshness_budget_seconds, 0) order by c.ordinal) from contract_classes c where (c.run_id, c.version) = (v.run_id, v.version))
from runs r join contract_versions v on v.run_id = r.run_id`

	selectRunSQL = runColumns + ` and v.version = r.contract_version where r.run_id = $1`

	selectRunsSQL = runColumns + ` and v.version = r.contract_version
where ($1 = '' or r.pool = $1) and ($2 = '' or r.state = $2)
  and ($3::uuid is null or (r.created_at, r.run_id) < (select b.created_at, b.run_id from runs b where b.run_id = $3))
order by r.created_at desc, r.run_id desc
limit $4`

	selectContractHistorySQL = runColumns + ` where r.run_id = $1 order by v.version`

	// Whoever releases, dispatches or ends holds this lock: see tx.go. What the lock
	// protects is read by a statement of its own, since a statement that waited for
	// a lock goes on with the snapshot from before the wait.
	lockRunSQL = `select from run_counters where run_id = $1 for update`

	selectLockedRunSQL = `
select r.state, r.pool, r.contract_version, v.max_concurrency, c.batch_seq, c.sample_seq, c.live,
       v.undelivered_limit, c.paused_at is not null, ` + undeliveredOfRun + `
from run_counters c join runs r using (run_id)
     join contract_versions v on v.run_id = r.run_id and v.version = r.contract_version
where c.run_id = $1`

	insertContractVersionSQL = `
insert into contract_versions (run_id, version, max_concurrency, staleness_bound, group_policy, stale_policy, group_refills, spare_members, undelivered_limit,
                               max_restarts, freshness_budget_seconds)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, nullif($11::float8, 0))`

	insertContractClassSQL = `
insert into contract_classes (run_id, version, ordinal, class, share, given_share, freshness_budget_seconds, released_before)
values ($1, $2, $3, $4, $5, $6, nullif($7::float8, 0), coalesce(case when $8 then (select released_before from contract_classes where run_id = $1 and version = $2 - 1 and class = $4)
                                                             else (select released from class_counters where run_id = $1 and class = $4) end, 0))`

	ensureClassCountersSQL = `
insert into class_counters (run_id, class) select $1, unnest($2::text[]) on conflict do nothing`

	setContractVersionSQL = `update runs set contract_version = $2 where run_id = $1`

	endRunSQL = `update runs set state = 'ended', ended_at = now() where run_id = $1`

	selectActiveRunSQL = `select run_id from runs where pool = $1 and state = 'active'`
)

// CreateRun opens a run and creates its pool if it is new. A pool has one active
// run at a time: a second one is refused with *ConflictError. A contract that
// does not hold is refused with *FieldError, its path below "contract.".
func (s *Store) CreateRun(ctx context.Context, run NewRun) (Run, error) {
	run.Name = cleanText(run.Name)
	if run.Name == "" || len(run.Name) > maxRunNameBytes {
		return Run{}, &FieldError{Path: "name", Problem: fmt.Sprintf("must be 1 to %d bytes long, is %d", maxRunNameBytes, len(run.Name))}
	}
	if err := checkPoolName("pool", run.Pool); err != nil {
		return Run{}, err
	}
	contract, err := run.Contract.Normalise()
	if err != nil {
		var field *FieldError
		if errors.As(err, &field) {
			return Run{}, &FieldError{Path: "contract." + field.Path, Problem: field.Problem}
		}
		return Run{}, err
	}
	id, err := uuid.NewV7()
	if err != nil {
		return Run{}, fmt.Errorf("drawing a run id: %w", err)
	}
	err = s.write(ctx, func(tx pgx.Tx) error {
		batch := &pgx.Batch{}
		batch.Queue(ensurePoolSQL, run.Pool)
		batch.Queue(insertRunSQL, id, run.Pool, run.Name)
		batch.Queue(insertRunCountersSQL, id)
		batch.Queue(insertRunPruningSQL, id)
		queueContract(batch, id, 1, contract, run.Contract.Classes, false)
		notify(batch, DispatchTopic())
		return tx.SendBatch(ctx, batch).Close()
	})
	if violates(err, "runs_one_active_per_pool") {
		var active uuid.UUID
		if err := s.pool.QueryRow(ctx, selectActiveRunSQL, run.Pool).Scan(&active); err != nil {
			return Run{}, fmt.Errorf("looking for the active run of pool %s: %w", run.Pool, err)
		}
		return Run{}, &ConflictError{Subject: "run", Existing: active.String(), Problem: fmt.Sprintf("cannot be created: pool %s has an active run", run.Pool)}
	}
	if err != nil {
		return Run{}, fmt.Errorf("creating run %s: %w", run.Name, err)
	}
	return s.Run(ctx, id)
}

// queueContract writes one version. sameShares as the version before lets what was
// released go on counting.
func queueContract(batch *pgx.Batch, runID uuid.UUID, version int, contract Contract, given []ClassShare, sameShares bool) {
	batch.Queue(insertContractVersionSQL, runID, version, contract.MaxConcurrency, contract.StalenessBound, string(contract.GroupPolicy), string(contract.StalePolicy),
		contract.GroupRefills, contract.SpareMembers, contract.UndeliveredLimit, contract.MaxRestarts, contract.FreshnessBudgetSeconds)
	names := make([]string, len(contract.Classes))
	for i, class := range contract.Classes {
		names[i] = class.Class
		batch.Queue(insertContractClassSQL, runID, version, i, class.Class, class.Share, given[i].Share, class.FreshnessBudgetSeconds, sameShares)
	}
	batch.Queue(ensureClassCountersSQL, runID, names)
}

// sameShares tells whether two contracts ask for one mixture.
func sameShares(a, b []ClassShare) bool {
	shares := func(classes []ClassShare) map[string]float64 {
		m := make(map[string]float64, len(classes))
		for _, c := range classes {
			m[c.Class] = c.Share
		}
		return m
	}
	return maps.Equal(shares(a), shares(b))
}

// Run returns one run, or ErrNotFound.
func (s *Store) Run(ctx context.Context, id uuid.UUID) (Run, error) {
	return readRun(ctx, s.pool, id)
}

func readRun(ctx context.Context, from queryer, id uuid.UUID) (Run, error) {
	rows, err := from.Query(ctx, selectRunSQL, id)
	if err != nil {
		return Run{}, fmt.Errorf("reading run %s: %w", id, err)
	}
	run, err := pgx.CollectExactlyOneRow(rows, scanRun)
	return run, found(err, "reading run", id)
}

func scanRun(row pgx.CollectableRow) (Run, error) {
	var run Run
	var names []string
	var shares, given, budgets []float64
	contract := &run.Contract.Contract
	err := row.Scan(&run.ID, &run.Name, &run.Pool, &run.State, &run.CreatedAt, &run.EndedAt,
		&run.Contract.Version, &contract.MaxConcurrency, &contract.StalenessBound, &contract.GroupPolicy, &contract.GroupRefills, &contract.SpareMembers, &contract.StalePolicy, &contract.UndeliveredLimit,
		&contract.MaxRestarts, &contract.FreshnessBudgetSeconds, &run.Contract.CreatedAt, &names, &shares, &given, &budgets)
	if err != nil {
		return Run{}, err
	}
	for i, name := range names {
		contract.Classes = append(contract.Classes, ClassShare{Class: name, Share: shares[i], FreshnessBudgetSeconds: budgets[i]})
		run.Contract.Given = append(run.Contract.Given, ClassShare{Class: name, Share: given[i], FreshnessBudgetSeconds: budgets[i]})
	}
	return run, nil
}

// Runs lists runs, newest first.
func (s *Store) Runs(ctx context.Context, query RunQuery) ([]Run, error) {
	rows, err := s.pool.Query(ctx, selectRunsSQL, query.Pool, string(query.State), query.Before, pageLimit(query.Limit))
	if err != nil {
		return nil, fmt.Errorf("listing runs: %w", err)
	}
	runs, err := pgx.CollectRows(rows, scanRun)
	if err != nil {
		return nil, fmt.Errorf("listing runs: %w", err)
	}
	return runs, nil
}

// runLock is what the holder of a run's lock knows about it.
type runLock struct {
	state           RunState
	pool            string
	contractVersion int
	maxConcurrency  int
	batchSeq        int64
	sampleSeq       int64
	live            int
	pressure        pressure
}

// lockRun waits for the run's lock, which is held until the transaction ends.
func lockRun(ctx context.Context, tx pgx.Tx, id uuid.UUID) (runLock, error) {
	batch := &pgx.Batch{}
	batch.Queue(lockRunSQL, id)
	var lock runLock
	batch.Queue(selectLockedRunSQL, id).QueryRow(func(row pgx.Row) error {
		return row.Scan(&lock.state, &lock.pool, &lock.contractVersion, &lock.maxConcurrency, &lock.batchSeq, &lock.sampleSeq, &lock.live,
			&lock.pressure.limit, &lock.pressure.paused, &lock.pressure.undelivered)
	})
	err := tx.SendBatch(ctx, batch).Close()
	return lock, found(err, "locking run", id)
}

// EndRun closes a run for good: it accepts no more batches, its queued sessions
// end as cancelled at once, and those under way are asked to cancel. Its samples
// stay readable. Ending it again changes nothing.
func (s *Store) EndRun(ctx context.Context, id uuid.UUID) (Run, error) {
	err := s.write(ctx, func(tx pgx.Tx) error {
		lock, err := lockRun(ctx, tx, id)
		if err != nil || lock.state == RunEnded {
			return err
		}
		if _, err := cancelQueued(ctx, tx, lock.sampleSeq, id, nil, "the run was ended"); err != nil {
			return err
		}
		batch := &pgx.Batch{}
		batch.Queue(requestCancelSQL, lock.pool, id, nil, "the run was ended")
		batch.Queue(endRunSQL, id)
		notify(batch, OutboxTopic())
		return tx.SendBatch(ctx, batch).Close()
	})
	if err != nil {
		return Run{}, fmt.Errorf("ending run %s: %w", id, err)
	}
	return s.Run(ctx, id)
}

// PutContract makes a new version of the run's contract current. It holds for
// what is released from then on; a class that is no longer declared accepts no
// new tasks, while what was released of it goes on. A contract equal to the
// current one makes no new version.
func (s *Store) PutContract(ctx context.Context, runID uuid.UUID, contract Contract) (ContractVersion, error) {
	normalised, err := contract.Normalise()
	if err != nil {
		return ContractVersion{}, err
	}
	var run Run
	err = s.write(ctx, func(tx pgx.Tx) error {
		lock, err := lockRun(ctx, tx, runID)
		if err != nil {
			return err
		}
		if lock.state == RunEnded {
			return ErrRunEnded
		}
		run, err = readRun(ctx, tx, runID)
		if err != nil || reflect.DeepEqual(run.Contract.Contract, normalised) {
			return err
		}
		batch := &pgx.Batch{}
		queueContract(batch, runID, lock.contractVersion+1, normalised, contract.Classes, sameShares(run.Contract.Contract.Classes, normalised.Classes))
		batch.Queue(setContractVersionSQL, runID, lock.contractVersion+1)
		notify(batch, DispatchTopic())
		if err := tx.SendBatch(ctx, batch).Close(); err != nil {
			return err
		}
		run, err = readRun(ctx, tx, runID)
		return err
	})
	if err != nil {
		return ContractVersion{}, fmt.Errorf("changing the contract of run %s: %w", runID, err)
	}
	return run.Contract, nil
}

// ContractHistory returns all versions of the run's contract, oldest first.
func (s *Store) ContractHistory(ctx context.Context, runID uuid.UUID) ([]ContractVersion, error) {
	rows, err := s.pool.Query(ctx, selectContractHistorySQL, runID)
	if err != nil {
		return nil, fmt.Errorf("reading the contracts of run %s: %w", runID, err)
	}
	runs, err := pgx.CollectRows(rows, scanRun)
	if err == nil && len(runs) == 0 {
		err = pgx.ErrNoRows
	}
	if err != nil {
		return nil, found(err, "reading the contracts of run", runID)
	}
	versions := make([]ContractVersion, len(runs))
	for i, run := range runs {
		versions[i] = run.Contract
	}
	return versions, nil
}
