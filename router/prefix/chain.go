package prefix

// maxSamples bounds a chain: 2,048 hashes are exact up to 32K tokens in blocks
// of 16, every second block is kept up to 64K tokens, every fourth up to 128K.
const maxSamples = 2048

// Chain is one session's context as block hashes, kept within 16 KiB however
// long it grows: when it is full, every second hash is dropped. What is lost is
// resolution (a match is reported in steps of the stride), never length.
//
// The zero value is an empty chain.
type Chain struct {
	// Sample j is the hash of block base + (j+1)*stride - 1, counted from 0.
	base, stride, blocks int
	samples              []Hash
}

// Blocks is the length of the chain in full blocks.
func (c *Chain) Blocks() int { return c.blocks }

// Reset empties the chain and keeps its memory for reuse.
func (c *Chain) Reset() {
	c.base, c.stride, c.blocks = 0, 1, 0
	c.samples = c.samples[:0]
}

// Extend takes the hashes that follow the first known blocks. If known is less
// than the length, the context was rewritten from there on and the chain is cut
// first; if it is more, blocks were missed (after a failover) and the chain
// begins anew after the gap, which later matches bridge because a cached block
// implies the blocks before it.
//
// It returns how many leading blocks of the former chain are still its own, to
// within the stride: all of them after a continuation or a gap, none when the same
// content is hashed under a new policy version.
func (c *Chain) Extend(known int, blocks []Hash) (kept int) {
	if c.stride == 0 {
		c.stride = 1
	}
	kept = c.blocks
	switch {
	case known < c.blocks:
		known = max(known, 0)
		kept = c.common(known, blocks)
		c.cut(known)
	case known > c.blocks:
		c.Reset()
		c.base, c.blocks = known, known
	}
	if c.stride == 1 && len(c.samples)+len(blocks) <= maxSamples {
		c.samples = append(c.samples, blocks...)
		c.blocks += len(blocks)
		return kept
	}
	for _, h := range blocks {
		c.blocks++
		if (c.blocks-c.base)%c.stride != 0 {
			continue
		}
		if len(c.samples) == maxSamples {
			c.thin()
			if (c.blocks-c.base)%c.stride != 0 {
				continue
			}
		}
		c.samples = append(c.samples, h)
	}
	return kept
}

// common is how many leading blocks the chain shares with its first known blocks
// followed by the given ones. Equal hashes mean equal content before them too.
func (c *Chain) common(known int, blocks []Hash) int {
	kept := known
	for j := max(0, (known-c.base)/c.stride); j < len(c.samples); j++ {
		at := c.length(j) - known
		if at > len(blocks) || blocks[at-1] != c.samples[j] {
			return kept
		}
		kept = c.length(j)
	}
	return max(kept, min(c.blocks, known+len(blocks)))
}

// cut shortens the chain to the first n blocks.
func (c *Chain) cut(n int) {
	if n <= c.base {
		c.Reset()
		c.base, c.blocks = n, n
		return
	}
	c.samples = c.samples[:(n-c.base)/c.stride]
	c.blocks = n
}

// thin drops every second sample.
func (c *Chain) thin() {
	for j := 1; j < len(c.samples); j += 2 {
		c.samples[j/2] = c.samples[j]
	}
	c.samples = c.samples[:len(c.samples)/2]
	c.stride *= 2
}

// samplesWithin is the number of samples within the first n blocks.
func (c *Chain) samplesWithin(n int) int { return (n - c.base) / c.stride }

// Tells reports whether the chain knows a hash within its first n blocks, and so
// whether a match can say anything of them. After a gap it does not.
func (c *Chain) Tells(n int) bool { return n >= c.base+c.stride && len(c.samples) > 0 }

// length is the number of blocks up to and including sample j; j = -1 is none.
func (c *Chain) length(j int) int {
	if j < 0 {
		return 0
	}
	return c.base + (j+1)*c.stride
}
