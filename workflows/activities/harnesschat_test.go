package activities

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"

	"holdfast/orchestrator/engine"
	"holdfast/router"
	"holdfast/store"
	"holdfast/workflows"
	"holdfast/workflows/task"
)

// speaker is an engine that says what a test tells it to. Its tokens are bytes, and two
// special ones that begin and end a message. Its template drops what earlier messages
// of the assistant thought, as those of real models do.
type speaker struct {
	*engines
	// strict makes the template refuse a chat whose first message is not of role system.
	strict bool

	mu      sync.Mutex
	say     []string
	prompts [][]int32
	outputs [][]int32
	// rendered are the bytes of the chats that were tokenised.
	rendered int
}

const (
	messageBegins int32 = 1_000
	messageEnds   int32 = 1_001
)

func idsOfText(text string) []int32 { return engine.Bytes{}.Encode(nil, text) }

func (s *speaker) Tokenize(_ context.Context, request engine.TokenizeRequest) ([]int32, error) {
	if request.Messages == nil {
		ids := idsOfText(request.Text)
		if !request.Bare {
			ids = append([]int32{messageBegins}, ids...)
		}
		return ids, nil
	}
	var messages []struct {
		Role      string
		Content   string
		ToolCalls []json.RawMessage `json:"tool_calls"`
	}
	if err := json.Unmarshal(request.Messages, &messages); err != nil {
		return nil, &engine.Error{Class: engine.FailTurn, Message: err.Error()}
	}
	if s.strict && messages[0].Role != "system" {
		return nil, &engine.Error{Class: engine.FailTurn, Message: "the first message must be the system's"}
	}
	s.mu.Lock()
	s.rendered += len(request.Messages)
	s.mu.Unlock()
	ids := idsOfText(string(request.Tools))
	for i, m := range messages {
		if _, answer, thought := strings.Cut(m.Content, "</think>"); thought && i < len(messages)-1 {
			m.Content = answer
		}
		for _, call := range m.ToolCalls {
			m.Content += "<tool_call>" + string(call) + "</tool_call>"
		}
		ids = append(append(append(ids, messageBegins), idsOfText(m.Role+"\n"+m.Content)...), messageEnds)
		ids = append(ids, idsOfText("\n")...)
	}
	if request.AddGenerationPrompt {
		ids = append(append(ids, messageBegins), idsOfText("assistant\n")...)
	}
	return ids, nil
}

func (s *speaker) Detokenize(_ context.Context, ids []int32, ended bool) (string, error) {
	if ended {
		ids = ids[:len(ids)-1]
	}
	var text []byte
	for _, id := range ids {
		if id < messageBegins {
			text = append(text, byte(id))
		}
	}
	return strings.ToValidUTF8(string(text), "\ufffd"), nil
}

func (s *speaker) Generate(_ context.Context, _ router.InstanceID, _ router.SessionID, request engine.Request, onProgress func(engine.Progress)) (engine.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := append(idsOfText(s.say[0]), messageEnds)
	s.say = s.say[1:]
	result := engine.Result{PromptTokens: len(request.Prompt), CachedTokens: -1, FinishReason: engine.FinishStop}
	if len(ids) > request.MaxTokens {
		ids, result.FinishReason = ids[:request.MaxTokens], engine.FinishLength
	}
	for i := range ids {
		result.OutputIDs = append(result.OutputIDs, ids[i])
		result.Logprobs = append(result.Logprobs, -float32(i+1)/1024)
		onProgress(engine.Progress{OutputTokens: i + 1, OutputIDs: result.OutputIDs, Logprobs: result.Logprobs})
	}
	s.prompts, s.outputs = append(s.prompts, slices.Clone(request.Prompt)), append(s.outputs, ids)
	return result, nil
}

// chatter is a harness that keeps its history as messages.
type chatter struct {
	f        *fixture
	id       uuid.UUID
	messages []map[string]any
	tools    json.RawMessage
	calls    int
}

func (c *chatter) add(role, content string) {
	c.messages = append(c.messages, map[string]any{"role": role, "content": content})
}

func (c *chatter) ask(a *Activities, progress workflows.HarnessProgress) (workflows.HarnessTurn, error) {
	raw, err := json.Marshal(c.messages)
	must(c.f.t, err)
	c.calls++
	return a.HarnessTurn(c.f.t.Context(), c.id, workflows.HarnessCall{Content: fmt.Sprintf("%x", raw), Chat: &workflows.HarnessChat{Messages: raw, Tools: c.tools}, MaxTokens: 200}, progress)
}

// turn asks and takes the answer into the history, as libraries do.
func (c *chatter) turn(a *Activities) workflows.HarnessTurn {
	c.f.t.Helper()
	var shown strings.Builder
	made, err := c.ask(a, workflows.HarnessProgress{OnWait: func(string) {}, OnText: func(more string) { shown.WriteString(more) }})
	must(c.f.t, err)
	if shown.String() != made.Text {
		c.f.t.Fatalf("shown was %q, the text is %q", shown.String(), made.Text)
	}
	answer := map[string]any{"role": "assistant", "content": made.Text}
	var calls []any
	for _, call := range made.ToolCalls {
		calls = append(calls, map[string]any{"id": call.ID, "type": "function", "function": map[string]any{"name": call.Name, "arguments": string(call.Arguments)}})
	}
	if calls != nil {
		answer["tool_calls"] = calls
	}
	if made.Text == "" {
		answer["content"] = nil
	}
	c.messages = append(c.messages, answer)
	return made
}

const oneTool = `[{"type":"function","function":{"name":"look"}}]`

// TestChatGoesOnFromSampledTokens: thoughts that the template would drop, calls, text
// of several bytes, an output cut by length and a worker that died: each prompt is the one
// before it with what was sampled and what is new, and the sample says so.
func TestChatGoesOnFromSampledTokens(t *testing.T) {
	for name, strict := range map[string]bool{"new messages alone": false, "a template that needs the whole chat": true} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			s := &speaker{engines: newEngines(t), strict: strict, say: []string{
				`<tool_call>{"name":"look","arguments":{"at":"the door"}}</tool_call>`, "It is oak: \u00e9 \u2603.", "Good bye.",
			}}
			if !strict {
				s.say[0] = "<think>a door?</think>" + s.say[0]
				s.say[2] = strings.Repeat("x", 300)
				s.say = append(s.say, "Cut before.")
			}
			c := &chatter{f: f, id: f.session(harnessed(200)), tools: json.RawMessage(oneTool)}
			a := f.worker(s, &placements{}, testCheckpointTokens)
			c.add("system", "You are a detective.")
			c.add("user", "What is the door made of?")
			first := c.turn(a)
			if len(first.ToolCalls) != 1 || first.ToolCalls[0].Name != "look" || string(first.ToolCalls[0].Arguments) != `{"at":"the door"}` || first.FinishReason != "stop" {
				t.Fatalf("%+v", first)
			}
			c.messages = append(c.messages, map[string]any{"role": "tool", "tool_call_id": first.ToolCalls[0].ID, "content": "oak"})
			second := c.turn(a)
			if second.Text != "It is oak: \u00e9 \u2603." || second.PromptTokens != int64(len(s.prompts[1])) {
				t.Fatalf("%+v", second)
			}
			// Another worker knows no more than the store.
			a = f.worker(s, &placements{}, testCheckpointTokens)
			c.add("user", "Thanks.")
			third := c.turn(a)
			if !strict {
				if third.FinishReason != "length" {
					t.Fatalf("%+v", third)
				}
				c.add("user", "Go on.")
				c.turn(a)
			}
			want := s.prompts[0]
			between := []string{"\n~tool\noak^\n~assistant\n", "\n~user\nThanks.^\n~assistant\n", "^\n~user\nGo on.^\n~assistant\n"}
			for i := 1; i < len(s.prompts); i++ {
				want = slices.Concat(want, s.outputs[i-1], special(between[i-1]))
				if !slices.Equal(s.prompts[i], want) {
					t.Fatalf("prompt %d is %v\nwant %v", i, s.prompts[i], want)
				}
			}
			sample := f.end(a, c.id, workflows.TurnReply{Status: router.Completed.String()})
			want = append(slices.Clone(want), s.outputs[len(s.outputs)-1]...)
			if !slices.Equal(sample.Tokens.TokenIDs, want) || len(sample.Tokens.Earlier) != 0 || masked(sample.Tokens) != total(s.outputs) {
				t.Fatalf("the sample has %v with %d earlier sequences\nwant %v", sample.Tokens.TokenIDs, len(sample.Tokens.Earlier), want)
			}
		})
	}
}

// special turns ~ and ^ into the tokens that begin and end a message.
func special(text string) []int32 {
	ids := idsOfText(text)
	for i, id := range ids {
		switch id {
		case '~':
			ids[i] = messageBegins
		case '^':
			ids[i] = messageEnds
		}
	}
	return ids
}

func masked(tokens *store.SampleTokens) (count int) {
	for _, bit := range tokens.LossMask {
		count += int(bit)
	}
	return count
}

func total(outputs [][]int32) (count int) {
	for _, ids := range outputs {
		count += len(ids)
	}
	return count
}

// TestCompactedChatBeginsASequence: a history that the harness has rewritten is what
// the engine gets, and what was sampled before counts where it was sampled.
func TestCompactedChatBeginsASequence(t *testing.T) {
	f := newFixture(t)
	s := &speaker{engines: newEngines(t), say: []string{"One.", "Two.", "Three.", "Four."}}
	p := &placements{}
	a := f.worker(s, p, testCheckpointTokens)
	c := &chatter{f: f, id: f.session(harnessed(200))}
	c.add("system", "Count.")
	c.add("user", "First?")
	c.turn(a)
	c.add("user", "Second?")
	c.turn(a)
	// The harness keeps the beginning and the first answer, which it sends again.
	c.messages = slices.Clone(c.messages[:3])
	c.add("user", "You said two things. Third?")
	c.turn(a)
	a = f.worker(s, p, testCheckpointTokens)
	c.add("user", "Fourth?")
	c.turn(a)

	asked := p.questions[2]
	if asked.KnownBlocks != 0 || asked.PromptTokens != int64(len(s.prompts[2])) || len(asked.NewBlocks) != len(s.prompts[2])/16 {
		t.Errorf("the router was asked with %+v for a prompt of %d tokens", asked, len(s.prompts[2]))
	}
	sample := f.end(a, c.id, workflows.TurnReply{Status: router.Completed.String()})
	if len(sample.Tokens.Earlier) != 1 || sample.Usage.Rewrites != 1 {
		t.Fatalf("%d earlier sequences, %d rewrites", len(sample.Tokens.Earlier), sample.Usage.Rewrites)
	}
	left := sample.Tokens.Earlier[0]
	if !slices.Equal(left.TokenIDs, slices.Concat(s.prompts[1], s.outputs[1])) || masked(&left) != total(s.outputs[:2]) {
		t.Errorf("the sequence that was left is %v", left.TokenIDs)
	}
	if !slices.Equal(sample.Tokens.TokenIDs, slices.Concat(s.prompts[3], s.outputs[3])) || masked(sample.Tokens) != total(s.outputs[2:]) {
		t.Errorf("the last sequence is %v", sample.Tokens.TokenIDs)
	}
	for i, bit := range sample.Tokens.LossMask[:len(s.prompts[2])] {
		if bit != 0 {
			t.Fatalf("token %d of the rewritten prompt counts", i)
		}
	}
	turns, err := f.SessionTurns(t.Context(), c.id, 1, 1)
	must(t, err)
	if turns[0].KeptTokens == nil || int(*turns[0].KeptTokens) != sample.Tokens.Kept {
		t.Errorf("turn 2 kept %v, the sequence %d", turns[0].KeptTokens, sample.Tokens.Kept)
	}
}

func TestRepeatedChatGivesTheTurnThatItMade(t *testing.T) {
	f := newFixture(t)
	s := &speaker{engines: newEngines(t), say: []string{"One.", "Two."}}
	a := f.worker(s, &placements{}, testCheckpointTokens)
	c := &chatter{f: f, id: f.session(harnessed(200))}
	c.add("user", "First?")
	first, err := c.ask(a, ignore)
	must(t, err)
	for _, worker := range []*Activities{a, f.worker(s, &placements{}, testCheckpointTokens)} {
		again, err := c.ask(worker, ignore)
		must(t, err)
		if !again.Repeated || again.Turn != 0 || again.Text != "One." || !slices.Equal(again.OutputIDs, first.OutputIDs) {
			t.Fatalf("asked again: %+v", again)
		}
	}
	c.add("assistant", "One.")
	c.add("user", "First?")
	if second := c.turn(a); second.Turn != 1 || second.Repeated || second.Text != "Two." {
		t.Fatalf("the next turn: %+v", second)
	}
}

func TestTextGoesOnFromSampledTokens(t *testing.T) {
	f := newFixture(t)
	s := &speaker{engines: newEngines(t), say: []string{" upon a time", " there was"}}
	a := f.worker(s, &placements{}, testCheckpointTokens)
	id := f.session(harnessed(200))
	text := "Once"
	first := f.call(a, id, workflows.HarnessCall{RequestID: "a", Text: &text})
	text += first.Text + ","
	second := f.call(a, id, workflows.HarnessCall{RequestID: "b", Text: &text})
	want := slices.Concat([]int32{messageBegins}, idsOfText("Once upon a time"), []int32{messageEnds}, idsOfText(","))
	if second.Text != " there was" || !slices.Equal(s.prompts[1], want) {
		t.Fatalf("%+v after %v, want %v", second, s.prompts[1], want)
	}
	sample := f.end(a, id, workflows.TurnReply{Status: router.Completed.String()})
	if len(sample.Tokens.Earlier) != 0 || masked(sample.Tokens) != total(s.outputs) {
		t.Fatalf("%d earlier sequences, %d tokens count", len(sample.Tokens.Earlier), masked(sample.Tokens))
	}
}

func TestTokenCallThatLeavesTheContext(t *testing.T) {
	f := newFixture(t)
	s := &speaker{engines: newEngines(t), say: []string{"One.", "Two.", "Three."}}
	a := f.worker(s, &placements{}, testCheckpointTokens)
	id := f.session(harnessed(200))
	f.call(a, id, workflows.HarnessCall{RequestID: "a", Append: []int32{7}})
	// The same prompt once more, under another name: the answer is sampled again.
	f.call(a, id, workflows.HarnessCall{RequestID: "b", Context: s.prompts[0]})
	f.call(a, id, workflows.HarnessCall{RequestID: "c", Context: []int32{9}})
	sample := f.end(a, id, workflows.TurnReply{Status: router.Completed.String()})
	if len(sample.Tokens.Earlier) != 2 {
		t.Fatalf("%d earlier sequences", len(sample.Tokens.Earlier))
	}
	for i, sequence := range append(slices.Clone(sample.Tokens.Earlier), *sample.Tokens) {
		if !slices.Equal(sequence.TokenIDs, slices.Concat(s.prompts[i], s.outputs[i])) || masked(&sequence) != len(s.outputs[i]) {
			t.Errorf("sequence %d is %v, %d tokens count", i, sequence.TokenIDs, masked(&sequence))
		}
	}
	if sample.Tokens.Kept != 0 || sample.Tokens.Earlier[1].Kept != len(s.prompts[0]) {
		t.Errorf("kept %d and %d", sample.Tokens.Earlier[1].Kept, sample.Tokens.Kept)
	}
}

func TestChatsThatAreRefused(t *testing.T) {
	f := newFixture(t)
	a := f.worker(&speaker{engines: newEngines(t), say: []string{"One."}}, &placements{}, testCheckpointTokens)
	spec := harnessed(200)
	spec.Environment.Rewrites = task.RewritesRefuse
	id := f.session(spec)
	var invalid *workflows.InvalidCallError
	_, err := a.HarnessTurn(t.Context(), id, workflows.HarnessCall{RequestID: "a", Chat: &workflows.HarnessChat{Messages: json.RawMessage(`[{"role":"user","content":"x"},{}]`)}}, ignore)
	if !errors.As(err, &invalid) || invalid.Field != "messages[1].role" {
		t.Fatalf("a message without a role got %v", err)
	}
	_, err = a.HarnessTurn(t.Context(), id, workflows.HarnessCall{RequestID: "a", Chat: &workflows.HarnessChat{Messages: json.RawMessage(`[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]`)}}, ignore)
	if !errors.As(err, &invalid) || invalid.Field != "messages[0].content" {
		t.Fatalf("a picture got %v", err)
	}
	// This engine takes content as text only.
	_, err = a.HarnessTurn(t.Context(), id, workflows.HarnessCall{RequestID: "a", Chat: &workflows.HarnessChat{Messages: json.RawMessage(`[{"role":"user","content":[{"type":"text","text":"x"}]}]`)}}, ignore)
	if !errors.As(err, &invalid) || invalid.Field != "messages" {
		t.Fatalf("a chat that the engine refuses got %v", err)
	}
	f.call(a, id, workflows.HarnessCall{RequestID: "a", Context: []int32{1, 2}})
	var rewritten *workflows.RewrittenError
	if _, err := a.HarnessTurn(t.Context(), id, workflows.HarnessCall{RequestID: "b", Context: []int32{1, 3}}, ignore); !errors.As(err, &rewritten) || rewritten.AtTokens != 1 {
		t.Fatalf("a rewrite got %v", err)
	}
}
