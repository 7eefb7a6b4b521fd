package sim

import (
	"holdfast/router"
	"holdfast/router/sim/instance"
	"holdfast/router/sim/workload"
)

// trainerState is the trainer's side of a run.
type trainerState struct {
	// next is the task to release, read ahead so that its size is known.
	next    Task
	hasNext bool
	tasks   int64
	// released, ended and outstanding count samples.
	released    int64
	outstanding int

	// Batches: ready holds the classes of completed samples in order of completion.
	ready      []uint8
	training   bool
	iterations int
	batchAt    int64
	consumed   []int
}

// release starts tasks for as long as the trainer may.
func (w *world) release() {
	if w.cfg.Trainer.ArrivalsPerSecond > 0 {
		return
	}
	t := &w.trainer
	for !w.done && w.failure == nil {
		if !t.hasNext {
			t.next, t.hasNext = w.cfg.Source.Task(t.tasks), true
		}
		n := len(t.next.Members)
		// A task larger than the ceiling goes alone.
		if t.outstanding > 0 && t.outstanding+n > w.cfg.Trainer.OuterConcurrency {
			return
		}
		if b := w.cfg.Trainer.Batches; b != nil && t.released+int64(n) > int64(t.iterations+1+b.Staleness)*int64(b.Samples) {
			return
		}
		t.hasNext = false
		w.startTask(t.next)
	}
}

// arrive releases the open loop's next task and draws when the one after comes.
func (w *world) arrive() {
	t := &w.trainer
	task := w.cfg.Source.Task(t.tasks)
	meanSeconds := float64(len(task.Members)) / w.cfg.Trainer.ArrivalsPerSecond
	w.queue.push(w.now+nanos(w.rng.ExpFloat64()*meanSeconds), taskArrived, 0)
	w.startTask(task)
}

// startTask makes a task's sessions and asks for the first turn of each.
func (w *world) startTask(task Task) {
	t := &w.trainer
	t.tasks++
	g := &group{id: idOf(len(w.groups)), releasedAt: w.now, left: len(task.Members)}
	chain := w.classChain[task.Class]
	shared := task.ClassSharedTokens
	if len(task.Members) > 1 {
		g.prompt = task.Members[0].SharedTokens
		chain = &instance.Chain{ID: groupChains + uint64(len(w.groups)), Parent: chain, SharedTokens: min(shared, g.prompt)}
		shared = g.prompt
	}
	w.groups = append(w.groups, g)
	first := len(w.sessions)
	for _, plan := range task.Members {
		s := &session{
			index: len(w.sessions), class: task.Class, group: int32(len(w.groups) - 1), plan: plan,
			contextTokens: plan.PromptTokens, home: -1, releasedAt: w.now,
		}
		w.giveSlot(s)
		s.label = w.labelOf(s)
		s.chain = &instance.Chain{ID: sessionChains + uint64(s.index), Parent: chain, SharedTokens: min(shared, plan.PromptTokens)}
		w.sessions = append(w.sessions, s)
		t.released++
		t.outstanding++
		w.metrics.released(w, s)
	}
	for i := range task.Members {
		w.ask(w.sessions[first+i])
	}
}

// labelOf is what the policy is told of a session's class.
func (w *world) labelOf(s *session) router.ClassID {
	class := s.class
	if l := w.cfg.Labels; l.Confused > 0 || l.Missing > 0 {
		// Drawn per session number, so that every policy is told the same.
		r := workload.Source(w.cfg.Seed, "labels", int64(s.index))
		x := r.Float64()
		if x < l.Missing {
			return ""
		}
		if x < l.Missing+l.Confused && len(w.classes) > 1 {
			class = (class + 1 + r.IntN(len(w.classes)-1)) % len(w.classes)
		}
	}
	return router.ClassID(w.classes[class].Name)
}

// giveSlot gives a session its id.
func (w *world) giveSlot(s *session) {
	s.number = len(w.slots)
	if n := len(w.freeSlots); n > 0 {
		s.number = w.freeSlots[n-1]
		w.freeSlots = w.freeSlots[:n-1]
		w.slots[s.number] = s
	} else {
		w.slots = append(w.slots, s)
	}
	s.id = idOf(s.number)
}

// freeSlot lets the id go; only a run that reuses ids gives it out again.
func (w *world) freeSlot(s *session) {
	w.slots[s.number] = nil
	w.sessions[s.index] = nil
	if w.cfg.Labels.ReuseIDs {
		w.freeSlots = append(w.freeSlots, s.number)
	}
}

// sampleDone gives the trainer a completed sample.
func (w *world) sampleDone(s *session) {
	t := &w.trainer
	t.outstanding--
	if w.cfg.Trainer.Batches != nil {
		t.ready = append(t.ready, uint8(s.class))
		w.consume()
	}
	w.release()
}

// consume starts training on the next batch as soon as it is complete.
func (w *world) consume() {
	t, b := &w.trainer, w.cfg.Trainer.Batches
	if t.training || len(t.ready) < b.Samples {
		return
	}
	if t.consumed == nil {
		t.consumed = make([]int, len(w.classes))
	}
	for _, class := range t.ready[:b.Samples] {
		t.consumed[class]++
	}
	t.ready = t.ready[:copy(t.ready, t.ready[b.Samples:])]
	t.training = true
	w.queue.push(w.now+nanos(b.TrainSeconds), trained, 0)
}

// beginSync stops all engines for the new weights.
func (w *world) beginSync() {
	w.pauseAll(instance.PauseAll)
	w.queue.push(w.now+nanos(w.cfg.Trainer.Batches.SyncSeconds), synced, 0)
}

// endSync starts the next iteration under new weights.
func (w *world) endSync() {
	t := &w.trainer
	w.newWeights()
	t.training = false
	t.iterations++
	w.metrics.iterated(w, float64(w.now-t.batchAt)/1e9)
	t.batchAt = w.now
	if t.iterations == w.cfg.Trainer.Batches.Iterations {
		w.done = true
		return
	}
	w.consume()
	w.release()
}

func (w *world) pauseAll(mode instance.PauseMode) {
	for _, e := range w.engines {
		if e.up {
			w.advance(e)
			e.in.Pause(mode)
			e.stale = true
		}
	}
}

// newWeights clears every cache and lets the engines go on.
func (w *world) newWeights() {
	w.version++
	w.pauseAll(instance.Running)
	for _, e := range w.engines {
		if !e.up {
			continue
		}
		e.in.ResetCache()
		w.tell(&router.InstanceReset{At: w.now, Instance: e.id, PolicyVersion: w.version})
	}
}
