package sim

import (
	"encoding/binary"
	"hash"
	"hash/fnv"
	"math"

	"holdfast/router"
	"holdfast/router/sim/instance"
)

// reversalShare is the size from which a cap's change of direction counts as a
// reversal.
const reversalShare = 0.1

// metrics gathers what a run is judged by. Everything but the fingerprint counts
// from the end of the warm-up.
type metrics struct {
	measuring bool
	startedAt int64
	before    []instance.Stats

	classes []classCount
	groups  []float64
	turns   int64
	// ownTokens is what continuations had in the cache of their own, ownCachedTokens
	// the part found again.
	ownTokens, ownCachedTokens int64

	oldestHold int64
	caps       []capTrack
	print      hash.Hash64

	iterations  []Iteration
	series      []Point
	lastSampled []instance.Stats
}

type classCount struct {
	released, completed  int
	latencies            []float64
	oldestHold           int64
	tokenSeconds         float64
	residencySeconds     float64
	total, releasedTotal int
}

// capTrack follows the turning points of one instance's cap.
type capTrack struct {
	base, cap int
	extreme   float64
	direction int
	reversals int
}

func (m *metrics) init(w *world) {
	m.classes = make([]classCount, len(w.classes))
	m.caps = make([]capTrack, len(w.cfg.Instances))
	m.print = fnv.New64a()
}

func (m *metrics) begin(w *world) {
	m.measuring = true
	m.startedAt = w.now
	m.before = m.before[:0]
	for _, e := range w.engines {
		if e.up {
			w.advance(e)
		}
		m.before = append(m.before, e.stats())
	}
}

// stats are the engine's counters over all its lives.
func (e *engine) stats() instance.Stats {
	if !e.up {
		return e.lost
	}
	return addStats(e.in.Stats(), e.lost)
}

// addStats adds the cumulative counters of b to a.
func addStats(a, b instance.Stats) instance.Stats {
	a.PromptTokens += b.PromptTokens
	a.CachedTokens += b.CachedTokens
	a.HostTokens += b.HostTokens
	a.GeneratedTokens += b.GeneratedTokens
	a.ComputedTokens += b.ComputedTokens
	a.RecomputedTokens += b.RecomputedTokens
	a.Finished += b.Finished
	a.Preemptions += b.Preemptions
	a.BusyNanos += b.BusyNanos
	return a
}

// subStats takes the cumulative counters of b from those of a.
func subStats(a, b instance.Stats) instance.Stats {
	a.PromptTokens -= b.PromptTokens
	a.CachedTokens -= b.CachedTokens
	a.HostTokens -= b.HostTokens
	a.GeneratedTokens -= b.GeneratedTokens
	a.ComputedTokens -= b.ComputedTokens
	a.RecomputedTokens -= b.RecomputedTokens
	a.Finished -= b.Finished
	a.Preemptions -= b.Preemptions
	a.BusyNanos -= b.BusyNanos
	return a
}

func (m *metrics) released(w *world, s *session) {
	m.classes[s.class].releasedTotal++
	if m.measuring {
		m.classes[s.class].released++
	}
}

func (m *metrics) admitted(w *world, s *session) {
	m.held(s, w.now-s.askedAt)
}

func (m *metrics) held(s *session, nanos int64) {
	if m.measuring {
		m.oldestHold = max(m.oldestHold, nanos)
		c := &m.classes[s.class]
		c.oldestHold = max(c.oldestHold, nanos)
	}
}

func (m *metrics) finishedTurn(w *world, s *session, ev instance.Event) {
	if !m.measuring {
		return
	}
	m.turns++
	if s.turn > 0 {
		shared := s.chain.SharedTokens
		own := s.contextTokens - ev.OutputTokens - s.plan.Turns[s.turn-1].AppendTokens - shared
		m.ownTokens += int64(max(0, own))
		m.ownCachedTokens += int64(min(max(0, ev.CachedTokens-shared), max(0, own)))
	}
}

func (m *metrics) completed(w *world, s *session) {
	var b [24]byte
	binary.LittleEndian.PutUint64(b[:], uint64(w.now))
	binary.LittleEndian.PutUint64(b[8:], uint64(s.index))
	binary.LittleEndian.PutUint64(b[16:], math.Float64bits(s.tokenSeconds))
	m.print.Write(b[:])
	g := w.groups[s.group]
	g.left--
	c := &m.classes[s.class]
	c.total++
	if !m.measuring {
		return
	}
	c.completed++
	c.latencies = append(c.latencies, float64(w.now-s.releasedAt)/1e9)
	c.tokenSeconds += s.tokenSeconds
	c.residencySeconds += s.residencySeconds
	if g.left == 0 {
		m.groups = append(m.groups, float64(w.now-g.releasedAt)/1e9)
	}
}

func (m *metrics) capChanged(w *world, d *router.Decision) {
	e := w.engineNamed(d.Instance)
	if e == nil {
		return
	}
	t := &m.caps[e.index]
	t.base, t.cap = d.Numbers.BaseCap, d.Numbers.Cap
	t.follow(float64(t.cap), m.measuring)
}

// follow counts a reversal when the cap has turned back by reversalShare from its
// last extreme.
func (t *capTrack) follow(v float64, counts bool) {
	switch {
	case t.direction == 0:
		if t.extreme == 0 {
			t.extreme = v
		}
		if math.Abs(v-t.extreme) >= reversalShare*t.extreme {
			t.direction = 1
			if v < t.extreme {
				t.direction = -1
			}
			t.extreme = v
		}
	case (v-t.extreme)*float64(t.direction) >= 0:
		t.extreme = v
	case math.Abs(v-t.extreme) >= reversalShare*t.extreme:
		t.direction = -t.direction
		t.extreme = v
		if counts {
			t.reversals++
		}
	}
}

func (m *metrics) iterated(w *world, seconds float64) {
	it := Iteration{Seconds: seconds, EndSeconds: float64(w.now) / 1e9}
	total := 0
	for _, n := range w.trainer.consumed {
		total += n
	}
	for b, n := range w.trainer.consumed {
		share := float64(n) / float64(total)
		it.Shares = append(it.Shares, share)
		it.TVPoints += 50 * math.Abs(share-w.classes[b].Share)
	}
	m.iterations = append(m.iterations, it)
}

// sample records one point of the time series.
func (m *metrics) sample(w *world) {
	p := Point{AtSeconds: float64(w.now) / 1e9}
	if m.lastSampled == nil {
		m.lastSampled = make([]instance.Stats, len(w.engines))
	}
	for i, e := range w.engines {
		if e.up {
			w.advance(e)
		}
		st := e.stats()
		d := subStats(st, m.lastSampled[i])
		m.lastSampled[i] = st
		ip := InstancePoint{BaseCap: m.caps[i].base, Cap: m.caps[i].cap, Turns: d.Finished}
		if d.PromptTokens > 0 {
			ip.Hit = float64(d.CachedTokens) / float64(d.PromptTokens)
		}
		if e.up {
			now := e.in.Stats()
			ip.Running, ip.Waiting = now.Running(), now.Waiting
			ip.UsedShare = float64(now.UsedBlocks()) / float64(now.TotalBlocks)
			ip.Sessions = len(e.sessions)
		}
		p.Instances = append(p.Instances, ip)
	}
	for i := range m.classes {
		p.Completed = append(p.Completed, m.classes[i].total)
		p.Backlog = append(p.Backlog, m.classes[i].releasedTotal-m.classes[i].total)
	}
	m.series = append(m.series, p)
}
