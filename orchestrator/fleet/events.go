package fleet

import (
	"context"

	"holdfast/router"
	"holdfast/store"
)

// EventSource follows what one instance tells of its KV cache, and tells the
// router.
type EventSource interface {
	// Run follows until ctx ends.
	Run(ctx context.Context) error
	// Clear forgets what is cached, after a reset that we ordered: an idle engine
	// does not tell of it.
	Clear()
	// Describe says in one line how the source does.
	Describe() string
}

// Subscription is what an EventSource needs to know.
type Subscription struct {
	Instance store.Instance
	// PolicyVersion is that of the instance's weights now.
	PolicyVersion func() int64
	Tell          func(ctx context.Context, event router.Event) error
}

// listen runs the event source until ctx ends or the instance leaves the registry.
func (m *member) listen(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- m.events.Run(ctx) }()
	select {
	case <-m.gone:
		cancel()
		<-ended
		return nil
	case err := <-ended:
		return err
	}
}

// policyVersion is that of the instance's weights, as the registry has it.
func (m *member) policyVersion() int64 { return m.described().PolicyVersion }

// tellWhileUp passes on what the event source says while the router knows the
// instance; of one that is gone nothing is cached.
func (m *member) tellWhileUp(ctx context.Context, event router.Event) error {
	if !m.isUp() {
		return nil
	}
	return m.fleet.cfg.Tell(ctx, event)
}
