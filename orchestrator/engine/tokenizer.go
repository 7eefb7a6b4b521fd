package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"time"
)

// TokenizeRequest is a prompt that is not token ids yet: exactly one of Text and
// Messages.
type TokenizeRequest struct {
	Text string
	// Messages is a JSON array of chat messages, which the model's template turns
	// into text.
	Messages json.RawMessage
	// Tools is a JSON array of what the model may call, for the template of Messages;
	// nil means none.
	Tools json.RawMessage
	// AddGenerationPrompt ends the template where the assistant's answer begins.
	AddGenerationPrompt bool
	// Bare leaves out what a tokenizer puts around a text that stands for itself, such
	// as a beginning of sequence: Text goes on from another one.
	Bare bool
}

// Tokenizer is the part of an engine that turns text into the model's token ids and
// back. A Client implements it where its engine has such calls. Errors are *Error:
// an engine that lacks a call, or a form of it, answers with class FailTurn.
type Tokenizer interface {
	// Tokenize gives the ids that the engine itself would use for the prompt.
	Tokenize(ctx context.Context, request TokenizeRequest) ([]int32, error)
	// Detokenize gives the text of generated ids. ended says that the model ended the
	// generation: the token that it did that with is then left out of the text.
	Detokenize(ctx context.Context, ids []int32, ended bool) (string, error)
}

var (
	_ Tokenizer = (*VLLM)(nil)
	_ Tokenizer = (*SGLang)(nil)
	_ Tokenizer = (*OpenAI)(nil)
)

// TokenizerOf is the Tokenizer of a client, also of one behind a Breaker.
func TokenizerOf(client Client) (Tokenizer, bool) { return behind[Tokenizer](client) }

const (
	// maxTokenizedBytes is room for a prompt of a million tokens as JSON numbers, or
	// for the text of as many.
	maxTokenizedBytes = 32 << 20
	// tokenizeTimeout bounds one call: tokenising takes seconds even for a prompt of megabytes.
	tokenizeTimeout = 20 * time.Second
)

// tokenizeHint says what a server without these routes is.
const tokenizeHint = "give prompts as token_ids, and scorers that look at ids or at the environment's reward"

// Tokenize implements Tokenizer by POST /tokenize, whose forms for text and chat differ
// in one member.
func (v *VLLM) Tokenize(ctx context.Context, request TokenizeRequest) ([]int32, error) {
	model, err := v.modelName(ctx)
	if err != nil {
		return nil, err
	}
	document := map[string]any{"model": model}
	if request.Messages != nil {
		document["messages"], document["add_generation_prompt"] = request.Messages, request.AddGenerationPrompt
		if request.Tools != nil {
			document["tools"] = request.Tools
		}
	} else {
		document["prompt"] = request.Text
		if request.Bare {
			document["add_special_tokens"] = false
		}
	}
	return v.tokenize(ctx, document)
}

// Detokenize implements Tokenizer by POST /detokenize.
func (v *VLLM) Detokenize(ctx context.Context, ids []int32, ended bool) (string, error) {
	model, err := v.modelName(ctx)
	if err != nil {
		return "", err
	}
	return v.detokenize(ctx, map[string]any{"model": model, "tokens": withoutEnd(ids, ended)})
}

// Tokenize implements Tokenizer by POST /tokenize (SGLang 0.5.4 or later), which knows
// text only: the chat template cannot be asked for.
func (s *SGLang) Tokenize(ctx context.Context, request TokenizeRequest) ([]int32, error) {
	if request.Messages != nil {
		return nil, &Error{Class: FailTurn, Message: "SGLang tokenises text only: give the prompt as token_ids, or as text in the model's chat template"}
	}
	// The model's name is checked by nobody there; the field must not be missing.
	return s.tokenize(ctx, map[string]any{"model": "default", "prompt": request.Text, "add_special_tokens": !request.Bare})
}

// Detokenize implements Tokenizer by POST /detokenize (SGLang 0.5.4 or later).
func (s *SGLang) Detokenize(ctx context.Context, ids []int32, ended bool) (string, error) {
	return s.detokenize(ctx, map[string]any{"model": "default", "tokens": withoutEnd(ids, ended), "skip_special_tokens": false})
}

// Tokenize implements Tokenizer with the codec: the server has no part in it.
func (o *OpenAI) Tokenize(_ context.Context, request TokenizeRequest) ([]int32, error) {
	if request.Messages != nil {
		return nil, &Error{Class: FailTurn, Message: "an engine that takes text has no chat template to ask for: give the prompt as text"}
	}
	return o.codec.Encode(nil, request.Text), nil
}

// Detokenize implements Tokenizer with the codec, whose ids hold no token that would
// end a generation.
func (o *OpenAI) Detokenize(_ context.Context, ids []int32, _ bool) (string, error) {
	text, err := o.codec.Decode(ids)
	if err != nil {
		return "", &Error{Class: FailTurn, Message: "turning ids into text", Err: err}
	}
	return text, nil
}

// withoutEnd drops the token that ended a generation: an engine counts it into the
// output and leaves it out of the text.
func withoutEnd(ids []int32, ended bool) []int32 {
	if ended && len(ids) > 0 {
		ids = ids[:len(ids)-1]
	}
	if ids == nil {
		return []int32{}
	}
	return ids
}

// tokenize asks /tokenize.
func (s *server) tokenize(ctx context.Context, document map[string]any) ([]int32, error) {
	var answer struct {
		Tokens []int32 `json:"tokens"`
	}
	if err := s.exchange(ctx, "/tokenize", document, &answer); err != nil {
		return nil, err
	}
	for i, id := range answer.Tokens {
		if id < 0 {
			return nil, &Error{Class: RetryElsewhere, Message: fmt.Sprintf("/tokenize answers with token %d at position %d", id, i)}
		}
	}
	return answer.Tokens, nil
}

// detokenize asks /detokenize: vLLM calls the answer prompt, SGLang text.
func (s *server) detokenize(ctx context.Context, document map[string]any) (string, error) {
	var answer struct {
		Prompt *string `json:"prompt"`
		Text   *string `json:"text"`
	}
	if err := s.exchange(ctx, "/detokenize", document, &answer); err != nil {
		return "", err
	}
	switch {
	case answer.Prompt != nil:
		return *answer.Prompt, nil
	case answer.Text != nil:
		return *answer.Text, nil
	}
	return "", &Error{Class: RetryElsewhere, Message: "/detokenize answers without text"}
}

// exchange posts a document and reads one, within tokenizeTimeout.
func (s *server) exchange(parent context.Context, path string, document, answer any) error {
	body, err := json.Marshal(document)
	if err != nil {
		return &Error{Class: FailTurn, Message: "encoding the question for " + path, Err: err}
	}
	ctx, cancel := context.WithTimeout(parent, tokenizeTimeout)
	defer cancel()
	text, err := s.call(ctx, "POST", path, body, maxTokenizedBytes)
	if err != nil && ctx.Err() != nil && parent.Err() == nil {
		return &Error{Class: RetryElsewhere, Message: fmt.Sprintf("%s took longer than %s", path, tokenizeTimeout), Err: err}
	}
	if err != nil {
		return missing(err, path, tokenizeHint)
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return &Error{Class: RetryElsewhere, Message: "reading the answer of " + path, Err: err}
	}
	return nil
}
