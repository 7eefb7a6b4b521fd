package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
)

// roleVariable makes this test binary one of the servers that the tests of
// environments need as real processes.
const roleVariable = "HOLDFAST_TEST_ROLE"

// The roles are taken before the tests' own start.
func init() {
	role, ok := map[string]func() error{
		"environment": func() error { return serveHere(new(doors).handler()) },
		"mcp":         func() error { return toolServer().Run(context.Background(), &mcp.StdioTransport{}) },
		"mcp-http":    serveTools,
	}[os.Getenv(roleVariable)]
	if !ok {
		return
	}
	if err := role(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// serveHere serves on a free port, whose address it prints.
func serveHere(handler http.Handler) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	var connections sync.Map
	mux := http.NewServeMux()
	mux.Handle("/", handler)
	mux.HandleFunc("GET /connections", func(w http.ResponseWriter, _ *http.Request) {
		n := -1 // the one that asks
		connections.Range(func(any, any) bool { n++; return true })
		fmt.Fprint(w, n)
	})
	server := http.Server{Handler: mux, ConnState: func(c net.Conn, state http.ConnState) {
		if state == http.StateClosed || state == http.StateHijacked {
			connections.Delete(c)
		} else {
			connections.Store(c, true)
		}
	}}
	fmt.Println("http://" + listener.Addr().String())
	return server.Serve(listener)
}

// doors is an environment server as docs/environments.md describes it: a door that
// opens at the second try.
type doors struct {
	mu   sync.Mutex
	open map[string]int
}

func (d *doors) handler() http.Handler {
	mux := http.NewServeMux()
	d.open = map[string]int{}
	// On the unlucky way the door of member 1 is never there.
	read := func(r *http.Request) (id, house string, calls int, err error) {
		var body struct {
			EpisodeID string `json:"episode_id"`
			Member    int    `json:"member"`
			Task      struct {
				House string `json:"house"`
			} `json:"task"`
			Action struct {
				Calls []struct{ ID string } `json:"tool_calls"`
			} `json:"action"`
		}
		err = json.NewDecoder(r.Body).Decode(&body)
		if r.PathValue("way") == "unlucky" && body.Member == 1 {
			err = errors.New("member 1 finds no door")
		}
		return body.EpisodeID, body.Task.House, len(body.Action.Calls), err
	}
	mux.HandleFunc("POST /{way}/reset", func(w http.ResponseWriter, r *http.Request) {
		id, house, _, err := read(r)
		if err != nil || r.PathValue("way") == "refuse" {
			http.Error(w, "no such door", http.StatusUnprocessableEntity)
			return
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		d.open[id] = 0
		fmt.Fprintf(w, `{"observation":"You are at the door of the %s house.","tools":[{"name":"push","parameters":{"type":"object"}}]}`, house)
	})
	mux.HandleFunc("POST /{way}/step", func(w http.ResponseWriter, r *http.Request) {
		id, _, calls, err := read(r)
		d.mu.Lock()
		d.open[id]++
		tries := d.open[id]
		d.mu.Unlock()
		switch way := r.PathValue("way"); {
		case err != nil:
			http.Error(w, err.Error(), http.StatusBadRequest)
		case way == "hang":
			<-r.Context().Done()
		case way == "die":
			os.Exit(3)
		case way == "flood":
			_, _ = io.WriteString(w, `{"observation":"`+strings.Repeat("x", 5<<20)+`"}`)
		case calls == 0:
			fmt.Fprint(w, `{"observation":"Nothing happens.","reward":0,"done":true}`)
		case tries == 1:
			fmt.Fprint(w, `{"observation":{"results":[{"call_id":"call_0_0","name":"push","content":"It is stuck."}]},"reward":0.25}`)
		default:
			fmt.Fprint(w, `{"observation":"It is open.","reward":1,"done":true}`)
		}
	})
	mux.HandleFunc("POST /{way}/close", func(_ http.ResponseWriter, r *http.Request) {
		if id, _, _, err := read(r); err == nil {
			d.mu.Lock()
			defer d.mu.Unlock()
			delete(d.open, id)
		}
	})
	mux.HandleFunc("GET /open", func(w http.ResponseWriter, _ *http.Request) {
		d.mu.Lock()
		defer d.mu.Unlock()
		fmt.Fprint(w, len(d.open))
	})
	return mux
}

// toolServer offers one tool for each way in which a tool can behave.
func toolServer() *mcp.Server {
	server := mcp.NewServer(&mcp.Implementation{Name: "tools", Version: "1"}, nil)
	type numbers struct {
		A int `json:"a"`
		B int `json:"b"`
	}
	mcp.AddTool(server, &mcp.Tool{Name: "add", Description: "Adds."}, func(_ context.Context, _ *mcp.CallToolRequest, n numbers) (*mcp.CallToolResult, any, error) {
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: fmt.Sprint("the sum is ", n.A+n.B)}}}, nil, nil
	})
	plain := func(name string, do func(ctx context.Context) error) {
		mcp.AddTool(server, &mcp.Tool{Name: name}, func(ctx context.Context, _ *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
			return nil, nil, do(ctx)
		})
	}
	plain("hang", func(context.Context) error { select {} })
	plain("die", func(context.Context) error {
		fmt.Fprintln(os.Stderr, "out of luck")
		os.Exit(3)
		return nil
	})
	plain("flood", func(context.Context) error {
		if _, err := io.WriteString(os.Stdout, `{"x":"`); err != nil {
			return err
		}
		chunk := []byte(strings.Repeat("x", 64<<10))
		for {
			if _, err := os.Stdout.Write(chunk); err != nil {
				return err
			}
		}
	})
	return server
}

// serveTools serves the tools over streamable HTTP.
func serveTools() error {
	server := toolServer()
	mux := http.NewServeMux()
	mux.Handle("/mcp", mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return server }, nil))
	mux.HandleFunc("GET /open", func(w http.ResponseWriter, _ *http.Request) {
		n := 0
		for range server.Sessions() {
			n++
		}
		fmt.Fprint(w, n)
	})
	return serveHere(mux)
}

// testBinary is a copy of this test binary that every account may run, since programs
// run as another one than root.
func testBinary(t *testing.T) string {
	t.Helper()
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(own)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(openDir(t), "servers")
	if err := os.WriteFile(path, content, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// serverProcess is a server of a role in a process of its own.
type serverProcess struct {
	cmd *exec.Cmd
	url string
}

func startServer(t *testing.T, binary, role string) *serverProcess {
	t.Helper()
	p := &serverProcess{cmd: exec.Command(binary)}
	p.cmd.Env = append(os.Environ(), roleVariable+"="+role)
	p.cmd.Stderr = os.Stderr
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	})
	// One that says nothing is killed, which ends the wait for its word.
	defer time.AfterFunc(patience, func() { _ = p.cmd.Process.Kill() }).Stop()
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	p.url = strings.TrimSpace(line)
	return p
}

// ask reads a number that the server tells of itself.
func (p *serverProcess) ask(t *testing.T, path string) (n int) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}
	answer, err := client.Get(p.url + path)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if _, err := fmt.Fscan(answer.Body, &n); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	return n
}
