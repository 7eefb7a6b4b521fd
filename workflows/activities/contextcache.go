package activities

import (
	"fmt"
	"sync"

	"context"

	"github.com/google/uuid"
	"github.com/maypok86/otter/v2"

	"holdfast/store"
)

// sessionContext is a session as it stands before a turn: what a worker would
// otherwise read from the store again.
type sessionContext struct {
	work store.WorkSession
	// tokens is the context of all committed turns, in the capacity of which the
	// next turn's tokens are appended.
	tokens []int32
	chain  blockChain
	// gapSeconds passed in the tool before the turn.
	gapSeconds float64
	// harness is set where a harness runs the loop.
	harness *harnessState
	// output is what the turn has generated so far, if it was cut; nil after a commit.
	output *output
}

// contextCache keeps contexts between turns within a bound of bytes. An entry is
// taken out while its turn runs, so that nobody else can append to its tokens.
type contextCache struct {
	entries *otter.Cache[uuid.UUID, *sessionContext]
}

// sessionOverheadBytes stands for the decoded task of an entry.
const sessionOverheadBytes = 8 << 10

func newContextCache(limitBytes int64) (*contextCache, error) {
	entries, err := otter.New(&otter.Options[uuid.UUID, *sessionContext]{
		MaximumWeight: uint64(limitBytes),
		Weigher: func(_ uuid.UUID, c *sessionContext) uint32 {
			bytes := int64(cap(c.tokens))*4 + sessionOverheadBytes
			if c.output != nil {
				bytes += int64(len(c.output.ids)) * 8
			}
			return uint32(min(bytes, 1<<31))
		},
	})
	if err != nil {
		return nil, fmt.Errorf("setting up the context cache: %w", err)
	}
	return &contextCache{entries: entries}, nil
}

// take returns the session's context before the given turn and removes it, or nil.
func (c *contextCache) take(session uuid.UUID, turn int) *sessionContext {
	entry, ok := c.entries.Invalidate(session)
	if !ok || entry.work.Turns != turn {
		return nil
	}
	return entry
}

// takeAny returns the session's context as it is and removes it, or nil.
func (c *contextCache) takeAny(session uuid.UUID) *sessionContext {
	entry, _ := c.entries.Invalidate(session)
	return entry
}

// put keeps a context. A worker that hung while its session began again may come with
// one of the attempt that was left, which does not replace a later one.
func (c *contextCache) put(entry *sessionContext) {
	c.entries.Compute(entry.work.ID, func(kept *sessionContext, found bool) (*sessionContext, otter.ComputeOp) {
		if found && kept.work.Restarts > entry.work.Restarts {
			return kept, otter.CancelOp
		}
		return entry, otter.WriteOp
	})
}

// dropOlder removes a context of an attempt before the given one.
func (c *contextCache) dropOlder(session uuid.UUID, restarts int) {
	c.entries.ComputeIfPresent(session, func(kept *sessionContext) (*sessionContext, otter.ComputeOp) {
		if kept.work.Restarts < restarts {
			return nil, otter.InvalidateOp
		}
		return kept, otter.CancelOp
	})
}

func (c *contextCache) drop(session uuid.UUID) { c.entries.Invalidate(session) }

// running knows the model calls under way in this process, to cancel them.
type running struct {
	mu      sync.Mutex
	cancels map[uuid.UUID]context.CancelFunc
}

func newRunning() *running { return &running{cancels: make(map[uuid.UUID]context.CancelFunc)} }

// track returns a context that cancel ends, and a function that stops tracking.
func (r *running) track(ctx context.Context, session uuid.UUID) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	r.mu.Lock()
	r.cancels[session] = cancel
	r.mu.Unlock()
	return ctx, func() {
		r.mu.Lock()
		delete(r.cancels, session)
		r.mu.Unlock()
		cancel()
	}
}

func (r *running) cancel(session uuid.UUID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if cancel, ok := r.cancels[session]; ok {
		cancel()
	}
}
