package environment

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"holdfast/orchestrator/environment/command"
	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/toolcall"
)

// roleVariable makes the test binary one of the servers that the tests need as
// real processes.
const roleVariable = "HOLDFAST_TEST_ROLE"

// self is a copy of the test binary that every account can run.
var self string

func TestMain(m *testing.M) {
	switch os.Getenv(roleVariable) {
	case "":
		os.Exit(testMain(m))
	case "mcp":
		if err := toolServer(nil).Run(context.Background(), &mcp.StdioTransport{}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case "http":
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			panic(err)
		}
		fmt.Println("http://" + listener.Addr().String())
		panic(http.Serve(listener, newCounter().handler()))
	}
}

func testMain(m *testing.M) int {
	folder, err := os.MkdirTemp("", "holdfast-environment-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(folder)
	if err := os.Chmod(folder, 0o755); err != nil {
		panic(err)
	}
	binary, err := os.Executable()
	if err != nil {
		panic(err)
	}
	content, err := os.ReadFile(binary)
	if err != nil {
		panic(err)
	}
	self = filepath.Join(folder, "server")
	if err := os.WriteFile(self, content, 0o755); err != nil {
		panic(err)
	}
	return m.Run()
}

// toolServer offers one tool for each way in which a tool can behave. The one that
// hangs does so until release is closed.
func toolServer(release <-chan struct{}) *mcp.Server {
	server := mcp.NewServer(&mcp.Implementation{Name: "tools", Version: "1"}, nil)
	type numbers struct {
		A int `json:"a"`
		B int `json:"b"`
	}
	mcp.AddTool(server, &mcp.Tool{Name: "add", Description: "Adds."}, func(_ context.Context, _ *mcp.CallToolRequest, n numbers) (*mcp.CallToolResult, any, error) {
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: fmt.Sprint(n.A + n.B)}}}, nil, nil
	})
	plain := func(name string, do func() (string, error)) {
		mcp.AddTool(server, &mcp.Tool{Name: name}, func(context.Context, *mcp.CallToolRequest, struct{}) (*mcp.CallToolResult, any, error) {
			text, err := do()
			if err != nil {
				return nil, nil, err
			}
			return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: text}}}, nil, nil
		})
	}
	plain("fail", func() (string, error) { return "", errors.New("the door is shut") })
	plain("talk", func() (string, error) { return strings.Repeat("word ", 20_000), nil })
	plain("flood", func() (string, error) { return "", pour(os.Stdout) })
	plain("hang", func() (string, error) { <-release; return "", nil })
	plain("die", func() (string, error) {
		fmt.Fprintln(os.Stderr, "out of luck")
		os.Exit(3)
		return "", nil
	})
	return server
}

// pour begins a message that never ends.
func pour(w io.Writer) error {
	if _, err := io.WriteString(w, `{"x":"`); err != nil {
		return err
	}
	chunk := []byte(strings.Repeat("x", 64<<10))
	for {
		if _, err := w.Write(chunk); err != nil {
			return err
		}
	}
}

// counter is an environment server as docs/environments.md describes it: the
// model says numbers, the episode ends at a total of ten.
type counter struct {
	mu       sync.Mutex
	episodes map[string]*counterEpisode
	// hanging is told the step of each request that will never be answered.
	hanging chan int
}

type counterEpisode struct {
	step   int
	total  float64
	answer map[string]any
}

func newCounter() *counter {
	return &counter{episodes: make(map[string]*counterEpisode), hanging: make(chan int, 10)}
}

func (c *counter) open() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.episodes)
}

func (c *counter) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /reset", func(w http.ResponseWriter, r *http.Request) {
		var request resetDocument
		if err := json.NewDecoder(r.Body).Decode(&request); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		episode, ok := c.episodes[request.EpisodeID]
		switch {
		case ok && episode.step > 0:
			http.Error(w, "the episode has begun", http.StatusConflict)
			return
		case !ok:
			episode = &counterEpisode{answer: map[string]any{
				"observation": fmt.Sprintf("Count to ten; seed %d, member %d, task %s.", request.Seed, request.Member, request.Task),
				"tools":       []toolcall.Tool{{Name: "count"}},
			}}
			c.episodes[request.EpisodeID] = episode
		}
		_ = json.NewEncoder(w).Encode(episode.answer)
	})
	mux.HandleFunc("POST /step", c.step)
	mux.HandleFunc("POST /close", func(w http.ResponseWriter, r *http.Request) {
		var request closeDocument
		if err := json.NewDecoder(r.Body).Decode(&request); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if _, ok := c.episodes[request.EpisodeID]; !ok {
			http.Error(w, "no such episode", http.StatusNotFound)
			return
		}
		delete(c.episodes, request.EpisodeID)
	})
	return mux
}

func (c *counter) step(w http.ResponseWriter, r *http.Request) {
	var request stepDocument
	if err := json.NewDecoder(r.Body).Decode(&request); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	switch request.Action.Text {
	case "hang":
		c.hanging <- request.Step
		<-r.Context().Done()
		return
	case "hang for good":
		fmt.Println("hanging")
		select {}
	case "flood":
		fmt.Fprint(w, `{"observation": "`, strings.Repeat("x", 5<<20), `"}`)
		return
	case "NaN":
		fmt.Fprint(w, `{"reward": NaN}`)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	episode, ok := c.episodes[request.EpisodeID]
	switch {
	case !ok:
		http.Error(w, "no such episode", http.StatusNotFound)
		return
	case request.Step == episode.step: // asked again
	case request.Step == episode.step+1:
		var amount float64
		if _, err := fmt.Sscan(request.Action.Text, &amount); err != nil {
			http.Error(w, "say a number", http.StatusUnprocessableEntity)
			return
		}
		episode.step++
		episode.total += amount
		episode.answer = map[string]any{
			"observation": map[string]any{"text": fmt.Sprint(episode.total)},
			"done":        episode.total >= 10, "reward": episode.total / 10,
		}
	default:
		http.Error(w, "another step", http.StatusConflict)
		return
	}
	_ = json.NewEncoder(w).Encode(episode.answer)
}

// newRegistry makes a registry with a runner and checks at the end that nothing
// is left of either.
func newRegistry(t *testing.T, config Config) *Registry {
	t.Helper()
	root := t.TempDir()
	if err := os.Chmod(filepath.Dir(root), 0o755); err != nil {
		t.Fatal(err)
	}
	runner, err := command.NewRunner(t.Context(), command.Config{Root: root, StopGrace: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	config.Commands = runner
	config.FirstRetryDelay = time.Millisecond
	r, err := NewRegistry(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for range 2 {
			if err := r.Close(context.Background()); err != nil {
				t.Errorf("closing: %v", err)
			}
		}
		if r.Live() != 0 {
			t.Errorf("%d environments are left", r.Live())
		}
		nothingLeft(t, root)
		if err := runner.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// nothingLeft looks for processes that run below root and for directories of
// sessions.
func nothingLeft(t *testing.T, root string) {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/cwd")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if place, err := os.Readlink(link); err == nil && strings.HasPrefix(place, root) {
			t.Errorf("%s is in %s", filepath.Dir(link), place)
		}
	}
	left, err := filepath.Glob(filepath.Join(root, "owner-*", "*", "work"))
	if err != nil || len(left) > 0 {
		t.Errorf("directories %v are left, %v", left, err)
	}
}

func open(t *testing.T, r *Registry, e spec.Environment) Environment {
	t.Helper()
	environment, err := r.Open("session-1", e)
	if err != nil {
		t.Fatal(err)
	}
	return environment
}

func reset(t *testing.T, e Environment) Observation {
	t.Helper()
	observation, err := e.Reset(t.Context(), ResetRequest{Seed: 7, Member: 2})
	if err != nil {
		t.Fatal(err)
	}
	return observation
}

func step(t *testing.T, e Environment, action Action) Observation {
	t.Helper()
	observation, err := e.Step(t.Context(), action)
	if err != nil {
		t.Fatal(err)
	}
	return observation
}

func say(step int, text string) Action { return Action{Step: step, Text: text} }

func ask(step int, name, arguments string) Action {
	return Action{Step: step, Calls: []toolcall.Call{{ID: fmt.Sprintf("call_%d", step), Name: name, Arguments: json.RawMessage(arguments)}}}
}

func wantKind(t *testing.T, err error, kind failure.Kind, says string) {
	t.Helper()
	if got, ok := failure.KindOf(err); !ok || got != kind || !strings.Contains(err.Error(), says) {
		t.Errorf("got %v, want %v with %q", err, kind, says)
	}
}

// process starts the test binary in a role and returns its first line.
func process(t *testing.T, role string) (*exec.Cmd, *bufio.Reader, string) {
	t.Helper()
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Stderr = os.Stderr
	output, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed, which is what was wanted
	})
	// One that falls silent is killed, which ends every wait for its word.
	silent := time.AfterFunc(2*time.Minute, func() { _ = cmd.Process.Kill() })
	t.Cleanup(func() { silent.Stop() })
	lines := bufio.NewReader(output)
	line, err := lines.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return cmd, lines, strings.TrimSpace(line)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
