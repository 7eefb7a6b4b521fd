package router

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// TestGoldens runs the scripts in testdata: each command is an event (its time is
// advanced by "after" seconds), its output the decisions, or the whole state.
// Every step is checked for invariants. Rewrite with -rewrite, then read the diff.
func TestGoldens(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		g := &golden{t: t}
		datadriven.RunTest(t, path, g.run)
	})
}

// golden is one script's state.
type golden struct {
	t    *testing.T
	core *Core
	now  Nanos
	args map[string]string
}

func (g *golden) run(t *testing.T, d *datadriven.TestData) string {
	g.t = t
	g.args = map[string]string{}
	for _, a := range d.CmdArgs {
		g.args[a.Key] = strings.Join(a.Vals, ",")
	}
	g.now += nanos(g.float("after"))
	if d.Cmd == "new" {
		return g.make()
	}
	if d.Cmd == "describe" {
		return g.core.Describe()
	}
	var b strings.Builder
	for range max(1, g.int("times")) {
		for _, decision := range g.core.Step(g.event(d.Cmd), nil) {
			b.WriteString(decisionText(&decision))
		}
		if err := g.core.CheckInvariants(); err != nil {
			t.Fatalf("%s: %v", d.Pos, err)
		}
		g.now += nanos(g.float("every"))
	}
	return b.String()
}

func (g *golden) make() string {
	variants := map[string]func() Config{
		"": DefaultConfig, "holdfast": DefaultConfig, "misa-t": MISAT, "misa-t-paper": MISATPaper,
		"misa": MISA, "session-admission": SessionAdmission, "placement-only": PlacementOnly,
	}
	cfg := variants[g.args["variant"]]()
	if v := g.float("prior"); v > 0 {
		cfg.Footprint.PriorTokens = v
	}
	cfg.StaticCap = g.int("static-cap")
	if _, set := g.args["plain"]; set {
		// The reference does not move, so that the script says what caps are.
		cfg.Caps.PeriodSeconds = 1e9
	}
	if v, set := g.args["borrow"]; set {
		cfg.Borrow = v == "true"
	}
	if v := g.float("min-tokens"); v > 0 {
		cfg.Pressure.MinTokens = int64(v)
	}
	core, err := New(cfg)
	if err != nil {
		return err.Error() + "\n"
	}
	g.core, g.now = core, g.now+second
	return ""
}

func (g *golden) event(cmd string) Event {
	s, turn, in := sid(g.int("s")), g.int("turn"), InstanceID(g.args["at"])
	tokens := int64(g.int("tokens"))
	var group GroupID
	if n := g.int("group"); n > 0 {
		group = gid(n)
	}
	switch cmd {
	case "join":
		return &InstanceJoined{At: g.now, Instance: in, CapacityBlocks: int64(g.int("blocks")), BlockTokens: 16, MaxContextTokens: int64(g.int("context")), PrefillTokensPerSecond: g.float("mu"), PolicyVersion: int64(g.int("version"))}
	case "leave":
		return &InstanceLeft{At: g.now, Instance: in}
	case "drain":
		return &InstanceDraining{At: g.now, Instance: in, Draining: g.args["off"] == ""}
	case "reset":
		return &InstanceReset{At: g.now, Instance: in, PolicyVersion: int64(g.int("version"))}
	case "ask":
		ev := &TurnRequested{At: g.now, Session: s, Class: ClassID(g.args["class"]), Group: group, Turn: turn, PromptTokens: tokens, SharedTokens: int64(g.int("shared")), KnownBlocks: g.int("known"), Avoid: InstanceID(g.args["avoid"])}
		if v := g.float("due"); v > 0 {
			ev.Deadline = g.now + nanos(v)
		}
		ev.NewBlocks = g.hashes()
		return ev
	case "start":
		return &TurnStarted{At: g.now, Session: s, Turn: turn}
	case "end":
		ev := &TurnEnded{At: g.now, Session: s, Turn: turn, Instance: in, CachedTokens: -1, OutputTokens: int64(g.int("out")), Failed: g.args["failed"] != ""}
		if v, set := g.args["cached"]; set {
			ev.CachedTokens, _ = strconv.ParseInt(v, 10, 64)
		}
		return ev
	case "over":
		status := Completed
		if g.args["status"] == "cancelled" {
			status = Cancelled
		}
		return &SessionEnded{At: g.now, Session: s, Status: status}
	case "stored":
		return &BlocksStored{At: g.now, Instance: in, Blocks: g.hashes()}
	case "removed":
		return &BlocksRemoved{At: g.now, Instance: in, Blocks: g.hashes()}
	case "see":
		state := map[string]Observability{"fresh": Fresh, "degraded": Degraded, "blind": Blind}[g.args["state"]]
		return &ObservabilityChanged{At: g.now, Instance: in, State: state}
	case "restore":
		ev := &SessionRestored{At: g.now, Session: s, Class: ClassID(g.args["class"]), Group: group, Turn: turn, PromptTokens: tokens, Instance: in, InFlight: g.args["inflight"] != ""}
		if in != "" {
			ev.AdmittedAt = g.now - 5*second
		} else {
			ev.HeldSince = g.now - nanos(g.float("held"))
		}
		return ev
	case "snapshot":
		ev := &Snapshot{At: g.now, TakenAt: g.now - nanos(g.float("age")), Instance: in, Running: g.int("running"), Waiting: g.int("waiting")}
		for _, n := range g.numbers("sessions") {
			ev.Sessions = append(ev.Sessions, SnapshotSession{Session: sid(n), Tokens: tokens, CachedBlocks: int64(g.int("cached")), Running: true})
		}
		return ev
	case "tick":
		return &Tick{At: g.now}
	}
	g.t.Fatalf("unknown command %q", cmd)
	return nil
}

func (g *golden) int(key string) int {
	if g.args[key] == "" {
		return 0
	}
	n, err := strconv.Atoi(g.args[key])
	if err != nil {
		g.t.Fatalf("%s=%s: %v", key, g.args[key], err)
	}
	return n
}

func (g *golden) float(key string) float64 {
	if g.args[key] == "" {
		return 0
	}
	v, err := strconv.ParseFloat(g.args[key], 64)
	if err != nil {
		g.t.Fatalf("%s=%s: %v", key, g.args[key], err)
	}
	return v
}

func (g *golden) numbers(key string) (list []int) {
	for _, text := range strings.Split(g.args[key], ",") {
		if n, err := strconv.Atoi(text); err == nil {
			list = append(list, n)
		}
	}
	return list
}

// hashes are written as (session, first, count).
func (g *golden) hashes() []BlockHash {
	n := g.numbers("blocks")
	if len(n) != 3 {
		return nil
	}
	var list []BlockHash
	for i := range n[2] {
		list = append(list, BlockHash(n[0]<<20+n[1]+i))
	}
	return list
}

// decisionText is one line with what the decision was made from.
func decisionText(d *Decision) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s", d.Kind, d.Reason)
	if d.Session != (SessionID{}) {
		fmt.Fprintf(&b, " s=%s %s turn=%d", strings.TrimLeft(hex.EncodeToString(d.Session[:]), "0"), d.Class, d.Turn)
	}
	if d.Instance != "" {
		fmt.Fprintf(&b, " at=%s", d.Instance)
	}
	n := &d.Numbers
	if n.BaseCap > 0 {
		fmt.Fprintf(&b, " cap=%d/%d protected=%d pending=%d reserved=%d+%d/%d", n.Cap, n.BaseCap, n.Protected, n.Pending, n.ReservedBlocks, n.ReserveBlocks, n.BudgetBlocks)
	}
	if n.ClassCap > 0 {
		fmt.Fprintf(&b, " class=%d/%d quota=%d", n.ClassProtected, n.ClassCap, n.ClassQuotaBlocks)
	}
	if n.Demand > 0 {
		fmt.Fprintf(&b, " N=%d k=%s T=%s", n.Demand, short(n.KBarBlocks), short(n.TBarSeconds))
	}
	if n.PromptTokens > 0 {
		fmt.Fprintf(&b, " L=%d H=%d cost=%s", n.PromptTokens, n.PredictedCachedTokens, short(n.CostSeconds))
	}
	if n.LargestContextTokens > 0 {
		fmt.Fprintf(&b, " largest=%d", n.LargestContextTokens)
	}
	if n.RunnerUp != "" {
		fmt.Fprintf(&b, " next=%s:%s", n.RunnerUp, short(n.RunnerUpCostSeconds))
	}
	if n.HeldNanos > 0 {
		fmt.Fprintf(&b, " held=%s", stamp(n.HeldNanos))
	}
	if d.Kind == Hold {
		fmt.Fprintf(&b, " ahead=%d", n.AheadInOrder)
	}
	return b.String() + "\n"
}
