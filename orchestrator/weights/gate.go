package weights

import (
	"context"
	"time"

	"holdfast/router"
)

// Tell passes on what the fleet sees to the router. On the way it keeps the
// coordinator informed of who answers, keeps a pause from being taken for
// overload, and leaves changes of policy versions to the coordinator, since they
// go with a reset.
func (c *Coordinator) Tell(ctx context.Context, event router.Event) error {
	switch e := event.(type) {
	case *router.InstanceJoined:
		return c.joined(ctx, e)
	case *router.InstanceLeft:
		return c.left(ctx, e)
	case *router.InstanceReset:
		c.mu.Lock()
		m := c.member(e.Instance)
		m.restarted = true
		if m.known {
			e.PolicyVersion = m.version
		}
		c.mu.Unlock()
		c.notify()
	case *router.ObservabilityChanged:
		c.mu.Lock()
		c.member(e.Instance).seen = e.State
		c.mu.Unlock()
		return c.tellStates(ctx)
	case *router.Snapshot:
		return c.snapshot(ctx, e)
	}
	return c.cfg.Router.Tell(ctx, event)
}

func (c *Coordinator) joined(ctx context.Context, e *router.InstanceJoined) error {
	c.telling.Lock()
	c.mu.Lock()
	m := c.member(e.Instance)
	if m.known {
		// A change of version is told by a reset, in tellVersions.
		e.PolicyVersion = m.version
	}
	if !m.up {
		m.up, m.mute = true, false
	}
	m.known, m.version = true, e.PolicyVersion
	m.ring()
	c.mu.Unlock()
	err := c.cfg.Router.Tell(ctx, e)
	c.telling.Unlock()
	if err != nil {
		return err
	}
	c.notify()
	return c.tellStates(ctx)
}

func (c *Coordinator) left(ctx context.Context, e *router.InstanceLeft) error {
	c.telling.Lock()
	defer c.telling.Unlock()
	c.mu.Lock()
	m := c.member(e.Instance)
	if m.up {
		m.up, m.restarted, m.downSince = false, true, time.Now()
	}
	// The router forgets it, so that the registry's version counts when it is back.
	m.known, m.seen, m.told, m.settling = false, router.Fresh, router.Fresh, false
	m.ring()
	c.mu.Unlock()
	c.notify()
	return c.cfg.Router.Tell(ctx, e)
}

// snapshot passes a snapshot on and watches the queue of a resumed engine.
func (c *Coordinator) snapshot(ctx context.Context, e *router.Snapshot) error {
	c.mu.Lock()
	m := c.member(e.Instance)
	changed := false
	if m.settling && e.TakenAt > m.resumedAt.UnixNano() {
		if m.calm++; e.Waiting > 0 {
			m.calm = 0
		}
		if m.calm >= calmSnapshots || time.Since(m.resumedAt) > c.cfg.Limits.SettleTimeout {
			m.settling, changed = false, true
		}
	}
	c.mu.Unlock()
	if err := c.cfg.Router.Tell(ctx, e); err != nil || !changed {
		return err
	}
	return c.tellStates(ctx)
}

// tellStates tells the router what has changed of the members' observation.
func (c *Coordinator) tellStates(ctx context.Context) error {
	c.telling.Lock()
	defer c.telling.Unlock()
	c.mu.Lock()
	var events []*router.ObservabilityChanged
	for id, m := range c.members {
		if state := m.state(); m.known && state != m.told {
			m.told = state
			events = append(events, &router.ObservabilityChanged{Instance: id, State: state})
		}
	}
	c.mu.Unlock()
	for _, event := range events {
		if err := c.cfg.Router.Tell(ctx, event); err != nil {
			return err
		}
	}
	return nil
}
