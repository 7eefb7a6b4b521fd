package store

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/jackc/pgx/v5"
)

// NewWeightUpdate is what a trainer asks for when its weights are about to change.
type NewWeightUpdate struct {
	Pool          string
	PolicyVersion int64
	// Mode is abort, wait, keep or in_place.
	Mode    string
	Cache   WeightCache
	Control InstanceControl
	// PauseTimeoutSeconds bounds how long an engine may take to pause.
	PauseTimeoutSeconds float64
}

const maxPauseTimeoutSeconds = 24 * 3600

const (
	// Whoever changes a pool's policy version or begins an update holds this lock.
	// It lets foreign keys to the pool pass.
	lockPoolSQL = `select policy_version from pools where pool = $1 for no key update`

	// A cancelled version may be begun anew; its attempts go on counting.
	beginWeightSQL = `
insert into weight_updates as u (pool, policy_version, from_version, source, mode, cache, control, state, pause_timeout_seconds, began_at, changed_at)
values ($1, $2, $3, 'requested', $4, $5, $6, 'pausing', $7, statement_timestamp(), statement_timestamp())
on conflict (pool, policy_version) do update
set from_version = excluded.from_version, mode = excluded.mode, cache = excluded.cache, control = excluded.control, state = 'pausing',
    problem = '', attempt = u.attempt + 1, pause_timeout_seconds = excluded.pause_timeout_seconds,
    began_at = excluded.began_at, changed_at = excluded.changed_at`

	dropWeightInstancesSQL = `delete from weight_update_instances where pool = $1 and policy_version = $2`

	lockWeightSQL = `select from weight_updates where pool = $1 and policy_version = $2 for update`

	askWeightSQL = `
update weight_updates set state = $3, cache = $4, failed_step = null, problem = '', attempt = attempt + 1, changed_at = statement_timestamp()
where pool = $1 and policy_version = $2`
)

func (n *NewWeightUpdate) check() error {
	switch n.Mode {
	case "abort", "wait", "keep", "in_place":
	default:
		return &FieldError{Path: "mode", Problem: fmt.Sprintf("must be abort, wait, keep or in_place, is %q", n.Mode)}
	}
	if n.PolicyVersion < 1 {
		return &FieldError{Path: "policy_version", Problem: fmt.Sprintf("must be positive, is %d", n.PolicyVersion)}
	}
	if n.Cache != CacheReset && n.Cache != CacheSalt {
		return &FieldError{Path: "cache", Problem: fmt.Sprintf("must be reset or salt, is %q", n.Cache)}
	}
	if n.Control != ControlManage && n.Control != ControlObserve {
		return &FieldError{Path: "control", Problem: fmt.Sprintf("must be manage or observe, is %q", n.Control)}
	}
	if !(n.PauseTimeoutSeconds > 0) || n.PauseTimeoutSeconds > maxPauseTimeoutSeconds {
		return &FieldError{Path: "pause_timeout_seconds", Problem: fmt.Sprintf("must be above 0 and at most %d, is %v", maxPauseTimeoutSeconds, n.PauseTimeoutSeconds)}
	}
	return checkCache(n.Mode, n.Control, n.Cache)
}

// checkCache refuses to empty a cache that the mode keeps in use.
func checkCache(mode string, control InstanceControl, cache WeightCache) error {
	if mode == "in_place" && control == ControlManage && cache == CacheReset {
		return &FieldError{Path: "cache", Problem: "must be salt with mode in_place: the generations that are kept hold their blocks, so that the cache cannot be emptied"}
	}
	return nil
}

// asks tells whether the update is what was asked for.
func (n *NewWeightUpdate) asks(u *WeightUpdate) bool {
	return u.Source == WeightRequested && n.Mode == u.Mode && n.Cache == u.Cache && n.Control == u.Control &&
		math.Abs(n.PauseTimeoutSeconds-u.PauseTimeoutSeconds) < 1e-9
}

// BeginWeightUpdate begins an update, or returns the one of that version if the
// same was asked before; one that failed to pause is tried again. The version must
// be greater than the current one (*FieldError); while another update is open, or
// this one with other terms, it is refused with *ConflictError. A version that was
// cancelled may be begun anew. An unknown pool is ErrNotFound.
func (s *Store) BeginWeightUpdate(ctx context.Context, begin NewWeightUpdate) (WeightUpdate, error) {
	if err := begin.check(); err != nil {
		return WeightUpdate{}, err
	}
	var update WeightUpdate
	err := s.write(ctx, func(tx pgx.Tx) error {
		var current int64
		if err := tx.QueryRow(ctx, lockPoolSQL, begin.Pool).Scan(&current); err != nil {
			return err
		}
		done, err := begin.repeats(ctx, tx, current)
		if err != nil || done {
			if err == nil {
				update, err = firstWeight(ctx, tx, selectWeightSQL, begin.Pool, begin.PolicyVersion)
			}
			return err
		}
		batch := &pgx.Batch{}
		batch.Queue(dropWeightInstancesSQL, begin.Pool, begin.PolicyVersion)
		batch.Queue(beginWeightSQL, begin.Pool, begin.PolicyVersion, current, begin.Mode, string(begin.Cache), string(begin.Control), begin.PauseTimeoutSeconds)
		notify(batch, WeightsTopic(begin.Pool))
		if err := tx.SendBatch(ctx, batch).Close(); err != nil {
			return err
		}
		update, err = firstWeight(ctx, tx, selectWeightSQL, begin.Pool, begin.PolicyVersion)
		return err
	})
	return update, found(err, fmt.Sprintf("beginning weight update %d of pool", begin.PolicyVersion), begin.Pool)
}

// repeats deals with what exists of the version, under the pool's lock. done tells
// that nothing new is to be begun.
func (n *NewWeightUpdate) repeats(ctx context.Context, tx pgx.Tx, current int64) (done bool, err error) {
	known, err := firstWeight(ctx, tx, selectWeightSQL, n.Pool, n.PolicyVersion)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return false, err
	}
	if err == nil && known.State != WeightCancelled {
		switch {
		case n.asks(&known) && known.State == WeightFailed && known.FailedStep == StepPause:
			return true, askWeight(ctx, tx, &known, WeightPausing, known.Cache)
		case n.asks(&known):
			return true, nil
		case known.State.Open():
			return false, &ConflictError{Subject: "weight update", Existing: strconv.FormatInt(known.PolicyVersion, 10), Problem: "was begun with other terms"}
		}
	}
	if n.PolicyVersion <= current {
		return false, &FieldError{Path: "policy_version", Problem: fmt.Sprintf("must be greater than the pool's current version %d, is %d", current, n.PolicyVersion)}
	}
	return false, noOpenUpdate(ctx, tx, n.Pool, "cannot begin")
}

// noOpenUpdate returns *ConflictError if the pool has an open update.
func noOpenUpdate(ctx context.Context, tx pgx.Tx, pool, refusal string) error {
	open, err := firstWeight(ctx, tx, selectOpenWeightSQL, pool)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	return &ConflictError{Subject: "weight update", Existing: strconv.FormatInt(open.PolicyVersion, 10),
		Problem: fmt.Sprintf("%s while version %d is %s: commit or cancel that one first", refusal, open.PolicyVersion, open.State)}
}

// askWeight moves an update to a state that its pool's owner will work on.
func askWeight(ctx context.Context, tx pgx.Tx, u *WeightUpdate, state WeightState, cache WeightCache) error {
	batch := &pgx.Batch{}
	batch.Queue(askWeightSQL, u.Pool, u.PolicyVersion, string(state), string(cache))
	notify(batch, WeightsTopic(u.Pool))
	return tx.SendBatch(ctx, batch).Close()
}

// CommitWeightUpdate asks for the version to come into force: the trainer has
// loaded its weights. A paused or failed update goes on; repeating it on one that
// is committing or committed changes nothing. cache, if not empty, replaces the
// way that was chosen at the beginning. Refusals: *ConflictError, ErrNotFound,
// *FieldError for the cache.
func (s *Store) CommitWeightUpdate(ctx context.Context, pool string, version int64, cache WeightCache) (WeightUpdate, error) {
	return s.askOfWeight(ctx, pool, version, "committing", func(tx pgx.Tx, u *WeightUpdate) error {
		switch u.State {
		case WeightCommitting, WeightCommitted:
			return nil
		case WeightPausing:
			return conflictOf(u, "cannot be committed before its engines are paused")
		case WeightCancelling, WeightCancelled:
			return conflictOf(u, "was cancelled; it can be begun anew")
		}
		if u.FailedStep == StepCancel {
			return conflictOf(u, "is cancelled in part: cancel it again")
		}
		if cache == "" {
			cache = u.Cache
		}
		if cache != u.Cache && u.AdvancedAt != nil {
			return &FieldError{Path: "cache", Problem: "cannot change any more: the version is in force"}
		}
		if err := checkCache(u.Mode, u.Control, cache); err != nil {
			return err
		}
		return askWeight(ctx, tx, u, WeightCommitting, cache)
	})
}

// CancelWeightUpdate asks for the engines to be resumed with their old weights.
// Repeating it changes nothing. An update that is committing, committed, or failed
// after its version came into force is refused with *ConflictError.
func (s *Store) CancelWeightUpdate(ctx context.Context, pool string, version int64) (WeightUpdate, error) {
	return s.askOfWeight(ctx, pool, version, "cancelling", func(tx pgx.Tx, u *WeightUpdate) error {
		switch {
		case u.State == WeightCancelling || u.State == WeightCancelled:
			return nil
		case u.State == WeightCommitting:
			return conflictOf(u, "is being committed")
		case u.AdvancedAt != nil:
			return conflictOf(u, "cannot be cancelled: it is in force")
		}
		return askWeight(ctx, tx, u, WeightCancelling, u.Cache)
	})
}

func conflictOf(u *WeightUpdate, problem string) error {
	return &ConflictError{Subject: "weight update", Existing: strconv.FormatInt(u.PolicyVersion, 10), Problem: problem}
}

// askOfWeight locks an update, lets do change it and returns what it then is.
func (s *Store) askOfWeight(ctx context.Context, pool string, version int64, doing string, do func(pgx.Tx, *WeightUpdate) error) (WeightUpdate, error) {
	var update WeightUpdate
	err := s.write(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, lockWeightSQL, pool, version); err != nil {
			return err
		}
		known, err := firstWeight(ctx, tx, selectWeightSQL, pool, version)
		if err != nil {
			return err
		}
		if err := do(tx, &known); err != nil {
			return err
		}
		update, err = firstWeight(ctx, tx, selectWeightSQL, pool, version)
		return err
	})
	return update, found(err, fmt.Sprintf("%s weight update %d of pool", doing, version), pool)
}
