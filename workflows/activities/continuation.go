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
	"holdfast/store"
	"holdfast/workflows/task"
)

// Tokens are kept: what a model said is never turned into ids again. So the ids of an
// observation cannot come from the template of the whole chat. They are the difference
// that its messages make behind a chat that is made up for the purpose.

// continuation returns the ids that follow the ids of the model's last message, up to
// where it speaks again: the end of its message as far as it did not write that itself,
// the given messages, the beginning of an answer. Without a last message they follow
// a prompt. After a prompt of plain text they are plain text.
func (a *Activities) continuation(ctx context.Context, spec *task.Spec, messages []toolcall.Message, last []int32) ([]int32, error) {
	if spec.Prompt.Text != "" {
		return a.plainText(ctx, messages)
	}
	made := func(answer string) []toolcall.Message {
		return []toolcall.Message{{Role: "user", Content: "."}, {Role: "assistant", Content: answer}}
	}
	closed, err := a.chat(ctx, made("a"), false)
	if err != nil {
		return nil, err
	}
	other, err := a.chat(ctx, made("b"), false)
	if err != nil {
		return nil, err
	}
	whole, err := a.chat(ctx, append(made("a"), messages...), true)
	if err != nil {
		return nil, err
	}
	if len(whole) < len(closed) || !slices.Equal(whole[:len(closed)], closed) {
		return nil, &finalError{errors.New("the engine's chat template changes earlier messages when others follow")}
	}
	var ids []int32
	if last != nil {
		ids = append(ids, messageEnd(closed, other, last)...)
	}
	return append(ids, whole[len(closed):]...), nil
}

// messageEnd is what ends a message in two chats that differ in its text only, without
// what the model's own ids end with.
func messageEnd(closed, other, last []int32) []int32 {
	common := 0
	for common < min(len(closed), len(other)) && closed[len(closed)-1-common] == other[len(other)-1-common] {
		common++
	}
	end := closed[len(closed)-common:]
	if len(last) == 0 {
		return end
	}
	for i := len(end) - 1; i >= 0; i-- {
		if end[i] == last[len(last)-1] {
			return end[i+1:]
		}
	}
	return end
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

func (a *Activities) chat(ctx context.Context, messages []toolcall.Message, addGenerationPrompt bool) ([]int32, error) {
	raw, err := json.Marshal(messages)
	if err != nil {
		return nil, fmt.Errorf("encoding messages: %w", err)
	}
	return a.tokenize(ctx, engine.TokenizeRequest{Messages: raw, AddGenerationPrompt: addGenerationPrompt})
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
