package service

import (
	"context"
	"time"

	"holdfast/orchestrator/pool"
	"holdfast/router"
	"holdfast/store"
)

// journal records the loop's decisions under one epoch.
type journal struct {
	store *store.Store
	pool  string
	epoch int64
	// messages is woken after decisions that a workflow must hear of.
	messages wake
	records  []store.DecisionRecord
}

// Record writes the decisions in one transaction.
func (j *journal) Record(ctx context.Context, decisions []pool.Recorded) error {
	signals := false
	j.records = j.records[:0]
	for _, d := range decisions {
		signals = signals || d.Signal
		j.records = append(j.records, store.DecisionRecord{Decision: d.Decision, Signal: d.Signal})
	}
	if err := j.store.RecordDecisions(ctx, j.pool, j.epoch, j.records); err != nil {
		return err
	}
	if signals {
		j.messages.notify()
	}
	return nil
}

// restoredEvents turns what the store knows into the events that rebuild a core:
// first the instances, then their sessions.
func restoredEvents(instances []store.Instance, sessions []store.LiveSession) []router.Event {
	events := make([]router.Event, 0, len(instances)+len(sessions))
	for _, in := range instances {
		events = append(events, joined(in))
		if in.State == store.InstanceDraining {
			events = append(events, &router.InstanceDraining{Instance: router.InstanceID(in.ID), Draining: true})
		}
	}
	for _, s := range sessions {
		event := &router.SessionRestored{
			Session: router.SessionID(s.ID), Class: router.ClassID(s.Class), Turn: s.Turn,
			PromptTokens: s.ContextTokens, Instance: router.InstanceID(s.Instance),
			AdmittedAt: unixNanos(s.AdmittedAt), HeldSince: unixNanos(s.HeldSince),
			ResidencyNanos: router.Nanos(s.ResidencySeconds * 1e9), InFlight: s.Granted,
		}
		if s.GroupSize > 1 {
			event.Group, event.SharedTokens = router.GroupID(s.GroupID), s.PromptTokens
		}
		events = append(events, event)
	}
	return events
}

func joined(in store.Instance) *router.InstanceJoined {
	return &router.InstanceJoined{
		Instance: router.InstanceID(in.ID), CapacityBlocks: in.CapacityBlocks, BlockTokens: in.BlockTokens,
		MaxContextTokens: in.MaxContextTokens, MaxRunning: in.MaxRunning,
		PrefillTokensPerSecond: in.PrefillTokensPerSecond, PolicyVersion: in.PolicyVersion,
	}
}

func unixNanos(t *time.Time) router.Nanos {
	if t == nil {
		return 0
	}
	return t.UnixNano()
}

// wake is a signal that is remembered until it is taken.
type wake chan struct{}

func newWake() wake { return make(wake, 1) }

func (w wake) notify() {
	select {
	case w <- struct{}{}:
	default:
	}
}
