package kvevents

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"time"

	"holdfast/router"
)

// drop takes back all that was told of this rank: its picture may be wrong.
func (st *stream) drop(ctx context.Context, reason string) error {
	s := st.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	return st.dropLocked(ctx, reason)
}

func (st *stream) dropLocked(ctx context.Context, reason string) error {
	s := st.sub
	s.status.resyncs.Add(1)
	st.known = false
	s.status.trust(st.rank, false, reason)
	s.cfg.Logger.Warn("KV event locations dropped", "instance", s.cfg.Instance, "rank", st.rank, "reason", reason)
	return st.clearLocked(ctx)
}

// clearLocked empties the table and tells it, leaving other ranks alone.
func (st *stream) clearLocked(ctx context.Context) error {
	s := st.sub
	alone := true
	for _, other := range s.streams {
		alone = alone && (other == st || other.table.entries == 0)
	}
	if alone {
		st.table.forget()
		if err := s.tellCleared(ctx); err != nil {
			return tellError{err}
		}
		return nil
	}
	err := st.table.forgetRank(func(ev router.Event) error { return s.cfg.Tell(ctx, ev) }, s.cfg.Instance)
	if err != nil {
		s.clearOwed = true
		return tellError{err}
	}
	return nil
}

func (st *stream) distrust(reason string) {
	st.sub.status.trust(st.rank, false, reason)
}

func (st *stream) isKnown() bool {
	st.sub.mu.Lock()
	defer st.sub.mu.Unlock()
	return st.known
}

// apply decodes a batch into the table and tells what changed. Afterwards next
// follows it, whatever was wrong with it.
func (st *stream) apply(ctx context.Context, seq uint64, payload []byte, replayed bool) error {
	s := st.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clearOwed {
		return tellError{errors.New("the router has not taken the last clear")}
	}
	st.known, st.next = true, seq+1
	st.print = maphash.Bytes(st.seed, payload)
	ts := st.decoder.timestamp(payload)
	st.ts = ts
	s.status.batches.Add(1)
	s.status.sequence(st.rank, seq)
	if replayed {
		s.status.replayedBatches.Add(1)
	}
	s.status.lastEventNanos.Store(s.now().UnixNano())
	stale := st.isStale(ts, replayed)
	if stale {
		s.status.staleBatches.Add(1)
	}
	err := st.decoder.batch(payload, func(ev *event) error { return st.event(ctx, ev, stale) })
	s.status.unknownEvents.Add(st.decoder.unknownEvents)
	s.status.unknownFields.Add(st.decoder.unknownFields)
	st.decoder.unknownEvents, st.decoder.unknownFields = 0, 0
	if isFatal(err) {
		return err
	}
	if err != nil {
		// What the rest of the batch removed is not known, and a replay would give the
		// same bytes again. The stream itself goes on behind it.
		if !errors.Is(err, errFull) {
			s.status.badInput.Add(1)
		}
		err = st.dropLocked(ctx, fmt.Sprintf("batch %d: %v", seq, err))
		st.known = true
		return err
	}
	if err := st.table.flush(func(ev router.Event) error { return s.cfg.Tell(ctx, ev) }, s.cfg.Instance); err != nil {
		s.clearOwed = true
		st.known = false
		return tellError{err}
	}
	return nil
}

func (st *stream) event(ctx context.Context, ev *event, stale bool) error {
	st.sub.status.events.Add(1)
	switch {
	case ev.kind == allBlocksCleared:
		st.sub.status.cleared.Add(1)
		if err := st.clearLocked(ctx); err != nil {
			return err
		}
		// An empty cache is known completely.
		st.sub.status.trust(st.rank, true, "")
		return nil
	case stale:
		return nil
	case ev.kind == blockStored:
		return st.table.store(ev)
	}
	st.table.remove(ev)
	return nil
}

// measureSkew compares the clocks by a live batch.
func (st *stream) measureSkew(ts float64) {
	if ts == 0 {
		return
	}
	skew := float64(st.sub.now().UnixNano())/1e9 - ts
	if !st.hasSkew || skew < st.skew {
		st.skew, st.hasSkew = skew, true
	}
}

// staleWindow is how long after an ordered clear a live batch may be older than it;
// the bound keeps an engine whose clock was set back from being ignored for long.
const staleWindow = 30 * time.Second

// isStale reports whether a batch was published before the last ordered clear.
func (st *stream) isStale(ts float64, replayed bool) bool {
	s := st.sub
	if s.clearedAt.IsZero() || ts == 0 || !replayed && s.now().Sub(s.clearedAt) > staleWindow {
		return false
	}
	return ts+st.skew <= float64(s.clearedAt.UnixNano())/1e9
}

// blockSizeAlarm raises the alarm of a block size that is not the router's, and
// takes it back at 0.
func (s *Subscriber) blockSizeAlarm(blockSize int64) {
	if blockSize == 0 {
		s.status.setAlarm("")
		return
	}
	cause := "set the pool's block size to the engine's"
	if s.cfg.Dialect == SGLang {
		cause += " (--page-size, 1 by default; what it publishes may be page_size x dcp_size)"
	} else {
		cause += " (--block-size)"
	}
	s.status.setAlarm(fmt.Sprintf("%s stores blocks of %d tokens and the router counts in %d: no prefix will ever match; %s",
		s.cfg.Instance, blockSize, s.cfg.BlockTokens, cause))
}
