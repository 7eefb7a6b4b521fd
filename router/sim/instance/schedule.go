package instance

import "math"

// maxAdvanceNanos cuts long advances, so that picoseconds stay within int64.
const maxAdvanceNanos = int64(1e15)

// Advance moves the clock to a time, completing every step that ends by then,
// and appends what happened to out, in order of time. A time before Now counts
// as Now.
func (in *Instance) Advance(to int64, out []Event) []Event {
	out = append(out, in.pending...)
	in.pending = in.pending[:0]
	for in.now < to {
		shift := (in.now - in.origin) * 1000
		in.origin = in.now
		in.boundary -= shift
		in.stepEnd -= shift
		in.shiftLoads(shift)
		span := min(to-in.now, maxAdvanceNanos)
		out = in.advance(span*1000, out)
		in.now += span
	}
	return out
}

func (in *Instance) advance(horizon int64, out []Event) []Event {
	for {
		if in.inStep {
			if in.stepEnd > horizon {
				return out
			}
			out = in.completeStep(out)
		}
		if in.boundary >= horizon || !in.runnable() {
			break
		}
		if in.onlyLoading() {
			// Nothing to compute before the first load lands.
			in.boundary = max(in.boundary, min(in.loading[0].readyAt, horizon))
			if in.boundary >= horizon {
				break
			}
		}
		if in.homogeneous() && in.leap(horizon) {
			out = in.finishDecoded(out)
			continue
		}
		out = in.startStep(out)
	}
	in.boundary = max(in.boundary, horizon)
	return out
}

// NextEvent is the earliest time at which Advance may return an event, and
// false if nothing will happen without another call. It is exact while all
// requests decode and a lower bound otherwise: then it is the end of the
// current step. Submit, Abort, ResetCache and Pause make it stale. It starts the
// step that is due at Now, so ask after the submissions of the instant.
func (in *Instance) NextEvent() (int64, bool) {
	if len(in.pending) == 0 && !in.inStep && in.runnable() {
		if !in.onlyLoading() || in.loading[0].readyAt <= in.boundary {
			in.pending = in.startStep(in.pending)
		}
	}
	switch {
	case len(in.pending) > 0:
		return in.now, true
	case !in.inStep && in.runnable() && in.onlyLoading():
		return in.nanos(in.loading[0].readyAt), true
	case !in.inStep:
		return 0, false
	case !in.homogeneous():
		return in.nanos(in.stepEnd), true
	}
	k := in.decoding[0].finishStep - in.steps
	if k > 0 && in.pause == PauseAll {
		return 0, false
	}
	first, growth := in.decodeCost()
	k = in.stepsBeforeLanding(in.stepEnd, first, growth, in.stepsWithinBlocks(k))
	return in.nanos(in.stepEnd + sumSteps(first, growth, k)), true
}

// nanos is the first nanosecond at or after a time in picoseconds.
func (in *Instance) nanos(picos int64) int64 {
	n := picos / 1000
	if picos%1000 > 0 {
		n++
	}
	return in.origin + n
}

// runnable says whether a step could start.
func (in *Instance) runnable() bool {
	switch in.pause {
	case PauseAll:
		return false
	case PauseAdmissions:
		return in.running.size > 0
	}
	return in.running.size > 0 || in.waiting.size > 0 && !in.blocked
}

// homogeneous says that until something ends, or a load lands, every step
// decodes the same requests.
func (in *Instance) homogeneous() bool {
	return len(in.prefilling) == 0 && len(in.decoding) > 0 &&
		(in.waiting.size == 0 || in.blocked || in.pause != Running)
}

// decodeCost is the duration of the next pure decode step and by how much each
// further one is longer.
func (in *Instance) decodeCost() (first, growth int64) {
	n := len(in.decoding)
	return in.cost.step(n, in.kvTokens), int64(n) * in.cost.perKVTokenPicos
}

// leap takes as many whole decode steps as end by the horizon, before blocks
// run out and until the first request finishes. It reports whether there was one.
func (in *Instance) leap(horizon int64) bool {
	first, growth := in.decodeCost()
	k := in.stepsWithinBlocks(in.decoding[0].finishStep - in.steps)
	k = in.stepsBeforeLanding(in.boundary, first, growth, k)
	k = stepsWithin(first, growth, horizon-in.boundary, k)
	if k == 0 {
		return false
	}
	in.cache.allocate(in.blocksOver(k))
	n := int64(len(in.decoding))
	elapsed := sumSteps(first, growth, k)
	in.boundary += elapsed
	in.addBusy(elapsed)
	in.steps += k
	in.kvTokens += n * k
	in.total.generated += n * k
	return true
}

// blocksOver is how many blocks the next k decode steps take.
func (in *Instance) blocksOver(k int64) int {
	size := int64(len(in.growth))
	blocks := int(k/size) * len(in.decoding)
	i := in.growthNow()
	for range k % size {
		blocks += in.growth[i]
		if i--; i < 0 {
			i = len(in.growth) - 1
		}
	}
	return blocks
}

// stepsWithinBlocks is how many of the next k decode steps the available blocks allow.
func (in *Instance) stepsWithinBlocks(k int64) int64 {
	size, n, available := int64(len(in.growth)), len(in.decoding), in.cache.available()
	if int64(available) >= (k/size+1)*int64(n) {
		return k
	}
	// Whole turns through growth take n blocks each; then step by step.
	steps := int64(available/n) * size
	if steps >= k {
		return k
	}
	left := available % n
	i := in.growthNow()
	for steps < k && left >= in.growth[i] {
		left -= in.growth[i]
		steps++
		if i--; i < 0 {
			i = len(in.growth) - 1
		}
	}
	return steps
}

// growthNow is the index in growth of the requests that need a block in the next step.
func (in *Instance) growthNow() int {
	size := int64(len(in.growth))
	return int((size - in.steps%size) % size)
}

// startStep schedules one step at the boundary: a token for each decoding
// request, then chunks of the prompts being prefilled, then admissions.
func (in *Instance) startStep(out []Event) []Event {
	in.land()
	preempted := false
	for len(in.decoding) > 0 && in.growth[in.growthNow()] > in.cache.available() {
		out = in.preempt(out)
		preempted = true
	}
	in.cache.allocate(in.growth[in.growthNow()])
	// From here on every decoding request holds its token of this step, also if
	// a request in prefill preempts it.
	in.inStep = true
	in.steps++
	in.kvTokens += int64(len(in.decoding))
	budget := in.params.MaxBatchedTokens - len(in.decoding)
	var prefillPicos int64
	for r := in.prefillingAfter(0); r != nil && budget > 0; r = in.prefillingAfter(r.admission) {
		chunk := min(r.target-r.scheduled, budget)
		need := blocksFor(r.scheduled+chunk, in.params.BlockTokens) - blocksFor(r.scheduled, in.params.BlockTokens)
		for need > in.cache.available() && r.state == Prefilling {
			out = in.preempt(out)
			preempted = true
		}
		if r.state == Prefilling {
			in.cache.allocate(need)
			prefillPicos += in.compute(r, chunk)
			budget -= chunk
		}
	}
	if !preempted && in.pause == Running {
		prefillPicos += in.admit(budget)
	}
	n := len(in.decoding) + len(in.prefilling)
	if n == 0 {
		in.inStep = false
		// What is left are loads; a landing changes what fits.
		in.blocked = in.blocked || !preempted
		return out
	}
	in.stepEnd = in.boundary + in.cost.step(n, in.kvTokens-int64(len(in.decoding))) + prefillPicos
	return out
}

// prefillingAfter is the request in prefill that was admitted next after another
// one, which may have left since.
func (in *Instance) prefillingAfter(admission uint64) *request {
	for _, r := range in.prefilling {
		if r.admission > admission {
			return r
		}
	}
	return nil
}

// admit moves requests from the waiting queue into the batch as long as tokens,
// places and blocks last, and returns their compute time.
func (in *Instance) admit(budget int) int64 {
	var picos int64
	size := in.params.BlockTokens
	in.blocked = false
	for budget > 0 && in.waiting.first != nil {
		r := in.waiting.first
		if in.running.size >= in.params.MaxSequences {
			in.blocked = true
			break
		}
		h := in.cache.lookup(r.Chain, (r.target-1)/size)
		chunk := min(r.target-h.blocks*size, budget)
		need := blocksFor(h.blocks*size+chunk, size) - h.blocks
		onHost := in.hostHit(r)
		room := in.cache.available() - h.idle
		if onHost > h.blocks && onHost-h.blocks <= room {
			in.startLoad(r, h, onHost-h.blocks)
			continue
		}
		if onHost > h.blocks || need > room {
			in.blocked = !in.mayFitLater(r, h.blocks, onHost)
			break
		}
		in.start(r, h, need)
		r.state = Prefilling
		r.scheduled = h.blocks * size
		in.prefilling = append(in.prefilling, r)
		in.countStart(r, h.blocks, 0)
		picos += in.compute(r, chunk)
		budget -= chunk
	}
	return picos
}

// mayFitLater says whether r, for which there is no room, may find some before
// anything ends. Else decoding only makes blocks scarcer: what r would hit
// shrinks no faster than what is available, and what it needs does not shrink.
func (in *Instance) mayFitLater(r *request, onDevice, onHost int) bool {
	if onHost > 0 && onHost <= onDevice {
		// Once its blocks on the device are evicted r will load them, which takes
		// less room at first than computing.
		return true
	}
	return in.cache.growing(r.Chain, (r.target-1)/in.params.BlockTokens)
}

// start moves the head of the waiting queue among the running requests, with the blocks
// of its hit and some new ones.
func (in *Instance) start(r *request, h hit, newBlocks int) {
	in.waiting.remove(r)
	in.running.pushBack(r)
	in.admissions++
	r.admission = in.admissions
	in.cache.attach(r, h)
	in.claimChain(r)
	in.cache.allocate(newBlocks)
}

// countStart keeps what a request found in the caches when it was first scheduled.
func (in *Instance) countStart(r *request, deviceBlocks, hostBlocks int) {
	if r.scheduledAt >= 0 {
		return
	}
	size := in.params.BlockTokens
	r.scheduledAt = in.nanos(in.boundary)
	r.cachedTokens = (deviceBlocks + hostBlocks) * size
	r.hostTokens = hostBlocks * size
	in.total.prompt += int64(r.PromptTokens)
	in.total.cached += int64(r.cachedTokens)
	in.total.host += int64(r.hostTokens)
}

// claimChain makes r the one that appends to its chain. If another request
// already does, if the chain goes on in the cache where r will generate, or if r
// would generate what the chain shares with its parent, then what r computes is
// not cached.
func (in *Instance) claimChain(r *request) {
	r.detached = r.Chain == nil || r.Chain.Parent != nil && r.Chain.SharedTokens > r.PromptTokens
	if r.detached {
		return
	}
	node := in.cache.node(r.Chain.ID)
	last := node.head
	if r.deepest != nil && r.deepest.node == node {
		last = r.deepest
	}
	for last != nil && last.next != nil {
		last = last.next
	}
	if node.writer != nil || last != nil && last.end > r.target/in.params.BlockTokens {
		r.detached = true
		return
	}
	node.writer = r
	r.leaf = node
}

// compute schedules a chunk of r's context, whose blocks are allocated, and
// returns its compute time. As in vLLM, full blocks can be hit from the moment
// they are scheduled.
func (in *Instance) compute(r *request, chunk int) int64 {
	from := r.scheduled
	r.scheduled += chunk
	in.total.computed += int64(chunk)
	if r.preemptions > 0 {
		in.total.recomputed += int64(chunk)
	}
	in.publish(r)
	return in.cost.prefill(from, r.scheduled)
}

// preempt sends one running request back to the waiting queue.
func (in *Instance) preempt(out []Event) []Event {
	victim := in.running.last
	if in.params.PriorityScheduling {
		for r := in.running.first; r != nil; r = r.next {
			if victim.before(r) {
				victim = r
			}
		}
	}
	in.leave(victim)
	victim.state = Waiting
	victim.target = victim.PromptTokens + victim.generated
	victim.scheduled = 0
	victim.preemptions++
	in.total.preemptions++
	in.enqueue(victim)
	return append(out, victim.event(Preempted, in.nanos(in.boundary)))
}

// completeStep ends the current step: everybody who decoded has a token more,
// and whose prefill is complete has the first of a row.
func (in *Instance) completeStep(out []Event) []Event {
	in.inStep = false
	in.addBusy(in.stepEnd - in.boundary)
	in.boundary = in.stepEnd
	in.total.generated += int64(len(in.decoding))
	out = in.finishDecoded(out)
	kept := in.prefilling[:0]
	ready := in.prefilling
	for _, r := range ready {
		if r.scheduled < r.target {
			kept = append(kept, r)
			continue
		}
		out = in.join(r, out)
	}
	clear(ready[len(kept):])
	in.prefilling = kept
	return out
}

// join gives r, whose context is computed, its token and lets it decode.
func (in *Instance) join(r *request, out []Event) []Event {
	at := in.nanos(in.boundary)
	in.total.generated++
	r.generated++
	r.state = Decoding
	r.joinStep = in.steps
	r.finishStep = in.steps + int64(r.OutputTokens-r.generated)
	in.decoding.push(r)
	in.growth[in.growthIndex(r)]++
	in.kvTokens += int64(r.target)
	if r.firstTokenAt < 0 {
		r.firstTokenAt = at
		out = append(out, r.event(FirstToken, at))
	}
	return in.finishDecoded(out)
}

// finishDecoded ends the requests whose last token came with the step just completed.
func (in *Instance) finishDecoded(out []Event) []Event {
	for len(in.decoding) > 0 && in.decoding[0].finishStep == in.steps {
		r := in.decoding[0]
		in.leave(r)
		in.total.finished++
		out = append(out, r.event(Finished, in.nanos(in.boundary)))
		in.drop(r)
	}
	return out
}

func (in *Instance) addBusy(picos int64) {
	picos += in.total.busyPicos
	in.total.busyNanos += picos / 1000
	in.total.busyPicos = picos % 1000
}

// sumSteps is the duration of k steps of which the first takes first and each
// further one growth more. It saturates.
func sumSteps(first, growth, k int64) int64 {
	if float64(k)*(float64(first)+float64(growth)*float64(k)/2) > math.MaxInt64/4 {
		return math.MaxInt64 / 4
	}
	return k*first + growth*(k*(k-1)/2)
}

// stepsWithin is how many of at most limit such steps end within a time.
func stepsWithin(first, growth, within, limit int64) int64 {
	if limit <= 0 || first > within {
		return 0
	}
	if sumSteps(first, growth, limit) <= within {
		return limit
	}
	var k int64
	if growth == 0 {
		k = within / first
	} else {
		// The positive root of k*first + growth*k*(k-1)/2 = within, then put right
		// for rounding.
		a, b, t := float64(first), float64(growth), float64(within)
		k = int64((math.Sqrt((a-b/2)*(a-b/2)+2*b*t) - (a - b/2)) / b)
	}
	k = min(max(k, 0), limit)
	for k > 0 && sumSteps(first, growth, k) > within {
		k--
	}
	for k < limit && sumSteps(first, growth, k+1) <= within {
		k++
	}
	return k
}
