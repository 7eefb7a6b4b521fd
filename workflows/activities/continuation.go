package activities

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/toolcall"
	"holdfast/orchestrator/transcript"
	"holdfast/store"
	"holdfast/workflows/task"
)

// Tokens are kept: what a model said is never turned into ids again. So the ids of what
// follows cannot come from the template of the whole chat. They are what messages add
// behind an answer that is made up for the purpose.

// madeUp is a beginning for messages that follow an answer: two of them, which differ in
// the answer's text alone.
var madeUp = [2][]json.RawMessage{
	{json.RawMessage(`{"role":"user","content":"."}`), json.RawMessage(`{"role":"assistant","content":"a"}`)},
	{json.RawMessage(`{"role":"user","content":"."}`), json.RawMessage(`{"role":"assistant","content":"b"}`)},
}

// behindAnswer returns the ids that follow an answer of the model's, which ended with
// stop, or without an end if that is negative: the end of its message as far as it did
// not write that itself, the messages, the beginning of the next answer. They are what
// two renderings have in common behind an answer in which they differ: so neither the
// text of what was sampled nor what a template leaves out of earlier messages plays a
// part, and the cost is that of the new messages alone.
func (a *Activities) behindAnswer(ctx context.Context, tools json.RawMessage, messages []transcript.Message, stop int32) ([]int32, error) {
	var renderings [2][]int32
	for i := range renderings {
		var err error
		renderings[i], err = a.tokenize(ctx, engine.TokenizeRequest{Messages: transcript.Join(madeUp[i], messages), Tools: tools, AddGenerationPrompt: true})
		if err != nil {
			return nil, err
		}
	}
	one, other := renderings[0], renderings[1]
	common := 0
	for common < min(len(one), len(other)) && one[len(one)-1-common] == other[len(other)-1-common] {
		common++
	}
	if common == min(len(one), len(other)) {
		return nil, &finalError{errors.New("the engine's chat template does not show what the assistant says")}
	}
	ids := one[len(one)-common:]
	if len(ids) > 0 && ids[0] == stop {
		ids = ids[1:]
	}
	return ids, nil
}

// continuation returns the ids that follow the ids of the model's last message, or a
// prompt where that is nil. After a prompt of plain text they are plain text.
func (a *Activities) continuation(ctx context.Context, spec *task.Spec, messages []toolcall.Message, last []int32) ([]int32, error) {
	if spec.Prompt.Text != "" {
		return a.plainText(ctx, messages)
	}
	following := make([]transcript.Message, len(messages))
	for i := range messages {
		encoded, err := json.Marshal(messages[i])
		if err != nil {
			return nil, fmt.Errorf("encoding a message: %w", err)
		}
		following[i].Raw = encoded
	}
	if last == nil {
		return a.behindPrompt(ctx, following)
	}
	stop := int32(-1)
	if len(last) > 0 {
		stop = last[len(last)-1]
	}
	return a.behindAnswer(ctx, nil, following, stop)
}

// behindPrompt returns what messages add where the model has not spoken yet.
func (a *Activities) behindPrompt(ctx context.Context, messages []transcript.Message) ([]int32, error) {
	before, err := a.tokenize(ctx, engine.TokenizeRequest{Messages: transcript.Join(madeUp[0], nil)})
	if err != nil {
		return nil, err
	}
	whole, err := a.tokenize(ctx, engine.TokenizeRequest{Messages: transcript.Join(madeUp[0], messages), AddGenerationPrompt: true})
	if err != nil {
		return nil, err
	}
	if len(whole) < len(before) || !slices.Equal(whole[:len(before)], before) {
		return nil, &finalError{errors.New("the engine's chat template changes earlier messages when others follow")}
	}
	return whole[len(before):], nil
}

// firstObservation returns the ids that follow the prompt of messages that is kept.
func (a *Activities) firstObservation(ctx context.Context, work *store.WorkSession, request engine.TokenizeRequest, messages []toolcall.Message) ([]int32, error) {
	prompt, err := a.cfg.Store.PromptTokens(ctx, work.TaskID)
	if err != nil {
		return nil, err
	}
	if request.Messages, err = withMessages(request.Messages, messages); err != nil {
		return nil, err
	}
	request.AddGenerationPrompt = true
	whole, err := a.tokenize(ctx, request)
	if err != nil {
		return nil, err
	}
	if len(whole) >= len(prompt) && slices.Equal(whole[:len(prompt)], prompt) {
		return whole[len(prompt):], nil
	}
	// Another member of the group has made the prompt with other tools, or the template
	// does not merely go on.
	return a.continuation(ctx, &work.Spec, messages, nil)
}

// plainText is each message on lines of its own.
func (a *Activities) plainText(ctx context.Context, messages []toolcall.Message) ([]int32, error) {
	var text strings.Builder
	text.WriteString("\n")
	for _, message := range messages {
		text.WriteString(message.Content + "\n")
	}
	return a.tokenize(ctx, engine.TokenizeRequest{Text: text.String(), Bare: true})
}

// tokenize asks the engines for ids; see askEngines for its errors.
func (a *Activities) tokenize(ctx context.Context, request engine.TokenizeRequest) (ids []int32, err error) {
	err = a.askEngines(ctx, func() (err error) {
		ids, err = a.cfg.Engines.Tokenize(ctx, request)
		return err
	})
	return ids, err
}

// withMessages appends messages to a JSON array of messages.
func withMessages(raw json.RawMessage, messages []toolcall.Message) (json.RawMessage, error) {
	var all []json.RawMessage
	if err := json.Unmarshal(raw, &all); err != nil {
		return nil, fmt.Errorf("reading the prompt's messages: %w", err)
	}
	for _, message := range messages {
		encoded, err := json.Marshal(message)
		if err != nil {
			return nil, fmt.Errorf("encoding a message: %w", err)
		}
		all = append(all, encoded)
	}
	joined, err := json.Marshal(all)
	if err != nil {
		return nil, fmt.Errorf("encoding messages: %w", err)
	}
	return joined, nil
}
