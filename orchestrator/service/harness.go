package service

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"

	"holdfast/workflows"
)

// takeover bounds how long a process takes to serve a pool whose lease has run out: it
// looks for it every fifth of the lease and rebuilds the router from the store.
const takeover = 20 * time.Second

// HarnessTurn makes a model call for a harness. While nobody owns the pool of the
// session, as after a restart, it waits until this process does, for the lease of a dead
// owner and the takeover; it answers pool.ErrNotOwner after that, and at once while
// another process is seen to own the pool.
func (s *Service) HarnessTurn(ctx context.Context, session uuid.UUID, call workflows.HarnessCall, progress workflows.HarnessProgress) (workflows.HarnessTurn, error) {
	o, err := s.owned.await(ctx, s.cfg.LeaseTTL+takeover)
	if err != nil {
		return workflows.HarnessTurn{}, fmt.Errorf("session %s: %w", session, err)
	}
	return o.acts.HarnessTurn(ctx, session, call, progress)
}
