package activities

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"holdfast/orchestrator/pool"
	"holdfast/router"
)

// ledger is a journal that keeps nothing.
type ledger struct{}

func (ledger) Record(context.Context, []pool.Recorded) error { return nil }

// realRouter is a pool's loop with two large instances.
func realRouter(t *testing.T) *pool.Loop {
	t.Helper()
	var mu sync.Mutex
	now := router.Nanos(1)
	loop, err := pool.New(pool.Config{
		Router: router.DefaultConfig(), Journal: ledger{}, TickInterval: time.Hour,
		Now: func() router.Nanos {
			mu.Lock()
			defer mu.Unlock()
			now += int64(time.Millisecond)
			return now
		},
	})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	var joined []router.Event
	for _, id := range []router.InstanceID{"w1", "w2"} {
		joined = append(joined, &router.InstanceJoined{Instance: id, CapacityBlocks: 100_000, BlockTokens: 16, MaxContextTokens: 1 << 20, PrefillTokensPerSecond: 10_000})
	}
	go func() {
		defer close(ended)
		_ = loop.Run(ctx, joined)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return loop
}

// TestRouterFollowsACutTurn: the real router takes a cut turn's next call as the same
// session's at the same instance, places a broken one elsewhere, and knows its whole
// context in the end.
func TestRouterFollowsACutTurn(t *testing.T) {
	const wanted = 160
	f := newFixture(t)
	for name, test := range map[string]struct {
		end       ending
		instances int
	}{"cut": {endsCut, 1}, "broken": {endsBroken, 2}} {
		t.Run(name, func(t *testing.T) {
			loop := realRouter(t)
			e := newEngines(t, step{tokens: 100, end: test.end})
			a := f.worker(e, loop, testCheckpointTokens)
			id := f.session(single(wanted))
			reply, err := a.turn(t.Context(), id, 0, &pulse{})
			parsed(t, reply, err)
			visited := map[router.InstanceID]bool{}
			view, err := loop.View(t.Context())
			must(t, err)
			for _, decision := range view.Recent {
				if decision.Kind == router.Admit {
					visited[decision.Instance] = true
				}
			}
			if len(visited) != test.instances || len(view.Held) != 0 {
				t.Errorf("visited %v, held %v", visited, view.Held)
			}
			if want := "context=163"; !strings.Contains(view.Text, want) {
				t.Errorf("the router does not know %s:\n%s", want, view.Text)
			}
			sample := f.end(a, id, reply)
			checkSample(t, e, &sample, wanted)
			view, err = loop.View(t.Context())
			must(t, err)
			if view.Report.Sessions != 0 {
				t.Errorf("%d sessions are left in the router", view.Report.Sessions)
			}
		})
	}
}
