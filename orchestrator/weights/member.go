package weights

import (
	"context"
	"fmt"
	"time"

	"holdfast/orchestrator/engine"
	"holdfast/router"
)

// member is what the coordinator knows of one instance, under the coordinator's mu.
type member struct {
	// up: it answers, as the fleet tells. downSince is when that ended.
	up        bool
	downSince time.Time
	// restarted: it was gone since its place in the update was written, so that it
	// is paused no more.
	restarted bool
	// known: the router knows the instance, with that policy version.
	known   bool
	version int64
	// seen is what the fleet tells of its observation, told what the router heard last.
	seen, told router.Observability
	// shut: requests wait. bell is closed when anything that they or a pause wait
	// for changes; inFlight counts those that were let through.
	shut     bool
	bell     chan struct{}
	inFlight int
	// settling: it was resumed, and its queue is still the pause's; calm counts
	// snapshots without one since.
	settling  bool
	resumedAt time.Time
	calm      int
	// label is what the engine last said of its weights; mute: it has no word for it.
	label   string
	labeled bool
	mute    bool
}

// calmSnapshots without a queue end the time in which a queue is taken for the pause's.
const calmSnapshots = 2

// member returns the member of that id; the caller holds mu.
func (c *Coordinator) member(id router.InstanceID) *member {
	m := c.members[id]
	if m == nil {
		m = &member{downSince: c.started, bell: make(chan struct{})}
		c.members[id] = m
	}
	return m
}

// ring wakes all who wait for the member to change; the caller holds mu.
func (m *member) ring() {
	close(m.bell)
	m.bell = make(chan struct{})
}

// state is what the router should be told of the member's observation. A paused
// engine's queue says nothing of its load, so its caps are to stay as they are.
func (m *member) state() router.Observability {
	if m.shut || m.settling {
		return max(m.seen, router.Degraded)
	}
	return m.seen
}

// Pass is what a request to an engine needs.
type Pass struct {
	// CacheSalt keeps prefixes of different weights apart, empty for none.
	CacheSalt string
	// PolicyVersion of the instance's weights.
	PolicyVersion int64
	// Leave must be called when the request is over.
	Leave func()
}

// Enter lets a request to an instance through, once no weight update holds it
// back. An instance that goes away meanwhile is *engine.Error of class
// RetryElsewhere.
func (c *Coordinator) Enter(ctx context.Context, id router.InstanceID) (Pass, error) {
	select {
	case <-c.ready:
	case <-ctx.Done():
		return Pass{}, ctx.Err()
	}
	for {
		c.mu.Lock()
		m := c.members[id]
		if m == nil || m.shut && !m.up {
			c.mu.Unlock()
			return Pass{}, &engine.Error{Class: engine.RetryElsewhere, Err: fmt.Errorf("%s: %w", id, engine.ErrNotCalled)}
		}
		if !m.shut {
			m.inFlight++
			pass := Pass{CacheSalt: c.salt, PolicyVersion: m.version, Leave: func() { c.leave(m) }}
			c.mu.Unlock()
			return pass, nil
		}
		bell := m.bell
		c.mu.Unlock()
		select {
		case <-bell:
		case <-ctx.Done():
			return Pass{}, ctx.Err()
		}
	}
}

func (c *Coordinator) leave(m *member) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.inFlight--; m.inFlight == 0 {
		m.ring()
	}
}

// drained waits until no request that was let through is under way.
func (c *Coordinator) drained(ctx context.Context, id router.InstanceID) error {
	for {
		c.mu.Lock()
		m := c.member(id)
		inFlight, bell := m.inFlight, m.bell
		c.mu.Unlock()
		if inFlight == 0 {
			return nil
		}
		select {
		case <-bell:
		case <-ctx.Done():
			return fmt.Errorf("%d generations are still under way: %w", inFlight, ctx.Err())
		}
	}
}

// Version is the policy version of an instance's weights now.
func (c *Coordinator) Version(id router.InstanceID) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.members[id]; m != nil {
		return m.version
	}
	return 0
}
