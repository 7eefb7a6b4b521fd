package prefix

// table is one shard of the index: an open-addressing hash table from block hash
// to the set of locations that hold the block. Deletion shifts entries back, so
// there are no tombstones and no degradation with age.
//
// A slot is 12 bytes: the hash and a word that packs up to three location
// numbers of ten bits, or points into the overflow sets when there are more.
type table struct {
	hashes []Hash
	// packed[i] == 0 marks a free slot: location numbers start at 1.
	packed []uint32
	used   int
}

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
	return int((mixed << shardBits) >> 32 & uint64(len(t.hashes)-1))
}

// find returns the slot of a hash, or -1.
func (t *table) find(h Hash, mixed uint64) int {
	if t.used == 0 {
		return -1
	}
	mask := len(t.hashes) - 1
	for i := t.slotOf(mixed); t.packed[i] != 0; i = (i + 1) & mask {
		if t.hashes[i] == h {
			return i
		}
	}
	return -1
}

// insert adds a hash that is not there yet.
func (t *table) insert(h Hash, packed uint32) {
	if (t.used+1)*8 > len(t.hashes)*7 {
		t.grow()
	}
	t.place(h, packed)
	t.used++
}

func (t *table) place(h Hash, packed uint32) {
	mask := len(t.hashes) - 1
	i := t.slotOf(spread(h))
	for t.packed[i] != 0 {
		i = (i + 1) & mask
	}
	t.hashes[i], t.packed[i] = h, packed
}

func (t *table) grow() {
	hashes, packed := t.hashes, t.packed
	size := max(minSlots, 2*len(hashes))
	t.hashes, t.packed = make([]Hash, size), make([]uint32, size)
	for i, p := range packed {
		if p != 0 {
			t.place(hashes[i], p)
		}
	}
}

// delete frees a slot and moves later entries of the same run back into the
// hole, so that every entry stays reachable from where it belongs.
func (t *table) delete(i int) {
	mask := len(t.hashes) - 1
	t.used--
	hole := i
	for j := (i + 1) & mask; t.packed[j] != 0; j = (j + 1) & mask {
		home := t.slotOf(spread(t.hashes[j]))
		// The entry at j may move to the hole unless its home lies after the hole.
		if (j-home)&mask >= (j-hole)&mask {
			t.hashes[hole], t.packed[hole] = t.hashes[j], t.packed[j]
			hole = j
		}
	}
	t.packed[hole] = 0
}
