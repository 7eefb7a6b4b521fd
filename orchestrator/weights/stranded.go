package weights

import (
	"context"
	"errors"

	"holdfast/orchestrator/engine"
	"holdfast/router"
)

// freeStranded resumes engines that fell silent while they were paused and are
// back after their update was over. Their policy version stays what it was, so
// that the router gives them no new session before they are registered anew or
// report the version in force.
func (c *Coordinator) freeStranded(ctx context.Context) error {
	stranded, err := c.cfg.Store.StrandedInstances(ctx, c.cfg.Pool)
	if err != nil {
		return err
	}
	for _, name := range stranded {
		id := router.InstanceID(name)
		c.mu.Lock()
		m := c.members[id]
		up := m != nil && m.up
		c.mu.Unlock()
		controller, ok := c.cfg.Engines.Controller(id)
		if !up || !ok {
			continue
		}
		resuming, cancel := context.WithTimeout(ctx, c.cfg.Limits.ResumeTimeout)
		err := controller.Resume(resuming)
		cancel()
		var answered *engine.Error
		if err != nil && (!errors.As(err, &answered) || answered.Class != engine.FailTurn) {
			c.cfg.Logger.Warn("an engine that was left paused cannot be resumed, trying again", "instance", id, "error", err)
			continue
		}
		c.cfg.Logger.Warn("an engine that had been left paused by an update was resumed; register it again once it has the weights in force", "instance", id)
		if err := c.cfg.Store.FreeStrandedInstance(ctx, c.cfg.Pool, c.cfg.Epoch, name); err != nil {
			return err
		}
	}
	return nil
}
