package cli

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"holdfast/api/client"
)

// The tests in this package run the real binary with a real Postgres and a real
// Temporal, and talk to it over HTTP.

// built is the holdfast binary of this test run.
var built = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "holdfast-e2e-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "holdfast")
	out, err := exec.Command("go", "build", "-o", path, "holdfast/orchestrator/cmd/holdfast").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("building holdfast: %w\n%s", err, out)
	}
	return path, nil
})

func TestMain(m *testing.M) {
	if os.Getenv("HOLDFAST_TEMPORAL_BIN") == "" {
		local, err := filepath.Abs(filepath.Join("..", "..", "bin", "holdfast-temporal"))
		if err == nil {
			os.Setenv("HOLDFAST_TEMPORAL_BIN", local)
		}
	}
	code := m.Run()
	if path, err := built(); err == nil {
		os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(code)
}

// openDir is a temporary directory that every account may enter, since Postgres
// runs under an account of its own when the tests run as root.
func openDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for d := dir; strings.HasPrefix(d, os.TempDir()) && d != os.TempDir(); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// process is a running holdfast with what it has printed.
type process struct {
	cmd    *exec.Cmd
	client *client.Client
	exited chan error
	ended  atomic.Bool
	mu     sync.Mutex
	output bytes.Buffer
}

// startHoldfast runs the binary and waits until it prints its API address.
func startHoldfast(t *testing.T, args ...string) *process {
	t.Helper()
	path, err := built()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: exec.Command(path, args...), exited: make(chan error, 1)}
	p.cmd.Stderr = &lockedWriter{p: p}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.killTree(t) })
	address := make(chan string, 1)
	go func() {
		lines := bufio.NewScanner(stdout)
		for lines.Scan() {
			p.write(append(lines.Bytes(), '\n'))
			if rest, ok := strings.CutPrefix(lines.Text(), "API: "); ok {
				select {
				case address <- strings.Fields(rest)[0]:
				default: // it has been told before
				}
			}
		}
		err := p.cmd.Wait()
		p.ended.Store(true)
		p.exited <- err
		close(p.exited)
	}()
	select {
	case url := <-address:
		if p.client, err = client.New(client.Config{BaseURL: url}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.client.Close)
	case err := <-p.exited:
		t.Fatalf("holdfast %s ended before it served: %v\n%s", strings.Join(args, " "), err, p.text())
	case <-time.After(2 * time.Minute):
		t.Fatalf("holdfast %s did not serve within two minutes\n%s", strings.Join(args, " "), p.text())
	}
	return p
}

func (p *process) write(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.output.Write(b)
}

func (p *process) text() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.output.String()
}

// lockedWriter collects what a process writes to its standard error.
type lockedWriter struct{ p *process }

func (w *lockedWriter) Write(b []byte) (int, error) {
	w.p.write(b)
	return len(b), nil
}

// patience bounds waits for what comes soon where all is well, on a busy machine too.
const patience = time.Minute

// killTree sends SIGKILL to the process and all its descendants at once, and
// waits until they are gone. The number of one that has ended may be another's by now.
func (p *process) killTree(t *testing.T) {
	t.Helper()
	if p.ended.Load() {
		return
	}
	tree := descendants(t, p.cmd.Process.Pid)
	for _, pid := range tree {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	select {
	case <-p.exited:
	case <-time.After(patience):
		t.Errorf("%s after processes %v were killed another still holds their output", patience, tree)
	}
	waitGone(t, tree)
}

// waitGone waits until none of the processes exists.
func waitGone(t *testing.T, pids []int) {
	t.Helper()
	eventually(t, patience, fmt.Sprintf("processes %v end", pids), func() bool {
		for _, pid := range pids {
			if alive(pid) {
				return false
			}
		}
		return true
	})
}

// alive tells whether a process exists and is no zombie.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	after := stat[bytes.LastIndexByte(stat, ')')+1:]
	return !bytes.HasPrefix(bytes.TrimSpace(after), []byte("Z"))
}

// descendants lists a process and everything below it.
func descendants(t *testing.T, root int) []int {
	t.Helper()
	children := map[int][]int{}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended meanwhile
		}
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		parent, err := strconv.Atoi(fields[1])
		if err != nil {
			t.Fatal(err)
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			t.Fatal(err)
		}
		children[parent] = append(children[parent], pid)
	}
	tree := []int{root}
	for i := 0; i < len(tree); i++ {
		tree = append(tree, children[tree[i]]...)
	}
	return tree
}

// eventually waits for something that no signal of the system under test tells.
func eventually(t *testing.T, limit time.Duration, what string, check func() bool) {
	t.Helper()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for !check() {
		select {
		case <-ticker.C:
		case <-deadline.C:
			t.Fatalf("after %s still waiting for: %s", limit, what)
		}
	}
}

// within is a context that ends with the test or after the limit.
func within(t *testing.T, limit time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(context.Background(), limit, errors.New("the test's time is over"))
	t.Cleanup(cancel)
	return ctx
}
