package router

import "testing"

// TestForecastHoldsYoungSessions: sessions of a class that is known to grow are not
// all let in while they are small. Current footprints alone let in whatever fits
// now.
func TestForecastHoldsYoungSessions(t *testing.T) {
	admitted := func(reserve ReserveMode) int {
		cfg := DefaultConfig()
		cfg.Reserve = reserve
		cfg.Caps.Margin, cfg.Caps.RiseShare = 10, 10
		w := newWorld(t, cfg, 1)
		w.join("a", 100_000, 0) // 1.6 million tokens
		// Twenty sessions, one after the other, grow from 200 to 60,000 tokens in 25 minutes.
		for range 20 {
			r := w.open("rlvr", GroupID{}, 200, 0)
			w.ask(r)
			for tokens := int64(200); tokens < 60_000; tokens += 2_000 {
				w.now += 50 * second
				w.step(&Snapshot{At: w.now, TakenAt: w.now, Instance: "a", Running: 1, Sessions: []SnapshotSession{
					{Session: r.id, Tokens: tokens, CachedBlocks: -1, Running: true},
				}})
			}
			w.end(r, 60_000, false)
			w.finish(r, Completed)
		}
		// Then two hundred come at once.
		var young []*rollout
		for range 200 {
			r := w.open("rlvr", GroupID{}, 200, 0)
			w.ask(r)
			young = append(young, r)
		}
		for range 8 {
			snap := &Snapshot{At: w.now, TakenAt: w.now, Instance: "a"}
			for _, r := range young {
				snap.Sessions = append(snap.Sessions, SnapshotSession{Session: r.id, Tokens: r.prompt, CachedBlocks: -1, Running: true})
			}
			w.step(snap)
			w.now += second
			w.step(&Tick{At: w.now})
		}
		return w.core.instances[0].protected()
	}
	// After fifteen minutes each of them will hold some 36,000 tokens: 1.5 of 1.6
	// million are 42 sessions.
	if n := admitted(ReserveAhead); n < 30 || n > 70 {
		t.Errorf("the forecast lets in %d young sessions, want about 42", n)
	}
	if n := admitted(ReserveCurrent); n < 150 {
		t.Errorf("current footprints let in %d young sessions: the comparison shows nothing", n)
	}
}

// TestForecastLetsSessionsInAsOthersNearTheirEnd: with equal footprints, sessions
// that are about to end leave more room than those that go on.
func TestForecastLetsSessionsInAsOthersNearTheirEnd(t *testing.T) {
	w := newWorld(t, DefaultConfig(), 1)
	w.join("a", 100_000, 0)
	c := w.core
	cl := c.classOf("rlvr")
	for range 200 {
		cl.ahead.Advance(200, 40_000, 800)
		cl.ahead.End(40_000)
	}
	cl.ahead.Learn()
	old, young := cl.ahead.Expect(39_000, 0), cl.ahead.Expect(5_000, 0)
	last := len(old) - 1
	if old[last] > 0.6*39_000 {
		t.Errorf("a session at the end of its life is expected to hold %.0f tokens at the horizon", old[last])
	}
	// Half the horizon is 450 s, in which it grows by 22,000 tokens.
	if half := young[last-1]; half < 20_000 {
		t.Errorf("a session early in its life is expected to hold %.0f tokens at half the horizon", half)
	}
}
