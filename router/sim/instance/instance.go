package instance

import (
	"errors"
	"fmt"
)

var (
	// ErrBadRequest marks a request that no engine accepts.
	ErrBadRequest = errors.New("bad request")
	// ErrContextTooLong marks a request that does not fit the context or the cache.
	ErrContextTooLong = errors.New("context too long")
	// ErrDuplicateID marks a request whose ID is in use.
	ErrDuplicateID = errors.New("request id in use")
)

// PauseMode says what a paused instance still does.
type PauseMode uint8

const (
	// Running: not paused.
	Running PauseMode = iota
	// PauseAdmissions lets running requests go on to their end and keeps waiting ones waiting.
	PauseAdmissions
	// PauseAll starts no step; the current one ends. What runs keeps its blocks.
	PauseAll
)

func (m PauseMode) String() string {
	switch m {
	case Running:
		return "running"
	case PauseAdmissions:
		return "pause-admissions"
	case PauseAll:
		return "pause-all"
	}
	return "unknown"
}

// Instance is one engine instance. Its clock, Now, moves by Advance only; every
// other call takes effect at Now. A step that starts at Now sees all that was
// submitted at Now before Advance or NextEvent was called next.
type Instance struct {
	params Params
	cost   stepCost
	cache  cache
	// host is the second tier, nil without one; courier is the request in whose
	// name blocks are put there.
	host    *cache
	courier request

	now int64
	// boundary and stepEnd are picoseconds after origin: where the last step
	// ended (the earliest start of the next one), and where the current one will.
	origin   int64
	boundary int64
	stepEnd  int64
	inStep   bool
	pause    PauseMode

	waiting    requestList // in the order in which they are to be scheduled
	running    requestList // in the order in which they were admitted
	prefilling []*request  // those of running whose context is being computed, in the same order
	decoding   finishHeap
	loading    []*request // those of running whose blocks come from host memory, by landing time
	// linkFree is when the link from host memory has moved all it was asked to,
	// in picoseconds after origin.
	linkFree int64
	// blocked says that the head of waiting can't be admitted before something
	// ends: while the others decode, blocks only become scarcer.
	blocked bool

	// steps counts steps started. Each advances every decoding request by one token.
	steps int64
	// kvTokens is the context of the decoding requests, current step included.
	kvTokens int64
	// growth[i] counts decoding requests that need a new block in each step
	// whose number is -i modulo the block size.
	growth []int

	byID    map[uint64]*request
	pending []Event // from a step that NextEvent started
	spare   *request
	nextSeq uint64
	// admissions counts requests moved into the batch.
	admissions uint64
	total      counters
}

// counters are the cumulative figures of Stats.
type counters struct {
	busyNanos, busyPicos int64
	prompt, cached, host int64
	generated            int64
	computed, recomputed int64
	preemptions          int64
	finished, aborted    int64
	submitted            int64
}

// New returns an idle instance with an empty cache at time 0. The sink may be nil.
func New(p Params, sink CacheSink) (*Instance, error) {
	if err := p.Validate(); err != nil {
		return nil, fmt.Errorf("creating an engine instance: %w", err)
	}
	in := &Instance{
		params: p,
		cost:   p.stepCost(),
		cache:  newCache(TierDevice, p.BlockTokens, p.CapacityBlocks, sink),
		growth: make([]int, p.BlockTokens),
		byID:   make(map[uint64]*request),
	}
	in.cache.publish = in.publish
	if p.HostBlocks > 0 {
		host := newCache(TierHost, p.BlockTokens, p.HostBlocks, sink)
		in.host = &host
	}
	return in, nil
}

// Params returns the parameters the instance was made with.
func (in *Instance) Params() Params { return in.params }

// Now is the virtual time that Advance has reached, in nanoseconds.
func (in *Instance) Now() int64 { return in.now }

// Submit queues a request at Now.
func (in *Instance) Submit(req Request) error {
	if err := req.validate(&in.params); err != nil {
		return err
	}
	if in.byID[req.ID] != nil {
		return fmt.Errorf("%w: %d", ErrDuplicateID, req.ID)
	}
	if !in.params.PriorityScheduling {
		req.Priority = 0
	}
	r := in.spare
	if r != nil {
		in.spare = r.next
		*r = request{}
	} else {
		r = new(request)
	}
	r.Request = req
	r.seq = in.nextSeq
	in.nextSeq++
	r.state = Waiting
	r.target = req.PromptTokens
	r.submittedAt, r.scheduledAt, r.firstTokenAt = in.now, -1, -1
	in.byID[req.ID] = r
	in.enqueue(r)
	in.total.submitted++
	return nil
}

// Abort ends a request at Now, whatever its state, and releases all it holds.
// It reports whether there was such a request. What it had computed stays cached.
func (in *Instance) Abort(id uint64) bool {
	r := in.byID[id]
	if r == nil {
		return false
	}
	if r.state == Waiting {
		in.waiting.remove(r)
		in.blocked = false
	} else {
		in.leave(r)
	}
	in.total.aborted++
	in.drop(r)
	return true
}

// ResetCache forgets all cached content at Now. Running requests go on with the
// blocks they hold, which nobody will find any more, not even when they end.
func (in *Instance) ResetCache() {
	in.cache.reset()
	if in.host != nil {
		in.host.reset()
	}
	for r := in.running.first; r != nil; r = r.next {
		r.leaf = nil
	}
	in.blocked = false
	if in.cache.sink != nil {
		in.cache.sink.AllCleared()
	}
}

// Pause changes what the instance does from the next step on.
func (in *Instance) Pause(mode PauseMode) { in.pause = mode }

// PauseMode is what Pause was last called with.
func (in *Instance) PauseMode() PauseMode { return in.pause }

// PublishDecoded tells the sink about full blocks that running requests have
// generated. Without it they are published when the request ends or when
// somebody looks for them; it costs time for each running request.
func (in *Instance) PublishDecoded() {
	for r := in.running.first; r != nil; r = r.next {
		in.publish(r)
	}
}

// CachedPrefixTokens is how many leading tokens of a prompt would be found in
// the device's cache now. The last token is always computed, as an engine does.
func (in *Instance) CachedPrefixTokens(ch *Chain, promptTokens int) int {
	if promptTokens < 1 {
		return 0
	}
	return in.cache.lookup(ch, (promptTokens-1)/in.params.BlockTokens).blocks * in.params.BlockTokens
}

// Progress reports on a request that has not ended.
func (in *Instance) Progress(id uint64) (Progress, bool) {
	r := in.byID[id]
	if r == nil {
		return Progress{}, false
	}
	p := Progress{
		State: r.state, OutputTokens: r.generated, PromptTokens: r.PromptTokens,
		CachedTokens: r.cachedTokens, Preemptions: r.preemptions,
	}
	switch r.state {
	case Waiting:
		p.PromptTokens = 0
	case Prefilling, Loading:
		p.PromptTokens = min(r.scheduled, r.PromptTokens)
	case Decoding:
		p.OutputTokens = in.generated(r)
	}
	return p, true
}

// Stats is the state of an instance at Now. Block counts add up:
// Free + Idle + Pinned + Private = Total.
type Stats struct {
	Waiting, Prefilling, Decoding, Loading int

	TotalBlocks int
	FreeBlocks  int
	// IdleBlocks are cached and evictable, PinnedBlocks cached and held by
	// running requests, PrivateBlocks held by a running request and not cached.
	IdleBlocks, PinnedBlocks, PrivateBlocks int
	// HostBlocks are cached in host memory.
	HostBlocks int

	// Cumulative. PromptTokens and CachedTokens count a request when it is first
	// scheduled; ComputedTokens counts prefill work, RecomputedTokens the part
	// of it that was lost to preemption before.
	PromptTokens, CachedTokens, HostTokens int64
	GeneratedTokens                        int64
	ComputedTokens, RecomputedTokens       int64
	Submitted, Finished, Aborted           int64
	Preemptions                            int64
	Steps                                  int64
	BusyNanos                              int64
}

// UsedBlocks are held by running requests.
func (s Stats) UsedBlocks() int { return s.PinnedBlocks + s.PrivateBlocks }

// CachedBlocks can be hit.
func (s Stats) CachedBlocks() int { return s.PinnedBlocks + s.IdleBlocks }

// Running is the number of requests that hold blocks.
func (s Stats) Running() int { return s.Prefilling + s.Decoding + s.Loading }

// Stats reports the state at Now.
func (in *Instance) Stats() Stats {
	busy := in.total.busyNanos
	if in.inStep {
		busy += in.now - in.origin - in.boundary/1000
	}
	s := Stats{
		Waiting: in.waiting.size, Prefilling: len(in.prefilling), Decoding: len(in.decoding), Loading: len(in.loading),
		TotalBlocks: in.cache.total, FreeBlocks: in.cache.free, IdleBlocks: in.cache.idle,
		PinnedBlocks: in.cache.pinned, PrivateBlocks: in.cache.private,
		PromptTokens: in.total.prompt, CachedTokens: in.total.cached, HostTokens: in.total.host,
		GeneratedTokens: in.total.generated, ComputedTokens: in.total.computed, RecomputedTokens: in.total.recomputed,
		Submitted: in.total.submitted, Finished: in.total.finished, Aborted: in.total.aborted,
		Preemptions: in.total.preemptions, Steps: in.steps, BusyNanos: busy,
	}
	if in.host != nil {
		s.HostBlocks = in.host.idle
	}
	return s
}

func (in *Instance) enqueue(r *request) {
	in.waiting.insert(r)
	if in.waiting.first == r {
		in.blocked = false
	}
}

// drop forgets a request that holds nothing any more.
func (in *Instance) drop(r *request) {
	delete(in.byID, r.ID)
	*r = request{next: in.spare}
	in.spare = r
}

// contextTokens is the KV that r holds or is computing in the current step.
func (in *Instance) contextTokens(r *request) int {
	if r.state == Decoding {
		return r.target + int(in.steps-r.joinStep)
	}
	return r.scheduled
}

// generated is the number of tokens that r has produced by Now.
func (in *Instance) generated(r *request) int {
	if r.state != Decoding {
		return r.generated
	}
	done := in.steps - r.joinStep
	if in.inStep {
		done--
	}
	return r.generated + int(done)
}

// publish commits the full blocks that r has computed.
func (in *Instance) publish(r *request) {
	if r.state == Loading {
		return
	}
	full := in.contextTokens(r) / in.params.BlockTokens
	if full > r.committed && r.Chain != nil && !r.detached && r.epoch == in.cache.epoch {
		in.cache.commit(r, full)
	}
}

// leave takes a running request out of the batch and releases its blocks.
func (in *Instance) leave(r *request) {
	in.publish(r)
	in.keepOnHost(r)
	context := in.contextTokens(r)
	r.generated = in.generated(r)
	switch r.state {
	case Decoding:
		in.decoding.remove(r)
		in.growth[in.growthIndex(r)]--
		in.kvTokens -= int64(context)
	case Loading:
		in.loading = remove(in.loading, r)
	default:
		in.prefilling = remove(in.prefilling, r)
	}
	in.running.remove(r)
	in.cache.release(r, blocksFor(context, in.params.BlockTokens))
	if r.leaf != nil {
		r.leaf.writer = nil
		in.cache.dropNode(r.leaf)
		r.leaf = nil
	}
	in.blocked = false
}

// growthIndex is r's place in growth: its context grows with the step number,
// so the steps in which it needs a block are equal modulo the block size.
func (in *Instance) growthIndex(r *request) int {
	i := (int64(r.target) - r.joinStep) % int64(in.params.BlockTokens)
	if i < 0 {
		i += int64(in.params.BlockTokens)
	}
	return int(i)
}

// remove takes r out of a short list and keeps the order of the others.
func remove(list []*request, r *request) []*request {
	for i, x := range list {
		if x == r {
			copy(list[i:], list[i+1:])
			list[len(list)-1] = nil
			return list[:len(list)-1]
		}
	}
	return list
}
