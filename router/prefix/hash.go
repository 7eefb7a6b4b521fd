package prefix

import "math/bits"

// Hash is a 64-bit chain hash of one full block: it covers the block's token
// ids, all blocks before it and the salt of the policy version.
//
// It is XXH64 of the token ids as little-endian int32, seeded with the hash of
// the block before; the first block is seeded with XXH64 of the policy version
// as little-endian int64, seed 0. Any XXH64 implementation reproduces it. Two
// different prefixes collide with probability of about n^2 / 2^65 among n
// blocks, 10^-5 at 24 million; a collision misleads one placement, nothing else.
type Hash uint64

// Hasher makes chain hashes for one policy version and block size.
type Hasher struct {
	root        Hash
	blockTokens int
}

// NewHasher returns the hasher of a policy version; a new version shares no hash
// with an old one, because KV computed under old weights must not be found.
func NewHasher(policyVersion int64, blockTokens int) Hasher {
	if blockTokens < 1 {
		blockTokens = 1
	}
	low, high := uint32(uint64(policyVersion)), uint32(uint64(policyVersion)>>32)
	version := [2]int32{int32(low), int32(high)}
	return Hasher{root: Hash(xxh64(0, version[:])), blockTokens: blockTokens}
}

// BlockTokens is the number of tokens in one block.
func (h Hasher) BlockTokens() int { return h.blockTokens }

// Root is the parent of a first block.
func (h Hasher) Root() Hash { return h.root }

// AppendChain appends the hash of each full block in tokens to dst. parent is
// the hash of the block before, or Root. Tokens after the last full block are
// not covered: pass them again, with what follows them.
func (h Hasher) AppendChain(dst []Hash, parent Hash, tokens []int32) []Hash {
	for len(tokens) >= h.blockTokens {
		parent = Hash(xxh64(uint64(parent), tokens[:h.blockTokens]))
		dst = append(dst, parent)
		tokens = tokens[h.blockTokens:]
	}
	return dst
}

// Stream hashes the growing context of one session: every token is hashed once,
// however many turns there are.
type Stream struct {
	hasher Hasher
	parent Hash
	blocks int
	tail   []int32
}

// NewStream starts an empty context.
func (h Hasher) NewStream() *Stream {
	return &Stream{hasher: h, parent: h.root, tail: make([]int32, 0, h.blockTokens)}
}

// Blocks is the number of full blocks so far: a turn's KnownBlocks, before its
// own tokens are appended.
func (s *Stream) Blocks() int { return s.blocks }

// Append adds tokens to the context and appends the hashes of the blocks they
// complete to dst.
func (s *Stream) Append(dst []Hash, tokens []int32) []Hash {
	size := s.hasher.blockTokens
	before := len(dst)
	if len(s.tail) > 0 {
		take := min(size-len(s.tail), len(tokens))
		s.tail = append(s.tail, tokens[:take]...)
		tokens = tokens[take:]
		if len(s.tail) < size {
			return dst
		}
		dst = s.hasher.AppendChain(dst, s.parent, s.tail)
		s.parent = dst[len(dst)-1]
		s.tail = s.tail[:0]
	}
	full := len(tokens) / size * size
	dst = s.hasher.AppendChain(dst, s.parent, tokens[:full])
	s.tail = append(s.tail, tokens[full:]...)
	s.blocks += len(dst) - before
	if len(dst) > before {
		s.parent = dst[len(dst)-1]
	}
	return dst
}

// The constants of XXH64.
const (
	prime1 uint64 = 0x9E3779B185EBCA87
	prime2 uint64 = 0xC2B2AE3D27D4EB4F
	prime3 uint64 = 0x165667B19E3779F9
	prime4 uint64 = 0x85EBCA77C2B2AE63
	prime5 uint64 = 0x27D4EB2F165667C5
)

// xxh64 is XXH64 over 32-bit words, which is all that token ids need: no byte
// order, no odd tail, no unsafe.
func xxh64(seed uint64, words []int32) uint64 {
	lengthBytes := uint64(len(words)) * 4
	var acc uint64
	if len(words) >= 8 {
		v1, v2, v3, v4 := seed+prime1+prime2, seed+prime2, seed, seed-prime1
		for len(words) >= 8 {
			v1 = xxhRound(v1, pair(words[0], words[1]))
			v2 = xxhRound(v2, pair(words[2], words[3]))
			v3 = xxhRound(v3, pair(words[4], words[5]))
			v4 = xxhRound(v4, pair(words[6], words[7]))
			words = words[8:]
		}
		acc = bits.RotateLeft64(v1, 1) + bits.RotateLeft64(v2, 7) + bits.RotateLeft64(v3, 12) + bits.RotateLeft64(v4, 18)
		acc = xxhMerge(acc, v1)
		acc = xxhMerge(acc, v2)
		acc = xxhMerge(acc, v3)
		acc = xxhMerge(acc, v4)
	} else {
		acc = seed + prime5
	}
	acc += lengthBytes
	for len(words) >= 2 {
		acc ^= xxhRound(0, pair(words[0], words[1]))
		acc = bits.RotateLeft64(acc, 27)*prime1 + prime4
		words = words[2:]
	}
	if len(words) == 1 {
		acc ^= uint64(uint32(words[0])) * prime1
		acc = bits.RotateLeft64(acc, 23)*prime2 + prime3
	}
	acc ^= acc >> 33
	acc *= prime2
	acc ^= acc >> 29
	acc *= prime3
	acc ^= acc >> 32
	return acc
}

func pair(low, high int32) uint64 { return uint64(uint32(low)) | uint64(uint32(high))<<32 }

func xxhRound(acc, input uint64) uint64 {
	return bits.RotateLeft64(acc+input*prime2, 31) * prime1
}

func xxhMerge(acc, lane uint64) uint64 {
	return (acc^xxhRound(0, lane))*prime1 + prime4
}
