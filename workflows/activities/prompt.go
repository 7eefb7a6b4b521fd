package activities

import (
	"context"
	"errors"
	"fmt"

	"holdfast/orchestrator/engine"
	"holdfast/store"
	"holdfast/workflows/task"
)

// tokenizePrompt has a prompt of text or messages turned into ids, once for all
// members of the task's group and before its footprint is asked for. What the store
// keeps stands, so that a repeated activity, another member and another worker see
// the same ids. A problem says that the session can never begin; an error, that it
// cannot yet.
func (a *Activities) tokenizePrompt(ctx context.Context, work *store.WorkSession) (problem string, err error) {
	if work.PromptTokens > 0 || work.State == store.SessionEnded || work.CancelRequested {
		return "", nil
	}
	request := engine.TokenizeRequest{Text: work.Spec.Prompt.Text, AddGenerationPrompt: true}
	if request.Text == "" {
		request.Messages = work.Spec.Prompt.Messages
	}
	var ids []int32
	err = a.askEngines(ctx, func() (err error) {
		ids, err = a.cfg.Engines.Tokenize(ctx, request)
		return err
	})
	var final *finalError
	switch {
	case errors.As(err, &final):
		return fmt.Sprintf("the prompt could not be tokenised: %v", final.error), nil
	case err != nil:
		return "", fmt.Errorf("tokenising the prompt of session %s: %w", work.ID, err)
	case len(ids) == 0:
		return "the engine makes no token of the prompt", nil
	case len(ids) > task.MaxPromptTokens:
		return fmt.Sprintf("the prompt has %d tokens, at most %d are served", len(ids), task.MaxPromptTokens), nil
	}
	if err := a.cfg.Store.SetPromptTokens(ctx, work.TaskID, ids); err != nil {
		return "", err
	}
	*work, err = a.cfg.Store.SessionForWork(ctx, work.ID)
	return "", err
}
