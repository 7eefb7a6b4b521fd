package instance

import (
	"slices"
	"sort"
)

// oracle is the engine model as one would write it without a thought for speed:
// every block is an object with a content key, every step is simulated, every
// sequence is advanced by one token at a time. The instance must agree with it
// exactly.
type oracle struct {
	p        Params
	cost     stepCost
	now      int64
	boundary int64 // picoseconds
	stepEnd  int64
	inStep   bool
	pause    PauseMode
	free     int // never cached or no longer cached
	idle     []*oracleBlock
	cached   map[oracleKey]*oracleBlock
	epoch    int
	waiting  []*oracleRequest
	running  []*oracleRequest
	byID     map[uint64]*oracleRequest
	seq      uint64
	events   []Event
	host     []oracleKey // in the order of eviction
	linkFree int64       // picoseconds
}

type oracleKey struct {
	chain uint64
	index int
}

type oracleBlock struct {
	key    oracleKey
	cached bool
	refs   int
	epoch  int
}

type oracleRequest struct {
	Request
	seq       uint64
	blocks    []*oracleBlock
	committed int
	kv        int // tokens computed or being computed
	target    int
	generated int
	prefill   bool
	writer    bool
	epoch     int
	event     Event
	submitted int64
	scheduled int64
	preempted int
	readyAt   int64 // of a load, 0 without one
}

func newOracle(p Params) *oracle {
	return &oracle{
		p: p, cost: p.stepCost(), free: p.CapacityBlocks,
		cached: map[oracleKey]*oracleBlock{}, byID: map[uint64]*oracleRequest{},
	}
}

func (o *oracle) key(ch *Chain, index int) oracleKey {
	for ch.Parent != nil && index < ch.SharedTokens/o.p.BlockTokens {
		ch = ch.Parent
	}
	return oracleKey{ch.ID, index}
}

func (o *oracle) submit(r Request) {
	if !o.p.PriorityScheduling {
		r.Priority = 0
	}
	x := &oracleRequest{Request: r, seq: o.seq, target: r.PromptTokens, submitted: o.now, scheduled: -1}
	o.seq++
	o.byID[r.ID] = x
	o.enqueue(x)
}

func (o *oracle) enqueue(x *oracleRequest) {
	o.waiting = append(o.waiting, x)
	sort.SliceStable(o.waiting, func(i, j int) bool {
		a, b := o.waiting[i], o.waiting[j]
		return a.Priority < b.Priority || a.Priority == b.Priority && a.seq < b.seq
	})
}

func (o *oracle) abort(id uint64) {
	x := o.byID[id]
	if x == nil {
		return
	}
	o.waiting = without(o.waiting, x)
	o.leave(x)
	delete(o.byID, id)
}

func (o *oracle) reset() {
	o.free += len(o.idle)
	o.idle, o.host = nil, nil
	o.cached = map[oracleKey]*oracleBlock{}
	o.epoch++
}

// without is a list of its own, since others may be walking through this one.
func without(list []*oracleRequest, x *oracleRequest) []*oracleRequest {
	return slices.DeleteFunc(slices.Clone(list), func(y *oracleRequest) bool { return y == x })
}

// leave releases all of x's blocks, the last first.
func (o *oracle) leave(x *oracleRequest) {
	if x.readyAt == 0 {
		o.commit(x)
	}
	o.keepOnHost(x)
	o.running = without(o.running, x)
	for i := len(x.blocks) - 1; i >= 0; i-- {
		o.unref(x.blocks[i])
	}
	x.blocks, x.committed, x.kv = nil, 0, 0
	x.writer, x.readyAt = false, 0
}

// keepOnHost puts x's cached blocks at the young end of the host's order.
func (o *oracle) keepOnHost(x *oracleRequest) {
	if x.epoch != o.epoch || o.p.HostBlocks == 0 {
		return
	}
	n := min(x.committed, o.p.HostBlocks)
	mine := map[oracleKey]bool{}
	for i := range n {
		mine[o.key(x.Chain, i)] = true
	}
	var others []oracleKey
	for _, k := range o.host {
		if !mine[k] {
			others = append(others, k)
		}
	}
	if over := len(others) + n - o.p.HostBlocks; over > 0 {
		others = others[over:]
	}
	for i := n - 1; i >= 0; i-- {
		others = append(others, o.key(x.Chain, i))
	}
	o.host = others
}

func (o *oracle) hostHit(ch *Chain, tokens int) int {
	has := map[oracleKey]bool{}
	for _, k := range o.host {
		has[k] = true
	}
	n := 0
	for ch != nil && n < (tokens-1)/o.p.BlockTokens && has[o.key(ch, n)] {
		n++
	}
	return n
}

// land ends the loads that are complete, in the order in which they began.
func (o *oracle) land() {
	for {
		var first *oracleRequest
		for _, x := range o.running {
			if x.readyAt > 0 && x.readyAt <= o.boundary && (first == nil || x.readyAt < first.readyAt) {
				first = x
			}
		}
		if first == nil {
			return
		}
		first.readyAt = 0
		o.commit(first)
	}
}

func (o *oracle) unref(b *oracleBlock) {
	b.refs--
	if b.refs > 0 {
		return
	}
	if b.cached && b.epoch == o.epoch {
		o.idle = append(o.idle, b)
	} else {
		o.free++
	}
}

func (o *oracle) ref(b *oracleBlock) {
	if b.refs == 0 {
		for i, x := range o.idle {
			if x == b {
				o.idle = append(append([]*oracleBlock{}, o.idle[:i]...), o.idle[i+1:]...)
				break
			}
		}
	}
	b.refs++
}

func (o *oracle) available() int { return o.free + len(o.idle) }

func (o *oracle) grow(x *oracleRequest, kv int) {
	x.kv = kv
	for len(x.blocks) < (kv+o.p.BlockTokens-1)/o.p.BlockTokens {
		if o.free == 0 {
			delete(o.cached, o.idle[0].key)
			o.idle = o.idle[1:]
			o.free++
		}
		o.free--
		x.blocks = append(x.blocks, &oracleBlock{refs: 1})
	}
	if x.prefill && x.readyAt == 0 {
		o.commit(x)
	}
}

// commit makes x's full blocks findable. For what was decoded that happens when
// somebody looks or the request leaves; a block that is cached already is shared.
func (o *oracle) commit(x *oracleRequest) {
	for x.writer && x.epoch == o.epoch && x.committed < x.kv/o.p.BlockTokens {
		b := x.blocks[x.committed]
		k := o.key(x.Chain, x.committed)
		if other := o.cached[k]; other != nil {
			o.ref(other)
			o.unref(b)
			x.blocks[x.committed] = other
		} else {
			b.key, b.cached, b.epoch = k, true, o.epoch
			o.cached[k] = b
		}
		x.committed++
	}
}

func (o *oracle) hit(ch *Chain, tokens int) []*oracleBlock {
	var found []*oracleBlock
	for i := 0; ch != nil && i < (tokens-1)/o.p.BlockTokens; i++ {
		k := o.key(ch, i)
		for _, x := range o.running {
			if x.writer && x.epoch == o.epoch && x.Chain.ID == k.chain && x.readyAt == 0 {
				o.commit(x)
			}
		}
		b := o.cached[k]
		if b == nil {
			break
		}
		found = append(found, b)
	}
	return found
}

func (o *oracle) preempt() {
	victim := o.running[len(o.running)-1]
	if o.p.PriorityScheduling {
		for _, x := range o.running {
			if x.Priority > victim.Priority || x.Priority == victim.Priority && x.seq > victim.seq {
				victim = x
			}
		}
	}
	o.leave(victim)
	victim.preempted++
	victim.target = victim.PromptTokens + victim.generated
	o.enqueue(victim)
	o.emit(victim, Preempted)
}

func (o *oracle) emit(x *oracleRequest, kind EventKind) {
	x.event.Kind, x.event.ID, x.event.At = kind, x.ID, (o.boundary+999)/1000
	x.event.OutputTokens, x.event.Preemptions = x.generated, x.preempted
	x.event.QueueNanos = x.scheduled - x.submitted
	o.events = append(o.events, x.event)
}

func (o *oracle) runnable() bool {
	switch o.pause {
	case PauseAll:
		return false
	case PauseAdmissions:
		return len(o.running) > 0
	}
	return len(o.running)+len(o.waiting) > 0
}

// start schedules a step and reports whether it preempted somebody.
func (o *oracle) start() (preempted bool) {
	o.land()
	size := o.p.BlockTokens
	for {
		need := 0
		for _, x := range o.running {
			if !x.prefill && x.kv%size == 0 {
				need++
			}
		}
		if need <= o.available() {
			break
		}
		o.preempt()
		preempted = true
	}
	budget := o.p.MaxBatchedTokens
	var kv int64
	for _, x := range o.running {
		if !x.prefill {
			kv += int64(x.kv)
			budget--
		}
	}
	for _, x := range o.running {
		if !x.prefill {
			o.grow(x, x.kv+1)
		}
	}
	var picos int64
	for _, x := range append([]*oracleRequest{}, o.running...) {
		if !x.prefill || x.readyAt > 0 || budget == 0 || o.byID[x.ID] == nil || len(x.blocks) == 0 {
			continue
		}
		chunk := min(x.target-x.kv, budget)
		need := (x.kv+chunk+size-1)/size - len(x.blocks)
		gone := false
		for need > o.available() && !gone {
			before := map[*oracleRequest]bool{}
			for _, y := range o.running {
				before[y] = true
			}
			o.preempt()
			preempted = true
			gone = !slices.Contains(o.running, x)
			for _, y := range o.running {
				delete(before, y)
			}
			for y := range before {
				if !y.prefill {
					kv -= int64(y.target - 1)
				}
			}
		}
		if gone {
			continue
		}
		picos += o.chunk(x, chunk)
		budget -= chunk
	}
	for !preempted && o.pause == Running && budget > 0 && len(o.waiting) > 0 && len(o.running) < o.p.MaxSequences {
		x := o.waiting[0]
		found := o.hit(x.Chain, x.target)
		idle := 0
		for _, b := range found {
			if b.refs == 0 {
				idle++
			}
		}
		have := len(found) * size
		missing := 0
		if o.p.HostBlocks > 0 {
			missing = max(o.hostHit(x.Chain, x.target)-len(found), 0)
		}
		if missing > o.available()-idle {
			break
		}
		chunk := min(x.target-have, budget)
		if missing == 0 && (have+chunk+size-1)/size-len(found) > o.available()-idle {
			break
		}
		o.waiting = o.waiting[1:]
		o.running = append(o.running, x)
		x.prefill, x.epoch, x.kv, x.committed = true, o.epoch, have, len(found)
		x.writer = x.Chain != nil && (x.Chain.Parent == nil || x.Chain.SharedTokens <= x.PromptTokens)
		for _, y := range o.running {
			if y != x && y.writer && x.writer && y.epoch == o.epoch && y.Chain.ID == x.Chain.ID {
				x.writer = false
			}
		}
		for k := range o.cached {
			if x.writer && k.chain == x.Chain.ID && k.index >= x.target/size {
				x.writer = false
			}
		}
		for _, b := range found {
			o.ref(b)
		}
		x.blocks = append([]*oracleBlock{}, found...)
		if x.scheduled < 0 {
			x.scheduled = (o.boundary + 999) / 1000
			x.event.CachedTokens, x.event.HostTokens = have+missing*size, missing*size
		}
		if missing > 0 {
			o.linkFree = max(o.linkFree, o.boundary) + int64(missing)*o.cost.loadBlockPicos
			x.readyAt = o.linkFree
			o.grow(x, have+missing*size)
			continue
		}
		picos += o.chunk(x, chunk)
		budget -= chunk
	}
	batch := 0
	for _, x := range o.running {
		if x.readyAt == 0 {
			batch++
		}
	}
	if batch == 0 {
		return preempted
	}
	o.inStep = true
	o.stepEnd = o.boundary + o.cost.basePicos + int64(batch)*o.cost.perSequencePicos + kv*o.cost.perKVTokenPicos + picos
	return preempted
}

func (o *oracle) chunk(x *oracleRequest, chunk int) int64 {
	a, b := int64(x.kv), int64(x.kv+chunk)
	o.grow(x, x.kv+chunk)
	return (b-a)*o.cost.perTokenPicos + (b*b-a*a)*o.cost.perSquareFemtos/1000
}

func (o *oracle) complete() {
	o.inStep = false
	o.boundary = o.stepEnd
	var ended, joined []*oracleRequest
	for _, x := range o.running {
		if x.prefill {
			if x.kv == x.target && x.readyAt == 0 {
				joined = append(joined, x)
			}
			continue
		}
		x.generated++
		if x.generated == x.OutputTokens {
			ended = append(ended, x)
		}
	}
	sort.Slice(ended, func(i, j int) bool { return ended[i].seq < ended[j].seq })
	for _, x := range ended {
		o.finish(x)
	}
	for _, x := range joined {
		x.prefill = false
		x.generated++
		if x.generated == 1 {
			x.event.PrefillNanos = (o.boundary+999)/1000 - x.scheduled
			o.emit(x, FirstToken)
		}
		if x.generated == x.OutputTokens {
			o.finish(x)
		}
	}
}

func (o *oracle) finish(x *oracleRequest) {
	o.leave(x)
	delete(o.byID, x.ID)
	o.emit(x, Finished)
}

func (o *oracle) advance(to int64) {
	for o.now < to {
		if o.inStep {
			if o.stepEnd > to*1000 {
				break
			}
			o.complete()
		}
		if o.boundary >= to*1000 || !o.runnable() {
			break
		}
		if preempted := o.start(); !o.inStep && !preempted {
			// Only loads are under way: the next one to land is the next thing to happen.
			next := to * 1000
			for _, x := range o.running {
				if x.readyAt > 0 {
					next = min(next, x.readyAt)
				}
			}
			o.boundary = max(o.boundary, next)
			if len(o.running) == 0 {
				break
			}
		}
	}
	if !o.inStep {
		o.boundary = max(o.boundary, to*1000)
	}
	o.now = max(o.now, to)
}

// nudge starts the step that is due, as NextEvent does.
func (o *oracle) nudge() {
	if !o.inStep && o.runnable() {
		o.start()
	}
}
