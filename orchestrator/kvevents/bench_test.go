package kvevents

import (
	"context"
	"fmt"
	"syscall"
	"testing"

	"holdfast/router"
	"holdfast/router/prefix"
)

// churn makes batches as a busy engine publishes them: each has the given number of
// BlockStored events, half of them starting a context and half continuing the last,
// and as many BlockRemoved for the blocks of an older batch, so that the cache stays
// at about the given number of blocks. It returns them with the number of blocks
// stored and removed in all.
func churn(tb testing.TB, batches, events, blocksPerEvent, cachedBlocks int, maps bool) (payloads [][]byte, stored int) {
	hash := 1
	var past []list
	perBatch := events * blocksPerEvent
	for b := range batches {
		var out list
		var parent any
		for e := range events {
			if e%2 == 0 {
				parent = nil
			}
			var hashes list
			for range blocksPerEvent {
				hashes = append(hashes, uint64(hash)*0x9E3779B97F4A7C15)
				hash++
			}
			tokens := run((b*events+e)*37, 16*blocksPerEvent)
			if maps {
				out = append(out, ordered{"type", "BlockStored", "block_hashes", hashes, "parent_block_hash", parent, "token_ids", tokens,
					"block_size", 16, "lora_id", nil, "medium", "GPU", "lora_name", nil})
			} else {
				out = append(out, storedEvent(hashes, parent, tokens, 16))
			}
			parent = hashes[blocksPerEvent-1]
			past = append(past, hashes)
			stored += blocksPerEvent
		}
		for len(past)*blocksPerEvent > cachedBlocks+perBatch {
			if maps {
				out = append(out, ordered{"type", "BlockRemoved", "block_hashes", past[0], "medium", "GPU"})
			} else {
				out = append(out, list{"BlockRemoved", past[0], "GPU"})
			}
			past = past[1:]
		}
		payloads = append(payloads, batchOf(tb, float64(b+1), out...))
	}
	return payloads, stored
}

// BenchmarkWireToIndex takes batches from their bytes to the router's index: decode,
// look up parents, hash the tokens, and apply to a real prefix.Index in the way that
// router.Core does. Run it with -cpu 1. Rates are per second of this process's CPU
// time, garbage collection included, so that a busy machine does not change them.
//
// One block event is one block of 16 tokens stored. Removing nine tenths of them
// again (two tenths in the large one) is part of the time and not of that figure;
// events/s counts both kinds of wire events. With 1 block in an event ("50x1": 50 events of 1 block in a batch) each
// block event is a BlockStored of its own, which is the dearest encoding. The others
// put more blocks into an event, as prefill does (a chunk of 8,192 tokens is one
// BlockStored of 512 blocks).
func BenchmarkWireToIndex(b *testing.B) {
	for _, shape := range []struct {
		name                   string
		batches, events, block int
		maps                   bool
		kept                   int // tenths of what is stored that stay cached
	}{
		{"array/batch=1x1", 4000, 1, 1, false, 1},
		{"array/batch=50x1", 400, 50, 1, false, 1},
		{"map/batch=50x1", 400, 50, 1, true, 1},
		{"array/batch=50x26", 100, 50, 26, false, 1},
		{"map/batch=50x26", 100, 50, 26, true, 1},
		{"map/batch=8x512", 40, 8, 512, true, 1},
		{"map/batch=50x26/400,000-cached", 400, 50, 26, true, 8},
	} {
		b.Run(shape.name, func(b *testing.B) {
			payloads, stored := churn(b, shape.batches, shape.events, shape.block, shape.batches*shape.events*shape.block/10*shape.kept, shape.maps)
			bytes := 0
			for _, p := range payloads {
				bytes += len(p)
			}
			b.SetBytes(int64(bytes))
			b.ReportAllocs()
			events, began := uint64(0), cpuSeconds(b)
			for b.Loop() {
				index := prefix.NewIndex(1 << 20)
				s := newSubscriber(b, Config{
					Instance: "e", Endpoint: "tcp://127.0.0.1:1", BlockTokens: 16, PolicyVersion: func() int64 { return 1 },
					Tell: func(_ context.Context, ev router.Event) error {
						switch ev := ev.(type) {
						case *router.BlocksStored:
							index.Store(0, ev.Rank, ev.Group, ev.Blocks)
						case *router.BlocksRemoved:
							index.Remove(0, ev.Rank, ev.Group, ev.Blocks)
						case *router.BlocksCleared:
							index.Clear(0)
						}
						return nil
					},
				})
				for seq, payload := range payloads {
					feed(b, s, uint64(seq), payload)
				}
				if h := s.Health(); int64(index.Blocks()) != h.OwnHashes || h.Resyncs > 0 || h.OrphansHeld > 0 {
					b.Fatalf("%d blocks indexed: %+v", index.Blocks(), h)
				}
				events += s.Health().Events
			}
			seconds := cpuSeconds(b) - began
			b.ReportMetric(float64(stored*b.N)/seconds, "block-events/s")
			b.ReportMetric(float64(events)/seconds, "events/s")
		})
	}
}

func cpuSeconds(b *testing.B) float64 {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return float64(used.Utime.Nano()+used.Stime.Nano()) / 1e9
}

// BenchmarkDecode is the decoding alone, of a hundred events of one block each.
func BenchmarkDecode(b *testing.B) {
	for _, maps := range []bool{false, true} {
		b.Run(fmt.Sprintf("map=%v", maps), func(b *testing.B) {
			payloads, _ := churn(b, 1, 100, 1, 1000, maps)
			d := newDecoder(VLLM)
			n, began := 0, cpuSeconds(b)
			b.ReportAllocs()
			for b.Loop() {
				if err := d.batch(payloads[0], func(*event) error { n++; return nil }); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(n)/(cpuSeconds(b)-began), "events/s")
		})
	}
}
