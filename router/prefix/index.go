// Package prefix answers "where is this prefix cached now": an index from chain
// hashes of KV blocks to the engine instances that hold them, fed by the
// engines' block stored, removed and cleared events, and the hashing itself.
//
// It does not know sessions' commitments (the session ledger does), does not
// predict eviction, and never asks an engine. Its answers are as late as its
// events. Memory is bounded: by the number of blocks, by the number of locations,
// and by a fixed size for each session's chain.
//
// A match relies on caches evicting a chain from its end, as engines do (blocks
// are freed last first, radix trees drop leaves): if a block is cached, so are
// the blocks before it. That turns the search for the longest cached prefix into
// a binary search, a dozen probes for 100,000 tokens.
package prefix

import "math/bits"

const (
	shardBits  = 10
	shardCount = 1 << shardBits
	// MaxLocations bounds the number of (instance, rank, group) triples at once.
	MaxLocations = locationMask
	setWords     = (MaxLocations + 64) / 64
)

// set is a set of location numbers.
type set [setWords]uint64

func (s *set) has(n int) bool { return s[n>>6]>>(n&63)&1 == 1 }
func (s *set) add(n int)      { s[n>>6] |= 1 << (n & 63) }
func (s *set) drop(n int)     { s[n>>6] &^= 1 << (n & 63) }

// location is one cache: a data-parallel rank and cache group of an instance.
type location struct {
	instance    int
	rank, group int
	blocks      int
	// dead: cleared, its entries not yet swept away.
	dead, inUse bool
}

// Index maps block hashes to locations. It is not safe for concurrent use.
type Index struct {
	maxBlocks int
	blocks    int // entries, whatever the number of their locations
	refused   uint64
	shards    []table
	locations []location // by number; 0 is not used
	byOwner   [][]int    // instance -> its live location numbers
	live      set
	words     int // words of a set that are in use
	overflow  []set
	freeSets  []uint32
	// A cleared location's number is free again after one sweep over all shards.
	deadCount   int
	sweepShard  int
	sweepLeft   int
	sweepNumber set
}

// NewIndex returns an empty index of at most maxBlocks distinct blocks.
func NewIndex(maxBlocks int) *Index {
	return &Index{
		maxBlocks: maxBlocks,
		shards:    make([]table, shardCount),
		locations: make([]location, 1),
		words:     1,
	}
}

// Blocks is the number of distinct blocks indexed, Refused how many stores were
// dropped because the index was full or out of locations.
func (x *Index) Blocks() int     { return x.blocks }
func (x *Index) Refused() uint64 { return x.refused }

// InstanceBlocks is the number of blocks at an instance over all ranks, in the
// cache group that holds the most.
func (x *Index) InstanceBlocks(instance int) int {
	if instance >= len(x.byOwner) {
		return 0
	}
	most := 0
	owned := x.byOwner[instance]
	for _, l := range owned {
		n := 0
		for _, other := range owned {
			if x.locations[other].group == x.locations[l].group {
				n += x.locations[other].blocks
			}
		}
		most = max(most, n)
	}
	return most
}

// Store adds a location to blocks. Repeats are harmless. It reports how many
// blocks are new at that location.
func (x *Index) Store(instance, rank, group int, blocks []Hash) int {
	x.sweep(1)
	l := x.locate(instance, rank, group, true)
	if l == 0 {
		x.refused += uint64(len(blocks))
		return 0
	}
	added := 0
	for _, h := range blocks {
		mixed := spread(h)
		t := &x.shards[shardOf(mixed)]
		t.reserve()
		e := &t.entries[t.probe(h, mixed)]
		if e.packed != 0 {
			if x.addTo(&e.packed, l) {
				added++
			}
			continue
		}
		if x.blocks >= x.maxBlocks {
			x.refused++
			continue
		}
		*e = entry{low: uint32(h), high: uint32(h >> 32), packed: uint32(l)}
		t.used++
		x.blocks++
		added++
	}
	x.locations[l].blocks += added
	return added
}

// Witness records that an instance holds a whole chain, as the end of a request
// that computed it shows, whatever events were lost on the way. It serves
// instances with one location: elsewhere it is not known which one it was. Only
// the hashes that the chain kept can be stored, which are those matches look at.
func (x *Index) Witness(instance int, c *Chain) {
	if instance >= len(x.byOwner) || len(x.byOwner[instance]) != 1 || len(c.samples) == 0 {
		return
	}
	l := x.byOwner[instance][0]
	if x.matchLocation(c, l, c.blocks) == c.length(len(c.samples)-1) {
		return
	}
	x.Store(instance, x.locations[l].rank, x.locations[l].group, c.samples)
}

// Remove drops a location from blocks; unknown ones are ignored. It reports how
// many were there.
func (x *Index) Remove(instance, rank, group int, blocks []Hash) int {
	x.sweep(1)
	l := x.locate(instance, rank, group, false)
	if l == 0 {
		return 0
	}
	removed := 0
	for _, h := range blocks {
		mixed := spread(h)
		t := &x.shards[shardOf(mixed)]
		i := t.find(h, mixed)
		if i < 0 || !x.dropFrom(&t.entries[i].packed, l) {
			continue
		}
		removed++
		if t.entries[i].packed == 0 {
			t.delete(i)
			x.blocks--
		}
	}
	x.locations[l].blocks -= removed
	return removed
}

// Clear drops every location of an instance at once. The work is spread over
// later calls; the answers change now.
func (x *Index) Clear(instance int) {
	if instance >= len(x.byOwner) {
		return
	}
	for _, l := range x.byOwner[instance] {
		x.live.drop(l)
		x.locations[l].dead = true
		x.locations[l].blocks = 0
		x.deadCount++
	}
	x.byOwner[instance] = x.byOwner[instance][:0]
}

// locate finds the number of a live location, or makes one; 0 if there is none.
func (x *Index) locate(instance, rank, group int, create bool) int {
	if instance < len(x.byOwner) {
		for _, l := range x.byOwner[instance] {
			if x.locations[l].rank == rank && x.locations[l].group == group {
				return l
			}
		}
	}
	if !create || instance < 0 {
		return 0
	}
	l := x.freeLocation()
	if l == 0 {
		return 0
	}
	for len(x.byOwner) <= instance {
		x.byOwner = append(x.byOwner, nil)
	}
	x.locations[l] = location{instance: instance, rank: rank, group: group, inUse: true}
	x.live.add(l)
	x.byOwner[instance] = append(x.byOwner[instance], l)
	return l
}

func (x *Index) freeLocation() int {
	for l := 1; l < len(x.locations); l++ {
		if !x.locations[l].inUse {
			return l
		}
	}
	if len(x.locations) <= MaxLocations {
		x.locations = append(x.locations, location{})
		x.words = (len(x.locations) + 63) / 64
		return len(x.locations) - 1
	}
	if x.deadCount == 0 {
		return 0
	}
	// All numbers are taken and some are dead: finish sweeping now.
	x.sweep(2 * shardCount)
	return x.freeLocation()
}

// sweep clears dead locations out of some shards. One pass over all shards that
// began after a location died frees its number.
func (x *Index) sweep(shards int) {
	for ; shards > 0 && x.deadCount > 0; shards-- {
		if x.sweepLeft == 0 {
			x.sweepLeft = shardCount
			x.sweepNumber = set{}
			for l := range x.locations {
				if x.locations[l].dead {
					x.sweepNumber.add(l)
				}
			}
		}
		x.sweepTable(&x.shards[x.sweepShard])
		x.sweepShard = (x.sweepShard + 1) % shardCount
		x.sweepLeft--
		if x.sweepLeft > 0 {
			continue
		}
		for l := range x.locations {
			if x.sweepNumber.has(l) {
				x.locations[l] = location{}
				x.deadCount--
			}
		}
	}
}

func (x *Index) sweepTable(t *table) {
	for i := 0; i < len(t.entries); {
		p := t.entries[i].packed
		if p == 0 {
			i++
			continue
		}
		for _, l := range x.members(p) {
			if l != 0 && !x.live.has(l) {
				x.dropFrom(&t.entries[i].packed, l)
			}
		}
		if p&overflowFlag != 0 {
			x.dropDead(&t.entries[i].packed)
		}
		if t.entries[i].packed == 0 {
			t.delete(i) // another entry may have moved to i: look again
			x.blocks--
			continue
		}
		i++
	}
}

// members are the location numbers packed inline, 0 where there is none.
func (x *Index) members(p uint32) [3]int {
	if p&overflowFlag != 0 {
		return [3]int{}
	}
	return [3]int{int(p & locationMask), int(p >> locationBits & locationMask), int(p >> (2 * locationBits) & locationMask)}
}

// addTo adds a location to a packed set and reports whether it was missing.
func (x *Index) addTo(p *uint32, l int) bool {
	if *p&overflowFlag != 0 {
		s := &x.overflow[*p&^overflowFlag]
		if s.has(l) {
			return false
		}
		s.add(l)
		return true
	}
	m := x.members(*p)
	for k := range m {
		if m[k] == l {
			return false
		}
	}
	for k := range m {
		if m[k] == 0 {
			*p |= uint32(l) << (k * locationBits)
			return true
		}
	}
	var s set
	for k := range m {
		s.add(m[k])
	}
	s.add(l)
	*p = x.newSet(s) | overflowFlag
	return true
}

// dropFrom removes a location from a packed set and reports whether it was there.
func (x *Index) dropFrom(p *uint32, l int) bool {
	if *p&overflowFlag != 0 {
		n := *p &^ overflowFlag
		if !x.overflow[n].has(l) {
			return false
		}
		x.overflow[n].drop(l)
		x.shrink(p)
		return true
	}
	m := x.members(*p)
	for k := range m {
		if m[k] == l {
			*p &^= locationMask << (k * locationBits)
			return true
		}
	}
	return false
}

// dropDead removes the locations that are no longer live from an overflow set.
func (x *Index) dropDead(p *uint32) {
	s := &x.overflow[*p&^overflowFlag]
	for w := range x.words {
		s[w] &= x.live[w]
	}
	x.shrink(p)
}

// shrink turns an overflow set of at most three locations back into a packed word.
func (x *Index) shrink(p *uint32) {
	n := *p &^ overflowFlag
	s := &x.overflow[n]
	count := 0
	for w := range x.words {
		count += bits.OnesCount64(s[w])
	}
	if count > 3 {
		return
	}
	packed, k := uint32(0), 0
	for w := range x.words {
		for word := s[w]; word != 0; word &= word - 1 {
			packed |= uint32(w<<6+bits.TrailingZeros64(word)) << (k * locationBits)
			k++
		}
	}
	*p = packed
	x.freeSets = append(x.freeSets, n)
}

func (x *Index) newSet(s set) uint32 {
	if n := len(x.freeSets); n > 0 {
		id := x.freeSets[n-1]
		x.freeSets = x.freeSets[:n-1]
		x.overflow[id] = s
		return id
	}
	x.overflow = append(x.overflow, s)
	return uint32(len(x.overflow) - 1)
}

// holders is the set of live locations that hold a block.
func (x *Index) holders(h Hash) set {
	mixed := spread(h)
	t := &x.shards[shardOf(mixed)]
	i := t.find(h, mixed)
	var s set
	if i < 0 {
		return s
	}
	p := t.entries[i].packed
	if p&overflowFlag != 0 {
		s = x.overflow[p&^overflowFlag]
		for w := range x.words {
			s[w] &= x.live[w]
		}
		return s
	}
	for _, l := range x.members(p) {
		if l != 0 && x.live.has(l) {
			s.add(l)
		}
	}
	return s
}
