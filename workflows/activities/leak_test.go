package activities

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/engine/simulated"
	"holdfast/orchestrator/engine/simulated/fault"
	"holdfast/orchestrator/fleet"
	"holdfast/orchestrator/pool"
	"holdfast/router"
	"holdfast/router/sim/instance"
	"holdfast/store"
	"holdfast/store/storetest"
	"holdfast/workflows"
	"holdfast/workflows/task"
)

// memory is a journal that forgets.
type memory struct{}

func (memory) Record(context.Context, []pool.Recorded) error { return nil }

// listed is a registry that never changes.
type listed []store.Instance

func (l listed) Instances(context.Context, string) ([]store.Instance, error) { return l, nil }

// unversioned are a fleet's engines without weight updates.
type unversioned struct{ *fleet.Fleet }

func (unversioned) PolicyVersion(router.InstanceID) int64 { return 0 }

// harnessedSessions releases and dispatches n sessions whose loop the test runs.
func (f *fixture) harnessedSessions(n int) []uuid.UUID {
	f.t.Helper()
	spec := harnessed(40)
	body, err := json.Marshal(spec)
	must(f.t, err)
	given := 0
	batch, _, err := f.SubmitBatch(f.t.Context(), store.BatchSubmission{
		RunID: f.run, IdempotencyKey: "many", BodyHash: func() []byte { sum := sha256.Sum256(body); return sum[:] },
		Next: func() (*task.Spec, error) {
			if given == n {
				return nil, io.EOF
			}
			given++
			return spec, nil
		},
	})
	must(f.t, err)
	_, err = f.DispatchQueued(f.t.Context(), f.run, n)
	must(f.t, err)
	var ids []uuid.UUID
	for query := (store.SessionQuery{RunID: f.run, BatchID: &batch.ID, Limit: 1_000}); ; {
		page, err := f.Sessions(f.t.Context(), query)
		must(f.t, err)
		for i := range page {
			ids = append(ids, page[i].ID)
		}
		if len(page) < query.Limit {
			return ids
		}
		query.After = &ids[len(ids)-1]
	}
}

// failingEngines are two small engines of which each answers some calls with an
// error, drops some streams, and the first crashes and comes back.
func failingEngines(t *testing.T) (servers []*simulated.Server, instances listed) {
	params := instance.Demo()
	params.CapacityBlocks = 600
	for i := range 2 {
		server, err := simulated.New(simulated.Config{Engine: params, TimeScale: 50, Seed: 1, StreamIntervalTokens: 4})
		must(t, err)
		must(t, server.Start("127.0.0.1:0"))
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_ = server.Stop(ctx)
		})
		must(t, server.SetFaults(fault.Settings{
			Seed:     uint64(i + 1),
			Refusals: []fault.Refusal{{Status: 429, Probability: 0.03, RetryAfterSeconds: 0}, {Status: 503, Probability: 0.03}, {Status: 504, Probability: 0.02}},
			Drops:    fault.Drops{Probability: 0.05, AfterTokens: 9},
		}))
		servers = append(servers, server)
		instances = append(instances, store.Instance{
			Pool: "main", ID: fmt.Sprintf("e%d", i), URL: server.URL(), Kind: "simulated", State: store.InstanceActive,
			CapacityBlocks: int64(params.CapacityBlocks), BlockTokens: params.BlockTokens, MaxContextTokens: 4_096,
		})
	}
	return servers, instances
}

// TestNoLedgerLeaks cancels 2,000 requests at random moments, before they are sent,
// while they are held, in prefill, in the stream and after their end, at engines
// that fail: afterwards nothing is counted anywhere.
func TestNoLedgerLeaks(t *testing.T) {
	const requests, parallel = 2_000, 64
	f := newFixture(t)
	ids := f.harnessedSessions(requests)
	servers, instances := failingEngines(t)
	start := time.Now()
	loop, err := pool.New(pool.Config{
		Router: router.DefaultConfig(), Journal: memory{}, TickInterval: 50 * time.Millisecond,
		Now: func() router.Nanos { return router.Nanos(time.Since(start)) + 1 },
	})
	must(t, err)
	engines, err := fleet.New(fleet.Config{
		Pool: "main", Registry: instances, Changed: func() <-chan struct{} { return nil }, Tell: loop.Tell, NewClient: engine.NewClient,
		ObserveInterval: 50 * time.Millisecond, Breaker: engine.BreakerConfig{OpenFor: 100 * time.Millisecond}, Logger: slog.New(slog.DiscardHandler),
	})
	must(t, err)
	running, stop := context.WithCancel(context.Background())
	var parts sync.WaitGroup
	parts.Go(func() { _ = loop.Run(running, nil) })
	parts.Go(func() { _ = engines.Run(running) })
	t.Cleanup(func() { stop(); parts.Wait() })
	a := f.worker(unversioned{engines}, loop, testCheckpointTokens)

	var mu sync.Mutex
	ends := map[string]int{}
	work := make(chan int)
	var workers sync.WaitGroup
	for range parallel {
		workers.Go(func() {
			for n := range work {
				status := oneRequest(a, ids[n], n)
				if err := a.Complete(context.Background(), workflows.Completion{Session: ids[n].String(), Status: status}); err != nil {
					t.Error(err)
					continue // The others go on being taken.
				}
				mu.Lock()
				ends[status]++
				mu.Unlock()
			}
		})
	}
	for n := range requests {
		if n == requests/3 {
			servers[0].Crash(100 * time.Millisecond)
		}
		work <- n
	}
	close(work)
	workers.Wait()
	t.Logf("ended as %v", ends)
	if ends["cancelled"] < requests/5 || ends["completed"] < requests/5 {
		t.Errorf("ended as %v: too little of one kind was tried", ends)
	}
	view, err := loop.View(t.Context())
	must(t, err)
	if view.HeldTotal != 0 {
		t.Errorf("%d turns are held", view.HeldTotal)
	}
	for i := range view.Report.Instances {
		if in := &view.Report.Instances[i]; in.Protected != 0 || in.Pending != 0 || in.ReservedBlocks != 0 || in.LiveBlocks != 0 || in.QueueSeconds != 0 {
			t.Errorf("the router counts at %s: %+v", in.Instance, in)
		}
	}
	for _, status := range engines.Statuses() {
		if status.Sessions != 0 || status.Running != 0 {
			t.Errorf("the fleet counts at %s: %d sessions, %d running", status.Instance, status.Sessions, status.Running)
		}
	}
	for i, server := range servers {
		idle := time.After(storetest.Patience)
		for len(server.Requests()) > 0 {
			select {
			case <-idle:
				t.Fatalf("engine %d works on %d requests for nobody", i, len(server.Requests()))
			case <-time.After(10 * time.Millisecond): // An engine notices a closed connection a little later.
			}
		}
	}
	backlog, err := f.Backlog(t.Context(), f.run)
	must(t, err)
	for _, class := range backlog {
		if class.Released != requests || class.Ended != requests || class.Backlog != 0 || f.checkpointRows() != 0 {
			t.Errorf("the store counts %+v and %d checkpoints", class, f.checkpointRows())
		}
	}
}

// oneRequest makes a request that is cancelled at a moment drawn by its number.
func oneRequest(a *Activities, id uuid.UUID, n int) (status string) {
	random := rand.New(rand.NewPCG(7, uint64(n)))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	progress := workflows.HarnessProgress{OnWait: func(string) {}}
	switch random.IntN(5) {
	case 0:
		cancel() // Before it is asked for.
	case 1:
		// In a hold, in the queue, in prefill: wherever it is by then.
		timer := time.AfterFunc(time.Duration(random.IntN(20_000))*time.Microsecond, cancel)
		defer timer.Stop()
	case 2:
		progress.OnWait = func(string) { cancel() }
	case 3:
		after := 1 + random.IntN(40)
		progress.OnTokens = func(ids []int32, _ []float32) {
			if len(ids) >= after {
				cancel()
			}
		}
	}
	prompt := make([]int32, 16+random.IntN(1_500))
	for i := range prompt {
		prompt[i] = int32(n + i)
	}
	_, err := a.HarnessTurn(ctx, id, workflows.HarnessCall{RequestID: "r", Append: prompt}, progress)
	var failed *workflows.CallFailedError
	switch {
	case err == nil:
		return router.Completed.String()
	case errors.As(err, &failed):
		return router.Failed.String()
	}
	return router.Cancelled.String()
}
