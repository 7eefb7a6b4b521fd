package fleet

import (
	"sync"

	"holdfast/router"
)

// A persistent difference between the cached tokens that a turn was placed by and
// those its engine reported means that the two count different blocks. The alarm
// needs alarmReceipts receipts in a row that promise a block or more and find none.
const alarmReceipts = 20

// receipts compares what the prefix index promised for an instance with what the
// engine found.
type receipts struct {
	mu sync.Mutex
	// empty receipts in a row; the totals are over all receipts that could be compared.
	empty                         int
	alarmed                       bool
	turns                         int64
	predictedTokens, cachedTokens int64
	absoluteErrorTokens           int64
}

// Receipts is the comparison so far.
type Receipts struct {
	// Turns counts those whose engine reported cached tokens.
	Turns int64
	// PredictedTokens and CachedTokens are sums; AbsoluteErrorTokens sums the differences turn by turn.
	PredictedTokens, CachedTokens, AbsoluteErrorTokens int64
	// Alarm is set while promised blocks are never found.
	Alarm bool
}

// add takes one receipt and tells whether the alarm has just been raised or has ended.
func (r *receipts) add(predictedTokens, cachedTokens int64, blockTokens int) (raised, ended bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.turns++
	r.predictedTokens += predictedTokens
	r.cachedTokens += cachedTokens
	r.absoluteErrorTokens += max(predictedTokens-cachedTokens, cachedTokens-predictedTokens)
	switch {
	case cachedTokens > 0:
		ended = r.alarmed
		r.empty, r.alarmed = 0, false
	case predictedTokens >= int64(blockTokens):
		r.empty++
		raised = r.empty == alarmReceipts && !r.alarmed
		r.alarmed = r.alarmed || raised
	}
	return raised, ended
}

func (r *receipts) look() Receipts {
	r.mu.Lock()
	defer r.mu.Unlock()
	return Receipts{
		Turns: r.turns, PredictedTokens: r.predictedTokens, CachedTokens: r.cachedTokens,
		AbsoluteErrorTokens: r.absoluteErrorTokens, Alarm: r.alarmed,
	}
}

// Receipt compares the cached tokens that a turn was placed by with what its
// engine reported; -1 is no report and no receipt.
func (f *Fleet) Receipt(instance router.InstanceID, predictedTokens, cachedTokens int64) {
	m := f.member(instance)
	if m == nil || cachedTokens < 0 {
		return
	}
	raised, ended := m.receipts.add(predictedTokens, cachedTokens, m.described().BlockTokens)
	log := f.cfg.Logger.With("instance", instance)
	switch {
	case raised && m.events == nil:
		log.Error("an engine finds nothing of the prefixes that it served before: its prefix cache is off, or it does not report cached tokens",
			"turns", alarmReceipts)
	case raised:
		log.Error("an engine finds none of the blocks that its events promise: its block size, cache salt or cache groups differ from ours",
			"turns", alarmReceipts, "block_tokens", m.described().BlockTokens, "events_alarm", m.events.Health().Alarm)
	case ended:
		log.Info("an engine finds cached blocks again")
	}
}

// Hashing is the policy version and block size, in tokens, under which contexts
// are hashed for the prefix index. Instances whose blocks have another size cannot
// share an index with the first one that tells what it caches.
func (f *Fleet) Hashing() (policyVersion int64, blockTokens int) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	var first router.InstanceID
	for id, m := range f.members {
		info := m.described()
		policyVersion = max(policyVersion, info.PolicyVersion)
		if m.events != nil && (first == "" || id < first) {
			first, blockTokens = id, info.BlockTokens
		}
	}
	return policyVersion, blockTokens
}
