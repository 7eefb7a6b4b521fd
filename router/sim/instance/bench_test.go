package instance

import (
	"container/heap"
	"math"
	"math/rand/v2"
	"syscall"
	"testing"
)

// load is a closed loop for one Qwen-like instance, a quarter of a pool that
// serves about six Agent turns a second beside a hundred long decodes: some 22 Agent sessions
// whose prompts grow from 8k tokens on (mean about 38k), and 25 long decodes.
type load struct {
	in       *Instance
	rng      *rand.Rand
	sessions []agentSession
	class    *Chain
	wakes    wakeHeap
	nextID   uint64
	turns    int
}

type agentSession struct {
	chain     *Chain
	context   int
	turnsLeft int
	growth    float64
	long      bool
}

type wake struct {
	at      int64
	session int
}

type wakeHeap []wake

func (h wakeHeap) Len() int           { return len(h) }
func (h wakeHeap) Less(i, j int) bool { return h[i].at < h[j].at }
func (h wakeHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *wakeHeap) Push(x any)        { *h = append(*h, x.(wake)) }
func (h *wakeHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

const agents, longs = 22, 25

func newLoad(tb testing.TB) *load {
	in, err := New(QwenLike(), nil)
	if err != nil {
		tb.Fatal(err)
	}
	l := &load{in: in, rng: rand.New(rand.NewPCG(1, 2)), class: &Chain{ID: 1}}
	for i := range agents + longs {
		l.sessions = append(l.sessions, agentSession{long: i >= agents})
		heap.Push(&l.wakes, wake{l.rng.Int64N(60e9), i})
	}
	return l
}

func (l *load) lognormal(median, sigma float64) float64 {
	return median * math.Exp(sigma*l.rng.NormFloat64())
}

// next submits a session's next turn.
func (l *load) next(i int) {
	s := &l.sessions[i]
	if s.turnsLeft == 0 {
		l.nextID++
		s.chain = &Chain{ID: 1<<40 + l.nextID}
		s.turnsLeft, s.context = 1, 156
		if !s.long {
			s.chain.Parent, s.chain.SharedTokens = l.class, 2048
			s.turnsLeft = max(1, int(l.lognormal(66, 0.5)))
			s.context = 2048 + int(l.lognormal(8000, 0.45))
			s.growth = l.lognormal(420, 0.7)
		}
	}
	output := max(1, int(l.lognormal(148, 1.25)))
	if s.long {
		output = int(l.lognormal(47_583, 0.72))
	}
	output = min(output, 131_072-s.context)
	if output < 1 {
		s.turnsLeft = 0
		l.next(i)
		return
	}
	l.nextID++
	if err := l.in.Submit(Request{ID: uint64(i)<<32 | l.nextID, Chain: s.chain, PromptTokens: s.context, OutputTokens: output}); err != nil {
		panic(err)
	}
	s.turnsLeft--
	s.context += output + int(s.growth)
	if s.context >= 131_000 {
		s.turnsLeft = 0
	}
	l.turns++
}

func (l *load) run(until int64, events []Event) []Event {
	for {
		at, ok := l.in.NextEvent()
		if len(l.wakes) > 0 && (!ok || l.wakes[0].at < at) {
			at, ok = l.wakes[0].at, true
		}
		if !ok || at > until {
			return l.in.Advance(until, events[:0])
		}
		events = l.in.Advance(at, events[:0])
		for _, e := range events {
			if e.Kind == Finished {
				heap.Push(&l.wakes, wake{e.At + int64(l.lognormal(1.1e9, 1.4)), int(e.ID >> 32)})
			}
		}
		for len(l.wakes) > 0 && l.wakes[0].at <= at {
			w := heap.Pop(&l.wakes).(wake)
			l.next(w.session)
		}
	}
}

// BenchmarkQwenInstance reports how many seconds of one loaded instance are
// simulated in a second. The load's own event queue is part of the cost.
func BenchmarkQwenInstance(b *testing.B) {
	l := newLoad(b)
	events := l.run(3600e9, nil)
	before, turns := l.in.Stats(), l.turns
	b.ReportAllocs()
	b.ResetTimer()
	start, cpu := l.in.Now(), cpuSeconds(b)
	for range b.N {
		events = l.run(l.in.Now()+100e9, events)
	}
	b.StopTimer()
	s := l.in.Stats()
	seconds := float64(l.in.Now()-start) / 1e9
	cpu = cpuSeconds(b) - cpu
	b.ReportMetric(seconds/b.Elapsed().Seconds(), "sim-s/s")
	b.ReportMetric(seconds/cpu, "sim-s/cpu-s")
	b.ReportMetric(float64(l.turns-turns)/seconds, "turns/sim-s")
	b.ReportMetric(float64(s.Steps-before.Steps)/seconds, "steps/sim-s")
	b.ReportMetric(float64(s.Preemptions-before.Preemptions)/seconds, "preempt/sim-s")
	b.ReportMetric(float64(s.UsedBlocks())/float64(s.TotalBlocks), "used")
	b.ReportMetric(float64(s.CachedTokens-before.CachedTokens)/float64(s.PromptTokens-before.PromptTokens), "hit")
	b.ReportMetric(float64(s.PromptTokens-before.PromptTokens)/float64(l.turns-turns), "prompt/turn")
	b.ReportMetric(cpu*1e9/float64(l.turns-turns), "cpu-ns/turn")
}

// cpuSeconds is the process's own time, which counts on a busy machine.
func cpuSeconds(b *testing.B) float64 {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
}
