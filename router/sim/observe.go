package sim

import (
	"holdfast/router"
	"holdfast/router/sim/instance"
)

// message is an observation on its way to the policy.
type message struct {
	event router.Event
	// blocks, if set, are cache events of an instance, in order.
	blocks   []blockRange
	instance int
	version  int64
}

// post queues a message.
func (w *world) post(at int64, m message) {
	var i int32
	if n := len(w.freeMessages); n > 0 {
		i = w.freeMessages[n-1]
		w.freeMessages = w.freeMessages[:n-1]
		w.messages[i] = m
	} else {
		i = int32(len(w.messages))
		w.messages = append(w.messages, m)
	}
	w.queue.push(at, messageArrived, i)
}

func (w *world) deliver(i int32) {
	m := w.messages[i]
	w.messages[i] = message{}
	w.freeMessages = append(w.freeMessages, i)
	switch ev := m.event.(type) {
	case nil:
		w.deliverBlocks(m)
	case *router.Snapshot:
		ev.At = w.now
		w.tell(ev)
		w.spareSnapshots = append(w.spareSnapshots, ev)
	default:
		w.tell(ev)
	}
}

// takeSnapshot looks at an engine and sends what it saw, unless it is lost.
func (w *world) takeSnapshot(e *engine) {
	o := w.cfg.Observed
	w.queue.push(w.now+nanos(o.SnapshotPeriodSeconds), snapshotTaken, int32(e.index))
	if !e.up {
		return
	}
	if o.SnapshotLoss > 0 && w.rng.Float64() < o.SnapshotLoss {
		return
	}
	delay := o.SnapshotDelaySeconds
	if o.SnapshotJitterSeconds > 0 {
		delay += w.rng.Float64() * o.SnapshotJitterSeconds
	}
	w.advance(e)
	snap := w.spareSnapshot()
	st := e.in.Stats()
	ratio := int64(w.cfg.RouterBlockTokens / e.params.BlockTokens)
	snap.TakenAt, snap.Instance = w.now, e.id
	snap.Running, snap.Waiting, snap.Preemptions = st.Running(), st.Waiting, st.Preemptions
	snap.UsedBlocks = int64(st.UsedBlocks()) / ratio
	for _, s := range e.sessions {
		snap.Sessions = append(snap.Sessions, w.observe(e, s))
	}
	w.post(w.now+nanos(delay), message{event: snap})
}

func (w *world) observe(e *engine, s *session) router.SnapshotSession {
	size := int64(w.cfg.RouterBlockTokens)
	if s.state == running {
		p, _ := e.in.Progress(uint64(s.number))
		tokens := int64(s.contextTokens + p.OutputTokens)
		return router.SnapshotSession{Session: s.id, Tokens: tokens, CachedBlocks: tokens / size, Running: true}
	}
	return router.SnapshotSession{
		Session: s.id, Tokens: int64(s.contextTokens),
		CachedBlocks: int64(e.in.CachedPrefixTokens(s.chain, s.contextTokens+1)) / size,
	}
}

// spareSnapshot reuses a delivered snapshot.
func (w *world) spareSnapshot() *router.Snapshot {
	spare := &w.spareSnapshots
	if n := len(*spare); n > 0 {
		snap := (*spare)[n-1]
		*spare = (*spare)[:n-1]
		snap.Sessions = snap.Sessions[:0]
		return snap
	}
	return &router.Snapshot{}
}

// blockRange is one notification of an engine's cache, in router blocks
// [from, to) of a chain.
type blockRange struct {
	kind     rangeKind
	chain    uint64
	from, to int32
}

type rangeKind uint8

const (
	rangeStored rangeKind = iota + 1
	rangeRemoved
	rangeCleared
)

// blockFeed gathers an engine's cache events. A router block counts as stored
// with its last engine block and as removed with it: chains are stored from the
// front and evicted from the tail.
type blockFeed struct {
	ratio  int
	ranges []blockRange
	spare  [][]blockRange
}

func (f *blockFeed) BlocksStored(tier instance.Tier, chain uint64, from, to int) {
	f.add(tier, rangeStored, chain, from, to)
}

func (f *blockFeed) BlocksRemoved(tier instance.Tier, chain uint64, from, to int) {
	f.add(tier, rangeRemoved, chain, from, to)
}

func (f *blockFeed) AllCleared() { f.ranges = append(f.ranges, blockRange{kind: rangeCleared}) }

func (f *blockFeed) add(tier instance.Tier, kind rangeKind, chain uint64, from, to int) {
	from, to = from/f.ratio, to/f.ratio
	if from == to || tier != instance.TierDevice {
		return
	}
	if n := len(f.ranges); n > 0 {
		last := &f.ranges[n-1]
		if last.kind == kind && last.chain == chain {
			if kind == rangeStored && int(last.to) == from {
				last.to = int32(to)
				return
			}
			if kind == rangeRemoved && int(last.from) == to {
				last.from = int32(from)
				return
			}
		}
	}
	f.ranges = append(f.ranges, blockRange{kind, chain, int32(from), int32(to)})
}

// flushBlocks sends the cache events gathered since the last time.
func (w *world) flushBlocks(e *engine) {
	o := w.cfg.Observed
	w.queue.push(w.now+nanos(o.BlockPeriodSeconds), blocksFlushed, int32(e.index))
	f := &e.feed
	if len(f.ranges) == 0 {
		return
	}
	if o.BlockLoss > 0 && w.rng.Float64() < o.BlockLoss {
		f.ranges = f.ranges[:0]
		return
	}
	var next []blockRange
	if n := len(f.spare); n > 0 {
		next = f.spare[n-1][:0]
		f.spare = f.spare[:n-1]
	}
	w.post(w.now+nanos(o.BlockDelaySeconds), message{blocks: f.ranges, instance: e.index, version: w.version})
	f.ranges = next
}

// deliverBlocks tells the policy of cache events, runs of one kind at a time.
func (w *world) deliverBlocks(m message) {
	e := w.engines[m.instance]
	for i := 0; i < len(m.blocks); {
		kind := m.blocks[i].kind
		w.hashes = w.hashes[:0]
		for ; i < len(m.blocks) && m.blocks[i].kind == kind; i++ {
			r := m.blocks[i]
			for b := r.from; b < r.to; b++ {
				w.hashes = append(w.hashes, blockHash(m.version, r.chain, int(b)))
			}
		}
		switch kind {
		case rangeStored:
			w.stored = router.BlocksStored{At: w.now, Instance: e.id, Blocks: w.hashes}
			w.tell(&w.stored)
		case rangeRemoved:
			w.removed = router.BlocksRemoved{At: w.now, Instance: e.id, Blocks: w.hashes}
			w.tell(&w.removed)
		case rangeCleared:
			w.tell(&router.BlocksCleared{At: w.now, Instance: e.id})
		}
	}
	e.feed.spare = append(e.feed.spare, m.blocks)
}

// truth answers the oracle.
type truth struct{ w *world }

func (t truth) Session(id router.SessionID) TrueSession {
	s := t.w.find(id)
	if s == nil {
		return TrueSession{}
	}
	ts := TrueSession{ContextTokens: s.contextTokens}
	first := s.turn
	if s.state == inGap {
		// The turn is done; what its tool appends is still to come.
		ts.ContextTokens += s.plan.Turns[s.turn].AppendTokens
		first++
	}
	ts.Turns = s.plan.Turns[first:]
	if s.state == running {
		if p, ok := t.w.engines[s.home].in.Progress(uint64(s.number)); ok {
			ts.DoneTokens = p.OutputTokens
		}
	}
	return ts
}

func (t truth) CachedTokens(id router.SessionID, at router.InstanceID) int {
	s, e := t.w.find(id), t.w.engineNamed(at)
	if s == nil || e == nil || !e.up {
		return 0
	}
	return e.in.CachedPrefixTokens(s.chain, s.contextTokens)
}

func (t truth) SecondsPerToken(at router.InstanceID) float64 {
	e := t.w.engineNamed(at)
	if e == nil || !e.up {
		return 0
	}
	st, p := e.in.Stats(), &e.params
	kv := float64(st.UsedBlocks() * p.BlockTokens)
	return (p.StepBaseNanos + p.StepPerSequenceNanos*float64(st.Running()) + p.StepPerKVTokenNanos*kv) / 1e9
}
