package kvevents

import (
	"sync"
	"sync/atomic"
	"time"
)

// Health is what is known of the stream, for metrics, alarms and people. Counters
// run from the start of the process and never fall.
type Health struct {
	// Trusted: the router's picture of this instance is complete. Untrusted means
	// that it lacks blocks, never that it claims blocks which are not there.
	Trusted        bool
	UntrustedSince time.Time
	Reason         string
	// Alarm names a configuration error that makes hits impossible while all else
	// looks healthy; empty if there is none.
	Alarm       string
	Ranks       []RankHealth
	LastEventAt time.Time
	// OwnHashes and OrphansHeld are what is in memory now, in blocks.
	OwnHashes, OrphansHeld int64

	// Batches were applied, live or from a replay; Events are those inside them.
	Batches, Events uint64
	// BlocksStored and BlocksRemoved were told to the router; Cleared counts the
	// engine's clear events, Clears those that the caller ordered.
	BlocksStored, BlocksRemoved, Cleared, Clears uint64
	// Gaps were found in the sequence; Replays asked for, of which ReplaysFailed
	// gave no answer; ReplayedBatches came that way.
	Gaps, Replays, ReplaysFailed, ReplayedBatches uint64
	// Resyncs count how often all locations were dropped, for whatever cause,
	// Restarts those among them where the engine began anew, Connects the connections.
	Resyncs, Restarts, Connects uint64
	// Duplicates were old batches, StaleBatches published before an ordered clear.
	Duplicates, StaleBatches uint64
	// OrphansResolved and OrphansDropped are blocks whose parent came, or did not.
	OrphansResolved, OrphansDropped uint64
	// What is not indexed, in blocks: of a LoRA adapter, an image or a foreign salt;
	// in another tier of memory; of a group without full attention; of another size.
	ForeignBlocks, OtherMediumBlocks, OtherGroupBlocks, WrongSizeBlocks uint64
	// RemovedUnknown are removals of blocks that were not known here.
	RemovedUnknown uint64
	// What was skipped without understanding it.
	UnknownEvents, UnknownFields, OtherTopics uint64
	// DecodeErrors are frames or batches that could not be read.
	DecodeErrors uint64
}

// RankHealth is the state of one data-parallel rank.
type RankHealth struct {
	Connected bool
	// ConnectError is why the last connection ended or did not come about.
	ConnectError string
	Trusted      bool
	Reason       string
	// LastSeq is the number of the last batch applied, if HasSeq.
	LastSeq uint64
	HasSeq  bool
}

// status holds the counters and states that Health reads while streams run.
type status struct {
	batches, events                                     atomic.Uint64
	stored, removed, cleared, clears                    atomic.Uint64
	gaps, replays, replaysFailed, replayedBatches       atomic.Uint64
	resyncs, restarts, connects                         atomic.Uint64
	duplicates, staleBatches                            atomic.Uint64
	orphansResolved, orphansDropped                     atomic.Uint64
	foreignBlocks, otherMedium, otherGroup, wrongSize   atomic.Uint64
	removedUnknown                                      atomic.Uint64
	unknownEvents, unknownFields, otherTopics, badInput atomic.Uint64
	ownHashes, orphansHeld                              atomic.Int64
	lastEventNanos                                      atomic.Int64

	mu             sync.Mutex
	alarm          string
	ranks          []RankHealth
	untrustedSince time.Time
	now            func() time.Time
}

func (t *status) init(ranks int, at time.Time) {
	t.ranks = make([]RankHealth, ranks)
	for i := range t.ranks {
		t.ranks[i].Reason = "not connected yet"
	}
	t.untrustedSince = at
	t.now = time.Now
}

// trust sets whether a rank's picture is complete.
func (t *status) trust(rank int, trusted bool, reason string) {
	t.change(func() {
		t.ranks[rank].Trusted = trusted
		t.ranks[rank].Reason = reason
	})
}

// connected sets whether a rank is connected, and if not, why.
func (t *status) connected(rank int, cause error) {
	t.change(func() {
		t.ranks[rank].Connected = cause == nil
		t.ranks[rank].ConnectError = ""
		if cause != nil {
			t.ranks[rank].ConnectError = cause.Error()
		}
	})
}

func (t *status) sequence(rank int, seq uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ranks[rank].LastSeq, t.ranks[rank].HasSeq = seq, true
}

func (t *status) setAlarm(alarm string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.alarm = alarm
}

// change runs f and keeps the time at which trust ended.
func (t *status) change(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	before, _ := t.overall()
	f()
	if after, _ := t.overall(); before && !after {
		t.untrustedSince = t.now()
	}
}

// overall is trusted if every rank is connected and complete; the reason is that
// of the first which is not. The caller holds mu.
func (t *status) overall() (trusted bool, reason string) {
	for i := range t.ranks {
		r := &t.ranks[i]
		switch {
		case !r.Connected && r.ConnectError != "":
			return false, "not connected: " + r.ConnectError
		case !r.Trusted:
			return false, r.Reason
		}
	}
	return true, ""
}

// Health reports the state at this moment. It does not wait for the stream.
func (s *Subscriber) Health() Health {
	t := &s.status
	h := Health{
		OwnHashes: t.ownHashes.Load(), OrphansHeld: t.orphansHeld.Load(),
		Batches: t.batches.Load(), Events: t.events.Load(),
		BlocksStored: t.stored.Load(), BlocksRemoved: t.removed.Load(),
		Cleared: t.cleared.Load(), Clears: t.clears.Load(),
		Gaps: t.gaps.Load(), Replays: t.replays.Load(),
		ReplaysFailed: t.replaysFailed.Load(), ReplayedBatches: t.replayedBatches.Load(),
		Resyncs: t.resyncs.Load(), Restarts: t.restarts.Load(), Connects: t.connects.Load(),
		Duplicates: t.duplicates.Load(), StaleBatches: t.staleBatches.Load(),
		OrphansResolved: t.orphansResolved.Load(), OrphansDropped: t.orphansDropped.Load(),
		ForeignBlocks: t.foreignBlocks.Load(), OtherMediumBlocks: t.otherMedium.Load(),
		OtherGroupBlocks: t.otherGroup.Load(), WrongSizeBlocks: t.wrongSize.Load(),
		RemovedUnknown: t.removedUnknown.Load(),
		UnknownEvents:  t.unknownEvents.Load(), UnknownFields: t.unknownFields.Load(),
		OtherTopics: t.otherTopics.Load(), DecodeErrors: t.badInput.Load(),
	}
	if nanos := t.lastEventNanos.Load(); nanos != 0 {
		h.LastEventAt = time.Unix(0, nanos)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	h.Trusted, h.Reason = t.overall()
	if !h.Trusted {
		h.UntrustedSince = t.untrustedSince
	}
	h.Alarm = t.alarm
	h.Ranks = append(h.Ranks, t.ranks...)
	return h
}
