package router

import (
	"fmt"
	"math"
	"strings"
	"testing"
)

func TestVariantsAreValid(t *testing.T) {
	for name, cfg := range map[string]Config{"holdfast": DefaultConfig(), "misa-t": MISAT(), "misa-t-borrow": MISATBorrow(),
		"misa-t-paper": MISATPaper(), "misa": MISA(), "session-admission": SessionAdmission(), "placement-only": PlacementOnly()} {
		if err := cfg.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestConfigErrors: each field out of range is refused by name.
func TestConfigErrors(t *testing.T) {
	for field, spoil := range map[string]func(*Config){
		"Admission":                 func(c *Config) { c.Admission = 0 },
		"Reserve":                   func(c *Config) { c.Reserve = 9 },
		"ProtectedShare":            func(c *Config) { c.ProtectedShare = 0 },
		"StaticCap":                 func(c *Config) { c.StaticCap = -1 },
		"ClassFloorShare":           func(c *Config) { c.ClassFloorShare = 1.5 },
		"ReadmitBelowShare":         func(c *Config) { c.ReadmitBelowShare = math.NaN() },
		"Placement":                 func(c *Config) { c.Placement = Placement{} },
		"Footprint.PriorTokens":     func(c *Config) { c.Footprint.PriorTokens = math.Inf(1) },
		"Footprint.WindowSessions":  func(c *Config) { c.Footprint.WindowSessions = 1 },
		"Caps.PeriodSeconds":        func(c *Config) { c.Caps.PeriodSeconds = 0 },
		"Caps.Margin":               func(c *Config) { c.Caps.Margin = -1 },
		"Pressure.ConfirmWindows":   func(c *Config) { c.Pressure.ConfirmWindows = 0 },
		"Pressure.MaxContractShare": func(c *Config) { c.Pressure.MaxContractShare = 2 },
		"DefaultClass":              func(c *Config) { c.DefaultClass = "" },
		"MaxClasses":                func(c *Config) { c.MaxClasses = 0 },
		"MaxIndexBlocks":            func(c *Config) { c.MaxIndexBlocks = 0 },
	} {
		cfg := DefaultConfig()
		spoil(&cfg)
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), field+" =") {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// TestTimeNeverRunsBack: a late stamp counts as now.
func TestTimeNeverRunsBack(t *testing.T) {
	c := mustCore(t, DefaultConfig())
	c.Step(&Tick{At: 100 * second}, nil)
	out := c.Step(&InstanceJoined{At: 5 * second, Instance: "a", CapacityBlocks: 10_000, BlockTokens: 16}, nil)
	if len(out) != 1 || out[0].At != 100*second {
		t.Fatalf("%+v", out)
	}
}

// TestClassesAreBounded: labels beyond the bound count as the default class, and
// so does none; every session is still served.
func TestClassesAreBounded(t *testing.T) {
	cfg := DefaultConfig()
	cfg.MaxClasses = 3
	w := newWorld(t, cfg, 1)
	w.join("a", 1<<20, 0)
	for n := range 20 {
		w.ask(w.open(ClassID(fmt.Sprint("class-", n)), GroupID{}, 160, 0))
		w.ask(w.open("", GroupID{}, 160, 0))
	}
	if n := len(w.core.classList); n != 3 && n != 4 {
		t.Fatalf("%d classes", n)
	}
	if in := w.core.instances[0]; in.protected() != 40 {
		t.Fatalf("%d of 40 admitted", in.protected())
	}
	if n := w.core.classes["default"]; n == nil || n.arrivals < 20 {
		t.Fatalf("default class: %+v", n)
	}
}

// TestLostRemovalsHeal: an index that holds more of an instance than fits in it is
// forgotten, costs nobody the protection, and fills again as turns end.
func TestLostRemovalsHeal(t *testing.T) {
	w := newWorld(t, DefaultConfig(), 1)
	w.join("a", 5000, 0)
	r := w.open("agent", GroupID{}, 1600, 0)
	w.ask(r)
	w.step(&BlocksStored{At: w.now, Instance: "a", Blocks: r.hashes})
	w.end(r, 0, false)
	for n := range 80 {
		var garbage []BlockHash
		for i := range 100 {
			garbage = append(garbage, BlockHash(1<<50+n*1000+i))
		}
		w.step(&BlocksStored{At: w.now, Instance: "a", Blocks: garbage})
	}
	if n := w.core.index.InstanceBlocks(0); n > 7500 {
		t.Fatalf("%d blocks indexed of an instance of 5000", n)
	}
	w.now += 10 * second
	if out := w.ask(r); len(out) != 1 || out[0].Reason != Continuation || out[0].Numbers.PredictedCachedTokens != 0 {
		t.Fatalf("after the index was forgotten: %+v", out)
	}
	w.end(r, 0, false)
	w.now += 10 * second
	if out := w.ask(r); out[0].Reason != Continuation || out[0].Numbers.PredictedCachedTokens != 1600 {
		t.Fatalf("after a turn ended: %+v", out)
	}
}

// TestPlacementIsPluggable: the policy sees who passes, and a choice out of range
// does no harm.
func TestPlacementIsPluggable(t *testing.T) {
	cfg := DefaultConfig()
	var seen []Candidate
	choice := 1
	cfg.Placement = Placement{Name: "test", Choose: func(r *Request, candidates []Candidate) int {
		seen = append(seen[:0], candidates...)
		return choice
	}}
	w := newWorld(t, cfg, 1)
	for _, id := range []InstanceID{"c", "a", "b"} {
		w.join(id, 5000, 0)
	}
	w.step(&InstanceDraining{Instance: "b", Draining: true})
	out := w.ask(w.open("agent", GroupID{}, 160, 0))
	if len(seen) != 2 || seen[0].Instance != "a" || seen[1].Instance != "c" || out[0].Instance != "c" || out[0].Numbers.RunnerUp != "a" {
		t.Fatalf("candidates %+v, decision %+v", seen, out)
	}
	choice = 7
	if out := w.ask(w.open("agent", GroupID{}, 160, 0)); out[0].Instance != "a" {
		t.Fatalf("choice out of range: %+v", out)
	}
}

// TestLeastLoaded: the fewest turns in flight win, whatever is cached; ties go to
// who has waited longest.
func TestLeastLoaded(t *testing.T) {
	cfg := DefaultConfig()
	cfg.Placement = LeastLoaded
	w := newWorld(t, cfg, 1)
	w.join("a", 50_000, 0)
	w.join("b", 50_000, 0)
	var went []InstanceID
	var first *rollout
	for range 4 {
		r := w.open("agent", GroupID{}, 16_000, 0)
		w.ask(r)
		went = append(went, r.admittedAt)
		if first == nil {
			first = r
		}
	}
	w.end(first, 0, false)
	r := w.open("agent", GroupID{}, 160, 0)
	w.ask(r)
	if went = append(went, r.admittedAt); fmt.Sprint(went) != "[a b a b a]" {
		t.Fatal(went)
	}
}

// TestRerouteWhenItPays: a continuation leaves an instance whose prefill backlog
// costs more than a cold prefill elsewhere, unless somebody waits for that place.
func TestRerouteWhenItPays(t *testing.T) {
	w := newWorld(t, DefaultConfig(), 1)
	w.join("a", 50_000, 0)
	r := w.open("agent", GroupID{}, 16_000, 0)
	w.ask(r)
	w.end(r, 0, false)
	for range 8 { // 480,000 tokens at 50,000/s wait before it
		w.ask(w.open("agent", GroupID{}, 60_000, 0))
	}
	w.join("b", 50_000, 0)
	if out := w.ask(r); len(out) != 1 || out[0].Reason != ColdReroute || out[0].Instance != "b" {
		t.Fatalf("%+v", out)
	}
	if in := w.core.findInstance("b"); in.protected() != 1 {
		t.Fatalf("b protects %d", in.protected())
	}
}

// TestPlacementOnlyFollowsThePrefix: without admission each turn goes where it is
// cheapest, and nothing is ever held while an instance fits.
func TestPlacementOnlyFollowsThePrefix(t *testing.T) {
	w := newWorld(t, PlacementOnly(), 1)
	w.join("a", 1000, 0)
	w.join("b", 1000, 0)
	var rollouts []*rollout
	for range 200 { // far more than would fit
		r := w.open("agent", GroupID{}, 4000, 0)
		if out := w.ask(r); out[len(out)-1].Kind != Admit {
			t.Fatalf("%+v", out)
		}
		rollouts = append(rollouts, r)
	}
	for _, id := range []InstanceID{"a", "b"} {
		w.step(&BlocksStored{At: w.now, Instance: id}) // both begin to tell of their caches
	}
	r := rollouts[0]
	w.end(r, 0, false)
	other := InstanceID("a")
	if w.where[r.id] == "a" {
		other = "b"
	}
	w.step(&BlocksStored{At: w.now, Instance: other, Blocks: r.hashes})
	w.step(&BlocksRemoved{At: w.now, Instance: w.where[r.id], Blocks: r.hashes})
	if out := w.ask(r); out[0].Instance != other || out[0].Numbers.PredictedCachedTokens != 4000 {
		t.Fatalf("its prefix is at %s: %+v", other, out)
	}
}

// TestColdStartCap: at a cold start the short sessions finish first. The base cap
// must not follow them up while the long ones are still running.
func TestColdStartCap(t *testing.T) {
	caps := func(aware bool) int {
		cfg := DefaultConfig()
		cfg.Footprint.CensoringAware = aware
		cfg.Footprint.FloorByLive = false
		cfg.Caps.Margin = 1
		cfg.Caps.Margin, cfg.Caps.RiseShare = 1, 10
		w := newWorld(t, cfg, 1)
		w.join("a", 200_000, 0)
		var long []*rollout
		for range 60 { // of three sessions two are short and one grows to 80,000 tokens
			short := w.open("agent", GroupID{}, 1000, 0)
			w.ask(short)
			w.now += second
			w.end(short, 1000, false)
			w.finish(short, Completed)
			r := w.open("agent", GroupID{}, 1000, 0)
			w.ask(r)
			long = append(long, r)
		}
		for range 30 {
			w.now += 10 * second
			snap := &Snapshot{At: w.now, TakenAt: w.now, Instance: "a", Running: len(long)}
			for _, r := range long {
				r.prompt += 500
				snap.Sessions = append(snap.Sessions, SnapshotSession{Session: r.id, Tokens: r.prompt, CachedBlocks: -1, Running: true})
			}
			w.step(snap)
		}
		return w.core.instances[0].baseCap
	}
	// 3.04 million tokens are protected: 38 sessions of 80,000, some 76 of half that.
	aware, plain := caps(true), caps(false)
	if plain < 1000 {
		t.Errorf("counting finished sessions alone should let the cap explode: %d", plain)
	}
	if aware > 200 || aware < 40 {
		t.Errorf("censoring-aware cap %d (plain %d)", aware, plain)
	}
}

// TestHotPathAllocatesNothing: requests, starts, ends, snapshots and block events
// of a pool at work leave no garbage.
func TestHotPathAllocatesNothing(t *testing.T) {
	c := mustCore(t, DefaultConfig())
	now := second
	for _, id := range []InstanceID{"a", "b", "c"} {
		c.Step(&InstanceJoined{At: now, Instance: id, CapacityBlocks: 3000, BlockTokens: 16}, nil)
	}
	var out []Decision
	var ask TurnRequested
	var start TurnStarted
	var end TurnEnded
	var over SessionEnded
	var stored BlocksStored
	var removed BlocksRemoved
	snap := Snapshot{Sessions: make([]SnapshotSession, 1)}
	hashes := make([]BlockHash, 100)
	next := 0
	cycle := func() {
		next++
		now += second / 10
		id := sid(next % 50)
		for i := range hashes {
			hashes[i] = BlockHash(next%50*1000 + i)
		}
		ask = TurnRequested{At: now, Session: id, Class: "agent", Group: gid(1 + next%5), PromptTokens: 1600, SharedTokens: 800, NewBlocks: hashes}
		out = c.Step(&ask, out[:0])
		start = TurnStarted{At: now, Session: id}
		out = c.Step(&start, out)
		stored = BlocksStored{At: now, Instance: "a", Blocks: hashes}
		out = c.Step(&stored, out)
		snap.At, snap.TakenAt, snap.Instance = now, now, "a"
		snap.Sessions[0] = SnapshotSession{Session: id, Tokens: 1700, CachedBlocks: 100}
		out = c.Step(&snap, out)
		end = TurnEnded{At: now, Session: id, OutputTokens: 160, CachedTokens: 800}
		out = c.Step(&end, out)
		ask = TurnRequested{At: now, Session: id, Class: "agent", Turn: 1, PromptTokens: 1800, KnownBlocks: 100}
		out = c.Step(&ask, out)
		over = SessionEnded{At: now, Session: sid((next + 25) % 50), Status: Completed}
		out = c.Step(&over, out)
		removed = BlocksRemoved{At: now, Instance: "a", Blocks: hashes[50:]}
		out = c.Step(&removed, out)
	}
	for range 2000 {
		cycle()
	}
	if n := testing.AllocsPerRun(2000, cycle); n > 0 {
		t.Fatalf("%.2f allocations in a cycle of eight events", n)
	}
}

// TestReportAndExplain: the operator's view agrees with what decisions said, and
// asking for it changes nothing.
func TestReportAndExplain(t *testing.T) {
	w := newWorld(t, MISAT(), 1)
	w.join("b", 5000, 0)
	w.join("a", 5000, 0)
	var held *rollout
	for range 12 {
		r := w.open("agent", GroupID{}, 20_000, 0)
		if w.ask(r); r.admittedAt == "" {
			held = r
		}
	}
	w.ask(w.open("rlhf", GroupID{}, 160, 0))
	w.now += 7 * second
	w.step(&Tick{At: w.now})
	before := w.core.Describe()
	r := w.core.Report()
	if len(r.Instances) != 2 || r.Instances[0].Instance != "a" || len(r.Classes) != 2 || r.Classes[0].Class != "agent" || r.Sessions != 13 {
		t.Fatalf("%+v", r)
	}
	agent := r.Classes[0]
	if agent.Pending+agent.Held != 12 || agent.Held == 0 || agent.OldestHoldNanos != 7*second {
		t.Fatalf("%+v", agent)
	}
	for _, in := range r.Instances {
		if in.Cap < 1 || in.Protected > in.Cap || in.ReservedBlocks > in.BudgetBlocks || in.Classes[0].Demand != in.Classes[0].Protected+agent.Held || in.Classes[0].QuotaBlocks == 0 {
			t.Fatalf("%+v", in)
		}
	}
	if d, ok := w.core.Explain(held.id); !ok || d.Kind != Hold || d.Numbers.HeldNanos != 7*second {
		t.Fatalf("%t %+v", ok, d)
	}
	if d, ok := w.core.Explain(sid(1)); !ok || d.Kind != Admit || d.Reason != NewSession {
		t.Fatalf("%t %+v", ok, d)
	}
	if _, ok := w.core.Explain(sid(999)); ok {
		t.Fatal("an unknown session was explained")
	}
	if w.core.Describe() != before {
		t.Fatal("looking changed the state")
	}
}

// TestUnseenSessionsCountAsGrown: without snapshots a session that was admitted
// small is not taken to be small for ever.
func TestUnseenSessionsCountAsGrown(t *testing.T) {
	w := newWorld(t, DefaultConfig(), 1)
	w.join("a", 100_000, 0)
	for range 10 {
		w.ask(w.open("rlvr", GroupID{}, 160, 0))
	}
	young := w.core.Report().Instances[0].ReservedBlocks
	w.tick(120)
	if grown := w.core.Report().Instances[0].ReservedBlocks; grown <= young {
		t.Fatalf("%d blocks reserved after two minutes, %d at first", grown, young)
	}
}
