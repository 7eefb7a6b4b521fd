package api_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"holdfast/api"
	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/store"
	"holdfast/workflows"
	"holdfast/workflows/task"
)

// loops is a harness that answers as a test says.
type loops struct {
	turn func(call workflows.HarnessCall, progress workflows.HarnessProgress) (workflows.HarnessTurn, error)
	// session, if set, is told which one was called for.
	session *uuid.UUID
}

func (l *loops) HarnessTurn(_ context.Context, session uuid.UUID, call workflows.HarnessCall, progress workflows.HarnessProgress) (workflows.HarnessTurn, error) {
	if l.session != nil {
		*l.session = session
	}
	return l.turn(call, progress)
}

// echo generates what follows the context.
func echo(call workflows.HarnessCall, _ workflows.HarnessProgress) (workflows.HarnessTurn, error) {
	return workflows.HarnessTurn{
		Turn: 3, OutputIDs: slices.Concat(call.Context, call.Append), Logprobs: []float32{-0.5}, FinishReason: "stop", PromptTokens: 4,
		CachedTokens: -1, PolicyVersion: 2, Instance: "one",
	}, nil
}

// harnessed is a dispatched session whose loop runs outside.
func (s *service) harnessed(run uuid.UUID, key string) uuid.UUID {
	s.t.Helper()
	spec := oneTask(key, "agent")
	spec.Environment = &task.Environment{Kind: task.EnvironmentExternal}
	batch, err := s.client.SubmitBatch(s.t.Context(), run, key, client.NewBatch{Tasks: client.Tasks([]task.Spec{spec})})
	if err != nil {
		s.t.Fatal(err)
	}
	page, err := s.client.Sessions(s.t.Context(), run, client.SessionsQuery{Batch: batch.ID})
	if err != nil {
		s.t.Fatal(err)
	}
	if _, err := s.store.DispatchQueued(s.t.Context(), run, 1_000); err != nil {
		s.t.Fatal(err)
	}
	return page.Sessions[0].ID
}

// loop makes a turn and ends a session of the run.
func (s *service) loop(run wire.Run) {
	t, ctx := s.t, s.t.Context()
	id := s.harnessed(run.ID, "looped")
	made, err := s.client.Generate(ctx, id, wire.NewTurn{RequestID: "a", AppendTokenIDs: []int32{7}})
	if err != nil || made.Turn != 3 || !slices.Equal(made.TokenIDs, []int32{7}) || made.CachedTokens != nil {
		t.Errorf("%+v, %v", made, err)
	}
	session, err := s.client.CompleteSession(ctx, id, wire.FinishSession{Status: "truncated"})
	if err != nil || session.ID != id {
		t.Errorf("%+v, %v", session, err)
	}
	if _, err := s.client.CompleteSession(ctx, id, wire.FinishSession{Status: "completed"}); err == nil {
		t.Error("another end was accepted")
	}
}

// post sends a raw call.
func (s *service) post(id uuid.UUID, body string) (*http.Response, string) {
	s.t.Helper()
	response, err := http.Post(s.url+"/api/v1/sessions/"+id.String()+"/generate", "application/json", strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return response, string(text)
}

func TestCallsThatMakeNoSenseNameTheField(t *testing.T) {
	called := false
	l := &loops{turn: func(call workflows.HarnessCall, progress workflows.HarnessProgress) (workflows.HarnessTurn, error) {
		called = true
		return echo(call, progress)
	}}
	s := start(t, func(c *api.Config) { c.Harness = l })
	for _, c := range []struct{ body, says string }{
		{`{`, "body is not valid JSON"},
		{`[]`, "body must be an object"},
		{`{}`, "body.request_id must be 1 to 128 bytes"},
		{`{"request_id":""}`, "body.request_id must be 1 to 128 bytes"},
		{fmt.Sprintf(`{"request_id":%q}`, strings.Repeat("x", 129)), "body.request_id must be 1 to 128 bytes"},
		{`{"request_id":"a","token_ids":[1],"append_token_ids":[2]}`, "body must have at most one of"},
		{`{"request_id":"a","packed_token_ids":"AAA="}`, "body.packed_token_ids must be whole little-endian int32"},
		{`{"request_id":"a","packed_token_ids":"%%"}`, "body.packed_token_ids must be base64, has illegal base64 data"},
		{`{"request_id":"a","append_token_ids":[1,-2]}`, "body.append_token_ids[1] must be a token id, is -2"},
		{`{"request_id":"a","token_ids":[4294967296]}`, "body.token_ids[0] must be a whole number below 2147483648, is 4294967296"},
		{`{"request_id":"a","min_tokens":5,"max_tokens":3}`, "body.min_tokens must be from 0 to max_tokens"},
		{`{"request_id":"a","temperature":-1}`, "body.temperature must be from 0 to 100"},
		{`{"request_id":"a","top_p":0}`, "body.top_p must be above 0"},
		{`{"request_id":"a","encoding":"yaml"}`, "body.encoding must be json or packed"},
		{`{"request_id":"a","request_id":"b"}`, "body"},
		{`{"request_id":"a","append_tokens_ids":[1]}`, "body.append_tokens_ids is not a known field"},
		{`{"request_id":"a\u0000b"}`, "body.request_id must be 1 to 128 bytes of text"},
		{`{"request_id":"a","max_tokens":-1}`, "body.max_tokens must not be negative"},
	} {
		response, text := s.post(uuid.New(), c.body)
		problem := parseProblem(t, response, []byte(text))
		if (response.StatusCode != 422 && response.StatusCode != 400) || !strings.HasPrefix(problem.Detail, c.says) {
			t.Errorf("%s: %d %s, want %q", c.body, response.StatusCode, text, c.says)
		}
	}
	if called {
		t.Error("a call that makes no sense was made")
	}
}

func TestRefusedCallsSayWhatToDo(t *testing.T) {
	var refusal error
	s := start(t, func(c *api.Config) {
		c.Harness = &loops{turn: func(workflows.HarnessCall, workflows.HarnessProgress) (workflows.HarnessTurn, error) {
			return workflows.HarnessTurn{}, refusal
		}}
	})
	id := uuid.New()
	for _, c := range []struct {
		err    error
		status int
		kind   string
	}{
		{workflows.ErrNotHarness, 409, "conflict"},
		{workflows.ErrSessionOver, 409, "conflict"},
		{workflows.ErrTurnUnderWay, 409, "turn-under-way"},
		{&workflows.InvalidCallError{Field: "token_ids", Problem: "must have at least one token"}, 422, "invalid-request"},
		{store.ErrTurnOfOtherRequest, 409, "conflict"},
		{&workflows.LimitError{Limit: "no room"}, 409, "limit-reached"},
		{&workflows.RewrittenError{AtTokens: 3, SessionTokens: 9}, 422, "invalid-request"},
		{&workflows.CallFailedError{Problem: "3 calls failed"}, 502, "engine-does-not-answer"},
		{&workflows.CallFailedError{Problem: "out of vocabulary", Refused: true}, 422, "invalid-request"},
		{fmt.Errorf("reading: %w", store.ErrNotFound), 404, "not-found"},
		{api.ErrNotOwner, 503, "not-owner"},
		{errors.New("oops"), 500, "internal"},
	} {
		refusal = fmt.Errorf("session %s: %w", id, c.err)
		response, text := s.post(id, `{"request_id":"a"}`)
		problem := parseProblem(t, response, []byte(text))
		if response.StatusCode != c.status || !strings.HasSuffix(problem.Type, ":"+c.kind) || problem.Detail == "" || problem.RequestID == "" {
			t.Errorf("%v: %d %s", c.err, response.StatusCode, text)
		}
	}
}

func TestStreamedCallSendsWaitsTokensAndTheTurn(t *testing.T) {
	fails := false
	s := start(t, func(c *api.Config) {
		c.Harness = &loops{turn: func(call workflows.HarnessCall, progress workflows.HarnessProgress) (workflows.HarnessTurn, error) {
			progress.OnWait("at_cap")
			progress.OnWait("at_cap")
			if fails {
				return workflows.HarnessTurn{}, workflows.ErrSessionOver
			}
			progress.OnTokens([]int32{1, 2}, []float32{-1, -2})
			progress.OnTokens([]int32{1, 2, 3}, []float32{-1, -2, -3})
			return workflows.HarnessTurn{OutputIDs: []int32{1, 2, 3}, Logprobs: []float32{-1, -2, -3}, FinishReason: "length", CachedTokens: 8}, nil
		}}
	})
	_, text := s.post(uuid.New(), `{"request_id":"a","stream":true}`)
	want := "event: wait\ndata: {\"reason\":\"at_cap\"}\n\n" +
		"event: tokens\ndata: {\"token_ids\":[1,2],\"logprobs\":[-1,-2]}\n\n" +
		"event: tokens\ndata: {\"token_ids\":[3],\"logprobs\":[-3]}\n\n" +
		"event: turn\ndata: {\"turn\":0,\"token_ids\":[1,2,3],\"logprobs\":[-1,-2,-3],\"finish_reason\":\"length\",\"prompt_tokens\":0,\"cached_tokens\":8,\"output_tokens\":3,\"policy_version\":0,\"instance\":\"\"}\n\n"
	if text != want {
		t.Errorf("streamed %s\nwant %s", text, want)
	}
	fails = true
	response, text := s.post(uuid.New(), `{"request_id":"a","stream":true}`)
	if response.StatusCode != 200 || !strings.Contains(text, "event: error\ndata: {\"type\":\"urn:holdfast:problem:conflict\"") {
		t.Errorf("a late failure: %d %s", response.StatusCode, text)
	}
}

func TestPackedCallAndAnswer(t *testing.T) {
	s := start(t, func(c *api.Config) { c.Harness = &loops{turn: echo} })
	packed := base64.StdEncoding.EncodeToString([]byte{7, 0, 0, 0, 0, 1, 0, 0})
	response, text := s.post(uuid.New(), `{"request_id":"a","packed_append_token_ids":"`+packed+`","encoding":"packed"}`)
	var made wire.HarnessTurn
	if err := json.Unmarshal([]byte(text), &made); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(made.PackedIDs, []byte{7, 0, 0, 0, 0, 1, 0, 0}) || made.TokenIDs != nil || !bytes.Equal(made.PackedLogprobs, []byte{0, 0, 0, 0xbf}) {
		t.Errorf("answered %s", text)
	}
	if response.ContentLength != int64(len(text)) {
		t.Errorf("%d bytes are announced, %d came", response.ContentLength, len(text))
	}
}

func TestPathsAndQueriesThatAreNoText(t *testing.T) {
	s := start(t, nil)
	for path, status := range map[string]int{
		"/pools/a%00/policy": 404, "/pools/a%FF/instances": 404, "/runs?pool=a%00": 422, "/runs?pool=%zz": 422,
	} {
		response, err := http.Get(s.url + "/api/v1" + path)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != status {
			t.Errorf("%s: status %d, want %d", path, response.StatusCode, status)
		}
	}
}

func TestEndsThatMakeNoSense(t *testing.T) {
	s := start(t, nil)
	run := s.openRun()
	external, own := s.harnessed(run.ID, "external"), s.submit(run.ID, "own", 1)[0].ID
	reward := 1.0
	for _, c := range []struct {
		session uuid.UUID
		end     wire.FinishSession
		status  int
		says    string
	}{
		{uuid.New(), wire.FinishSession{Status: "completed"}, 404, "session"},
		{own, wire.FinishSession{Status: "completed"}, 409, "the task's environment is not external"},
		{external, wire.FinishSession{Status: "cancelled"}, 422, "body.status"},
		{external, wire.FinishSession{Status: "failed", Reward: &reward}, 422, "body.reward"},
		{external, wire.FinishSession{Status: "completed", Problem: "none"}, 422, "body.problem"},
	} {
		_, err := s.client.CompleteSession(t.Context(), c.session, c.end)
		var problem *wire.Problem
		if !errors.As(err, &problem) || problem.Status != c.status || !strings.Contains(problem.Detail, c.says) {
			t.Errorf("%+v: %v, want %d and %q", c.end, err, c.status, c.says)
		}
	}
}
