package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// WeightState is the closed set of a weight update's states.
type WeightState string

// Weight update states. All but WeightCommitted and WeightCancelled are open, and
// a pool has one open update at a time.
const (
	// WeightPausing: its engines are being paused.
	WeightPausing WeightState = "pausing"
	// WeightPaused: all engines that are there are paused; the trainer may load.
	WeightPaused WeightState = "paused"
	// WeightCommitting: caches are reset and weights named; once that is done
	// everywhere the version comes into force and the engines are resumed.
	WeightCommitting WeightState = "committing"
	WeightCommitted  WeightState = "committed"
	// WeightCancelling: the engines are being resumed with their old weights.
	WeightCancelling WeightState = "cancelling"
	WeightCancelled  WeightState = "cancelled"
	// WeightFailed: some engines refused the failed step; it waits to be asked again.
	WeightFailed WeightState = "failed"
)

// Open tells whether something is still to be done or asked.
func (s WeightState) Open() bool { return s != WeightCommitted && s != WeightCancelled }

// WeightStep is the closed set of steps in which an update can fail.
type WeightStep string

// Steps of an update.
const (
	StepPause WeightStep = "pause"
	// StepCommit resets the caches and names the weights, before the version is in force.
	StepCommit WeightStep = "commit"
	// StepResume comes after the version is in force.
	StepResume WeightStep = "resume"
	StepCancel WeightStep = "cancel"
)

// WeightSource is the closed set of how a pool came to a policy version.
type WeightSource string

// Sources of a policy version.
const (
	// WeightRequested: by an update that was begun and committed.
	WeightRequested WeightSource = "requested"
	// WeightAnnounced: the trainer told that the engines have it.
	WeightAnnounced WeightSource = "announced"
	// WeightObserved: an engine reported it unasked.
	WeightObserved WeightSource = "observed"
)

// WeightCache is the closed set of how prefixes of old weights are kept from being used.
type WeightCache string

// Ways to part with old prefixes.
const (
	// CacheReset empties the engines' prefix caches.
	CacheReset WeightCache = "reset"
	// CacheSalt gives requests a cache salt of the new version.
	CacheSalt WeightCache = "salt"
)

// WeightPlace is the closed set of an instance's states within an update.
type WeightPlace string

// Places of an instance. The first four are in order: an instance goes from each
// to the next.
const (
	PlacePending WeightPlace = "pending"
	PlacePaused  WeightPlace = "paused"
	// PlacePrepared: its cache is reset or salted and its weights are named.
	PlacePrepared WeightPlace = "prepared"
	// PlaceResumed: it generates again, under the new version or, after a
	// cancellation, the old one.
	PlaceResumed WeightPlace = "resumed"
	// PlaceRefused: it refused the step that was asked of it last.
	PlaceRefused WeightPlace = "refused"
	// PlaceGone: it left the pool or did not answer for a while; it is not waited for.
	PlaceGone WeightPlace = "gone"
	// PlaceObserved: it reported the version unasked.
	PlaceObserved WeightPlace = "observed"
)

var placesInOrder = []WeightPlace{PlacePending, PlacePaused, PlacePrepared, PlaceResumed}

// AtLeast tells whether an instance that has reached p has come as far as q.
func (p WeightPlace) AtLeast(q WeightPlace) bool {
	return slices.Index(placesInOrder, p) >= slices.Index(placesInOrder, q)
}

// WeightInstance is one instance within an update.
type WeightInstance struct {
	Instance string
	State    WeightPlace
	// Reached is one of the four places in order: how far it came, also where
	// State is PlaceRefused or PlaceGone.
	Reached WeightPlace
	// Attempt is the one of the update at which the state was written.
	Attempt   int
	Problem   string
	ChangedAt time.Time
}

// WeightUpdate is one entry of a pool's history of policy versions.
type WeightUpdate struct {
	Pool          string
	PolicyVersion int64
	// FromVersion was in force when it began.
	FromVersion int64
	Source      WeightSource
	// Mode is the pause mode, empty unless Source is WeightRequested.
	Mode  string
	Cache WeightCache
	// Control is ControlObserve if the trainer makes all calls to engines itself.
	Control    InstanceControl
	State      WeightState
	FailedStep WeightStep
	Problem    string
	// Attempt counts what was asked of the update, from 1.
	Attempt             int
	PauseTimeoutSeconds float64
	// SessionsOverBound under way were older than their contract allows when the
	// version came into force; SessionsEnded of them were asked to end as stale.
	SessionsOverBound int
	SessionsEnded     int
	BeganAt           time.Time
	ChangedAt         time.Time
	// AdvancedAt is when the version came into force.
	AdvancedAt *time.Time
	// Instances by name.
	Instances []WeightInstance
}

// Instance returns one instance's row, or one that is pending.
func (u *WeightUpdate) Instance(id string) WeightInstance {
	for i := range u.Instances {
		if u.Instances[i].Instance == id {
			return u.Instances[i]
		}
	}
	return WeightInstance{Instance: id, State: PlacePending, Reached: PlacePending}
}

const (
	weightColumns = `
select pool, policy_version, from_version, source, coalesce(mode, ''), cache, control, state, coalesce(failed_step, ''), problem, attempt,
       pause_timeout_seconds, sessions_over_bound, sessions_ended, began_at, changed_at, advanced_at
from weight_updates`

	selectWeightSQL     = weightColumns + ` where pool = $1 and policy_version = $2`
	selectOpenWeightSQL = weightColumns + ` where pool = $1 and state not in ('committed', 'cancelled')`

	selectWeightsSQL = weightColumns + `
where pool = $1 and ($2::bigint is null or policy_version < $2) order by policy_version desc limit $3`

	selectWeightInstancesSQL = `
select policy_version, instance, state, reached, attempt, problem, changed_at
from weight_update_instances where pool = $1 and policy_version = any($2) order by policy_version, instance`

	selectCacheSaltSQL = `select cache_salt from pools where pool = $1`
)

// WeightsTopic: a weight update of the pool changed.
func WeightsTopic(pool string) Topic { return Topic("weights:" + pool) }

func scanWeight(row pgx.CollectableRow) (WeightUpdate, error) {
	var u WeightUpdate
	err := row.Scan(&u.Pool, &u.PolicyVersion, &u.FromVersion, &u.Source, &u.Mode, &u.Cache, &u.Control, &u.State, &u.FailedStep, &u.Problem,
		&u.Attempt, &u.PauseTimeoutSeconds, &u.SessionsOverBound, &u.SessionsEnded, &u.BeganAt, &u.ChangedAt, &u.AdvancedAt)
	return u, err
}

// readWeights returns updates with their instances.
func readWeights(ctx context.Context, from queryer, sql string, args ...any) ([]WeightUpdate, error) {
	rows, err := from.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	updates, err := pgx.CollectRows(rows, scanWeight)
	if err != nil || len(updates) == 0 {
		return nil, err
	}
	at := make(map[int64]int, len(updates))
	versions := make([]int64, len(updates))
	for i := range updates {
		at[updates[i].PolicyVersion], versions[i] = i, updates[i].PolicyVersion
	}
	if rows, err = from.Query(ctx, selectWeightInstancesSQL, updates[0].Pool, versions); err != nil {
		return nil, err
	}
	var version int64
	var in WeightInstance
	_, err = pgx.ForEachRow(rows, []any{&version, &in.Instance, &in.State, &in.Reached, &in.Attempt, &in.Problem, &in.ChangedAt}, func() error {
		u := &updates[at[version]]
		u.Instances = append(u.Instances, in)
		return nil
	})
	return updates, err
}

// WeightUpdates lists the history of the pool's policy versions, newest first,
// from below a version if before is not nil; limit is at most 1,000. An unknown
// pool is ErrNotFound.
func (s *Store) WeightUpdates(ctx context.Context, pool string, before *int64, limit int) ([]WeightUpdate, error) {
	var updates []WeightUpdate
	err := s.read(ctx, func(tx pgx.Tx) (err error) {
		if err := tx.QueryRow(ctx, selectPolicyVersionSQL, pool).Scan(new(int64)); err != nil {
			return err
		}
		updates, err = readWeights(ctx, tx, selectWeightsSQL, pool, before, pageLimit(limit))
		return err
	})
	return updates, found(err, "listing the weight updates of pool", pool)
}

// WeightUpdate returns one update, or ErrNotFound.
func (s *Store) WeightUpdate(ctx context.Context, pool string, version int64) (WeightUpdate, error) {
	update, err := s.oneWeight(ctx, selectWeightSQL, pool, version)
	return update, found(err, fmt.Sprintf("reading weight update %d of pool", version), pool)
}

// OpenWeightUpdate returns the pool's open update; ok is false if there is none.
func (s *Store) OpenWeightUpdate(ctx context.Context, pool string) (update WeightUpdate, ok bool, err error) {
	update, err = s.oneWeight(ctx, selectOpenWeightSQL, pool)
	if errors.Is(err, pgx.ErrNoRows) {
		return WeightUpdate{}, false, nil
	}
	if err != nil {
		return WeightUpdate{}, false, fmt.Errorf("looking for an open weight update of pool %s: %w", pool, err)
	}
	return update, true, nil
}

func (s *Store) oneWeight(ctx context.Context, sql string, args ...any) (WeightUpdate, error) {
	var update WeightUpdate
	err := s.read(ctx, func(tx pgx.Tx) (err error) {
		update, err = firstWeight(ctx, tx, sql, args...)
		return err
	})
	return update, err
}

// firstWeight returns pgx.ErrNoRows if there is none.
func firstWeight(ctx context.Context, from queryer, sql string, args ...any) (WeightUpdate, error) {
	updates, err := readWeights(ctx, from, sql, args...)
	if err == nil && len(updates) == 0 {
		err = pgx.ErrNoRows
	}
	if err != nil {
		return WeightUpdate{}, err
	}
	return updates[0], nil
}

// CacheSalt is the salt that requests to the pool's engines carry, empty for none.
func (s *Store) CacheSalt(ctx context.Context, pool string) (string, error) {
	var salt string
	err := s.pool.QueryRow(ctx, selectCacheSaltSQL, pool).Scan(&salt)
	return salt, found(err, "reading the cache salt of pool", pool)
}
