package store

import (
	"context"
	"time"
)

// InstanceState is the closed set of an instance's states.
type InstanceState string

// Instance states.
const (
	InstanceActive   InstanceState = "active"
	InstanceDraining InstanceState = "draining"
	InstanceRemoved  InstanceState = "removed"
)

// Instance is one inference engine of a pool.
type Instance struct {
	Pool string
	ID   string
	URL  string
	// Kind is the engine's protocol, such as vllm.
	Kind             string
	CapacityBlocks   int64
	BlockTokens      int
	MaxContextTokens int64
	// MaxRunning and PrefillTokensPerSecond are 0 if unknown.
	MaxRunning             int
	PrefillTokensPerSecond float64
	PolicyVersion          int64
	// TTLSeconds after the last heartbeat the instance counts as gone; 0 means never.
	TTLSeconds float64
	// The fields below are the store's.
	State     InstanceState
	Expired   bool
	CreatedAt time.Time
	SeenAt    time.Time
}

// RegisterInstance adds an instance, or announces a known one anew: it becomes
// active and seen now, with what is given. The pool is created if it is new.
func (s *Store) RegisterInstance(ctx context.Context, instance Instance) (Instance, error) {
	return Instance{}, errUnfinished
}

// HeartbeatInstance marks an instance as seen now; ErrNotFound if it is unknown
// or removed.
func (s *Store) HeartbeatInstance(ctx context.Context, pool, id string) error {
	return errUnfinished
}

// DrainInstance starts or ends draining; ErrNotFound if it is unknown or removed.
func (s *Store) DrainInstance(ctx context.Context, pool, id string, draining bool) error {
	return errUnfinished
}

// RemoveInstance takes an instance out of the pool; ErrNotFound if it is unknown,
// no change if it is removed already.
func (s *Store) RemoveInstance(ctx context.Context, pool, id string) error {
	return errUnfinished
}

// Instances lists the pool's instances by id, removed ones excepted.
func (s *Store) Instances(ctx context.Context, pool string) ([]Instance, error) {
	return nil, errUnfinished
}
