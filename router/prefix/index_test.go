package prefix

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// oracle is the dumb index: a set of locations for each block.
type oracle map[Hash]map[[3]int]bool

func (o oracle) store(at [3]int, blocks []Hash) {
	for _, h := range blocks {
		if o[h] == nil {
			o[h] = map[[3]int]bool{}
		}
		o[h][at] = true
	}
}

func (o oracle) remove(at [3]int, blocks []Hash) {
	for _, h := range blocks {
		delete(o[h], at)
		if len(o[h]) == 0 {
			delete(o, h)
		}
	}
}

func (o oracle) clear(instance int) {
	for h, at := range o {
		for l := range at {
			if l[0] == instance {
				delete(at, l)
			}
		}
		if len(at) == 0 {
			delete(o, h)
		}
	}
}

func (o oracle) instances(h Hash) []int {
	var list []int
	for l := range o[h] {
		list = append(list, l[0])
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// match walks the chain block by block: the best rank, each as good as the worst
// of the groups it has.
func (o oracle) match(chain []Hash, instance int, groups map[[2]int][]int) int {
	best := 0
	for key, ids := range groups {
		if key[0] != instance || len(ids) == 0 {
			continue
		}
		held := len(chain)
		for _, group := range ids {
			n := 0
			for n < len(chain) && o[chain[n]][[3]int{instance, key[1], group}] {
				n++
			}
			held = min(held, n)
		}
		best = max(best, held)
	}
	return best
}

// TestIndexAgainstOracle drives index and oracle with the same random events:
// chains that share prefixes, stored from the front and removed from the end as
// engines do, many locations, clears.
func TestIndexAgainstOracle(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 2))
		x, o := NewIndex(1<<20), oracle{}
		groups := map[[2]int][]int{}
		chains := randomChains(rng, 12, 300)
		instances := 1 + rng.IntN(9)
		for range 400 {
			at := [3]int{rng.IntN(instances), rng.IntN(2), rng.IntN(2)}
			chain := chains[rng.IntN(len(chains))]
			n := rng.IntN(len(chain) + 1)
			switch rng.IntN(8) {
			case 0:
				x.Clear(at[0])
				o.clear(at[0])
				for key := range groups {
					if key[0] == at[0] {
						delete(groups, key)
					}
				}
			case 1, 2, 3:
				// Evicting a block evicts all that continue it, whichever chain.
				for _, other := range chains {
					shared := 0
					for shared < min(len(other), len(chain)) && other[shared] == chain[shared] {
						shared++
					}
					if shared > n {
						x.Remove(at[0], at[1], at[2], other[n:])
						o.remove(at, other[n:])
					}
				}
				x.Remove(at[0], at[1], at[2], chain[n:])
				o.remove(at, chain[n:])
			default:
				x.Store(at[0], at[1], at[2], chain[:n])
				o.store(at, chain[:n])
				key := [2]int{at[0], at[1]}
				if !slices.Contains(groups[key], at[2]) {
					groups[key] = append(groups[key], at[2])
				}
			}
		}
		compare(t, seed, x, o, chains, groups, instances)
	}
}

func randomChains(rng *rand.Rand, count, length int) [][]Hash {
	chains := make([][]Hash, count)
	next := Hash(1)
	for i := range chains {
		if i > 0 {
			from := chains[rng.IntN(i)]
			chains[i] = slices.Clone(from[:rng.IntN(len(from)+1)])
		}
		for n := rng.IntN(length); n >= 0; n-- {
			chains[i] = append(chains[i], next)
			next++
		}
	}
	return chains
}

func compare(t *testing.T, seed uint64, x *Index, o oracle, chains [][]Hash, groups map[[2]int][]int, instances int) {
	t.Helper()
	matched := make([]int, instances)
	for k, blocks := range chains {
		var c Chain
		c.Extend(0, blocks)
		x.MatchAll(&c, matched)
		for i := range instances {
			want := o.match(blocks, i, groups)
			if matched[i] != want || x.MatchOne(&c, i, k) != want {
				t.Fatalf("seed %d chain %d instance %d: MatchAll %d, MatchOne %d, oracle %d", seed, k, i, matched[i], x.MatchOne(&c, i, k), want)
			}
		}
		for _, h := range blocks {
			if got := x.AppendInstances(nil, h); !slices.Equal(got, o.instances(h)) {
				t.Fatalf("seed %d block %d: held by %v, oracle %v", seed, h, got, o.instances(h))
			}
		}
	}
	x.sweep(2 * shardCount)
	if x.Blocks() != len(o) {
		t.Fatalf("seed %d: %d blocks after sweeping, oracle %d", seed, x.Blocks(), len(o))
	}
}
