package activities

import (
	"context"
	"testing"

	"holdfast/store/storetest"
)

// TestOutputThatWasDiscardedIsNotGoneOnFrom: a call that contradicts itself had left
// checkpoints when it ended, and the next call's worker is lost before it has its own.
func TestOutputThatWasDiscardedIsNotGoneOnFrom(t *testing.T) {
	const wanted = 3 * testCheckpointTokens
	f := newFixture(t)
	id := f.session(single(wanted))
	e := newEngines(t, step{end: endsContradicting, newVersionAtEnd: true}, step{tokens: 5, end: endsLost})
	e.chunkTokens = testCheckpointTokens / 2
	saved := make(chan struct{})
	atEnd := make(chan struct{}, 1)
	e.reached = func() {
		e.reached = nil
		atEnd <- struct{}{}
		<-saved // The first call ends once its checkpoint is there.
	}
	lost := storetest.Open(t, f.url)
	a := f.workerOn(lost, e, &placements{}, testCheckpointTokens)
	ctx, kill := context.WithCancel(t.Context())
	over := make(chan struct{})
	go func() {
		defer close(over)
		if reply, err := a.turn(ctx, id, 0, &pulse{}); err == nil {
			t.Errorf("the lost worker answered %+v", reply)
		}
	}()
	storetest.Came(t, "the end of the first call's stream", atEnd)
	f.eventually(func() bool { return f.checkpointRows() > 0 })
	close(saved)
	storetest.Came(t, "the call that hangs", e.hung)
	lost.Close()
	kill()
	storetest.Came(t, "the lost worker's end", over)
	b := f.worker(e, &placements{}, testCheckpointTokens)
	reply, err := b.turn(t.Context(), id, 0, &pulse{})
	must(t, err)
	sample := f.end(b, id, reply)
	checkSample(t, e, &sample, wanted)
}
