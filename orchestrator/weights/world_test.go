package weights

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"holdfast/orchestrator/engine"
	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
)

func TestMain(m *testing.M) { os.Exit(storetest.Main(m)) }

const pool = "main"

// fake is an engine's control that notes its calls and refuses as told.
type fake struct {
	mu     sync.Mutex
	log    []string
	label  string
	paused bool
	refuse map[string]func(ctx context.Context) error
}

func (f *fake) call(ctx context.Context, name, detail string) error {
	f.mu.Lock()
	f.log = append(f.log, strings.TrimSpace(name+" "+detail))
	refuse := f.refuse[name]
	f.mu.Unlock()
	if refuse != nil {
		return refuse(ctx)
	}
	return nil
}

func (f *fake) Pause(ctx context.Context, mode engine.PauseMode) error {
	return f.pausing(f.call(ctx, "pause", mode.String()), true)
}
func (f *fake) Resume(ctx context.Context) error     { return f.pausing(f.call(ctx, "resume", ""), false) }
func (f *fake) ResetCache(ctx context.Context) error { return f.call(ctx, "reset", "") }
func (f *fake) SetWeightVersion(ctx context.Context, version string) error {
	if err := f.call(ctx, "name", version); err != nil {
		return err
	}
	f.setLabel(version)
	return nil
}
func (f *fake) WeightVersion(context.Context) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.label, nil
}

// pausing notes whether the engine is paused after a call that succeeded.
func (f *fake) pausing(err error, paused bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil {
		f.paused = paused
	}
	return err
}

// restart is what a process that comes back has forgotten.
func (f *fake) restart() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.paused, f.label = false, ""
}

func (f *fake) isPaused() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.paused
}

func (f *fake) setLabel(label string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.label = label
}

// refuses makes a call fail from now on; nil lets it succeed again.
func (f *fake) refuses(name string, refuse func(context.Context) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refuse[name] = refuse
}

func (f *fake) calls() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.log)
}

func always(class engine.Class, message string) func(context.Context) error {
	return func(context.Context) error { return &engine.Error{Class: class, StatusCode: 400, Message: message} }
}

// hang blocks until the caller gives up, after it has said that it was called.
func hang(called chan<- struct{}) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case called <- struct{}{}:
		default: // it has been said before
		}
		<-ctx.Done()
		return &engine.Error{Class: engine.Cancelled, Err: ctx.Err()}
	}
}

// world is a pool with engines, a router that writes down what it is told, and one
// coordinator at a time.
type world struct {
	*store.Store
	t        *testing.T
	ctx      context.Context
	listener *store.Listener
	epoch    int64
	limits   Limits
	c        *Coordinator
	stop     func() error

	mu      sync.Mutex
	engines map[router.InstanceID]*fake
	cleared map[router.InstanceID]int
	told    []router.Event
	heard   chan struct{} // closed and replaced when the router is told something
}

// newWorld has engines e1 to en, which answer.
func newWorld(t *testing.T, n int) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	t.Cleanup(cancel)
	w := &world{
		Store: storetest.New(t), t: t, ctx: ctx, engines: map[router.InstanceID]*fake{}, cleared: map[router.InstanceID]int{}, heard: make(chan struct{}),
		limits: Limits{CommitTimeout: 10 * time.Second, ResumeTimeout: 10 * time.Second, GoneAfter: time.Hour, SettleTimeout: time.Hour,
			LookInterval: 20 * time.Millisecond, RetryInterval: time.Millisecond},
	}
	var err error
	if w.listener, err = w.Listen(ctx); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		w.register(fmt.Sprintf("e%d", i+1))
	}
	w.own()
	return w
}

func (w *world) register(id string) *fake {
	w.t.Helper()
	f := &fake{refuse: map[string]func(context.Context) error{}}
	w.mu.Lock()
	w.engines[router.InstanceID(id)] = f
	w.mu.Unlock()
	_, err := w.RegisterInstance(w.ctx, store.Instance{Pool: pool, ID: id, URL: "http://127.0.0.1:1/" + id, Kind: "vllm", CapacityBlocks: 10, BlockTokens: 16, MaxContextTokens: 100})
	if err != nil {
		w.t.Fatal(err)
	}
	return f
}

// own takes the pool over and starts a coordinator, as a new process would.
func (w *world) own() {
	w.t.Helper()
	epoch, ok, err := w.AcquirePool(w.ctx, pool, "owner", 60)
	if err != nil || !ok {
		w.t.Fatal(ok, err)
	}
	w.epoch = epoch
	listed, err := w.Instances(w.ctx, pool)
	if err != nil {
		w.t.Fatal(err)
	}
	versions := map[router.InstanceID]int64{}
	for _, in := range listed {
		versions[router.InstanceID(in.ID)] = in.PolicyVersion
	}
	w.c, err = New(Config{
		Pool: pool, Epoch: epoch, Store: w.Store, Router: w.router(), Engines: w, Versions: versions, Limits: w.limits, Logger: slog.New(slog.DiscardHandler),
		Changed: func() <-chan struct{} { return w.listener.WaitFor(store.WeightsTopic(pool)) },
	})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.ctx)
	ended := make(chan error, 1)
	c := w.c
	go func() { ended <- c.Run(ctx) }()
	w.stop = sync.OnceValue(func() error { cancel(); return <-ended })
	w.t.Cleanup(func() { _ = w.stop() })
	for id := range w.engines {
		w.join(string(id))
	}
}

// teller is a router of one term of ownership.
type teller struct{ w *world }

func (w *world) router() teller { return teller{w} }

func (t teller) Tell(_ context.Context, event router.Event) error {
	t.w.mu.Lock()
	defer t.w.mu.Unlock()
	t.w.told = append(t.w.told, event)
	close(t.w.heard)
	t.w.heard = make(chan struct{})
	return nil
}

func (w *world) Controller(id router.InstanceID) (engine.Controller, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f := w.engines[id]
	return f, f != nil
}

func (w *world) CacheCleared(_ context.Context, id router.InstanceID, _ int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cleared[id]++
}

func (w *world) join(id string) {
	w.t.Helper()
	if err := w.c.Tell(w.ctx, &router.InstanceJoined{Instance: router.InstanceID(id), CapacityBlocks: 10, BlockTokens: 16}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) leave(id string) {
	w.t.Helper()
	if err := w.c.Tell(w.ctx, &router.InstanceLeft{Instance: router.InstanceID(id)}); err != nil {
		w.t.Fatal(err)
	}
}

// observed is the state of an instance's observation as the router was told last.
func (w *world) observed(id router.InstanceID) router.Observability {
	w.mu.Lock()
	defer w.mu.Unlock()
	state := router.Fresh
	for _, event := range w.told {
		if e, ok := event.(*router.ObservabilityChanged); ok && e.Instance == id {
			state = e.State
		}
	}
	return state
}

// resets are the policy versions of the resets that the router was told of.
func (w *world) resets(id router.InstanceID) (versions []int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, event := range w.told {
		if e, ok := event.(*router.InstanceReset); ok && e.Instance == id {
			versions = append(versions, e.PolicyVersion)
		}
	}
	return versions
}

// eventually waits for something that changes when the router is told or an
// update is written.
func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	for {
		w.mu.Lock()
		heard := w.heard
		w.mu.Unlock()
		changed := w.listener.WaitFor(store.WeightsTopic(pool))
		if ok() {
			return
		}
		select {
		case <-heard:
		case <-changed:
		case <-w.ctx.Done():
			w.t.Fatalf("still waiting for %s", what)
		}
	}
}

func (w *world) begin(version int64, mode string, change func(*store.NewWeightUpdate)) store.WeightUpdate {
	w.t.Helper()
	ask := store.NewWeightUpdate{Pool: pool, PolicyVersion: version, Mode: mode, Cache: store.CacheReset, Control: store.ControlManage, PauseTimeoutSeconds: 30}
	if change != nil {
		change(&ask)
	}
	u, err := w.BeginWeightUpdate(w.ctx, ask)
	if err != nil {
		w.t.Fatal(err)
	}
	return u
}

func (w *world) commit(version int64, cache store.WeightCache) {
	w.t.Helper()
	if _, err := w.CommitWeightUpdate(w.ctx, pool, version, cache); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) cancel(version int64) {
	w.t.Helper()
	if _, err := w.CancelWeightUpdate(w.ctx, pool, version); err != nil {
		w.t.Fatal(err)
	}
}

// await returns the update once it is in that state.
func (w *world) await(version int64, state store.WeightState) (u store.WeightUpdate) {
	w.t.Helper()
	w.eventually(fmt.Sprintf("update %d to be %s", version, state), func() bool {
		var err error
		if u, err = w.WeightUpdate(w.ctx, pool, version); err != nil {
			w.t.Fatal(err)
		}
		return u.State == state
	})
	return u
}

func (w *world) versions() map[string]int64 {
	w.t.Helper()
	listed, err := w.Instances(w.ctx, pool)
	if err != nil {
		w.t.Fatal(err)
	}
	versions := map[string]int64{}
	for _, in := range listed {
		versions[in.ID] = in.PolicyVersion
	}
	versions["pool"], err = w.PolicyVersion(w.ctx, pool)
	if err != nil {
		w.t.Fatal(err)
	}
	return versions
}

func (w *world) wantCalls(id router.InstanceID, want ...string) {
	w.t.Helper()
	if got := w.engines[id].calls(); !slices.Equal(got, want) {
		w.t.Errorf("calls of %s: %q, want %q", id, got, want)
	}
}

// awaitSignal waits for a signal of a fake.
func (w *world) awaitSignal(what string, signal <-chan struct{}) {
	w.t.Helper()
	select {
	case <-signal:
	case <-w.ctx.Done():
		w.t.Fatalf("still waiting for %s", what)
	}
}

// enter lets a request in, in the background. One that is not let in fails the test and
// passes all the same, so that nobody waits for it.
func (w *world) enter(id router.InstanceID) <-chan Pass {
	passed := make(chan Pass, 1)
	c := w.c
	go func() {
		pass, err := c.Enter(w.ctx, id)
		if err != nil {
			if !errors.Is(err, context.Canceled) {
				w.t.Errorf("entering %s: %v", id, err)
			}
			pass.Leave = func() {}
		}
		passed <- pass
	}()
	return passed
}
