package activities

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"holdfast/orchestrator/toolcall"
	"holdfast/orchestrator/transcript"
	"holdfast/workflows"
)

// speech turns ids into text as they come. Text of some ids is not the text of each put
// together, so every piece is read with the ids before it, and only what that adds counts.
type speech struct {
	read func(ctx context.Context, ids []int32, ended bool) (string, error)
	text strings.Builder
	// The ids from..to were read last, as head; those before from are done with.
	from, to int
	head     string
}

// take reads all ids so far. What ends within a character waits for the rest of it.
func (s *speech) take(ctx context.Context, ids []int32) error {
	if len(ids) <= s.to {
		return nil
	}
	whole, err := s.read(ctx, ids[s.from:], false)
	if err != nil {
		return err
	}
	more, ok := strings.CutPrefix(whole, s.head)
	if !ok || more == "" || strings.HasSuffix(whole, "\ufffd") {
		return nil
	}
	head, err := s.read(ctx, ids[s.to:], false)
	if err != nil {
		return err
	}
	s.text.WriteString(more)
	s.from, s.to, s.head = s.to, len(ids), head
	return nil
}

// end reads what is left, whether it ends within a character or not.
func (s *speech) end(ctx context.Context, ids []int32, ended bool) (string, error) {
	if s.from > len(ids) {
		return "", errors.New("the output lost tokens whose text was read")
	}
	whole, err := s.read(ctx, ids[s.from:], ended)
	if err != nil {
		return "", err
	}
	more, ok := strings.CutPrefix(whole, s.head)
	if !ok {
		return "", fmt.Errorf("the text of the last %d tokens does not go on from %q", len(ids)-s.from, s.head)
	}
	s.text.WriteString(more)
	return s.text.String(), nil
}

// voice gives a harness the text of a turn: at the end, and while it comes if asked to.
type voice struct {
	speech
	format toolcall.Format
	screen transcript.Screen
	onText func(string)

	mu sync.Mutex
	// heard are the ids so far but for the last, which may turn out to be no text but
	// the model's end.
	heard []int32
	more  chan struct{}
	ended chan struct{}
	done  sync.WaitGroup
}

// newVoice returns nil for a call that asks for no text.
func (a *Activities) newVoice(ctx context.Context, call *workflows.HarnessCall, format toolcall.Format, onText func(string)) *voice {
	if !call.WithText && call.Chat == nil && call.Text == nil {
		return nil
	}
	v := &voice{speech: speech{read: a.textOf}, format: format, screen: transcript.Screen{Format: format}, onText: onText}
	if onText != nil {
		v.more, v.ended = make(chan struct{}, 1), make(chan struct{})
		v.done.Go(func() { v.speak(ctx) })
	}
	return v
}

// textOf asks the engines for the text of ids.
func (a *Activities) textOf(ctx context.Context, ids []int32, ended bool) (text string, err error) {
	if len(ids) == 0 || ended && len(ids) == 1 {
		return "", nil
	}
	err = a.askEngines(ctx, func() (err error) {
		text, err = a.cfg.Engines.Detokenize(ctx, ids, ended)
		return err
	})
	return text, err
}

// hear takes in what is generated; it does not wait for the text.
func (v *voice) hear(ids []int32) {
	if v == nil || v.onText == nil || len(ids) < 2 {
		return
	}
	v.mu.Lock()
	if n := len(ids) - 1; n > len(v.heard) {
		v.heard = append(v.heard, ids[len(v.heard):n]...)
	}
	v.mu.Unlock()
	select {
	case v.more <- struct{}{}:
	default:
	}
}

// speak shows text until the turn has ended. What cannot be read now is read later.
func (v *voice) speak(ctx context.Context) {
	for {
		select {
		case <-v.ended:
			return
		case <-ctx.Done():
			return
		case <-v.more:
		}
		v.mu.Lock()
		ids := slices.Clone(v.heard)
		v.mu.Unlock()
		if err := v.take(ctx, ids); err != nil {
			continue
		}
		if more := v.screen.Grow(v.text.String()); more != "" {
			v.onText(more)
		}
	}
}

// hush stops speaking.
func (v *voice) hush() {
	if v == nil || v.onText == nil {
		return
	}
	close(v.ended)
	v.done.Wait()
}

// message is what a turn says.
type message struct {
	content string
	calls   []toolcall.Call
}

// message reads the whole turn, once it is over, and shows what is left of it.
func (v *voice) message(ctx context.Context, turn int, ids []int32, ended bool) (m message, err error) {
	if len(v.heard) > len(ids) || !slices.Equal(v.heard, ids[:len(v.heard)]) {
		return m, errors.New("an engine took back what was shown; ask again for the whole turn")
	}
	text, err := v.end(ctx, ids, ended)
	if err != nil {
		return m, fmt.Errorf("reading the text of turn %d: %w", turn, err)
	}
	m.content, m.calls = transcript.Read(v.format, text, turn)
	if v.onText == nil {
		return m, nil
	}
	rest, ok := v.screen.End(text, m.content)
	if !ok {
		return m, fmt.Errorf("the content of turn %d is not what was shown of it", turn)
	}
	if rest != "" {
		v.onText(rest)
	}
	return m, nil
}

// put gives the message to a harness.
func (m *message) put(made *workflows.HarnessTurn) {
	made.Text = m.content
	for _, call := range m.calls {
		made.ToolCalls = append(made.ToolCalls, workflows.HarnessToolCall{ID: call.ID, Name: call.Name, Arguments: call.Arguments})
	}
}
