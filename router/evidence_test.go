package router

import "testing"

// evidencePool is one instance with room, and one session there whose first turn
// of 10,000 tokens has ended with an answer of 160.
func evidencePool(t *testing.T, listening bool) (*world, *rollout) {
	w := newWorld(t, DefaultConfig(), 1)
	w.join("a", 100_000, 0)
	if listening {
		w.step(&BlocksStored{At: w.now, Instance: "a", Blocks: []BlockHash{1 << 40}})
	}
	r := w.open("agent", GroupID{}, 10_000, 0)
	w.ask(r)
	w.start(r)
	if listening {
		w.step(&BlocksStored{At: w.now, Instance: "a", Blocks: r.hashes})
	}
	w.tick(2)
	w.end(r, 160, false)
	w.tick(10)
	return w, r
}

// next asks for the session's next turn with what the caller says of its blocks.
func (w *world) next(r *rollout, promptTokens int64, knownBlocks int, blocks []BlockHash) []Decision {
	r.turn++
	r.prompt, r.asked, r.admittedAt = promptTokens, true, ""
	return w.step(&TurnRequested{At: w.now, Session: r.id, Class: r.class, Turn: r.turn, PromptTokens: promptTokens, KnownBlocks: knownBlocks, NewBlocks: blocks})
}

// renamed are the hashes of the same content under other weights.
func renamed(blocks []BlockHash) []BlockHash {
	other := make([]BlockHash, len(blocks))
	for i := range blocks {
		other[i] = blocks[i] ^ 1<<62
	}
	return other
}

func grown(blocks []BlockHash, n int) []BlockHash {
	for i := range n {
		blocks = append(blocks, BlockHash(7<<50+i))
	}
	return blocks
}

// TestEvidenceOfEviction tells a session's prefix that is gone from one that the
// index merely was not told of: only the first costs the session its protection.
func TestEvidenceOfEviction(t *testing.T) {
	const prompt = 10_000 + 160 + 400
	full := func(r *rollout) []BlockHash { return grown(r.hashes[:10_000/16], (prompt-10_000)/16) }
	for _, test := range []struct {
		name      string
		deaf      bool
		before    func(w *world, r *rollout)
		ask       func(w *world, r *rollout) []Decision
		evicted   bool
		predicted int64 // at least; -1: nothing
	}{
		{
			name:      "a continuation names its new blocks",
			ask:       func(w *world, r *rollout) []Decision { return w.next(r, prompt, 625, full(r)[625:]) },
			predicted: 10_000,
		}, {
			name: "its blocks were removed",
			before: func(w *world, r *rollout) {
				w.step(&BlocksRemoved{At: w.now, Instance: "a", Blocks: r.hashes[100:]})
			},
			ask:     func(w *world, r *rollout) []Decision { return w.next(r, prompt, 625, full(r)[625:]) },
			evicted: true,
		}, {
			name:      "the caller restarted and names all blocks again",
			ask:       func(w *world, r *rollout) []Decision { return w.next(r, prompt, 0, full(r)) },
			predicted: 10_000,
		}, {
			name: "the caller restarted, and the blocks were removed",
			before: func(w *world, r *rollout) {
				w.step(&BlocksRemoved{At: w.now, Instance: "a", Blocks: r.hashes[100:]})
			},
			ask:     func(w *world, r *rollout) []Decision { return w.next(r, prompt, 0, full(r)) },
			evicted: true,
		}, {
			name:      "all blocks have new names, the cache was not reset yet",
			ask:       func(w *world, r *rollout) []Decision { return w.next(r, prompt, 0, renamed(full(r))) },
			predicted: 10_000,
		}, {
			name:      "all blocks have new names after a reset",
			before:    func(w *world, _ *rollout) { w.step(&InstanceReset{At: w.now, Instance: "a", PolicyVersion: 1}) },
			ask:       func(w *world, r *rollout) []Decision { return w.next(r, prompt, 0, renamed(full(r))) },
			predicted: -1,
		}, {
			name:      "the caller names no blocks this time",
			ask:       func(w *world, r *rollout) []Decision { return w.next(r, prompt, 0, nil) },
			predicted: 10_000,
		}, {
			name:      "the caller names no new blocks, and the answer was long",
			before:    func(w *world, r *rollout) { w.next(r, 10_160, 625, nil); w.end(r, 9_000, false); w.tick(10) },
			ask:       func(w *world, r *rollout) []Decision { return w.next(r, 19_300, 625, nil) },
			predicted: 10_000,
		}, {
			name:      "blocks in between were missed",
			ask:       func(w *world, r *rollout) []Decision { return w.next(r, prompt, 640, full(r)[640:]) },
			predicted: 10_000,
		}, {
			name:      "the context was rewritten from its tenth block on",
			ask:       func(w *world, r *rollout) []Decision { return w.next(r, 8_000, 10, grown(nil, 490)) },
			predicted: 160,
		}, {
			name: "the caller restarted with a rewritten context",
			ask: func(w *world, r *rollout) []Decision {
				return w.next(r, 8_000, 0, grown(append([]BlockHash(nil), r.hashes[:10]...), 490))
			},
			predicted: 160,
		}, {
			name:      "the instance tells nothing of its cache",
			deaf:      true,
			ask:       func(w *world, r *rollout) []Decision { return w.next(r, prompt, 625, full(r)[625:]) },
			predicted: 10_000,
		}, {
			name: "the instance begins to tell after the turn",
			deaf: true,
			before: func(w *world, _ *rollout) {
				w.step(&BlocksStored{At: w.now, Instance: "a", Blocks: []BlockHash{1 << 41}})
			},
			ask:       func(w *world, r *rollout) []Decision { return w.next(r, prompt, 625, full(r)[625:]) },
			predicted: 10_000,
		}, {
			name: "all locations are taken back, then the stream goes on",
			before: func(w *world, _ *rollout) {
				w.step(&BlocksCleared{At: w.now, Instance: "a"})
				w.step(&BlocksStored{At: w.now, Instance: "a", Blocks: []BlockHash{1 << 41}})
			},
			ask:       func(w *world, r *rollout) []Decision { return w.next(r, prompt, 625, full(r)[625:]) },
			predicted: -1,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			w, r := evidencePool(t, !test.deaf)
			if test.before != nil {
				test.before(w, r)
			}
			out := test.ask(w, r)
			if evicted := out[0].Kind == ProtectionEnded; evicted != test.evicted {
				t.Fatalf("lost its protection: %t, want %t: %+v", evicted, test.evicted, out)
			}
			last := out[len(out)-1]
			if last.Kind != Admit || last.Instance != "a" {
				t.Fatalf("not admitted: %+v", last)
			}
			if got := last.Numbers.PredictedCachedTokens; got < test.predicted || test.predicted < 0 && got > 0 {
				t.Fatalf("%d tokens predicted in the cache, want %d", got, test.predicted)
			}
			// Whatever was unclear: once the turn has ended the index knows the chain, and
			// a removal is evidence again.
			if !w.core.findInstance("a").indexTrusted() {
				return
			}
			w.tick(5)
			w.end(r, 16, false)
			w.tick(10)
			s := w.core.sessions[r.id]
			if s.chain.Blocks() == 0 {
				return
			}
			if !s.indexed || w.core.hitAt(s, s.inst) < r.prompt*9/10-16 && s.chain.Blocks() >= int(r.prompt/16) {
				t.Fatalf("after the turn the index finds %d of %d tokens", w.core.hitAt(s, s.inst), r.prompt)
			}
		})
	}
}

// TestStaleStoresAfterClear: blocks told of after their cache was cleared lead to
// one wrong prediction and to nothing else; the turn that finds out puts it right.
func TestStaleStoresAfterClear(t *testing.T) {
	w, r := evidencePool(t, true)
	w.step(&BlocksCleared{At: w.now, Instance: "a"})
	if hit := w.core.hitAt(w.core.sessions[r.id], w.core.findInstance("a")); hit != 0 {
		t.Fatalf("%d tokens predicted after a clear", hit)
	}
	w.step(&BlocksStored{At: w.now, Instance: "a", Blocks: r.hashes}) // published before the clear
	out := w.next(r, 10_320, 625, grown(nil, 20))
	if out[0].Kind != Admit || out[0].Reason != Continuation || out[0].Numbers.PredictedCachedTokens != 10_000 {
		t.Fatalf("%+v", out)
	}
	w.tick(3)
	gap := w.core.findInstance("a").pressure.expectedTokens
	w.step(&TurnEnded{At: w.now, Session: r.id, Turn: r.turn, Instance: "a", PromptTokens: 10_320, CachedTokens: 0, OutputTokens: 16, PrefillNanos: 2e8})
	r.asked, r.admittedAt = false, ""
	if now := w.core.findInstance("a").pressure.expectedTokens; now != gap {
		t.Fatalf("a cache that was cleared counts as missing %d tokens", now-gap)
	}
	w.tick(10)
	if out := w.next(r, 10_640, 645, grown(nil, 20)); out[0].Reason != Continuation || out[0].Numbers.PredictedCachedTokens < 10_000 {
		t.Fatalf("%+v", out)
	}
}

// TestIndexAfterFailover: restored sessions are not judged by an index that has
// only just begun to listen, and predictions come from the ledger until a turn ends.
func TestIndexAfterFailover(t *testing.T) {
	w := newWorld(t, DefaultConfig(), 1)
	w.join("a", 100_000, 0)
	r := w.open("agent", GroupID{}, 10_000, 0)
	r.turn = 3
	w.step(&SessionRestored{At: w.now, Session: r.id, Class: "agent", Turn: 3, PromptTokens: 10_000, Instance: "a", AdmittedAt: w.now})
	w.where[r.id] = "a"
	w.tick(60)
	w.step(&BlocksStored{At: w.now, Instance: "a", Blocks: grown(nil, 10)})
	// The caller lives on and names only what is new to it.
	out := w.next(r, 10_320, 625, []BlockHash{5 << 50, 5<<50 + 1})
	if out[0].Kind != Admit || out[0].Reason != Continuation || out[0].Numbers.PredictedCachedTokens < 9_900 {
		t.Fatalf("%+v", out)
	}
	w.tick(5)
	w.end(r, 16, false)
	w.tick(10)
	out = w.next(r, 10_640, 627, []BlockHash{5<<50 + 2, 5<<50 + 3})
	if out[0].Reason != Continuation || out[0].Numbers.PredictedCachedTokens < 10_000 {
		t.Fatalf("%+v", out)
	}
}

// TestHeldTurnIsNamedAnew: weights may change while a turn is held; asked again, it
// is looked for under its new names.
func TestHeldTurnIsNamedAnew(t *testing.T) {
	w := newWorld(t, DefaultConfig(), 1)
	w.join("a", 1_000, 0)
	w.step(&BlocksStored{At: w.now, Instance: "a", Blocks: []BlockHash{1 << 40}})
	blocking := w.open("agent", GroupID{}, 14_000, 0)
	w.ask(blocking)
	r := w.open("agent", GroupID{}, 6_400, 0)
	if out := w.ask(r); out[len(out)-1].Kind != Hold {
		t.Fatalf("not held: %+v", out)
	}
	w.step(&BlocksStored{At: w.now, Instance: "a", Blocks: renamed(r.hashes)[:300]})
	w.step(&TurnRequested{At: w.now, Session: r.id, Class: r.class, Turn: r.turn, PromptTokens: r.prompt, NewBlocks: renamed(r.hashes)})
	w.end(blocking, 10, false)
	w.finish(blocking, Completed)
	last := w.out[len(w.out)-1]
	if last.Kind != Admit || last.Session != r.id || last.Numbers.PredictedCachedTokens != 4_800 {
		t.Fatalf("%+v", last)
	}
}
