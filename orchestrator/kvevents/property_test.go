package kvevents

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"holdfast/router/prefix"
)

var propertySeeds = flag.Int("kvevents.seeds", 300, "random streams of the property test")

// modelEngine is the truth: which blocks an engine holds, by the router's names, and
// the batches it published.
type modelEngine struct {
	t       *testing.T
	rng     *rand.Rand
	nextTok int32
	cached  []modelBlock // children after parents
	events  list         // since the last batch
	seq     uint64
	origin  uint64 // first batch still in the replay buffer
	buffer  [][]byte
	trimmed bool
	keep    int
	asMaps  bool
	raw     bool
	start   uint64
}

type modelBlock struct {
	hash   any
	own    prefix.Hash
	parent int // position in cached, -1 for none
	leaf   bool
}

func (e *modelEngine) restart() {
	e.cached, e.events, e.buffer = nil, nil, nil
	e.seq, e.origin, e.trimmed = e.start, e.start, false
}

// hashOf gives equal chains equal engine hashes, as engines do.
func (e *modelEngine) hashOf(own prefix.Hash) any {
	if !e.raw {
		return uint64(own) * 0x9E3779B97F4A7C15
	}
	return fmt.Appendf(nil, "%032x", uint64(own))
}

// store caches a chain of blocks, often after one that is there, sometimes again.
func (e *modelEngine) store() {
	parent, parentHash := -1, any(nil)
	version := int64(7)
	var extra any
	own := prefix.NewHasher(version, 16).Root()
	if len(e.cached) > 0 && e.rng.IntN(3) > 0 {
		parent = e.rng.IntN(len(e.cached))
		parentHash, own = e.cached[parent].hash, e.cached[parent].own
	} else if e.rng.IntN(3) == 0 {
		version = 8
		own = prefix.NewHasher(version, 16).Root()
		extra = list{list{"holdfast-8"}}
	}
	first := e.nextTok
	if e.rng.IntN(4) == 0 {
		first = int32(e.rng.IntN(3)) * 1000 // a prompt that came before
	} else {
		e.nextTok += 1000
	}
	tokens := run(int(first), 16*(1+e.rng.IntN(3)))
	var hashes list
	for _, block := range prefix.NewHasher(version, 16).AppendChain(nil, own, tokens) {
		hash := e.hashOf(block)
		hashes = append(hashes, hash)
		at := e.find(block)
		if at < 0 {
			at = len(e.cached)
			e.cached = append(e.cached, modelBlock{hash, block, parent, true})
		}
		parent = at
	}
	if e.asMaps {
		e.events = append(e.events, dict{"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parentHash, "token_ids": tokens,
			"block_size": 16, "medium": "GPU", "extra_keys": extra})
		return
	}
	e.events = append(e.events, list{"BlockStored", hashes, parentHash, tokens, 16, nil, "GPU", nil, extra})
}

func (e *modelEngine) find(own prefix.Hash) int {
	for i := range e.cached {
		if e.cached[i].own == own {
			return i
		}
	}
	return -1
}

// remove evicts from the ends of chains.
func (e *modelEngine) remove() {
	var hashes list
	for n := e.rng.IntN(4); n >= 0 && len(e.cached) > 0; n-- {
		inner := map[int]bool{}
		for _, b := range e.cached {
			inner[b.parent] = true
		}
		at := e.rng.IntN(len(e.cached))
		for inner[at] {
			at = (at + 1) % len(e.cached)
		}
		hashes = append(hashes, e.cached[at].hash)
		e.cached = append(e.cached[:at], e.cached[at+1:]...)
		for i := range e.cached {
			if e.cached[i].parent > at {
				e.cached[i].parent--
			}
		}
	}
	e.events = append(e.events, removedEvent(hashes...))
}

func (e *modelEngine) clear() {
	e.cached = nil
	e.events = append(e.events, list{"AllBlocksCleared"})
}

// publish makes a batch of what happened.
func (e *modelEngine) publish(ts float64) (uint64, []byte) {
	payload := batchOf(e.t, ts, e.events...)
	e.events = nil
	seq := e.seq
	e.seq++
	e.buffer = append(e.buffer, payload)
	if len(e.buffer) > e.keep {
		e.buffer, e.origin, e.trimmed = e.buffer[1:], e.origin+1, true
	}
	return seq, payload
}

type flight struct {
	seq     uint64
	payload []byte
}

// world connects a model engine with a subscriber through a channel that loses,
// repeats and reorders, and a replay socket that may fail.
type world struct {
	t       *testing.T
	rng     *rand.Rand
	engine  *modelEngine
	v       *view
	s       *Subscriber
	st      *stream
	at      time.Time
	flying  []flight
	up      bool
	replays bool
	faulty  bool
	// spare: the next batch arrives in its place, whatever else goes wrong.
	spare bool
	log   []string
}

func newWorld(t *testing.T, seed uint64) *world {
	rng := rand.New(rand.NewPCG(seed, 4))
	w := &world{t: t, rng: rng, v: newView(), at: time.Unix(1_000_000, 0), replays: rng.IntN(3) > 0}
	w.engine = &modelEngine{t: t, rng: rng, keep: 5 + rng.IntN(60), asMaps: rng.IntN(2) == 0, raw: rng.IntN(3) == 0, start: uint64(rng.IntN(2))}
	w.engine.restart()
	w.s = newSubscriber(t, testConfig(w.v))
	w.s.now = func() time.Time { return w.at }
	w.st = w.s.streams[0]
	if w.replays {
		w.st.replay = w.replay
	}
	w.v.fail = func() bool { return w.faulty && rng.IntN(40) == 0 }
	return w
}

func (w *world) note(format string, args ...any) { w.log = append(w.log, fmt.Sprintf(format, args...)) }

func (w *world) replay(_ context.Context, from uint64, visit func(uint64, []byte) error) error {
	for i, payload := range w.engine.buffer {
		if w.faulty && w.rng.IntN(30) == 0 {
			return errors.New("timed out")
		}
		if seq := w.engine.origin + uint64(i); seq >= from {
			if err := visit(seq, payload); err != nil {
				return err
			}
		}
	}
	return nil
}

// check ends a connection as session does when the stream cannot go on.
func (w *world) check(err error) {
	if err == nil {
		return
	}
	w.note("session ends: %v", err)
	w.cut()
}

func (w *world) cut() {
	w.up, w.flying = false, nil
	w.st.disconnected(context.Background(), errors.New("cut"))
}

func (w *world) connect() {
	w.note("connect at seq %d", w.engine.seq)
	w.up = true
	w.check(w.st.connected(context.Background()))
}

func (w *world) deliver() {
	if len(w.flying) == 0 || !w.up {
		return
	}
	f := w.flying[0]
	w.flying = w.flying[1:]
	w.note("deliver %d", f.seq)
	w.check(w.st.frame(context.Background(), f.seq, f.payload))
}

// step lets one thing happen.
func (w *world) step() {
	w.at = w.at.Add(time.Duration(1+w.rng.IntN(20)) * time.Millisecond)
	switch w.rng.IntN(20) {
	case 0, 1, 2, 3:
		w.engine.store()
	case 4, 5:
		w.engine.remove()
	case 6:
		if w.rng.IntN(4) == 0 {
			w.engine.clear()
		}
	case 7, 8, 9, 10:
		w.publish()
	case 11:
		w.odd()
	case 12:
		w.check(w.st.probe(context.Background(), w.rng.IntN(2) == 0))
	default:
		w.deliver()
	}
	if !w.up && w.rng.IntN(5) == 0 {
		w.connect()
	}
}

func (w *world) publish() {
	seq, payload := w.engine.publish(float64(w.at.UnixMilli()) / 1000)
	if !w.up {
		return
	}
	f := flight{seq, payload}
	if w.spare {
		w.spare = false
		w.flying = append(w.flying, f, f) // the second one keeps later batches from passing it
		return
	}
	switch {
	case w.faulty && w.rng.IntN(15) == 0:
		w.note("lose %d", seq)
	case w.faulty && w.rng.IntN(15) == 0:
		w.flying = append(w.flying, f, f)
	case w.faulty && len(w.flying) > 0 && w.rng.IntN(15) == 0:
		w.note("swap %d", seq)
		last := len(w.flying) - 1
		w.flying = append(w.flying[:last], f, w.flying[last])
	default:
		w.flying = append(w.flying, f)
	}
}

// odd is what happens rarely.
func (w *world) odd() {
	switch w.rng.IntN(6) {
	case 0:
		w.note("cut")
		w.cut()
	case 1:
		w.note("restart")
		w.cut()
		w.engine.restart()
	case 2:
		// The engine restarts behind a proxy: the connection stays. Were its first
		// batches lost up to just the number awaited, nothing would tell it from before;
		// that one case is left out, and named in docs/kv-events.md.
		w.note("restart unseen")
		w.engine.restart()
		w.spare = true
	case 3:
		// The caller resets the cache. An idle engine tells it with its next batch.
		w.note("ordered clear")
		w.engine.clear()
		if err := w.s.Clear(context.Background()); err != nil {
			w.note("clear not taken: %v", err)
		}
	}
}

// settle lets everything arrive, with no more faults, and compares.
func (w *world) settle(seed uint64) {
	w.faulty = false
	for range 3 {
		if !w.up {
			w.connect()
		}
		w.at = w.at.Add(10 * time.Minute) // the patience of every retry
		w.engine.store()
		w.publish()
		for len(w.flying) > 0 {
			w.deliver()
		}
		w.check(w.st.probe(context.Background(), true))
	}
	truth := map[place]bool{}
	for _, b := range w.engine.cached {
		truth[place{0, 0, b.own}] = true
	}
	for claimed := range w.v.blocks {
		if !truth[claimed] {
			w.fail(seed, "block %x is claimed and not there", claimed.block)
		}
	}
	h := w.s.Health()
	if w.replays && !w.engine.trimmed && !h.Trusted {
		w.fail(seed, "the whole history is at hand and not trusted: %s", h.Reason)
	}
	if w.replays && h.Trusted && len(w.v.blocks) != len(truth) && !w.engine.trimmed {
		w.fail(seed, "trusted, with %d of %d blocks", len(w.v.blocks), len(truth))
	}
	if int(h.OwnHashes) != len(w.v.blocks) {
		w.fail(seed, "%d hashes in the table, %d told", h.OwnHashes, len(w.v.blocks))
	}
	w.faulty = true
}

func (w *world) fail(seed uint64, format string, args ...any) {
	w.t.Helper()
	for _, line := range w.log[max(0, len(w.log)-60):] {
		w.t.Log(line)
	}
	w.t.Fatalf("seed %d (replay %v): %s", seed, w.replays, fmt.Sprintf(format, args...))
}

// TestNoBlockIsClaimedThatIsNotThere runs random streams with loss, repetition,
// reordering, interruption, restart seen and unseen, failing replays and a router
// that does not listen. After each part, what the router was told must be true, and
// complete if it is called trusted.
func TestNoBlockIsClaimedThatIsNotThere(t *testing.T) {
	claimed, resyncs, replayed, complete := 0, uint64(0), uint64(0), 0
	for seed := range uint64(*propertySeeds) {
		w := newWorld(t, seed)
		w.connect()
		for range 6 {
			w.faulty = true
			for range 120 {
				w.step()
			}
			w.settle(seed)
			claimed += len(w.v.blocks)
			if w.s.Health().Trusted {
				complete++
			}
		}
		resyncs += w.s.Health().Resyncs
		replayed += w.s.Health().ReplayedBatches
	}
	t.Logf("%d blocks claimed, %d times complete of %d, %d resyncs, %d batches replayed", claimed, complete, 6**propertySeeds, resyncs, replayed)
	if claimed == 0 || resyncs == 0 || replayed == 0 || complete == 0 {
		t.Fatal("the streams were too tame")
	}
}
