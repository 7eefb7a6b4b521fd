package prefix

import (
	"math/rand/v2"
	"slices"
	"testing"
)

func hashes(from, count int) []Hash {
	list := make([]Hash, count)
	for i := range list {
		list[i] = Hash(from + i)
	}
	return list
}

// TestChainAgainstPlainList extends, rewrites and skips at random: every sample
// must be the hash of the block it stands for, within the bound on memory.
func TestChainAgainstPlainList(t *testing.T) {
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 3))
		var c Chain
		var plain []Hash // 0 where the hash is not known
		for next := 1; next < 60_000; {
			known := len(plain)
			switch rng.IntN(12) {
			case 0:
				known = rng.IntN(len(plain) + 1)
			case 1:
				known += rng.IntN(50)
			}
			blocks := hashes(next, rng.IntN(900))
			next += len(blocks) + 1
			if known < len(plain) && rng.IntN(2) == 0 {
				// Part of what follows is told again, as after a restart of the caller.
				same := plain[known : known+rng.IntN(len(plain)-known+1)]
				blocks = append(slices.Clone(same), blocks...)
			}
			former := plain
			if known > len(plain) {
				plain = make([]Hash, known) // all before a gap is forgotten
			}
			plain = append(slices.Clone(plain[:known]), blocks...)
			stride, whole := max(1, c.stride), c.base == 0
			kept := c.Extend(known, blocks)
			if want := commonPrefix(former, plain); known <= len(former) && (kept > want || whole && kept < want-stride+1) {
				t.Fatalf("seed %d: %d blocks kept of %d, want %d to within %d", seed, kept, len(former), want, stride)
			}
			if c.Blocks() != len(plain) {
				t.Fatalf("seed %d: %d blocks, want %d", seed, c.Blocks(), len(plain))
			}
			if len(c.samples) > maxSamples {
				t.Fatalf("seed %d: %d samples", seed, len(c.samples))
			}
			for j, h := range c.samples {
				if n := c.length(j); n > len(plain) || plain[n-1] != h {
					t.Fatalf("seed %d: sample %d is %d, not block %d of %d", seed, j, h, n-1, len(plain))
				}
			}
			if rest := len(plain) - c.length(len(c.samples)-1); len(c.samples) > 0 && rest >= c.stride {
				t.Fatalf("seed %d: the last %d blocks have no sample at stride %d", seed, rest, c.stride)
			}
		}
	}
}

func commonPrefix(a, b []Hash) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// TestLongContextKeepsItsEnd is the promise that matters for a long session: a
// fully cached 128K-token context matches to within its stride.
func TestLongContextKeepsItsEnd(t *testing.T) {
	x := NewIndex(1 << 20)
	var c Chain
	blocks := hashes(1, 8192)
	for at := 0; at < len(blocks); at += 26 {
		c.Extend(at, blocks[at:min(at+26, len(blocks))])
	}
	x.Store(0, 0, 0, blocks[:8000])
	if got := x.MatchOne(&c, 0, 8192); got > 8000 || got < 8000-4 {
		t.Fatalf("matched %d of 8000 cached blocks", got)
	}
}
