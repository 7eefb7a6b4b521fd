package router

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"holdfast/router/prefix"
)

// sid makes a readable session id.
func sid(n int) (id SessionID) {
	binary.BigEndian.PutUint64(id[8:], uint64(n))
	return id
}

func gid(n int) (id GroupID) {
	binary.BigEndian.PutUint64(id[8:], uint64(n))
	return id
}

const second = Nanos(1e9)

func mustCore(t testing.TB, cfg Config) *Core {
	t.Helper()
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// world is a client of the core that behaves as the service does, and keeps its
// own dumb ledger of what the decisions mean. Its only wit is to check them.
type world struct {
	t    testing.TB
	core *Core
	rng  *rand.Rand
	now  Nanos
	log  []Event
	out  []Decision
	text []byte

	rollouts map[SessionID]*rollout
	order    []SessionID
	nextID   int
	// live counts admitted, unfinished rollouts by instance, as decisions said.
	where map[SessionID]InstanceID
	joins map[InstanceID]*InstanceJoined
}

type rollout struct {
	id         SessionID
	class      ClassID
	group      GroupID
	turn       int
	prompt     int64
	shared     int64
	hashes     []BlockHash
	known      int
	asked      bool
	admittedAt InstanceID
	started    bool
	heldSince  Nanos
	avoid      InstanceID
}

func newWorld(t testing.TB, cfg Config, seed uint64) *world {
	return &world{
		t: t, core: mustCore(t, cfg), rng: rand.New(rand.NewPCG(seed, 1)),
		rollouts: map[SessionID]*rollout{}, where: map[SessionID]InstanceID{}, joins: map[InstanceID]*InstanceJoined{},
	}
}

func (w *world) step(ev Event) []Decision {
	w.t.Helper()
	w.log = append(w.log, ev)
	admitted := map[InstanceID]int{}
	w.out = w.core.Step(ev, w.out[:0])
	for i := range w.out {
		d := &w.out[i]
		w.text = fmt.Appendf(w.text, "%+v\n", *d)
		w.checkDecision(d, admitted)
	}
	if err := w.core.CheckInvariants(); err != nil {
		w.t.Fatalf("after %T %+v (event %d): %v", ev, ev, len(w.log), err)
	}
	w.checkFirst(ev)
	return w.out
}

// checkFirst demands that nobody waits in vain: whoever is first in the order has
// been admitted if any instance would take it.
func (w *world) checkFirst(ev Event) {
	if _, restoring := ev.(*SessionRestored); restoring {
		return
	}
	w.core.openInstances()
	w.core.rewindQueues(false)
	q := w.core.nextQueue()
	if q == nil {
		return
	}
	s := q.sessions[q.head]
	if s.reason == WaitingForWarm || w.core.waitsForSibling(s) {
		return
	}
	for _, in := range w.core.instances {
		if w.core.verdict(s, in, false) == 0 {
			w.t.Fatalf("after %T (event %d): %x is first and %s would take it, yet it is held", ev, len(w.log), s.id, in.id)
		}
	}
}

// checkDecision applies a decision to the dumb ledger and checks it against what
// the core may promise.
func (w *world) checkDecision(d *Decision, admitted map[InstanceID]int) {
	r := w.rollouts[d.Session]
	n := &d.Numbers
	switch d.Kind {
	case Admit:
		if r == nil || !r.asked {
			w.t.Fatalf("admitted %x, which asked for nothing: %+v", d.Session, d)
		}
		if d.Turn != r.turn {
			w.t.Fatalf("admitted turn %d of %x, asked for %d", d.Turn, d.Session, r.turn)
		}
		if _, joined := w.joins[d.Instance]; !joined {
			w.t.Fatalf("admitted to unknown instance %q", d.Instance)
		}
		if r.admittedAt != "" && r.admittedAt != d.Instance {
			w.t.Fatalf("turn %d of %x admitted to %s and to %s", d.Turn, d.Session, r.admittedAt, d.Instance)
		}
		if d.Reason != Continuation && w.core.cfg.Admission != AdmitAll && r.admittedAt == "" {
			if n.Protected >= n.Cap {
				w.t.Fatalf("new admission at or above the cap: %+v", d)
			}
			if n.Protected > 0 && w.core.cfg.Reserve != ReserveNone && n.ReservedBlocks+n.ReserveBlocks > n.BudgetBlocks {
				w.t.Fatalf("new admission above the budget: %+v", d)
			}
			if w.core.classCapped() && !w.core.cfg.Borrow && n.ClassProtected >= n.ClassCap {
				w.t.Fatalf("new admission at or above the class cap: %+v", d)
			}
			admitted[d.Instance]++
		}
		r.admittedAt = d.Instance
		w.where[d.Session] = d.Instance
	case Hold:
		if r == nil || !r.asked || r.admittedAt != "" {
			w.t.Fatalf("held %x, which waits for nothing", d.Session)
		}
	case ProtectionEnded:
		if w.where[d.Session] != d.Instance {
			w.t.Fatalf("protection of %x at %s ended twice: %+v", d.Session, d.Instance, d)
		}
		delete(w.where, d.Session)
	}
}

func (w *world) join(id InstanceID, blocks, maxContext int64) {
	ev := &InstanceJoined{At: w.now, Instance: id, CapacityBlocks: blocks, BlockTokens: 16, MaxContextTokens: maxContext, MaxRunning: 256, PrefillTokensPerSecond: 50_000}
	w.joins[id] = ev
	w.step(ev)
}

func (w *world) leave(id InstanceID) {
	delete(w.joins, id)
	w.step(&InstanceLeft{At: w.now, Instance: id})
	for _, r := range w.rollouts {
		if r.admittedAt == id {
			r.asked, r.admittedAt = false, "" // the service notices the failure
		}
	}
}

// open starts a rollout; ask sends its next turn.
func (w *world) open(class ClassID, group GroupID, prompt, shared int64) *rollout {
	w.nextID++
	r := &rollout{id: sid(w.nextID), class: class, group: group, turn: -1, prompt: prompt, shared: shared}
	w.rollouts[r.id] = r
	w.order = append(w.order, r.id)
	return r
}

func (w *world) ask(r *rollout) []Decision {
	r.turn++
	return w.askAgain(r)
}

func (w *world) askAgain(r *rollout) []Decision {
	w.t.Helper()
	if !r.asked {
		r.heldSince = w.now
	}
	r.asked, r.admittedAt, r.started = true, "", false
	for int64(len(r.hashes)) < r.prompt/16 {
		// Siblings share their prompt's hashes.
		base := uint64(binary.BigEndian.Uint64(r.id[8:])) << 32
		if int64(len(r.hashes)) < r.shared/16 {
			base = binary.BigEndian.Uint64(r.group[8:])<<32 | 1<<63
		}
		r.hashes = append(r.hashes, prefix.Hash(base+uint64(len(r.hashes))))
	}
	ev := &TurnRequested{At: w.now, Session: r.id, Class: r.class, Group: r.group, Turn: r.turn, PromptTokens: r.prompt,
		SharedTokens: r.shared, KnownBlocks: r.known, NewBlocks: r.hashes[r.known:], Avoid: r.avoid}
	r.known = len(r.hashes)
	r.avoid = ""
	return w.step(ev)
}

func (w *world) start(r *rollout) {
	r.started = true
	w.step(&TurnStarted{At: w.now, Session: r.id, Turn: r.turn})
}

func (w *world) end(r *rollout, output int64, failed bool) {
	at := r.admittedAt
	r.asked, r.admittedAt = false, ""
	ev := &TurnEnded{At: w.now, Session: r.id, Turn: r.turn, Instance: at, PromptTokens: r.prompt, CachedTokens: r.prompt / 2, OutputTokens: output, PrefillNanos: 1e8, Failed: failed}
	if failed {
		r.avoid = at
	}
	w.step(ev)
	if !failed {
		r.prompt += output
	}
}

func (w *world) finish(r *rollout, status EndStatus) {
	w.step(&SessionEnded{At: w.now, Session: r.id, Status: status})
	delete(w.rollouts, r.id)
}

func (w *world) tick(seconds float64) {
	w.now += nanos(seconds)
	w.step(&Tick{At: w.now})
}
