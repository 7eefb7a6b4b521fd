package instance

import "fmt"

// Request is one generation.
type Request struct {
	// ID is the caller's, unique among the requests that have not ended.
	ID uint64
	// Chain is the content of prompt and output. The prompt is its first
	// PromptTokens tokens; what is generated is its content after them. Nil means
	// content that nobody shares and that is not kept.
	Chain *Chain
	// PromptTokens and OutputTokens, both at least 1, fix the request's length: it finishes
	// after exactly OutputTokens.
	PromptTokens int
	OutputTokens int
	// Priority counts with Params.PriorityScheduling only; lower runs first.
	Priority int
}

// EventKind says what happened to a request.
type EventKind uint8

const (
	// FirstToken: the prompt is prefilled and the first token generated.
	FirstToken EventKind = iota + 1
	// Finished: the last token is generated and everything released.
	Finished
	// Preempted: blocks ran out, the request gave its own up and waits to be
	// computed again.
	Preempted
)

func (k EventKind) String() string {
	switch k {
	case FirstToken:
		return "first-token"
	case Finished:
		return "finished"
	case Preempted:
		return "preempted"
	}
	return "unknown"
}

// Event reports a change of one request, with its story so far.
type Event struct {
	Kind EventKind
	// At is when it happened, in virtual nanoseconds.
	At int64
	ID uint64
	// CachedTokens is the part of the prompt found in the cache when the request
	// was first scheduled, HostTokens how much of that was loaded from host memory.
	CachedTokens int
	HostTokens   int
	// OutputTokens is how many tokens are generated.
	OutputTokens int
	// QueueNanos is the time from submission to the first scheduled step,
	// PrefillNanos from there to the first token (0 before it).
	QueueNanos   int64
	PrefillNanos int64
	// Preemptions counts how often the request was preempted.
	Preemptions int
}

// Progress is the state of a request that has not ended.
type Progress struct {
	State        State
	OutputTokens int
	// PromptTokens is how much of the prompt is computed, cached part included.
	PromptTokens int
	CachedTokens int
	Preemptions  int
}

// State is where a request is.
type State uint8

const (
	// Waiting: not scheduled, or preempted.
	Waiting State = iota + 1
	// Prefilling: its context is being computed.
	Prefilling
	// Decoding: it gets one token a step.
	Decoding
	// Loading: part of its context is on its way from host memory.
	Loading
)

func (s State) String() string {
	switch s {
	case Waiting:
		return "waiting"
	case Prefilling:
		return "prefilling"
	case Decoding:
		return "decoding"
	case Loading:
		return "loading"
	}
	return "unknown"
}

// request is the engine's record of a Request.
type request struct {
	Request
	seq uint64 // order of submission
	// admission is the place in the running list, counted from 1 on.
	admission uint64
	state     State
	// generated is the number of tokens produced when the state last changed.
	generated int
	// target is how many tokens of context prefill must compute: the prompt and
	// whatever was generated before a preemption.
	target int
	// scheduled is how many tokens of KV exist or are computed in the current
	// step; it is kept while prefilling only. See Instance.kvTokens.
	scheduled int
	// joinStep is the step number after which the request decodes, finishStep the
	// one that generates its last token.
	joinStep   int64
	finishStep int64
	heapIndex  int

	// What it holds in the cache: the segments from deepest up, committed blocks in all.
	deepest   *segment
	committed int
	epoch     uint32
	detached  bool // its content is not cached
	leaf      *chainNode

	submittedAt  int64
	scheduledAt  int64
	firstTokenAt int64
	cachedTokens int
	hostTokens   int
	preemptions  int
	readyAt      int64 // when its load lands, picoseconds after Instance.origin

	prev, next *request // neighbours in the running or the waiting list
}

// before is the order of the waiting queue.
func (r *request) before(o *request) bool {
	if r.Priority != o.Priority {
		return r.Priority < o.Priority
	}
	return r.seq < o.seq
}

func (r *request) event(kind EventKind, at int64) Event {
	e := Event{
		Kind: kind, At: at, ID: r.ID, CachedTokens: r.cachedTokens, HostTokens: r.hostTokens, OutputTokens: r.generated,
		QueueNanos: r.scheduledAt - r.submittedAt, Preemptions: r.preemptions,
	}
	if r.firstTokenAt >= 0 {
		e.PrefillNanos = r.firstTokenAt - r.scheduledAt
	}
	return e
}

// requestList is an intrusive list; a request is in one at a time.
type requestList struct {
	first, last *request
	size        int
}

// insert puts r in order, looking for its place from the back.
func (l *requestList) insert(r *request) {
	after := l.last
	for after != nil && r.before(after) {
		after = after.prev
	}
	l.insertAfter(r, after)
}

func (l *requestList) pushBack(r *request) { l.insertAfter(r, l.last) }

func (l *requestList) insertAfter(r, after *request) {
	r.prev = after
	if after != nil {
		r.next, after.next = after.next, r
	} else {
		r.next, l.first = l.first, r
	}
	if r.next != nil {
		r.next.prev = r
	} else {
		l.last = r
	}
	l.size++
}

func (l *requestList) remove(r *request) {
	if r.prev != nil {
		r.prev.next = r.next
	} else {
		l.first = r.next
	}
	if r.next != nil {
		r.next.prev = r.prev
	} else {
		l.last = r.prev
	}
	r.prev, r.next = nil, nil
	l.size--
}

// finishHeap orders the decoding requests by the step that ends them.
type finishHeap []*request

func (h finishHeap) less(a, b *request) bool {
	return a.finishStep < b.finishStep || a.finishStep == b.finishStep && a.seq < b.seq
}

func (h *finishHeap) push(r *request) {
	*h = append(*h, r)
	h.up(len(*h)-1, r)
}

func (h *finishHeap) remove(r *request) {
	old := *h
	i, n := r.heapIndex, len(old)-1
	moved := old[n]
	old[n] = nil
	*h = old[:n]
	if i == n {
		return
	}
	if !h.down(i, moved) {
		h.up(i, moved)
	}
}

func (h finishHeap) up(i int, r *request) {
	for i > 0 {
		parent := (i - 1) / 2
		if !h.less(r, h[parent]) {
			break
		}
		h[i] = h[parent]
		h[i].heapIndex = i
		i = parent
	}
	h[i] = r
	r.heapIndex = i
}

// down reports whether r moved.
func (h finishHeap) down(i int, r *request) bool {
	start := i
	for {
		child := 2*i + 1
		if child >= len(h) {
			break
		}
		if child+1 < len(h) && h.less(h[child+1], h[child]) {
			child++
		}
		if !h.less(h[child], r) {
			break
		}
		h[i] = h[child]
		h[i].heapIndex = i
		i = child
	}
	h[i] = r
	r.heapIndex = i
	return i > start
}

func (r Request) validate(p *Params) error {
	switch {
	case r.PromptTokens < 1:
		return fmt.Errorf("%w: %d prompt tokens", ErrBadRequest, r.PromptTokens)
	case r.OutputTokens < 1:
		return fmt.Errorf("%w: %d output tokens", ErrBadRequest, r.OutputTokens)
	case r.PromptTokens > p.MaxContextTokens || r.OutputTokens > p.MaxContextTokens-r.PromptTokens:
		return fmt.Errorf("%w: %d prompt and %d output tokens, the context holds %d",
			ErrContextTooLong, r.PromptTokens, r.OutputTokens, p.MaxContextTokens)
	case blocksFor(r.PromptTokens+r.OutputTokens, p.BlockTokens) > p.CapacityBlocks:
		return fmt.Errorf("%w: %d prompt and %d output tokens, the cache holds %d",
			ErrContextTooLong, r.PromptTokens, r.OutputTokens, p.CapacityBlocks*p.BlockTokens)
	}
	return nil
}

// blocksFor is the number of blocks that hold a number of tokens.
func blocksFor(tokens, blockTokens int) int { return (tokens + blockTokens - 1) / blockTokens }
