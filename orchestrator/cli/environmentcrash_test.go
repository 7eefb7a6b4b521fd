package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/api/client"
	"holdfast/orchestrator/engine/simulated"
	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/toolcall"
	"holdfast/workflows/task"
)

// gate is an environment server whose steps wait until it is opened, and which then
// ends every episode.
type gate struct {
	opened chan struct{}
	mu     sync.Mutex
	open   map[string]bool
	// steps counts the requests for a step; asked are the steps that they were for.
	steps int
	asked map[gateStep]bool
}

type gateStep struct {
	episode string
	step    int
}

func (g *gate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var body struct {
		EpisodeID string `json:"episode_id"`
		Step      int    `json:"step"`
	}
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	g.mu.Lock()
	switch r.URL.Path {
	case "/reset":
		g.open[body.EpisodeID] = true
	case "/close":
		delete(g.open, body.EpisodeID)
	case "/step":
		g.steps++
		g.asked[gateStep{body.EpisodeID, body.Step}] = true
	}
	g.mu.Unlock()
	if r.URL.Path != "/step" {
		fmt.Fprint(w, `{}`)
		return
	}
	select {
	case <-g.opened:
		fmt.Fprint(w, `{"reward":1,"done":true}`)
	case <-r.Context().Done():
	}
}

func (g *gate) state() (open, steps int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.open), g.steps
}

// running counts the processes whose command line holds some text.
func running(t *testing.T, text string) (n int) {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range lines {
		line, err := os.ReadFile(path)
		if err == nil && strings.Contains(strings.ReplaceAll(string(line), "\x00", " "), text) {
			n++
		}
	}
	return n
}

// TestEnvironmentsAfterCancelAndCrash cancels a session in the middle of a step, then
// kills the whole service in the middle of others' steps. Episodes at a server go on
// with the next service; those that lived in the old one are lost, which is a failure
// and no reward; no process, directory or episode is left.
func TestEnvironmentsAfterCancelAndCrash(t *testing.T) {
	ctx := within(t, 10*time.Minute)
	g := &gate{opened: make(chan struct{}), open: map[string]bool{}, asked: map[gateStep]bool{}}
	server := httptest.NewServer(g)
	t.Cleanup(server.Close) // after the service has been killed, which may wait for a step
	// Numbers that no other test sleeps for, nor another run of this one, tell these
	// processes from others'.
	own := 1_000_000 + rand.IntN(1_000_000_000)
	sleeps := func(n int) string { return fmt.Sprintf("sleep %d%d", own, n) }
	script := simulated.Script{
		{After: "[exec]", Say: hermes("sh", `{"script":"`+sleeps(1)+` & `+sleeps(2)+`"}`)},
		{After: "[cancelled]", Say: hermes("sh", `{"script":"`+sleeps(3)+` & `+sleeps(4)+`"}`)},
		{After: "[server]", Say: "I knock."},
	}
	data := openDir(t)
	args := []string{"dev", "--listen", "127.0.0.1:0", "--data-dir", data, "--engines", "1", "--time-scale", "500", "--log-level", "error"}
	p := startHoldfast(t, args...)
	p.script(ctx, t, script)
	run, err := p.client.CreateRun(ctx, demoRun("crash", "default"))
	if err != nil {
		t.Fatal(err)
	}
	shell := execEnvironment(spec.Limits{WallSeconds: 3_000})
	knock := task.Environment{Kind: task.EnvironmentHTTP, ToolFormat: toolcall.Hermes, HTTP: &spec.HTTPServer{URL: server.URL, TimeoutSeconds: 300}}
	var tasks []task.Spec
	for name, environment := range map[string]*task.Environment{"exec": &shell, "cancelled": &shell, "server": &knock} {
		tasks = append(tasks, task.Spec{
			ID: name, Class: "agent", Prompt: task.Prompt{Text: "Go on with [" + name + "]"}, Sampling: task.Sampling{MaxTokens: 500},
			Environment: environment, Scorer: &task.Scorer{Kind: task.ScorerEnvironment},
		})
	}
	if _, err := p.client.SubmitBatch(ctx, run.ID, "one", client.NewBatch{Tasks: client.Tasks(tasks)}); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "every session is in a step", func() bool {
		_, steps := g.state()
		return steps > 0 && running(t, sleeps(1)) > 0 && running(t, sleeps(3)) > 0
	})

	if _, err := p.client.CancelSession(ctx, p.sessionOf(ctx, t, run.ID, "cancelled"), "not needed"); err != nil {
		t.Fatal(err)
	}
	reader := p.client.Read(run.ID, client.SamplesQuery{})
	if sample, err := reader.Next(ctx); err != nil || sample.TaskID != "cancelled" || sample.Status != "cancelled" || sample.Reward != nil {
		t.Fatalf("after the cancellation came %+v, %v", sample, err)
	}
	eventually(t, patience, "its programs have ended", func() bool { return running(t, sleeps(3))+running(t, sleeps(4)) == 0 })
	if running(t, sleeps(1)) == 0 {
		t.Fatal("another session's programs have ended with it")
	}

	_, asked := g.state()
	p.killTree(t)
	eventually(t, patience, "no program outlives the service", func() bool { return running(t, sleeps(1))+running(t, sleeps(2)) == 0 })
	p = startHoldfast(t, args...)
	p.script(ctx, t, script)
	close(g.opened)
	samples := readByTask(ctx, t, p.client.Read(run.ID, client.SamplesQuery{}), 3)
	lost, knocked := samples["exec"][0], samples["server"][0]
	if lost.Status != "failed" || !strings.Contains(lost.Problem, "lost") || lost.Reward != nil {
		t.Errorf("the session whose programs died is %s with reward %v: %s", lost.Status, lost.Reward, lost.Problem)
	}
	if knocked.Status != "completed" || knocked.Reward == nil || *knocked.Reward != 1 {
		t.Errorf("the session at a server is %s with reward %v: %s", knocked.Status, knocked.Reward, knocked.Problem)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.open) != 0 || g.steps <= asked || len(g.asked) != 1 {
		t.Errorf("%d episodes are open after %d requests for a step, %d of them before the kill, for %v", len(g.open), g.steps, asked, g.asked)
	}
	if left, err := filepath.Glob(filepath.Join(data, "*", "*", "*", "work")); err != nil || len(left) != 0 {
		t.Errorf("directories %v are left, %v", left, err)
	}
}

// script tells the engines of a service what to say.
func (p *process) script(ctx context.Context, t *testing.T, script simulated.Script) {
	t.Helper()
	body, err := json.Marshal(script)
	if err != nil {
		t.Fatal(err)
	}
	list, err := p.client.Instances(ctx, "default")
	if err != nil || len(list.Instances) == 0 {
		t.Fatal(list, err)
	}
	for _, instance := range list.Instances {
		request, err := http.NewRequestWithContext(ctx, http.MethodPut, instance.URL+"/simulated/script", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			t.Fatalf("the engine answered %s", answer.Status)
		}
	}
}

// sessionOf finds the session of a task of one member.
func (p *process) sessionOf(ctx context.Context, t *testing.T, run uuid.UUID, name string) uuid.UUID {
	t.Helper()
	page, err := p.client.Sessions(ctx, run, client.SessionsQuery{Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	for _, session := range page.Sessions {
		if session.TaskID == name {
			return session.ID
		}
	}
	t.Fatalf("there is no session of the task %s", name)
	return uuid.Nil
}
