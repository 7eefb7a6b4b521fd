package workflows

import (
	"encoding/json"
	"errors"
	"fmt"
)

// HarnessCall is one model call that a harness asks for in its session.
type HarnessCall struct {
	// RequestID tells the call from others of its session: asked again, it gives the
	// turn that it made before. Without one Content, a digest of all that is asked for,
	// tells a repetition: a call in the same words as the one that made the last turn.
	RequestID string
	Content   string
	// Context is the whole context as token ids, or nil, and Append is what follows the
	// session's. A context that does not begin with the session's rewrites it.
	Context []int32
	Append  []int32
	// Chat or Text stand instead of both where the harness leaves tokens to the engine.
	Chat *HarnessChat
	Text *string
	// WithText asks for the text of what is generated; a chat or text has it anyway.
	WithText bool
	// WithPromptIDs asks for the ids that the model was given.
	WithPromptIDs bool
	// The task's sampling holds where these are absent.
	MaxTokens    int
	MinTokens    int
	Temperature  *float64
	TopP         *float64
	Seed         *int64
	StopTokenIDs []int32
	Logprobs     *bool
	IgnoreEOS    *bool
}

// HarnessChat is a context as messages, which the engine's template turns into ids.
type HarnessChat struct {
	// Messages is a JSON array of all messages so far.
	Messages json.RawMessage
	// Tools is a JSON array of what the model may call; nil for none.
	Tools json.RawMessage
	// ToolFormat is how the model writes calls; empty means the task's, or hermes.
	ToolFormat string
}

// HarnessToolCall is a call that a model wrote into its message.
type HarnessToolCall struct {
	ID, Name string
	// Arguments is a JSON object.
	Arguments json.RawMessage
}

// HarnessTurn is the turn that a harness's call made.
type HarnessTurn struct {
	Turn int
	// PromptIDs is the context before OutputIDs, where the call asked for it; nil for
	// the repetition of a turn after which the session has gone on.
	PromptIDs []int32
	OutputIDs []int32
	// Logprobs has one value per output token, or is nil if not asked for.
	Logprobs []float32
	// FinishReason is stop or length.
	FinishReason string
	PromptTokens int64
	// CachedTokens is -1 if the engine did not tell.
	CachedTokens  int64
	PolicyVersion int64
	Instance      string
	// Repeated: an earlier call of the same request made the turn.
	Repeated bool
	// Text is what was generated, where the call asked for it; of a chat the content
	// beside ToolCalls.
	Text      string
	ToolCalls []HarnessToolCall
}

// HarnessProgress is what happens while a call is under way.
type HarnessProgress struct {
	// OnWait is called when the call must wait, with the reason: queued, or a router's
	// reason for a hold.
	OnWait func(reason string)
	// OnTokens is called as tokens come, with all output so far; both slices are only
	// to be read during the call.
	OnTokens func(ids []int32, logprobs []float32)
	// OnText is called with more of Text as it comes; together the pieces are a beginning of it.
	OnText func(more string)
}

// Why a harness's call is refused.
var (
	ErrNotHarness   = errors.New("the task's environment is not external: the session runs its own loop")
	ErrSessionOver  = errors.New("the session is over")
	ErrTurnUnderWay = errors.New("another call of this session is under way")
)

// LimitError refuses a call that a limit of the task leaves no room for: the
// harness is to end the session as truncated.
type LimitError struct{ Limit string }

func (e *LimitError) Error() string { return "no further turn: " + e.Limit }

// InvalidCallError refuses a call because of one of its fields.
type InvalidCallError struct {
	// Field is its place in the request's body, such as messages[2].role.
	Field, Problem string
}

func (e *InvalidCallError) Error() string { return e.Field + " " + e.Problem }

// RewrittenError refuses a context that does not go on from the session's own, where
// the task wants such calls refused.
type RewrittenError struct {
	// AtTokens is the length of the common beginning, SessionTokens that of the session's context.
	AtTokens, SessionTokens int
}

func (e *RewrittenError) Error() string {
	return fmt.Sprintf("the context leaves the session's at token %d of %d, and its task refuses rewrites", e.AtTokens, e.SessionTokens)
}

// CallFailedError says that engines did not complete a call within the service's
// attempts. The session goes on: the harness may ask again.
type CallFailedError struct {
	Problem string
	// Refused: the call itself is at fault, and would fail again.
	Refused bool
}

func (e *CallFailedError) Error() string { return e.Problem }
