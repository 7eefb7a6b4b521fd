package devserver

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/client"
	sdklog "go.temporal.io/sdk/log"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"
)

const testQueue = "devserver-test"

// waitForSignal ends with the value that its signal carries.
func waitForSignal(ctx workflow.Context) (string, error) {
	var value string
	workflow.GetSignalChannel(ctx, "go").Receive(ctx, &value)
	return value, nil
}

func dialTemporal(t testing.TB, address string) client.Client {
	t.Helper()
	quiet := sdklog.NewStructuredLogger(slog.New(slog.DiscardHandler))
	temporal, err := client.Dial(client.Options{
		HostPort:  address,
		Namespace: defaultNamespace,
		Logger:    quiet,
		// Over loopback compressing costs more than it saves.
		ConnectionOptions: client.ConnectionOptions{GrpcCompression: &client.GrpcCompressionNone{}, GetSystemInfoTimeout: patience},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(temporal.Close)
	return temporal
}

func startWorker(t testing.TB, temporal client.Client) {
	t.Helper()
	w := worker.New(temporal, testQueue, worker.Options{})
	w.RegisterWorkflow(waitForSignal)
	if err := w.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Stop)
}

func startWaiting(t testing.TB, temporal client.Client, id string) {
	t.Helper()
	if _, err := temporal.ExecuteWorkflow(t.Context(), client.StartWorkflowOptions{ID: id, TaskQueue: testQueue}, waitForSignal); err != nil {
		t.Fatal(err)
	}
}

func finishWaiting(t testing.TB, temporal client.Client, id, value string) {
	t.Helper()
	if err := temporal.SignalWorkflow(t.Context(), id, "", "go", value); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	var got string
	if err := temporal.GetWorkflow(ctx, id, "").Get(ctx, &got); err != nil {
		t.Fatal(err)
	}
	if got != value {
		t.Errorf("workflow %s ends with %q, want %q", id, got, value)
	}
}

func startServers(t testing.TB, config Config) *Servers {
	t.Helper()
	config.TemporalBin = temporalForTests(t)
	servers, err := Start(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := servers.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return servers
}

func TestServersContinueWorkflowsAfterAStop(t *testing.T) {
	config := Config{DataDir: testDir(t)}
	first := startServers(t, config)
	temporal := dialTemporal(t, first.TemporalAddress())
	startWaiting(t, temporal, "held")
	temporal.Close()

	began := time.Now()
	if err := first.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("stopping took %s, promised are 10 s", took)
	}
	if err, open := receive(t, "the end of the servers", first.Done()); open || err != nil {
		t.Errorf("a wanted end is reported as unexpected: %v", err)
	}

	second := startServers(t, config)
	temporal = dialTemporal(t, second.TemporalAddress())
	startWorker(t, temporal)
	finishWaiting(t, temporal, "held", "after the restart")
}

// The promise that matters most: whoever starts the servers may be killed at
// any time, nothing stays behind, and the next start finds everything.
func TestServersEndWithTheirParent(t *testing.T) {
	dataDir := testDir(t)
	parent, report := startParent(t, dataDir)
	temporal := dialTemporal(t, report.TemporalAddress)
	startWaiting(t, temporal, "held")
	temporal.Close()
	exec1(t, report.DatabaseURL, "CREATE TABLE kept AS SELECT 17 AS value")

	kill(t, parent.Process.Pid)
	_ = parent.Wait() // says that it was killed
	waitUntilGone(t, report.TemporalPid)
	waitUntilGone(t, report.PostgresPid)
	if left := postgresIn(filepath.Join(dataDir, "postgres")); len(left) > 0 {
		t.Errorf("processes %v of Postgres are left", left)
	}

	servers := startServers(t, Config{DataDir: dataDir})
	if got := query1[int](t, servers.DatabaseURL(), "SELECT value FROM kept"); got != 17 {
		t.Errorf("the next start finds %d, want 17", got)
	}
	temporal = dialTemporal(t, servers.TemporalAddress())
	startWorker(t, temporal)
	finishWaiting(t, temporal, "held", "after the kill")
}

// The next start may come before the servers of the killed parent have ended.
func TestServersStartAtOnceAfterTheWholeTreeWasKilled(t *testing.T) {
	dataDir := testDir(t)
	parent, report := startParent(t, dataDir)
	temporal := dialTemporal(t, report.TemporalAddress)
	startWaiting(t, temporal, "held")
	temporal.Close()
	for _, pid := range []int{parent.Process.Pid, report.TemporalPid, report.PostgresPid} {
		kill(t, pid)
	}
	_ = parent.Wait()

	servers := startServers(t, Config{DataDir: dataDir})
	temporal = dialTemporal(t, servers.TemporalAddress())
	startWorker(t, temporal)
	finishWaiting(t, temporal, "held", "after the kill")
}

// Temporal's sessions commit without waiting for the disk; its frontend waits
// before it replies. With the log writer stopped, nothing but that wait brings
// commits to where they survive the death of every process.
func TestServersKeepEveryReply(t *testing.T) {
	config := Config{DataDir: testDir(t)}
	first := startServers(t, config)
	stopLogWriter(t, first)
	temporal := dialTemporal(t, first.TemporalAddress())
	const count = 10
	for i := range count {
		id := fmt.Sprint("signalled-", i)
		startWaiting(t, temporal, id)
		if err := temporal.SignalWorkflow(t.Context(), id, "", "go", id); err != nil {
			t.Fatal(err)
		}
	}
	for _, pid := range append(postgresIn(first.PostgresDataDir()), first.temporal.child.pid) {
		kill(t, pid)
	}
	temporal.Close()
	if err := first.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}

	second := startServers(t, config)
	temporal = dialTemporal(t, second.TemporalAddress())
	startWorker(t, temporal)
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	for i := range count {
		id := fmt.Sprint("signalled-", i)
		var got string
		if err := temporal.GetWorkflow(ctx, id, "").Get(ctx, &got); err != nil {
			t.Fatalf("workflow %s does not end with the signal that was acknowledged: %v", id, err)
		}
	}
}

// stopLogWriter halts the process that writes out what was committed
// asynchronously, as if it were not scheduled for as long as the test needs.
func stopLogWriter(t *testing.T, servers *Servers) {
	t.Helper()
	for _, pid := range postgresIn(servers.PostgresDataDir()) {
		title, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil && strings.Contains(string(title), "walwriter") {
			if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			// Halted it would not even notice that Postgres has ended.
			t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
			return
		}
	}
	t.Fatal("Postgres has no log writer")
}

func TestTemporalDoesNotOutliveItsPostgres(t *testing.T) {
	servers := startServers(t, Config{DataDir: testDir(t)})
	kill(t, servers.postgres.Pid())
	if err, _ := receive(t, "the report of Postgres's death", servers.Done()); err == nil || !strings.Contains(err.Error(), "Postgres") {
		t.Errorf("the death is reported as %v", err)
	}
	receive(t, "the end of Temporal", servers.temporal.child.ended)
}

// startParent runs this test binary as a process that starts the servers.
func startParent(t *testing.T, dataDir string) (*exec.Cmd, parentReport) {
	t.Helper()
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), parentVariable+"="+dataDir, TemporalBinVariable+"="+temporalForTests(t))
	var complaints strings.Builder
	parent.Stderr = &complaints
	// Should this test end early, the parent must not outlive it.
	parent.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	output, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = parent.Process.Kill() })
	// One that says nothing is killed, which ends the wait for its word.
	defer time.AfterFunc(3*time.Minute, func() { _ = parent.Process.Kill() }).Stop()
	line, err := bufio.NewReader(output).ReadBytes('\n')
	if err != nil {
		_ = parent.Wait()
		t.Fatalf("the parent reports nothing: %v: %s", err, complaints.String())
	}
	var report parentReport
	if err := json.Unmarshal(line, &report); err != nil {
		t.Fatal(err)
	}
	return parent, report
}

func TestServersReportADeath(t *testing.T) {
	servers := startServers(t, Config{DataDir: testDir(t)})
	kill(t, servers.temporal.child.pid)
	if err, _ := receive(t, "the report of Temporal's death", servers.Done()); err == nil || !strings.Contains(err.Error(), "Temporal") || !strings.Contains(err.Error(), "killed") {
		t.Errorf("the death is reported as %v", err)
	}
}

// Ports that other programs like to have must not matter, nor spaces in paths.
func TestServersWithTakenPortsAndSpaces(t *testing.T) {
	dataDir := filepath.Join(openTempDir(t), "a directory with spaces")
	for _, port := range []string{"5432", "7233", "8233"} {
		listener, err := net.Listen("tcp", "127.0.0.1:"+port)
		if err != nil {
			continue // taken by somebody else: just as well
		}
		defer listener.Close()
	}
	servers := startServers(t, Config{DataDir: dataDir})
	temporal := dialTemporal(t, servers.TemporalAddress())
	if _, err := temporal.DescribeTaskQueue(t.Context(), testQueue, enums.TASK_QUEUE_TYPE_WORKFLOW); err != nil {
		t.Error(err)
	}
	host, _, err := net.SplitHostPort(servers.TemporalAddress())
	if err != nil || !net.ParseIP(host).IsLoopback() {
		t.Errorf("Temporal serves at %s, which is not loopback", servers.TemporalAddress())
	}
}

func TestServersWithoutATemporalBinary(t *testing.T) {
	t.Setenv(TemporalBinVariable, "")
	t.Setenv("PATH", t.TempDir())
	_, err := Start(t.Context(), Config{DataDir: testDir(t)})
	if err == nil || !strings.Contains(err.Error(), "make build") {
		t.Errorf("the error does not name `make build`: %v", err)
	}
}

func TestServersTellWhyTemporalDied(t *testing.T) {
	script := filepath.Join(openTempDir(t), "holdfast-temporal")
	if err := os.WriteFile(script, []byte("#!/bin/sh\necho no luck today\nexit 7\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, err := Start(t.Context(), Config{DataDir: testDir(t), TemporalBin: script})
	if err == nil || !strings.Contains(err.Error(), "no luck today") || !strings.Contains(err.Error(), "exit status 7") {
		t.Errorf("the error does not tell the end of the log: %v", err)
	}
}
