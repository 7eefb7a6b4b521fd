package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/labstack/echo/v4"

	"holdfast/workflows"
)

// openAIAnswer writes the answer of one call: a document behind blank lines, or events.
type openAIAnswer struct {
	c     echo.Context
	kind  openAIKind
	asked *openAIRequest
	head  openAIHead

	mu    sync.Mutex
	begun bool
	// spoken: the first event of the message has been sent.
	spoken bool
}

// openAIHead is common to documents and events.
type openAIHead struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	Model   string `json:"model"`
}

// openAITurnFields stand beside OpenAI's own, for those who want them.
type openAITurnFields struct {
	Turn          int    `json:"turn"`
	PolicyVersion int64  `json:"policy_version"`
	Instance      string `json:"instance"`
	Repeated      bool   `json:"repeated,omitempty"`
}

type openAIDocument struct {
	openAIHead
	// PromptTokenIDs stand here in a chat, as vLLM has them, else in the choice.
	PromptTokenIDs []int32           `json:"prompt_token_ids,omitempty"`
	Choices        []openAIChoice    `json:"choices"`
	Usage          *openAIUsage      `json:"usage,omitempty"`
	Turn           *openAITurnFields `json:"holdfast,omitempty"`
}

// openAIChoice is the one choice: of a chat with a message or a delta, else with text.
type openAIChoice struct {
	Index        int            `json:"index"`
	Message      *openAIMessage `json:"message,omitempty"`
	Delta        *openAIMessage `json:"delta,omitempty"`
	Text         *string        `json:"text,omitempty"`
	Logprobs     any            `json:"logprobs"`
	FinishReason *string        `json:"finish_reason"`
	TokenIDs     []int32        `json:"token_ids,omitempty"`
	PromptIDs    []int32        `json:"prompt_token_ids,omitempty"`
}

type openAIMessage struct {
	Role      string           `json:"role,omitempty"`
	Content   *string          `json:"content,omitempty"`
	ToolCalls []openAIToolCall `json:"tool_calls,omitempty"`
}

// MarshalJSON writes a whole message's missing content as null, as OpenAI does.
func (c openAIChoice) MarshalJSON() ([]byte, error) {
	type plain openAIChoice
	if c.Message == nil || c.Message.Content != nil {
		return json.Marshal(plain(c))
	}
	type message struct {
		Role      string           `json:"role"`
		Content   *string          `json:"content"`
		ToolCalls []openAIToolCall `json:"tool_calls,omitempty"`
	}
	return json.Marshal(struct {
		plain
		Message message `json:"message"`
	}{plain(c), message(*c.Message)})
}

type openAIToolCall struct {
	// Index stands in events only.
	Index    *int               `json:"index,omitempty"`
	ID       string             `json:"id"`
	Type     string             `json:"type"`
	Function openAIToolFunction `json:"function"`
}

type openAIToolFunction struct {
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

type openAIUsage struct {
	PromptTokens     int64                `json:"prompt_tokens"`
	CompletionTokens int64                `json:"completion_tokens"`
	TotalTokens      int64                `json:"total_tokens"`
	Details          *openAIPromptDetails `json:"prompt_tokens_details,omitempty"`
}

type openAIPromptDetails struct {
	CachedTokens int64 `json:"cached_tokens"`
}

func newOpenAIAnswer(c echo.Context, kind openAIKind, asked *openAIRequest) *openAIAnswer {
	a := &openAIAnswer{c: c, kind: kind, asked: asked, head: openAIHead{Created: time.Now().Unix(), Model: asked.Model}}
	prefix := "cmpl-"
	a.head.Object = "text_completion"
	if kind == openAIChat {
		prefix, a.head.Object = "chatcmpl-", "chat.completion"
		if asked.Stream {
			a.head.Object = "chat.completion.chunk"
		}
	}
	a.head.ID = prefix + stateOf(c.Request().Context()).id
	return a
}

// onText streams text, where that is asked for.
func (a *openAIAnswer) onText() func(string) {
	if !a.asked.Stream {
		return nil
	}
	return func(more string) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.speak(more)
	}
}

func (a *openAIAnswer) begin() {
	if a.begun {
		return
	}
	a.begun = true
	mediaType := jsonMediaType
	if a.asked.Stream {
		mediaType = eventMediaType
	}
	a.c.Response().Header().Set(echo.HeaderContentType, mediaType)
	a.c.Response().WriteHeader(http.StatusOK)
}

func (a *openAIAnswer) keepAlive() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.begin()
	if a.asked.Stream {
		a.write([]byte(": waiting\n\n"))
		return
	}
	a.write([]byte("\n"))
}

// speak sends a piece of the content.
func (a *openAIAnswer) speak(more string) {
	if a.kind == openAIText {
		a.event(openAIChoice{Text: &more})
		return
	}
	a.introduce()
	a.event(openAIChoice{Delta: &openAIMessage{Content: &more}})
}

// introduce sends who speaks, once.
func (a *openAIAnswer) introduce() {
	if a.spoken || a.kind == openAIText {
		return
	}
	a.spoken = true
	nothing := ""
	a.event(openAIChoice{Delta: &openAIMessage{Role: "assistant", Content: &nothing}})
}

// turn sends the turn and ends the answer.
func (a *openAIAnswer) turn(made *workflows.HarnessTurn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	choice := a.last(made)
	calls := toolCallsOf(made)
	if !a.asked.Stream {
		if a.kind == openAIText {
			choice.Text = &made.Text
		} else {
			choice.Message = &openAIMessage{Role: "assistant", ToolCalls: calls}
			if made.Text != "" || calls == nil {
				choice.Message.Content = &made.Text
			}
		}
		whole := a.document(made, choice)
		whole.Usage = usageOf(made)
		text := formatted(whole, "%s\n")
		if !a.begun {
			// The caller need not wait for the end of the connection's last chunk.
			a.c.Response().Header().Set(echo.HeaderContentLength, strconv.Itoa(len(text)))
		}
		a.begin()
		a.write(text)
		return
	}
	a.introduce()
	if calls != nil {
		for i := range calls {
			index := i
			calls[i].Index = &index
		}
		a.event(openAIChoice{Delta: &openAIMessage{ToolCalls: calls}})
	}
	if a.kind == openAIText {
		nothing := ""
		choice.Text = &nothing
	} else {
		choice.Delta = &openAIMessage{}
	}
	a.send(a.document(made, choice), "data: %s\n\n")
	if a.asked.StreamOptions != nil && a.asked.StreamOptions.IncludeUsage {
		a.send(openAIDocument{openAIHead: a.head, Choices: []openAIChoice{}, Usage: usageOf(made)}, "data: %s\n\n")
	}
	a.write([]byte("data: [DONE]\n\n"))
}

// document is what ends an answer: with the turn's own fields.
func (a *openAIAnswer) document(made *workflows.HarnessTurn, choice openAIChoice) openAIDocument {
	d := openAIDocument{openAIHead: a.head, Turn: &openAITurnFields{Turn: made.Turn, PolicyVersion: made.PolicyVersion, Instance: made.Instance, Repeated: made.Repeated}}
	if a.kind == openAIChat {
		d.PromptTokenIDs = made.PromptIDs
	} else {
		choice.PromptIDs = made.PromptIDs
	}
	d.Choices = []openAIChoice{choice}
	return d
}

// last is the choice as far as it says how the turn ended.
func (a *openAIAnswer) last(made *workflows.HarnessTurn) openAIChoice {
	reason := made.FinishReason
	if len(made.ToolCalls) > 0 {
		reason = "tool_calls"
	}
	choice := openAIChoice{FinishReason: &reason}
	if a.asked.ReturnTokenIDs {
		choice.TokenIDs = made.OutputIDs
	}
	if a.asked.withLogprobs() && made.Logprobs != nil {
		choice.Logprobs = logprobsOf(a.kind, made)
	}
	return choice
}

func toolCallsOf(made *workflows.HarnessTurn) (calls []openAIToolCall) {
	for _, call := range made.ToolCalls {
		calls = append(calls, openAIToolCall{ID: call.ID, Type: "function", Function: openAIToolFunction{Name: call.Name, Arguments: string(call.Arguments)}})
	}
	return calls
}

func usageOf(made *workflows.HarnessTurn) *openAIUsage {
	output := int64(len(made.OutputIDs))
	usage := &openAIUsage{PromptTokens: made.PromptTokens, CompletionTokens: output, TotalTokens: made.PromptTokens + output}
	if made.CachedTokens >= 0 {
		usage.Details = &openAIPromptDetails{CachedTokens: made.CachedTokens}
	}
	return usage
}

// logprobsOf names tokens by their ids, as vLLM can: the text of a single token is no
// text for certain.
func logprobsOf(kind openAIKind, made *workflows.HarnessTurn) any {
	if kind == openAIText {
		names := make([]string, len(made.OutputIDs))
		for i, id := range made.OutputIDs {
			names[i] = tokenName(id)
		}
		return map[string]any{"tokens": names, "token_logprobs": made.Logprobs, "top_logprobs": nil, "text_offset": []int{}}
	}
	content := make([]openAILogprob, len(made.OutputIDs))
	for i, id := range made.OutputIDs {
		content[i] = openAILogprob{Token: tokenName(id), Logprob: made.Logprobs[i], Top: []any{}}
	}
	return map[string]any{"content": content, "refusal": nil}
}

type openAILogprob struct {
	Token   string  `json:"token"`
	Logprob float32 `json:"logprob"`
	Bytes   []int   `json:"bytes"`
	Top     []any   `json:"top_logprobs"`
}

func tokenName(id int32) string { return fmt.Sprintf("token_id:%d", id) }

func (a *openAIAnswer) event(choice openAIChoice) {
	a.begin()
	a.send(openAIDocument{openAIHead: a.head, Choices: []openAIChoice{choice}}, "data: %s\n\n")
}

func (a *openAIAnswer) send(document any, format string) { a.write(formatted(document, format)) }

func formatted(document any, format string) []byte {
	text, err := json.Marshal(document)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	return fmt.Appendf(nil, format, text)
}

// write sends at once. An error means that the client is gone, which ends the
// request's context as well.
func (a *openAIAnswer) write(text []byte) {
	_, _ = a.c.Response().Write(text)
	a.c.Response().Flush()
}

// fail ends the answer without a turn. Where the status is sent already, an error
// event says why, or a document that is then cut off: a client library takes that for
// a connection that broke, asks again and gets the status.
func (a *openAIAnswer) fail(p *problem) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.begun {
		a.begun = true
		_ = writeOpenAIProblem(a.c, p)
		return
	}
	stateOf(a.c.Request().Context()).failed(p)
	if a.asked.Stream {
		a.send(openAIErrorOf(p), "data: %s\n\n")
		return
	}
	a.send(openAIErrorOf(p), "%s\n")
	panic(http.ErrAbortHandler)
}
