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

// Divide writes one Share for each Demand into shares, which must be as long,
// and allocates nothing. A class without demand gets a quota of 0 and the cap 1:
// the first session to come asks again with a demand of 1.
//
// The division is the bounded proportional share: the quotas are
// clamp(lambda * weight_b, floor_b, limit_b) for the one lambda that spends the
// budget, found by fixing in each round the classes on the violated side (the
// total violation says which side), as flexible box layout does. Rounding down
// leaves fewer blocks unspent than there are classes.
func Divide(budget int64, demands []Demand, rule Rule, shares []Share) {
	if budget < 0 {
		budget = 0
	}
	asking := 0
	for i := range demands {
		shares[i] = Share{Cap: 1}
		if demands[i].Sessions > 0 {
			shares[i].QuotaBlocks = unfixed
			asking++
		}
	}
	if asking == 0 {
		return
	}
	shift := weightShift(demands, rule, asking)
	left := budget
	for fixRound(&left, budget, demands, rule, shares, asking, shift) {
	}
	for i := range demands {
		if demands[i].Sessions > 0 {
			shares[i].Cap = max(1, shares[i].QuotaBlocks/footprint(demands[i]))
		}
	}
}

// unfixed marks a class whose quota is still proportional; quotas are never negative.
const unfixed = -1

// fixRound computes proportional shares of what is left for the unfixed classes.
// If bounds are violated it fixes the violators of the heavier side and reports
// true; otherwise it writes the shares and reports false.
func fixRound(left *int64, budget int64, demands []Demand, rule Rule, shares []Share, asking int, shift uint) bool {
	var sum int64
	for i := range demands {
		if shares[i].QuotaBlocks == unfixed {
			sum += weight(demands[i], rule) >> shift
		}
	}
	if sum == 0 {
		for i := range demands {
			if shares[i].QuotaBlocks == unfixed {
				shares[i].QuotaBlocks = 0
			}
		}
		return false
	}
	// The violation is what clamping would add to (below a floor) or take from
	// (above a limit) the proportional shares.
	var violation int64
	any := false
	for i := range demands {
		if shares[i].QuotaBlocks != unfixed {
			continue
		}
		share := mulDiv(*left, weight(demands[i], rule)>>shift, sum)
		lo, hi := bounds(budget, demands[i], rule, asking)
		clamped := min(max(share, lo), hi)
		if clamped != share {
			any = true
			violation = satAdd(violation, clamped-share)
		}
	}
	if any {
		spent := int64(0)
		for i := range demands {
			if shares[i].QuotaBlocks != unfixed {
				continue
			}
			share := mulDiv(*left, weight(demands[i], rule)>>shift, sum)
			lo, hi := bounds(budget, demands[i], rule, asking)
			if share < lo && violation >= 0 {
				shares[i].QuotaBlocks = lo
				spent += lo
			} else if share > hi && violation <= 0 {
				shares[i].QuotaBlocks = hi
				spent += hi
			}
		}
		*left -= spent
		if *left < 0 {
			*left = 0
		}
		return true
	}
	for i := range demands {
		if shares[i].QuotaBlocks == unfixed {
			shares[i].QuotaBlocks = mulDiv(*left, weight(demands[i], rule)>>shift, sum)
		}
	}
	return false
}

// bounds are a class's floor and limit. The floors of all asking classes
// together never exceed the budget.
func bounds(budget int64, d Demand, rule Rule, asking int) (lo, hi int64) {
	need := satMul(d.Sessions, footprint(d))
	hi = math.MaxInt64
	if rule.Lend {
		hi = need
	}
	if rule.FloorPermille > 0 {
		lo = min(need, mulDiv(budget, rule.FloorPermille, 1000), budget/int64(asking))
	}
	return lo, hi
}

func footprint(d Demand) int64 { return max(1, d.FootprintBlocks) }

func weight(d Demand, rule Rule) int64 {
	w := satMul(d.Sessions, footprint(d))
	if rule.Time {
		w = satMul(w, max(1, d.ResidencyTenths))
	}
	return w
}

// weightShift is how far all weights are shifted down so that their sum cannot
// overflow; 0 for every demand that a real pool can have.
func weightShift(demands []Demand, rule Rule, asking int) uint {
	var top int64
	for i := range demands {
		if demands[i].Sessions > 0 {
			top = max(top, weight(demands[i], rule))
		}
	}
	room := 63 - bits.Len(uint(asking))
	if over := bits.Len64(uint64(top)) - room; over > 0 {
		return uint(over)
	}
	return 0
}

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
