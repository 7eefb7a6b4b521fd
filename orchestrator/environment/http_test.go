package environment

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"

	"holdfast/orchestrator/environment/exchange"
	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/toolcall"
)

func httpSpec(url string) spec.Environment {
	return spec.Environment{Kind: spec.HTTP, HTTP: &spec.HTTPServer{URL: url + "/", TimeoutSeconds: 30, Task: json.RawMessage(`{"id":3}`)}}
}

func serveCounter(t *testing.T) (*counter, string) {
	t.Helper()
	c := newCounter()
	server := httptest.NewServer(c.handler())
	t.Cleanup(server.Close)
	return c, server.URL
}

func TestHTTPEpisode(t *testing.T) {
	c, url := serveCounter(t)
	r := newRegistry(t, Config{})
	e := open(t, r, httpSpec(url))
	first := reset(t, e)
	if want := `Count to ten; seed 7, member 2, task {"id":3}.`; len(first.Messages) != 1 || first.Messages[0] != user(want) || len(first.Tools) != 1 {
		t.Errorf("reset gave %+v", first)
	}
	if again := reset(t, e); !reflect.DeepEqual(again, first) {
		t.Errorf("reset again gave %+v", again)
	}
	second := step(t, e, say(1, "4"))
	if second.Done || second.Reward == nil || *second.Reward != 0.4 || second.Messages[0].Content != "4" {
		t.Errorf("step 1 gave %+v", second)
	}
	if again := step(t, e, say(1, "4")); !reflect.DeepEqual(again, second) {
		t.Errorf("step 1 again gave %+v", again)
	}
	_, err := e.Step(t.Context(), say(3, "1"))
	wantKind(t, err, failure.Conflict, "the last step was 1")
	_, err = e.Reset(t.Context(), ResetRequest{})
	wantKind(t, err, failure.Conflict, "")
	_, err = e.Step(t.Context(), say(2, "many"))
	wantKind(t, err, failure.Refused, "say a number")
	if last := step(t, e, say(2, "6")); !last.Done || *last.Reward != 1 {
		t.Errorf("step 2 gave %+v", last)
	}
	_, err = e.Step(t.Context(), say(3, "1"))
	wantKind(t, err, failure.Conflict, "the episode ended with step 2")
	for range 2 {
		if err := e.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	_, err = e.Step(t.Context(), say(2, "6"))
	wantKind(t, err, failure.Lost, "closed")
	if c.open() != 0 || r.Live() != 0 {
		t.Errorf("%d episodes and %d environments are open", c.open(), r.Live())
	}
}

// TestHTTPEpisodeGoesOnElsewhere is what happens after a crash: another process
// repeats the call whose answer was lost, goes on, and a third one releases.
func TestHTTPEpisodeGoesOnElsewhere(t *testing.T) {
	c, url := serveCounter(t)
	before := open(t, newRegistry(t, Config{}), httpSpec(url))
	reset(t, before)
	first := step(t, before, say(1, "3"))

	after := open(t, newRegistry(t, Config{}), httpSpec(url))
	if again := step(t, after, say(1, "3")); !reflect.DeepEqual(again, first) {
		t.Errorf("step 1 elsewhere gave %+v, not %+v", again, first)
	}
	if second := step(t, after, say(2, "4")); second.Messages[0].Content != "7" {
		t.Errorf("step 2 gave %+v", second)
	}
	stale := open(t, newRegistry(t, Config{}), httpSpec(url))
	_, err := stale.Step(t.Context(), say(1, "3"))
	wantKind(t, err, failure.Conflict, "another step")

	releasing := newRegistry(t, Config{})
	for range 2 {
		if err := releasing.Release(t.Context(), "session-1", httpSpec(url)); err != nil {
			t.Error(err)
		}
	}
	if c.open() != 0 {
		t.Errorf("%d episodes are open", c.open())
	}
	_, err = after.Step(t.Context(), say(3, "1"))
	wantKind(t, err, failure.Lost, "no such episode")
}

func TestHTTPFailures(t *testing.T) {
	for text, want := range map[string]struct {
		kind failure.Kind
		says string
	}{
		"hang":  {failure.Timeout, "no answer within 1s"},
		"flood": {failure.TooLarge, "an answer of more than 4194304 bytes"},
		"NaN":   {failure.Malformed, "not as documented"},
	} {
		t.Run(text, func(t *testing.T) {
			c, url := serveCounter(t)
			s := httpSpec(url)
			if want.kind == failure.Timeout {
				s.HTTP.TimeoutSeconds = 1 // for the reset and the close too
			}
			e := open(t, newRegistry(t, Config{}), s)
			reset(t, e)
			_, err := e.Step(t.Context(), say(1, text))
			wantKind(t, err, want.kind, want.says)
			if err := e.Close(t.Context()); err != nil || c.open() != 0 {
				t.Errorf("closing: %v; %d episodes are open", err, c.open())
			}
		})
	}
}

func TestHTTPServerDies(t *testing.T) {
	cmd, lines, url := process(t, "http")
	r := newRegistry(t, Config{})
	e := open(t, r, httpSpec(url))
	reset(t, e)
	ended := make(chan error, 1)
	go func() {
		_, err := e.Step(t.Context(), say(1, "hang for good"))
		ended <- err
	}()
	if _, err := lines.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// The first attempt breaks, the others find nobody.
	wantKind(t, <-ended, failure.Unreachable, "connection refused")
	wantKind(t, e.Close(t.Context()), failure.Unreachable, "closing environment session-1")
	if r.Live() != 0 {
		t.Error("an environment that could not tell its server is still kept")
	}
}

func TestCancelAndCloseInterruptAStep(t *testing.T) {
	c, url := serveCounter(t)
	e := open(t, newRegistry(t, Config{}), httpSpec(url))
	reset(t, e)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	stepOnce := func(ctx context.Context) {
		_, err := e.Step(ctx, say(1, "hang"))
		ended <- err
	}
	hangs := func() {
		t.Helper()
		select {
		case <-c.hanging:
		case err := <-ended:
			t.Fatalf("the step ended early: %v", err)
		}
	}
	go stepOnce(ctx)
	hangs()
	cancel()
	wantKind(t, <-ended, failure.Cancelled, "")
	go stepOnce(t.Context())
	hangs()
	if err := e.Close(ctx); err != nil {
		t.Errorf("closing with a context that has ended: %v", err)
	}
	wantKind(t, <-ended, failure.Cancelled, "")
	if c.open() != 0 {
		t.Errorf("%d episodes are open", c.open())
	}
}

func TestAnswersAreChecked(t *testing.T) {
	for name, c := range map[string]struct{ answer, says string }{
		"role":        {`{"observation":{"messages":[{"content":"x"}]}}`, "messages[0].role"},
		"call id":     {`{"observation":{"results":[{"content":"x"}]}}`, "results[0].call_id"},
		"tool name":   {`{"tools":[{}]}`, "tools[0].name"},
		"reward":      {`{"reward":1e999}`, "not as documented"},
		"reward type": {`{"reward":"1"}`, "not as documented"},
		"flood":       {`{"observation":{"messages":[` + strings.Repeat(`{"role":"user"},`, 256) + `{"role":"user"}]}}`, "more than 256 messages"},
		"no JSON":     {`<html>`, "not as documented"},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(c.answer)) }))
			t.Cleanup(server.Close)
			_, err := open(t, newRegistry(t, Config{}), httpSpec(server.URL)).Reset(t.Context(), ResetRequest{})
			wantKind(t, err, failure.Malformed, c.says)
		})
	}
}

func TestRegistry(t *testing.T) {
	_, url := serveCounter(t)
	r := newRegistry(t, Config{MaxLive: 1, Access: exchange.Access{AllowedHosts: []string{"127.0.0.1", "*.example:80"}, Credentials: map[string]string{"known": "t"}}})
	e := open(t, r, httpSpec(url))
	if again := open(t, r, httpSpec(url)); again != e {
		t.Error("a session has two environments")
	}
	_, err := r.Open("session-2", httpSpec(url))
	wantKind(t, err, failure.Exhausted, "1 environments live here")
	if idle := r.Idle(1e18); len(idle) != 0 {
		t.Errorf("%v are idle at once", idle)
	}
	if err := r.Drop(t.Context(), append(r.Idle(0), "nobody's")); err != nil || r.Live() != 0 {
		t.Errorf("after the idle ones were dropped %d live on, %v", r.Live(), err)
	}
	_, err = r.Open("session-2", httpSpec("http://other:80"))
	wantKind(t, err, failure.Disabled, "the host other:80 is not allowed")
	unknown := httpSpec(url)
	unknown.HTTP.Credential = "unknown"
	_, err = r.Open("session-2", unknown)
	wantKind(t, err, failure.Disabled, `no credential is called "unknown"`)
	_, err = r.Open("session-2", spec.Environment{Kind: "other"})
	wantKind(t, err, failure.Refused, "environment.kind: must be one of")

	noPrograms, err := NewRegistry(Config{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = noPrograms.Open("session-1", execSpec("true"))
	wantKind(t, err, failure.Disabled, "runs no programs")
	if err := noPrograms.Release(t.Context(), "session-1", execSpec("true")); err != nil {
		t.Error(err)
	}
	if _, err := NewRegistry(Config{Access: exchange.Access{AllowedHosts: []string{"["}}}); err == nil {
		t.Error("a bad pattern was taken")
	}
}

// TestEpisodesAtServersOutliveTheProcess leaves a process whose programs must end and
// whose episodes at servers go on elsewhere.
func TestEpisodesAtServersOutliveTheProcess(t *testing.T) {
	server, url := serveCounter(t)
	r := newRegistry(t, Config{})
	ctx := t.Context()
	remote := open(t, r, httpSpec(url))
	if _, err := remote.Reset(ctx, ResetRequest{}); err != nil {
		t.Fatal(err)
	}
	local, err := r.Open("session-2", execSpec("true"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := local.Reset(ctx, ResetRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := r.Leave(ctx); err != nil || r.Live() != 0 || server.open() != 1 {
		t.Fatalf("%d live on, %d episodes are open, %v", r.Live(), server.open(), err)
	}
	_, err = local.Step(ctx, Action{Step: 1})
	wantKind(t, err, failure.Lost, "")
	if o, err := open(t, newRegistry(t, Config{}), httpSpec(url)).Step(ctx, Action{Step: 1, Text: "3"}); err != nil || len(o.Messages) == 0 {
		t.Fatalf("elsewhere the episode goes on with %+v, %v", o, err)
	}
}

func TestRenderPutsProblemsBesideResults(t *testing.T) {
	o := Observation{Results: []toolcall.Result{{CallID: "b", Content: "done"}}, Messages: []toolcall.Message{user("go on")}}
	got := o.Render(toolcall.OpenAI, []*toolcall.MalformedError{{CallID: "a", Problem: "name is missing"}})
	if len(got) != 3 || got[0].ToolCallID != "a" || got[1].ToolCallID != "b" || got[2] != user("go on") {
		t.Errorf("got %+v", got)
	}
}
