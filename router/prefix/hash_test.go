package prefix

import (
	"fmt"
	"slices"
	"testing"
)

// TestXXH64 compares with github.com/cespare/xxhash/v2 (NewWithSeed) over the
// same tokens as little-endian int32: seed 0, and seed 0x9E3779B97F4A7C15.
func TestXXH64(t *testing.T) {
	const golden = 0x9E3779B97F4A7C15
	for _, v := range []struct {
		words          int
		zero, withSeed uint64
	}{
		{0, 0xef46db3751d8e999, 0xc4349fc93c010000},
		{1, 0x4e10135e7b47aba, 0xf5a58637569d29dd},
		{2, 0x3dcb380ddd723446, 0xbd4ab81aceb235c3},
		{3, 0xe6c8c82a75928245, 0x54bd5558cccfcc6e},
		{7, 0x49c277a229ae23b0, 0xfb2f6e1c032fcc5},
		{8, 0x6cb25d5f0aab297f, 0x3b68ed951c02844f},
		{9, 0x8c65e865fb66dcda, 0xc0695c1377eca023},
		{15, 0x630b54d00715129a, 0x734bfed7396c9b21},
		{16, 0x922637aff2137c8, 0xde230f8be8913f17},
		{17, 0xb035641419df5457, 0x8b86c7b9d5a71cd1},
		{32, 0xffb6dc46f83bc362, 0xbc7182bf3015898d},
		{128, 0xfcd33d10a1b326cc, 0xe2f4f26b7599981c},
	} {
		words := make([]int32, v.words)
		for i := range words {
			words[i] = int32(i*7919 - 3)
		}
		if got := xxh64(0, words); got != v.zero {
			t.Errorf("%d words, seed 0: %#x, want %#x", v.words, got, v.zero)
		}
		if got := xxh64(golden, words); got != v.withSeed {
			t.Errorf("%d words, seeded: %#x, want %#x", v.words, got, v.withSeed)
		}
	}
}

// TestChainIsReproducible pins the definition that others may recompute: policy
// version 7, blocks of 16 tokens 0..31.
func TestChainIsReproducible(t *testing.T) {
	h := NewHasher(7, 16)
	tokens := make([]int32, 40)
	for i := range tokens {
		tokens[i] = int32(i)
	}
	got := h.AppendChain([]Hash{h.Root()}, h.Root(), tokens)
	want := []Hash{0x876cd406afde455, 0xfa1b01069d18c153, 0x50bbea84e1fa832d}
	if !slices.Equal(got, want) {
		t.Fatalf("chain %x, want %x", got, want)
	}
	for _, other := range []Hasher{NewHasher(8, 16), NewHasher(7<<32, 16), NewHasher(-7, 16)} {
		if slices.Equal(other.AppendChain(nil, other.Root(), tokens), want[1:]) {
			t.Fatal("another policy version found old blocks")
		}
	}
}

// TestStream feeds the same tokens in pieces of every size: the hashes must be
// those of one piece, and each must come out as soon as its block is full.
func TestStream(t *testing.T) {
	tokens := make([]int32, 331)
	for i := range tokens {
		tokens[i] = int32(i * i)
	}
	h := NewHasher(1, 16)
	want := h.AppendChain(nil, h.Root(), tokens)
	for piece := 1; piece <= len(tokens); piece++ {
		s := h.NewStream()
		var got []Hash
		for at := 0; at < len(tokens); at += piece {
			got = s.Append(got, tokens[at:min(at+piece, len(tokens))])
			if full := min(at+piece, len(tokens)) / 16; len(got) != full || s.Blocks() != full {
				t.Fatalf("pieces of %d: %d hashes, %d blocks after %d tokens", piece, len(got), s.Blocks(), at+piece)
			}
		}
		if !slices.Equal(got, want) {
			t.Fatalf("pieces of %d give another chain", piece)
		}
	}
}

func BenchmarkHash100K(b *testing.B) {
	tokens := make([]int32, 100_000)
	h := NewHasher(1, 16)
	dst := make([]Hash, 0, len(tokens)/16)
	b.SetBytes(int64(4 * len(tokens)))
	b.ReportAllocs()
	for b.Loop() {
		dst = h.AppendChain(dst[:0], h.Root(), tokens)
	}
}

func ExampleHasher() {
	h := NewHasher(3, 4)
	s := h.NewStream()
	first := s.Append(nil, []int32{1, 2, 3, 4, 5, 6})
	known := s.Blocks()
	next := s.Append(nil, []int32{7, 8, 9})
	fmt.Println(len(first), known, len(next), s.Blocks())
	// Output: 1 1 1 2
}
