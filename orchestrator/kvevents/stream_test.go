package kvevents

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

// history is what an engine still has to replay.
type history struct {
	first   uint64
	batches [][]byte
	broken  error
	asked   []uint64
}

func (h *history) replay(_ context.Context, from uint64, visit func(uint64, []byte) error) error {
	h.asked = append(h.asked, from)
	if h.broken != nil {
		return h.broken
	}
	for i, payload := range h.batches {
		if seq := h.first + uint64(i); seq >= from {
			if err := visit(seq, payload); err != nil {
				return err
			}
		}
	}
	return nil
}

// three batches of one growing context: blocks 0 and 1, block 2, blocks 3 and 4.
func threeBatches(t *testing.T) (payloads [][]byte, tokens []int32) {
	tokens = run(100, 5*16)
	return [][]byte{
		batchOf(t, 10, storedEvent(list{1, 2}, nil, tokens[:32], 16)),
		batchOf(t, 11, storedEvent(list{3}, 2, tokens[32:48], 16)),
		batchOf(t, 12, storedEvent(list{4, 5}, 3, tokens[48:], 16)),
	}, tokens
}

func withHistory(s *Subscriber, h *history) { s.streams[0].replay = h.replay }

func trusted(t *testing.T, s *Subscriber, want bool, reason string) {
	t.Helper()
	if h := s.Health(); h.Trusted != want || !strings.Contains(h.Reason, reason) {
		t.Fatalf("trusted %v (%q), want %v (%q)", h.Trusted, h.Reason, want, reason)
	}
}

func TestGapIsHealed(t *testing.T) {
	v := newView()
	s := newSubscriber(t, testConfig(v))
	payloads, tokens := threeBatches(t)
	h := &history{batches: payloads[:1]}
	withHistory(s, h)
	join(t, s)
	trusted(t, s, true, "")
	h.batches = payloads
	feed(t, s, 2, payloads[2])
	if !v.has(ownChain(7, 16, tokens)...) {
		t.Fatal("blocks missing")
	}
	got := s.Health()
	if got.Gaps != 1 || got.Replays != 2 || got.Resyncs != 0 || got.ReplayedBatches != 3 || !got.Trusted {
		t.Fatalf("%+v", got)
	}
	// The batches that waited meanwhile are old now.
	feed(t, s, 2, payloads[2])
	if got := s.Health(); got.Duplicates != 1 || got.Resyncs != 0 {
		t.Fatalf("%+v", got)
	}
}

// TestGapIsNotHealed for each cause: what was told is taken back, and the reason is
// in the health.
func TestGapIsNotHealed(t *testing.T) {
	payloads, tokens := threeBatches(t)
	last := ownChain(7, 16, tokens)[4:]
	tail := batchOf(t, 13, storedEvent(list{6}, nil, run(900, 16), 16))
	for name, test := range map[string]struct {
		history  *history
		reason   string
		restarts uint64
	}{
		"no endpoint":  {nil, "no replay endpoint", 0},
		"no answer":    {&history{broken: errors.New("nobody home")}, "nobody home", 0},
		"history gone": {&history{first: 2, batches: payloads[2:]}, "beginning of the history is gone", 0},
		"other engine": {&history{first: 1, batches: [][]byte{batchOf(t, 50), payloads[2], tail}}, "", 1},
	} {
		t.Run(name, func(t *testing.T) {
			v := newView()
			s := newSubscriber(t, testConfig(v))
			join(t, s)
			feed(t, s, 0, payloads[0])
			feed(t, s, 1, payloads[1])
			if test.history != nil {
				withHistory(s, test.history)
			}
			feed(t, s, 3, tail)
			if v.count(ownChain(7, 16, tokens)...) > 0 {
				t.Fatal("blocks are claimed that may be gone")
			}
			if !v.has(ownChain(7, 16, run(900, 16))...) {
				t.Fatal("what came after the gap is not known")
			}
			h := s.Health()
			if h.Resyncs == 0 || h.Gaps != 1 || h.Restarts != test.restarts || h.Trusted == (test.reason != "") || !strings.Contains(h.Reason, test.reason) {
				t.Fatalf("%+v", h)
			}
			if v.count(last...) > 0 {
				t.Fatal("an orphan is claimed")
			}
		})
	}
}

// TestRestartInPlace without a broken connection: the number falls on a younger batch.
func TestRestartInPlace(t *testing.T) {
	v := newView()
	s := newSubscriber(t, testConfig(v))
	join(t, s)
	payloads, tokens := threeBatches(t)
	for i, payload := range payloads {
		feed(t, s, uint64(i), payload)
	}
	feed(t, s, 0, payloads[0]) // old
	if v.size() != 5 {
		t.Fatal("an old batch was taken for a restart")
	}
	feed(t, s, 0, batchOf(t, 20, storedEvent(list{1}, nil, run(700, 16), 16)))
	h := s.Health()
	if v.count(ownChain(7, 16, tokens)...) != 0 || v.size() != 1 || h.Restarts != 1 || h.Duplicates != 1 || !h.Trusted {
		t.Fatalf("%d blocks, %+v", v.size(), h)
	}
}

// TestReconnect: numbers alone do not show that it is still the same engine.
func TestReconnect(t *testing.T) {
	payloads, tokens := threeBatches(t)
	other := batchOf(t, 30, storedEvent(list{8}, nil, run(800, 16), 16))
	for name, test := range map[string]struct {
		history  *history
		old, new int
		trusted  bool
	}{
		"the same, nothing missed":  {&history{batches: payloads[:2]}, 3, 0, true},
		"the same, one missed":      {&history{batches: payloads}, 5, 0, true},
		"restarted, as far again":   {&history{batches: [][]byte{other, batchOf(t, 31)}}, 0, 1, true},
		"restarted, not as far":     {&history{batches: [][]byte{other}}, 0, 1, true},
		"restarted, nothing stored": {&history{}, 0, 0, true},
		"no answer":                 {&history{broken: errors.New("refused")}, 0, 0, false},
		"no endpoint":               {nil, 0, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			v := newView()
			s := newSubscriber(t, testConfig(v))
			join(t, s)
			feed(t, s, 0, payloads[0])
			feed(t, s, 1, payloads[1])
			s.streams[0].disconnected(context.Background(), errors.New("broken"))
			trusted(t, s, false, "not connected: broken")
			if v.size() != 3 {
				t.Fatal("a short interruption cost the locations")
			}
			if test.history != nil {
				withHistory(s, test.history)
			}
			join(t, s)
			if got := v.count(ownChain(7, 16, tokens)...); got != test.old || v.size() != test.old+test.new || s.Health().Trusted != test.trusted {
				t.Fatalf("%d old of %d blocks, %+v", got, v.size(), s.Health())
			}
		})
	}
}

func TestLongDisconnectionDropsLocations(t *testing.T) {
	v := newView()
	s := newSubscriber(t, testConfig(v))
	at := time.Unix(1000, 0)
	s.now = func() time.Time { return at }
	join(t, s)
	payloads, _ := threeBatches(t)
	feed(t, s, 0, payloads[0])
	for range 3 {
		s.streams[0].disconnected(context.Background(), errors.New("refused"))
		at = at.Add(s.timing.lost / 2)
	}
	if h := s.Health(); v.size() != 0 || h.Resyncs != 1 || !strings.Contains(h.Ranks[0].Reason, "disconnected for 10s") || !strings.Contains(h.Reason, "refused") {
		t.Fatalf("%d blocks, %+v", v.size(), h)
	}
}

// TestProbe finds what no later batch shows: a lost last batch, a restarted engine
// that stays idle. A replay socket that is silent for once costs nothing.
func TestProbe(t *testing.T) {
	v := newView()
	s := newSubscriber(t, testConfig(v))
	payloads, _ := threeBatches(t)
	h := &history{batches: payloads[:2]}
	withHistory(s, h)
	join(t, s)
	ctx := context.Background()
	h.batches = payloads
	if err := s.streams[0].probe(ctx, false); err != nil || v.size() != 3 {
		t.Fatalf("a busy stream was probed: %d, %v", v.size(), err)
	}
	if err := s.streams[0].probe(ctx, true); err != nil || v.size() != 5 {
		t.Fatalf("lost tail: %d blocks, %v", v.size(), err)
	}
	h.broken = errors.New("busy")
	if err := s.streams[0].probe(ctx, true); err != nil || v.size() != 5 {
		t.Fatalf("silent replay socket: %d blocks, %v", v.size(), err)
	}
	trusted(t, s, true, "")
	h.broken, h.batches = nil, nil
	if err := s.streams[0].probe(ctx, true); err != nil || v.size() != 0 || s.Health().Restarts != 1 {
		t.Fatalf("restarted: %d blocks, %v", v.size(), err)
	}
	trusted(t, s, true, "")
}

// TestRetryOfTheHistory: a replay socket that comes up late makes the picture whole.
func TestRetryOfTheHistory(t *testing.T) {
	v := newView()
	s := newSubscriber(t, testConfig(v))
	at := time.Unix(1000, 0)
	s.now = func() time.Time { return at }
	payloads, tokens := threeBatches(t)
	h := &history{batches: payloads, broken: errors.New("not up yet")}
	withHistory(s, h)
	join(t, s)
	trusted(t, s, false, "not up yet")
	feed(t, s, 2, payloads[2])
	if v.size() != 0 || s.Health().OrphansHeld != 2 {
		t.Fatalf("%d blocks, %+v", v.size(), s.Health())
	}
	h.broken = nil
	if err := s.streams[0].probe(context.Background(), false); err != nil {
		t.Fatal(err)
	}
	if !v.has(ownChain(7, 16, tokens)...) || v.size() != 5 {
		t.Fatalf("%d blocks", v.size())
	}
	trusted(t, s, true, "")
}

// TestClear: batches that were under way when the caller reset the cache do not
// bring blocks back, by the engine's clock, which is an hour off here.
func TestClear(t *testing.T) {
	v := newView()
	s := newSubscriber(t, testConfig(v))
	at := time.Unix(1_000_000, 0)
	s.now = func() time.Time { return at }
	engine := func() float64 { return float64(at.UnixMilli())/1000 - 3600 }
	join(t, s)
	payload := func(hash int) []byte { return batchOf(t, engine(), storedEvent(list{hash}, nil, run(hash, 16), 16)) }
	feed(t, s, 0, payload(1))
	at = at.Add(time.Second)
	late := payload(2)
	at = at.Add(20 * time.Millisecond)
	if err := s.Clear(context.Background()); err != nil || v.size() != 0 {
		t.Fatalf("%d blocks, %v", v.size(), err)
	}
	trusted(t, s, true, "")
	at = at.Add(50 * time.Millisecond)
	feed(t, s, 1, late)
	if h := s.Health(); v.size() != 0 || h.StaleBatches != 1 || h.Clears != 1 {
		t.Fatalf("%d blocks, %+v", v.size(), h)
	}
	feed(t, s, 2, payload(3))
	if v.size() != 1 {
		t.Fatal("a batch from after the clear was not applied")
	}
}

// TestRouterThatDoesNotListen: an event that was not taken is made good by a clear.
func TestRouterThatDoesNotListen(t *testing.T) {
	v := newView()
	s := newSubscriber(t, testConfig(v))
	payloads, tokens := threeBatches(t)
	h := &history{batches: payloads[:1]}
	withHistory(s, h)
	join(t, s)
	h.batches = payloads[:2]
	v.fail = func() bool { return true }
	ctx := context.Background()
	if err := s.streams[0].frame(ctx, 1, payloads[1]); !errors.Is(err, errNotTaken) {
		t.Fatal(err)
	}
	s.streams[0].disconnected(ctx, errNotTaken)
	if h := s.Health(); h.Trusted || v.size() != 2 {
		t.Fatalf("%d blocks, %+v", v.size(), h)
	}
	if err := s.streams[0].connected(ctx); !errors.Is(err, errNotTaken) {
		t.Fatal(err)
	}
	v.fail = nil
	join(t, s)
	trusted(t, s, true, "")
	if !v.has(ownChain(7, 16, tokens[:48])...) || v.size() != 3 {
		t.Fatalf("%d blocks", v.size())
	}
}
