package simulated

import (
	"context"

	"holdfast/router/sim/instance"
)

// What follows is what both dialects' weight updates need of one rank.

// pause stops the model from starting steps. New calls queue up in it.
func (c *core) pause() { c.look(func() { c.model.Pause(instance.PauseAll) }) }

// resume undoes pause and drain.
func (c *core) resume() {
	c.look(func() {
		c.openGate()
		c.model.Pause(instance.Running)
	})
}

func (c *core) openGate() {
	if c.gate != nil {
		close(c.gate)
		c.gate = nil
	}
}

// abortAll ends the calls that match with what they have, and counts them.
func (c *core) abortAll(match func(*call) bool) (n int) {
	c.look(func() {
		for _, id := range c.inOrder() {
			if x := c.calls[id]; match(x) {
				c.abortLocked(x, aborted)
				n++
			}
		}
	})
	return n
}

// shut keeps new calls out.
func (c *core) shut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gate == nil && c.closed == running {
		c.gate = make(chan struct{})
	}
}

// drain keeps new calls out and waits until those in flight have ended; then it
// pauses, which lets new ones into the queue.
func (c *core) drain(ctx context.Context) error {
	c.shut()
	c.mu.Lock()
	gate := c.gate
	if len(c.calls) > 0 && c.idle == nil {
		c.idle = make(chan struct{})
	}
	idle := c.idle
	if len(c.calls) == 0 {
		idle = nil
	}
	c.mu.Unlock()
	if idle != nil {
		select {
		case <-idle:
		case <-gate: // Resumed or closed meanwhile.
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	c.look(func() {
		if c.gate == gate && c.closed == running {
			c.model.Pause(instance.PauseAll)
			c.openGate()
		}
	})
	return nil
}

// preemptAll makes the running calls lose their blocks; they are computed anew.
func (c *core) preemptAll() (n int64) {
	c.look(func() {
		before := c.model.Stats().Preemptions
		c.events = c.model.PreemptAll(c.events[:0])
		n = c.model.Stats().Preemptions - before
	})
	return n
}

// reset forgets the prefix cache unless a running call holds blocks of it, and
// reports whether it did. With preempt no call does.
func (c *core) reset(preempt bool) (done bool) {
	c.look(func() {
		if preempt {
			c.events = c.model.PreemptAll(c.events[:0])
		}
		if done = c.model.Stats().UsedBlocks() == 0; done {
			c.model.ResetCache()
		}
	})
	return done
}

// busy says that calls run, or wait while nothing keeps them from running.
func (c *core) busy() (busy bool) {
	c.look(func() {
		stats := c.model.Stats()
		busy = stats.Running() > 0 || stats.Waiting > 0 && c.model.PauseMode() == instance.Running
	})
	return busy
}

// setWeights makes everything generated from now on depend on a version.
func (c *core) setWeights(version string) {
	c.look(func() {
		if version == c.weights {
			return
		}
		c.weights = version
		// Blocks that are filled belong to the old weights; have them told first.
		c.publishDecoded()
		for _, x := range c.calls {
			p, _ := c.model.Progress(x.id)
			x.sampler.under(version, p.OutputTokens)
		}
	})
}

// isPaused says whether the rank starts no steps, or will not once it is drained.
func (c *core) isPaused() (paused bool) {
	c.look(func() { paused = c.gate != nil || c.model.PauseMode() != instance.Running })
	return paused
}
