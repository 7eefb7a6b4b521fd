package router

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
)

// TestRandomStreams feeds random but lawful event streams, with instances that
// come, go, drain and reset, and checks invariants after every step. In the end
// everything left is driven to completion: every held turn must be admitted,
// every reservation released.
func TestRandomStreams(t *testing.T) {
	variants := map[string]func() Config{
		"holdfast": DefaultConfig, "misa-t": MISAT, "misa-t-borrow": MISATBorrow, "misa-t-paper": MISATPaper, "misa": MISA,
		"session-admission": SessionAdmission, "placement-only": PlacementOnly,
	}
	for _, name := range sortedKeys(variants) {
		for seed := range uint64(4) {
			t.Run(fmt.Sprintf("%s/%d", name, seed), func(t *testing.T) {
				cfg := variants[name]()
				// Small references, so that caps, quotas and budgets all bind.
				cfg.Footprint.PriorTokens, cfg.Footprint.PriorSeconds = 2000, 60
				w := randomWorld(t, cfg, seed)
				for range 400 {
					w.randomEvent()
				}
				w.drain()
				again := replay(t, cfg, w.log)
				if !bytes.Equal(again.text, w.text) || again.core.Describe() != w.core.Describe() {
					t.Fatal("the same log gave other decisions or another state")
				}
			})
		}
	}
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

type replayed struct {
	core *Core
	text []byte
}

func replay(t *testing.T, cfg Config, log []Event) replayed {
	r := replayed{core: mustCore(t, cfg)}
	for _, ev := range log {
		for _, d := range r.core.Step(ev, nil) {
			r.text = fmt.Appendf(r.text, "%+v\n", d)
		}
	}
	return r
}

func randomWorld(t *testing.T, cfg Config, seed uint64) *world {
	w := newWorld(t, cfg, seed)
	w.join("a", 1000, 0)
	w.join("b", 1500, 20_000)
	return w
}

// pick returns a random live rollout that satisfies ok, or nil.
func (w *world) pick(ok func(*rollout) bool) *rollout {
	live := w.order[:0]
	var fit []*rollout
	for _, id := range w.order {
		r := w.rollouts[id]
		if r == nil {
			continue
		}
		live = append(live, id)
		if ok(r) {
			fit = append(fit, r)
		}
	}
	w.order = live
	if len(fit) == 0 {
		return nil
	}
	return fit[w.rng.IntN(len(fit))]
}

func (w *world) randomEvent() {
	w.now += Nanos(w.rng.Int64N(int64(2 * second)))
	rng := w.rng
	switch n := rng.IntN(100); {
	case n < 22:
		if len(w.rollouts) > 60 {
			return
		}
		class := []ClassID{"agent", "rlvr", "rlhf", ""}[rng.IntN(4)]
		prompt := int64(16 + rng.IntN(6000))
		if rng.IntN(40) == 0 {
			prompt = 30_000 // fits no instance at times
		}
		group, shared := GroupID{}, int64(0)
		if rng.IntN(3) == 0 {
			group, shared = gid(1+rng.IntN(5)), prompt/2
		}
		w.ask(w.open(class, group, prompt, shared))
	case n < 40:
		if r := w.pick(func(r *rollout) bool { return r.admittedAt != "" && !r.started }); r != nil {
			w.start(r)
		}
	case n < 62:
		if r := w.pick(func(r *rollout) bool { return r.admittedAt != "" }); r != nil {
			w.end(r, int64(rng.IntN(800)), rng.IntN(10) == 0)
		}
	case n < 76:
		if r := w.pick(func(r *rollout) bool { return !r.asked }); r != nil {
			if r.avoid != "" {
				w.askAgain(r)
				return
			}
			r.prompt += int64(rng.IntN(500))
			w.ask(r)
		}
	case n < 84:
		if r := w.pick(func(*rollout) bool { return true }); r != nil {
			w.finish(r, EndStatus(1+rng.IntN(5)))
		}
	case n < 86:
		if r := w.pick(func(r *rollout) bool { return r.asked }); r != nil {
			before := r.admittedAt
			w.step(&TurnRequested{At: w.now, Session: r.id, Class: r.class, Group: r.group, Turn: r.turn, PromptTokens: r.prompt, SharedTokens: r.shared, KnownBlocks: r.known, Deadline: w.now + Nanos(rng.Int64N(int64(1000*second)))})
			if r.admittedAt != before && before != "" {
				w.t.Fatalf("a repeated request moved %x from %s to %s", r.id, before, r.admittedAt)
			}
		}
	case n < 90:
		w.randomSnapshot()
	case n < 94:
		w.randomBlocks()
	case n < 96:
		w.step(&Tick{At: w.now})
	default:
		w.randomInstanceEvent()
	}
}

func (w *world) anyInstance() InstanceID {
	return []InstanceID{"a", "b", "c"}[w.rng.IntN(3)]
}

func (w *world) randomSnapshot() {
	at := w.anyInstance()
	ev := &Snapshot{At: w.now, TakenAt: w.now - Nanos(w.rng.Int64N(int64(20*second))), Instance: at, Running: w.rng.IntN(10), Waiting: w.rng.IntN(10), UsedBlocks: 100}
	for _, id := range w.order {
		if r := w.rollouts[id]; r != nil && w.rng.IntN(3) > 0 {
			ev.Sessions = append(ev.Sessions, SnapshotSession{Session: id, Tokens: r.prompt + int64(w.rng.IntN(300)), CachedBlocks: int64(w.rng.IntN(200)) - 1})
		}
	}
	w.step(ev)
}

func (w *world) randomBlocks() {
	at := w.anyInstance()
	r := w.pick(func(r *rollout) bool { return len(r.hashes) > 0 })
	if r == nil {
		return
	}
	n := w.rng.IntN(len(r.hashes) + 1)
	switch w.rng.IntN(5) {
	case 0:
		w.step(&BlocksRemoved{At: w.now, Instance: at, Blocks: slices.Clone(r.hashes[n:])})
	case 1:
		w.step(&BlocksCleared{At: w.now, Instance: at})
	default:
		w.step(&BlocksStored{At: w.now, Instance: at, Blocks: slices.Clone(r.hashes[:n])})
	}
}

func (w *world) randomInstanceEvent() {
	at := w.anyInstance()
	_, joined := w.joins[at]
	switch w.rng.IntN(5) {
	case 0:
		if joined {
			w.leave(at)
		}
	case 1:
		w.join(at, 500+int64(w.rng.IntN(2000)), []int64{0, 8000, 20_000, 40_000}[w.rng.IntN(4)])
	case 2:
		w.step(&InstanceDraining{At: w.now, Instance: at, Draining: w.rng.IntN(3) == 0})
	case 3:
		w.step(&InstanceReset{At: w.now, Instance: at})
	case 4:
		w.step(&ObservabilityChanged{At: w.now, Instance: at, State: Observability(w.rng.IntN(3))})
	}
}

// drain lets every rollout make one more turn and finish, with all instances up.
func (w *world) drain() {
	for _, id := range []InstanceID{"a", "b", "c"} {
		w.join(id, 4000, 0)
		w.step(&InstanceDraining{At: w.now, Instance: id})
		w.step(&ObservabilityChanged{At: w.now, Instance: id})
	}
	for range 10_000 {
		if len(w.rollouts) == 0 {
			break
		}
		w.now += second
		if r := w.pick(func(r *rollout) bool { return r.admittedAt != "" }); r != nil {
			w.end(r, 10, false)
			w.finish(r, Completed)
			continue
		}
		if r := w.pick(func(r *rollout) bool { return !r.asked }); r != nil {
			if r.turn >= 0 && r.avoid != "" {
				w.askAgain(r)
			} else {
				w.ask(r)
			}
			continue
		}
		w.tick(1)
	}
	if len(w.rollouts) > 0 {
		w.t.Fatalf("%d rollouts wait for ever:\n%s", len(w.rollouts), w.core.Describe())
	}
	for _, in := range w.core.instances {
		if in.protected() != 0 || in.reservedBlocks != 0 || in.liveBlocks != 0 || in.inFlight != 0 || in.backlogTokens != 0 {
			w.t.Fatalf("left behind:\n%s", w.core.Describe())
		}
	}
	if len(w.core.sessions) != 0 || len(w.core.groups) != 0 || len(w.where) != 0 {
		w.t.Fatalf("left behind:\n%s", w.core.Describe())
	}
}
