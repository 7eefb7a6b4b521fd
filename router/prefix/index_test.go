package prefix

import (
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"
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

// holdingInstances lists the instances that hold a block, ascending.
func (x *Index) holdingInstances(h Hash) (list []int) {
	s := x.holders(h)
	for w := range x.words {
		for word := s[w]; word != 0; word &= word - 1 {
			list = append(list, x.locations[w<<6+bits.TrailingZeros64(word)].instance)
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// TestIndexAgainstOracle drives index and oracle with the same random events:
// chains that share prefixes, stored from the front and removed from the end as
// engines do, many locations, clears.
func TestIndexAgainstOracle(t *testing.T) {
	for seed := range uint64(6) {
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
			if got := x.holdingInstances(h); !slices.Equal(got, o.instances(h)) {
				t.Fatalf("seed %d block %d: held by %v, oracle %v", seed, h, got, o.instances(h))
			}
		}
	}
	x.sweep(2 * shardCount)
	if x.Blocks() != len(o) {
		t.Fatalf("seed %d: %d blocks after sweeping, oracle %d", seed, x.Blocks(), len(o))
	}
}

// TestLocationsAreReused clears and refills more often than there are location
// numbers: stale entries must neither answer nor stay.
func TestLocationsAreReused(t *testing.T) {
	x := NewIndex(1 << 20)
	for round := range 3 * MaxLocations {
		blocks := hashes(1000*round, 5)
		if added := x.Store(round%3, 0, 0, blocks); added != 5 {
			t.Fatalf("round %d: %d of 5 added, refused %d", round, added, x.Refused())
		}
		if old := hashes(1000*(round-3), 5); round >= 3 && len(x.holdingInstances(old[0])) > 0 {
			t.Fatalf("round %d: a cleared block is still found", round)
		}
		if round%3 == 2 {
			for i := range 3 {
				x.Clear(i)
			}
		}
	}
	x.sweep(2 * shardCount)
	if x.Blocks() != 0 {
		t.Fatalf("%d blocks left after everything was cleared", x.Blocks())
	}
}

// TestManyHolders takes one block through inline and overflow sets and back.
func TestManyHolders(t *testing.T) {
	x := NewIndex(10)
	block := hashes(1, 1)
	for i := range 200 {
		x.Store(i, 0, 0, block)
		x.Store(i, 0, 0, block) // a repeat changes nothing
	}
	if got := x.holdingInstances(1); len(got) != 200 {
		t.Fatalf("held by %d of 200", len(got))
	}
	for i := range 199 {
		if x.Remove(i, 0, 0, block) != 1 || x.Remove(i, 0, 0, block) != 0 {
			t.Fatalf("removal %d", i)
		}
	}
	if got := x.holdingInstances(1); !slices.Equal(got, []int{199}) || x.Blocks() != 1 {
		t.Fatalf("held by %v, %d blocks", got, x.Blocks())
	}
	x.Remove(199, 0, 0, block)
	if x.Blocks() != 0 {
		t.Fatalf("%d blocks", x.Blocks())
	}
}

// TestBounds: a full index refuses and counts, and so does one without a free
// location; what is there stays right.
func TestBounds(t *testing.T) {
	x := NewIndex(100)
	if added := x.Store(0, 0, 0, hashes(1, 150)); added != 100 || x.Refused() != 50 || x.Blocks() != 100 {
		t.Fatalf("added %d, refused %d, %d blocks", added, x.Refused(), x.Blocks())
	}
	if added := x.Store(1, 0, 0, hashes(1, 100)); added != 100 {
		t.Fatalf("a known block at a second instance needs no room: %d", added)
	}
	for i := range MaxLocations + 5 {
		x.Store(i, 0, 0, hashes(1, 1))
	}
	if x.Refused() != 50+5 {
		t.Fatalf("refused %d", x.Refused())
	}
	if x.InstanceBlocks(0) != 100 || x.InstanceBlocks(MaxLocations+3) != 0 || x.InstanceBlocks(1<<20) != 0 {
		t.Fatal("counts by instance")
	}
}

// TestWitness: after lost events a finished request shows what is cached.
func TestWitness(t *testing.T) {
	x := NewIndex(1 << 16)
	var c Chain
	c.Extend(0, hashes(1, 1000))
	x.Witness(0, &c)
	if x.Blocks() != 0 {
		t.Fatal("an instance that never sent events has no location to witness")
	}
	x.Store(0, 0, 0, hashes(1, 300)) // the events of the other blocks were lost
	x.Witness(0, &c)
	if got := x.MatchOne(&c, 0, 0); got != 1000 {
		t.Fatalf("matched %d after the witness", got)
	}
	x.Store(1, 0, 0, hashes(1, 300))
	x.Store(1, 1, 0, hashes(1, 10))
	x.Witness(1, &c)
	if got := x.MatchOne(&c, 1, 0); got != 300 {
		t.Fatalf("with two ranks nothing is known of which: matched %d", got)
	}
}

// FuzzIndex lets the fuzzer choose operations on blocks in any order, also those
// that no engine would send, and compares membership and counts with the oracle.
func FuzzIndex(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 0, 9, 2, 200, 1, 4, 0, 0})
	f.Add([]byte("a longer program of stores, removals and clears: 0123456789"))
	f.Fuzz(func(t *testing.T, program []byte) {
		x, o := NewIndex(1<<16), oracle{}
		for ; len(program) >= 4; program = program[4:] {
			at := [3]int{int(program[1] % 70), int(program[1] / 128), 0}
			blocks := hashes(int(program[2])<<52, 1+int(program[3]%40))
			switch program[0] % 4 {
			case 0, 1:
				x.Store(at[0], at[1], at[2], blocks)
				o.store(at, blocks)
			case 2:
				x.Remove(at[0], at[1], at[2], blocks)
				o.remove(at, blocks)
			case 3:
				x.Clear(at[0])
				o.clear(at[0])
			}
			for _, h := range blocks {
				if got := x.holdingInstances(h); !slices.Equal(got, o.instances(h)) {
					t.Fatalf("block %x: held by %v, oracle %v", uint64(h), got, o.instances(h))
				}
			}
		}
		x.sweep(2 * shardCount)
		if x.Blocks() != len(o) {
			t.Fatalf("%d blocks, oracle %d", x.Blocks(), len(o))
		}
	})
}

// BenchmarkStoreRemove stores and removes a million blocks in batches of 26, at
// four instances: the figure is blocks stored or removed per second.
func BenchmarkStoreRemove(b *testing.B) {
	const count, batch = 1 << 20, 26
	hasher := NewHasher(1, 1)
	blocks := hasher.AppendChain(nil, hasher.Root(), make([]int32, count))
	b.ReportAllocs()
	for b.Loop() {
		x := NewIndex(count)
		for at := 0; at < count; at += batch {
			x.Store(at/batch%4, 0, 0, blocks[at:min(at+batch, count)])
		}
		for at := 0; at < count; at += batch {
			x.Remove(at/batch%4, 0, 0, blocks[at:min(at+batch, count)])
		}
	}
	b.ReportMetric(2*count*float64(b.N)/b.Elapsed().Seconds(), "blocks/s")
}

// BenchmarkBytesPerBlock states the memory of one indexed block, as an average
// over fillings between two doublings of the shards.
func BenchmarkBytesPerBlock(b *testing.B) {
	hasher := NewHasher(1, 1)
	blocks := hasher.AppendChain(nil, hasher.Root(), make([]int32, 2_000_000))
	var bytes, counted float64
	for b.Loop() {
		x := NewIndex(len(blocks))
		for at := 0; at < len(blocks); at += 100_000 {
			x.Store(0, 0, 0, blocks[at:at+100_000])
			if at >= 1_000_000 {
				for i := range x.shards {
					bytes += float64(int(unsafe.Sizeof(entry{})) * len(x.shards[i].entries))
				}
				counted += float64(x.Blocks())
			}
		}
	}
	b.ReportMetric(bytes/counted, "bytes/block")
}

// BenchmarkMatch looks up a 100,000-token continuation that grew by 26 blocks, in
// an index of two million other blocks.
func BenchmarkMatch(b *testing.B) {
	hasher := NewHasher(1, 1)
	x := NewIndex(4 << 20)
	others := hasher.AppendChain(nil, hasher.Root(), make([]int32, 2_000_000))
	for i := range 64 {
		at := i * len(others) / 64
		x.Store(i, 0, 0, others[at:at+len(others)/64])
	}
	chains := make([]Chain, 300)
	for k := range chains {
		blocks := hashes(1<<40+k<<20, 6250)
		chains[k].Extend(0, blocks)
		x.Store(k%64, 0, 0, blocks[:6224])
	}
	b.Run("own", func(b *testing.B) {
		b.ReportAllocs()
		for k := 0; b.Loop(); k++ {
			if x.MatchOne(&chains[k%300], k%300%64, 6224) < 6200 {
				b.Fatal("not found")
			}
		}
	})
	matches := make([]int, 64)
	b.Run("all", func(b *testing.B) {
		b.ReportAllocs()
		for k := 0; b.Loop(); k++ {
			x.MatchAll(&chains[k%300], matches)
			if matches[k%300%64] < 6200 {
				b.Fatal("not found")
			}
		}
	})
}
