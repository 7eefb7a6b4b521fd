package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/google/uuid"

	"holdfast/orchestrator/engine"
)

// chatTalk sends messages. What the engine is asked for directly is what stands behind
// a chat completion of its own: the whole chat in the template and as ids, the
// generation, the text of the output.
type chatTalk struct {
	harnessEnds
	session       uuid.UUID
	own, answered []chatLine
}

type chatLine struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// newChatTalk begins with a message that makes a prompt of about so many tokens: the
// toy's tokens of ordinary text are its bytes.
func newChatTalk(ends harnessEnds, session uuid.UUID, promptTokens int) *chatTalk {
	begin := []chatLine{{"system", strings.Repeat("All work and no play. ", promptTokens/22)}}
	return &chatTalk{harnessEnds: ends, session: session, own: begin, answered: begin}
}

func (t *chatTalk) directly(ctx context.Context, n int) error {
	tokenizer, ok := engine.TokenizerOf(t.direct)
	if !ok {
		return errors.New("the engine has no tokenizer")
	}
	t.own = append(t.own[:len(t.own):len(t.own)], chatLine{"user", fmt.Sprintf("Number %d", n)})
	messages, err := json.Marshal(t.own)
	if err != nil {
		return err
	}
	prompt, err := tokenizer.Tokenize(ctx, engine.TokenizeRequest{Messages: messages, AddGenerationPrompt: true})
	if err != nil {
		return err
	}
	result, err := generateDirectly(ctx, t.direct, t.session, n, prompt)
	if err != nil {
		return err
	}
	text, err := tokenizer.Detokenize(ctx, result.OutputIDs, false)
	t.own = append(t.own, chatLine{"assistant", text})
	return err
}

func (t *chatTalk) through(ctx context.Context, n int) error {
	t.answered = append(t.answered[:len(t.answered):len(t.answered)], chatLine{"user", fmt.Sprintf("Number %d", n)})
	body, err := json.Marshal(map[string]any{
		"model": "default", "messages": t.answered, "max_tokens": harnessOutputTokens, "min_tokens": harnessOutputTokens, "ignore_eos": true,
	})
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, t.address+"/v1/sessions/"+t.session.String()+"/chat/completions", bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := t.transport.RoundTrip(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	var completion struct {
		Choices []struct {
			Message chatLine `json:"message"`
		} `json:"choices"`
	}
	if err := json.Unmarshal(text, &completion); err != nil || len(completion.Choices) != 1 {
		return fmt.Errorf("a chat completion of status %d: %.200s", response.StatusCode, text)
	}
	t.answered = append(t.answered, completion.Choices[0].Message)
	return nil
}
