package router

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// benchPool is a saturated pool: 64 instances, 10,000 live sessions of three
// classes with prefixes in the index, and a backlog of held ones.
type benchPool struct {
	core     *Core
	now      Nanos
	sessions []benchSession
	out      []Decision
	hashes   []BlockHash
	next     int
	fresh    uint64

	// Events are reused, so that what is allocated is the core's doing.
	requested TurnRequested
	ended     TurnEnded
	over      SessionEnded
	stored    BlocksStored
}

type benchSession struct {
	id    SessionID
	class ClassID
	turn  int
	known int
	at    InstanceID
}

const (
	benchInstances = 64
	benchLive      = 10_000
	benchHeld      = 2_000
	benchContext   = 8_000
)

func newBenchPool(tb testing.TB) *benchPool {
	cfg := DefaultConfig()
	cfg.Footprint.PriorTokens = benchContext
	p := &benchPool{core: mustCore(tb, cfg), now: second}
	for i := range benchInstances {
		p.step(&InstanceJoined{At: p.now, Instance: InstanceID(fmt.Sprintf("engine-%02d", i)), CapacityBlocks: 400_000, BlockTokens: 16, MaxContextTokens: 131_072, PrefillTokensPerSecond: 60_000})
	}
	classes := []ClassID{"agent", "rlvr", "rlhf"}
	for n := range benchLive + benchHeld {
		p.sessions = append(p.sessions, benchSession{id: sid(n), class: classes[n%3]})
		p.request(n, benchContext/16)
		if n < benchLive && p.sessions[n].at == "" {
			tb.Fatalf("session %d of the live ones was held: %+v", n, p.out)
		}
		if n == benchLive-1 {
			// Close the gates, so that the rest is held.
			for _, w := range p.core.instances {
				w.baseCap, w.cap = len(w.sessions), len(w.sessions)
			}
		}
	}
	for n := range benchLive {
		p.end(n)
	}
	return p
}

func (p *benchPool) step(ev Event) {
	p.out = p.core.Step(ev, p.out[:0])
	for i := range p.out {
		if d := &p.out[i]; d.Kind == Admit {
			if n := int(d.Session[14])<<8 | int(d.Session[15]); n < len(p.sessions) && p.sessions[n].id == d.Session {
				p.sessions[n].at = d.Instance
			}
		}
	}
}

// request asks for the session's next turn with so many new blocks.
func (p *benchPool) request(n, blocks int) {
	s := &p.sessions[n]
	p.hashes = p.hashes[:0]
	for range blocks {
		p.fresh++
		p.hashes = append(p.hashes, BlockHash(p.fresh))
	}
	p.now += 1000
	p.requested = TurnRequested{At: p.now, Session: s.id, Class: s.class, Turn: s.turn, PromptTokens: int64(s.known+blocks) * 16, KnownBlocks: s.known, NewBlocks: p.hashes}
	p.step(&p.requested)
	s.known += blocks
	if s.at != "" {
		p.stored = BlocksStored{At: p.now, Instance: s.at, Blocks: p.hashes}
		p.step(&p.stored)
	}
}

func (p *benchPool) end(n int) {
	s := &p.sessions[n]
	p.ended = TurnEnded{At: p.now, Session: s.id, Turn: s.turn, Instance: s.at, PromptTokens: int64(s.known) * 16, CachedTokens: int64(s.known) * 16, OutputTokens: 16}
	p.step(&p.ended)
	s.turn++
}

// BenchmarkAdmitContinuation is a protected session's next turn, 26 blocks longer.
func BenchmarkAdmitContinuation(b *testing.B) {
	p := newBenchPool(b)
	p.latencies(b, func() time.Duration {
		n := p.next % benchLive
		p.next++
		s := &p.sessions[n]
		p.hashes = p.hashes[:0]
		blocks := 26
		if s.known > 8000 {
			s.known, blocks = 0, benchContext/16
		}
		for range blocks {
			p.fresh++
			p.hashes = append(p.hashes, BlockHash(p.fresh))
		}
		p.now += 1000
		p.requested = TurnRequested{At: p.now, Session: s.id, Class: s.class, Turn: s.turn, PromptTokens: int64(s.known+blocks) * 16, KnownBlocks: s.known, NewBlocks: p.hashes}
		begin := time.Now()
		p.step(&p.requested)
		took := time.Since(begin)
		s.known += blocks
		p.stored = BlocksStored{At: p.now, Instance: s.at, Blocks: p.hashes}
		p.step(&p.stored)
		p.end(n)
		return took
	})
}

// BenchmarkAdmitNew is a new session while all 64 instances have room: its
// 500-block prompt, a third of which is cached somewhere, is looked up and costed
// at all of them. Its end and that of its blocks are not timed.
func BenchmarkAdmitNew(b *testing.B) {
	p := newBenchPool(b)
	for _, w := range p.core.instances {
		w.baseCap, w.cap = 1000, 1000
	}
	p.step(&Tick{At: p.now})
	p.latencies(b, func() time.Duration {
		n := p.next % len(p.sessions)
		p.next++
		s := &p.sessions[n]
		p.now += 1000
		p.over = SessionEnded{At: p.now, Session: s.id, Status: Completed}
		p.step(&p.over)
		p.hashes = p.hashes[:0]
		for i := range benchContext / 16 {
			// Every prompt begins like another session's.
			h := BlockHash(n*(benchContext/16) + i)
			if i > benchContext/48 {
				p.fresh++
				h = BlockHash(p.fresh)
			}
			p.hashes = append(p.hashes, h)
		}
		*s = benchSession{id: s.id, class: s.class}
		p.requested = TurnRequested{At: p.now, Session: s.id, Class: s.class, PromptTokens: benchContext, NewBlocks: p.hashes}
		begin := time.Now()
		p.step(&p.requested)
		took := time.Since(begin)
		if s.at == "" {
			b.Fatalf("held: %+v", p.out)
		}
		return took
	})
}

// BenchmarkAdmitHeld is the end of one session in a full pool, which admits the
// first of 2,000 held ones.
func BenchmarkAdmitHeld(b *testing.B) {
	p := newBenchPool(b)
	p.latencies(b, func() time.Duration {
		n := p.nextAdmitted()
		s := &p.sessions[n]
		p.now += 1000
		p.over = SessionEnded{At: p.now, Session: s.id, Status: Completed}
		begin := time.Now()
		p.step(&p.over)
		took := time.Since(begin)
		*s = benchSession{id: s.id, class: s.class}
		p.request(n, benchContext/16)
		return took
	})
}

// BenchmarkHold is a new session that joins 2,000 held ones in a full pool.
func BenchmarkHold(b *testing.B) {
	p := newBenchPool(b)
	p.latencies(b, func() time.Duration {
		n := p.nextAdmitted()
		s := &p.sessions[n]
		p.now += 1000
		p.over = SessionEnded{At: p.now, Session: s.id, Status: Completed}
		p.step(&p.over)
		p.hashes = p.hashes[:0]
		for range benchContext / 16 {
			p.fresh++
			p.hashes = append(p.hashes, BlockHash(p.fresh))
		}
		*s = benchSession{id: s.id, class: s.class}
		p.requested = TurnRequested{At: p.now, Session: s.id, Class: s.class, PromptTokens: benchContext, NewBlocks: p.hashes}
		begin := time.Now()
		p.step(&p.requested)
		took := time.Since(begin)
		s.known = benchContext / 16
		return took
	})
}

// nextAdmitted is the next session that has a place.
func (p *benchPool) nextAdmitted() int {
	for {
		n := p.next % len(p.sessions)
		p.next++
		if p.sessions[n].at != "" {
			return n
		}
	}
}

// latencies runs an operation b.N times and reports its median and 99th percentile.
func (p *benchPool) latencies(b *testing.B, operation func() time.Duration) {
	took := make([]time.Duration, 0, b.N)
	for range 2000 {
		operation() // let buffers grow to their working size
	}
	b.ReportAllocs()
	for b.Loop() {
		took = append(took, operation())
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-us")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-us")
}
