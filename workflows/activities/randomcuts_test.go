package activities

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"pgregory.net/rapid"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
	"holdfast/workflows"
)

// world is one session's way through random losses.
type world struct {
	f     *fixture
	t     *rapid.T
	e     *engines
	p     *placements
	id    uuid.UUID
	a     *Activities
	store *store.Store
	heard progress
	// forgot: the turn went on where nobody told of calls that brought nothing.
	forgot bool
}

// process replaces the worker by one of a new process.
func (w *world) process() {
	w.store = storetest.Open(w.f.t, w.f.url)
	w.a = w.f.workerOn(w.store, w.e, w.p, testCheckpointTokens)
}

// TestRandomCuts: whatever happens to calls and workers, the sample holds what was
// sampled, under the versions it was sampled under, and the count of tokens that were
// generated again is exact.
func TestRandomCuts(t *testing.T) {
	f := newFixture(t)
	rapid.Check(t, func(t *rapid.T) {
		wanted := rapid.IntRange(1, 6*testCheckpointTokens).Draw(t, "wanted")
		w := &world{f: f, t: t, e: newEngines(f.t), p: &placements{}, id: f.session(single(wanted))}
		w.e.chunkTokens = rapid.IntRange(1, testCheckpointTokens+3).Draw(t, "chunk")
		if rapid.Bool().Draw(t, "ends by itself") {
			wanted = rapid.IntRange(1, wanted).Draw(t, "length")
			w.e.lastToken = promptTokens + wanted - 1
		}
		held := map[int]bool{}
		for range rapid.IntRange(0, 2).Draw(t, "holds") {
			held[rapid.IntRange(0, 8).Draw(t, "held question")] = true
		}
		w.p.holdNext = func(question int) bool { return held[question] }
		for range rapid.IntRange(0, 7).Draw(t, "steps") {
			s := step{
				tokens: rapid.IntRange(0, 2*testCheckpointTokens).Draw(t, "tokens"),
				end:    rapid.SampledFrom([]ending{endsBroken, endsCut, endsCut, endsLost, endsContradicting}).Draw(t, "end"),
			}
			if s.end != endsLost {
				s.unseen = rapid.IntRange(0, min(3, s.tokens)).Draw(t, "unseen")
			}
			if rapid.Bool().Draw(t, "new version") {
				// Between two pieces of the stream, since nobody sees what happens within one.
				s.newVersionAfter = rapid.IntRange(0, 4).Draw(t, "after") * w.e.chunkTokens
				s.newVersionAtEnd = s.newVersionAfter == 0
				if !s.newVersionAtEnd {
					s.unseen = 0
				}
			}
			w.e.script = append(w.e.script, s)
		}
		w.process()
		defer func() { w.store.Close() }()
		reply := w.run()
		if parsed(t, reply, nil) == router.Failed {
			// More failures in a row than are allowed.
			f.end(w.a, w.id, reply)
			return
		}
		sample := f.end(w.a, w.id, reply)
		checkSample(t, w.e, &sample, wanted)
		got, want := f.onlyTurn(w.id).TurnEffort, store.TurnEffort{Attempts: len(w.e.requests), TokensRegenerated: w.e.sampledAgain()}
		exact := got.Attempts == want.Attempts && got.TokensRegenerated == want.TokensRegenerated
		if !exact && !w.forgot || got.Attempts > want.Attempts || got.TokensRegenerated > want.TokensRegenerated {
			t.Fatalf("%+v is counted, it was %+v", got, want)
		}
		if rows := f.checkpointRows(); rows != 0 {
			t.Fatalf("%d checkpoints are left", rows)
		}
	})
}

// run drives the turn through holds and lost workers to its reply.
func (w *world) run() workflows.TurnReply {
	for {
		pu := &pulse{earlier: w.heard}
		ctx, kill := context.WithCancel(context.Background())
		type answer struct {
			reply workflows.TurnReply
			err   error
		}
		answered := make(chan answer, 1)
		go func() {
			reply, err := w.a.turn(ctx, w.id, 0, pu)
			answered <- answer{reply, err}
		}()
		select {
		case <-w.e.hung:
			// The process is gone: it saves nothing more. What it was just writing
			// arrives or does not.
			w.heard = pu.progress()
			w.store.Close()
			kill()
			storetest.Came(w.t, "the lost worker's end", answered)
			w.process()
		case got := <-answered:
			kill()
			must(w.t, got.err)
			if got.reply.Outcome != workflows.OutcomeHeld {
				return got.reply
			}
			w.heard = progress{}
			if rapid.Bool().Draw(w.t, "granted elsewhere") {
				w.store.Close()
				w.process()
				w.forgot = true
			}
		case <-time.After(storetest.Patience):
			kill()
			w.t.Fatalf("the turn neither hangs nor ends")
		}
	}
}
