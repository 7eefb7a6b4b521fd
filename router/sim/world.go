package sim

import (
	"fmt"
	"math"
	"math/rand/v2"

	"holdfast/router"
	"holdfast/router/sim/instance"
)

// world is one run in progress: the truth and the clock.
type world struct {
	cfg     Config
	spec    Spec
	policy  Policy
	now     int64
	endAt   int64
	done    bool
	queue   eventQueue
	rng     *rand.Rand
	engines []*engine
	// undrained: some engine's inbox may have something in it.
	undrained bool
	version   int64

	classes    []ClassShare
	classChain []*instance.Chain
	sessions   []*session
	// slots maps the number in a session id to the session that bears it now.
	slots     []*session
	freeSlots []int
	groups    []*group
	trainer   trainerState

	messages       []message
	freeMessages   []int32
	spareSnapshots []*router.Snapshot
	gapFactor      float64

	decisions []router.Decision
	hashes    []router.BlockHash
	failure   error
	metrics   metrics

	// Events are reused: the policy keeps none.
	asked   router.TurnRequested
	started router.TurnStarted
	turned  router.TurnEnded
	over    router.SessionEnded
	stored  router.BlocksStored
	removed router.BlocksRemoved
	tick    router.Tick
}

// engine is one instance and what surrounds it.
type engine struct {
	index  int
	id     router.InstanceID
	params instance.Params
	in     *instance.Instance
	up     bool
	// nextAt is the next time at which something may happen inside; stale says
	// that it must be asked for again.
	nextAt int64
	stale  bool
	inbox  []instance.Event
	// sessions whose last turn was here and that have not ended.
	sessions []*session
	feed     blockFeed
	// lost sums the counters of earlier lives of the instance.
	lost instance.Stats
}

// Run simulates one configuration under one policy.
func Run(cfg Config, spec Spec) (*Result, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	w := &world{
		cfg: cfg, spec: spec, classes: cfg.Source.Classes(), gapFactor: 1, version: 1,
		rng:   rand.New(rand.NewPCG(cfg.Seed, 0x5eed)),
		endAt: nanos(cfg.WarmUpSeconds + cfg.MeasureSeconds),
	}
	if cfg.Trainer.Batches != nil {
		w.endAt = math.MaxInt64
	}
	var err error
	if w.policy, err = spec.New(truth{w}); err != nil {
		return nil, fmt.Errorf("making policy %s: %w", spec.Name, err)
	}
	for b := range w.classes {
		w.classChain = append(w.classChain, &instance.Chain{ID: classChains + uint64(b)})
	}
	w.metrics.init(w)
	for i, p := range cfg.Instances {
		e := &engine{index: i, id: router.InstanceID(fmt.Sprintf("w%02d", i)), params: p}
		w.engines = append(w.engines, e)
		if err := w.start(e); err != nil {
			return nil, err
		}
	}
	w.schedule()
	w.release()
	w.loop()
	if w.failure != nil {
		return nil, fmt.Errorf("running policy %s under seed %d: %w", spec.Name, cfg.Seed, w.failure)
	}
	return w.metrics.result(w), nil
}

// schedule queues everything that happens by the clock.
func (w *world) schedule() {
	period := nanos(w.cfg.Observed.SnapshotPeriodSeconds)
	for i := range w.engines {
		if w.spec.Wants.Snapshots {
			// Instances are scraped one after the other, not all at once.
			w.queue.push(period*int64(i+1)/int64(len(w.engines)), snapshotTaken, int32(i))
		}
		if w.spec.Wants.Blocks {
			w.queue.push(nanos(w.cfg.Observed.BlockPeriodSeconds), blocksFlushed, int32(i))
		}
	}
	if w.spec.Wants.TickSeconds > 0 {
		w.queue.push(nanos(w.spec.Wants.TickSeconds), ticked, 0)
	}
	for i, f := range w.cfg.Faults {
		w.queue.push(nanos(f.StartSeconds), faultStarted, int32(i))
		w.queue.push(nanos(f.EndSeconds), faultEnded, int32(i))
	}
	if w.cfg.WarmUpSeconds > 0 {
		w.queue.push(nanos(w.cfg.WarmUpSeconds), measuringStarted, 0)
	} else {
		w.metrics.begin(w)
	}
	if w.cfg.SeriesSeconds > 0 {
		w.queue.push(nanos(w.cfg.SeriesSeconds), sampled, 0)
	}
	if w.cfg.Trainer.ArrivalsPerSecond > 0 {
		w.queue.push(0, taskArrived, 0)
	}
}

// loop moves the clock from event to event.
func (w *world) loop() {
	for !w.done && w.failure == nil {
		next, at := w.nextEngine()
		if len(w.queue.heap) > 0 && w.queue.heap[0].at <= at {
			at, next = w.queue.heap[0].at, nil
		}
		if at > w.endAt || at == math.MaxInt64 {
			w.now = w.endAt
			break
		}
		w.now = at
		if next != nil {
			w.advance(next)
		} else {
			w.handle(w.queue.pop())
		}
		w.drain()
	}
	for _, e := range w.engines {
		if e.up && w.failure == nil {
			w.advance(e)
		}
	}
}

func (w *world) nextEngine() (*engine, int64) {
	var best *engine
	bestAt := int64(math.MaxInt64)
	for _, e := range w.engines {
		if e.stale {
			e.stale = false
			e.nextAt = math.MaxInt64
			if e.up {
				if at, ok := e.in.NextEvent(); ok {
					e.nextAt = at
				}
			}
		}
		if e.nextAt < bestAt {
			best, bestAt = e, e.nextAt
		}
	}
	return best, bestAt
}

// advance brings an engine up to the clock and puts what happened in its inbox.
func (w *world) advance(e *engine) {
	if e.in.Now() < w.now || e.nextAt <= w.now {
		e.inbox = e.in.Advance(w.now, e.inbox)
		e.stale = true
		w.undrained = w.undrained || len(e.inbox) > 0
	}
}

// drain handles what engines did until nothing is left to handle at this instant.
func (w *world) drain() {
	for w.undrained && w.failure == nil {
		w.undrained = false
		for _, e := range w.engines {
			for i := 0; i < len(e.inbox); i++ {
				w.engineDid(e, e.inbox[i])
			}
			e.inbox = e.inbox[:0]
		}
	}
}

func (w *world) handle(q queued) {
	switch q.kind {
	case gapEnded:
		s := w.sessions[q.subject]
		if s.home >= 0 {
			s.stay(w.now-s.finishedAt, s.contextTokens, s.contextTokens)
		}
		s.contextTokens += s.plan.Turns[s.turn].AppendTokens
		s.turn++
		w.ask(s)
	case turnRetried:
		w.ask(w.sessions[q.subject])
	case snapshotTaken:
		w.takeSnapshot(w.engines[q.subject])
	case blocksFlushed:
		w.flushBlocks(w.engines[q.subject])
	case messageArrived:
		w.deliver(q.subject)
	case ticked:
		w.tick.At = w.now
		w.tell(&w.tick)
		w.queue.push(w.now+nanos(w.spec.Wants.TickSeconds), ticked, 0)
	case taskArrived:
		w.arrive()
	case trained:
		w.beginSync()
	case synced:
		w.endSync()
	case faultStarted:
		w.startFault(w.cfg.Faults[q.subject])
	case faultEnded:
		w.endFault(w.cfg.Faults[q.subject])
	case measuringStarted:
		w.metrics.begin(w)
	case sampled:
		w.metrics.sample(w)
		w.queue.push(w.now+nanos(w.cfg.SeriesSeconds), sampled, 0)
	}
}

// ask tells the policy that a session's turn wants an instance.
func (w *world) ask(s *session) {
	s.state = asking
	s.askedAt = w.now
	w.asked = router.TurnRequested{
		At: w.now, Session: s.id, Class: s.label, Turn: s.turn,
		PromptTokens: int64(s.contextTokens), Avoid: s.avoid,
	}
	s.avoid = ""
	if g := w.groups[s.group]; g.prompt > 0 {
		w.asked.Group, w.asked.SharedTokens = g.id, int64(g.prompt)
	}
	if w.spec.Wants.Blocks {
		w.asked.KnownBlocks, w.asked.NewBlocks = w.newBlocks(s)
	}
	w.tell(&w.asked)
}

// tell passes an event to the policy and carries out its decisions.
func (w *world) tell(ev router.Event) {
	w.decisions = w.policy.Step(ev, w.decisions[:0])
	for i := range w.decisions {
		d := &w.decisions[i]
		switch d.Kind {
		case router.Admit:
			w.admit(d)
		case router.CapChanged:
			w.metrics.capChanged(w, d)
		}
	}
}

// admit sends a turn to an engine.
func (w *world) admit(d *router.Decision) {
	s := w.find(d.Session)
	e := w.engineNamed(d.Instance)
	if s == nil || s.state != asking || s.turn != d.Turn || e == nil {
		w.fail(fmt.Errorf("at %.3f s: admission of session %x turn %d to %q, which nobody asked for",
			float64(w.now)/1e9, d.Session[:8], d.Turn, d.Instance))
		return
	}
	w.metrics.admitted(w, s)
	s.state = running
	s.admittedAt = w.now
	w.moveHome(s, e.index)
	if !e.up {
		w.failTurn(s, e)
		return
	}
	w.advance(e)
	err := e.in.Submit(instance.Request{
		ID: uint64(s.number), Chain: s.chain,
		PromptTokens: s.contextTokens, OutputTokens: s.plan.Turns[s.turn].OutputTokens,
	})
	if err != nil {
		w.fail(fmt.Errorf("submitting a turn to %s: %w", e.id, err))
	}
	e.stale = true
}

func (w *world) fail(err error) {
	if w.failure == nil {
		w.failure = err
	}
}

// engineDid handles one event of an engine.
func (w *world) engineDid(e *engine, ev instance.Event) {
	s := w.slots[ev.ID]
	switch ev.Kind {
	case instance.FirstToken:
		w.started = router.TurnStarted{At: w.now, Session: s.id, Turn: s.turn}
		w.tell(&w.started)
	case instance.Finished:
		w.finish(e, s, ev)
	}
}

// finish ends a turn, and the session with its last one.
func (w *world) finish(e *engine, s *session, ev instance.Event) {
	prompt := s.contextTokens
	s.stay(w.now-s.admittedAt, prompt, prompt+ev.OutputTokens)
	s.contextTokens += ev.OutputTokens
	s.finishedAt = w.now
	w.turned = router.TurnEnded{
		At: w.now, Session: s.id, Turn: s.turn, Instance: e.id,
		PromptTokens: int64(prompt), CachedTokens: int64(ev.CachedTokens), OutputTokens: int64(ev.OutputTokens),
		QueueNanos: ev.QueueNanos, PrefillNanos: ev.PrefillNanos,
	}
	w.metrics.finishedTurn(w, s, ev)
	last := s.turn == len(s.plan.Turns)-1
	if last {
		s.state = ended
	} else {
		s.state = inGap
		gap := s.plan.Turns[s.turn].GapSeconds * w.gapFactor
		w.queue.push(w.now+nanos(gap), gapEnded, int32(s.index))
	}
	w.tell(&w.turned)
	if last {
		w.endSession(s)
	}
}

// endSession takes a completed sample to the trainer.
func (w *world) endSession(s *session) {
	w.moveHome(s, -1)
	w.over = router.SessionEnded{At: w.now, Session: s.id, Status: router.Completed}
	w.tell(&w.over)
	w.metrics.completed(w, s)
	w.freeSlot(s)
	s.plan.Turns, s.chain = nil, nil
	w.sampleDone(s)
}

// moveHome keeps the lists of sessions by instance.
func (w *world) moveHome(s *session, to int) {
	if s.home == to {
		return
	}
	if s.home >= 0 {
		list := w.engines[s.home].sessions
		last := list[len(list)-1]
		list[s.homeIndex], last.homeIndex = last, s.homeIndex
		w.engines[s.home].sessions = list[:len(list)-1]
	}
	s.home = to
	if to >= 0 {
		e := w.engines[to]
		s.homeIndex = len(e.sessions)
		e.sessions = append(e.sessions, s)
	}
}

func (w *world) find(id router.SessionID) *session {
	if n := numberOf(id); n >= 0 && n < len(w.slots) {
		return w.slots[n]
	}
	return nil
}

func (w *world) engineNamed(id router.InstanceID) *engine {
	for _, e := range w.engines {
		if e.id == id {
			return e
		}
	}
	return nil
}

// nanos converts seconds, and stops at the end of time.
func nanos(seconds float64) int64 {
	if seconds >= math.MaxInt64/1e9 {
		return math.MaxInt64
	}
	return int64(seconds * 1e9)
}
