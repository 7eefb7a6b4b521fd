package instance

import (
	"fmt"
	"hash/fnv"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// sinkModel keeps the set of cached blocks that notifications describe.
type sinkModel struct {
	t            *rapid.T
	blocks, host map[oracleKey]bool
}

func (m *sinkModel) tier(tier Tier) map[oracleKey]bool {
	if tier == TierHost {
		return m.host
	}
	return m.blocks
}

func (m *sinkModel) BlocksStored(tier Tier, chain uint64, from, to int) {
	for i := from; i < to; i++ {
		k := oracleKey{chain, i}
		if m.tier(tier)[k] {
			m.t.Fatalf("%v block %v stored twice", tier, k)
		}
		m.tier(tier)[k] = true
	}
}

func (m *sinkModel) BlocksRemoved(tier Tier, chain uint64, from, to int) {
	for i := from; i < to; i++ {
		k := oracleKey{chain, i}
		if !m.tier(tier)[k] {
			m.t.Fatalf("%v block %v removed but not stored", tier, k)
		}
		delete(m.tier(tier), k)
	}
}

func (m *sinkModel) AllCleared() {
	clear(m.blocks)
	clear(m.host)
}

func drawParams(t *rapid.T) Params {
	size := rapid.SampledFrom([]int{1, 4, 16}).Draw(t, "blockTokens")
	maxSeqs := rapid.IntRange(1, 12).Draw(t, "maxSequences")
	p := Params{
		BlockTokens:           size,
		CapacityBlocks:        rapid.IntRange(8, 120).Draw(t, "capacityBlocks"),
		MaxContextTokens:      8 * size * 8,
		MaxSequences:          maxSeqs,
		MaxBatchedTokens:      maxSeqs + rapid.IntRange(0, 60).Draw(t, "extraBudget"),
		StepBaseNanos:         rapid.Float64Range(1, 50).Draw(t, "base"),
		StepPerSequenceNanos:  rapid.Float64Range(0, 3).Draw(t, "perSequence"),
		StepPerKVTokenNanos:   rapid.Float64Range(0, 0.2).Draw(t, "perKV"),
		PrefillTokenNanos:     rapid.Float64Range(0, 2).Draw(t, "prefill"),
		PrefillDoublingTokens: rapid.SampledFrom([]int{0, 50}).Draw(t, "doubling"),
		PriorityScheduling:    rapid.Bool().Draw(t, "priority"),
	}
	if rapid.Bool().Draw(t, "offload") {
		p.HostBlocks = rapid.IntRange(1, 150).Draw(t, "hostBlocks")
		p.HostBlocksPerSecond = rapid.Float64Range(1e7, 1e9).Draw(t, "hostBlocksPerSecond")
	}
	return p
}

// drawChains makes a forest: classes, groups that share a class's head, and
// sessions that share a group's.
func drawChains(t *rapid.T, p Params) []*Chain {
	var chains []*Chain
	for i := range 3 {
		chains = append(chains, &Chain{ID: uint64(100 + i)})
	}
	for i := range 9 {
		parent := chains[rapid.IntRange(0, len(chains)-1).Draw(t, "parent")]
		chains = append(chains, &Chain{
			ID: uint64(200 + i), Parent: parent,
			SharedTokens: rapid.IntRange(0, p.BlockTokens*6).Draw(t, "shared"),
		})
	}
	return chains
}

// session is how far a chain's content exists, so that children share only what
// was a prompt, and turns grow.
type world struct {
	t      *rapid.T
	p      Params
	in     *Instance
	or     *oracle
	sink   *sinkModel
	chains []*Chain
	events []Event
	nextID uint64
	ended  map[uint64]int
	live   []uint64
}

func newWorld(t *rapid.T) *world {
	p := drawParams(t)
	w := &world{t: t, p: p, or: newOracle(p), sink: &sinkModel{t, map[oracleKey]bool{}, map[oracleKey]bool{}}, chains: drawChains(t, p), ended: map[uint64]int{}}
	in, err := New(p, w.sink)
	if err != nil {
		t.Fatal(err)
	}
	w.in = in
	return w
}

func (w *world) submit() {
	t, p := w.t, w.p
	// Only leaves are used as a request's own chain, so that nobody's output is
	// somebody else's prompt.
	ch := w.chains[rapid.IntRange(3, len(w.chains)-1).Draw(t, "chain")]
	for _, other := range w.chains {
		if other.Parent == ch {
			ch = nil
			break
		}
	}
	longest := min(p.MaxContextTokens, p.CapacityBlocks*p.BlockTokens)
	prompt := rapid.IntRange(1, longest-1).Draw(t, "prompt")
	output := rapid.IntRange(1, longest-prompt).Draw(t, "output")
	w.nextID++
	r := Request{ID: w.nextID, Chain: ch, PromptTokens: prompt, OutputTokens: output, Priority: rapid.IntRange(0, 2).Draw(t, "priority")}
	if err := w.in.Submit(r); err != nil {
		t.Fatal(err)
	}
	w.or.submit(r)
	w.live = append(w.live, r.ID)
}

func (w *world) advance(to int64) {
	t := w.t
	events := w.in.Advance(to, nil)
	w.or.advance(to)
	if !slices.Equal(events, w.or.events) {
		t.Fatalf("advance to %d\n got %+v\nwant %+v", to, events, w.or.events)
	}
	w.or.events = nil
	w.events = append(w.events, events...)
	for _, e := range events {
		if e.At > to {
			t.Fatalf("event in the future: %+v at %d", e, to)
		}
		if e.Kind == Finished {
			w.ended[e.ID]++
			w.live = slices.DeleteFunc(w.live, func(id uint64) bool { return id == e.ID })
		}
	}
}

func (w *world) check() {
	t, in, o := w.t, w.in, w.or
	in.PublishDecoded()
	for _, x := range o.running {
		if x.readyAt == 0 {
			o.commit(x)
		}
	}
	s := in.Stats()
	if s.FreeBlocks+s.IdleBlocks+s.PinnedBlocks+s.PrivateBlocks != s.TotalBlocks {
		t.Fatalf("blocks do not add up: %+v", s)
	}
	if min(s.FreeBlocks, s.IdleBlocks, s.PinnedBlocks, s.PrivateBlocks) < 0 {
		t.Fatalf("negative block count: %+v", s)
	}
	if s.FreeBlocks != o.free || s.IdleBlocks != len(o.idle) {
		t.Fatalf("free %d idle %d, oracle has %d and %d", s.FreeBlocks, s.IdleBlocks, o.free, len(o.idle))
	}
	if s.Running() != len(o.running) || s.Waiting != len(o.waiting) {
		t.Fatalf("running %d waiting %d, oracle has %d and %d", s.Running(), s.Waiting, len(o.running), len(o.waiting))
	}
	if s.HostBlocks != len(o.host) || len(w.sink.host) != len(o.host) {
		t.Fatalf("%d blocks on the host, the sink knows %d, oracle has %d", s.HostBlocks, len(w.sink.host), len(o.host))
	}
	if len(w.sink.blocks) != len(o.cached) {
		t.Fatalf("sink knows %d blocks, oracle caches %d", len(w.sink.blocks), len(o.cached))
	}
	for k := range o.cached {
		if !w.sink.blocks[k] {
			t.Fatalf("the sink does not know %v", k)
		}
	}
	for _, ch := range w.chains {
		n := w.p.MaxContextTokens
		got, want := in.CachedPrefixTokens(ch, n), len(o.hit(ch, n))*w.p.BlockTokens
		if got != want {
			t.Fatalf("chain %d: %d tokens cached, oracle has %d", ch.ID, got, want)
		}
	}
	for id, x := range o.byID {
		p, ok := in.Progress(id)
		if !ok || p.OutputTokens != x.generated {
			t.Fatalf("request %d: progress %+v %v, oracle generated %d", id, p, ok, x.generated)
		}
	}
}

func (w *world) step() {
	t := w.t
	switch rapid.SampledFrom([]string{"submit", "submit", "submit", "advance", "advance", "next", "next", "next", "abort", "reset", "pause"}).Draw(t, "op") {
	case "submit":
		w.submit()
	case "advance":
		w.advance(w.in.Now() + rapid.Int64Range(0, 2000).Draw(t, "nanos"))
	case "next":
		at, ok := w.in.NextEvent()
		w.or.nudge()
		if !ok {
			return
		}
		if at > w.in.Now()+1 {
			// Nothing may happen before the time that NextEvent named.
			before := len(w.events)
			w.advance(at - 1)
			if len(w.events) != before {
				t.Fatalf("NextEvent said %d, got %+v", at, w.events[before:])
			}
		}
		w.advance(at)
	case "abort":
		if len(w.live) > 0 {
			id := rapid.SampledFrom(w.live).Draw(t, "id")
			if !w.in.Abort(id) {
				t.Fatalf("request %d is not known", id)
			}
			w.or.abort(id)
			w.live = slices.DeleteFunc(w.live, func(x uint64) bool { return x == id })
			w.ended[id]++
		}
	case "reset":
		w.in.ResetCache()
		w.or.reset()
	case "pause":
		mode := rapid.SampledFrom([]PauseMode{Running, Running, PauseAdmissions, PauseAll}).Draw(t, "mode")
		w.in.Pause(mode)
		w.or.pause = mode
	}
}

// drain runs everything to its end by following NextEvent.
func (w *world) drain() {
	w.in.Pause(Running)
	w.or.pause = Running
	for i := 0; ; i++ {
		at, ok := w.in.NextEvent()
		w.or.nudge()
		if !ok {
			break
		}
		w.advance(at)
		if i > 100_000 {
			w.t.Fatal("the instance does not come to rest")
		}
	}
}

func TestAgreesWithStepByStepOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			w.step()
			w.check()
		}
		w.drain()
		w.check()
		for id := uint64(1); id <= w.nextID; id++ {
			if w.ended[id] != 1 {
				t.Fatalf("request %d ended %d times", id, w.ended[id])
			}
		}
		s := w.in.Stats()
		if s.UsedBlocks() != 0 || s.Running()+s.Waiting != 0 || s.Finished+s.Aborted != s.Submitted {
			t.Fatalf("something is left: %+v", s)
		}
		w.in.ResetCache()
		if n := w.in.cache.segmentCount; n != 0 {
			t.Fatalf("%d segments leaked", n)
		}
		if w.in.host != nil && w.in.host.segmentCount != 0 {
			t.Fatalf("%d host segments leaked", w.in.host.segmentCount)
		}
	})
}

func TestSameCallsGiveTheSameEvents(t *testing.T) {
	run := func() uint64 {
		p := drawnParams()
		in, err := New(p, nil)
		if err != nil {
			t.Fatal(err)
		}
		h := fnv.New64a()
		var events []Event
		for i := range 400 {
			ch := &Chain{ID: uint64(i % 40)}
			if err := in.Submit(Request{ID: uint64(i), Chain: ch, PromptTokens: 100 + i%700, OutputTokens: 1 + i*7%300}); err != nil {
				t.Fatal(err)
			}
			events = in.Advance(in.Now()+int64(i%13)*10_000_000, events[:0])
			fmt.Fprintf(h, "%+v", events)
		}
		fmt.Fprintf(h, "%+v", in.Stats())
		return h.Sum64()
	}
	if a, b := run(), run(); a != b {
		t.Fatalf("hash %x, then %x", a, b)
	}
}

// drawnParams is a small engine in which blocks run out.
func drawnParams() Params {
	return Params{
		BlockTokens: 16, CapacityBlocks: 600, MaxContextTokens: 4096, MaxSequences: 32, MaxBatchedTokens: 512,
		StepBaseNanos: 12e6, StepPerSequenceNanos: 1e5, StepPerKVTokenNanos: 5, PrefillTokenNanos: 16666, PrefillDoublingTokens: 60000,
	}
}
