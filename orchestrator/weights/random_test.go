package weights

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"holdfast/orchestrator/engine"
	"holdfast/router"
	"holdfast/store"
)

// chaos is a world in which anything happens in any order.
type chaos struct {
	*world
	rng     *rand.Rand
	version int64
	down    map[router.InstanceID]bool
}

// TestWhateverHappensAnUpdateCanBeEnded: engines refuse, vanish and restart,
// owners change, the trainer asks for anything at any time. Once that is over, the
// update can be brought to an end, all engines run, and no request waits.
func TestWhateverHappensAnUpdateCanBeEnded(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			w := newWorld(t, 3)
			_ = w.stop()
			w.limits.GoneAfter, w.limits.CommitTimeout, w.limits.ResumeTimeout = 30*time.Millisecond, 60*time.Millisecond, 60*time.Millisecond
			w.own()
			c := &chaos{world: w, rng: rand.New(rand.NewPCG(seed, 1)), version: 1, down: map[router.InstanceID]bool{}}
			for range 60 {
				c.step()
			}
			c.calm()
		})
	}
}

// step does one thing, or lets the coordinator come to rest.
func (c *chaos) step() {
	id := router.InstanceID(fmt.Sprintf("e%d", 1+c.rng.IntN(3)))
	switch c.rng.IntN(10) {
	case 0, 1, 2:
		c.ask()
	case 3:
		call := []string{"pause", "reset", "name", "resume"}[c.rng.IntN(4)]
		refusals := []func(){
			func() { c.engines[id].refuses(call, nil) },
			func() { c.engines[id].refuses(call, always(engine.FailTurn, "no")) },
			func() { c.engines[id].refuses(call, always(engine.RetryHere, "busy")) },
		}
		refusals[c.rng.IntN(len(refusals))]()
	case 4:
		if !c.down[id] {
			c.down[id] = true
			c.leave(string(id))
		}
	case 5:
		c.back(id, c.rng.IntN(2) == 0)
	case 6:
		_ = c.stop()
		c.own() // which finds all engines up
		clear(c.down)
	default:
		c.rest()
	}
}

// back lets an engine answer again, as it was or as a new process.
func (c *chaos) back(id router.InstanceID, restarted bool) {
	if !c.down[id] {
		return
	}
	if restarted {
		c.engines[id].restart()
	}
	c.down[id] = false
	c.join(string(id))
}

// ask asks for something that may be out of place.
func (c *chaos) ask() {
	c.t.Helper()
	var err error
	switch c.rng.IntN(3) {
	case 0:
		mode := []string{"abort", "wait", "keep"}[c.rng.IntN(3)]
		_, err = c.BeginWeightUpdate(c.ctx, store.NewWeightUpdate{Pool: pool, PolicyVersion: c.version, Mode: mode, Cache: store.CacheReset, Control: store.ControlManage, PauseTimeoutSeconds: 0.06})
	case 1:
		cache := []store.WeightCache{"", store.CacheSalt}[c.rng.IntN(2)]
		_, err = c.CommitWeightUpdate(c.ctx, pool, c.version, cache)
	case 2:
		_, err = c.CancelWeightUpdate(c.ctx, pool, c.version)
	}
	var conflict *store.ConflictError
	var field *store.FieldError
	if errors.As(err, &field) && field.Path == "policy_version" {
		c.version++ // the present one has come into force meanwhile
		return
	}
	if err != nil && !errors.As(err, &conflict) && !errors.Is(err, store.ErrNotFound) {
		c.t.Fatal(err)
	}
}

// rest waits until the open update, if any, waits to be asked.
func (c *chaos) rest() (u store.WeightUpdate, open bool) {
	c.t.Helper()
	c.eventually("the update to come to rest", func() bool {
		var err error
		if u, open, err = c.OpenWeightUpdate(c.ctx, pool); err != nil {
			c.t.Fatal(err)
		}
		return !open || u.State == store.WeightPaused || u.State == store.WeightFailed
	})
	return u, open
}

// calm lets everything work again, ends the open update and looks at the engines.
func (c *chaos) calm() {
	c.t.Helper()
	for id, f := range c.engines {
		for _, call := range []string{"pause", "reset", "name", "resume"} {
			f.refuses(call, nil)
		}
		if c.rng.IntN(2) == 0 {
			c.back(id, false)
		}
	}
	for {
		u, open := c.rest()
		if !open {
			break
		}
		var err error
		if u.AdvancedAt == nil && (u.FailedStep == store.StepCancel || c.rng.IntN(2) == 0) {
			_, err = c.CancelWeightUpdate(c.ctx, pool, u.PolicyVersion)
		} else {
			_, err = c.CommitWeightUpdate(c.ctx, pool, u.PolicyVersion, "")
		}
		if err != nil {
			c.t.Fatal(err)
		}
	}
	for id, f := range c.engines {
		c.back(id, false) // some only after the update is over
		pass := <-c.enter(id)
		pass.Leave()
		deadline := time.NewTimer(time.Minute)
		defer deadline.Stop()
		for f.isPaused() { // a stranded engine is resumed at one of the next looks
			select {
			case <-c.c.looks():
			case <-deadline.C:
				c.t.Fatalf("%s is left paused; its calls were %q", id, f.calls())
			}
		}
	}
}

// looks tells of the next look at the store.
func (c *Coordinator) looks() <-chan time.Time { return time.After(c.cfg.Limits.LookInterval) }
