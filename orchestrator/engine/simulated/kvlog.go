package simulated

import (
	"time"

	"holdfast/orchestrator/engine/simulated/publish"
)

// kvLog turns what happens in one rank's block table into events, and hands them to the
// publisher in batches. Guarded by core.mu.
type kvLog struct {
	publisher   *publish.Publisher
	blockTokens int
	// unsalted leaves the salt out of the hashes, as SGLang does.
	unsalted bool
	// flushIdle publishes a reset at once. An engine does so with its next step.
	flushIdle bool
	pending   []publish.Event
	// held is how many of pending, counted from the front, may be published before
	// the engine has taken step heldStep; negative: all.
	held     int
	heldStep int64
	// copies counts the blocks with equal content. Only the first is an event, and
	// only the last to go.
	copies map[blockHash]int32
	// decodedAt is when the blocks that running requests generated were last asked for.
	decodedAt time.Time
}

func newKVLog(p *publish.Publisher, cfg *Config) *kvLog {
	return &kvLog{
		publisher: p, blockTokens: cfg.Engine.BlockTokens, flushIdle: cfg.KVEvents.FlushIdle,
		unsalted: cfg.KVEvents.Encoding == publish.SGLang, held: -1, copies: map[blockHash]int32{},
	}
}

func (l *kvLog) wireHash(c *chain, key blockHash) uint64 {
	if l.unsalted {
		key ^= c.saltHash
	}
	return uint64(key)
}

// stored notes blocks [from, to) of a chain, whose content is known.
func (l *kvLog) stored(c *chain, from, to int) {
	for from < to {
		first := from
		for from < to && l.add(c.hashes[from-c.start]) {
			from++
		}
		if from > first {
			l.pending = append(l.pending, l.storedEvent(c, first, from))
		}
		from++ // A copy of what is there, or the end.
	}
}

// add reports whether a block is the first with its content.
func (l *kvLog) add(key blockHash) bool {
	l.copies[key]++
	return l.copies[key] == 1
}

func (l *kvLog) storedEvent(c *chain, from, to int) publish.Event {
	e := publish.Event{Kind: publish.Stored, Hashes: make([]uint64, 0, to-from), BlockTokens: l.blockTokens, Salt: c.salt}
	for _, h := range c.hashes[from-c.start : to-c.start] {
		e.Hashes = append(e.Hashes, l.wireHash(c, h))
	}
	at, end := (from-c.start)*l.blockTokens, (to-c.start)*l.blockTokens
	// The chain only appends to its tokens, so that the event may look at them.
	e.Tokens = c.tokens[at:end:end]
	if from > 0 {
		e.HasParent, e.Parent = true, l.wireHash(c, c.hashOf(from-1))
	}
	return e
}

// removed notes that blocks [from, to) were evicted, the last one first.
func (l *kvLog) removed(c *chain, from, to int) {
	var hashes []uint64
	for b := to - 1; b >= from; b-- {
		key := c.hashes[b-c.start]
		if n := l.copies[key] - 1; n > 0 {
			l.copies[key] = n
			continue
		}
		delete(l.copies, key)
		hashes = append(hashes, l.wireHash(c, key))
	}
	if len(hashes) > 0 {
		l.pending = append(l.pending, publish.Event{Kind: publish.Removed, Hashes: hashes})
	}
}

// cleared notes a reset after a number of steps.
func (l *kvLog) cleared(step int64) {
	clear(l.copies)
	if l.held < 0 && !l.flushIdle {
		l.held, l.heldStep = len(l.pending), step
	}
	l.pending = append(l.pending, publish.Event{Kind: publish.Cleared})
}

// flush publishes what may be published after a number of steps.
func (l *kvLog) flush(step func() int64) {
	ready := l.pending
	if l.held >= 0 && step() > l.heldStep {
		l.held = -1
	}
	if l.held >= 0 {
		ready = l.pending[:l.held]
	}
	if len(ready) == 0 {
		return
	}
	rest := append([]publish.Event(nil), l.pending[len(ready):]...)
	l.publisher.Publish(time.Now(), ready)
	l.pending = rest
	if l.held >= 0 {
		l.held = 0
	}
}
