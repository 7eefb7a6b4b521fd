package simulated

import (
	"math/bits"

	"holdfast/router/sim/instance"
)

// blockHash identifies a full block by its tokens, all tokens before it, and the salt.
type blockHash uint64

// hashSalt begins a chain of block hashes.
func hashSalt(salt string) blockHash {
	h := uint64(0x9e3779b97f4a7c15)
	for i := range len(salt) {
		h = mix(h, uint64(salt[i])+1)
	}
	return blockHash(h)
}

// hashBlock continues a chain of block hashes.
func hashBlock(h blockHash, tokens []int32) blockHash {
	x := uint64(h)
	for len(tokens) >= 2 {
		x = mix(x, uint64(uint32(tokens[0]))|uint64(uint32(tokens[1]))<<32)
		tokens = tokens[2:]
	}
	if len(tokens) == 1 {
		x = mix(x, uint64(uint32(tokens[0])))
	}
	return blockHash(mix(x, 0x2545f4914f6cdd1d))
}

// hashPrompt appends the hash of each full block of a prompt to dst.
func hashPrompt(dst []blockHash, salt blockHash, prompt []int32, blockTokens int) []blockHash {
	h := salt
	for len(prompt) >= blockTokens {
		h = hashBlock(h, prompt[:blockTokens])
		dst = append(dst, h)
		prompt = prompt[blockTokens:]
	}
	return dst
}

func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a^0xa0761d6478bd642f, b^0xe7037ed1a0b428db)
	return hi ^ lo
}

// chain is content that the model knows under one chain ID, by its blocks'
// hashes. Its blocks begin at block start, after those it shares with parent.
type chain struct {
	model    instance.Chain
	parent   *chain
	start    int
	hashes   []blockHash // of blocks start and following
	resident int         // blocks [start, resident) are cached
	users    int         // requests in flight on this chain itself
	children int
	writing  bool // one of the users appends to it
}

// end is the number of blocks whose content is known.
func (c *chain) end() int { return c.start + len(c.hashes) }

// chainTable maps token content to the model's chains. A chain lives as long as
// a block of it is cached, a request uses it or another chain begins with it.
type chainTable struct {
	blockTokens int
	byID        map[uint64]*chain
	// heads finds a chain by the hash of its first own block; the rest of it is
	// found by comparing hashes in a row.
	heads  map[blockHash]*chain
	lastID uint64
}

func newChainTable(blockTokens int) *chainTable {
	return &chainTable{blockTokens: blockTokens, byID: map[uint64]*chain{}, heads: map[blockHash]*chain{}}
}

// match finds the chain that holds the longest known prefix, and its length in blocks.
func (t *chainTable) match(hashes []blockHash) (*chain, int) {
	var c *chain
	blocks := 0
	for blocks < len(hashes) {
		next := t.heads[hashes[blocks]]
		if next == nil {
			break
		}
		c = next
		for _, h := range c.hashes {
			if blocks == len(hashes) || hashes[blocks] != h {
				break
			}
			blocks++
		}
	}
	return c, blocks
}

// open returns the chain on which a request with this prompt runs: the one that
// the prompt continues, or a new one that branches off where it diverges.
func (t *chainTable) open(hashes []blockHash) *chain {
	c, blocks := t.match(hashes)
	if c == nil || c.writing || blocks < c.end() {
		c = t.branch(c, blocks)
	}
	if more := hashes[c.end():]; len(more) > 0 {
		t.extend(c, more...)
	}
	c.users++
	c.writing = true
	return c
}

func (t *chainTable) branch(parent *chain, at int) *chain {
	t.lastID++
	c := &chain{model: instance.Chain{ID: t.lastID}, parent: parent, start: at, resident: at}
	if parent != nil {
		c.model.Parent, c.model.SharedTokens = &parent.model, at*t.blockTokens
		parent.children++
	}
	t.byID[t.lastID] = c
	return c
}

func (t *chainTable) extend(c *chain, hashes ...blockHash) {
	if len(c.hashes) == 0 && t.heads[hashes[0]] == nil {
		t.heads[hashes[0]] = c
	}
	c.hashes = append(c.hashes, hashes...)
}

// close ends a request's use of its chain.
func (t *chainTable) close(c *chain) {
	c.users--
	c.writing = false
	t.drop(c)
}

func (t *chainTable) drop(c *chain) {
	for c != nil && c.users == 0 && c.children == 0 && c.resident == c.start && t.byID[c.model.ID] == c {
		delete(t.byID, c.model.ID)
		if len(c.hashes) > 0 && t.heads[c.hashes[0]] == c {
			delete(t.heads, c.hashes[0])
		}
		if c.parent != nil {
			c.parent.children--
		}
		c = c.parent
	}
}

// BlocksStored implements instance.CacheSink.
func (t *chainTable) BlocksStored(tier instance.Tier, id uint64, _, to int) {
	if c := t.byID[id]; c != nil && tier == instance.TierDevice {
		c.resident = to
	}
}

// BlocksRemoved implements instance.CacheSink.
func (t *chainTable) BlocksRemoved(tier instance.Tier, id uint64, from, _ int) {
	if c := t.byID[id]; c != nil && tier == instance.TierDevice {
		c.resident = from
		t.drop(c)
	}
}

// AllCleared implements instance.CacheSink.
func (t *chainTable) AllCleared() {
	for _, c := range t.byID {
		c.resident = c.start
	}
	for _, c := range t.byID {
		t.drop(c)
	}
}

// residentHashes appends the hash of each cached block whose content is known.
func (t *chainTable) residentHashes(dst []uint64) []uint64 {
	for _, c := range t.byID {
		for _, h := range c.hashes[:min(c.resident, c.end())-c.start] {
			dst = append(dst, uint64(h))
		}
	}
	return dst
}
