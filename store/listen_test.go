package store_test

import (
	"context"
	"testing"
	"time"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
)

func woken(t *testing.T, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(storetest.Patience):
		t.Fatalf("%s: nobody was woken", what)
	}
}

func asleep(t *testing.T, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
		t.Errorf("%s: woken for nothing", what)
	default:
	}
}

func TestListenerWakesTheRightWaiters(t *testing.T) {
	f := newFixture(t, 100)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	l, err := f.Listen(ctx)
	must(t, err)

	dispatch, outbox := l.WaitFor(store.DispatchTopic()), l.WaitFor(store.OutboxTopic())
	samples, instances := l.WaitFor(store.SamplesTopic(f.run.ID)), l.WaitFor(store.InstancesTopic(pool))
	f.submit("one", repeat("agent", 2)...)
	woken(t, "a batch", dispatch)
	asleep(t, "a batch", outbox)
	ids := f.dispatch()
	woken(t, "a dispatch", outbox)
	asleep(t, "a dispatch", samples)

	dispatch = l.WaitFor(store.DispatchTopic())
	second := l.WaitFor(store.SamplesTopic(f.run.ID))
	f.end(ids[0], router.Completed)
	woken(t, "an ending", samples)
	woken(t, "an ending, second waiter", second)
	woken(t, "an ending", dispatch)

	// A registration that repeats the known one is a heartbeat and wakes no one;
	// the ending after it shows that its notification would have come by now.
	samples = l.WaitFor(store.SamplesTopic(f.run.ID))
	_, err = f.RegisterInstance(ctx, instance("w1"))
	must(t, err)
	f.end(ids[1], router.Failed)
	woken(t, "another ending", samples)
	asleep(t, "a repeated registration", instances)
	must(t, f.DrainInstance(ctx, pool, "w1", true))
	woken(t, "a drain", instances)

	// A lost connection is replaced, and whoever waits is told to look.
	outbox = l.WaitFor(store.OutboxTopic())
	f.exec(`select pg_terminate_backend(pid) from pg_stat_activity where query = 'listen holdfast' and datname = current_database()`)
	woken(t, "a lost connection", outbox)
	instances = l.WaitFor(store.InstancesTopic(pool))
	must(t, f.DrainInstance(ctx, pool, "w1", false))
	woken(t, "a change after the reconnection", instances)

	outbox = l.WaitFor(store.OutboxTopic())
	cancel()
	woken(t, "the end", outbox)
}

// TestWaiterLooksAfterCommit: who is woken sees what it was woken for.
func TestWaiterLooksAfterCommit(t *testing.T) {
	f := newFixture(t, 100)
	l, err := f.Listen(t.Context())
	must(t, err)
	f.submit("one", repeat("agent", 20)...)
	ids := f.dispatch()
	go func() {
		for _, id := range ids {
			if _, _, err := f.EndSession(context.WithoutCancel(t.Context()), store.Ending{SessionID: id, Status: router.Completed}); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	var cursor store.Cursor
	for read := 0; read < len(ids); {
		changed := l.WaitFor(store.SamplesTopic(f.run.ID))
		page := f.samples(store.SampleQuery{After: cursor})
		read, cursor = read+len(page.Samples), page.Next
		if len(page.Samples) == 0 {
			woken(t, "a sample", changed)
		}
	}
}
