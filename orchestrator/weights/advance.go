package weights

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"holdfast/orchestrator/engine"
	"holdfast/router"
	"holdfast/store"
)

// job is the work on one instance towards one goal.
type job struct {
	version int64
	attempt int
	goal    store.WeightPlace
	cancel  context.CancelFunc
	done    chan struct{}
	// endedIn is the round of reconcile in which it ended: what that round read of the
	// store may be from before.
	endedIn int64
}

// goalOf is where the update wants every instance; empty while it waits to be asked.
func goalOf(u *store.WeightUpdate) store.WeightPlace {
	switch u.State {
	case store.WeightPausing, store.WeightPaused:
		return store.PlacePaused
	case store.WeightCommitting:
		if u.AdvancedAt == nil {
			return store.PlacePrepared
		}
		return store.PlaceResumed
	case store.WeightCancelling:
		return store.PlaceResumed
	}
	return ""
}

// stepOf is the step that the update fails in while it is on its way to its goal.
func stepOf(u *store.WeightUpdate) store.WeightStep {
	switch {
	case u.State == store.WeightCancelling:
		return store.StepCancel
	case u.State != store.WeightCommitting:
		return store.StepPause
	case u.AdvancedAt == nil:
		return store.StepCommit
	}
	return store.StepResume
}

// advance works on every instance that is short of the update's goal, and moves
// the update on when none is left.
func (c *Coordinator) advance(ctx context.Context, u *store.WeightUpdate, listed []store.Instance) error {
	goal := goalOf(u)
	if goal == "" {
		c.dropJobs()
		return nil
	}
	waiting := 0
	var refusals []store.WeightInstance
	registered := make(map[string]bool, len(listed))
	for i := range listed {
		in := &listed[i]
		if in.Expired {
			continue
		}
		registered[in.ID] = true
		row := u.Instance(in.ID)
		busy, err := c.attend(ctx, u, in, row, goal)
		switch {
		case err != nil:
			return err
		case busy:
			waiting++
		case row.State == store.PlaceRefused:
			refusals = append(refusals, row)
		}
	}
	for _, row := range u.Instances {
		if registered[row.Instance] || row.State == store.PlaceGone {
			continue
		}
		c.dropJob(router.InstanceID(row.Instance))
		if err := c.mark(ctx, u, row.Instance, store.PlaceGone, row.Reached, "it left the pool during the update"); err != nil {
			return err
		}
	}
	if waiting > 0 {
		return nil
	}
	return c.settle(ctx, u, refusals, len(registered))
}

// attend sees to one instance and tells whether it must be waited for.
func (c *Coordinator) attend(ctx context.Context, u *store.WeightUpdate, in *store.Instance, row store.WeightInstance, goal store.WeightPlace) (busy bool, err error) {
	id := router.InstanceID(in.ID)
	c.mu.Lock()
	m := c.member(id)
	up, restarted, silentSince := m.up, m.restarted, m.downSince
	m.restarted = m.restarted && !up
	c.mu.Unlock()
	switch {
	case !up && time.Since(silentSince) < c.cfg.Limits.GoneAfter:
		c.dropJob(id)
		return true, nil
	case !up:
		c.dropJob(id)
		if row.State == store.PlaceGone {
			return false, nil
		}
		return true, c.mark(ctx, u, in.ID, store.PlaceGone, row.Reached, fmt.Sprintf("it did not answer for %s", c.cfg.Limits.GoneAfter))
	case restarted && row.Reached != store.PlacePending:
		c.dropJob(id)
		return true, c.mark(ctx, u, in.ID, store.PlacePending, store.PlacePending, "it came back during the update and is brought along anew")
	case row.State == store.PlaceRefused && row.Attempt == u.Attempt:
		return false, nil
	case row.State != store.PlaceRefused && row.State != store.PlaceGone && row.Reached.AtLeast(goal):
		return false, nil
	}
	c.ensureJob(ctx, u, in, row, goal)
	return true, nil
}

// settle moves an update on whose instances have all come as far as they will.
func (c *Coordinator) settle(ctx context.Context, u *store.WeightUpdate, refusals []store.WeightInstance, present int) error {
	log := c.cfg.Logger.With("policy_version", u.PolicyVersion)
	if len(refusals) > 0 {
		problem := fmt.Sprintf("%d of %d instances refused to %s: %s: %s", len(refusals), present, stepOf(u), names(refusals), refusals[0].Problem)
		log.Error("a weight update failed and waits to be asked again", "step", stepOf(u), "problem", problem)
		_, err := c.cfg.Store.SettleWeightUpdate(ctx, c.cfg.Epoch, u, store.WeightFailed, stepOf(u), problem)
		return err
	}
	var to store.WeightState
	switch {
	case u.State == store.WeightPausing:
		to = store.WeightPaused
	case u.State == store.WeightCancelling:
		to = store.WeightCancelled
	case u.State == store.WeightCommitting && u.AdvancedAt == nil:
		advanced, err := c.cfg.Store.AdvanceWeights(ctx, c.cfg.Epoch, u)
		if advanced {
			log.Info("a policy version is in force", "instances", present)
		}
		c.notify()
		return err
	case u.State == store.WeightCommitting:
		to = store.WeightCommitted
	default:
		return nil
	}
	settled, err := c.cfg.Store.SettleWeightUpdate(ctx, c.cfg.Epoch, u, to, "", "")
	if settled {
		log.Info("a weight update moved on", "state", to, "instances", present)
	}
	c.notify()
	return err
}

func names(rows []store.WeightInstance) string {
	list := make([]string, len(rows))
	for i := range rows {
		list[i] = rows[i].Instance
	}
	slices.Sort(list)
	return strings.Join(list, ", ")
}

// ensureJob starts the work on an instance, unless it is under way.
func (c *Coordinator) ensureJob(ctx context.Context, u *store.WeightUpdate, in *store.Instance, row store.WeightInstance, goal store.WeightPlace) {
	id := router.InstanceID(in.ID)
	before := c.jobs[id]
	if before != nil {
		same := before.version == u.PolicyVersion && before.attempt == u.Attempt && before.goal == goal
		if same && (!closed(before.done) || before.endedIn >= c.round.Load()) {
			return
		}
		before.cancel()
	}
	working, cancel := context.WithCancel(ctx)
	j := &job{version: u.PolicyVersion, attempt: u.Attempt, goal: goal, cancel: cancel, done: make(chan struct{})}
	c.jobs[id] = j
	w := work{update: *u, instance: *in, row: row, goal: goal}
	c.running.Go(func() {
		defer close(j.done)
		defer cancel()
		if before != nil {
			// Calls to one engine follow each other: what an earlier one does late
			// must not undo what a later one did.
			<-before.done
		}
		if working.Err() == nil {
			c.work(working, &w)
		}
		j.endedIn = c.round.Load()
		c.notify()
	})
}

func closed(done chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}

// dropJob ends the work on an instance; what starts after it waits for its end.
func (c *Coordinator) dropJob(id router.InstanceID) {
	if j := c.jobs[id]; j != nil {
		j.cancel()
	}
}

func (c *Coordinator) dropJobs() {
	for id, j := range c.jobs {
		j.cancel()
		if closed(j.done) {
			delete(c.jobs, id)
		}
	}
}

func (c *Coordinator) mark(ctx context.Context, u *store.WeightUpdate, instance string, state, reached store.WeightPlace, problem string) error {
	return c.cfg.Store.MarkWeightInstance(ctx, c.cfg.Epoch, store.WeightMark{
		Pool: c.cfg.Pool, PolicyVersion: u.PolicyVersion, Instance: instance, Attempt: u.Attempt,
		State: state, Reached: reached, Problem: problem,
	})
}

// controllerOf is nil for an instance whose weights others change.
func (c *Coordinator) controllerOf(w *work) (engine.Controller, error) {
	controller, ok := c.cfg.Engines.Controller(router.InstanceID(w.instance.ID))
	if !ok {
		return nil, fmt.Errorf("engines of kind %s have no calls for weight updates: pause it yourself and use control observe", w.instance.Kind)
	}
	return controller, nil
}
