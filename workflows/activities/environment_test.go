package activities

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"testing"

	"github.com/google/uuid"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/environment"
	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/toolcall"
	"holdfast/router"
	"holdfast/workflows"
	"holdfast/workflows/task"
)

// episodes is an environment that answers what the test says, and counts.
type episodes struct {
	answer   environment.Observation
	failures []error
	resets   []environment.ResetRequest
	actions  []environment.Action
	closed   int
}

func (e *episodes) Open(string, spec.Environment) (environment.Environment, error) { return e, nil }

func (e *episodes) Release(context.Context, string, spec.Environment) error {
	e.closed++
	return nil
}

func (e *episodes) Reset(_ context.Context, request environment.ResetRequest) (environment.Observation, error) {
	e.resets = append(e.resets, request)
	return e.next()
}

func (e *episodes) Step(_ context.Context, action environment.Action) (environment.Observation, error) {
	e.actions = append(e.actions, action)
	return e.next()
}

func (e *episodes) next() (environment.Observation, error) {
	if len(e.failures) == 0 {
		return e.answer, nil
	}
	err := e.failures[0]
	e.failures = e.failures[1:]
	return environment.Observation{}, err
}

func (e *episodes) Close(context.Context) error { return nil }

// stepping is a session with an environment behind a prompt of text, whose first turn
// the model has ended with the given text.
func (f *fixture) stepping(text string) (*Activities, *episodes, uuid.UUID) {
	f.t.Helper()
	ctx := context.Background()
	e := newEngines(f.t)
	e.text = text
	a := f.worker(e, &placements{}, testCheckpointTokens)
	environments := &episodes{}
	a.cfg.Environments = environments
	wanted := single(8)
	wanted.Prompt = task.Prompt{Text: "Go."}
	wanted.Scorer = &task.Scorer{Kind: task.ScorerEnvironment}
	wanted.Environment = &task.Environment{Kind: task.EnvironmentHTTP, ToolFormat: toolcall.Hermes, HTTP: &spec.HTTPServer{URL: "http://a/b"}}
	id := f.session(wanted)
	admitted, err := a.Admit(ctx, workflows.TurnRef{Session: id.String()})
	must(f.t, err)
	if !admitted.Stepped {
		f.t.Fatalf("admitted as %+v", admitted)
	}
	reply, err := a.step(ctx, id, 0)
	must(f.t, err)
	if reply.Outcome != workflows.OutcomeMore {
		f.t.Fatalf("the reset gave %+v", reply)
	}
	e.lastToken = 3 + 4 // three tokens of "Go.", and five of output
	reply, err = a.turn(ctx, id, 0, &pulse{})
	must(f.t, err)
	if reply.Outcome != workflows.OutcomeStep {
		f.t.Fatalf("the turn gave %+v", reply)
	}
	return a, environments, id
}

const knock = `I try. <tool_call>{"name":"knock","arguments":{}}</tool_call>`

// TestStepIsMadeOnce: what an environment answered is stored, and a repeated step,
// also of another worker, finds it.
func TestStepIsMadeOnce(t *testing.T) {
	f := newFixture(t)
	ctx := t.Context()
	a, environments, id := f.stepping(knock)
	reward := 0.5
	environments.answer = environment.Observation{Results: []toolcall.Result{{CallID: "call_0_0", Name: "knock", Content: "Nobody."}}, Reward: &reward}
	for range 2 {
		if reply, err := a.step(ctx, id, 1); err != nil || reply.Outcome != workflows.OutcomeMore {
			t.Fatalf("the step gave %+v, %v", reply, err)
		}
	}
	other := f.worker(newEngines(t), &placements{}, testCheckpointTokens)
	if reply, err := other.step(ctx, id, 1); err != nil || reply.Outcome != workflows.OutcomeMore {
		t.Fatalf("another worker's step gave %+v, %v", reply, err)
	}
	if _, err := a.step(ctx, id, 2); err == nil {
		t.Fatal("a step was made before its turn")
	}
	if len(environments.actions) != 1 || environments.actions[0].Step != 1 || environments.actions[0].Text != "I try. " || environments.actions[0].Calls[0].Name != "knock" {
		t.Fatalf("the environment was asked for %+v", environments.actions)
	}
	observation, ok, err := f.Observation(ctx, id, 1)
	must(t, err)
	want := engine.Bytes{}.Encode(nil, "\n<tool_response>\n{\"name\":\"knock\",\"content\":\"Nobody.\"}\n</tool_response>\n")
	if !ok || !slices.Equal(observation.IDs, want) {
		t.Fatalf("stored is %+v", observation)
	}
	must(t, a.Release(ctx, id.String()))
	must(t, a.Complete(ctx, workflows.Completion{Session: id.String(), Status: "completed", Stepped: true}))
	if _, ok, err := f.Observation(ctx, id, 1); ok || err != nil || environments.closed != 1 {
		t.Fatalf("after the end an observation is there: %v, %v; released %d times", ok, err, environments.closed)
	}
}

// TestCallsThatCannotBeReadNeverReachTheEnvironment, and do not count as its steps.
func TestCallsThatCannotBeReadNeverReachTheEnvironment(t *testing.T) {
	f := newFixture(t)
	a, environments, id := f.stepping("<tool_call>knock!</tool_call>")
	if reply, err := a.step(t.Context(), id, 1); err != nil || reply.Outcome != workflows.OutcomeMore {
		t.Fatalf("the step gave %+v, %v", reply, err)
	}
	observation, ok, err := f.Observation(t.Context(), id, 1)
	must(t, err)
	text, err := engine.Bytes{}.Decode(observation.IDs)
	must(t, err)
	if !ok || len(environments.actions) != 0 || observation.EpisodeStep != 0 || len(text) == 0 {
		t.Fatalf("asked for %+v, stored is %+v: %q", environments.actions, observation, text)
	}
}

// TestFailuresOfEnvironments: only what may pass is tried again, none is a reward.
func TestFailuresOfEnvironments(t *testing.T) {
	fail := func(kind failure.Kind, times int) (errs []error) {
		for range times {
			errs = append(errs, failure.Newf(kind, "stepping", "as asked"))
		}
		return errs
	}
	for name, c := range map[string]struct {
		failures []error
		actions  int
		status   router.EndStatus
	}{
		"away for a moment":    {fail(failure.Unreachable, 2), 3, 0},
		"away":                 {fail(failure.Unreachable, 9), stepAttempts, router.Failed},
		"no room for a moment": {fail(failure.Exhausted, 3), 4, 0},
		"late":                 {fail(failure.Timeout, 1), 1, router.Failed},
		"lost":                 {fail(failure.Lost, 1), 1, router.Failed},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			a, environments, id := f.stepping(knock)
			environments.failures = c.failures
			reply, err := a.step(t.Context(), id, 1)
			must(t, err)
			if len(environments.actions) != c.actions {
				t.Errorf("asked %d times, want %d", len(environments.actions), c.actions)
			}
			if c.status == 0 {
				if reply.Outcome != workflows.OutcomeMore {
					t.Fatalf("the step gave %+v", reply)
				}
				return
			}
			if parsed(t, reply, nil) != c.status || reply.Scored || reply.Problem != c.failures[0].Error() {
				t.Fatalf("the step gave %+v", reply)
			}
			environments.failures = nil
			if again, err := a.step(t.Context(), id, 1); err != nil || again != reply || len(environments.actions) != c.actions {
				t.Fatalf("repeated it gave %+v, %v", again, err)
			}
		})
	}
}

// TestNoRoomForAnotherEnvironmentKeepsNoWorker: the step is an error that Temporal tries
// again when others may have ended, and costs the session nothing.
func TestNoRoomForAnotherEnvironmentKeepsNoWorker(t *testing.T) {
	f := newFixture(t)
	a, environments, id := f.stepping(knock)
	for range stepAttempts {
		environments.failures = append(environments.failures, failure.Newf(failure.Exhausted, "opening", "as many live here as may"))
	}
	if reply, err := a.step(t.Context(), id, 1); !errors.Is(err, errNoRoom) {
		t.Fatalf("the step gave %+v, %v", reply, err)
	}
	if reply, err := a.step(t.Context(), id, 1); err != nil || reply.Outcome != workflows.OutcomeMore {
		t.Fatalf("with room again it gave %+v, %v", reply, err)
	}
}

const (
	turnBegins = 1_000
	turnEnds   = 1_001
)

// templated tokenises chats as many models' templates do: a message is between two
// tokens of its own, and a line break follows it.
type templated struct {
	*engines
	forgets bool
}

func (e templated) Tokenize(_ context.Context, request engine.TokenizeRequest) (ids []int32, err error) {
	var messages []toolcall.Message
	if err := json.Unmarshal(request.Messages, &messages); err != nil {
		return nil, err
	}
	for i, m := range messages {
		if e.forgets && i < len(messages)-2 {
			m.Content = ""
		}
		ids = append(engine.Bytes{}.Encode(append(ids, turnBegins), m.Role+"\n"+m.Content), turnEnds, '\n')
	}
	if request.AddGenerationPrompt {
		ids = engine.Bytes{}.Encode(append(ids, turnBegins), "assistant\n")
	}
	return ids, nil
}

// TestContinuationEndsTheModelsMessage: the end of a message is there once, whether
// the model wrote it or a stop token of the trainer's cut it.
func TestContinuationEndsTheModelsMessage(t *testing.T) {
	f := newFixture(t)
	a := f.worker(templated{engines: newEngines(t)}, &placements{}, testCheckpointTokens)
	observed := []toolcall.Message{{Role: "user", Content: "It is open."}}
	follows := append(engine.Bytes{}.Encode([]int32{turnBegins}, "user\nIt is open."), turnEnds, '\n', turnBegins)
	follows = engine.Bytes{}.Encode(follows, "assistant\n")
	for name, c := range map[string]struct {
		last, before []int32
	}{
		"ended by itself": {[]int32{5, 6, turnEnds}, []int32{'\n'}},
		"cut":             {[]int32{5, 6, 7}, []int32{turnEnds, '\n'}},
		"with nothing":    {[]int32{}, []int32{turnEnds, '\n'}},
		"after a prompt":  {nil, nil},
	} {
		ids, err := a.continuation(t.Context(), &task.Spec{}, observed, c.last)
		if err != nil || !slices.Equal(ids, append(slices.Clone(c.before), follows...)) {
			t.Errorf("%s: %v, %v", name, ids, err)
		}
	}
	begins := engine.Bytes{}.Encode([]int32{'\n', turnBegins}, "assistant\n")
	if ids, err := a.continuation(t.Context(), &task.Spec{}, nil, []int32{5, turnEnds}); err != nil || !slices.Equal(ids, begins) {
		t.Errorf("an environment that says nothing: %v, %v", ids, err)
	}
	a = f.worker(templated{engines: newEngines(t), forgets: true}, &placements{}, testCheckpointTokens)
	var final *finalError
	if ids, err := a.continuation(t.Context(), &task.Spec{}, append(observed, observed...), []int32{1}); !errors.As(err, &final) {
		t.Errorf("a template that forgets gave %v, %v", ids, err)
	}
}
