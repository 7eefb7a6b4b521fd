package service

import (
	"context"
	"fmt"

	"github.com/google/uuid"

	"holdfast/orchestrator/pool"
	"holdfast/workflows"
)

// HarnessTurn makes a model call for a harness, or answers pool.ErrNotOwner while
// another process owns the pool of the session.
func (s *Service) HarnessTurn(ctx context.Context, session uuid.UUID, call workflows.HarnessCall, progress workflows.HarnessProgress) (workflows.HarnessTurn, error) {
	o := s.owned.Load()
	if o == nil {
		return workflows.HarnessTurn{}, fmt.Errorf("session %s: %w", session, pool.ErrNotOwner)
	}
	return o.acts.HarnessTurn(ctx, session, call, progress)
}
