package residency

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

var testConfig = Config{PriorTokens: 32768, PriorSeconds: 300, PriorSessions: 2, WindowSessions: 128}

// life is a session that begins at some footprint, grows at a pace and ends.
type life struct {
	born, start, final, pace float64
}

func (l life) seconds() float64      { return (l.final - l.start) / l.pace }
func (l life) tokenSeconds() float64 { return l.seconds() * (l.final + l.start) / 2 }

// kind draws lives of one class.
type kind func(rng *rand.Rand) life

func lognormal(rng *rand.Rand, median, sigma float64) float64 {
	return median * math.Exp(sigma*rng.NormFloat64())
}

func agent(rng *rand.Rand) life {
	start := min(100_000, lognormal(rng, 8000, 0.45))
	return life{start: start, final: min(131_072, start+lognormal(rng, 66, 0.5)*lognormal(rng, 420, 0.7)), pace: 60}
}

func rlvr(rng *rand.Rand) life {
	return life{start: 156, final: min(131_072, 156+lognormal(rng, 47_583, 0.72)), pace: 55}
}

func rlhf(rng *rand.Rand) life {
	return life{start: 2000, final: 2000 + lognormal(rng, 4000, 0.6), pace: 55}
}

type queue []life

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].born+q[i].seconds() < q[j].born+q[j].seconds() }
func (q queue) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)        { *q = append(*q, x.(life)) }
func (q *queue) Pop() any {
	old := *q
	l := old[len(old)-1]
	*q = old[:len(old)-1]
	return l
}

// run keeps `live` sessions of a class alive from a cold start for so long, feeds
// the estimator as the router does (an observation every ten seconds), and
// returns it at the end.
func run(draw kind, live int, seconds float64, seed uint64) *Estimator {
	rng := rand.New(rand.NewPCG(seed, 9))
	e := New(testConfig)
	var q queue
	enter := func(now float64) {
		l := draw(rng)
		l.born = now
		e.Enter(int64(l.start))
		heap.Push(&q, l)
	}
	for range live {
		enter(0)
	}
	const step = 10.0
	seen := map[life]float64{}
	observe := func(l life, until float64) {
		from := l.born
		if at, ok := seen[l]; ok {
			from = at
		}
		size := func(t float64) int64 { return int64(l.start + (t-l.born)*l.pace) }
		e.Advance(size(from), size(until), until-from)
		seen[l] = until
	}
	for now := step; now <= seconds; now += step {
		for len(q) > 0 && q[0].born+q[0].seconds() <= now {
			l := heap.Pop(&q).(life)
			end := l.born + l.seconds()
			observe(l, end)
			delete(seen, l)
			e.End(int64(l.final), l.seconds(), l.tokenSeconds())
			enter(end)
		}
		for _, l := range q {
			observe(l, now)
		}
	}
	return e
}

// truth is sum Z / sum T and mean T over many lives.
func truth(draw kind) (footprint, seconds float64) {
	rng := rand.New(rand.NewPCG(99, 9))
	var z, t float64
	const n = 200_000
	for range n {
		l := draw(rng)
		z += l.tokenSeconds()
		t += l.seconds()
	}
	return z / t, t / n
}

var kinds = []struct {
	name string
	draw kind
}{{"agent", agent}, {"rlvr", rlvr}, {"rlhf", rlhf}}

// TestSteadyState: after a long run the estimate is sum Z / sum T and the mean
// residency, within the noise of the window.
func TestSteadyState(t *testing.T) {
	for _, k := range kinds {
		footprint, seconds := truth(k.draw)
		var gotFootprint, gotSeconds float64
		const seeds = 4
		for seed := range uint64(seeds) {
			e := run(k.draw, 40, 15*seconds, seed).Expect(131_072)
			gotFootprint += e.FootprintTokens / seeds
			gotSeconds += e.ResidencySeconds / seeds
		}
		t.Logf("%s %.3f %.3f", k.name, gotFootprint/footprint, gotSeconds/seconds)
		if off := gotFootprint/footprint - 1; math.Abs(off) > 0.12 {
			t.Errorf("%s: footprint %.0f, true %.0f (%+.1f %%)", k.name, gotFootprint, footprint, 100*off)
		}
		if off := gotSeconds/seconds - 1; math.Abs(off) > 0.12 {
			t.Errorf("%s: residency %.0f s, true %.0f s (%+.1f %%)", k.name, gotSeconds, seconds, 100*off)
		}
	}
}

// TestColdStart is what the estimator is for: when half of a mean life has
// passed, those that finished are the short ones. The plain mean over them is far
// too low; the estimate must not be, and must not be absurdly high either.
func TestColdStart(t *testing.T) {
	for _, k := range kinds[:2] {
		footprint, seconds := truth(k.draw)
		for _, share := range []float64{0.3, 0.5, 0.8} {
			t.Run(fmt.Sprintf("%s/%.1f", k.name, share), func(t *testing.T) {
				var plain, aware float64
				const seeds = 8
				for seed := range uint64(seeds) {
					e := run(k.draw, 100, share*seconds, seed)
					plain += e.Finished().FootprintTokens / footprint / seeds
					aware += e.Expect(131_072).FootprintTokens / footprint / seeds
				}
				t.Logf("%.2f %.2f", aware, plain)
				if plain > 0.9 {
					t.Errorf("the plain mean is %.2f of the truth: this is no cold start", plain)
				}
				if aware < 0.8 || aware > 1.6 {
					t.Errorf("the estimate is %.2f of the truth (plain: %.2f)", aware, plain)
				}
			})
		}
	}
}

// TestPrior: without history the prior; with little, something between.
func TestPrior(t *testing.T) {
	e := New(testConfig)
	if got := e.Expect(131_072); got.FootprintTokens != 32768 || got.ResidencySeconds != 300 || got.Endings != 0 {
		t.Fatalf("empty: %+v", got)
	}
	if got := e.Finished(); got.FootprintTokens != 32768 || got.ResidencySeconds != 300 {
		t.Fatalf("empty, plain: %+v", got)
	}
	for range 100 {
		e.Enter(100)
	}
	before := e.Expect(131_072)
	if before.FootprintTokens < 10_000 || before.FootprintTokens > 60_000 {
		t.Fatalf("nothing seen but entries: %+v", before)
	}
	for range 100 {
		e.Advance(100, 1100, 20)
		e.End(1100, 20, 20*600)
	}
	got := e.Expect(131_072)
	if got.FootprintTokens < 550 || got.FootprintTokens > 900 || got.ResidencySeconds < 15 || got.ResidencySeconds > 30 {
		t.Fatalf("a hundred equal short lives of 20 s around 600 tokens: %+v", got)
	}
}

// TestForgets: lengths that double are followed within some two windows.
func TestForgets(t *testing.T) {
	e := New(testConfig)
	live := func(n int, final int64, seconds float64) {
		for range n {
			e.Enter(1000)
			e.Advance(1000, final, seconds)
			e.End(final, seconds, seconds*float64(1000+final)/2)
		}
	}
	live(600, 11_000, 100)
	short := e.Expect(131_072)
	live(256, 21_000, 200)
	long := e.Expect(131_072)
	if short.FootprintTokens < 5400 || short.FootprintTokens > 7500 {
		t.Errorf("before: %+v", short)
	}
	if long.FootprintTokens < 9500 || long.FootprintTokens > 12_500 || long.ResidencySeconds < 170 || long.ResidencySeconds > 230 {
		t.Errorf("after: %+v", long)
	}
	if plain := e.Finished(); math.Abs(plain.FootprintTokens/11_000-1) > 0.15 {
		t.Errorf("plain, after: %+v", plain)
	}
}

// TestOddNumbers: nothing may become infinite or not a number.
func TestOddNumbers(t *testing.T) {
	for _, feed := range []func(*Estimator){
		func(e *Estimator) { e.Enter(0); e.End(0, 0, 0) },
		func(e *Estimator) { e.Enter(0); e.Advance(0, 0, 1e9) },
		func(e *Estimator) { e.Enter(1 << 50); e.Advance(1<<50, 1<<55, 5); e.End(1<<55, 5, 1) },
		func(e *Estimator) { e.Enter(500); e.Advance(500, 100, 3); e.End(100, 3, 300) },
		func(e *Estimator) { e.Advance(0, 1<<40, 0); e.Enter(7) },
	} {
		for _, maxTokens := range []int64{1, 300, 131_072, 1 << 50} {
			e := New(testConfig)
			feed(e)
			for _, got := range []Estimate{e.Expect(maxTokens), e.Finished()} {
				if !(got.FootprintTokens >= 0 && got.FootprintTokens < 1e18) || !(got.ResidencySeconds > 0 && got.ResidencySeconds < 1e18) {
					t.Errorf("limit %d: %+v", maxTokens, got)
				}
			}
		}
	}
}

// TestBins: edges grow by the square root of two and hold what they should.
func TestBins(t *testing.T) {
	for _, v := range []struct {
		tokens int64
		bin    int
	}{{0, 0}, {255, 0}, {256, 1}, {361, 1}, {363, 2}, {511, 2}, {512, 3}, {131_071, 18}, {131_072, 19}, {1 << 60, binCount - 1}} {
		if got := binOf(v.tokens); got != v.bin {
			t.Errorf("%d tokens in bin %d, want %d", v.tokens, got, v.bin)
		}
	}
}

func BenchmarkExpect(b *testing.B) {
	e := run(agent, 40, 4000, 1)
	b.ReportAllocs()
	for b.Loop() {
		e.Expect(131_072)
	}
}
