package forecast

import (
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// feed lets sessions of a known law live: growth at a fixed pace, lives drawn by
// the caller, seen in steps of some seconds.
func feed(t *Table, r *rand.Rand, sessions int, pace float64, start int64, life func() float64) {
	for range sessions {
		end := start + int64(life())
		for at := start; at < end; {
			next := min(end, at+int64(pace*5))
			t.Advance(at, next, float64(next-at)/pace)
			at = next
		}
		t.End(end)
	}
}

func within(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if math.Abs(got-want) > tolerance*want {
		t.Errorf("%s = %.0f, want %.0f within %.0f %%", what, got, want, 100*tolerance)
	}
}

func TestExponentialLivesAreForecast(t *testing.T) {
	const pace, mean = 40.0, 30_000.0
	r := rand.New(rand.NewPCG(1, 2))
	cfg := DefaultConfig()
	cfg.WindowSessions = 400
	table := New(cfg)
	feed(table, r, 3000, pace, 100, func() float64 { return r.ExpFloat64() * mean })
	table.Learn()
	for _, now := range []int64{500, 10_000, 40_000} {
		p := table.Expect(now, 0)
		within(t, "now", p[0], float64(now), 0.001)
		for h, share := range []float64{0, 1. / 64, 1. / 32, 1. / 16, 1. / 8, 0.25, 0.5, 1} {
			grown := pace * share * cfg.HorizonSeconds
			within(t, "ahead", p[h], (float64(now)+grown)*math.Exp(-grown/mean), 0.12)
		}
	}
}

func TestFixedLivesEndWhereTheyDid(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	table := New(DefaultConfig())
	feed(table, r, 500, 50, 0, func() float64 { return 40_000 })
	table.Learn()
	// A young session will all be there, grown; one at the end will not.
	young := table.Expect(1_000, 0)
	within(t, "young at half the horizon", young[Points-2], 1_000+50*DefaultConfig().HorizonSeconds/2, 0.1)
	old := table.Expect(39_000, 0)
	if last := old[Points-1]; last > 0.5*39_000 {
		t.Errorf("a session at the end of its life is expected to hold %.0f tokens after the horizon", last)
	}
}

func TestRunningSessionsCount(t *testing.T) {
	// Only short ones have ended so far; the long ones are seen to live on.
	table := New(DefaultConfig())
	for range 100 {
		table.Advance(0, 2_000, 50)
		table.End(2_000)
		for range 4 {
			table.Advance(0, 30_000, 750)
		}
	}
	table.Learn()
	if p := table.Expect(8_000, 0); p[Points-1] < 20_000 {
		t.Errorf("a session of 8,000 tokens is expected to hold %.0f after the horizon, though none that long has ended", p[Points-1])
	}
}

func TestSharedPromptIsLeftOutWhileAlive(t *testing.T) {
	table := New(DefaultConfig())
	alone, shared := table.Expect(10_000, 0), table.Expect(10_000, 6_000)
	for h := range alone {
		if want := alone[h] - 6_000*table.at(binOf(10_000)).alive[h]; math.Abs(shared[h]-want) > 1e-6 {
			t.Errorf("point %d: %.1f with a shared prompt, want %.1f", h, shared[h], want)
		}
	}
}

// Whatever is seen, forecasts are finite, not negative, and start at the size now.
func TestForecastsStaySane(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := New(DefaultConfig())
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			from := rapid.Int64Range(0, 400_000).Draw(t, "from")
			to := rapid.Int64Range(0, 400_000).Draw(t, "to")
			table.Advance(from, to, rapid.Float64Range(0, 1e5).Draw(t, "seconds"))
			if rapid.Bool().Draw(t, "ends") {
				table.End(to)
			}
		}
		table.Learn()
		tokens := rapid.Int64Range(0, 400_000).Draw(t, "tokens")
		p := table.Expect(tokens, 0)
		if math.Abs(p[0]-float64(tokens)) > 1 {
			t.Fatalf("a session of %d tokens is said to hold %.1f now", tokens, p[0])
		}
		previous := 1.0
		for h, v := range p {
			alive := table.at(binOf(tokens)).alive[h]
			if math.IsNaN(v) || math.IsInf(v, 0) || v < 0 || alive < 0 || alive > previous {
				t.Fatalf("point %d: %v tokens, alive %v after %v", h, v, alive, previous)
			}
			previous = alive
		}
	})
}

func TestConfigIsValidated(t *testing.T) {
	if err := DefaultConfig().Validate(); err != nil {
		t.Error(err)
	}
	if (Config{}).Validate() == nil {
		t.Error("the zero configuration is accepted")
	}
}

func BenchmarkLearn(b *testing.B) {
	table := New(DefaultConfig())
	for b.Loop() {
		table.Learn()
		for tokens := int64(0); tokens < 130_000; tokens += 8_192 {
			table.Expect(tokens, 0)
		}
	}
}

func BenchmarkExpect(b *testing.B) {
	table := New(DefaultConfig())
	b.ReportAllocs()
	var sum Profile
	for b.Loop() {
		p := table.Expect(30_000, 8_000)
		sum.Add(&p)
	}
}
