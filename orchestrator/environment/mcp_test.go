package environment

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"holdfast/orchestrator/environment/exchange"
	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/toolcall"
)

func mcpProgram(command ...string) spec.Environment {
	return spec.Environment{Kind: spec.MCP, ToolFormat: toolcall.Hermes, MCP: &spec.MCPServer{
		TimeoutSeconds: 60,
		Program: &spec.Program{
			Command: command, Env: map[string]string{roleVariable: "mcp"},
			// A binary built with -race reserves terabytes of addresses.
			Limits: spec.Limits{MemoryBytes: spec.MaxMemoryBytes},
		},
	}}
}

// eachTransport runs a test against a server that is a process and one that is
// reached by HTTP.
func eachTransport(t *testing.T, test func(t *testing.T, e spec.Environment)) {
	t.Run("stdio", func(t *testing.T) { test(t, mcpProgram(self)) })
	t.Run("http", func(t *testing.T) {
		release := make(chan struct{})
		handler := mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return toolServer(release) }, nil)
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != "Bearer secret" {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			body, err := io.ReadAll(r.Body)
			if err != nil {
				return
			}
			if bytes.Contains(body, []byte(`"name":"flood"`)) {
				w.Header().Set("Content-Type", "application/json")
				_ = pour(w) // until the client hangs up
				return
			}
			r.Body = io.NopCloser(bytes.NewReader(body))
			handler.ServeHTTP(w, r)
		}))
		t.Cleanup(func() {
			close(release)
			server.Close()
		})
		test(t, spec.Environment{Kind: spec.MCP, ToolFormat: toolcall.OpenAI, MCP: &spec.MCPServer{URL: server.URL, Credential: "tools", TimeoutSeconds: 60}})
	})
}

func mcpRegistry(t *testing.T) *Registry {
	return newRegistry(t, Config{Access: exchange.Access{Credentials: map[string]string{"tools": "secret"}}})
}

func TestMCPEpisode(t *testing.T) {
	eachTransport(t, func(t *testing.T, s spec.Environment) {
		s.MCP.Tools = []string{"add", "fail", "talk"}
		s.ObservationBytes = 1000
		e := open(t, mcpRegistry(t), s)
		tools := reset(t, e).Tools
		add := slices.IndexFunc(tools, func(tool toolcall.Tool) bool { return tool.Name == "add" })
		if len(tools) != 3 || add < 0 || tools[add].Description != "Adds." || !strings.Contains(string(tools[add].Parameters), `"a"`) {
			t.Fatalf("the tools are %+v", tools)
		}
		both := Action{Step: 1, Calls: append(ask(1, "add", `{"a":2,"b":3}`).Calls, ask(2, "fail", `{}`).Calls...)}
		o := step(t, e, both)
		if len(o.Results) != 2 || o.Results[0] != (toolcall.Result{CallID: "call_1", Name: "add", Content: "5"}) {
			t.Errorf("got %+v", o)
		}
		if !o.Results[1].IsError || o.Results[1].Content != "the door is shut" || o.Done {
			t.Errorf("an error of a tool is %+v", o.Results[1])
		}
		o = step(t, e, ask(2, "hang", `{}`))
		if !o.Results[0].IsError || o.Results[0].Content != `Error: there is no tool "hang"; there are add, fail, talk` {
			t.Errorf("a tool that was not offered gives %+v", o.Results[0])
		}
		o = step(t, e, ask(3, "add", `{"a":"two"}`))
		if !o.Results[0].IsError || !strings.Contains(o.Results[0].Content, "validating") {
			t.Errorf("bad arguments give %+v", o.Results[0])
		}
		o = step(t, e, ask(4, "talk", `{}`))
		if o.CutBytes != 99_000 || !strings.Contains(o.Results[0].Content, "[... 99000 bytes cut ...]") {
			t.Errorf("%d bytes were cut", o.CutBytes)
		}
		if o = step(t, e, say(5, "Five.")); !o.Done {
			t.Error("an answer without calls ends nothing")
		}
		if err := e.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestMCPFailures(t *testing.T) {
	for tool, kind := range map[string]failure.Kind{"hang": failure.Timeout, "flood": failure.TooLarge} {
		t.Run(tool, func(t *testing.T) {
			eachTransport(t, func(t *testing.T, s spec.Environment) {
				e := open(t, mcpRegistry(t), s)
				reset(t, e)
				if tool == "hang" {
					// Shortened only now: connecting takes its time on a busy machine.
					e.(*session).driver.(*mcpDriver).spec.TimeoutSeconds = 0.2
				}
				_, err := e.Step(t.Context(), ask(1, tool, `{}`))
				wantKind(t, err, kind, "stepping environment session-1 to 1")
				_, err = e.Step(t.Context(), ask(1, "add", `{"a":1,"b":1}`))
				wantKind(t, err, failure.Lost, "an earlier step was cut short")
				if err := e.Close(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
	t.Run("die", func(t *testing.T) {
		e := open(t, mcpRegistry(t), mcpProgram(self))
		reset(t, e)
		_, err := e.Step(t.Context(), ask(1, "die", `{}`))
		wantKind(t, err, failure.Died, "out of luck")
		if err := e.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// TestMCPServersThatAreNone tries programs that do not speak the protocol, and
// ones that do not want to end.
func TestMCPServersThatAreNone(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		kind   failure.Kind
	}{
		"ends at once":          {"echo no such file >&2; exit 2", failure.Died},
		"says nothing":          {"trap '' TERM; setsid sleep 1000 & while :; do sleep 1000; done", failure.Timeout},
		"speaks something else": {"echo hello; cat", failure.Died},
		"floods":                {`printf '"'; tr '\0' x </dev/zero`, failure.TooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			r := mcpRegistry(t)
			s := mcpProgram("sh", "-c", c.script)
			if c.kind == failure.Timeout {
				s.MCP.TimeoutSeconds = 0.2
			}
			_, err := open(t, r, s).Reset(t.Context(), ResetRequest{})
			wantKind(t, err, c.kind, "resetting environment session-1")
			nothingLeft(t, r.config.Commands.Root())
		})
	}
	t.Run("nobody listens", func(t *testing.T) {
		server := httptest.NewServer(http.NotFoundHandler())
		server.Close()
		s := spec.Environment{Kind: spec.MCP, ToolFormat: toolcall.Hermes, MCP: &spec.MCPServer{URL: server.URL}}
		_, err := open(t, mcpRegistry(t), s).Reset(t.Context(), ResetRequest{})
		wantKind(t, err, failure.Unreachable, "connection refused")
	})
	t.Run("a tool that is not there", func(t *testing.T) {
		s := mcpProgram(self)
		s.MCP.Tools = []string{"fly"}
		_, err := open(t, mcpRegistry(t), s).Reset(t.Context(), ResetRequest{})
		wantKind(t, err, failure.Refused, `no tool "fly"`)
	})
	t.Run("not reset here", func(t *testing.T) {
		_, err := open(t, mcpRegistry(t), mcpProgram(self)).Step(t.Context(), ask(4, "add", `{}`))
		wantKind(t, err, failure.Lost, "this process has not reset it")
	})
}

func TestMCPCancel(t *testing.T) {
	e := open(t, mcpRegistry(t), mcpProgram(self))
	reset(t, e)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := e.Step(ctx, ask(1, "hang", `{}`))
	wantKind(t, err, failure.Cancelled, "")
	if err := e.Close(ctx); err != nil {
		t.Error(err)
	}
}
