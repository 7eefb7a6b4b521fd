package weights

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"holdfast/orchestrator/engine"
	"holdfast/router"
	"holdfast/store"
)

// work is what is to be done to one instance.
type work struct {
	update   store.WeightUpdate
	instance store.Instance
	row      store.WeightInstance
	goal     store.WeightPlace
	// reached is how far the instance came, and notes what did not stop it.
	reached store.WeightPlace
	notes   []string
}

// observing tells whether the trainer makes the calls to the engine.
func (w *work) observing() bool {
	return w.update.Control == store.ControlObserve || w.instance.Control == store.ControlObserve
}

func (w *work) note(err error) { w.notes = append(w.notes, err.Error()) }

// work brings an instance to its goal and writes how that went, unless the goal
// has changed meanwhile.
func (c *Coordinator) work(ctx context.Context, w *work) {
	w.reached = w.row.Reached
	if w.row.State != store.PlaceRefused && w.row.State != store.PlaceGone && w.row.Problem != "" {
		w.notes = append(w.notes, w.row.Problem)
	}
	var err error
	if !w.observing() {
		err = c.perform(ctx, w)
	}
	if ctx.Err() != nil {
		return
	}
	state, problem := w.goal, strings.Join(w.notes, "; ")
	if err != nil {
		c.cfg.Logger.Error("an engine refused a step of a weight update", "instance", w.instance.ID, "policy_version", w.update.PolicyVersion,
			"goal", w.goal, "error", err)
		state, problem = store.PlaceRefused, err.Error()
	} else {
		w.reached = w.goal
	}
	if err := c.mark(ctx, &w.update, w.instance.ID, state, w.reached, problem); err != nil && ctx.Err() == nil {
		c.cfg.Logger.Warn("writing an instance's place in a weight update failed, trying again", "instance", w.instance.ID, "error", err)
	}
}

// perform makes the calls. Its error is the engine's refusal.
func (c *Coordinator) perform(ctx context.Context, w *work) error {
	controller, err := c.controllerOf(w)
	if err != nil {
		if w.goal == store.PlaceResumed {
			w.note(err)
			return nil // it was never paused
		}
		return err
	}
	switch {
	case w.goal == store.PlacePaused:
		limit := time.Duration(w.update.PauseTimeoutSeconds * float64(time.Second))
		return c.within(ctx, limit, func(ctx context.Context) error { return c.pause(ctx, w, controller) })
	case w.goal == store.PlacePrepared:
		return c.within(ctx, c.cfg.Limits.CommitTimeout, func(ctx context.Context) error { return c.prepare(ctx, w, controller) })
	case w.update.State == store.WeightCancelling:
		limit := c.cfg.Limits.CommitTimeout + c.cfg.Limits.ResumeTimeout
		return c.within(ctx, limit, func(ctx context.Context) error { return c.restore(ctx, w, controller) })
	}
	return c.within(ctx, c.cfg.Limits.ResumeTimeout, func(ctx context.Context) error { return c.resume(ctx, w, controller) })
}

// within bounds a step and says so where the bound was what ended it.
func (c *Coordinator) within(ctx context.Context, limit time.Duration, step func(context.Context) error) error {
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := step(bounded)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		return fmt.Errorf("not within %s: %w", limit, err)
	}
	return err
}

// pause pauses the engine. Where it is to finish what it has, it does so first:
// engines differ in what they do with requests that come meanwhile, and none do.
func (c *Coordinator) pause(ctx context.Context, w *work, controller engine.Controller) error {
	mode, err := engine.ParsePauseMode(w.update.Mode)
	if err != nil {
		return err
	}
	if mode == engine.PauseWait {
		if err := c.drained(ctx, router.InstanceID(w.instance.ID)); err != nil {
			return err
		}
	}
	if err := c.insist(ctx, func() error { return controller.Pause(ctx, mode) }); err != nil {
		return fmt.Errorf("pausing: %w", err)
	}
	w.reached = store.PlacePaused
	return nil
}

// prepare parts with the old prefixes and names the new weights. The trainer has
// loaded them by now, so an engine that cannot be paused is no reason to stop.
func (c *Coordinator) prepare(ctx context.Context, w *work, controller engine.Controller) error {
	if !w.reached.AtLeast(store.PlacePaused) {
		pausing, cancel := context.WithTimeout(ctx, c.cfg.Limits.CommitTimeout/2)
		err := c.pause(pausing, w, controller)
		cancel()
		if err != nil {
			w.note(err)
		}
	}
	if w.update.Cache == store.CacheReset {
		if err := c.resetCache(ctx, w, controller); err != nil {
			return err
		}
	}
	return c.name(ctx, w, controller, w.update.PolicyVersion)
}

// resetCache empties the engine's prefix cache. A refusal means that requests are
// pending: where they were to be aborted, some slipped in behind the pause.
func (c *Coordinator) resetCache(ctx context.Context, w *work, controller engine.Controller) error {
	err := c.insist(ctx, func() error {
		err := controller.ResetCache(ctx)
		if err != nil && w.update.Mode == engine.PauseAbort.String() && classOf(err) == engine.RetryHere {
			if pauseErr := controller.Pause(ctx, engine.PauseAbort); pauseErr != nil {
				return errors.Join(err, pauseErr)
			}
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("resetting the prefix cache: %w", err)
	}
	return nil
}

// name tells the engine its policy version. One that has no name for its weights
// serves all the same: the version is then known here alone.
func (c *Coordinator) name(ctx context.Context, w *work, controller engine.Controller, version int64) error {
	label := strconv.FormatInt(version, 10)
	err := c.insist(ctx, func() error { return controller.SetWeightVersion(ctx, label) })
	switch {
	case err == nil:
		c.mu.Lock()
		m := c.member(router.InstanceID(w.instance.ID))
		m.label, m.labeled = label, true
		c.mu.Unlock()
	case classOf(err) == engine.FailTurn:
		w.note(fmt.Errorf("it took no name for its weights: %w", err))
	default:
		return fmt.Errorf("naming its weights: %w", err)
	}
	return nil
}

// resume lets the engine go on. One without the call was never paused by it.
func (c *Coordinator) resume(ctx context.Context, w *work, controller engine.Controller) error {
	if w.update.AdvancedAt != nil && w.instance.PolicyVersion != w.update.PolicyVersion {
		w.note(errors.New("it was away when the version came into force: register it again once it has the new weights"))
	}
	err := c.insist(ctx, func() error { return controller.Resume(ctx) })
	var answered *engine.Error
	if errors.As(err, &answered) && (answered.StatusCode == http.StatusNotFound || answered.StatusCode == http.StatusMethodNotAllowed) {
		w.note(err)
		return nil
	}
	if err != nil {
		return fmt.Errorf("resuming: %w", err)
	}
	return nil
}

// restore lets the engine go on with its old weights, which the trainer has put
// back if it had changed them.
func (c *Coordinator) restore(ctx context.Context, w *work, controller engine.Controller) error {
	if w.reached.AtLeast(store.PlacePrepared) {
		if err := c.resetCache(ctx, w, controller); err != nil {
			return err
		}
		if err := c.name(ctx, w, controller, w.update.FromVersion); err != nil {
			return err
		}
	}
	return c.resume(ctx, w, controller)
}

// insist repeats a call until it succeeds, the engine says that it never will, or
// ctx ends; the error is then the engine's last.
func (c *Coordinator) insist(ctx context.Context, call func() error) error {
	var last error
	for {
		err := call()
		if err == nil {
			return nil
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		if ctx.Err() != nil || classOf(err) == engine.FailTurn {
			return last
		}
		timer := time.NewTimer(c.cfg.Limits.RetryInterval)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return last
		}
	}
}

// classOf is the class of an engine's error, RetryElsewhere for any other.
func classOf(err error) engine.Class {
	var e *engine.Error
	if errors.As(err, &e) {
		return e.Class
	}
	return engine.RetryElsewhere
}
