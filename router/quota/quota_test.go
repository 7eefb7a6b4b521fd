package quota

import (
	"math"
	"math/big"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func divide(budget int64, rule Rule, demands ...Demand) []Share {
	shares := make([]Share, len(demands))
	new(Divider).Divide(budget, demands, rule, shares)
	return shares
}

// TestDivide pins the formulas by hand-computed cases: agent, rlvr, rlhf.
func TestDivide(t *testing.T) {
	agent, rlvr, rlhf := Demand{60, 2500, 6000}, Demand{30, 1800, 9000}, Demand{10, 250, 300}
	for _, v := range []struct {
		name   string
		budget int64
		rule   Rule
		in     []Demand
		want   []Share
	}{
		{"space: M proportional to N k", 100_000, Rule{}, []Demand{agent, rlvr, rlhf},
			// S = 150000, 54000, 2500 of 206500
			[]Share{{72_639, 29}, {26_150, 14}, {1_210, 4}}},
		{"space x time: M proportional to N k T", 100_000, Rule{Time: true}, []Demand{agent, rlvr, rlhf},
			// R = 900M, 486M, 0.75M of 1386.75M
			[]Share{{64_899, 25}, {35_045, 19}, {54, 1}}},
		{"a floor lifts the small class to its demand", 100_000, Rule{Time: true, FloorPermille: 100}, []Demand{agent, rlvr, rlhf},
			// rlhf needs only 2500 blocks, below the floor of 10000; 97500 left
			[]Share{{63_311, 25}, {34_188, 18}, {2_500, 10}}},
		{"lending caps a class at its demand", 200_000, Rule{Time: true, Lend: true}, []Demand{agent, rlvr, rlhf},
			// rlvr's 70091 exceeds its 54000 and rlhf takes what agent cannot use
			[]Share{{145_878, 58}, {54_000, 30}, {121, 1}}},
		{"all demand fits", 300_000, Rule{Lend: true}, []Demand{agent, rlvr, rlhf},
			[]Share{{150_000, 60}, {54_000, 30}, {2_500, 10}}},
		{"no demand, no quota, cap 1", 1000, Rule{}, []Demand{{0, 10, 10}, {5, 10, 10}},
			[]Share{{0, 1}, {1000, 100}}},
		{"cap is at least 1", 100, Rule{}, []Demand{{3, 5000, 1}, {300, 1, 1}},
			[]Share{{98, 1}, {1, 1}}},
		{"nothing to divide", 0, Rule{FloorPermille: 500}, []Demand{{3, 5, 1}}, []Share{{0, 1}}},
		{"a negative budget is none", -5, Rule{}, []Demand{{3, 5, 1}}, []Share{{0, 1}}},
		{"absurd demands saturate", 1000, Rule{Time: true}, []Demand{{math.MaxInt64, math.MaxInt64, math.MaxInt64}, {math.MaxInt64, math.MaxInt64, math.MaxInt64}, {1, 1, 1}},
			[]Share{{500, 1}, {500, 1}, {0, 1}}},
	} {
		if got := divide(v.budget, v.rule, v.in...); !slices.Equal(got, v.want) {
			t.Errorf("%s: %v, want %v", v.name, got, v.want)
		}
	}
}

// oracle solves clamp(lambda w, lo, hi) = budget by halving lambda in exact
// rationals' stead, with big floats; it shares no code with Divide.
func oracle(budget int64, demands []Demand, rule Rule) []float64 {
	weights, lo, hi := make([]float64, len(demands)), make([]float64, len(demands)), make([]float64, len(demands))
	asking, total := 0.0, 0.0
	for _, d := range demands {
		if d.Sessions > 0 {
			asking++
		}
	}
	for i, d := range demands {
		if d.Sessions == 0 {
			continue
		}
		need := float64(d.Sessions) * float64(d.FootprintBlocks)
		weights[i] = need
		if rule.Time {
			weights[i] *= float64(d.ResidencyTenths)
		}
		hi[i] = math.Inf(1)
		if rule.Lend {
			hi[i] = need
		}
		lo[i] = min(need, float64(budget)*float64(rule.FloorPermille)/1000, float64(budget)/asking)
		total += hi[i]
	}
	if total <= float64(budget) {
		return hi
	}
	quotas := make([]float64, len(demands))
	low, high := 0.0, 1e30
	for range 300 {
		mid := math.Sqrt(max(low, 1e-30) * high)
		sum := 0.0
		for i := range demands {
			quotas[i] = min(max(mid*weights[i], lo[i]), hi[i])
			sum += quotas[i]
		}
		if sum > float64(budget) {
			high = mid
		} else {
			low = mid
		}
	}
	return quotas
}

func demandsGen() *rapid.Generator[[]Demand] {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Demand {
		return Demand{
			Sessions:        rapid.Int64Range(0, 5000).Draw(t, "sessions"),
			FootprintBlocks: rapid.Int64Range(1, 8192).Draw(t, "footprint"),
			ResidencyTenths: rapid.Int64Range(1, 100_000).Draw(t, "residency"),
		}
	}), 1, 12)
}

func ruleGen() *rapid.Generator[Rule] {
	return rapid.Custom(func(t *rapid.T) Rule {
		return Rule{
			Time:          rapid.Bool().Draw(t, "time"),
			FloorPermille: rapid.SampledFrom([]int64{0, 50, 100, 400, 1000}).Draw(t, "floor"),
			Lend:          rapid.Bool().Draw(t, "lend"),
		}
	})
}

func TestDivideAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		budget := rapid.Int64Range(0, 1<<30).Draw(t, "budget")
		demands, rule := demandsGen().Draw(t, "demands"), ruleGen().Draw(t, "rule")
		shares := divide(budget, rule, demands...)
		want := oracle(budget, demands, rule)
		for i, s := range shares {
			// Each fixing round rounds down once for each class.
			tolerance := 1e-6*want[i] + float64(len(demands)*(len(demands)+1))
			if math.Abs(float64(s.QuotaBlocks)-want[i]) > tolerance {
				t.Fatalf("class %d of %v by %+v: %d, oracle %.2f", i, demands, rule, s.QuotaBlocks, want[i])
			}
			if demands[i].Sessions > 0 && s.Cap != max(1, s.QuotaBlocks/demands[i].FootprintBlocks) {
				t.Fatalf("cap %d of quota %d", s.Cap, s.QuotaBlocks)
			}
		}
	})
}

// TestDivideProperties: what must hold for any numbers at all.
func TestDivideProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		budget := rapid.Int64().Draw(t, "budget")
		rule := ruleGen().Draw(t, "rule")
		demands := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Demand {
			return Demand{
				Sessions:        rapid.Int64Min(0).Draw(t, "sessions"),
				FootprintBlocks: rapid.Int64().Draw(t, "footprint"),
				ResidencyTenths: rapid.Int64().Draw(t, "residency"),
			}
		}), 0, 12).Draw(t, "demands")
		shares := divide(budget, rule, demands...)
		sum, need := new(big.Int), new(big.Int)
		for i, s := range shares {
			if s.QuotaBlocks < 0 || s.Cap < 1 {
				t.Fatalf("share %+v of %+v", s, demands[i])
			}
			sum.Add(sum, big.NewInt(s.QuotaBlocks))
			need.Add(need, new(big.Int).Mul(big.NewInt(demands[i].Sessions), big.NewInt(max(1, demands[i].FootprintBlocks))))
		}
		if sum.Cmp(big.NewInt(max(0, budget))) > 0 {
			t.Fatalf("quotas sum to %s of %d", sum, budget)
		}
		reversed := slices.Clone(demands)
		slices.Reverse(reversed)
		back := divide(budget, rule, reversed...)
		slices.Reverse(back)
		if !slices.Equal(back, shares) {
			t.Fatalf("the order of classes matters: %v and %v", shares, back)
		}
	})
}

// TestDrainTimesAgree: MISA-T's point. Without bounds every class drains its
// demand within about the same time tau = N k T / M.
func TestDrainTimesAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		demands := demandsGen().Draw(t, "demands")
		const budget = 1 << 40 // large, so that rounding does not matter
		shares := divide(budget, Rule{Time: true}, demands...)
		tau := 0.0
		for i, d := range demands {
			if shares[i].QuotaBlocks < 10_000 {
				continue // rounding hides the time
			}
			own := float64(d.Sessions) * float64(d.FootprintBlocks) * float64(d.ResidencyTenths) / float64(shares[i].QuotaBlocks)
			if tau == 0 {
				tau = own
			}
			if math.Abs(own-tau) > 0.01*tau {
				t.Fatalf("class %d drains in %g, the first in %g", i, own, tau)
			}
		}
	})
}

func BenchmarkDivide(b *testing.B) {
	demands := []Demand{{60, 2500, 6000}, {30, 1800, 9000}, {10, 250, 300}}
	shares := make([]Share, 3)
	var v Divider
	b.ReportAllocs()
	for b.Loop() {
		v.Divide(130_000, demands, Rule{Time: true, FloorPermille: 100, Lend: true}, shares)
	}
}
