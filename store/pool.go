package store

import "context"

// AcquirePool makes owner the owner of the pool for ttlSeconds, if it has none,
// its lease has run out, or it is the owner already. Each acquisition has a new,
// greater epoch, which fences off all earlier ones. ok is false while another
// owner holds the lease. The pool is created if it is new.
func (s *Store) AcquirePool(ctx context.Context, pool, owner string, ttlSeconds float64) (epoch int64, ok bool, err error) {
	return 0, false, errUnfinished
}

// RenewPool extends the lease, or returns ErrFenced if epoch is not the current one.
func (s *Store) RenewPool(ctx context.Context, pool string, epoch int64, ttlSeconds float64) error {
	return errUnfinished
}

// ReleasePool ends the lease so that another owner need not wait for it to run
// out. If epoch is not the current one, nothing happens.
func (s *Store) ReleasePool(ctx context.Context, pool string, epoch int64) error {
	return errUnfinished
}

// Pools lists all pools by name.
func (s *Store) Pools(ctx context.Context) ([]Pool, error) {
	return nil, errUnfinished
}

// Pool is a set of instances that serve one model.
type Pool struct {
	Name          string
	PolicyVersion int64
	// Owner is empty when no one holds the lease.
	Owner string
	Epoch int64
}

// PolicyVersion returns the pool's current policy version, or ErrNotFound.
func (s *Store) PolicyVersion(ctx context.Context, pool string) (int64, error) {
	return 0, errUnfinished
}

// AdvancePolicyVersion sets the pool's policy version, which never goes back: a
// lower one than the current is *ConflictError, the same one changes nothing.
func (s *Store) AdvancePolicyVersion(ctx context.Context, pool string, version int64) error {
	return errUnfinished
}
