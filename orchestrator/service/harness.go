package service

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"

	"holdfast/workflows"
)

// rebuilding bounds how long a call waits for a process that has become the owner to
// rebuild the router from the store and to begin.
const rebuilding = 20 * time.Second

// HarnessTurn makes a model call for a harness. While nobody owns the pool of the
// session, as after a restart, it waits until this process does: for the lease of a dead
// owner, the fifth of it after which one looks again, and the rebuilding. It answers
// pool.ErrNotOwner after that, and at once while another process is seen to own the pool.
func (s *Service) HarnessTurn(ctx context.Context, session uuid.UUID, call workflows.HarnessCall, progress workflows.HarnessProgress) (workflows.HarnessTurn, error) {
	o, err := s.owned.await(ctx, s.cfg.LeaseTTL+s.cfg.LeaseTTL/lookAgain+rebuilding)
	if err != nil {
		return workflows.HarnessTurn{}, fmt.Errorf("session %s: %w", session, err)
	}
	return o.acts.HarnessTurn(ctx, session, call, progress)
}
