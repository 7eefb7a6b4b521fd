package environment

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"

	"holdfast/orchestrator/environment/exchange"
	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/toolcall"
)

// Bounds of what a server may answer.
const (
	maxAnswerBytes = 4 << 20
	maxMessages    = 256
	maxTools       = 512
)

// The documents of the http protocol; docs/environments.md describes them for
// authors of servers. Programs with input and output json speak the same.
type (
	resetDocument struct {
		EpisodeID string          `json:"episode_id"`
		Step      int             `json:"step"`
		Seed      int64           `json:"seed"`
		Member    int             `json:"member"`
		Task      json.RawMessage `json:"task,omitempty"`
		Metadata  json.RawMessage `json:"metadata,omitempty"`
	}
	stepDocument struct {
		EpisodeID string         `json:"episode_id"`
		Step      int            `json:"step"`
		Action    actionDocument `json:"action"`
	}
	actionDocument struct {
		Text      string          `json:"text"`
		ToolCalls []toolcall.Call `json:"tool_calls"`
	}
	closeDocument struct {
		EpisodeID string `json:"episode_id"`
	}
	answerDocument struct {
		Observation observationDocument `json:"observation"`
		Tools       []toolcall.Tool     `json:"tools"`
		Reward      *float64            `json:"reward"`
		Done        bool                `json:"done"`
		Truncated   bool                `json:"truncated"`
	}
	observationDocument struct {
		Text     string             `json:"text"`
		Messages []toolcall.Message `json:"messages"`
		Results  []toolcall.Result  `json:"results"`
	}
)

// UnmarshalJSON takes a string for an observation that is nothing but text.
func (o *observationDocument) UnmarshalJSON(raw []byte) error {
	if strings.HasPrefix(string(raw), `"`) {
		return json.Unmarshal(raw, &o.Text)
	}
	type plain observationDocument
	return json.Unmarshal(raw, (*plain)(o))
}

func newStepDocument(id string, action Action) stepDocument {
	calls := action.Calls
	if calls == nil {
		calls = []toolcall.Call{}
	}
	return stepDocument{EpisodeID: id, Step: action.Step, Action: actionDocument{Text: action.Text, ToolCalls: calls}}
}

// observation checks an answer and gives it the form of this package, with texts
// cut to keepBytes.
func (a *answerDocument) observation(keepBytes int) (Observation, error) {
	if len(a.Observation.Messages)+len(a.Observation.Results) > maxMessages || len(a.Tools) > maxTools {
		return Observation{}, failure.Newf(failure.Malformed, "", "more than %d messages or %d tools", maxMessages, maxTools)
	}
	for i, tool := range a.Tools {
		if tool.Name == "" {
			return Observation{}, failure.Newf(failure.Malformed, "", "tools[%d].name is missing", i)
		}
	}
	o := Observation{Results: a.Observation.Results, Tools: a.Tools, Reward: a.Reward, Done: a.Done, Truncated: a.Truncated}
	for i, result := range a.Observation.Results {
		if result.CallID == "" {
			return Observation{}, failure.Newf(failure.Malformed, "", "observation.results[%d].call_id is missing", i)
		}
	}
	if a.Observation.Text != "" {
		o.Messages = append(o.Messages, user(a.Observation.Text))
	}
	for i, message := range a.Observation.Messages {
		if message.Role == "" {
			return Observation{}, failure.Newf(failure.Malformed, "", "observation.messages[%d].role is missing", i)
		}
		o.Messages = append(o.Messages, message)
	}
	o.shorten(keepBytes)
	return o, nil
}

// httpDriver speaks to an environment server. It holds no state of the episode:
// any process can go on with it, and close it.
type httpDriver struct {
	id        string
	url       string
	task      json.RawMessage
	keepBytes int
	poster    *exchange.Poster
}

func newHTTPDriver(id string, e spec.Environment, config exchange.Config) *httpDriver {
	config.Timeout = seconds(e.HTTP.TimeoutSeconds, spec.DefaultTimeoutSeconds)
	return &httpDriver{
		id: id, url: strings.TrimSuffix(e.HTTP.URL, "/"), task: e.HTTP.Task, keepBytes: keepBytes(e), poster: exchange.New(config),
	}
}

func (h *httpDriver) remote() bool { return true }

func (h *httpDriver) reset(ctx context.Context, request ResetRequest) (Observation, error) {
	return h.post(ctx, "/reset", newResetDocument(h.id, h.task, request))
}

func newResetDocument(id string, task json.RawMessage, request ResetRequest) resetDocument {
	return resetDocument{EpisodeID: id, Seed: request.Seed, Member: request.Member, Task: task, Metadata: request.Metadata}
}

func (h *httpDriver) step(ctx context.Context, action Action) (Observation, error) {
	return h.post(ctx, "/step", newStepDocument(h.id, action))
}

func (h *httpDriver) post(ctx context.Context, path string, request any) (Observation, error) {
	var answer answerDocument
	if err := h.poster.Post(ctx, h.url+path, request, &answer); err != nil {
		return Observation{}, err
	}
	return answer.observation(h.keepBytes)
}

// close takes an episode that is not known, or no more, for closed.
func (h *httpDriver) close(ctx context.Context) error {
	err := h.poster.Post(ctx, h.url+"/close", closeDocument{EpisodeID: h.id}, nil)
	var known *failure.Error
	if errors.As(err, &known) && (known.Status == http.StatusNotFound || known.Status == http.StatusGone) {
		return nil
	}
	return err
}

func seconds(value, fallback float64) time.Duration {
	if value == 0 {
		value = fallback
	}
	return time.Duration(value * float64(time.Second))
}
