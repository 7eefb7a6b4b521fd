package service

import (
	"context"
	"sync"
	"time"

	"holdfast/orchestrator/pool"
	"holdfast/store"
)

// ownership is what this process knows of who owns the pool. Callers wait at it while
// nobody does, as after a restart; while another process does, they are told so at once.
type ownership struct {
	mu sync.Mutex
	// mine is what exists while this process owns the pool.
	mine *owned
	// lease is another process's as it was last seen to change, at seen. It is rival if
	// it changed between two looks: a dead owner's lease stands still until it runs out.
	lease store.Lease
	seen  time.Time
	rival bool
	// changed is closed when any of this changes.
	changed chan struct{}
}

func newOwnership() *ownership { return &ownership{changed: make(chan struct{})} }

// current is nil while this process does not own the pool.
func (o *ownership) current() *owned {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.mine
}

// set says what exists from now on while this process owns the pool, or nil, and forgets
// what it saw of another owner.
func (o *ownership) set(mine *owned) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mine, o.lease, o.rival = mine, store.Lease{}, false
	o.tell()
}

// look takes in another process's lease, which lasts ttl from each renewal. An owner
// renews it three times as often; one that lets half of it pass may be dead.
func (o *ownership) look(lease store.Lease, ttl time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	switch {
	case lease != o.lease:
		o.rival = o.lease != store.Lease{}
		o.lease, o.seen = lease, now
	case o.rival && now.Sub(o.seen) > ttl/2:
		o.rival = false
	default:
		return
	}
	o.tell()
}

func (o *ownership) tell() {
	close(o.changed)
	o.changed = make(chan struct{})
}

// await returns what exists while this process owns the pool, as soon as it does. It
// returns pool.ErrNotOwner when another process is seen to own it or patience has
// passed, and the context's error when that ends.
func (o *ownership) await(ctx context.Context, patience time.Duration) (*owned, error) {
	if mine := o.current(); mine != nil {
		return mine, nil
	}
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	for {
		o.mu.Lock()
		mine, rival, changed := o.mine, o.rival, o.changed
		o.mu.Unlock()
		switch {
		case mine != nil:
			return mine, nil
		case rival:
			return nil, pool.ErrNotOwner
		}
		select {
		case <-changed:
		case <-timeout.C:
			return nil, pool.ErrNotOwner
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
