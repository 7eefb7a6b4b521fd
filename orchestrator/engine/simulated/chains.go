package simulated

import (
	"math/bits"

	"holdfast/router/sim/instance"
)

// blockHash identifies a full block by its tokens, all tokens before it, and the salt:
// it is the hash of the content, exclusive or the hash of the salt.
type blockHash uint64

// hashStart is the hash of no content.
const hashStart blockHash = 0x9e3779b97f4a7c15

// blockEnd closes the hash of a full block.
const blockEnd = 0x2545f4914f6cdd1d

// hashSalt is 0 for the empty salt.
func hashSalt(salt string) blockHash {
	if salt == "" {
		return 0
	}
	return hashName(salt)
}

func hashName(name string) blockHash {
	h := uint64(hashStart)
	for i := range len(name) {
		h = mix(h, uint64(name[i])+1)
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
	return blockHash(mix(x, blockEnd))
}

// hashPrompt appends the hash of each full block of a prompt to dst.
func hashPrompt(dst []blockHash, salt blockHash, prompt []int32, blockTokens int) []blockHash {
	h := hashStart
	for len(prompt) >= blockTokens {
		h = hashBlock(h, prompt[:blockTokens])
		dst = append(dst, h^salt)
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
	writer   *call  // the one of the users that appends to it
	twin     *chain // another chain whose first own block has the same hash

	salt     string
	saltHash blockHash
	// tokens are those of hashes. They are kept for events only.
	tokens []int32
}

// hashOf is the hash of a block that may be an ancestor's.
func (c *chain) hashOf(block int) blockHash {
	for block < c.start {
		c = c.parent
	}
	return c.hashes[block-c.start]
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
	// log is told what is stored and removed; nil if nobody wants to know. step is how many
	// steps the model has taken.
	log  *kvLog
	step func() int64
	// evicted counts the blocks that had to make room.
	evicted int64
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

// open returns the chain on which x runs: the one that its prompt continues, or a new
// one that branches off where it diverges.
func (t *chainTable) open(x *call, hashes []blockHash, prompt []int32) *chain {
	c, blocks := t.match(hashes)
	if c == nil || c.writer != nil || blocks < c.end() {
		c = t.branch(c, blocks, x.request.CacheSalt)
	}
	if end := c.end(); end < len(hashes) {
		t.extend(c, hashes[end:], prompt[end*t.blockTokens:len(hashes)*t.blockTokens])
	}
	c.users++
	c.writer = x
	return c
}

func (t *chainTable) branch(parent *chain, at int, salt string) *chain {
	t.lastID++
	c := &chain{model: instance.Chain{ID: t.lastID}, parent: parent, start: at, resident: at, salt: salt, saltHash: hashSalt(salt)}
	if parent != nil {
		c.model.Parent, c.model.SharedTokens = &parent.model, at*t.blockTokens
		parent.children++
	}
	t.byID[t.lastID] = c
	return c
}

func (t *chainTable) extend(c *chain, hashes []blockHash, tokens []int32) {
	if len(c.hashes) == 0 {
		c.twin = t.heads[hashes[0]]
		t.heads[hashes[0]] = c
	}
	c.hashes = append(c.hashes, hashes...)
	if t.log != nil {
		c.tokens = append(c.tokens, tokens...)
	}
}

// close ends a request's use of its chain.
func (t *chainTable) close(c *chain) {
	c.users--
	c.writer = nil
	t.drop(c)
}

func (t *chainTable) drop(c *chain) {
	for c != nil && c.users == 0 && c.children == 0 && c.resident == c.start && t.byID[c.model.ID] == c {
		delete(t.byID, c.model.ID)
		if len(c.hashes) > 0 {
			t.behead(c)
		}
		if c.parent != nil {
			c.parent.children--
		}
		c = c.parent
	}
}

// behead takes c out of the chains that begin with its hash.
func (t *chainTable) behead(c *chain) {
	head := c.hashes[0]
	first := t.heads[head]
	switch {
	case first == c && c.twin == nil:
		delete(t.heads, head)
	case first == c:
		t.heads[head] = c.twin
	default:
		for first.twin != c {
			first = first.twin
		}
		first.twin = c.twin
	}
}

// BlocksStored implements instance.CacheSink.
func (t *chainTable) BlocksStored(tier instance.Tier, id uint64, from, to int) {
	c := t.byID[id]
	if c == nil || tier != instance.TierDevice {
		return
	}
	c.resident = to
	if c.writer != nil && to > c.end() {
		// What is beyond the prompt was generated.
		c.writer.learn(t, to)
	}
	if t.log != nil {
		t.log.stored(c, from, min(to, c.end()))
	}
}

// BlocksRemoved implements instance.CacheSink.
func (t *chainTable) BlocksRemoved(tier instance.Tier, id uint64, from, to int) {
	c := t.byID[id]
	if c == nil || tier != instance.TierDevice {
		return
	}
	c.resident = from
	t.evicted += int64(to - from)
	if t.log != nil {
		t.log.removed(c, from, min(to, c.end()))
	}
	t.drop(c)
}

// AllCleared implements instance.CacheSink.
func (t *chainTable) AllCleared() {
	if t.log != nil {
		t.log.cleared(t.step())
	}
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

// residentPrefixes returns, for each chain with cached blocks of its own, the tokens
// from the beginning of its content to the last of them.
func (t *chainTable) residentPrefixes() (prefixes [][]int32) {
	for _, c := range t.byID {
		if end := min(c.resident, c.end()); end > c.start {
			prefixes = append(prefixes, c.content(nil, end*t.blockTokens, t.blockTokens))
		}
	}
	return prefixes
}

// content appends the first tokens of the chain's content, its parents' included.
func (c *chain) content(dst []int32, tokens, blockTokens int) []int32 {
	own := c.start * blockTokens
	if c.parent != nil {
		dst = c.parent.content(dst, min(own, tokens), blockTokens)
	}
	return append(dst, c.tokens[:max(0, tokens-own)]...)
}
