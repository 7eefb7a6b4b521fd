package sim

// eventKind says what a queued event is about.
type eventKind uint8

const (
	// gapEnded: a session's tool is done, its next turn is asked for.
	gapEnded eventKind = iota + 1
	// turnRetried: a turn that an instance failed to answer is asked for again.
	turnRetried
	// snapshotTaken and blocksFlushed: an instance's observers do their round.
	snapshotTaken
	blocksFlushed
	// messageArrived: an observation reaches the policy.
	messageArrived
	// ticked: time passes for the policy.
	ticked
	// taskArrived: the open loop releases its next task.
	taskArrived
	// trained: the trainer has finished its step on a batch; synced: the new
	// weights are on every instance.
	trained
	synced
	// faultStarted and faultEnded: see Fault.
	faultStarted
	faultEnded
	// measuringStarted: the warm-up is over.
	measuringStarted
	// sampled: the time series get their next point.
	sampled
)

// queued is one event to come. Equal times go by order of insertion.
type queued struct {
	at   int64
	seq  uint64
	kind eventKind
	// subject is the session, instance, message or fault concerned.
	subject int32
}

func (a *queued) before(b *queued) bool { return a.at < b.at || a.at == b.at && a.seq < b.seq }

// eventQueue is a binary heap of values.
type eventQueue struct {
	heap []queued
	seq  uint64
}

func (q *eventQueue) push(at int64, kind eventKind, subject int32) {
	q.seq++
	e := queued{at: at, seq: q.seq, kind: kind, subject: subject}
	q.heap = append(q.heap, e)
	i := len(q.heap) - 1
	for i > 0 {
		parent := (i - 1) / 2
		if !e.before(&q.heap[parent]) {
			break
		}
		q.heap[i] = q.heap[parent]
		i = parent
	}
	q.heap[i] = e
}

func (q *eventQueue) pop() queued {
	top := q.heap[0]
	last := len(q.heap) - 1
	e := q.heap[last]
	q.heap = q.heap[:last]
	i := 0
	for {
		child := 2*i + 1
		if child >= last {
			break
		}
		if child+1 < last && q.heap[child+1].before(&q.heap[child]) {
			child++
		}
		if !q.heap[child].before(&e) {
			break
		}
		q.heap[i] = q.heap[child]
		i = child
	}
	if last > 0 {
		q.heap[i] = e
	}
	return top
}
