package weights

import (
	"context"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"holdfast/orchestrator/engine"
	"holdfast/router"
)

const (
	// versionTimeout bounds one question for a weight version.
	versionTimeout = 5 * time.Second
	// versionQuestions bounds the questions at once.
	versionQuestions = 8
)

// watchVersions asks the engines for their weight versions until ctx ends.
func (c *Coordinator) watchVersions(ctx context.Context) {
	ticker := time.NewTicker(c.cfg.Limits.LookInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case id := <-c.pokes:
			c.askVersion(ctx, id)
		case <-ticker.C:
			var group errgroup.Group
			group.SetLimit(versionQuestions)
			for _, id := range c.talkative() {
				group.Go(func() error {
					c.askVersion(ctx, id)
					return nil
				})
			}
			_ = group.Wait()
		}
	}
}

// talkative are the instances that answer and have a word for their weights.
func (c *Coordinator) talkative() []router.InstanceID {
	c.mu.Lock()
	defer c.mu.Unlock()
	var ids []router.InstanceID
	for id, m := range c.members {
		if m.up && m.known && !m.mute && !c.open {
			ids = append(ids, id)
		}
	}
	return ids
}

// Noticed takes in what a result said of the weights that generated it. It is no
// evidence by itself, since results are late: the engine is asked.
func (c *Coordinator) Noticed(id router.InstanceID, label string) {
	if label == "" {
		return
	}
	c.mu.Lock()
	m := c.members[id]
	news := m != nil && !c.open && m.labeled && m.label != label
	c.mu.Unlock()
	if news {
		select {
		case c.pokes <- id:
		default: // enough questions are waiting
		}
	}
}

// askVersion asks one engine for its weight version and deals with the answer.
func (c *Coordinator) askVersion(ctx context.Context, id router.InstanceID) {
	controller, ok := c.cfg.Engines.Controller(id)
	if !ok {
		return
	}
	c.mu.Lock()
	known := c.member(id).version
	c.mu.Unlock()
	asking, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	label, err := controller.WeightVersion(asking)
	if err != nil && classOf(err) == engine.FailTurn {
		c.mu.Lock()
		c.member(id).mute = true
		c.mu.Unlock()
	}
	if err != nil || label == "" {
		return
	}
	version, unasked := c.judge(id, label, known)
	if !unasked {
		return
	}
	log := c.cfg.Logger.With("instance", id, "reported", label, "known", known)
	if version < 0 {
		c.countUnasked()
		log.Warn("an engine's weights changed unasked, to a version that is no number: its cache is taken for empty")
		c.cfg.Engines.CacheCleared(ctx, id, known)
		if err := c.cfg.Router.Tell(ctx, &router.InstanceReset{Instance: id, PolicyVersion: known}); err != nil && ctx.Err() == nil {
			log.Warn("the router was not told", "error", err)
		}
		return
	}
	changed, err := c.cfg.Store.ObserveWeightVersion(ctx, c.cfg.Pool, c.cfg.Epoch, string(id), version)
	switch {
	case err == nil && changed:
		c.countUnasked()
		log.Warn("an engine's weights changed unasked")
		c.notify()
		return
	case err != nil && ctx.Err() == nil:
		log.Warn("recording an engine's weight version failed, trying again", "error", err)
	}
	// It is not recorded, so the next answer is as new as this one: the database
	// failed, or an update was begun just now.
	c.mu.Lock()
	c.member(id).labeled = false
	c.mu.Unlock()
}

func (c *Coordinator) countUnasked() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status.Unasked++
}

// judge tells whether an engine's word means that its weights changed unasked, and
// to which version; -1 for a label that is no number.
//
// Labels that nobody keeps up mean nothing: what counts is a change since the last
// one, or a first one beyond what is known.
func (c *Coordinator) judge(id router.InstanceID, label string, known int64) (version int64, unasked bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.member(id)
	if c.open || m.version != known {
		return 0, false // it changes because it was asked to
	}
	first, same := !m.labeled, m.labeled && m.label == label
	m.label, m.labeled = label, true
	if same {
		return 0, false
	}
	version, err := strconv.ParseInt(label, 10, 64)
	switch {
	case err != nil || version < 0:
		return -1, !first
	case version == known, first && version < known:
		return 0, false
	}
	return version, true
}
