package activities

import (
	"context"
	"runtime"
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
	e.reached = func() {
		e.reached = nil
		for f.checkpointRows() == 0 {
			// The first call ends once its checkpoint is there.
			runtime.Gosched()
		}
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
	<-e.hung
	lost.Close()
	kill()
	<-over
	b := f.worker(e, &placements{}, testCheckpointTokens)
	reply, err := b.turn(t.Context(), id, 0, &pulse{})
	must(t, err)
	sample := f.end(b, id, reply)
	checkSample(t, e, &sample, wanted)
}
