package store_test

import (
	"errors"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"holdfast/store"
	"holdfast/store/storetest"
)

func TestPoolOwnership(t *testing.T) {
	s := storetest.New(t)
	ctx := t.Context()
	first, ok, err := s.AcquirePool(ctx, pool, "a", 60)
	if err != nil || !ok || first != 1 {
		t.Fatalf("first owner: %d, %v, %v", first, ok, err)
	}
	if _, ok, err := s.AcquirePool(ctx, pool, "b", 60); err != nil || ok {
		t.Fatalf("a second owner beside the first: %v, %v", ok, err)
	}
	again, ok, err := s.AcquirePool(ctx, pool, "a", 0)
	if err != nil || !ok || again != 2 {
		t.Fatalf("the same owner, restarted: %d, %v, %v", again, ok, err)
	}
	if err := s.RenewPool(ctx, pool, first, 60); !errors.Is(err, store.ErrFenced) {
		t.Errorf("renewing an epoch that is over: %v", err)
	}
	// The lease of zero seconds has run out: another owner may take it, and a
	// renewal that comes too late but before that still counts.
	must(t, s.RenewPool(ctx, pool, again, 0))
	taken, ok, err := s.AcquirePool(ctx, pool, "b", 60)
	if err != nil || !ok || taken != 3 {
		t.Fatalf("after the lease ran out: %d, %v, %v", taken, ok, err)
	}
	must(t, s.ReleasePool(ctx, pool, again)) // over: nothing happens
	if _, ok, _ := s.AcquirePool(ctx, pool, "c", 60); ok {
		t.Error("a former owner released the pool of its successor")
	}
	lease, err := s.PoolLease(ctx, pool)
	if err != nil || lease.Epoch != taken {
		t.Errorf("the lease is %+v, %v", lease, err)
	}
	must(t, s.RenewPool(ctx, pool, taken, 120))
	if renewed, err := s.PoolLease(ctx, pool); err != nil || renewed.Epoch != taken || renewed.ExpiresAt < lease.ExpiresAt+59_000_000 {
		t.Errorf("the renewed lease is %+v after %+v, %v", renewed, lease, err)
	}
	if _, err := s.PoolLease(ctx, "never"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("the lease of a pool that is not: %v", err)
	}
	pools, err := s.Pools(ctx)
	if err != nil || len(pools) != 1 || pools[0].Owner != "b" || pools[0].Epoch != 3 {
		t.Errorf("pools %+v, %v", pools, err)
	}
	must(t, s.ReleasePool(ctx, pool, taken))
	pools, err = s.Pools(ctx)
	if err != nil || pools[0].Owner != "" {
		t.Errorf("a released pool %+v, %v", pools, err)
	}
	if last, ok, err := s.AcquirePool(ctx, pool, "c", 60); err != nil || !ok || last != 4 {
		t.Errorf("after the release: %d, %v, %v", last, ok, err)
	}
	var field *store.FieldError
	if _, _, err := s.AcquirePool(ctx, "a pool", "a", 60); !errors.As(err, &field) {
		t.Errorf("a bad name: %v", err)
	}
}

func TestOneOfManyOwnersWins(t *testing.T) {
	s := storetest.New(t)
	for range 5 {
		var winners atomic.Int64
		var wait sync.WaitGroup
		var epoch atomic.Int64
		for _, owner := range []string{"a", "b", "c", "d", "e", "f"} {
			wait.Go(func() {
				e, ok, err := s.AcquirePool(t.Context(), pool, owner, 60)
				if err != nil {
					t.Error(err)
				}
				if ok {
					winners.Add(1)
					epoch.Store(e)
				}
			})
		}
		wait.Wait()
		if winners.Load() != 1 {
			t.Errorf("%d owners acquired the pool", winners.Load())
		}
		must(t, s.ReleasePool(t.Context(), pool, epoch.Load()))
	}
}

func TestPolicyVersionNeverGoesBack(t *testing.T) {
	f := newFixture(t, 1)
	ctx := t.Context()
	for _, step := range []struct {
		version  int64
		conflict bool
	}{{0, false}, {3, false}, {3, false}, {2, true}, {4, false}} {
		err := f.AdvancePolicyVersion(ctx, pool, step.version)
		var conflict *store.ConflictError
		if errors.As(err, &conflict) != step.conflict || (err != nil && !step.conflict) {
			t.Errorf("to %d: %v", step.version, err)
		}
	}
	version, err := f.PolicyVersion(ctx, pool)
	if err != nil || version != 4 {
		t.Errorf("version %d, %v", version, err)
	}
	if err := f.AdvancePolicyVersion(ctx, "nowhere", 1); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("an unknown pool: %v", err)
	}
	if _, err := f.PolicyVersion(ctx, "nowhere"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("an unknown pool: %v", err)
	}
}

func TestInstances(t *testing.T) {
	f := newFixture(t, 1)
	ctx := t.Context()
	mortal := instance("w3")
	mortal.TTLSeconds, mortal.MaxRunning, mortal.PrefillTokensPerSecond, mortal.PolicyVersion = 1e-6, 7, 1.5, 2
	mortal.KVEvents = store.KVEvents{Endpoint: "tcp://*:5557", Bind: true, ReplayEndpoint: "tcp://10.0.0.1:5558", Topic: "kv@"}
	mortal.Ranks, mortal.Control = 4, store.ControlObserve
	got, err := f.RegisterInstance(ctx, mortal)
	must(t, err)
	got.CreatedAt, got.SeenAt, got.Expired = mortal.CreatedAt, mortal.SeenAt, false
	mortal.State = store.InstanceActive
	if got != mortal {
		t.Errorf("registered %+v, got %+v", mortal, got)
	}
	must(t, f.DrainInstance(ctx, pool, "w1", true))
	must(t, f.RemoveInstance(ctx, pool, "w2"))
	must(t, f.RemoveInstance(ctx, pool, "w2"))
	listed, err := f.Instances(ctx, pool)
	must(t, err)
	if len(listed) != 2 || listed[0].State != store.InstanceDraining || listed[0].Expired || !listed[1].Expired {
		t.Errorf("instances %+v", listed)
	}
	for name, err := range map[string]error{
		"heartbeat of a removed one":   f.HeartbeatInstance(ctx, pool, "w2"),
		"heartbeat of an unknown one":  f.HeartbeatInstance(ctx, pool, "w9"),
		"heartbeat in another pool":    f.HeartbeatInstance(ctx, "other", "w1"),
		"draining a removed one":       f.DrainInstance(ctx, pool, "w2", true),
		"draining an unknown one":      f.DrainInstance(ctx, pool, "w9", true),
		"removing what was never here": f.RemoveInstance(ctx, pool, "w9"),
	} {
		if !errors.Is(err, store.ErrNotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
	must(t, f.HeartbeatInstance(ctx, pool, "w1"))
	must(t, f.DrainInstance(ctx, pool, "w1", false))
	back, err := f.RegisterInstance(ctx, instance("w2"))
	must(t, err)
	if back.State != store.InstanceActive || back.Ranks != 1 || back.Control != store.ControlManage {
		t.Errorf("registered again it is %+v", back)
	}
}

func TestRegisterInstanceRefusals(t *testing.T) {
	f := newFixture(t, 1)
	for _, test := range []struct {
		path   string
		change func(*store.Instance)
	}{
		{"pool", func(i *store.Instance) { i.Pool = "" }},
		{"id", func(i *store.Instance) { i.ID = "a b" }},
		{"url", func(i *store.Instance) { i.URL = "" }},
		{"url", func(i *store.Instance) { i.URL = "ftp://host" }},
		{"url", func(i *store.Instance) { i.URL = "http://" }},
		{"url", func(i *store.Instance) { i.URL = "http://host:port:" }},
		{"kind", func(i *store.Instance) { i.Kind = "" }},
		{"capacity_blocks", func(i *store.Instance) { i.CapacityBlocks = 0 }},
		{"block_tokens", func(i *store.Instance) { i.BlockTokens = -1 }},
		{"max_context_tokens", func(i *store.Instance) { i.MaxContextTokens = 0 }},
		{"max_running", func(i *store.Instance) { i.MaxRunning = -1 }},
		{"prefill_tokens_per_second", func(i *store.Instance) { i.PrefillTokensPerSecond = math.NaN() }},
		{"policy_version", func(i *store.Instance) { i.PolicyVersion = -1 }},
		{"ttl_seconds", func(i *store.Instance) { i.TTLSeconds = math.Inf(1) }},
		{"kv_events.endpoint", func(i *store.Instance) { i.KVEvents.ReplayEndpoint = "tcp://host:1" }},
		{"kv_events.endpoint", func(i *store.Instance) { i.KVEvents.Endpoint = "host:5557" }},
		{"kv_events.endpoint", func(i *store.Instance) { i.KVEvents.Endpoint = "tcp://host" }},
		{"kv_events.replay_endpoint", func(i *store.Instance) {
			i.KVEvents = store.KVEvents{Endpoint: "tcp://host:1", ReplayEndpoint: "ipc:///tmp/x"}
		}},
		{"kv_events.topic", func(i *store.Instance) {
			i.KVEvents = store.KVEvents{Endpoint: "tcp://host:1", Topic: strings.Repeat("t", 257)}
		}},
		{"kv_events.endpoint", func(i *store.Instance) { i.KVEvents.Endpoint = "tcp://host:99999" }},
		{"kv_events.endpoint", func(i *store.Instance) { i.KVEvents.Endpoint, i.Ranks = "tcp://host:65535", 5 }},
		{"ranks", func(i *store.Instance) { i.Ranks = -1 }},
		{"control", func(i *store.Instance) { i.Control = "leave" }},
	} {
		bad := instance("w9")
		test.change(&bad)
		_, err := f.RegisterInstance(t.Context(), bad)
		var field *store.FieldError
		if !errors.As(err, &field) || field.Path != test.path {
			t.Errorf("%+v: %v, want a refusal of %s", bad, err, test.path)
		}
	}
}
