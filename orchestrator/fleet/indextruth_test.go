package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/engine/simulated"
	"holdfast/orchestrator/engine/simulated/fault"
	"holdfast/router"
	"holdfast/router/prefix"
	"holdfast/router/sim/instance"
	"holdfast/store"
)

// claims are the blocks that the router believes to be cached, by instance, as the
// events it is told make them.
type claims struct {
	mu     sync.Mutex
	blocks map[router.InstanceID]map[prefix.Hash]bool
	told   int
}

func (c *claims) tell(_ context.Context, event router.Event) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch e := event.(type) {
	case *router.BlocksStored:
		for _, h := range e.Blocks {
			c.of(e.Instance)[h] = true
			c.told++
		}
	case *router.BlocksRemoved:
		for _, h := range e.Blocks {
			delete(c.of(e.Instance), h)
		}
	case *router.BlocksCleared:
		clear(c.of(e.Instance))
	case *router.InstanceLeft:
		clear(c.of(e.Instance))
	case *router.InstanceReset:
		clear(c.of(e.Instance))
	}
	return nil
}

func (c *claims) of(id router.InstanceID) map[prefix.Hash]bool {
	if c.blocks[id] == nil {
		c.blocks[id] = map[prefix.Hash]bool{}
	}
	return c.blocks[id]
}

// cached are the hashes of the blocks that an engine really holds, under the
// router's own hashing.
func cached(server *simulated.Server, hasher prefix.Hasher) map[prefix.Hash]bool {
	truth := map[prefix.Hash]bool{}
	for _, tokens := range server.ResidentPrefixes(0) {
		for _, h := range hasher.AppendChain(nil, hasher.Root(), tokens) {
			truth[h] = true
		}
	}
	return truth
}

const truthEngines = 2

// truthWorld is a fleet of small engines that publish their events.
func truthWorld(t *testing.T) (*Fleet, *claims, []*simulated.Server) {
	t.Helper()
	params := instance.Demo()
	params.CapacityBlocks = 400
	told := &claims{blocks: map[router.InstanceID]map[prefix.Hash]bool{}}
	list := &registry{changed: make(chan struct{})}
	f, err := New(Config{
		Pool: "p", Registry: list, Changed: list.wait, NewClient: engine.NewClient, Tell: told.tell,
		ObserveInterval: 50 * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	var servers []*simulated.Server
	var instances []store.Instance
	for i := range truthEngines {
		server, err := simulated.New(simulated.Config{
			Engine: params, TimeScale: 200, Seed: 1, KVEvents: simulated.KVEvents{Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0"},
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := server.Start("127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_ = server.Stop(ctx)
		})
		events := server.KVEndpoints()[0]
		servers = append(servers, server)
		instances = append(instances, store.Instance{
			Pool: "p", ID: fmt.Sprintf("e%d", i), URL: server.URL(), Kind: "simulated", State: store.InstanceActive, Ranks: 1,
			CapacityBlocks: 400, BlockTokens: params.BlockTokens, MaxContextTokens: 6_000,
			KVEvents: store.KVEvents{Endpoint: events.Endpoint, ReplayEndpoint: events.ReplayEndpoint},
		})
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- f.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	list.set(instances...)
	return f, told, servers
}

// eventually polls until the condition holds.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for !ok() {
		select {
		case <-ticker.C:
		case <-deadline.C:
			t.Fatalf("still waiting for %s", what)
		}
	}
}

// settled tells whether all that the engines have published is applied.
func settled(f *Fleet, servers []*simulated.Server) bool {
	statuses := f.Statuses()
	if len(statuses) != len(servers) {
		return false
	}
	for i, s := range statuses {
		if !s.Up || s.Events == nil || !s.Events.Trusted {
			return false
		}
		published := servers[i].KVEndpoints()
		rank := s.Events.Ranks[0]
		if len(published) == 0 || published[0].Published > 0 && (!rank.HasSeq || rank.LastSeq+1 != published[0].Published) {
			return false
		}
	}
	return true
}

// traffic runs chats of growing contexts that share prefixes, at random instances.
// Calls may fail: engines crash.
func traffic(ctx context.Context, f *Fleet, seed uint64) {
	var chats sync.WaitGroup
	for n := range 24 {
		chats.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(n)))
			tokens := make([]int32, 64+16*random.IntN(20))
			for i := range tokens {
				tokens[i] = int32(i + n%4*1_000) // A quarter of the chats share a beginning.
			}
			for turn := range 8 {
				result, err := f.Generate(ctx, router.InstanceID(fmt.Sprintf("e%d", random.IntN(truthEngines))), router.SessionID{byte(n)}, engine.Request{
					RequestID: fmt.Sprintf("%d-%d-%d", seed, n, turn), SessionID: fmt.Sprint(n), Prompt: tokens,
					MaxTokens: 1 + random.IntN(60), IgnoreEOS: true, DataParallelRank: -1,
				}, nil)
				var failed *engine.Error
				if err != nil && !errors.As(err, &failed) {
					return
				}
				tokens = append(append(tokens[:len(tokens):len(tokens)], result.OutputIDs...), int32(n), int32(turn))
			}
		})
	}
	chats.Wait()
}

func TestIndexClaimsNothingThatEnginesDoNotHold(t *testing.T) {
	f, told, servers := truthWorld(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	eventually(t, "the engines to be followed", func() bool { return settled(f, servers) })
	for i, server := range servers {
		if err := server.SetFaults(fault.Settings{Seed: uint64(i + 1), Events: fault.Events{Lost: 0.1, Duplicated: 0.1, Reordered: 0.1, Delayed: 0.1, DelaySeconds: 0.02}}); err != nil {
			t.Fatal(err)
		}
	}
	traffic(ctx, f, 1)
	var crashed sync.WaitGroup
	crashed.Go(func() { traffic(ctx, f, 2) })
	servers[0].Crash(200 * time.Millisecond)
	crashed.Wait()
	eventually(t, "the crashed engine to be back", func() bool { return f.Statuses()[0].Up })
	traffic(ctx, f, 3)
	for _, server := range servers {
		if err := server.SetFaults(fault.Settings{}); err != nil {
			t.Fatal(err)
		}
	}
	// A last call shows that batches are missing, if they are.
	traffic(ctx, f, 4)
	eventually(t, "all events to be applied", func() bool { return settled(f, servers) })

	hasher := prefix.NewHasher(0, 16)
	told.mu.Lock()
	defer told.mu.Unlock()
	for i, server := range servers {
		claimed, truth := told.of(router.InstanceID(fmt.Sprintf("e%d", i))), cached(server, hasher)
		absent := 0
		for h := range claimed {
			if !truth[h] {
				absent++
			}
		}
		status := f.Statuses()[i].Events
		t.Logf("e%d: %d blocks cached, %d claimed; %d stored, %d removed, %d gaps, %d replays, %d resyncs", i, len(truth), len(claimed), status.BlocksStored, status.BlocksRemoved, status.Gaps, status.Replays, status.Resyncs)
		if absent > 0 {
			t.Errorf("e%d: %d of %d claimed blocks are not cached", i, absent, len(claimed))
		}
		if len(claimed) < len(truth)*9/10 || len(truth) == 0 {
			t.Errorf("e%d: %d of %d cached blocks are claimed", i, len(claimed), len(truth))
		}
		if status.Gaps == 0 || status.BlocksRemoved == 0 {
			t.Errorf("e%d: no gap or no eviction, so that little was tried: %+v", i, status)
		}
	}
}
