package client

import (
	"context"
	"strconv"
	"time"

	"github.com/google/uuid"

	"holdfast/api/wire"
)

// PaceQuestion is what a trainer tells of itself when it asks how much to release;
// zero values leave it to the service.
type PaceQuestion struct {
	// GroupSize makes the advice one of whole groups.
	GroupSize int
	// StepSamples is how many usable samples one training step consumes.
	StepSamples int
	// AskAgain is when the question is asked next.
	AskAgain time.Duration
}

// Pace asks how many more sessions of each class may be released now, so that the
// staleness bound holds, the pool stays busy and the shares stay the contract's.
func (c *Client) Pace(ctx context.Context, run uuid.UUID, question PaceQuestion) (wire.Pace, error) {
	k := c.get("runs", run.String(), "pace")
	k.query = values("group_size", number(question.GroupSize), "step_samples", number(question.StepSamples))
	if question.AskAgain > 0 {
		k.query.Set("ask_again_seconds", strconv.FormatFloat(question.AskAgain.Seconds(), 'f', -1, 64))
	}
	return do[wire.Pace](ctx, c, k)
}
