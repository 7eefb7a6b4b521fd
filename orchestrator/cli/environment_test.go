package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/orchestrator/config"
	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/engine/simulated"
	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/toolcall"
	"holdfast/workflows/task"
)

// environmentCase is one session with an environment: what its model says, and how it
// must end.
type environmentCase struct {
	environment task.Environment
	limits      task.Limits
	scorer      *task.Scorer
	// lines are what the model says, the first to the task itself.
	lines simulated.Script
	// status and problem, or reward, of the sample.
	status, problem string
	reward          *float64
	turns           int
	// cuts: the observations lost some of their text.
	cuts bool
}

func hermes(name, arguments string) string {
	return fmt.Sprintf(`I try. <tool_call>{"name":%q,"arguments":%s}</tool_call>`, name, arguments)
}

func openAI(name, arguments string) string {
	return fmt.Sprintf(`{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":%q,"arguments":%q}}]}`, name, arguments)
}

// environmentRig is the service with an engine, and the servers of environments.
type environmentRig struct {
	*inProcess
	binary, commands     string
	doors, mortal, tools *serverProcess
}

func startEnvironmentRig(t *testing.T) *environmentRig {
	t.Helper()
	r := &environmentRig{binary: testBinary(t)}
	root, err := os.MkdirTemp("", "holdfast-commands-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	if err := os.Chmod(root, 0o711); err != nil { // programs run as another account than root
		t.Fatal(err)
	}
	r.commands = filepath.Join(root, "commands")
	r.doors, r.mortal, r.tools = startServer(t, r.binary, "environment"), startServer(t, r.binary, "environment"), startServer(t, r.binary, "mcp-http")
	r.inProcess = startInProcess(t, 1, func(cfg *config.Config) {
		cfg.Environments = config.Environments{CommandsDir: r.commands, AllowedHosts: []string{"127.0.0.1"}}
	})
	if err := r.engines.register(t.Context(), r.store, "default"); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *environmentRig) httpEnvironment(server *serverProcess, way string) task.Environment {
	timeoutSeconds := 60.0
	if way == "hang" {
		timeoutSeconds = 15 // for the reset too, of many sessions that begin at once
	}
	return task.Environment{Kind: task.EnvironmentHTTP, ToolFormat: toolcall.Hermes, HTTP: &spec.HTTPServer{
		URL: server.url + "/" + way, TimeoutSeconds: timeoutSeconds, Task: json.RawMessage(`{"house":"` + way + `"}`),
	}}
}

func (r *environmentRig) mcpProgram() task.Environment {
	return task.Environment{Kind: task.EnvironmentMCP, ToolFormat: toolcall.Hermes, MCP: &spec.MCPServer{
		TimeoutSeconds: 60, Program: &spec.Program{Command: []string{r.binary}, Env: map[string]string{roleVariable: "mcp"}, Limits: spec.Limits{MemoryBytes: 1 << 40}},
	}}
}

func execEnvironment(limits spec.Limits) task.Environment {
	return task.Environment{Kind: task.EnvironmentExec, ToolFormat: toolcall.Hermes, Exec: &spec.ExecProgram{
		Program: spec.Program{Command: []string{"sh"}, Limits: limits},
		Tool:    &spec.ExecTool{Name: "sh", Argument: "script"},
		Files:   map[string]string{"names.txt": "ada\ngrace\n"},
	}}
}

// cases are sessions on every kind of environment, with those that hang, die, flood and
// refuse.
func (r *environmentRig) cases() map[string]environmentCase {
	one := 1.0
	quarter := 0.25
	environment := &task.Scorer{Kind: task.ScorerEnvironment}
	mcpHTTP := task.Environment{Kind: task.EnvironmentMCP, ToolFormat: toolcall.OpenAI, MCP: &spec.MCPServer{URL: r.tools.url + "/mcp", TimeoutSeconds: 60}}
	mcpHangs := r.mcpProgram()
	mcpHangs.MCP.TimeoutSeconds = 20 // for its start too
	sum := &task.Scorer{Kind: task.ScorerNumericMatch, Target: "42"}
	push := hermes("push", "{}")
	return map[string]environmentCase{
		"http": {environment: r.httpEnvironment(r.doors, "green"), scorer: environment, status: "completed", reward: &one, turns: 2,
			lines: simulated.Script{{Say: push}, {After: "It is stuck.", Say: push}}},
		"http with a call that cannot be read": {environment: r.httpEnvironment(r.doors, "white"), scorer: environment, status: "completed", reward: &one, turns: 3,
			lines: simulated.Script{{Say: "<tool_call>push!</tool_call>"}, {After: "between the tags there must be one JSON object", Say: push}, {After: "It is stuck.", Say: push}}},
		"http hangs":   {environment: r.httpEnvironment(r.doors, "hang"), scorer: environment, status: "failed", problem: "timeout", turns: 1, lines: simulated.Script{{Say: push}}},
		"http floods":  {environment: r.httpEnvironment(r.doors, "flood"), scorer: environment, status: "failed", problem: "too_large", turns: 1, lines: simulated.Script{{Say: push}}},
		"http refuses": {environment: r.httpEnvironment(r.doors, "refuse"), scorer: environment, status: "failed", problem: "refused (status 422)", turns: 0},
		"http dies":    {environment: r.httpEnvironment(r.mortal, "die"), scorer: environment, status: "failed", problem: "unreachable", turns: 1, lines: simulated.Script{{Say: push}}},
		"turn limit": {environment: r.httpEnvironment(r.doors, "blue"), limits: task.Limits{MaxTurns: 1}, scorer: environment, status: "truncated", reward: &quarter, turns: 1,
			lines: simulated.Script{{Say: push}}},
		"time limit": {environment: execEnvironment(spec.Limits{}), limits: task.Limits{MaxRunSeconds: 20}, scorer: environment, status: "truncated", turns: 1,
			lines: simulated.Script{{Say: hermes("sh", `{"script":"sleep 1000"}`)}}},
		"mcp program": {environment: r.mcpProgram(), scorer: sum, status: "completed", reward: &one, turns: 2,
			lines: simulated.Script{{Say: hermes("add", `{"a":2,"b":40}`)}, {After: "the sum is 42", Say: "It makes 42."}}},
		"mcp server": {environment: mcpHTTP, scorer: sum, status: "completed", reward: &one, turns: 2,
			lines: simulated.Script{{Say: openAI("add", `{"a":1,"b":41}`)}, {After: "the sum is 42", Say: "So 42."}}},
		"mcp hangs":  {environment: mcpHangs, scorer: sum, status: "failed", problem: "timeout", turns: 1, lines: simulated.Script{{Say: hermes("hang", "{}")}}},
		"mcp dies":   {environment: r.mcpProgram(), scorer: sum, status: "failed", problem: "died: out of luck", turns: 1, lines: simulated.Script{{Say: hermes("die", "{}")}}},
		"mcp floods": {environment: r.mcpProgram(), scorer: sum, status: "failed", problem: "too_large", turns: 1, lines: simulated.Script{{Say: hermes("flood", "{}")}}},
		"exec": {environment: execEnvironment(spec.Limits{}), scorer: sum, status: "completed", reward: &one, turns: 3,
			lines: simulated.Script{{Say: hermes("sh", `{"script":"wc -l <names.txt; echo 21 >kept"}`)}, {After: `"content":"2\n"`, Say: hermes("sh", `{"script":"echo =$(($(cat kept)*2))"}`)}, {After: "=42", Say: "The result: 42"}}},
		"exec hangs": {environment: execEnvironment(spec.Limits{WallSeconds: 1}), scorer: sum, status: "completed", reward: &one, turns: 2,
			lines: simulated.Script{{Say: hermes("sh", `{"script":"sleep 1000 & sleep 1000"}`)}, {After: "the limit of wall time was reached", Say: "Then 42"}}},
		"exec dies": {environment: execEnvironment(spec.Limits{}), scorer: sum, status: "completed", reward: &one, turns: 2,
			lines: simulated.Script{{Say: hermes("sh", `{"script":"kill -9 $$"}`)}, {After: "[exit status 137]", Say: "Then 42"}}},
		"exec floods": {environment: execEnvironment(spec.Limits{OutputBytes: 1 << 20}), scorer: sum, status: "completed", reward: &one, turns: 2, cuts: true,
			lines: simulated.Script{{Say: hermes("sh", `{"script":"yes"}`)}, {After: "the limit of output was reached", Say: "Then 42"}}},
		"replay": {environment: task.Environment{Kind: task.EnvironmentReplay, Turns: []task.ReplayTurn{{OutputTokens: 4, AppendTokens: 3, GapSeconds: 0.2}, {OutputTokens: 4}}, Reward: &one},
			scorer: environment, status: "completed", reward: &one, turns: 2},
	}
}

// TestSessionsOnEveryEnvironment runs one agent session on each kind of environment,
// with real processes behind them, and some that hang, die or flood their output. Each
// ends with the right status, and nothing is left of any.
func TestSessionsOnEveryEnvironment(t *testing.T) {
	ctx := within(t, 5*time.Minute)
	r := startEnvironmentRig(t)
	cases := r.cases()
	var tasks []task.Spec
	for name, c := range cases {
		prompt, err := json.Marshal([]map[string]string{{"role": "user", "content": "Go on with [" + name + "]"}})
		if err != nil {
			t.Fatal(err)
		}
		spec := task.Spec{ID: name, Class: "agent", Prompt: task.Prompt{Messages: prompt}, Sampling: task.Sampling{MaxTokens: 2_000}, Limits: c.limits, Environment: &c.environment, Scorer: c.scorer}
		if c.environment.Kind == task.EnvironmentReplay {
			spec.Prompt, spec.Sampling = task.Prompt{Synthetic: &task.Synthetic{Tokens: 50, Seed: 1}}, task.Sampling{}
		}
		tasks = append(tasks, spec)
	}
	r.refusesServersElsewhere(ctx, t)
	samples := r.runScripted(ctx, t, "every", tasks, scriptFor(cases))
	for name, c := range cases {
		r.checkCase(ctx, t, name, &c, &samples[name][0])
	}
	r.nothingLeft(t)
	record(t, "environment", r.histories(ctx, t, samples["exec"][0].ID)[0])
}

// refusesServersElsewhere: a task that could only fail is not taken.
func (r *environmentRig) refusesServersElsewhere(ctx context.Context, t *testing.T) {
	t.Helper()
	run, err := r.client.CreateRun(ctx, demoRun("elsewhere", "default"))
	if err != nil {
		t.Fatal(err)
	}
	environment := r.httpEnvironment(r.doors, "win")
	elsewhere := task.Spec{Class: "agent", Prompt: task.Prompt{Text: "Go on."}, Sampling: task.Sampling{MaxTokens: 10}, Environment: &environment}
	environment.HTTP = &spec.HTTPServer{URL: "http://environment.example/env"}
	_, err = r.client.SubmitBatch(ctx, run.ID, "one", client.NewBatch{Tasks: client.Tasks([]task.Spec{elsewhere})})
	var refused *wire.Problem
	if !errors.As(err, &refused) || refused.Status != http.StatusUnprocessableEntity || refused.Errors[0].Location != "body.tasks[0].environment.http.url" {
		t.Errorf("an environment at a host that is not allowed got %v", err)
	}
	if _, err := r.client.EndRun(ctx, run.ID); err != nil {
		t.Fatal(err)
	}
}

// scriptFor keeps the lines of cases apart: two may wait for the same words.
func scriptFor(cases map[string]environmentCase) simulated.Script {
	var script simulated.Script
	for name, c := range cases {
		for _, line := range c.lines {
			if line.After == "" {
				line.After = "[" + name + "]"
			}
			line.With = "[" + name + "]"
			script = append(script, line)
		}
	}
	return script
}

// runScripted runs tasks with a model that says what the script has for it.
func (r *environmentRig) runScripted(ctx context.Context, t *testing.T, name string, tasks []task.Spec, script simulated.Script) map[string][]wire.Sample {
	t.Helper()
	for _, server := range r.engines.servers {
		if err := server.SetScript(script); err != nil {
			t.Fatal(err)
		}
	}
	run, err := r.client.CreateRun(ctx, demoRun(name, "default"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.client.SubmitBatch(ctx, run.ID, "first", client.NewBatch{Tasks: client.Tasks(tasks)}); err != nil {
		t.Fatal(err)
	}
	return readByTask(ctx, t, r.client.Read(run.ID, client.SamplesQuery{}), len(tasks))
}

// toolEvent is the detail of a step in a session's history.
type toolEvent struct {
	Step        int      `json:"step"`
	Environment string   `json:"environment"`
	Seconds     float64  `json:"seconds"`
	CutBytes    int64    `json:"cut_bytes"`
	Reward      *float64 `json:"reward"`
	Error       string   `json:"error"`
}

func (r *environmentRig) toolEvents(ctx context.Context, t *testing.T, session uuid.UUID) (steps []toolEvent) {
	t.Helper()
	page, err := r.client.Events(ctx, session, 0, 1_000)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range page.Events {
		if e.Kind == "tool" {
			var step toolEvent
			if err := json.Unmarshal(e.Detail, &step); err != nil {
				t.Fatal(err)
			}
			steps = append(steps, step)
		}
	}
	return steps
}

func (r *environmentRig) checkCase(ctx context.Context, t *testing.T, name string, c *environmentCase, sample *wire.Sample) {
	t.Helper()
	if sample.Status != c.status || (sample.Reward == nil) != (c.reward == nil) || c.reward != nil && *sample.Reward != *c.reward ||
		!strings.Contains(sample.Problem, c.problem) || sample.Usage.Turns != c.turns {
		t.Errorf("%s: sample is %s after %d turns with reward %v: %s", name, sample.Status, sample.Usage.Turns, sample.Reward, sample.Problem)
		return
	}
	if c.environment.Kind == task.EnvironmentReplay {
		return
	}
	steps := r.toolEvents(ctx, t, sample.ID)
	seconds, cut := 0.0, int64(0)
	for i, step := range steps {
		seconds += step.Seconds
		cut += step.CutBytes
		if step.Step != i || step.Environment != string(c.environment.Kind) || (step.Error != "") != (c.status == "failed" && i == len(steps)-1) {
			t.Errorf("%s: step %d is %+v", name, i, step)
		}
	}
	if len(steps) != c.turns+1 || seconds <= 0 || sample.Times.ToolSeconds < seconds*0.999 || sample.Times.ToolSeconds > seconds*1.001 || (cut > 0) != c.cuts {
		t.Errorf("%s: %d steps took %v s and cut %d bytes, the sample's tool time is %v s", name, len(steps), seconds, cut, sample.Times.ToolSeconds)
	}
	r.checkTokens(ctx, t, name, c, sample)
}

// checkTokens finds in the sample what the model said under the mask, and nothing else.
func (r *environmentRig) checkTokens(ctx context.Context, t *testing.T, name string, c *environmentCase, sample *wire.Sample) {
	t.Helper()
	ids, mask, _, err := sample.Arrays()
	if err != nil {
		t.Fatal(err)
	}
	direct, err := engine.NewVLLM(engine.VLLMConfig{URL: r.engines.servers[0].URL()})
	if err != nil {
		t.Fatal(err)
	}
	text := func(ids []int32) string {
		text, err := direct.Detokenize(ctx, ids, false)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	said := []string{""}
	for i := range ids {
		switch {
		case mask[i] == 1:
			said[len(said)-1] += text(ids[i : i+1])
		case said[len(said)-1] != "":
			said = append(said, "")
		}
	}
	var want []string
	for _, line := range c.lines {
		want = append(want, line.Say+"\n")
	}
	if said = slices.DeleteFunc(said, func(s string) bool { return s == "" }); !slices.Equal(said, want) {
		t.Errorf("%s: under the mask stands %q, the model said %q", name, said, want)
	}
	whole := text(ids)
	if name == "http" {
		push := hermes("push", "{}") + "\n"
		if want := `<tool> {"type":"function","function":{"name":"push","parameters":{"type":"object"}}}` + "\n<user> Go on with [http]\n<user> You are at the door of the green house.\n<assistant>" + push +
			"<user> <tool_response>\n{\"name\":\"push\",\"content\":\"It is stuck.\"}\n</tool_response>\n<assistant>" + push; whole != want {
			t.Errorf("the whole context is\n%q, want\n%q", whole, want)
		}
	}
	if name == "mcp server" && !strings.Contains(whole, "\n<tool> the sum is 42\n<assistant>So 42.\n") {
		t.Errorf("the whole context is %q", whole)
	}
}

// nothingLeft finds no environment in the registry, no directory, no process of an
// environment, no episode or session at a server, and no connection to one.
func (r *environmentRig) nothingLeft(t *testing.T) {
	t.Helper()
	if live := r.environments.Live(); live != 0 {
		t.Errorf("%d environments live on", live)
	}
	if left, err := filepath.Glob(filepath.Join(r.commands, "*", "*", "work")); err != nil || len(left) != 0 {
		t.Errorf("directories %v are left, %v", left, err)
	}
	known := []int{r.doors.cmd.Process.Pid, r.mortal.cmd.Process.Pid, r.tools.cmd.Process.Pid}
	for _, pid := range descendants(t, os.Getpid()) {
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil || slices.Contains(known, pid) || !alive(pid) {
			continue
		}
		if command := strings.ReplaceAll(string(line), "\x00", " "); strings.HasPrefix(command, r.binary) || strings.Contains(command, "sleep 1000") || strings.HasPrefix(command, "yes") {
			t.Errorf("process %d lives on: %s", pid, command)
		}
	}
	for _, server := range []*serverProcess{r.doors, r.tools} {
		if n := server.ask(t, "/open"); n != 0 {
			t.Errorf("%d episodes or sessions are open at %s", n, server.url)
		}
		eventually(t, patience, "the connections to "+server.url+" are closed", func() bool { return server.ask(t, "/connections") == 0 })
	}
}
