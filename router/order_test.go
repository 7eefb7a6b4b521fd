package router

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// overload is a pool under more demand than it can take, in which every stay ends
// within maxStay: the conditions of the bound on hold age in docs/router.md.
type overload struct {
	w         *world
	rng       *rand.Rand
	instances int
	maxStay   Nanos
	ends      map[SessionID]Nanos
	waits     map[SessionID]*wait
	checked   int
}

// wait is what a held session may count on: the sessions ahead of it when it came.
type wait struct {
	since    Nanos
	class    ClassID
	ahead    int
	overtook int
}

func newOverload(t *testing.T, cfg Config, seed uint64) *overload {
	cfg.Footprint.PriorTokens = 1600
	cfg.Caps.PeriodSeconds = 1e9
	cfg.Pressure.Enabled = false
	o := &overload{w: newWorld(t, cfg, seed), rng: rand.New(rand.NewPCG(seed, 7)), maxStay: 30 * second,
		ends: map[SessionID]Nanos{}, waits: map[SessionID]*wait{}}
	o.instances = 1 + o.rng.IntN(3)
	for i := range o.instances {
		o.w.join(InstanceID(fmt.Sprint("engine-", i)), 300+int64(o.rng.IntN(400)), 0)
	}
	return o
}

// note applies decisions and checks each admission against the bound.
func (o *overload) note(out []Decision) {
	for i := range out {
		d := &out[i]
		if d.Kind == Hold && o.waits[d.Session] == nil {
			o.waits[d.Session] = &wait{since: o.w.now, class: d.Class, ahead: d.Numbers.AheadInOrder}
		}
		if d.Kind != Admit {
			continue
		}
		o.ends[d.Session] = o.w.now + Nanos(o.rng.Int64N(int64(o.maxStay)))
		own := o.waits[d.Session]
		delete(o.waits, d.Session)
		for _, other := range o.waits {
			// A re-admission that came later and went first.
			if d.Reason == Readmission && (own == nil || own.since > other.since) {
				other.overtook++
			}
		}
		if own == nil {
			continue
		}
		o.checked++
		before := own.ahead + own.overtook + 1
		rounds := Nanos((before + o.instances - 1) / o.instances)
		if limit := 2*o.maxStay*rounds + 2*second; o.w.now-own.since > limit {
			o.w.t.Fatalf("%x (%s) was held %s; with %d before it at %d instances the bound is %s",
				d.Session, d.Class, stamp(o.w.now-own.since), before, o.instances, stamp(limit))
		}
	}
}

// run feeds an overload for so many seconds, one step a second: sessions of every
// class and size, most of one turn, some that come back after their prefix was
// evicted. The arrivals of one class alone would fill the pool.
func (o *overload) run(seconds int) {
	w := o.w
	for range seconds {
		w.now += second
		for _, id := range w.order {
			if r := w.rollouts[id]; r != nil && r.admittedAt != "" && w.now >= o.ends[id] {
				o.leave(r)
			}
		}
		w.pick(func(*rollout) bool { return true }) // forgets those that ended
		for range o.rng.IntN(3) {
			class := []ClassID{"agent", "agent", "agent", "rlvr", "rlhf"}[o.rng.IntN(5)]
			prompt := int64(160 + o.rng.IntN(3000))
			if o.rng.IntN(20) == 0 {
				prompt = 4700 // almost a whole small instance
			}
			o.note(w.ask(w.open(class, GroupID{}, prompt, 0)))
		}
		o.note(w.step(&Tick{At: w.now}))
	}
	if o.checked < seconds/20 {
		w.t.Fatalf("only %d held sessions were admitted in %d s", o.checked, seconds)
	}
	for _, own := range o.waits {
		before := own.ahead + own.overtook + 1
		if limit := 2*o.maxStay*Nanos((before+o.instances-1)/o.instances) + 2*second; w.now-own.since > limit {
			w.t.Fatalf("a session of %s still waits after %s, bound %s", own.class, stamp(w.now-own.since), stamp(limit))
		}
	}
}

// leave ends an admitted session's stay: mostly its life, else its protection.
func (o *overload) leave(r *rollout) {
	w := o.w
	at := r.admittedAt
	o.note(w.step(&BlocksStored{At: w.now, Instance: at, Blocks: r.hashes}))
	w.end(r, 16, false)
	o.note(w.out)
	if r.turn > 2 || o.rng.IntN(4) > 0 {
		w.finish(r, Completed)
		o.note(w.out)
		return
	}
	o.note(w.step(&BlocksRemoved{At: w.now, Instance: at, Blocks: r.hashes}))
	r.prompt += 100
	w.now += 2 * second
	o.note(w.ask(r))
}

// TestHoldBound checks the bound on hold age under overload, with and without
// classes and borrowing.
func TestHoldBound(t *testing.T) {
	for name, cfg := range map[string]Config{"holdfast": DefaultConfig(), "misa-t-borrow": MISATBorrow(), "misa-t": MISAT(), "misa": MISA(), "session-admission": SessionAdmission()} {
		for seed := range uint64(2) {
			t.Run(fmt.Sprintf("%s/%d", name, seed), func(t *testing.T) {
				newOverload(t, cfg, seed).run(220)
			})
		}
	}
}

// TestOrderIsKept: without classes nobody is admitted where an earlier session,
// that could go there, still waits.
func TestOrderIsKept(t *testing.T) {
	for seed := range uint64(3) {
		o := newOverload(t, SessionAdmission(), seed)
		held := func() (list []*session) {
			for _, cl := range o.w.core.classList {
				for tier := range cl.queues {
					list = append(list, cl.queues[tier].sessions[cl.queues[tier].head:]...)
				}
			}
			return list
		}
		for range 200 {
			before := map[SessionID]slot{}
			for _, s := range held() {
				before[s.id] = slot{s.base, s.seq}
			}
			o.run1(func(d *Decision) {
				own, waited := before[d.Session]
				if d.Kind != Admit || d.Reason == Continuation || !waited {
					return
				}
				for _, s := range held() {
					earlier, was := before[s.id]
					in := o.w.core.findInstance(d.Instance)
					if was && earlier.compare(own) < 0 && in.fits(s) {
						t.Fatalf("seed %d: %x went to %s before %x", seed, d.Session, d.Instance, s.id)
					}
				}
			})
		}
	}
}

// run1 is one second of overload, with every decision shown to a function.
func (o *overload) run1(show func(*Decision)) {
	w := o.w
	w.now += second
	see := func() {
		for i := range w.out {
			show(&w.out[i])
		}
		o.note(w.out)
	}
	for _, id := range w.order {
		if r := w.rollouts[id]; r != nil && r.admittedAt != "" && w.now >= o.ends[id] {
			w.end(r, 16, false)
			see()
			w.finish(r, Completed)
			see()
		}
	}
	w.pick(func(*rollout) bool { return true })
	for range o.rng.IntN(4) {
		class := []ClassID{"agent", "rlvr", "rlhf"}[o.rng.IntN(3)]
		w.ask(w.open(class, GroupID{}, int64(160+o.rng.IntN(4000)), 0))
		see()
	}
}

// TestDeadlinesKeepTheMixture: the same load with deadlines admits the same
// sequence of classes as without, and only other sessions of them.
func TestDeadlinesKeepTheMixture(t *testing.T) {
	for seed := range uint64(5) {
		sequence := func(wishes bool) (classes []ClassID, ids []SessionID) {
			rng := rand.New(rand.NewPCG(seed, 5))
			cfg := SessionAdmission()
			cfg.Footprint.PriorTokens = 1600
			w := newWorld(t, cfg, seed)
			w.join("a", 410, 0)
			var live []*rollout
			for n := range 300 {
				w.now += second
				class := []ClassID{"agent", "rlvr", "rlhf"}[rng.IntN(3)]
				due := Nanos(0)
				if d := Nanos(rng.Int64N(int64(2000 * second))); wishes {
					due = w.now + d
				}
				r := w.open(class, GroupID{}, 160, 0)
				r.turn, r.asked = 0, true
				w.step(&TurnRequested{At: w.now, Session: r.id, Class: class, PromptTokens: 160, Deadline: due, FreshBy: due})
				collect := func() {
					for i := range w.out {
						if d := &w.out[i]; d.Kind == Admit {
							classes, ids = append(classes, d.Class), append(ids, d.Session)
							live = append(live, w.rollouts[d.Session])
						}
					}
				}
				collect()
				if n%2 == 0 && len(live) > 0 {
					r := live[0]
					live = live[1:]
					r.asked = false
					w.finish(r, Cancelled)
					collect()
				}
			}
			return classes, ids
		}
		plain, ids := sequence(false)
		wished, others := sequence(true)
		if fmt.Sprint(plain) != fmt.Sprint(wished) {
			t.Fatalf("seed %d: deadlines changed which classes were admitted when", seed)
		}
		if fmt.Sprint(ids) == fmt.Sprint(others) {
			t.Fatalf("seed %d: deadlines changed nothing at all", seed)
		}
	}
}
