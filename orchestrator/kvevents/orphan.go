package kvevents

import "holdfast/router/prefix"

// Bounds of the orphan buffer of one rank. Blocks are orphans when the block before
// them is not known, as after a history that was lost; most never find it.
const (
	maxOrphanEvents = 4096
	maxOrphanTokens = 1 << 20
)

type orphanKey struct {
	group int
	hash  engineHash
}

// orphan is one stored event whose parent is not known.
type orphan struct {
	parent      orphanKey
	hashes      []engineHash
	gone        []bool // removed since, by position
	left        int    // blocks not gone
	tokens      []int32
	foreignFrom int
	dead        bool
}

// orphanage is a bounded buffer of orphans: the oldest makes room for the newest.
type orphanage struct {
	queue    []*orphan
	byParent map[orphanKey][]*orphan
	byBlock  map[orphanKey]blockAt
	live     int
	blocks   int
	tokens   int
}

type blockAt struct {
	orphan *orphan
	index  int
}

// adopt keeps a stored event until its parent comes.
func (t *table) adopt(g *group, ev *event, foreignFrom int) {
	o := &t.orphans
	if o.byParent == nil {
		o.byParent, o.byBlock = map[orphanKey][]*orphan{}, map[orphanKey]blockAt{}
	}
	n := len(ev.hashes)
	if len(ev.tokens) > maxOrphanTokens || n > maxOrphanTokens {
		t.status.orphansDropped.Add(uint64(n))
		return
	}
	for len(o.queue) > 0 && (o.live >= maxOrphanEvents || o.tokens+len(ev.tokens) > maxOrphanTokens || o.blocks+n > maxOrphanTokens) {
		t.dropOrphan(o.queue[0])
		o.queue = o.queue[1:]
	}
	kept := &orphan{
		parent:      orphanKey{g.id, ev.parent},
		hashes:      append([]engineHash(nil), ev.hashes...),
		gone:        make([]bool, n),
		left:        n,
		tokens:      append([]int32(nil), ev.tokens...),
		foreignFrom: foreignFrom,
	}
	for i, hash := range kept.hashes {
		key := orphanKey{g.id, hash}
		t.dropOrphanBlock(key) // an earlier copy of the same block
		o.byBlock[key] = blockAt{kept, i}
	}
	o.queue = append(o.queue, kept)
	o.byParent[kept.parent] = append(o.byParent[kept.parent], kept)
	o.live++
	o.blocks += n
	o.tokens += len(kept.tokens)
	t.status.orphansHeld.Add(int64(n))
	o.compact()
}

// resolve stores the orphans whose parent just became known, and theirs in turn.
func (t *table) resolve() error {
	for len(t.born) > 0 && t.orphans.blocks > 0 {
		last := t.born[len(t.born)-1]
		t.born = t.born[:len(t.born)-1]
		for _, found := range t.orphans.byParent[orphanKey{last.group.id, last.hash}] {
			if found.dead {
				continue
			}
			parent := last.group.blocks[last.hash].own
			foreignFrom := found.foreignFrom
			if parent == 0 {
				foreignFrom = 0
			}
			left := found.left
			t.unlink(found)
			t.status.orphansResolved.Add(uint64(left))
			if err := t.append(last.group, parent, found.hashes, found.gone, found.tokens, foreignFrom); err != nil {
				return err
			}
		}
	}
	return nil
}

// dropOrphanBlock takes one block out of the orphan that holds it; its heirs in the
// same event still need its tokens.
func (t *table) dropOrphanBlock(key orphanKey) bool {
	at, ok := t.orphans.byBlock[key]
	if !ok {
		return false
	}
	delete(t.orphans.byBlock, key)
	at.orphan.gone[at.index] = true
	at.orphan.left--
	t.orphans.blocks--
	t.status.orphansHeld.Add(-1)
	if at.orphan.left == 0 {
		t.unlink(at.orphan)
	}
	return true
}

func (t *table) dropOrphan(dropped *orphan) {
	if !dropped.dead {
		t.status.orphansDropped.Add(uint64(dropped.left))
		t.unlink(dropped)
	}
}

// unlink takes an orphan out of the buffer; its place in the queue goes later.
func (t *table) unlink(gone *orphan) {
	o := &t.orphans
	gone.dead = true
	for i, hash := range gone.hashes {
		if !gone.gone[i] {
			delete(o.byBlock, orphanKey{gone.parent.group, hash})
		}
	}
	o.live--
	o.blocks -= gone.left
	o.tokens -= len(gone.tokens)
	t.status.orphansHeld.Add(-int64(gone.left))
	siblings := o.byParent[gone.parent]
	kept := make([]*orphan, 0, len(siblings))
	for _, s := range siblings {
		if s != gone {
			kept = append(kept, s)
		}
	}
	if len(kept) == 0 {
		delete(o.byParent, gone.parent)
	} else {
		o.byParent[gone.parent] = kept
	}
}

// compact keeps the queue within twice what lives in it.
func (o *orphanage) compact() {
	if len(o.queue) <= 2*o.live+16 {
		return
	}
	kept := make([]*orphan, 0, o.live)
	for _, each := range o.queue {
		if !each.dead {
			kept = append(kept, each)
		}
	}
	o.queue = kept
}

func (t *table) dropAllOrphans() {
	t.status.orphansDropped.Add(uint64(t.orphans.blocks))
	t.status.orphansHeld.Add(-int64(t.orphans.blocks))
	t.orphans = orphanage{}
}

// newTable returns an empty table for one rank.
func newTable(s *Subscriber, rank int) *table {
	return &table{
		status:      &s.status,
		rank:        rank,
		blockTokens: s.cfg.BlockTokens,
		maxBlocks:   s.cfg.MaxBlocks / s.cfg.Ranks,
		version:     s.cfg.PolicyVersion,
		alarm:       s.blockSizeAlarm,
		chain:       make([]prefix.Hash, 0, 64),
	}
}
