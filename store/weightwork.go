package store

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Methods of this file are the pool owner's. Each is fenced by the owner's epoch.

const (
	markWeightSQL = `
insert into weight_update_instances (pool, policy_version, instance, state, reached, attempt, problem, changed_at)
select $1, $2, $3, $5, $6, $4, $7, statement_timestamp() from weight_updates
where pool = $1 and policy_version = $2 and attempt = $4 and state not in ('committed', 'cancelled')
on conflict (pool, policy_version, instance) do update
set state = excluded.state, reached = excluded.reached, attempt = excluded.attempt, problem = excluded.problem, changed_at = excluded.changed_at`

	settleWeightSQL = `
update weight_updates set state = $5, failed_step = nullif($6, ''), problem = $7, changed_at = statement_timestamp()
where pool = $1 and policy_version = $2 and attempt = $3 and state = $4`

	// $3 is the attempt. Only the instances that were prepared have the version.
	advanceInstancesSQL = `
update instances i set policy_version = $2 from weight_update_instances u
where i.pool = $1 and u.pool = $1 and u.policy_version = $2 and u.instance = i.instance and u.reached = 'prepared' and i.state <> 'removed'`

	advanceAllInstancesSQL = `update instances set policy_version = $2 where pool = $1 and state <> 'removed'`

	// $3 is the new salt, null to keep the present one.
	advancePoolSQL = `update pools set policy_version = greatest(policy_version, $2), cache_salt = coalesce($3, cache_salt) where pool = $1`

	advanceWeightSQL = `
update weight_updates set advanced_at = statement_timestamp(), changed_at = statement_timestamp(), sessions_over_bound = $3, sessions_ended = $4
where pool = $1 and policy_version = $2`

	// Those that an update went on without while they were paused.
	selectStrandedSQL = `
select i.instance from weight_update_instances i join weight_updates u using (pool, policy_version)
where i.pool = $1 and u.state in ('committed', 'cancelled') and i.state = 'gone' and i.reached in ('paused', 'prepared') order by i.instance`

	freeStrandedSQL = `
update weight_update_instances set reached = 'resumed', changed_at = statement_timestamp()
where pool = $1 and instance = $2 and state = 'gone' and reached in ('paused', 'prepared')`

	// What the trainer or an engine did without being asked is in force at once.
	recordWeightSQL = `
insert into weight_updates (pool, policy_version, from_version, source, cache, control, state, pause_timeout_seconds,
                            sessions_over_bound, sessions_ended, began_at, changed_at, advanced_at)
values ($1, $2, $3, $4, 'reset', 'observe', 'committed', 0, $5, $6, statement_timestamp(), statement_timestamp(), statement_timestamp())
on conflict do nothing`

	observeInstanceSQL = `
update instances set policy_version = $3 where pool = $1 and instance = $2 and policy_version <> $3 and state <> 'removed'`

	observedInstanceSQL = `
insert into weight_update_instances (pool, policy_version, instance, state, reached, attempt, problem, changed_at)
values ($1, $2, $3, 'observed', 'pending', 1, '', statement_timestamp())
on conflict (pool, policy_version, instance) do update set state = excluded.state, problem = '', changed_at = excluded.changed_at`
)

// SaltOf is the cache salt of a policy version.
func SaltOf(version int64) string { return fmt.Sprintf("holdfast-%d", version) }

// fence returns ErrFenced if epoch is not the pool's current one, and keeps the
// pool from changing hands until the transaction ends.
func fence(ctx context.Context, tx pgx.Tx, pool string, epoch int64) error {
	var current int64
	err := tx.QueryRow(ctx, fencePoolSQL, pool).Scan(&current)
	if err == pgx.ErrNoRows || err == nil && current != epoch {
		return ErrFenced
	}
	return err
}

// WeightMark says how far an instance has come.
type WeightMark struct {
	Pool          string
	PolicyVersion int64
	Instance      string
	// Attempt of the update that the mark belongs to; the mark is dropped if
	// something else was asked since, or the update is over.
	Attempt        int
	State, Reached WeightPlace
	Problem        string
}

// MarkWeightInstance writes a mark.
func (s *Store) MarkWeightInstance(ctx context.Context, epoch int64, mark WeightMark) error {
	err := s.write(ctx, func(tx pgx.Tx) error {
		if err := fence(ctx, tx, mark.Pool, epoch); err != nil {
			return err
		}
		batch := &pgx.Batch{}
		batch.Queue(markWeightSQL, mark.Pool, mark.PolicyVersion, mark.Instance, mark.Attempt, string(mark.State), string(mark.Reached), cleanText(mark.Problem))
		notify(batch, WeightsTopic(mark.Pool))
		return tx.SendBatch(ctx, batch).Close()
	})
	if err != nil {
		return fmt.Errorf("marking instance %s in weight update %d of pool %s: %w", mark.Instance, mark.PolicyVersion, mark.Pool, err)
	}
	return nil
}

// SettleWeightUpdate moves an update on from where u found it. settled is false,
// and nothing is changed, if something else was asked since.
func (s *Store) SettleWeightUpdate(ctx context.Context, epoch int64, u *WeightUpdate, to WeightState, failed WeightStep, problem string) (settled bool, err error) {
	err = s.write(ctx, func(tx pgx.Tx) error {
		if err := fence(ctx, tx, u.Pool, epoch); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, settleWeightSQL, u.Pool, u.PolicyVersion, u.Attempt, string(u.State), string(to), string(failed), cleanText(problem))
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		settled = true
		_, err = tx.Exec(ctx, notifySQL, string(WeightsTopic(u.Pool)))
		return err
	})
	if err != nil {
		return false, fmt.Errorf("settling weight update %d of pool %s as %s: %w", u.PolicyVersion, u.Pool, to, err)
	}
	return settled, nil
}

// AdvanceWeights brings a committing update's version into force: the pool, the
// instances that were prepared and the update change in one transaction, and
// sessions beyond their contract's staleness bound are dealt with as it says.
// advanced is false, and nothing is changed, if it is in force already or
// something else was asked since.
func (s *Store) AdvanceWeights(ctx context.Context, epoch int64, u *WeightUpdate) (advanced bool, err error) {
	err = s.write(ctx, func(tx pgx.Tx) error {
		if err := fence(ctx, tx, u.Pool, epoch); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, lockPoolSQL, u.Pool).Scan(new(int64)); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, lockWeightSQL, u.Pool, u.PolicyVersion); err != nil {
			return err
		}
		known, err := firstWeight(ctx, tx, selectWeightSQL, u.Pool, u.PolicyVersion)
		if err != nil || known.State != WeightCommitting || known.Attempt != u.Attempt || known.AdvancedAt != nil {
			return err
		}
		stale, err := judgeStaleness(ctx, tx, u.Pool, u.PolicyVersion)
		if err != nil {
			return err
		}
		var salt *string
		if known.Cache == CacheSalt {
			name := SaltOf(u.PolicyVersion)
			salt = &name
		}
		batch := &pgx.Batch{}
		batch.Queue(advanceInstancesSQL, u.Pool, u.PolicyVersion)
		batch.Queue(advancePoolSQL, u.Pool, u.PolicyVersion, salt)
		batch.Queue(advanceWeightSQL, u.Pool, u.PolicyVersion, stale.overBound, stale.ended)
		notifyAdvance(batch, u.Pool, stale)
		advanced = true
		return tx.SendBatch(ctx, batch).Close()
	})
	if err != nil {
		return false, fmt.Errorf("bringing policy version %d of pool %s into force: %w", u.PolicyVersion, u.Pool, err)
	}
	return advanced, nil
}

func notifyAdvance(batch *pgx.Batch, pool string, stale staleness) {
	notify(batch, InstancesTopic(pool))
	notify(batch, WeightsTopic(pool))
	if stale.ended > 0 {
		notify(batch, OutboxTopic())
	}
}

// StrandedInstances are those that were paused when they fell silent and that their
// update then went on without: whoever hears of them again must resume them.
func (s *Store) StrandedInstances(ctx context.Context, pool string) ([]string, error) {
	rows, err := s.pool.Query(ctx, selectStrandedSQL, pool)
	if err == nil {
		var names []string
		if names, err = pgx.CollectRows(rows, pgx.RowTo[string]); err == nil {
			return names, nil
		}
	}
	return nil, fmt.Errorf("looking for stranded instances of pool %s: %w", pool, err)
}

// FreeStrandedInstance notes that a stranded instance was resumed.
func (s *Store) FreeStrandedInstance(ctx context.Context, pool string, epoch int64, instance string) error {
	err := s.write(ctx, func(tx pgx.Tx) error {
		if err := fence(ctx, tx, pool, epoch); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, freeStrandedSQL, pool, instance)
		return err
	})
	if err != nil {
		return fmt.Errorf("noting that stranded instance %s was resumed: %w", instance, err)
	}
	return nil
}

// ObserveWeightVersion records that an engine reports another version than is
// known of it. A version beyond the pool's comes into force. While an update is
// open nothing is changed: engines change then because they were asked to.
func (s *Store) ObserveWeightVersion(ctx context.Context, pool string, epoch int64, instance string, version int64) (changed bool, err error) {
	err = s.write(ctx, func(tx pgx.Tx) error {
		if err := fence(ctx, tx, pool, epoch); err != nil {
			return err
		}
		var current int64
		if err := tx.QueryRow(ctx, lockPoolSQL, pool).Scan(&current); err != nil {
			return err
		}
		if _, err := firstWeight(ctx, tx, selectOpenWeightSQL, pool); err != pgx.ErrNoRows {
			return err
		}
		tag, err := tx.Exec(ctx, observeInstanceSQL, pool, instance, version)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		changed = true
		var stale staleness
		if version > current {
			if stale, err = judgeStaleness(ctx, tx, pool, version); err != nil {
				return err
			}
		}
		batch := &pgx.Batch{}
		batch.Queue(advancePoolSQL, pool, version, nil)
		batch.Queue(recordWeightSQL, pool, version, current, string(WeightObserved), stale.overBound, stale.ended)
		batch.Queue(observedInstanceSQL, pool, version, instance)
		notifyAdvance(batch, pool, stale)
		return tx.SendBatch(ctx, batch).Close()
	})
	if err != nil {
		return false, fmt.Errorf("recording policy version %d of instance %s: %w", version, instance, err)
	}
	return changed, nil
}

// AdvancePolicyVersion sets the pool's policy version by the trainer's word that
// its engines have it. It never goes back: a lower one than the current is
// *ConflictError, the same one changes nothing. It is refused with *ConflictError
// while a weight update is open.
func (s *Store) AdvancePolicyVersion(ctx context.Context, pool string, version int64) error {
	err := s.write(ctx, func(tx pgx.Tx) error {
		var current int64
		if err := tx.QueryRow(ctx, lockPoolSQL, pool).Scan(&current); err != nil {
			return err
		}
		switch {
		case version < current:
			return &ConflictError{Subject: "policy version", Existing: fmt.Sprint(current), Problem: fmt.Sprintf("cannot go back to %d", version)}
		case version == current:
			return nil
		}
		if err := noOpenUpdate(ctx, tx, pool, "cannot be passed over"); err != nil {
			return err
		}
		stale, err := judgeStaleness(ctx, tx, pool, version)
		if err != nil {
			return err
		}
		batch := &pgx.Batch{}
		batch.Queue(dropWeightInstancesSQL, pool, version)
		batch.Queue(`delete from weight_updates where pool = $1 and policy_version = $2 and state = 'cancelled'`, pool, version)
		batch.Queue(recordWeightSQL, pool, version, current, string(WeightAnnounced), stale.overBound, stale.ended)
		batch.Queue(advanceAllInstancesSQL, pool, version)
		batch.Queue(advancePoolSQL, pool, version, nil)
		notifyAdvance(batch, pool, stale)
		return tx.SendBatch(ctx, batch).Close()
	})
	return found(err, "advancing the policy version of pool", pool)
}

// staleness counts what came of sessions beyond their bound.
type staleness struct{ overBound, ended int }

// $1 pool, $2 the version that comes into force. A session is as old as the oldest
// weights that generated for it; one with nothing committed, as those in force
// when it was first admitted; one never admitted has generated nothing. A session whose
// harness runs its loop cannot be begun again by us. A cancellation that comes while
// its row is waited for stands: conditions on s are looked at again with the lock.
const judgeStalenessSQL = `
with bounds as (
    select r.run_id, v.staleness_bound, v.stale_policy, coalesce(v.max_restarts, 0) as max_restarts from runs r
    join contract_versions v on v.run_id = r.run_id and v.version = r.contract_version
    where r.pool = $1 and v.staleness_bound is not null
), aged as (
    select s.session_id, b.stale_policy <> 'finish' and s.cancel_requested_at is null as ends, b.stale_policy = 'restart' and s.restarts < b.max_restarts as restarts, b.staleness_bound,
           $2 - coalesce(s.min_policy_version, greatest(s.policy_version, (
               select max(u.policy_version) from weight_updates u where u.pool = $1 and u.advanced_at <= s.first_admitted_at))) as age
    from sessions s join bounds b using (run_id)
    where ` + liveCondition + ` and s.pool = $1 and s.first_admitted_at is not null and not s.stale
), over as (
    select session_id, ends, restarts, age, staleness_bound from aged where age > staleness_bound
), locked as (
    select s.session_id, o.age, o.staleness_bound, o.restarts from sessions s join over o using (session_id) where o.ends and s.cancel_requested_at is null and ` + liveCondition + `
    order by s.session_id for no key update of s
), asked as (
    update sessions s set stale = true, restarting = l.restarts and (select t.spec->'environment'->>'kind' is distinct from 'external' from tasks t where t.task_id = s.task_id),
           cancel_requested_at = statement_timestamp(), event_seq = s.event_seq + 1,
           cancel_reason = 'stale: ' || l.age || ' behind the policy version, the contract allows ' || l.staleness_bound
    from locked l where s.session_id = l.session_id
    returning s.session_id, s.run_id, s.event_seq, s.cancel_reason
), events as (
    insert into session_events (session_id, seq, run_id, at, kind, detail)
    select session_id, event_seq, run_id, statement_timestamp(), 'cancel_requested', json_build_object('reason', cancel_reason) from asked
), messages as (
    insert into outbox (pool, run_id, session_id, kind, reason, next_at)
    select $1, run_id, session_id, 'cancel', cancel_reason, statement_timestamp() from asked
)
select (select count(*) from over), (select count(*) from asked)`

// judgeStaleness finds the sessions under way that a new version makes older than
// their run's bound, and asks those to end whose contract wants that.
func judgeStaleness(ctx context.Context, tx pgx.Tx, pool string, version int64) (found staleness, err error) {
	err = tx.QueryRow(ctx, judgeStalenessSQL, pool, version).Scan(&found.overBound, &found.ended)
	if err != nil {
		return found, fmt.Errorf("looking for stale sessions: %w", err)
	}
	return found, nil
}
