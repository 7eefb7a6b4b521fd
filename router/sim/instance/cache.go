package instance

// Chain names token content without holding tokens: an append-only sequence
// that may begin with the first SharedTokens tokens of another chain. Two
// requests on one chain have equal tokens at equal positions, as far as both
// reach. A session is one chain that grows from turn to turn (what it generates
// is its next content); a prompt shared by a group, or a system prompt shared by a class, is
// the parent of its members' chains.
//
// A prompt ends before what a running request on its chain is still generating.
// One request at a time appends to a chain: another that runs beside it, or one
// that generates again what the chain already continues with, uses what is cached
// but adds nothing. A second try with other output is a new chain that shares the prompt.
//
// A Chain must not change once an Instance has seen it, and an ID must always
// come with the same Parent and SharedTokens.
type Chain struct {
	ID     uint64
	Parent *Chain
	// SharedTokens is how many leading tokens are the parent's; prompts on the
	// chain are at least as long.
	SharedTokens int
}

// Tier is a place where blocks are cached.
type Tier uint8

const (
	// TierDevice is the accelerator's memory.
	TierDevice Tier = iota
	// TierHost is host memory, where evicted blocks may still be found.
	TierHost
)

func (t Tier) String() string {
	switch t {
	case TierDevice:
		return "device"
	case TierHost:
		return "host"
	}
	return "unknown"
}

// CacheSink is told what the prefix cache holds. Blocks are counted from the
// start of the content, so block 0 of a chain with a parent is the parent's and
// is reported under the parent's ID. Calls come from within Submit, Advance,
// Abort, NextEvent, PublishDecoded and ResetCache; they must not call back.
type CacheSink interface {
	// BlocksStored says that blocks [from, to) of the chain became reusable.
	BlocksStored(tier Tier, chain uint64, from, to int)
	// BlocksRemoved says that blocks [from, to) of the chain were evicted.
	BlocksRemoved(tier Tier, chain uint64, from, to int)
	// AllCleared says that nothing is cached any more, in any tier.
	AllCleared()
}

// segment is a run of cached blocks [start, end) of one chain that are always
// used together: every request that holds one of them holds all of them and all
// of parent. A request that needs only a part splits the segment first.
type segment struct {
	node   *chainNode
	parent *segment // what precedes start; nil at the root
	next   *segment // the same chain from end on, if cached
	start  int
	end    int
	// refs counts running requests that hold the segment, children the cached
	// segments whose parent it is.
	refs     int
	children int
	epoch    uint32
	// The list of idle segments, from the one released longest ago on.
	older, newer *segment
}

func (s *segment) blocks() int { return s.end - s.start }

// chainNode is what the cache knows of one chain: its first own segment, and
// the running request that is appending to it.
type chainNode struct {
	id     uint64
	head   *segment
	writer *request
	spare  *chainNode
}

// level is one chain of a request's path: it supplies blocks [start, end).
type level struct {
	id         uint64
	start, end int
}

// cache is one tier's blocks. Each block is in exactly one state:
// free, idle (cached, held by nobody), pinned (cached, held by running
// requests) or private (held by one running request, not cached).
type cache struct {
	tier        Tier
	blockTokens int
	total       int
	free        int
	idle        int
	pinned      int
	private     int

	chains         map[uint64]*chainNode
	oldest, newest *segment
	// epoch counts resets: segments of an older epoch can't be found and are
	// freed when their last holder lets go.
	epoch uint32
	sink  CacheSink
	// publish commits what a chain's writer has decoded since it was last
	// asked, so that a lookup finds it. Decoding itself never touches the cache.
	publish func(*request)

	spareSegments *segment
	spareNodes    *chainNode
	lookupPath    []level
	commitPath    []level
	segmentCount  int
}

func newCache(tier Tier, blockTokens, totalBlocks int, sink CacheSink) cache {
	return cache{
		tier: tier, blockTokens: blockTokens, total: totalBlocks, free: totalBlocks,
		chains: make(map[uint64]*chainNode), sink: sink,
	}
}

// available is the number of blocks that can be had without preempting anyone.
func (c *cache) available() int { return c.free + c.idle }

// path lists the chains that supply blocks [0, limit), leaf first.
func (c *cache) path(buf []level, ch *Chain, limit int) []level {
	buf = buf[:0]
	for ; ch != nil && limit > 0; ch = ch.Parent {
		start := 0
		if ch.Parent != nil {
			start = ch.SharedTokens / c.blockTokens
		}
		if start < limit {
			buf = append(buf, level{ch.ID, start, limit})
			limit = start
		}
	}
	return buf
}

// hit is the longest cached prefix of some content.
type hit struct {
	deepest *segment // the segment that holds the last block; may reach beyond it
	blocks  int
	idle    int // how many of the blocks nobody holds
}

// lookup finds the longest cached prefix of at most limit blocks. It changes
// nothing but the bookkeeping of running writers on the way.
func (c *cache) lookup(ch *Chain, limit int) hit {
	var h hit
	c.lookupPath = c.path(c.lookupPath, ch, limit)
	for i := len(c.lookupPath) - 1; i >= 0; i-- {
		lv := c.lookupPath[i]
		node := c.chains[lv.id]
		if node == nil {
			return h
		}
		if node.writer != nil {
			c.publish(node.writer)
		}
		s := node.head
		if s == nil || s.start != h.blocks {
			return h
		}
		for ; s != nil && h.blocks < lv.end; s = s.next {
			take := min(s.end, lv.end) - s.start
			if s.refs == 0 {
				h.idle += take
			}
			h.deepest = s
			h.blocks += take
		}
		if h.blocks < lv.end {
			return h
		}
	}
	return h
}

// growing says whether a running request appends to content that counts for a
// lookup, so that the same lookup may find more after the next step.
func (c *cache) growing(ch *Chain, limit int) bool {
	c.lookupPath = c.path(c.lookupPath, ch, limit)
	for _, lv := range c.lookupPath {
		if n := c.chains[lv.id]; n != nil && n.writer != nil {
			return true
		}
	}
	return false
}

// attach makes r hold the blocks of a hit.
func (c *cache) attach(r *request, h hit) {
	r.epoch = c.epoch
	r.committed = h.blocks
	r.deepest = h.deepest
	if h.deepest == nil {
		return
	}
	if h.deepest.end > h.blocks {
		r.deepest = c.split(h.deepest, h.blocks)
	}
	for s := r.deepest; s != nil; s = s.parent {
		c.pin(s)
	}
}

// allocate gives m private blocks out, evicting when none is free. The caller
// has made sure that they are available.
func (c *cache) allocate(m int) {
	if m > c.free {
		c.evict(m - c.free)
	}
	c.free -= m
	c.private += m
}

// commit makes the blocks of r up to upto, private until now, part of the
// cache. Content that got there by another way in the meantime is shared: r
// lets its own copy go.
func (c *cache) commit(r *request, upto int) {
	c.commitPath = c.path(c.commitPath, r.Chain, upto)
	for i := len(c.commitPath) - 1; i >= 0; i-- {
		lv := c.commitPath[i]
		if lv.end <= r.committed {
			continue
		}
		node := c.node(lv.id)
		for r.committed < lv.end {
			s := node.head
			if r.deepest != nil && r.deepest.node == node {
				s = r.deepest.next
			}
			if s == nil {
				c.store(r, node, lv.end)
				break
			}
			if s.start != r.committed {
				// The chain was declared with another parent before: cache no more of it.
				r.detached = true
				return
			}
			if s.end > lv.end {
				s = c.split(s, lv.end)
			}
			c.pin(s)
			c.private -= s.blocks()
			c.free += s.blocks()
			r.deepest, r.committed = s, s.end
		}
	}
}

// store turns r's private blocks up to end into cached blocks of a chain.
func (c *cache) store(r *request, node *chainNode, end int) {
	from := r.committed
	d := r.deepest
	if d != nil && d.node == node && d.refs == 1 && d.children == 0 {
		d.end = end
	} else {
		s := c.newSegment()
		s.node, s.parent, s.start, s.end, s.refs, s.epoch = node, d, from, end, 1, c.epoch
		if d != nil {
			d.children++
		}
		if d != nil && d.node == node {
			d.next = s
		} else {
			node.head = s
		}
		r.deepest = s
	}
	r.committed = end
	c.private -= end - from
	c.pinned += end - from
	if c.sink != nil {
		c.sink.BlocksStored(c.tier, node.id, from, end)
	}
}

// release lets go of all blocks of r: allocated counts them. Cached ones stay,
// idle, the deepest released first and so evicted first.
func (c *cache) release(r *request, allocated int) {
	c.private -= allocated - r.committed
	c.free += allocated - r.committed
	for s := r.deepest; s != nil; {
		parent := s.parent
		s.refs--
		if s.refs == 0 {
			c.pinned -= s.blocks()
			if s.epoch == c.epoch {
				c.idle += s.blocks()
				c.pushNewest(s)
			} else {
				c.free += s.blocks()
				c.recycle(s)
			}
		}
		s = parent
	}
	r.deepest, r.committed = nil, 0
}

func (c *cache) pin(s *segment) {
	if s.refs == 0 {
		c.idle -= s.blocks()
		c.pinned += s.blocks()
		c.unlink(s)
	}
	s.refs++
}

// split cuts a segment at a block and returns the part before it. The old
// object keeps the tail, because requests and children point at segment ends.
func (c *cache) split(s *segment, at int) *segment {
	h := c.newSegment()
	h.node, h.parent, h.next = s.node, s.parent, s
	h.start, h.end, h.refs, h.children, h.epoch = s.start, at, s.refs, 1, s.epoch
	if s.node.head == s {
		s.node.head = h
	} else if s.parent != nil && s.parent.next == s {
		s.parent.next = h
	}
	s.parent, s.start = h, at
	if s.refs == 0 {
		h.older, h.newer = s, s.newer
		if s.newer != nil {
			s.newer.older = h
		} else {
			c.newest = h
		}
		s.newer = h
	}
	return h
}

// evict frees m idle blocks, from the tail of the segment released longest ago.
func (c *cache) evict(m int) {
	for m > 0 {
		s := c.oldest
		n := min(m, s.blocks())
		s.end -= n
		m -= n
		c.idle -= n
		c.free += n
		if c.sink != nil {
			c.sink.BlocksRemoved(c.tier, s.node.id, s.end, s.end+n)
		}
		if s.blocks() == 0 {
			c.unlink(s)
			c.forget(s)
		}
	}
}

// forget takes an empty segment out of the tree.
func (c *cache) forget(s *segment) {
	if p := s.parent; p != nil {
		p.children--
		if p.next == s {
			p.next = nil
		}
	}
	if n := s.node; n.head == s {
		n.head = nil
		c.dropNode(n)
	}
	c.recycle(s)
}

// reset makes everything unfindable: idle blocks become free at once, held ones when they
// are released.
func (c *cache) reset() {
	c.free += c.idle
	c.idle = 0
	for s := c.oldest; s != nil; {
		newer := s.newer
		c.recycle(s)
		s = newer
	}
	c.oldest, c.newest = nil, nil
	clear(c.chains)
	c.epoch++
}

func (c *cache) node(id uint64) *chainNode {
	n := c.chains[id]
	if n == nil {
		if n = c.spareNodes; n != nil {
			c.spareNodes = n.spare
			*n = chainNode{}
		} else {
			n = new(chainNode)
		}
		n.id = id
		c.chains[id] = n
	}
	return n
}

// dropNode forgets a chain of which nothing is cached and that nobody extends.
func (c *cache) dropNode(n *chainNode) {
	if n.head == nil && n.writer == nil && c.chains[n.id] == n {
		delete(c.chains, n.id)
		n.spare = c.spareNodes
		c.spareNodes = n
	}
}

func (c *cache) newSegment() *segment {
	c.segmentCount++
	if s := c.spareSegments; s != nil {
		c.spareSegments = s.next
		*s = segment{}
		return s
	}
	return new(segment)
}

func (c *cache) recycle(s *segment) {
	c.segmentCount--
	*s = segment{next: c.spareSegments}
	c.spareSegments = s
}

func (c *cache) pushNewest(s *segment) {
	s.older, s.newer = c.newest, nil
	if c.newest != nil {
		c.newest.newer = s
	} else {
		c.oldest = s
	}
	c.newest = s
}

func (c *cache) unlink(s *segment) {
	if s.older != nil {
		s.older.newer = s.newer
	} else {
		c.oldest = s.newer
	}
	if s.newer != nil {
		s.newer.older = s.older
	} else {
		c.newest = s.older
	}
	s.older, s.newer = nil, nil
}
