package instance

import "slices"

// The host tier keeps a copy of whatever a request computed and let go of, under its
// own LRU order. A request that finds more of its prompt there than on the
// device takes blocks for the difference and waits, among the running requests,
// until the link has moved them; the others go on meanwhile.

// keepOnHost copies what r has in the device's cache to the host tier, or moves
// it to the young end of the order there.
func (in *Instance) keepOnHost(r *request) {
	if in.host == nil || r.epoch != in.cache.epoch || r.committed == 0 {
		return
	}
	host, courier := in.host, &in.courier
	blocks := min(r.committed, host.total)
	*courier = request{Request: Request{Chain: r.Chain}}
	host.attach(courier, host.lookup(r.Chain, blocks))
	if missing := blocks - courier.committed; missing > 0 {
		host.allocate(missing)
		host.commit(courier, blocks)
	}
	host.release(courier, blocks)
}

// hostHit is how many leading blocks of r's context the host tier has.
func (in *Instance) hostHit(r *request) int {
	if in.host == nil {
		return 0
	}
	return in.host.lookup(r.Chain, (r.target-1)/in.params.BlockTokens).blocks
}

// startLoad lets the head of the waiting queue run and loads the blocks that it
// misses, for which there is room.
func (in *Instance) startLoad(r *request, h hit, missing int) {
	in.start(r, h, missing)
	r.state = Loading
	r.scheduled = (h.blocks + missing) * in.params.BlockTokens
	in.linkFree = max(in.linkFree, in.boundary) + int64(missing)*in.cost.loadBlockPicos
	r.readyAt = in.linkFree
	in.loading = append(in.loading, r)
	in.countStart(r, h.blocks, missing)
}

// land lets the requests whose load is complete at the boundary prefill the rest.
func (in *Instance) land() {
	for len(in.loading) > 0 && in.loading[0].readyAt <= in.boundary {
		r := in.loading[0]
		in.loading = remove(in.loading, r)
		at := len(in.prefilling)
		for at > 0 && in.prefilling[at-1].admission > r.admission {
			at--
		}
		in.prefilling = slices.Insert(in.prefilling, at, r)
		r.state = Prefilling
		// Another request may have brought the same content meanwhile; then this
		// frees blocks.
		in.publish(r)
		in.blocked = false
	}
}

// onlyLoading says that nothing can be computed until a load lands.
func (in *Instance) onlyLoading() bool {
	return len(in.loading) > 0 && len(in.loading) == in.running.size &&
		(in.waiting.size == 0 || in.blocked || in.pause != Running)
}

// stepsBeforeLanding is how many of the next k decode steps, the first starting
// at from, start before a load lands.
func (in *Instance) stepsBeforeLanding(from, first, growth, k int64) int64 {
	if len(in.loading) == 0 || k == 0 {
		return k
	}
	until := in.loading[0].readyAt - from
	if until <= 0 {
		return 0
	}
	return min(k, stepsWithin(first, growth, until-1, k)+1)
}

// shiftLoads moves the times of loads to a later origin.
func (in *Instance) shiftLoads(picos int64) {
	in.linkFree = max(in.linkFree-picos, 0)
	for _, r := range in.loading {
		r.readyAt -= picos
	}
}
