// Package quota divides an instance's protected KV budget between workload
// classes: by space (MISA) or by space times time (MISA-T), with a floor for
// each class and, when asked, with the part that a class cannot use handed to
// the others.
//
// It is integer arithmetic that saturates instead of wrapping, so that equal
// demands give equal shares on every machine. It keeps no state, knows no
// session, and decides nothing: the router does.
package quota

import (
	"math"
	"math/bits"
)

// Demand is what one class asks of one instance.
type Demand struct {
	// Sessions is N_{w,b}: active, pending, held and candidate, each once.
	Sessions int64
	// FootprintBlocks is k-bar_b, at least 1 where Sessions is not 0.
	FootprintBlocks int64
	// ResidencyTenths is T-bar_b in tenths of a second; only the space x time
	// rule reads it.
	ResidencyTenths int64
}

// Rule says how a budget is divided.
type Rule struct {
	// Time weighs demand by residency as well: R_b = N_b k-bar_b T-bar_b instead
	// of S_b = N_b k-bar_b.
	Time bool
	// FloorPermille of the budget is the least each class with demand gets, as
	// far as it has demand for it and as the floors of all classes fit.
	FloorPermille int64
	// Lend limits a class's share to its demand N_b k-bar_b and gives the rest
	// to the others, which makes the division work-conserving.
	Lend bool
}

// Share is one class's part.
type Share struct {
	// QuotaBlocks is M_{w,b}; the quotas of all classes sum to at most the budget.
	QuotaBlocks int64
	// Cap is max(1, floor(M_b / k-bar_b)), in sessions.
	Cap int64
}

// Divider divides budgets. It holds nothing but room to work in; the zero value
// is ready.
type Divider struct {
	weights, floors, limits, proportional []int64
}

// Divide writes one Share for each Demand into shares, which must be as long. A
// class without demand gets a quota of 0 and the cap 1: the first session to come
// asks again with a demand of 1.
//
// The division is the bounded proportional share: the quotas are
// clamp(lambda * weight_b, floor_b, limit_b) for the one lambda that spends the
// budget, found by fixing in each round the classes on the violated side (the
// total violation says which side), as flexible box layout does. Rounding down
// leaves fewer blocks unspent than there are classes in each round.
func (v *Divider) Divide(budget int64, demands []Demand, rule Rule, shares []Share) {
	budget = max(budget, 0)
	if asking := v.prepare(budget, demands, rule, shares); asking == 0 {
		return
	}
	left := budget
	for v.fixRound(&left, shares) {
	}
	for i := range demands {
		if demands[i].Sessions > 0 {
			shares[i].Cap = max(1, shares[i].QuotaBlocks/footprint(demands[i]))
		}
	}
}

// unfixed marks a class whose quota is still proportional; quotas are never negative.
const unfixed = -1

// prepare computes each class's weight and bounds, and counts those with demand.
// The floors of all of them together never exceed the budget.
func (v *Divider) prepare(budget int64, demands []Demand, rule Rule, shares []Share) int64 {
	for len(v.weights) < len(demands) {
		v.weights = append(v.weights, 0)
		v.floors = append(v.floors, 0)
		v.limits = append(v.limits, 0)
		v.proportional = append(v.proportional, 0)
	}
	asking, top := int64(0), int64(0)
	for i := range demands {
		shares[i] = Share{Cap: 1}
		if demands[i].Sessions <= 0 {
			continue
		}
		asking++
		shares[i].QuotaBlocks = unfixed
		need := satMul(demands[i].Sessions, footprint(demands[i]))
		v.weights[i], v.limits[i] = need, math.MaxInt64
		if rule.Time {
			v.weights[i] = satMul(need, max(1, demands[i].ResidencyTenths))
		}
		if rule.Lend {
			v.limits[i] = need
		}
		v.floors[i] = need
		top = max(top, v.weights[i])
	}
	if asking == 0 {
		return 0
	}
	floor := min(mulDiv(budget, max(0, rule.FloorPermille), 1000), budget/asking)
	// Weights so large that their sum would overflow are all shifted down.
	shift := max(0, bits.Len64(uint64(top))-(63-bits.Len64(uint64(asking))))
	for i := range demands {
		if demands[i].Sessions > 0 {
			v.floors[i] = min(v.floors[i], floor)
			v.weights[i] >>= shift
		}
	}
	return asking
}

// fixRound computes proportional shares of what is left for the unfixed classes.
// If bounds are violated it fixes the violators of the heavier side and reports
// true; otherwise it writes the shares and reports false.
func (v *Divider) fixRound(left *int64, shares []Share) bool {
	var sum int64
	for i := range shares {
		if shares[i].QuotaBlocks == unfixed {
			sum += v.weights[i]
		}
	}
	// The violation is what clamping would add to (below a floor) or take from
	// (above a limit) the proportional shares.
	violated, violation := false, int64(0)
	for i := range shares {
		if shares[i].QuotaBlocks != unfixed {
			continue
		}
		v.proportional[i] = 0
		if sum > 0 {
			v.proportional[i] = mulDiv(*left, v.weights[i], sum)
		}
		clamped := min(max(v.proportional[i], v.floors[i]), v.limits[i])
		if clamped != v.proportional[i] {
			violated = true
			violation = satAdd(violation, clamped-v.proportional[i])
		}
	}
	for i := range shares {
		if shares[i].QuotaBlocks != unfixed {
			continue
		}
		switch {
		case !violated:
			shares[i].QuotaBlocks = v.proportional[i]
		case v.proportional[i] < v.floors[i] && violation >= 0:
			shares[i].QuotaBlocks = v.floors[i]
			*left -= v.floors[i]
		case v.proportional[i] > v.limits[i] && violation <= 0:
			shares[i].QuotaBlocks = v.limits[i]
			*left -= v.limits[i]
		}
	}
	*left = max(*left, 0)
	return violated
}

func footprint(d Demand) int64 { return max(1, d.FootprintBlocks) }

// mulDiv is floor(a*b/c) for non-negative a, b and positive c, saturating.
func mulDiv(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	if hi == 0 {
		return int64(min(lo/uint64(c), math.MaxInt64))
	}
	if hi >= uint64(c) {
		return math.MaxInt64
	}
	q, _ := bits.Div64(hi, lo, uint64(c))
	return int64(min(q, math.MaxInt64))
}

func satMul(a, b int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	if hi != 0 || lo > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(lo)
}

func satAdd(a, b int64) int64 {
	s := a + b
	if a > 0 && b > 0 && s < 0 {
		return math.MaxInt64
	}
	if a < 0 && b < 0 && s >= 0 {
		return math.MinInt64
	}
	return s
}
