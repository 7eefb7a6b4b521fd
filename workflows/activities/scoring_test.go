package activities

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/environment/command"
	"holdfast/orchestrator/environment/exchange"
	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/scoring"
	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
	"holdfast/workflows"
	"holdfast/workflows/task"
)

// scoreServer is a scorer's server, which answers what the test says.
type scoreServer struct {
	*httptest.Server
	asked  atomic.Int64
	answer func(sample map[string]json.RawMessage) (status int, result string)
}

func newScoreServer(t *testing.T, answer func(sample map[string]json.RawMessage) (int, string)) *scoreServer {
	t.Helper()
	j := &scoreServer{answer: answer}
	j.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		j.asked.Add(1)
		var body struct {
			Samples []map[string]json.RawMessage `json:"samples"`
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || len(body.Samples) != 1 {
			t.Errorf("asked for %d samples, %v", len(body.Samples), err)
			return
		}
		status, result := j.answer(body.Samples[0])
		w.WriteHeader(status)
		_, _ = w.Write([]byte(`{"results":[{"id":` + string(body.Samples[0]["id"]) + `,` + result + `}]}`))
	}))
	t.Cleanup(j.Close)
	return j
}

func (j *scoreServer) scorer() *task.Scorer {
	return &task.Scorer{Kind: task.ScorerHTTP, HTTP: &spec.HTTPScorer{URL: j.URL + "/score", TimeoutSeconds: 20}}
}

// generated is a session of one turn that the model ended by itself.
func (f *fixture) generated(a *Activities, scorer *task.Scorer) (id string) {
	f.t.Helper()
	wanted := single(8)
	wanted.Scorer, wanted.Metadata = scorer, json.RawMessage(`{"row":7}`)
	session := f.session(wanted)
	reply, err := a.turn(context.Background(), session, 0, &pulse{})
	must(f.t, err)
	if !reply.Scored {
		f.t.Fatalf("the session is over as %+v", reply)
	}
	return session.String()
}

// scoringWorker ends generations by themselves, and its scorers may do what cfg allows.
func (f *fixture) scoringWorker(e *engines, cfg scoring.Config) *Activities {
	e.lastToken = promptTokens + 4
	a := f.worker(e, &placements{}, testCheckpointTokens)
	cfg.FirstRetryDelay = time.Microsecond
	a.scorers = scoring.NewScorers(cfg)
	return a
}

func TestScorersSeeTheLastTurn(t *testing.T) {
	f := newFixture(t)
	e := newEngines(t)
	e.text = "so it is \\boxed{1/2}"
	root, err := os.MkdirTemp("/tmp", "scorers-")
	must(t, err)
	must(t, os.Chmod(root, 0o711))
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	commands, err := command.NewRunner(t.Context(), command.Config{Root: root})
	must(t, err)
	t.Cleanup(func() { must(t, commands.Close()) })
	a := f.scoringWorker(e, scoring.Config{Commands: commands})
	server := newScoreServer(t, func(sample map[string]json.RawMessage) (int, string) {
		var text string
		var ids []int32
		if json.Unmarshal(sample["text"], &text) != nil || json.Unmarshal(sample["token_ids"], &ids) != nil || text != e.text || len(ids) != 5 || string(sample["metadata"]) != `{"row": 7}` && string(sample["metadata"]) != `{"row":7}` {
			t.Errorf("the server was sent %s", sample)
		}
		return http.StatusOK, `"reward":0.25,"detail":{"why":"half"}`
	})
	last := make([]int32, 5)
	for i := range last {
		last[i] = tokenAt(promptTokens+i, 1)
	}
	for name, c := range map[string]struct {
		scorer *task.Scorer
		reward float64
		detail string
	}{
		"ids":          {&task.Scorer{Kind: task.ScorerExactMatch, TokenIDs: last[3:]}, 1, `{"scorer":"exact_match"}`},
		"other ids":    {&task.Scorer{Kind: task.ScorerExactMatch, TokenIDs: last[:2]}, 0, `{"scorer":"exact_match"}`},
		"text":         {&task.Scorer{Kind: task.ScorerExactMatch, Answers: []string{"1/2"}, Extract: spec.ExtractBoxed}, 1, `{"scorer":"exact_match"}`},
		"number":       {&task.Scorer{Kind: task.ScorerNumericMatch, Target: "0.5"}, 1, `{"scorer":"numeric_match"}`},
		"another":      {&task.Scorer{Kind: task.ScorerNumericMatch, Target: "2"}, 0, `{"scorer":"numeric_match"}`},
		"by a server":  {server.scorer(), 0.25, `{"why":"half"}`},
		"by a program": {program(`grep -q boxed && echo '{"reward":-3,"detail":{"by":"sh"}}'`), -3, `{"by":"sh"}`},
	} {
		t.Run(name, func(t *testing.T) {
			reply, err := a.Score(t.Context(), f.generated(a, c.scorer))
			must(t, err)
			if reply.Reward == nil || *reply.Reward != c.reward || string(reply.Detail) != c.detail || reply.Problem != "" || reply.Seconds <= 0 {
				t.Fatalf("scored as %+v with detail %s", reply, reply.Detail)
			}
		})
	}
	for _, ids := range e.detokenized {
		if !slices.Equal(ids, last) {
			t.Fatalf("the text of %v was asked for, generated was %v", ids, last)
		}
	}
}

func program(script string) *task.Scorer {
	return &task.Scorer{Kind: task.ScorerExec, Program: &spec.Program{Command: []string{"/bin/sh", "-c", script}}}
}

// TestScorersThatFailGiveNoReward: whatever goes wrong with a scorer ends the session
// as failed, and only what may pass is tried again.
func TestScorersThatFailGiveNoReward(t *testing.T) {
	f := newFixture(t)
	unfit := &engine.Error{Class: engine.FailTurn, StatusCode: 404, Message: "the engine has no /detokenize"}
	for name, c := range map[string]struct {
		status  int
		result  string
		scorer  *task.Scorer
		cfg     scoring.Config
		engines error
		problem string
		asked   int64
	}{
		"refused":             {status: 400, result: `"reward":1`, problem: "refused", asked: 1},
		"its own error":       {status: 200, result: `"error":"nothing to read"`, problem: "nothing to read", asked: 1},
		"no number":           {status: 200, result: `"detail":{}`, problem: "neither reward nor error", asked: 1},
		"never there":         {status: 503, result: `"reward":1`, problem: "unreachable", asked: -1},
		"a host not allowed":  {status: 200, cfg: scoring.Config{Access: exchange.Access{Closed: true}}, problem: "is not allowed"},
		"programs forbidden":  {scorer: program("true"), problem: "runs no programs"},
		"engine without text": {status: 200, engines: unfit, problem: "the scorer needs the text of the last turn: engine: status 404: the engine has no /detokenize"},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEngines(t)
			a := f.scoringWorker(e, c.cfg)
			server := newScoreServer(t, func(map[string]json.RawMessage) (int, string) { return c.status, c.result })
			if c.scorer == nil {
				c.scorer = server.scorer()
			}
			id := f.generated(a, c.scorer)
			if c.engines != nil {
				e.tokenizerErrs = []error{c.engines}
			}
			reply, err := a.Score(t.Context(), id)
			must(t, err)
			if reply.Reward != nil || !strings.Contains(reply.Problem, c.problem) {
				t.Fatalf("scored as %+v, want a problem with %q", reply, c.problem)
			}
			if asked := server.asked.Load(); c.asked >= 0 && asked != c.asked || c.asked < 0 && asked < scoreAttempts {
				t.Fatalf("the server was asked %d times", asked)
			}
			must(t, a.Complete(t.Context(), workflows.Completion{Session: id, Status: router.Failed.String(), Problem: reply.Problem, ScoreSeconds: reply.Seconds}))
		})
	}
}

func TestScoringWaitsForEnginesThatAreAway(t *testing.T) {
	f := newFixture(t)
	e := newEngines(t)
	e.text = "7"
	a := f.scoringWorker(e, scoring.Config{})
	id := f.generated(a, &task.Scorer{Kind: task.ScorerNumericMatch, Target: "7"})
	away := &engine.Error{Class: engine.RetryElsewhere, Err: engine.ErrNotCalled}
	busy := &engine.Error{Class: engine.RetryElsewhere, StatusCode: 500, Message: "busy"}
	e.tokenizerErrs = []error{away, busy, busy}
	if reply, err := a.Score(t.Context(), id); !errors.Is(err, engine.ErrNotCalled) {
		t.Fatalf("without engines it is %+v, %v", reply, err)
	}
	reply, err := a.Score(t.Context(), id)
	if err != nil || reply.Reward == nil || *reply.Reward != 1 {
		t.Fatalf("with engines it is %+v, %v", reply, err)
	}
	e.tokenizerErrs = []error{busy, busy, busy, busy}
	if reply, err = a.Score(t.Context(), id); err != nil || reply.Reward != nil || !strings.Contains(reply.Problem, "busy") {
		t.Fatalf("with engines that always fail it is %+v, %v", reply, err)
	}
}

func TestScoringPassesOnHiccups(t *testing.T) {
	f := newFixture(t)
	a := f.scoringWorker(newEngines(t), scoring.Config{})
	var asked atomic.Int64
	server := newScoreServer(t, func(map[string]json.RawMessage) (int, string) {
		if asked.Add(1) <= 2 {
			return http.StatusServiceUnavailable, `"reward":0`
		}
		return http.StatusOK, `"reward":1`
	})
	reply, err := a.Score(t.Context(), f.generated(a, server.scorer()))
	if err != nil || reply.Reward == nil || *reply.Reward != 1 {
		t.Fatalf("scored as %+v, %v", reply, err)
	}
}

// asText gives the task a prompt of text.
func asText(spec *task.Spec, text string) *task.Spec {
	spec.Prompt = task.Prompt{Text: text}
	return spec
}

func TestPromptIsTokenisedOnceForItsGroup(t *testing.T) {
	f := newFixture(t)
	e := newEngines(t)
	p := &placements{}
	wanted := asText(single(6), "What is 17 + 25?")
	wanted.GroupSize = 3
	first := f.session(wanted)
	work, err := f.SessionForWork(t.Context(), first)
	must(t, err)
	busy := &engine.Error{Class: engine.RetryElsewhere, StatusCode: 500, Message: "busy"}
	e.tokenizerErrs = []error{busy, &engine.Error{Class: engine.RetryElsewhere, Err: engine.ErrNotCalled}}
	a := f.worker(e, p, testCheckpointTokens)
	if _, err := a.Admit(t.Context(), workflows.TurnRef{Session: first.String()}); !errors.Is(err, engine.ErrNotCalled) {
		t.Fatalf("without engines the admission ended with %v", err)
	}
	text := wanted.Prompt.Text
	cancelled := store.SessionID(work.TaskID, 2)
	// The third member ends before anybody has tokenised.
	must(t, a.Complete(t.Context(), workflows.Completion{Session: cancelled.String(), Status: router.Cancelled.String()}))
	for member := range 2 {
		id := store.SessionID(work.TaskID, member)
		// Each member on a worker of its own, as after a restart.
		a := f.worker(e, p, testCheckpointTokens)
		for range 2 {
			reply, err := a.Admit(t.Context(), workflows.TurnRef{Session: id.String()})
			must(t, err)
			if reply.Outcome != workflows.OutcomeAdmitted {
				t.Fatalf("the admission is %+v", reply)
			}
		}
		asked := p.questions[len(p.questions)-1]
		if asked.PromptTokens != int64(len(text)) || asked.SharedTokens != int64(len(text)) {
			t.Fatalf("the router was asked for %+v", asked)
		}
		reply, err := a.turn(t.Context(), id, 0, &pulse{})
		must(t, err)
		sample := f.end(a, id, reply)
		ids, mask := sample.Tokens.TokenIDs, sample.Tokens.LossMask
		if string(bytesOf(ids[:len(text)])) != text || len(ids) != len(text)+6 || slices.Contains(mask[:len(text)], 1) || slices.Contains(mask[len(text):], 0) ||
			sample.Usage.ContextTokens != int64(len(ids)) || sample.Tokens.Segments[0].Kind != store.SegmentPrompt {
			t.Fatalf("the sample of member %d is %v, mask %v, %+v", member, ids, mask, sample.Usage)
		}
		if sent := e.requests[len(e.requests)-1].Prompt; string(bytesOf(sent)) != text {
			t.Fatalf("the engine was sent %v", sent)
		}
	}
	if len(e.tokenized) != 3 {
		t.Fatalf("engines were asked to tokenise %d times, of which two failed", len(e.tokenized))
	}
	sample, err := storetest.SampleOf(t.Context(), f.Store, cancelled)
	if err != nil || len(sample.Tokens.TokenIDs) != 0 || sample.Usage.ContextTokens != 0 {
		t.Fatalf("the member that ended before is %+v, %v", sample, err)
	}
}

func bytesOf(ids []int32) (text []byte) {
	for _, id := range ids {
		text = append(text, byte(id))
	}
	return text
}

func TestPromptThatNoEngineTakesFailsItsSession(t *testing.T) {
	f := newFixture(t)
	unfit := &engine.Error{Class: engine.FailTurn, Message: "SGLang tokenises text only"}
	for name, c := range map[string]struct {
		spec    *task.Spec
		err     error
		problem string
	}{
		"no template": {&task.Spec{Class: "agent", Prompt: task.Prompt{Messages: json.RawMessage(`[{"role":"user","content":"hi"}]`)}, Sampling: task.Sampling{MaxTokens: 4}}, unfit, "the prompt could not be tokenised: engine: SGLang tokenises text only"},
		"too long":    {asText(single(4), strings.Repeat("x", task.MaxPromptTokens+1)), nil, "at most 1048576 are served"},
		"no room":     {asText(single(4), strings.Repeat("x", task.MaxPromptTokens)), nil, "leaves no room"},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEngines(t)
			if c.err != nil {
				e.tokenizerErrs = []error{c.err}
			}
			a := f.worker(e, &placements{}, testCheckpointTokens)
			id := f.session(c.spec)
			reply, err := a.Admit(t.Context(), workflows.TurnRef{Session: id.String()})
			must(t, err)
			if reply.Outcome != workflows.OutcomeOver || reply.Status != router.Failed.String() || !strings.Contains(reply.Problem, c.problem) {
				t.Fatalf("the admission is %+v", reply)
			}
			sample := f.end(a, id, workflows.TurnReply{Status: reply.Status, Problem: reply.Problem})
			if sample.Problem != reply.Problem {
				t.Fatalf("the sample's problem is %q", sample.Problem)
			}
			if name == "no template" && string(e.tokenized[0].Messages) != `[{"role":"user","content":"hi"}]` || name == "no template" && !e.tokenized[0].AddGenerationPrompt {
				t.Fatalf("asked was %+v", e.tokenized[0])
			}
		})
	}
}

func TestHarnessBeginsWithATokenisedPrompt(t *testing.T) {
	f := newFixture(t)
	e := newEngines(t)
	e.tokenizerErrs = []error{&engine.Error{Class: engine.RetryElsewhere, Err: engine.ErrNotCalled}}
	a := f.worker(e, &placements{}, testCheckpointTokens)
	id := f.session(asText(harnessed(4), "hello"))
	var waits []string
	turn, err := a.HarnessTurn(t.Context(), id, workflows.HarnessCall{RequestID: "a", Append: []int32{9}}, workflows.HarnessProgress{
		OnWait: func(reason string) { waits = append(waits, reason) }, OnTokens: func([]int32, []float32) {},
	})
	must(t, err)
	if turn.PromptTokens != 6 || !slices.Equal(e.requests[0].Prompt, []int32{'h', 'e', 'l', 'l', 'o', 9}) || !slices.Equal(waits, []string{router.NoInstance.String()}) {
		t.Fatalf("the turn is %+v, sent was %v, waited for %v", turn, e.requests[0].Prompt, waits)
	}
}

func TestProgramsOfScorersWaitForEachOther(t *testing.T) {
	s := make(slots, 1)
	leave, err := s.enter(t.Context())
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.enter(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("a second program got %v", err)
	}
	leave()
	if leave, err = s.enter(t.Context()); err != nil {
		t.Fatal(err)
	}
	leave()
}

func TestCancelledSessionIsNotScored(t *testing.T) {
	f := newFixture(t)
	a := f.scoringWorker(newEngines(t), scoring.Config{})
	server := newScoreServer(t, func(map[string]json.RawMessage) (int, string) { return http.StatusOK, `"reward":1` })
	id := f.generated(a, server.scorer())
	_, err := f.CancelSession(t.Context(), uuid.MustParse(id), "enough")
	must(t, err)
	if reply, err := a.Score(t.Context(), id); err == nil || server.asked.Load() != 0 {
		t.Fatalf("scored as %+v after %d questions", reply, server.asked.Load())
	}
}
