package store_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
)

// generating is a fixture with one session in its first turn.
func generating(t testing.TB) (*fixture, uuid.UUID) {
	t.Helper()
	f := newFixture(t, 10)
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	f.decide(f.admit(id, 0, "w1"))
	return f, id
}

// output is n tokens of a turn from the given place on; every id and every
// log-probability tells its place and who sampled it.
func output(from, n, who int) (ids []int32, logprobs []float32) {
	for i := from; i < from+n; i++ {
		ids, logprobs = append(ids, int32(1_000*who+i)), append(logprobs, -float32(i)/8)
	}
	return ids, logprobs
}

func checkpoint(id uuid.UUID, turn, from, n, who int, previous uuid.UUID) store.Checkpoint {
	ids, logprobs := output(from, n, who)
	return store.Checkpoint{
		SessionID: id, Turn: turn, StartTokens: from, Previous: previous, IDs: ids, Logprobs: logprobs,
		Versions: []store.VersionSpan{{Tokens: n, PolicyVersion: int64(who)}}, Instance: "w1", Epoch: 1, TurnEffort: store.TurnEffort{Attempts: 1},
	}
}

func (f *fixture) save(c store.Checkpoint) uuid.UUID {
	f.t.Helper()
	last, err := f.SaveCheckpoint(f.t.Context(), c)
	must(f.t, err)
	return last
}

func (f *fixture) partial(id uuid.UUID, turn int) store.PartialTurn {
	f.t.Helper()
	partial, err := f.PartialTurn(f.t.Context(), id, turn)
	must(f.t, err)
	return partial
}

func (f *fixture) checkpointRows() (rows int) {
	f.t.Helper()
	must(f.t, f.conn().QueryRow(f.t.Context(), `select count(*) from turn_checkpoints`).Scan(&rows))
	return rows
}

// TestCheckpointsReadBack: what is read is what was sampled, under the versions
// that it was sampled under, and a commit or an end leaves nothing behind.
func TestCheckpointsReadBack(t *testing.T) {
	f, id := generating(t)
	if partial := f.partial(id, 0); len(partial.IDs) != 0 || partial.Last != uuid.Nil {
		t.Errorf("before the first checkpoint: %+v", partial)
	}
	first := f.save(checkpoint(id, 0, 0, 5, 1, uuid.Nil))
	second := checkpoint(id, 0, 5, 6, 1, first)
	second.Versions = []store.VersionSpan{{Tokens: 2, PolicyVersion: 1}, {Tokens: 4, PolicyVersion: 2}}
	second.TurnEffort = store.TurnEffort{Attempts: 3, Resumes: 2, TokensRegenerated: 7}
	last := f.save(second)
	partial := f.partial(id, 0)
	ids, logprobs := output(0, 11, 1)
	versions := []store.VersionSpan{{Tokens: 7, PolicyVersion: 1}, {Tokens: 4, PolicyVersion: 2}}
	if !slices.Equal(partial.IDs, ids) || !slices.Equal(partial.Logprobs, logprobs) || !slices.Equal(partial.Versions, versions) {
		t.Errorf("partial output %+v", partial)
	}
	if partial.Last != last || partial.TurnEffort != second.TurnEffort {
		t.Errorf("last %v, want %v; effort %+v", partial.Last, last, partial.TurnEffort)
	}

	commit := turn(id, 0)
	commit.Generated, commit.Logprobs, commit.Versions = ids, logprobs, versions
	commit.PolicyVersion, commit.TurnEffort = 2, partial.TurnEffort
	_, err := f.CommitTurn(t.Context(), commit)
	must(t, err)
	if rows := f.checkpointRows(); rows != 0 {
		t.Errorf("%d checkpoints are left after the commit", rows)
	}
	f.decide(f.admit(id, 1, "w1"))
	f.save(checkpoint(id, 1, 0, 5, 1, uuid.Nil))
	f.end(id, router.Cancelled)
	if rows := f.checkpointRows(); rows != 0 {
		t.Errorf("%d checkpoints are left after the session", rows)
	}

	sample, err := storetest.SampleOf(t.Context(), f.Store, id)
	must(t, err)
	wantSegments := []store.Segment{
		{Kind: store.SegmentPrompt, Count: 3},
		{Kind: store.SegmentGenerated, Start: 3, Count: 7, PolicyVersion: 1},
		{Kind: store.SegmentGenerated, Start: 10, Count: 4, PolicyVersion: 2},
	}
	if !slices.Equal(sample.Tokens.Segments, wantSegments) {
		t.Errorf("segments %+v", sample.Tokens.Segments)
	}
	if !slices.Equal(sample.Tokens.TokenIDs[3:], ids) || !slices.Equal(sample.Tokens.Logprobs[3:], logprobs) {
		t.Errorf("tokens %+v", sample.Tokens)
	}
	if !slices.Equal(sample.Tokens.LossMask, []uint8{0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}) {
		t.Errorf("loss mask %v", sample.Tokens.LossMask)
	}
	if sample.MinPolicyVersion != 1 || sample.MaxPolicyVersion != 2 || sample.Usage.Resumes != 2 || sample.Usage.TokensRegenerated != 7 {
		t.Errorf("versions %d to %d, usage %+v", sample.MinPolicyVersion, sample.MaxPolicyVersion, sample.Usage)
	}
	turns, err := f.SessionTurns(t.Context(), id, -1, 10)
	must(t, err)
	if turns[0].TurnEffort != second.TurnEffort || turns[0].PolicyVersion != 2 {
		t.Errorf("turn %+v", turns[0])
	}
	metrics, err := f.Metrics(t.Context(), f.run.ID, store.Window{})
	must(t, err)
	if metrics.Total.TokensRegenerated != 7 || metrics.Total.Resumes != 2 {
		t.Errorf("metrics %+v", metrics.Total)
	}
	f.verify()
}

// TestCheckpointsOfTwoWorkersNeverMix: a worker that was taken for dead writes on;
// what is read is always the chain of one of them.
func TestCheckpointsOfTwoWorkersNeverMix(t *testing.T) {
	f, id := generating(t)
	common := f.save(checkpoint(id, 0, 0, 4, 1, uuid.Nil))
	old := f.save(checkpoint(id, 0, 4, 4, 1, common))
	// The second worker has read the first row only, and goes on from there.
	fresh := f.save(checkpoint(id, 0, 4, 2, 2, common))
	if _, err := f.SaveCheckpoint(t.Context(), checkpoint(id, 0, 8, 4, 1, old)); !errors.Is(err, store.ErrCheckpointSuperseded) {
		t.Errorf("the superseded worker's next checkpoint: %v", err)
	}
	f.save(checkpoint(id, 0, 6, 3, 2, fresh))
	before, _ := output(0, 4, 1)
	after, _ := output(4, 5, 2)
	if partial := f.partial(id, 0); !slices.Equal(partial.IDs, append(before, after...)) {
		t.Errorf("partial output %v", partial.IDs)
	}
	// A row that does not follow what stands before it is not read, however it came there.
	f.exec(`update turn_checkpoints set previous = gen_random_uuid() where start_tokens = 4`)
	if partial := f.partial(id, 0); !slices.Equal(partial.IDs, before) || partial.Last != common {
		t.Errorf("partial output of a broken chain %v", partial.IDs)
	}
}

// TestConcurrentCheckpointsStayOneChain races two workers that go on from each
// other's rows or their own.
func TestConcurrentCheckpointsStayOneChain(t *testing.T) {
	f, id := generating(t)
	var wait sync.WaitGroup
	for who := 1; who <= 3; who++ {
		wait.Go(func() {
			for range 15 {
				partial, err := f.PartialTurn(t.Context(), id, 0)
				if err != nil {
					t.Error(err)
					return
				}
				at, last := len(partial.IDs), partial.Last
				for range 2 {
					next, err := f.SaveCheckpoint(t.Context(), checkpoint(id, 0, at, 3, who, last))
					if errors.Is(err, store.ErrCheckpointSuperseded) {
						break
					}
					if err != nil {
						t.Error(err)
						return
					}
					at, last = at+3, next
				}
			}
		})
	}
	wait.Wait()
	partial := f.partial(id, 0)
	if len(partial.IDs) == 0 || 3*f.checkpointRows() != len(partial.IDs) {
		t.Errorf("%d tokens in %d rows", len(partial.IDs), f.checkpointRows())
	}
	for i, token := range partial.IDs {
		if int(token)%1_000 != i || token/1_000 != partial.IDs[i/3*3]/1_000 {
			t.Fatalf("token %d is %d", i, token)
		}
	}
}

func TestCheckpointRefusals(t *testing.T) {
	f, id := generating(t)
	ctx := t.Context()
	for _, test := range []struct {
		path   string
		change func(*store.Checkpoint)
	}{
		{"ids", func(c *store.Checkpoint) { c.IDs, c.Logprobs = nil, nil }},
		{"logprobs", func(c *store.Checkpoint) { c.Logprobs = c.Logprobs[:1] }},
		{"logprobs[1]", func(c *store.Checkpoint) { c.Logprobs[1] = float32(math.NaN()) }},
		{"versions", func(c *store.Checkpoint) { c.Versions = nil }},
		{"versions[0]", func(c *store.Checkpoint) { c.Versions[0].PolicyVersion = -1 }},
		{"previous", func(c *store.Checkpoint) { c.Previous = uuid.New() }},
		{"previous", func(c *store.Checkpoint) { c.StartTokens = 1 }},
	} {
		c := checkpoint(id, 0, 0, 3, 1, uuid.Nil)
		test.change(&c)
		_, err := f.SaveCheckpoint(ctx, c)
		var field *store.FieldError
		if !errors.As(err, &field) || field.Path != test.path {
			t.Errorf("%v, want a refusal of %s", err, test.path)
		}
	}
	if _, err := f.SaveCheckpoint(ctx, checkpoint(uuid.New(), 0, 0, 3, 1, uuid.Nil)); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("of an unknown session: %v", err)
	}
	if _, err := f.SaveCheckpoint(ctx, checkpoint(id, 1, 0, 3, 1, uuid.Nil)); !errors.Is(err, store.ErrTurnOutOfOrder) {
		t.Errorf("of a turn that has not come: %v", err)
	}
	if _, err := f.SaveCheckpoint(ctx, checkpoint(id, 0, 4, 3, 1, uuid.New())); !errors.Is(err, store.ErrCheckpointSuperseded) {
		t.Errorf("after a part that is not there: %v", err)
	}
	f.commit(id, 0)
	if _, err := f.SaveCheckpoint(ctx, checkpoint(id, 0, 0, 3, 1, uuid.Nil)); !errors.Is(err, store.ErrTurnOutOfOrder) {
		t.Errorf("of a committed turn: %v", err)
	}
	f.end(id, router.Truncated)
	if _, err := f.SaveCheckpoint(ctx, checkpoint(id, 1, 0, 3, 1, uuid.Nil)); !errors.Is(err, store.ErrSessionEnded) {
		t.Errorf("of an ended session: %v", err)
	}
	if rows := f.checkpointRows(); rows != 0 {
		t.Errorf("%d rows were written", rows)
	}
}

// TestNoCheckpointOutlivesItsSession races a worker that goes on writing with the
// session's end.
func TestNoCheckpointOutlivesItsSession(t *testing.T) {
	f := newFixture(t, 20)
	f.submit("one", repeat("agent", 20)...)
	for _, id := range f.dispatch() {
		started := make(chan struct{})
		var wait sync.WaitGroup
		wait.Go(func() {
			start := sync.OnceFunc(func() { close(started) })
			defer start() // a failure too
			at, last := 0, uuid.Nil
			for {
				next, err := f.SaveCheckpoint(t.Context(), checkpoint(id, 0, at, 2, 1, last))
				if errors.Is(err, store.ErrSessionEnded) {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
				start()
				at, last = at+2, next
			}
		})
		<-started
		f.end(id, router.Cancelled)
		wait.Wait()
	}
	if rows := f.checkpointRows(); rows != 0 {
		t.Errorf("%d checkpoints outlived their sessions", rows)
	}
	f.verify()
}

// BenchmarkCheckpoint is what one checkpoint of 2,048 tokens costs the store: time,
// and bytes of ids and log-probabilities as they are stored. Ids are drawn like words
// of a text, from 150,000 with falling frequency.
func BenchmarkCheckpoint(b *testing.B) {
	for _, tokens := range []int{512, 2_048, 8_192} {
		b.Run(fmt.Sprint(tokens), func(b *testing.B) {
			f, id := generating(b)
			c := checkpoint(id, 0, 0, tokens, 1, uuid.Nil)
			state := uint64(1)
			for i := range tokens {
				state = state*6364136223846793005 + 1442695040888963407
				u := float64(state>>11) / (1 << 53)
				c.IDs[i] = int32(math.Exp(u * math.Log(150_000)))
				c.Logprobs[i] = float32(math.Log(1 - u*0.9))
			}
			b.ResetTimer()
			for range b.N {
				c.StartTokens, c.Previous = 0, uuid.Nil
				f.save(c)
			}
			b.StopTimer()
			var bytes int
			must(b, f.conn().QueryRow(b.Context(), `select sum(pg_column_size(ids) + pg_column_size(logprobs)) from turn_checkpoints`).Scan(&bytes))
			b.ReportMetric(float64(bytes), "bytes")
		})
	}
}
