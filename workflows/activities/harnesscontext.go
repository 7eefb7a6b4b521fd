package activities

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/toolcall"
	"holdfast/orchestrator/transcript"
	"holdfast/store"
	"holdfast/workflows"
	"holdfast/workflows/task"
)

// maxSampleTokens bounds what rewrites may bring a sample to, over all its sequences:
// it is delivered in one piece.
const maxSampleTokens = 1 << 22

// harnessState is what a harness's session has beside its context.
type harnessState struct {
	// requests made the turns so far.
	requests      map[string]bool
	earlierTokens int64
	// seen is what the harness has seen after the last turn, nil if it spoke in ids.
	seen *store.Seen
	// stop is the token with which the model ended the last turn; negative if it did not.
	stop int32
}

func newHarnessState(s *store.HarnessState, tokens []int32) *harnessState {
	h := &harnessState{requests: make(map[string]bool, len(s.Requests)), earlierTokens: s.EarlierTokens, seen: s.Seen, stop: -1}
	for _, request := range s.Requests {
		h.requests[request] = true
	}
	if s.FinishReason == engine.FinishStop.String() && s.OutputTokens > 0 {
		h.stop = tokens[len(tokens)-1]
	}
	return h
}

// madeBy is the request that made the turn which the call asks for again, or empty.
func (h *harnessState) madeBy(call *workflows.HarnessCall, turns int) string {
	request := call.RequestID
	if request == "" {
		request = contentRequest(call.Content, turns-1)
	}
	if h.requests[request] {
		return request
	}
	return ""
}

// contentRequest names a turn by the words in which it was asked for. The turn's number
// is part of it: only the last turn is repeated, since a context before that has gone on.
func contentRequest(content string, turn int) string {
	return fmt.Sprintf("content:%s@%d", content, turn)
}

// nextContext is a session's context as a call wants it.
type nextContext struct {
	tokens []int32
	// kept of the session's tokens are in it; rewritten says that these are not all.
	kept      int
	rewritten bool
	// seen is what the harness will have seen once it has the turn's message, nil if it
	// speaks in ids.
	seen func(*message) *store.Seen
}

// next makes the context that the call asks for. What has to be tokenised is.
func (a *Activities) next(ctx context.Context, sc *sessionContext, call *workflows.HarnessCall) (n nextContext, err error) {
	switch {
	case call.Chat != nil:
		n, err = a.nextChat(ctx, sc, call.Chat)
	case call.Text != nil:
		n, err = a.nextText(ctx, sc, *call.Text)
	case call.Context != nil:
		n = leaveAt(sc.tokens, call.Context)
	default:
		n = goOn(sc.tokens, call.Append)
	}
	if err != nil {
		return n, err
	}
	return n, sc.allow(&n)
}

// allow refuses a context that the task or a bound does not permit.
func (sc *sessionContext) allow(n *nextContext) error {
	switch {
	case len(n.tokens) == 0:
		return &workflows.InvalidCallError{Field: "token_ids", Problem: "must have at least one token"}
	case !n.rewritten || sc.work.Turns == 0:
		// Before the first turn nothing has been sampled that could be left.
	case sc.work.Spec.Environment.Rewrites == task.RewritesRefuse:
		return &workflows.RewrittenError{AtTokens: n.kept, SessionTokens: len(sc.tokens)}
	case sc.harness.earlierTokens+int64(len(sc.tokens)+len(n.tokens)) > maxSampleTokens:
		return &workflows.LimitError{Limit: fmt.Sprintf("another rewrite would bring the sample's sequences to more than %d tokens", maxSampleTokens)}
	}
	return nil
}

func goOn(tokens, more []int32) nextContext {
	return nextContext{tokens: append(tokens, more...), kept: len(tokens)}
}

// leaveAt compares a whole context with the session's.
func leaveAt(tokens, whole []int32) nextContext {
	common := 0
	for common < min(len(tokens), len(whole)) && tokens[common] == whole[common] {
		common++
	}
	if common == len(tokens) {
		return goOn(tokens, whole[common:])
	}
	return nextContext{tokens: slices.Clone(whole), kept: common, rewritten: true}
}

// nextChat goes on from the session's tokens where the chat goes on from what the
// harness has seen. Otherwise the engine's template says what the context is.
func (a *Activities) nextChat(ctx context.Context, sc *sessionContext, chat *workflows.HarnessChat) (n nextContext, err error) {
	messages, err := transcript.Parse(chat.Messages)
	var field *transcript.FieldError
	if errors.As(err, &field) {
		return n, &workflows.InvalidCallError{Field: "messages" + field.Path, Problem: field.Problem}
	}
	if err != nil {
		return n, err
	}
	if n, err = a.chatTokens(ctx, sc, chat, messages); err != nil {
		return n, tokenizeProblem("messages", err)
	}
	n.seen = func(m *message) *store.Seen {
		shown := append(slices.Clip(messages), transcript.Answer(m.content, m.calls))
		return &store.Seen{Length: len(shown), Digest: transcript.Digest(chat.Tools, shown)}
	}
	return n, nil
}

func (a *Activities) chatTokens(ctx context.Context, sc *sessionContext, chat *workflows.HarnessChat, messages []transcript.Message) (nextContext, error) {
	if seen := sc.harness.seen; seen != nil && seen.Length < len(messages) && slices.Equal(transcript.Digest(chat.Tools, messages[:seen.Length]), seen.Digest) {
		ids, err := a.following(ctx, chat.Tools, messages, seen.Length, sc.harness.stop)
		var final *finalError
		switch {
		case err == nil:
			return goOn(sc.tokens, ids), nil
		case !errors.As(err, &final):
			return nextContext{}, err
		}
		a.cfg.Logger.Warn("a chat that goes on is rendered anew: its template cannot be followed", "session", sc.work.ID, "error", err)
	}
	whole, err := a.tokenize(ctx, engine.TokenizeRequest{Messages: chat.Messages, Tools: chat.Tools, AddGenerationPrompt: true})
	if err != nil {
		return nextContext{}, err
	}
	return leaveAt(sc.tokens, whole), nil
}

// following returns the ids that follow the model's last answer: see behindAnswer. A
// template that refuses made-up chats is asked for the whole one.
func (a *Activities) following(ctx context.Context, tools json.RawMessage, messages []transcript.Message, from int, stop int32) ([]int32, error) {
	ids, err := a.behindAnswer(ctx, tools, messages[from:], stop)
	var final *finalError
	if errors.As(err, &final) {
		return a.difference(ctx, tools, messages, from, stop)
	}
	return ids, err
}

// difference is what the whole chat has beyond its rendering up to the answer, and of
// that the end behind the token that the model stopped with.
func (a *Activities) difference(ctx context.Context, tools json.RawMessage, messages []transcript.Message, from int, stop int32) ([]int32, error) {
	before, err := a.tokenize(ctx, engine.TokenizeRequest{Messages: transcript.Join(nil, messages[:from]), Tools: tools})
	if err != nil {
		return nil, err
	}
	whole, err := a.tokenize(ctx, engine.TokenizeRequest{Messages: transcript.Join(nil, messages), Tools: tools, AddGenerationPrompt: true})
	if err != nil {
		return nil, err
	}
	end := len(before) - 1
	for end >= max(0, len(before)-maxEndTokens) && before[end] != stop {
		end--
	}
	if end < max(0, len(before)-maxEndTokens) || len(whole) < len(before) || !slices.Equal(whole[:len(before)], before) {
		return nil, &finalError{errors.New("the engine's chat template changes earlier messages when others follow")}
	}
	return whole[end+1:], nil
}

// maxEndTokens is how much a template may have behind the token that ends a message.
const maxEndTokens = 8

// nextText goes on from the session's tokens where the text does from what was seen.
func (a *Activities) nextText(ctx context.Context, sc *sessionContext, text string) (n nextContext, err error) {
	if seen := sc.harness.seen; seen != nil && seen.Length <= len(text) && slices.Equal(transcript.DigestText(text[:seen.Length]), seen.Digest) {
		var ids []int32
		if more := text[seen.Length:]; more != "" {
			ids, err = a.tokenize(ctx, engine.TokenizeRequest{Text: more, Bare: true})
		}
		n = goOn(sc.tokens, ids)
	} else {
		var ids []int32
		ids, err = a.tokenize(ctx, engine.TokenizeRequest{Text: text})
		n = leaveAt(sc.tokens, ids)
	}
	if err != nil {
		return n, tokenizeProblem("prompt", err)
	}
	n.seen = func(m *message) *store.Seen {
		return &store.Seen{Length: len(text) + len(m.content), Digest: transcript.DigestText(text, m.content)}
	}
	return n, nil
}

// tokenizeProblem tells what the engines would not tokenise from engines that are away.
func tokenizeProblem(field string, err error) error {
	var final *finalError
	var said *engine.Error
	if errors.As(err, &final) && errors.As(err, &said) && said.Class == engine.FailTurn {
		return &workflows.InvalidCallError{Field: field, Problem: "cannot be tokenised: " + err.Error()}
	}
	if errors.As(err, &final) || errors.Is(err, engine.ErrNotCalled) {
		return &workflows.CallFailedError{Problem: "tokenising " + field + ": " + err.Error()}
	}
	return err
}

// toolFormat is how the model writes tool calls in a chat; empty where it has no tools.
func toolFormat(call *workflows.HarnessCall, spec *task.Spec) toolcall.Format {
	switch {
	case call.Chat == nil || call.Chat.Tools == nil:
		return ""
	case call.Chat.ToolFormat != "":
		return toolcall.Format(call.Chat.ToolFormat)
	case spec.Environment.ToolFormat != "":
		return spec.Environment.ToolFormat
	}
	return toolcall.Hermes
}
