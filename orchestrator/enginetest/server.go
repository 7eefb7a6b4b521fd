// Package enginetest starts a real inference server on loopback for tests: Ollama's,
// with a tiny random-weight model that is written on the spot. The tests that use it
// are built with the tag realengine only, since the server has to be built first:
// see make test-engine. It does not build the server, and it downloads nothing.
package enginetest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"holdfast/orchestrator/engine/tinygguf"
)

// BinaryVariable names the environment variable that points to the server's binary.
// It does not begin with HOLDFAST_, since the service reads all of those.
const BinaryVariable = "REAL_ENGINE_BIN"

// The server's size: Parallel generations at a time, ContextTokens each.
const (
	Parallel      = 4
	ContextTokens = 16_384
)

// Names of models. Endless never ends an output by itself.
const (
	Ending  = "ending:latest"
	Endless = "endless:latest"
)

// Server is a running server; its models outlive a restart.
type Server struct {
	// URL is its address, the same after a restart.
	URL string

	home    string
	address string
	cmd     *exec.Cmd
	gone    chan struct{}
	mu      sync.Mutex
	output  bytes.Buffer
}

// startTimeout is for a machine that is busy with other tests.
const startTimeout = 3 * time.Minute

// Start runs a server with these models until the test ends.
func Start(tb testing.TB, models ...string) *Server {
	tb.Helper()
	s := &Server{address: freeAddress(tb), home: tb.TempDir()}
	s.URL = "http://" + s.address
	s.Restart(tb)
	tb.Cleanup(func() { s.Kill() })
	for _, model := range models {
		s.create(tb, model, tinygguf.Config{Seed: 1, ContextTokens: ContextTokens, Endless: model == Endless})
	}
	return s
}

// freeAddress is one that nobody listens at. Its port is below those that the kernel gives
// to others' connections, so that it stays free, also while the server is down.
func freeAddress(tb testing.TB) string {
	tb.Helper()
	for range 1_000 {
		listener, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", 10_000+rand.IntN(10_000)))
		if err != nil {
			continue
		}
		defer listener.Close()
		return listener.Addr().String()
	}
	tb.Fatal("no port is free")
	return ""
}

// Restart runs the server again after Kill, with the models it had.
func (s *Server) Restart(tb testing.TB) {
	tb.Helper()
	binary := os.Getenv(BinaryVariable)
	if binary == "" {
		tb.Fatalf("%s does not name the server's binary: run make test-engine", BinaryVariable)
	}
	cmd := exec.Command(binary, "serve")
	cmd.Env = append(os.Environ(), "HOME="+s.home, "OLLAMA_MODELS="+filepath.Join(s.home, "models"), "OLLAMA_HOST="+s.address,
		"OLLAMA_NUM_PARALLEL="+strconv.Itoa(Parallel), "OLLAMA_CONTEXT_LENGTH="+strconv.Itoa(ContextTokens), "OLLAMA_KEEP_ALIVE=1h")
	cmd.Stdout, cmd.Stderr = writer{s}, writer{s}
	// The server runs models in processes of its own; one signal reaches them all.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	gone := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(gone)
	}()
	s.cmd, s.gone = cmd, gone
	client := http.Client{Timeout: 15 * time.Second}
	Await(tb, startTimeout, "the server to answer", func() bool {
		select {
		case <-gone:
			tb.Fatalf("the server ended at once:\n%s", s.Output())
		default:
		}
		response, err := client.Get(s.URL + "/api/version")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
}

// Kill ends the server and its model processes at once, as a crash would.
func (s *Server) Kill() {
	_ = syscall.Kill(-s.cmd.Process.Pid, syscall.SIGKILL)
	<-s.gone
}

// create gives a model to the server. One thread is the fastest for a model this
// small, since several would mostly wait for each other; small batches keep the memory
// for a long context small.
func (s *Server) create(tb testing.TB, name string, cfg tinygguf.Config) {
	tb.Helper()
	var model bytes.Buffer
	if err := tinygguf.Write(&model, cfg); err != nil {
		tb.Fatal(err)
	}
	sum := sha256.Sum256(model.Bytes())
	digest := "sha256:" + hex.EncodeToString(sum[:])
	s.post(tb, "/api/blobs/"+digest, &model)
	document, err := json.Marshal(map[string]any{
		"model": name, "files": map[string]string{"tiny.gguf": digest}, "stream": false,
		"parameters": map[string]any{"num_thread": 1, "num_batch": 64},
	})
	if err != nil {
		tb.Fatal(err)
	}
	s.post(tb, "/api/create", bytes.NewReader(document))
}

func (s *Server) post(tb testing.TB, path string, body io.Reader) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), startTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+path, body)
	if err != nil {
		tb.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		tb.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode >= 300 {
		tb.Fatalf("%s: status %d, %v: %s", path, response.StatusCode, err, answer)
	}
}

// CPUTicks is the processor time, in hundredths of a second, that the model processes
// have used: it stands still when the server generates nothing.
func (s *Server) CPUTicks(tb testing.TB) int64 {
	tb.Helper()
	var total int64
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		tb.Fatal(err)
	}
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // It has ended meanwhile.
		}
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		group, pid := fields[2], filepath.Base(filepath.Dir(path))
		if group != strconv.Itoa(s.cmd.Process.Pid) || pid == group {
			continue // Another's, or the server itself, which only waits for its models.
		}
		for _, field := range fields[11:13] {
			ticks, err := strconv.ParseInt(field, 10, 64)
			if err != nil {
				tb.Fatal(err)
			}
			total += ticks
		}
	}
	return total
}

// AwaitIdle waits until the server generates nothing: until its models have used no
// processor time for a third of a second.
func (s *Server) AwaitIdle(tb testing.TB) {
	tb.Helper()
	last, since := s.CPUTicks(tb), time.Now()
	Await(tb, 2*time.Minute, "the server to generate nothing", func() bool {
		if now := s.CPUTicks(tb); now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) > 333*time.Millisecond
	})
}

// Output is what the server has logged.
func (s *Server) Output() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.output.String()
}

type writer struct{ s *Server }

func (w writer) Write(p []byte) (int, error) {
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	return w.s.output.Write(p)
}

// Await looks again and again, for what no signal of the server tells.
func Await(tb testing.TB, limit time.Duration, what string, done func() bool) {
	tb.Helper()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for !done() {
		select {
		case <-ticker.C:
		case <-deadline.C:
			tb.Fatalf("after %s still waiting for %s", limit, what)
		}
	}
}

// ASCII are the ids of a plain prompt for a session whose ids are bytes.
func ASCII(text string) []int32 {
	ids := make([]int32, len(text))
	for i := range len(text) {
		ids[i] = int32(text[i])
	}
	return ids
}

// Speaks tells whether ids could be the tiny model's: lower-case letters, spaces and
// full stops.
func Speaks(ids []int32) error {
	for i, id := range ids {
		if !(id >= 'a' && id <= 'z' || id == ' ' || id == '.') {
			return fmt.Errorf("token %d at position %d is none that the model says", id, i)
		}
	}
	return nil
}
