package kvevents

import (
	"context"
	"slices"
	"strings"
	"testing"

	"holdfast/router"
)

func TestChainsAsTheRouterDoes(t *testing.T) {
	v := newView()
	s := newSubscriber(t, testConfig(v))
	join(t, s)
	trusted(t, s, false, "beginning is not known")
	payloads, tokens := threeBatches(t)
	for i, payload := range payloads {
		feed(t, s, uint64(i), payload)
	}
	if want := ownChain(7, 16, tokens); !v.has(want...) || v.size() != 5 {
		t.Fatalf("%d of 5 blocks, %d told", v.count(want...), v.size())
	}
	trusted(t, s, true, "")
	feed(t, s, 3, batchOf(t, 13, removedEvent(5, 4, 99)))
	h := s.Health()
	if v.size() != 3 || h.BlocksRemoved != 2 || h.RemovedUnknown != 1 || h.OwnHashes != 3 || h.Ranks[0].LastSeq != 3 || h.Batches != 4 {
		t.Fatalf("%d blocks left, %+v", v.size(), h)
	}
	feed(t, s, 4, batchOf(t, 14, list{"AllBlocksCleared"}))
	if h := s.Health(); v.size() != 0 || h.OwnHashes != 0 || h.Cleared != 1 || h.Resyncs != 0 {
		t.Fatalf("after clear: %d, %+v", v.size(), h)
	}
}

// TestOneEventPerKindAndBatch: a batch is told as its net effect, removals first.
func TestOneEventPerKindAndBatch(t *testing.T) {
	v := newView()
	s := newSubscriber(t, testConfig(v))
	join(t, s)
	a, b, c := run(0, 16), run(1000, 16), run(2000, 16)
	feed(t, s, 0, batchOf(t, 1, storedEvent(list{1}, nil, a, 16), storedEvent(list{2}, nil, b, 16)))
	feed(t, s, 1, batchOf(t, 2,
		removedEvent(1), storedEvent(list{1}, nil, a, 16), // back again
		storedEvent(list{3}, nil, c, 16), removedEvent(3), // gone again
		removedEvent(2),
		storedEvent(list{1}, nil, a, 16), removedEvent(1), storedEvent(list{1}, nil, a, 16)))
	var kinds []string
	for range len(v.told) {
		switch e := (<-v.told).(type) {
		case *router.BlocksStored:
			kinds = append(kinds, "stored")
		case *router.BlocksRemoved:
			kinds = append(kinds, "removed")
		default:
			t.Fatalf("%T", e)
		}
	}
	if !slices.Equal(kinds, []string{"stored", "removed", "stored"}) {
		t.Fatalf("told %v", kinds)
	}
	if !v.has(ownChain(7, 16, a)...) || v.size() != 1 {
		t.Fatalf("%d blocks", v.size())
	}
}

// TestRepeatedStoreIsTakenBackWhole: a block stored twice in a batch and removed
// once is not in the cache for sure.
func TestRepeatedStoreIsTakenBackWhole(t *testing.T) {
	v := newView()
	s := newSubscriber(t, testConfig(v))
	join(t, s)
	e := storedEvent(list{1}, nil, run(0, 16), 16)
	feed(t, s, 0, batchOf(t, 1, e, e, removedEvent(1)))
	if v.size() != 0 {
		t.Fatal("a removed block is claimed")
	}
}

func TestSaltAndForeignBlocks(t *testing.T) {
	v := newView()
	s := newSubscriber(t, testConfig(v))
	join(t, s)
	tokens := run(0, 64)
	full := func(hashes list, parent any, tokens []int32, lora any, medium string, extra any, more ...any) list {
		return append(list{"BlockStored", hashes, parent, tokens, 16, lora, medium, nil, extra}, more...)
	}
	feed(t, s, 0, batchOf(t, 1,
		full(list{1, 2}, nil, tokens[:32], nil, "GPU", list{list{"holdfast-9"}, nil}), // our salt
		full(list{3}, 2, tokens[32:48], nil, "GPU", nil),                              // its heir
		full(list{11, 12}, nil, tokens[:32], nil, "GPU", list{nil, list{list{"img", 0}}}),
		full(list{13}, 12, tokens[32:48], nil, "GPU", nil), // after an image
		full(list{21}, nil, tokens[:16], 1, "GPU", nil),    // of an adapter
		full(list{22}, 21, tokens[16:32], nil, "GPU", nil),
		full(list{31}, nil, tokens[:16], nil, "CPU_TIER1", nil),
		full(list{41}, nil, tokens[:16], nil, "GPU", nil, 1, "sliding_window", 1024),
		full(list{42}, nil, tokens[:32], nil, "GPU", nil, 2, "mamba"),
		full(list{51}, nil, tokens[:16], nil, "GPU", list{list{"tenant"}}),
	))
	salted := ownChain(9, 16, tokens[:48])
	plain := ownChain(7, 16, tokens[:16])
	if !v.has(salted...) || !v.has(plain...) || v.size() != 4 {
		t.Fatalf("%d salted, %d plain, %d in all", v.count(salted...), v.count(plain...), v.size())
	}
	if h := s.Health(); h.ForeignBlocks != 5 || h.OtherMediumBlocks != 1 || h.OtherGroupBlocks != 2 || h.OrphansHeld != 0 {
		t.Fatalf("%+v", h)
	}
	// Leaving host memory is not leaving the GPU.
	feed(t, s, 1, batchOf(t, 2, list{"BlockRemoved", list{1}, "CPU_TIER1"}))
	if v.size() != 4 {
		t.Fatal("removed from the GPU with the host's copy")
	}
}

// TestSameHashUnderAnotherSalt, as SGLang does: the earlier block is taken back.
func TestSameHashUnderAnotherSalt(t *testing.T) {
	v := newView()
	cfg := testConfig(v)
	cfg.Dialect = SGLang
	version := int64(1)
	cfg.PolicyVersion = func() int64 { return version }
	s := newSubscriber(t, cfg)
	join(t, s)
	event := list{"BlockStored", list{-5}, nil, run(0, 16), 16, nil, "GPU"}
	feed(t, s, 0, batchOf(t, 1, event))
	version = 2
	feed(t, s, 1, batchOf(t, 2, event))
	if !v.has(ownChain(2, 16, run(0, 16))...) || v.size() != 1 {
		t.Fatalf("%d blocks", v.size())
	}
}

func TestGroupsAndRanks(t *testing.T) {
	v := newView()
	cfg := testConfig(v)
	cfg.Ranks = 2
	s := newSubscriber(t, cfg)
	join(t, s)
	ctx := context.Background()
	group := func(hash, id int) list {
		return list{"BlockStored", list{hash}, nil, run(0, 16), 16, nil, "GPU", nil, nil, id}
	}
	for rank, st := range s.streams {
		if err := st.frame(ctx, 0, batchOf(t, 1, group(1, 0), group(1, 1), storedEvent(list{9}, nil, run(500+rank, 16), 16))); err != nil {
			t.Fatal(err)
		}
	}
	if v.size() != 6 {
		t.Fatalf("%d locations", v.size())
	}
	if err := s.streams[1].frame(ctx, 1, batchOf(t, 2, list{"BlockRemoved", list{1}, "GPU", 1})); err != nil || v.size() != 5 {
		t.Fatalf("one group: %d, %v", v.size(), err)
	}
	// Without a group, all groups.
	if err := s.streams[0].frame(ctx, 1, batchOf(t, 2, removedEvent(1))); err != nil || v.size() != 3 {
		t.Fatalf("all groups: %d, %v", v.size(), err)
	}
	// One rank cleared leaves the other, the last one tells a clear.
	for len(v.told) > 0 {
		<-v.told
	}
	if err := s.streams[1].frame(ctx, 2, batchOf(t, 3, list{"AllBlocksCleared"})); err != nil || v.size() != 1 {
		t.Fatalf("one rank cleared: %d, %v", v.size(), err)
	}
	for len(v.told) > 0 {
		if _, all := (<-v.told).(*router.BlocksCleared); all {
			t.Fatal("one rank's clear cleared the instance")
		}
	}
	if err := s.streams[0].frame(ctx, 2, batchOf(t, 3, list{"AllBlocksCleared"})); err != nil || v.size() != 0 {
		t.Fatalf("both ranks cleared: %d, %v", v.size(), err)
	}
}

func TestOrphans(t *testing.T) {
	v := newView()
	s := newSubscriber(t, testConfig(v))
	join(t, s)
	tokens := run(0, 6*16)
	own := ownChain(7, 16, tokens)
	feed(t, s, 5, batchOf(t, 1,
		storedEvent(list{3, 4}, 2, tokens[32:64], 16),
		storedEvent(list{5}, 4, tokens[64:80], 16),
		storedEvent(list{6}, 5, tokens[80:], 16),
		storedEvent(list{77}, 76, run(5000, 16), 16)))
	if h := s.Health(); v.size() != 0 || h.OrphansHeld != 5 {
		t.Fatalf("%d blocks, %+v", v.size(), h)
	}
	feed(t, s, 6, batchOf(t, 2, removedEvent(6, 3)))
	feed(t, s, 7, batchOf(t, 3, storedEvent(list{1, 2}, nil, tokens[:32], 16)))
	if !v.has(own[0], own[1], own[3], own[4]) || v.size() != 4 {
		t.Fatalf("%d of 4 blocks, %d in all", v.count(own...), v.size())
	}
	if h := s.Health(); h.OrphansHeld != 1 || h.OrphansResolved != 2 || h.RemovedUnknown != 0 {
		t.Fatalf("%+v", h)
	}
	feed(t, s, 8, batchOf(t, 4, list{"AllBlocksCleared"}))
	if h := s.Health(); h.OrphansHeld != 0 || h.OrphansDropped != 1 {
		t.Fatalf("%+v", h)
	}
}

// TestBounds: orphans, blocks and groups have limits, each with its own ending.
func TestBounds(t *testing.T) {
	v := newView()
	cfg := testConfig(v)
	cfg.MaxBlocks = 100
	s := newSubscriber(t, cfg)
	join(t, s)
	var events list
	for i := range maxOrphanEvents + 10 {
		events = append(events, storedEvent(list{10 + i}, 5, run(i, 16), 16))
	}
	feed(t, s, 0, batchOf(t, 1, events...))
	if h := s.Health(); h.OrphansHeld != maxOrphanEvents || h.OrphansDropped != 10 {
		t.Fatalf("%+v", h)
	}
	var hashes list
	for i := range 101 {
		hashes = append(hashes, 100_000+i)
	}
	feed(t, s, 1, batchOf(t, 2, storedEvent(hashes, nil, run(0, 101*16), 16)))
	if h := s.Health(); v.size() != 0 || h.OwnHashes != 0 || h.DecodeErrors != 0 || !strings.Contains(h.Reason, "MaxBlocks") {
		t.Fatalf("%d blocks, %+v", v.size(), h)
	}
	events = nil
	for i := range maxGroups + 3 {
		events = append(events, list{"BlockStored", list{1}, nil, run(0, 16), 16, nil, "GPU", nil, nil, i})
	}
	feed(t, s, 2, batchOf(t, 3, events...))
	if h := s.Health(); v.size() != maxGroups || h.OtherGroupBlocks != 3 {
		t.Fatalf("%d locations, %+v", v.size(), h)
	}
}

// TestMalformedBatch: what it removed is not known, so nothing is claimed any more.
func TestMalformedBatch(t *testing.T) {
	v := newView()
	s := newSubscriber(t, testConfig(v))
	join(t, s)
	payloads, _ := threeBatches(t)
	feed(t, s, 0, payloads[0])
	feed(t, s, 1, payloads[1][:20])
	if h := s.Health(); v.size() != 0 || h.DecodeErrors != 1 || h.Resyncs != 1 || h.Trusted {
		t.Fatalf("%d blocks, %+v", v.size(), h)
	}
	feed(t, s, 2, batchOf(t, 13, storedEvent(list{1}, nil, run(0, 16), 16)))
	if h := s.Health(); v.size() != 1 || h.Gaps != 0 {
		t.Fatalf("%d blocks, %+v", v.size(), h)
	}
}

// TestBlockSizeAlarm names the cause while it lasts.
func TestBlockSizeAlarm(t *testing.T) {
	v := newView()
	cfg := testConfig(v)
	cfg.Dialect = SGLang
	s := newSubscriber(t, cfg)
	join(t, s)
	feed(t, s, 0, batchOf(t, 1, list{"BlockStored", list{1}, nil, run(0, 1), 1, nil, "GPU"}))
	h := s.Health()
	if !strings.Contains(h.Alarm, "blocks of 1 tokens") || !strings.Contains(h.Alarm, "--page-size") || h.WrongSizeBlocks != 1 || v.size() != 0 {
		t.Fatalf("%+v", h)
	}
	feed(t, s, 1, batchOf(t, 2, list{"BlockStored", list{2}, nil, run(0, 16), 16, nil, "GPU"}))
	if h := s.Health(); h.Alarm != "" || v.size() != 1 {
		t.Fatalf("%+v", h)
	}
}

// TestRetell: a router that forgot the instance gets all of it again.
func TestRetell(t *testing.T) {
	v := newView()
	s := newSubscriber(t, testConfig(v))
	join(t, s)
	payloads, tokens := threeBatches(t)
	for i, payload := range payloads {
		feed(t, s, uint64(i), payload)
	}
	clear(v.blocks)
	v.blocks[place{0, 0, 1}] = true // something that the router had from elsewhere
	if err := s.Retell(context.Background()); err != nil || !v.has(ownChain(7, 16, tokens)...) || v.size() != 5 {
		t.Fatalf("%d blocks, %v", v.size(), err)
	}
	feed(t, s, 3, batchOf(t, 13, removedEvent(5)))
	if v.size() != 4 {
		t.Fatal("the stream does not go on")
	}
}

func TestConfigIsChecked(t *testing.T) {
	good := testConfig(newView())
	for name, change := range map[string]func(*Config){
		"instance":     func(c *Config) { c.Instance = "" },
		"block size":   func(c *Config) { c.BlockTokens = 0 },
		"tell":         func(c *Config) { c.Tell = nil },
		"version":      func(c *Config) { c.PolicyVersion = nil },
		"scheme":       func(c *Config) { c.Endpoint = "http://x:1" },
		"no port":      func(c *Config) { c.Endpoint = "tcp://x" },
		"wildcard":     func(c *Config) { c.Endpoint = "tcp://*:5557" },
		"ports beyond": func(c *Config) { c.Endpoint, c.Ranks = "tcp://x:65535", 2 },
		"ipc ranks":    func(c *Config) { c.Endpoint, c.Ranks = "ipc:///tmp/x", 2 },
		"replay":       func(c *Config) { c.ReplayEndpoint = "tcp://*:5558" },
		"ranks":        func(c *Config) { c.Ranks = -1 },
		"dialect":      func(c *Config) { c.Dialect = 9 },
	} {
		cfg := good
		change(&cfg)
		if _, err := New(cfg); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	good.Endpoint, good.Bind = "tcp://*:5557", true
	if _, err := New(good); err != nil {
		t.Error(err)
	}
}
