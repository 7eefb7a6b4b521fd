package activities

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"holdfast/orchestrator/engine"
	"holdfast/store"
	"holdfast/workflows/task"
)

// tokenizePrompt has a prompt of text or messages turned into ids, once for all
// members of the task's group and before its footprint is asked for. A problem says
// that the session can never begin; an error, that it cannot yet.
func (a *Activities) tokenizePrompt(ctx context.Context, work *store.WorkSession) (problem string, err error) {
	request := engine.TokenizeRequest{Text: work.Spec.Prompt.Text, AddGenerationPrompt: true}
	if request.Text == "" {
		request.Messages = work.Spec.Prompt.Messages
	}
	return a.keepPrompt(ctx, work, request)
}

// keepPrompt has a prompt turned into ids where that has not been done. What the store
// keeps stands, so that a repeated activity, another member and another worker see
// the same ids.
func (a *Activities) keepPrompt(ctx context.Context, work *store.WorkSession, request engine.TokenizeRequest) (problem string, err error) {
	if work.PromptTokens > 0 || work.State == store.SessionEnded || work.CancelRequested {
		return "", nil
	}
	ids, problem, err := a.promptIDs(ctx, work, request)
	if err != nil || problem != "" {
		return problem, err
	}
	if err := a.cfg.Store.SetPromptTokens(ctx, work.TaskID, ids); err != nil {
		return "", err
	}
	*work, err = a.cfg.Store.SessionForWork(ctx, work.ID)
	return "", err
}

func (a *Activities) promptIDs(ctx context.Context, work *store.WorkSession, request engine.TokenizeRequest) (ids []int32, problem string, err error) {
	ids, err = a.tokenize(ctx, request)
	var final *finalError
	switch {
	case errors.As(err, &final):
		return nil, fmt.Sprintf("the prompt could not be tokenised: %v", final.error), nil
	case err != nil:
		return nil, "", fmt.Errorf("tokenising the prompt of session %s: %w", work.ID, err)
	case len(ids) == 0:
		return nil, "the engine makes no token of the prompt", nil
	case len(ids) > task.MaxPromptTokens:
		return nil, fmt.Sprintf("the prompt has %d tokens, at most %d are served", len(ids), task.MaxPromptTokens), nil
	}
	return ids, "", nil
}

// promptAwaitsTools tells a prompt whose template takes the tools of an environment
// that has not been reset yet.
func promptAwaitsTools(work *store.WorkSession) bool {
	return work.PromptTokens == 0 && work.Spec.Stepped() != nil && promptMessages(&work.Spec) != nil
}

// promptMessages are those of a prompt that has them, or nil.
func promptMessages(spec *task.Spec) json.RawMessage {
	if messages := spec.Prompt.Messages; len(messages) > 0 && string(messages) != "null" {
		return messages
	}
	return nil
}

// measurePrompt stands in for tokenizePrompt where the tools are not known yet: it only
// says how long the prompt is without them, so that admission can be asked for.
func (a *Activities) measurePrompt(ctx context.Context, work *store.WorkSession) (problem string, err error) {
	ids, problem, err := a.promptIDs(ctx, work, engine.TokenizeRequest{Messages: work.Spec.Prompt.Messages, AddGenerationPrompt: true})
	work.PromptTokens = len(ids)
	return problem, err
}
