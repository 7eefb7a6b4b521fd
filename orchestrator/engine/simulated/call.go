package simulated

import (
	"time"

	"holdfast/router/sim/instance"
)

// ending is how a call ended.
type ending uint8

const (
	// running: it has not.
	running ending = iota
	// finished: all its tokens are generated.
	finished
	// aborted: the engine was told to give it up; what was generated is its answer.
	aborted
	// shutDown: the engine stops; the answer is an error.
	shutDown
	// crashed: there is no answer.
	crashed
)

func (e ending) String() string {
	switch e {
	case running:
		return "running"
	case finished:
		return "finished"
	case aborted:
		return "aborted"
	case shutDown:
		return "shut down"
	case crashed:
		return "crashed"
	}
	return "unknown"
}

// call is one request in flight.
type call struct {
	id        uint64
	requestID string
	sessionID string
	request   *completionRequest
	core      *core
	chain     *chain

	promptTokens int
	promptTail   []int32 // after the last full block of the prompt
	promptEnd    place
	outputTokens int
	stopped      bool
	stopToken    int32
	wallStart    time.Time
	// dropAfter is a fault: after so many tokens the connection breaks; 0 for never.
	dropAfter int

	// Guarded by core.mu.
	sampler   sampler
	learner   tape // what of the output the chain knows
	generated int  // what the reader has been told
	ending    ending
	event     instance.Event // of the end
	firstAt   int64          // engine nanoseconds
	// notify holds a token when there is something to read.
	notify chan struct{}
}

// watched says that somebody wants to know of progress before the end.
func (x *call) watched() bool { return x.request.Stream || x.dropAfter > 0 }

func (x *call) signal() {
	select {
	case x.notify <- struct{}{}:
	default:
	}
}

// learn gives the blocks that x has generated, up to block end, the hashes by which a
// later prompt finds them.
func (x *call) learn(t *chainTable, end int) {
	ch := x.chain
	block := make([]int32, 0, t.blockTokens)
	if x.learner.next == 0 {
		block = append(block, x.promptTail...)
	}
	var hash [1]blockHash
	for b := ch.end(); b < end; b++ {
		for full := false; !full; full = x.learner.at.filled == 0 {
			block = append(block, x.sampler.token(x.learner.noise(&x.sampler)))
		}
		hash[0] = x.learner.at.hash ^ ch.saltHash
		t.extend(ch, hash[:], block)
		block = block[:0]
	}
}

// progress is what a reader may know of a call.
type progress struct {
	generated int
	ending    ending
	// sampler has the weights of what is generated so far.
	sampler sampler
	event   instance.Event
}

func (p *progress) done() bool { return p.ending != running }
