package prefix

// table is one shard of the index: an open-addressing hash table from block hash
// to the set of locations that hold the block. Deletion shifts entries back, so
// there are no tombstones and no degradation with age.
type table struct {
	entries []entry
	used    int
}

// entry is 12 bytes, so that a probe touches one line of memory: the hash in two
// halves, and a word that packs up to three location numbers of ten bits, or
// points into the overflow sets when there are more. A zero word marks a free
// entry: location numbers start at 1.
type entry struct {
	low, high uint32
	packed    uint32
}

func (e *entry) is(h Hash) bool { return e.low == uint32(h) && e.high == uint32(h>>32) }
func (e *entry) hash() Hash     { return Hash(e.high)<<32 | Hash(e.low) }

const (
	locationBits = 10
	locationMask = 1<<locationBits - 1
	// overflowFlag marks a packed word that is an overflow set's number.
	overflowFlag = 1 << 31
	minSlots     = 8
)

// spread mixes a hash for table placement, so that poor hashes (consecutive
// numbers, say) cost nothing.
func spread(h Hash) uint64 { return uint64(h) * 0x9E3779B97F4A7C15 }

func shardOf(mixed uint64) int { return int(mixed >> (64 - shardBits)) }

// slotOf is where a hash belongs; the bits below those of the shard decide.
func (t *table) slotOf(mixed uint64) int {
	return int((mixed << shardBits) >> 32 & uint64(len(t.entries)-1))
}

// find returns the entry of a hash, or -1.
func (t *table) find(h Hash, mixed uint64) int {
	if t.used == 0 {
		return -1
	}
	if i := t.probe(h, mixed); t.entries[i].packed != 0 {
		return i
	}
	return -1
}

// probe returns the entry of a hash, or the free one where it would go. The table
// is not empty and never full.
func (t *table) probe(h Hash, mixed uint64) int {
	mask := len(t.entries) - 1
	i := t.slotOf(mixed)
	for t.entries[i].packed != 0 && !t.entries[i].is(h) {
		i = (i + 1) & mask
	}
	return i
}

// reserve makes sure that one more entry fits.
func (t *table) reserve() {
	if (t.used+1)*8 > len(t.entries)*7 {
		t.grow()
	}
}

func (t *table) grow() {
	old := t.entries
	t.entries = make([]entry, max(minSlots, 2*len(old)))
	for _, e := range old {
		if e.packed != 0 {
			h := e.hash()
			t.entries[t.probe(h, spread(h))] = e
		}
	}
}

// delete frees an entry and moves later ones of the same run back into the hole,
// so that every entry stays reachable from where it belongs.
func (t *table) delete(i int) {
	mask := len(t.entries) - 1
	t.used--
	hole := i
	for j := (i + 1) & mask; t.entries[j].packed != 0; j = (j + 1) & mask {
		home := t.slotOf(spread(t.entries[j].hash()))
		// The entry at j may move to the hole unless its home lies after the hole.
		if (j-home)&mask >= (j-hole)&mask {
			t.entries[hole] = t.entries[j]
			hole = j
		}
	}
	t.entries[hole].packed = 0
}
