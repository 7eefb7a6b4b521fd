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
	cfg.Pressure.Enabled = false
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
	p.step(&TurnRequested{At: p.now, Session: s.id, Class: s.class, Turn: s.turn, PromptTokens: int64(s.known+blocks) * 16, KnownBlocks: s.known, NewBlocks: p.hashes})
	s.known += blocks
	if s.at != "" {
		p.step(&BlocksStored{At: p.now, Instance: s.at, Blocks: p.hashes})
	}
}

func (p *benchPool) end(n int) {
	s := &p.sessions[n]
	p.step(&TurnEnded{At: p.now, Session: s.id, Turn: s.turn, Instance: s.at, PromptTokens: int64(s.known) * 16, CachedTokens: int64(s.known) * 16, OutputTokens: 16})
	s.turn++
}

// BenchmarkAdmitContinuation is a protected session's next turn, 26 blocks longer.
func BenchmarkAdmitContinuation(b *testing.B) {
	p := newBenchPool(b)
	ev := &TurnRequested{}
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
		*ev = TurnRequested{At: p.now, Session: s.id, Class: s.class, Turn: s.turn, PromptTokens: int64(s.known+blocks) * 16, KnownBlocks: s.known, NewBlocks: p.hashes}
		begin := time.Now()
		p.step(ev)
		took := time.Since(begin)
		s.known += blocks
		p.step(&BlocksStored{At: p.now, Instance: s.at, Blocks: p.hashes})
		p.end(n)
		return took
	})
}

// BenchmarkAdmitNew is the end of one session, which admits the first of 2,000
// held ones (placed among all instances with room, its 2,000-block prompt looked
// up at all of them), and a new session that is held.
func BenchmarkAdmitNew(b *testing.B) {
	p := newBenchPool(b)
	ended, requested := &SessionEnded{}, &TurnRequested{}
	p.latencies(b, func() time.Duration {
		n := p.next % len(p.sessions)
		for p.sessions[n].at == "" {
			p.next++
			n = p.next % len(p.sessions)
		}
		p.next++
		s := &p.sessions[n]
		p.now += 1000
		*ended = SessionEnded{At: p.now, Session: s.id, Status: Completed}
		begin := time.Now()
		p.step(ended)
		took := time.Since(begin)
		p.hashes = p.hashes[:0]
		for range benchContext / 16 {
			p.fresh++
			p.hashes = append(p.hashes, BlockHash(p.fresh))
		}
		*s = benchSession{id: s.id, class: s.class}
		*requested = TurnRequested{At: p.now, Session: s.id, Class: s.class, PromptTokens: benchContext, NewBlocks: p.hashes}
		begin = time.Now()
		p.step(requested)
		took += time.Since(begin)
		s.known = benchContext / 16
		return took
	})
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
