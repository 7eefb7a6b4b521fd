package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strconv"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	strictjson "github.com/go-json-experiment/json"
	"github.com/google/uuid"

	"holdfast/api/wire"
	"holdfast/router"
	"holdfast/store"
	"holdfast/workflows"
)

// Harness makes model calls for sessions whose loop a harness runs. It returns
// ErrNotOwner when another process runs the session's pool, or none, and otherwise
// the errors of workflows.HarnessCall.
type Harness interface {
	HarnessTurn(ctx context.Context, session uuid.UUID, call workflows.HarnessCall, progress workflows.HarnessProgress) (workflows.HarnessTurn, error)
}

const (
	// maxTurnBytes bounds a call's body: a million token ids as JSON.
	maxTurnBytes = 16 << 20
	// keepAliveInterval is how often a call that waits sends something.
	keepAliveInterval = 10 * time.Second
	eventMediaType    = "text/event-stream"
)

type generateInput struct {
	SessionPath
	RawBody []byte `contentType:"application/json"`
}

type finishInput struct {
	SessionPath
	Body wire.FinishSession
}

func (s *Server) registerTurns() {
	const tag = "harness"
	generate := operation{
		id: "generate", method: http.MethodPost, path: "/sessions/{session}/generate", tag: tag,
		summary:     "Make one model call in a session whose loop runs outside",
		description: "The call waits while the session is queued or held, for hours if need be, and sends blank lines or wait events meanwhile. One call of a session runs at a time; sent again with its request_id, a call gives the turn that it made.",
		terms:       terms{roles: trainers, kind: workTurn, timeout: s.limits.TurnTimeout}, bodyBytes: maxTurnBytes,
		problems: append([]int{http.StatusNotFound, http.StatusConflict, http.StatusBadGateway}, withBody...),
	}
	register(s, generate, s.generate)
	documentTurn(s.huma.OpenAPI(), generate)
	register(s, operation{
		id: "complete-session", method: http.MethodPost, path: "/sessions/{session}/complete", tag: tag, status: http.StatusAccepted,
		summary:     "End a session whose loop runs outside",
		description: "Asking for the same end again changes nothing; another end is refused with 409.",
		terms:       terms{roles: trainers}, problems: append([]int{http.StatusNotFound, http.StatusConflict}, withBody...),
	}, s.finishSession)
}

// documentTurn documents the body that is read, and the answer that is written, here.
func documentTurn(document *huma.OpenAPI, op operation) {
	post := document.Paths[basePath+op.path].Post
	schemas := document.Components.Schemas
	post.RequestBody = &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{
		jsonMediaType: {Schema: schemas.Schema(reflect.TypeFor[wire.NewTurn](), true, "NewTurn")},
	}}
	turn := schemas.Schema(reflect.TypeFor[wire.HarnessTurn](), true, "HarnessTurn")
	post.Responses["200"] = &huma.Response{Description: http.StatusText(http.StatusOK), Content: map[string]*huma.MediaType{
		jsonMediaType: {Schema: turn}, eventMediaType: {Schema: &huma.Schema{Type: huma.TypeString}},
	}}
}

// generate reads the call and lets its answer be written as it comes.
func (s *Server) generate(ctx context.Context, in *generateInput) (*huma.StreamResponse, error) {
	if s.harness == nil {
		return nil, ErrNotOwner
	}
	var asked wire.NewTurn
	if err := unmarshalWith(in.RawBody, &asked, strictjson.RejectUnknownMembers(true)); err != nil {
		return nil, problemOf(err)
	}
	call, err := harnessCall(&asked)
	if err != nil {
		return nil, err
	}
	return &huma.StreamResponse{Body: func(out huma.Context) {
		a := &turnAnswer{out: out, packed: asked.Encoding == encodingPacked, events: asked.Stream}
		progress := workflows.HarnessProgress{OnWait: a.wait}
		if a.events {
			progress.OnTokens = a.tokens
		}
		made, err := s.harnessTurn(out.Context(), in.Session, call, progress, a.keepAlive)
		if err != nil {
			a.fail(s, turnProblem(err, in.Session))
			return
		}
		a.turn(&made)
	}}, nil
}

// harnessTurn makes the call and keeps the connection while it waits.
func (s *Server) harnessTurn(ctx context.Context, session uuid.UUID, call workflows.HarnessCall, progress workflows.HarnessProgress, keepAlive func()) (workflows.HarnessTurn, error) {
	ctx, cancel := context.WithCancel(ctx)
	var keeper sync.WaitGroup
	defer keeper.Wait()
	defer cancel()
	keeper.Go(func() {
		ticker := time.NewTicker(keepAliveInterval)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-s.stopping:
				cancel()
				return
			case <-ticker.C:
				keepAlive()
			}
		}
	})
	return s.harness.HarnessTurn(ctx, session, call, progress)
}

// harnessCall checks what the harness sent.
func harnessCall(asked *wire.NewTurn) (workflows.HarnessCall, error) {
	call := workflows.HarnessCall{
		RequestID: asked.RequestID, Context: asked.TokenIDs, Append: asked.AppendTokenIDs, MaxTokens: asked.MaxTokens, MinTokens: asked.MinTokens,
		Temperature: asked.Temperature, TopP: asked.TopP, Seed: asked.Seed, StopTokenIDs: asked.StopTokenIDs, Logprobs: asked.Logprobs, IgnoreEOS: asked.IgnoreEOS,
	}
	given := 0
	for _, present := range []bool{asked.TokenIDs != nil, asked.AppendTokenIDs != nil, asked.PackedIDs != nil, asked.PackedAppend != nil} {
		if present {
			given++
		}
	}
	switch {
	case asked.RequestID == "" || len(asked.RequestID) > 128 || !plainText(asked.RequestID):
		return call, invalid("body.request_id", "must be 1 to 128 bytes of text without U+0000")
	case given > 1:
		return call, invalid("body", "must have at most one of token_ids, append_token_ids, packed_token_ids and packed_append_token_ids")
	case asked.MaxTokens < 0:
		return call, invalid("body.max_tokens", fmt.Sprintf("must not be negative, is %d", asked.MaxTokens))
	case asked.MinTokens < 0 || asked.MaxTokens > 0 && asked.MinTokens > asked.MaxTokens:
		return call, invalid("body.min_tokens", "must be from 0 to max_tokens")
	case asked.Temperature != nil && !(*asked.Temperature >= 0 && *asked.Temperature <= 100):
		return call, invalid("body.temperature", "must be from 0 to 100")
	case asked.TopP != nil && !(*asked.TopP > 0 && *asked.TopP <= 1):
		return call, invalid("body.top_p", "must be above 0 and at most 1")
	case asked.Encoding != "" && asked.Encoding != encodingPacked && asked.Encoding != encodingJSON:
		return call, invalid("body.encoding", "must be json or packed")
	}
	for _, packed := range []struct {
		path  string
		bytes []byte
		ids   *[]int32
	}{{"body.packed_token_ids", asked.PackedIDs, &call.Context}, {"body.packed_append_token_ids", asked.PackedAppend, &call.Append}} {
		if packed.bytes == nil {
			continue
		}
		if len(packed.bytes)%4 != 0 {
			return call, invalid(packed.path, fmt.Sprintf("must be whole little-endian int32, has %d bytes", len(packed.bytes)))
		}
		*packed.ids = wire.UnpackIDs(packed.bytes)
	}
	for path, ids := range map[string][]int32{"body.token_ids": call.Context, "body.append_token_ids": call.Append, "body.stop_token_ids": call.StopTokenIDs} {
		for i, id := range ids {
			if id < 0 {
				return call, invalid(fmt.Sprintf("%s[%d]", path, i), fmt.Sprintf("must be a token id, is %d", id))
			}
		}
	}
	return call, nil
}

// turnProblem says why there is no turn.
func turnProblem(err error, session uuid.UUID) *problem {
	var limit *workflows.LimitError
	var rewritten *workflows.RewrittenError
	var field *workflows.InvalidCallError
	var failed *workflows.CallFailedError
	switch {
	case errors.Is(err, workflows.ErrTurnUnderWay):
		return newProblem(http.StatusConflict, kindBusy, err.Error())
	case errors.Is(err, workflows.ErrSessionOver):
		return newProblem(http.StatusConflict, kindConflict, fmt.Sprintf("%v: GET %s/sessions/%s tells its status and why", err, basePath, session))
	case errors.Is(err, workflows.ErrNotHarness), errors.Is(err, store.ErrTurnOfOtherRequest):
		return newProblem(http.StatusConflict, kindConflict, err.Error())
	case errors.As(err, &field):
		return invalid("body."+field.Field, field.Problem)
	case errors.As(err, &limit):
		return newProblem(http.StatusConflict, kindLimit, limit.Error())
	case errors.As(err, &rewritten):
		return invalid("body.token_ids", rewritten.Error())
	case errors.As(err, &failed) && failed.Refused:
		return newProblem(http.StatusUnprocessableEntity, kindInvalidRequest, "the engine refuses the call: "+failed.Error())
	case errors.As(err, &failed):
		return newProblem(http.StatusBadGateway, kindEngineNoAnswer, failed.Error())
	}
	return problemOf(noSession(err, session))
}

// turnAnswer writes the answer of one call: a document after blank lines, or events.
type turnAnswer struct {
	out            huma.Context
	packed, events bool

	mu      sync.Mutex
	begun   bool
	waiting string
	sent    int
}

// begin sends the head; the status cannot change from then on.
func (a *turnAnswer) begin() {
	if a.begun {
		return
	}
	a.begun = true
	mediaType := jsonMediaType
	if a.events {
		mediaType = eventMediaType
	}
	a.out.SetHeader("Content-Type", mediaType)
	a.out.SetStatus(http.StatusOK)
}

// wait notes why the call waits, and says so at once where events are asked for.
func (a *turnAnswer) wait(reason string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	told := a.waiting == reason
	a.waiting = reason
	if a.events && !told {
		a.event("wait", map[string]string{"reason": reason})
	}
}

func (a *turnAnswer) keepAlive() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.events {
		a.begin()
		a.write([]byte(": waiting\n\n"))
		return
	}
	a.begin()
	a.write([]byte("\n"))
}

// tokens sends what has come since it was last called.
func (a *turnAnswer) tokens(ids []int32, logprobs []float32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	piece := wire.HarnessTurn{OutputTokens: int64(len(ids))}
	from := min(a.sent, len(ids))
	a.sent = len(ids)
	if from == len(ids) {
		return
	}
	if len(logprobs) == len(ids) {
		logprobs = logprobs[from:]
	} else {
		logprobs = nil
	}
	a.fill(&piece, ids[from:], logprobs)
	a.event("tokens", turnTokens{piece.TokenIDs, piece.Logprobs, piece.PackedIDs, piece.PackedLogprobs})
}

// turnTokens is what a tokens event carries.
type turnTokens struct {
	TokenIDs       []int32   `json:"token_ids,omitzero"`
	Logprobs       []float32 `json:"logprobs,omitzero"`
	PackedIDs      []byte    `json:"packed_token_ids,omitzero"`
	PackedLogprobs []byte    `json:"packed_logprobs,omitzero"`
}

func (a *turnAnswer) fill(w *wire.HarnessTurn, ids []int32, logprobs []float32) {
	if !a.packed {
		w.TokenIDs, w.Logprobs = ids, logprobs
		return
	}
	w.PackedIDs, w.PackedLogprobs = wire.PackIDs(ids), wire.PackFloats(logprobs)
}

// turn sends the turn and ends the answer.
func (a *turnAnswer) turn(made *workflows.HarnessTurn) {
	w := wire.HarnessTurn{
		Turn: made.Turn, FinishReason: made.FinishReason, PromptTokens: made.PromptTokens, OutputTokens: int64(len(made.OutputIDs)),
		PolicyVersion: made.PolicyVersion, Instance: made.Instance, Repeated: made.Repeated,
	}
	if made.CachedTokens >= 0 {
		w.CachedTokens = &made.CachedTokens
	}
	a.fill(&w, made.OutputIDs, made.Logprobs)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.events {
		a.event("turn", w)
		return
	}
	text, err := json.Marshal(w)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	text = append(text, '\n')
	if !a.begun {
		// The caller need not wait for the end of the connection's last chunk.
		a.out.SetHeader("Content-Length", strconv.Itoa(len(text)))
	}
	a.begin()
	a.write(text)
}

// fail ends the answer without a turn: with the problem's own status if nothing
// was sent yet.
func (a *turnAnswer) fail(s *Server, p *problem) {
	a.mu.Lock()
	defer a.mu.Unlock()
	state := stateOf(a.out.Context())
	state.failed(p)
	document := p.Problem
	document.RequestID = state.id
	switch {
	case a.events && a.begun:
		a.event("error", document)
		return
	case a.begun:
		text, err := json.Marshal(wire.HarnessTurn{Problem: &document})
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		a.write(append(text, '\n'))
		return
	}
	a.begun = true
	a.out.SetHeader("Content-Type", problemMediaType)
	a.out.SetStatus(p.Status)
	text, err := json.Marshal(document)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	a.write(text)
}

func (a *turnAnswer) event(name string, data any) {
	a.begin()
	text, err := json.Marshal(data)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	a.write(fmt.Appendf(nil, "event: %s\ndata: %s\n\n", name, text))
}

// write sends at once. An error means that the client is gone, which ends the
// request's context as well.
func (a *turnAnswer) write(text []byte) {
	w := a.out.BodyWriter()
	_, _ = w.Write(text)
	if flusher, ok := w.(http.Flusher); ok {
		flusher.Flush()
	}
}

func (s *Server) finishSession(ctx context.Context, in *finishInput) (*sessionOutput, error) {
	status, err := router.ParseEndStatus(in.Body.Status)
	if err != nil {
		return nil, invalid("body.status", err.Error())
	}
	finish := store.Finish{Status: status, Reward: in.Body.Reward, Detail: in.Body.Detail, Problem: in.Body.Problem}
	work, err := s.store.SessionForWork(ctx, in.Session)
	if err != nil {
		return nil, noSession(err, in.Session)
	}
	if !work.Spec.External() {
		return nil, newProblem(http.StatusConflict, kindConflict, workflows.ErrNotHarness.Error())
	}
	if err := s.store.RequestFinish(ctx, in.Session, finish); err != nil {
		return nil, relocated(noSession(err, in.Session), "score_detail", "body.detail")
	}
	session, err := s.store.Session(ctx, in.Session)
	if err != nil {
		return nil, noSession(err, in.Session)
	}
	return &sessionOutput{Body: wireSession(&session)}, nil
}
