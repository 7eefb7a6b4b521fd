package engine

import (
	"context"
	"fmt"
)

// PauseMode is what happens to the generations under way while weights change.
type PauseMode uint8

const (
	// PauseAbort ends them: what was generated comes back as a partial result with
	// FinishAbort, to be continued as a new request.
	PauseAbort PauseMode = iota + 1
	// PauseWait lets them finish under the old weights; new ones wait.
	PauseWait
	// PauseKeep keeps them in the engine without their KV cache, which is computed
	// anew under the new weights (vLLM: keep with a cleared cache; SGLang: retract).
	PauseKeep
	// PauseInPlace keeps them with the KV cache of the old weights (vLLM: keep
	// without clearing; SGLang: in_place).
	PauseInPlace
)

func (m PauseMode) String() string {
	switch m {
	case PauseAbort:
		return "abort"
	case PauseWait:
		return "wait"
	case PauseKeep:
		return "keep"
	case PauseInPlace:
		return "in_place"
	}
	return fmt.Sprintf("PauseMode(%d)", uint8(m))
}

// ParsePauseMode is the inverse of String.
func ParsePauseMode(s string) (PauseMode, error) {
	for m := PauseAbort; m <= PauseInPlace; m++ {
		if m.String() == s {
			return m, nil
		}
	}
	return 0, fmt.Errorf("unknown pause mode %q, want abort, wait, keep or in_place", s)
}

// Controller is the part of an engine that a weight update needs. A Client
// implements it where its engine has such calls; all are idempotent. Errors are
// *Error: an engine that lacks a call answers with class FailTurn.
type Controller interface {
	// Pause stops the engine from generating and treats what is under way by mode.
	// PauseWait returns once the engine is idle.
	Pause(ctx context.Context, mode PauseMode) error
	// Resume lets a paused engine go on.
	Resume(ctx context.Context) error
	// ResetCache forgets all cached prefixes. An engine that refuses while requests
	// are pending answers with class RetryHere.
	ResetCache(ctx context.Context) error
	// WeightVersion is what the engine says of its weights, empty if it has no word for it.
	WeightVersion(ctx context.Context) (string, error)
	// SetWeightVersion names the weights that were just loaded.
	SetWeightVersion(ctx context.Context, version string) error
}
