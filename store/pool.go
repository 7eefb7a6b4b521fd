package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Pool is a set of instances that serve one model.
type Pool struct {
	Name          string
	PolicyVersion int64
	// Owner is empty when no one holds the lease.
	Owner string
	Epoch int64
}

// Lease is the hold of an owner on a pool. Each renewal changes ExpiresAt.
type Lease struct {
	Epoch int64
	// ExpiresAt is by the database's clock, in microseconds since the Unix epoch.
	ExpiresAt int64
}

const (
	ensurePoolSQL = `insert into pools (pool) values ($1) on conflict do nothing`

	selectPoolsSQL = `
select p.pool, p.policy_version,
       case when o.expires_at > clock_timestamp() then o.owner else '' end, coalesce(o.epoch, 0)
from pools p left join pool_owners o using (pool) order by p.pool`

	// The clock is read after the row lock was waited for, hence clock_timestamp.
	acquirePoolSQL = `
insert into pool_owners as o (pool, owner, epoch, expires_at)
values ($1, $2, 1, clock_timestamp() + make_interval(secs => $3))
on conflict (pool) do update
set owner = excluded.owner, epoch = o.epoch + 1, expires_at = clock_timestamp() + make_interval(secs => $3)
where o.owner = excluded.owner or o.expires_at <= clock_timestamp()
returning epoch`

	renewPoolSQL = `
update pool_owners set expires_at = clock_timestamp() + make_interval(secs => $3) where pool = $1 and epoch = $2`

	releasePoolSQL = `
update pool_owners set expires_at = least(expires_at, clock_timestamp()) where pool = $1 and epoch = $2`

	selectLeaseSQL = `
select epoch, (extract(epoch from expires_at) * 1000000)::bigint from pool_owners where pool = $1`

	selectPolicyVersionSQL = `select policy_version from pools where pool = $1`
)

func checkPoolName(path, pool string) error {
	if !classPattern.MatchString(pool) {
		return &FieldError{Path: path, Problem: fmt.Sprintf("must be 1 to 64 letters, digits, dots, dashes or underscores, is %q", pool)}
	}
	return nil
}

// AcquirePool makes owner the owner of the pool for ttlSeconds, if it has none,
// its lease has run out, or it is the owner already. Each acquisition has a new,
// greater epoch, which fences off all earlier ones. ok is false while another
// owner holds the lease. The pool is created if it is new.
func (s *Store) AcquirePool(ctx context.Context, pool, owner string, ttlSeconds float64) (epoch int64, ok bool, err error) {
	if err := checkPoolName("pool", pool); err != nil {
		return 0, false, err
	}
	err = s.write(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, ensurePoolSQL, pool); err != nil {
			return err
		}
		return tx.QueryRow(ctx, acquirePoolSQL, pool, owner, ttlSeconds).Scan(&epoch)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("acquiring pool %s: %w", pool, err)
	}
	return epoch, true, nil
}

// RenewPool extends the lease, or returns ErrFenced if epoch is not the current one.
func (s *Store) RenewPool(ctx context.Context, pool string, epoch int64, ttlSeconds float64) error {
	tag, err := s.pool.Exec(ctx, renewPoolSQL, pool, epoch, ttlSeconds)
	if err == nil && tag.RowsAffected() == 0 {
		err = ErrFenced
	}
	if err != nil {
		return fmt.Errorf("renewing pool %s: %w", pool, err)
	}
	return nil
}

// ReleasePool ends the lease so that another owner need not wait for it to run
// out. If epoch is not the current one, nothing happens.
func (s *Store) ReleasePool(ctx context.Context, pool string, epoch int64) error {
	if _, err := s.pool.Exec(ctx, releasePoolSQL, pool, epoch); err != nil {
		return fmt.Errorf("releasing pool %s: %w", pool, err)
	}
	return nil
}

// PoolLease returns the pool's lease, also one that has run out, or ErrNotFound for a
// pool that never had an owner.
func (s *Store) PoolLease(ctx context.Context, pool string) (lease Lease, err error) {
	err = s.pool.QueryRow(ctx, selectLeaseSQL, pool).Scan(&lease.Epoch, &lease.ExpiresAt)
	return lease, found(err, "reading the lease of pool", pool)
}

// Pools lists all pools by name.
func (s *Store) Pools(ctx context.Context) ([]Pool, error) {
	rows, err := s.pool.Query(ctx, selectPoolsSQL)
	if err != nil {
		return nil, fmt.Errorf("listing pools: %w", err)
	}
	pools, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (pool Pool, err error) {
		err = row.Scan(&pool.Name, &pool.PolicyVersion, &pool.Owner, &pool.Epoch)
		return pool, err
	})
	if err != nil {
		return nil, fmt.Errorf("listing pools: %w", err)
	}
	return pools, nil
}

// PolicyVersion returns the pool's current policy version, or ErrNotFound.
func (s *Store) PolicyVersion(ctx context.Context, pool string) (int64, error) {
	var version int64
	err := s.pool.QueryRow(ctx, selectPolicyVersionSQL, pool).Scan(&version)
	return version, found(err, "reading the policy version of pool", pool)
}
