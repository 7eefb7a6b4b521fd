package prefix

import "math/bits"

// MatchOne is the number of leading blocks of the chain that the instance holds:
// the best of its ranks, where a rank holds what all its cache groups hold. The
// search begins near hint blocks and so costs a few probes when the answer is
// near it; the answer does not depend on it.
func (x *Index) MatchOne(c *Chain, instance, hint int) int {
	if instance >= len(x.byOwner) || len(c.samples) == 0 {
		return 0
	}
	best := 0
	owned := x.byOwner[instance]
	for k, l := range owned {
		if !x.firstOfRank(owned, k) {
			continue
		}
		held := x.matchLocation(c, l, hint)
		for _, other := range owned[k+1:] {
			if x.locations[other].rank == x.locations[l].rank {
				held = min(held, x.matchLocation(c, other, hint))
			}
		}
		best = max(best, held)
	}
	return best
}

func (x *Index) firstOfRank(owned []int, k int) bool {
	for _, earlier := range owned[:k] {
		if x.locations[earlier].rank == x.locations[owned[k]].rank {
			return false
		}
	}
	return true
}

// matchLocation finds the longest cached prefix at one location: it gallops away
// from the hint, up while blocks are there and down while they are not, and then
// halves what is left between.
func (x *Index) matchLocation(c *Chain, l, hint int) int {
	count := len(c.samples)
	lo, hi := -1, count // sample lo is held, sample hi is not
	at := min(max(c.samplesWithin(hint)-1, 0), count-1)
	if x.holds(c.samples[at], l) {
		lo = at
		for step := 1; lo+step < hi; step *= 2 {
			if !x.holds(c.samples[lo+step], l) {
				hi = lo + step
				break
			}
			lo += step
		}
	} else {
		hi = at
		for step := 1; hi-step > lo; step *= 2 {
			if x.holds(c.samples[hi-step], l) {
				lo = hi - step
				break
			}
			hi -= step
		}
	}
	for hi-lo > 1 {
		mid := (lo + hi) / 2
		if x.holds(c.samples[mid], l) {
			lo = mid
		} else {
			hi = mid
		}
	}
	return c.length(lo)
}

func (x *Index) holds(h Hash, l int) bool {
	mixed := spread(h)
	t := &x.shards[shardOf(mixed)]
	i := t.find(h, mixed)
	if i < 0 {
		return false
	}
	p := t.entries[i].packed
	if p&overflowFlag != 0 {
		return x.overflow[p&^overflowFlag].has(l)
	}
	return int(p&locationMask) == l || int(p>>locationBits&locationMask) == l || int(p>>(2*locationBits)&locationMask) == l
}

// MatchAll sets blocks[i] to the number of leading blocks of the chain that
// instance i holds, for every i. All locations are searched together: halves of
// the chain are searched only for the locations that differ there.
func (x *Index) MatchAll(c *Chain, blocks []int) {
	for i := range blocks {
		blocks[i] = 0
	}
	if len(c.samples) == 0 {
		return
	}
	m := matcher{index: x, chain: c}
	// Most prompts of new sessions are cached nowhere: look at the front first.
	front := x.holders(c.samples[0])
	if front == (set{}) {
		return
	}
	m.search(0, len(c.samples), &front)
	for instance := range blocks {
		if instance >= len(x.byOwner) {
			return
		}
		owned := x.byOwner[instance]
		for k, l := range owned {
			if !x.firstOfRank(owned, k) {
				continue
			}
			held := m.sample[l]
			for _, other := range owned[k+1:] {
				if x.locations[other].rank == x.locations[l].rank {
					held = min(held, m.sample[other])
				}
			}
			blocks[instance] = max(blocks[instance], c.length(int(held)-1))
		}
	}
}

// matcher holds, for each location, the number of leading samples it holds.
type matcher struct {
	index  *Index
	chain  *Chain
	sample [MaxLocations + 1]int32
}

// search narrows the match of the locations in among down: they hold sample lo
// and do not hold sample hi.
func (m *matcher) search(lo, hi int, among *set) {
	words := m.index.words
	if hi-lo == 1 {
		for w := range words {
			for word := among[w]; word != 0; word &= word - 1 {
				m.sample[w<<6+bits.TrailingZeros64(word)] = int32(lo + 1)
			}
		}
		return
	}
	mid := (lo + hi) / 2
	holders := m.index.holders(m.chain.samples[mid])
	var with, without set
	anyWith, anyWithout := uint64(0), uint64(0)
	for w := range words {
		with[w] = among[w] & holders[w]
		without[w] = among[w] &^ holders[w]
		anyWith |= with[w]
		anyWithout |= without[w]
	}
	if anyWith != 0 {
		m.search(mid, hi, &with)
	}
	if anyWithout != 0 {
		m.search(lo, mid, &without)
	}
}
