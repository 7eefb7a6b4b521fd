package fleet

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/engine/simulated"
	"holdfast/orchestrator/engine/simulated/fault"
	"holdfast/router"
	"holdfast/router/sim/instance"
	"holdfast/store"
)

// registry is a list of instances that tells when it changes.
type registry struct {
	mu      sync.Mutex
	list    []store.Instance
	changed chan struct{}
}

func (r *registry) Instances(context.Context, string) ([]store.Instance, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]store.Instance(nil), r.list...), nil
}

func (r *registry) wait() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.changed
}

func (r *registry) set(list ...store.Instance) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = list
	close(r.changed)
	r.changed = make(chan struct{})
}

// world is a fleet with what it tells the router.
type world struct {
	*Fleet
	registry *registry
	events   chan router.Event
	ctx      context.Context
}

func newWorld(t *testing.T) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	w := &world{registry: &registry{changed: make(chan struct{})}, events: make(chan router.Event, 1_000), ctx: ctx}
	var err error
	w.Fleet, err = New(Config{
		Pool: "p", Registry: w.registry, Changed: w.registry.wait, NewClient: engine.NewClient,
		Tell: func(ctx context.Context, e router.Event) error {
			select {
			case w.events <- e:
				return nil
			case <-ctx.Done(): // the test reads no more
				return ctx.Err()
			}
		},
		ObserveInterval: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
		// Long enough for a test that looks at an open one on a busy machine.
		Breaker: engine.BreakerConfig{OpenFor: 4 * time.Second},
	})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("the fleet ended with %v", err)
		}
	})
	return w
}

func newEngine(t *testing.T) (*simulated.Server, store.Instance) {
	t.Helper()
	server, err := simulated.New(simulated.Config{Engine: instance.Demo(), TimeScale: 1_000})
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = server.Stop(ctx) // which aborts what still runs
	})
	return server, store.Instance{Pool: "p", ID: "e1", URL: server.URL(), Kind: "simulated", CapacityBlocks: 1_000, BlockTokens: 16, MaxContextTokens: 4_096, State: store.InstanceActive}
}

// await returns the next event of a type that satisfies the condition.
func await[E router.Event](t *testing.T, w *world, what string, ok func(E) bool) E {
	t.Helper()
	for {
		select {
		case event := <-w.events:
			if e, is := event.(E); is && ok(e) {
				return e
			}
		case <-w.ctx.Done():
			t.Fatalf("still waiting for %s", what)
		}
	}
}

func TestInstanceJoinsAndItsSessionsAreSeen(t *testing.T) {
	w := newWorld(t)
	_, in := newEngine(t)
	w.registry.set(in)
	joined := await(t, w, "the instance to join", func(e *router.InstanceJoined) bool { return e.Instance == "e1" })
	if joined.CapacityBlocks != 1_000 || joined.BlockTokens != 16 || w.MaxContextTokens() != 4_096 {
		t.Fatalf("joined as %+v, context limit %d", joined, w.MaxContextTokens())
	}
	session := router.SessionID{1}
	result, err := w.Generate(w.ctx, "e1", session, engine.Request{
		RequestID: "r", SessionID: "s", Prompt: make([]int32, 100), MaxTokens: 7, MinTokens: 7, IgnoreEOS: true, WithLogprobs: true, DataParallelRank: -1,
	}, nil)
	if err != nil || len(result.OutputIDs) != 7 {
		t.Fatalf("generated %d tokens, %v", len(result.OutputIDs), err)
	}
	await(t, w, "a snapshot with 107 tokens of an idle session", func(e *router.Snapshot) bool {
		return len(e.Sessions) == 1 && e.Sessions[0].Session == session && e.Sessions[0].Tokens == 107 && !e.Sessions[0].Running
	})
	w.Forget(session)
	await(t, w, "a snapshot without the session", func(e *router.Snapshot) bool { return len(e.Sessions) == 0 })
}

// TestNoContextIsLargerThanTheCache: engines may tell more.
func TestNoContextIsLargerThanTheCache(t *testing.T) {
	w := newWorld(t)
	_, in := newEngine(t)
	in.CapacityBlocks = 100
	w.registry.set(in)
	await(t, w, "the instance to join", func(*router.InstanceJoined) bool { return true })
	if in.MaxContextTokens <= 1_600 || w.MaxContextTokens() != 1_600 {
		t.Errorf("with a cache of 1,600 tokens and a stated limit of %d the limit is %d", in.MaxContextTokens, w.MaxContextTokens())
	}
}

func TestRefusedConnectionTakesTheInstanceOutAtOnce(t *testing.T) {
	w := newWorld(t)
	server, in := newEngine(t)
	w.registry.set(in)
	await(t, w, "the instance to join", func(*router.InstanceJoined) bool { return true })
	if err := server.Stop(w.ctx); err != nil {
		t.Fatal(err)
	}
	_, err := w.Generate(w.ctx, "e1", router.SessionID{1}, engine.Request{Prompt: []int32{1}, MaxTokens: 1, DataParallelRank: -1}, nil)
	var failed *engine.Error
	if !errors.As(err, &failed) || failed.Class != engine.RetryElsewhere {
		t.Fatalf("a call to a dead engine: %v, want an error to retry elsewhere", err)
	}
	await(t, w, "the instance to leave", func(e *router.InstanceLeft) bool { return e.Instance == "e1" })
}

func TestDrainingAndRemovalFollowTheRegistry(t *testing.T) {
	w := newWorld(t)
	_, in := newEngine(t)
	w.registry.set(in)
	await(t, w, "the instance to join", func(*router.InstanceJoined) bool { return true })
	in.State = store.InstanceDraining
	w.registry.set(in)
	await(t, w, "draining", func(e *router.InstanceDraining) bool { return e.Draining })
	in.State = store.InstanceActive
	w.registry.set(in)
	await(t, w, "the end of draining", func(e *router.InstanceDraining) bool { return !e.Draining })
	in.Expired = true
	w.registry.set(in)
	await(t, w, "an expired instance to leave", func(*router.InstanceLeft) bool { return true })
	in.Expired = false
	w.registry.set(in)
	await(t, w, "a renewed instance to join", func(*router.InstanceJoined) bool { return true })
	w.registry.set()
	await(t, w, "a removed instance to leave", func(*router.InstanceLeft) bool { return true })
	if w.MaxContextTokens() != 0 {
		t.Fatal("a removed instance still counts")
	}
}

func TestEngineThatKeepsFailingLeavesAndIsTriedAgain(t *testing.T) {
	w := newWorld(t)
	server, in := newEngine(t)
	w.registry.set(in)
	await(t, w, "the instance to join", func(*router.InstanceJoined) bool { return true })
	if err := server.SetFaults(fault.Settings{Refusals: []fault.Refusal{{Status: 500, Next: 5}}}); err != nil {
		t.Fatal(err)
	}
	call := func() error {
		_, err := w.Generate(w.ctx, "e1", router.SessionID{1}, engine.Request{RequestID: "r", Prompt: []int32{1}, MaxTokens: 1, DataParallelRank: -1}, nil)
		return err
	}
	for range 5 {
		var failed *engine.Error
		if err := call(); !errors.As(err, &failed) || failed.StatusCode != 500 {
			t.Fatalf("a failing engine answered %v", err)
		}
	}
	await(t, w, "the instance to leave", func(*router.InstanceLeft) bool { return true })
	if err := call(); !errors.Is(err, engine.ErrNotCalled) {
		t.Fatalf("a call to an engine that is left alone: %v", err)
	}
	await(t, w, "the instance to join again", func(*router.InstanceJoined) bool { return true })
	if err := call(); err != nil {
		t.Fatalf("the probe: %v", err)
	}
	if status := w.Statuses()[0]; status.Breaker.State != engine.BreakerClosed || status.Breaker.Opened != 1 {
		t.Fatalf("afterwards %+v", status)
	}
}

func TestAnyInstanceThatIsUpTokenises(t *testing.T) {
	w := newWorld(t)
	if _, err := w.Tokenize(w.ctx, engine.TokenizeRequest{Text: "x"}); !errors.Is(err, engine.ErrNotCalled) {
		t.Fatalf("a fleet without engines tokenised: %v", err)
	}
	_, in := newEngine(t)
	gone := in
	gone.ID, gone.URL = "e0", "http://127.0.0.1:1"
	w.registry.set(gone, in)
	await(t, w, "the instance to join", func(e *router.InstanceJoined) bool { return e.Instance == "e1" })
	ids, err := w.Tokenize(w.ctx, engine.TokenizeRequest{Text: "the answer is 42"})
	if err != nil || len(ids) == 0 {
		t.Fatalf("tokenised as %v, %v", ids, err)
	}
	if text, err := w.Detokenize(w.ctx, ids, false); err != nil || text != "the answer is 42" {
		t.Fatalf("came back as %q, %v", text, err)
	}
	var failed *engine.Error
	if _, err := w.Detokenize(w.ctx, []int32{1 << 30}, false); !errors.As(err, &failed) || failed.Class != engine.FailTurn {
		t.Fatalf("an id beyond the vocabulary got %v", err)
	}
}
