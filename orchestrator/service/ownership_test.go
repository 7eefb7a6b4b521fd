package service

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/orchestrator/pool"
	"holdfast/store"
)

const (
	leaseTTL = 9 * time.Second
	patient  = 30 * time.Second
)

// lease is the n-th renewal of another process's lease.
func lease(n int64) store.Lease { return store.Lease{Epoch: 4, ExpiresAt: 1_000 + n} }

// awaiting gives what a caller of await gets, and after how long.
func awaiting(t *testing.T, o *ownership) (got func() (*owned, time.Duration, error)) {
	t.Helper()
	var (
		mine  *owned
		err   error
		took  time.Duration
		start = time.Now()
		done  = make(chan struct{})
	)
	go func() {
		defer close(done)
		mine, err = o.await(t.Context(), patient)
		took = time.Since(start)
	}()
	return func() (*owned, time.Duration, error) { <-done; return mine, took, err }
}

func TestCallersWaitForAnOwnerWhileThereIsNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOwnership()
		got := awaiting(t, o)
		// A dead owner's lease stands still, however often one looks.
		for range 5 {
			o.look(lease(0), leaseTTL)
			time.Sleep(2 * time.Second)
		}
		mine := &owned{epoch: 5}
		o.set(mine)
		if served, took, err := got(); served != mine || err != nil || took != 10*time.Second {
			t.Fatalf("%+v, %v after %s", served, err, took)
		}
		o.set(nil)
		if o.current() != nil {
			t.Fatal("owned after the end")
		}
		if served, took, err := awaiting(t, o)(); served != nil || !errors.Is(err, pool.ErrNotOwner) || took != patient {
			t.Fatalf("after the term: %+v, %v after %s", served, err, took)
		}
	})
}

func TestCallersAreToldAtOnceOfAnotherOwnerUntilItFallsSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOwnership()
		got := awaiting(t, o)
		o.look(lease(0), leaseTTL)
		time.Sleep(2 * time.Second)
		o.look(lease(1), leaseTTL)
		if _, took, err := got(); !errors.Is(err, pool.ErrNotOwner) || took != 2*time.Second {
			t.Fatalf("%v after %s", err, took)
		}
		// It renews every 3 s and is looked at every 2 s: it is known to live throughout.
		for n := range int64(4) {
			time.Sleep(2 * time.Second)
			o.look(lease(1+(n+1)*2/3), leaseTTL)
			if _, took, err := awaiting(t, o)(); !errors.Is(err, pool.ErrNotOwner) || took != 0 {
				t.Fatalf("look %d: %v after %s", n, err, took)
			}
		}
		// It dies; its lease runs out, and this process takes over.
		last := o.lease
		for range 3 {
			time.Sleep(2 * time.Second)
			o.look(last, leaseTTL)
		}
		got = awaiting(t, o)
		time.Sleep(2 * time.Second)
		mine := &owned{epoch: 5}
		o.set(mine)
		if served, took, err := got(); served != mine || err != nil || took != 2*time.Second {
			t.Fatalf("%+v, %v after %s", served, err, took)
		}
	})
}

func TestCallersWaitForThisProcessOnceItHasThePool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOwnership()
		o.look(lease(0), leaseTTL)
		o.look(lease(1), leaseTTL)
		o.set(nil) // the other one gave it up, and this one rebuilds the router
		got := awaiting(t, o)
		time.Sleep(2 * time.Second)
		mine := &owned{epoch: 5}
		o.set(mine)
		if served, took, err := got(); served != mine || err != nil || took != 2*time.Second {
			t.Fatalf("%+v, %v after %s", served, err, took)
		}
	})
}

func TestACallerThatLeavesWaitsForNoOwner(t *testing.T) {
	ctx, leave := context.WithCancel(t.Context())
	leave()
	if _, err := newOwnership().await(ctx, patient); !errors.Is(err, context.Canceled) {
		t.Fatalf("%v", err)
	}
}
