package kvevents

import (
	"errors"

	"holdfast/router"
	"holdfast/router/prefix"
)

// maxGroups bounds the cache groups of one rank; hybrid models have a handful.
const maxGroups = 64

// errFull: the engine seems to hold more blocks than Config.MaxBlocks, which is
// either a bound set too low or removals that never came.
var errFull = errors.New("more blocks than Config.MaxBlocks")

// cached is what is known of one engine block. own is 0 for a block that is not
// ours to index (adapter, image, foreign salt): it is remembered so that the blocks
// after it are recognised as not ours either.
type cached struct {
	own prefix.Hash
	// flush and at tell whether the block still waits in group.stored to be told.
	flush uint32
	at    uint32
}

// group is one cache group of one rank.
type group struct {
	id     int
	blocks map[engineHash]cached
	// stored and removed wait for the end of the batch; a 0 in stored was removed again.
	stored, removed []prefix.Hash
}

// table maps one rank's engine hashes to own hashes and gathers what is to be told.
type table struct {
	status      *status
	rank        int
	blockTokens int
	maxBlocks   int
	version     func() int64
	alarm       func(blockSize int64)
	alarmed     bool

	groups  []*group
	entries int
	flushes uint32
	orphans orphanage
	chain   []prefix.Hash
	// born are the engine hashes that an event made known, to look for orphans of.
	born []bornBlock
}

type bornBlock struct {
	group *group
	hash  engineHash
}

func (t *table) groupOf(id int, create bool) *group {
	for _, g := range t.groups {
		if g.id == id {
			return g
		}
	}
	if !create || len(t.groups) >= maxGroups {
		return nil
	}
	g := &group{id: id, blocks: map[engineHash]cached{}}
	t.groups = append(t.groups, g)
	return g
}

// store takes a BlockStored event. Events that are not for the index are counted
// and change nothing, but for blocks that are not ours, whose heirs must be known.
func (t *table) store(ev *event) error {
	n := len(ev.hashes)
	switch {
	case n == 0:
		return nil
	case ev.elsewhere:
		t.status.otherMedium.Add(uint64(n))
		return nil
	case ev.partial, !ev.oddTokens && ev.blockSize > 0 && int64(len(ev.tokens)) != ev.blockSize*int64(n),
		ev.group < 0 || ev.group > 1<<20:
		t.status.otherGroup.Add(uint64(n))
		return nil
	case ev.blockSize != int64(t.blockTokens):
		t.status.wrongSize.Add(uint64(n))
		if ev.blockSize > 0 {
			t.alarmed = true
			t.alarm(ev.blockSize)
		}
		return nil
	}
	if t.alarmed {
		t.alarmed = false
		t.alarm(0)
	}
	g := t.groupOf(int(ev.group), true)
	if g == nil {
		t.status.otherGroup.Add(uint64(n))
		return nil
	}
	foreignFrom := ev.foreignFrom
	if ev.lora || ev.oddTokens {
		foreignFrom = 0
	}
	parent, known := t.parentOf(g, ev)
	if !known {
		t.adopt(g, ev, foreignFrom)
		return nil
	}
	if parent == 0 {
		foreignFrom = 0
	}
	t.born = t.born[:0]
	if err := t.append(g, parent, ev.hashes, nil, ev.tokens, foreignFrom); err != nil {
		return err
	}
	return t.resolve()
}

// parentOf returns the own hash of the block before, 0 if that is not ours. A
// parent of integer zero that nobody stored is how some publishers write "none".
func (t *table) parentOf(g *group, ev *event) (prefix.Hash, bool) {
	if ev.hasParent {
		if c, ok := g.blocks[ev.parent]; ok {
			return c.own, true
		}
		if ev.parent != (engineHash{}) {
			return 0, false
		}
	}
	version := ev.version
	if !ev.salted {
		version = t.version()
	}
	return prefix.NewHasher(version, t.blockTokens).Root(), true
}

// append stores blocks that follow parent. Of those marked gone only the hash is
// needed; from foreignFrom on they are not ours.
func (t *table) append(g *group, parent prefix.Hash, hashes []engineHash, gone []bool, tokens []int32, foreignFrom int) error {
	ours := min(foreignFrom, len(hashes))
	// The root does not matter here: the parent is given.
	t.chain = prefix.NewHasher(0, t.blockTokens).AppendChain(t.chain[:0], parent, tokens[:ours*t.blockTokens])
	for i, hash := range hashes {
		own := prefix.Hash(0)
		if i < ours {
			own = t.chain[i]
		}
		if gone != nil && gone[i] {
			continue
		}
		if err := t.set(g, hash, own); err != nil {
			return err
		}
		if t.orphans.blocks > 0 {
			t.born = append(t.born, bornBlock{g, hash})
		}
	}
	t.status.foreignBlocks.Add(uint64(len(hashes) - ours))
	return nil
}

// set records one block. An engine hash that stands for other tokens than before
// (SGLang leaves the salt out of its hash) takes the earlier block back, because its
// removal could not be told from this one's.
func (t *table) set(g *group, hash engineHash, own prefix.Hash) error {
	old, ok := g.blocks[hash]
	if ok && old.own == own && t.waits(g, old) {
		return nil
	}
	if ok && old.own != own {
		t.retract(g, old)
	}
	if !ok {
		if t.entries >= t.maxBlocks {
			return errFull
		}
		t.entries++
		t.status.ownHashes.Add(1)
	}
	g.blocks[hash] = cached{own: own, flush: t.flushes, at: uint32(len(g.stored))}
	if own != 0 {
		g.stored = append(g.stored, own)
	}
	return nil
}

// retract takes back what was told, or is waiting to be told, of a block. Removals
// of a batch are told before its stores, so a store that waits must go.
func (t *table) retract(g *group, c cached) {
	if c.own == 0 {
		return
	}
	if t.waits(g, c) {
		g.stored[c.at] = 0
	}
	g.removed = append(g.removed, c.own)
}

// waits reports whether a block is stored but not yet told.
func (t *table) waits(g *group, c cached) bool {
	return c.own != 0 && c.flush == t.flushes && int(c.at) < len(g.stored) && g.stored[c.at] == c.own
}

// remove takes a BlockRemoved event; one that names no group is meant for all.
func (t *table) remove(ev *event) {
	if ev.elsewhere {
		t.status.otherMedium.Add(uint64(len(ev.hashes)))
		return
	}
	for _, hash := range ev.hashes {
		known := false
		for _, g := range t.groups {
			if ev.hasGroup && int64(g.id) != ev.group {
				continue
			}
			known = t.orphans.blocks > 0 && t.dropOrphanBlock(orphanKey{g.id, hash}) || known
			c, ok := g.blocks[hash]
			if !ok {
				continue
			}
			known = true
			delete(g.blocks, hash)
			t.entries--
			t.status.ownHashes.Add(-1)
			t.retract(g, c)
		}
		if !known {
			t.status.removedUnknown.Add(1)
		}
	}
}

// flush hands over what a batch changed: for each group the removals, then the
// stores that were not taken back.
func (t *table) flush(tell func(router.Event) error, instance router.InstanceID) error {
	t.flushes++
	for _, g := range t.groups {
		if len(g.removed) > 0 {
			blocks := append([]prefix.Hash(nil), g.removed...)
			g.removed = g.removed[:0]
			if err := tell(&router.BlocksRemoved{Instance: instance, Rank: t.rank, Group: g.id, Blocks: blocks}); err != nil {
				return err
			}
			t.status.removed.Add(uint64(len(blocks)))
		}
		if len(g.stored) == 0 {
			continue
		}
		blocks := make([]prefix.Hash, 0, len(g.stored))
		for _, own := range g.stored {
			if own != 0 {
				blocks = append(blocks, own)
			}
		}
		g.stored = g.stored[:0]
		if len(blocks) == 0 {
			continue
		}
		if err := tell(&router.BlocksStored{Instance: instance, Rank: t.rank, Group: g.id, Blocks: blocks}); err != nil {
			return err
		}
		t.status.stored.Add(uint64(len(blocks)))
	}
	return nil
}

// forget empties the table. It tells nobody.
func (t *table) forget() {
	t.status.ownHashes.Add(-int64(t.entries))
	t.entries = 0
	t.groups = nil
	t.dropAllOrphans()
}

// chunkBlocks bounds one event about a whole rank.
const chunkBlocks = 4096

// each passes on the own hashes of every group, a bounded number at a time. The
// slice is the callee's to keep.
func (t *table) each(chunk int, pass func(group int, blocks []prefix.Hash) error) error {
	for _, g := range t.groups {
		var blocks []prefix.Hash
		for _, c := range g.blocks {
			if c.own == 0 {
				continue
			}
			if blocks = append(blocks, c.own); len(blocks) < chunk {
				continue
			}
			if err := pass(g.id, blocks); err != nil {
				return err
			}
			blocks = nil
		}
		if len(blocks) == 0 {
			continue
		}
		if err := pass(g.id, blocks); err != nil {
			return err
		}
	}
	return nil
}

// forgetRank empties the table and tells of each block that it is gone: the way to
// clear one rank of an instance whose other ranks keep theirs.
func (t *table) forgetRank(tell func(router.Event) error, instance router.InstanceID) error {
	err := t.each(chunkBlocks, func(group int, blocks []prefix.Hash) error {
		return tell(&router.BlocksRemoved{Instance: instance, Rank: t.rank, Group: group, Blocks: blocks})
	})
	t.forget()
	return err
}
