package devserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// parentVariable makes the test binary act as the process that starts servers
// in the named data directory and is then killed by a test.
const parentVariable = "HOLDFAST_DEVSERVER_TEST_PARENT"

// parentReport is what such a parent prints once its servers run.
type parentReport struct {
	PostgresPid     int
	TemporalPid     int
	DatabaseURL     string
	TemporalAddress string
}

func TestMain(m *testing.M) {
	if dataDir := os.Getenv(parentVariable); dataDir != "" {
		actAsParent(dataDir)
	}
	os.Exit(m.Run())
}

func actAsParent(dataDir string) {
	servers, err := Start(context.Background(), Config{DataDir: dataDir})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	report := parentReport{servers.postgres.Pid(), servers.temporal.child.pid, servers.DatabaseURL(), servers.TemporalAddress()}
	if err := json.NewEncoder(os.Stdout).Encode(report); err != nil {
		os.Exit(1)
	}
	select {} // until killed
}

// temporalForTests is the real binary: the one named in the environment, or the
// one that `make build` left in bin/.
func temporalForTests(t testing.TB) string {
	t.Helper()
	binary := os.Getenv(TemporalBinVariable)
	if binary == "" {
		binary = filepath.Join("..", "..", "bin", "holdfast-temporal")
	}
	absolute, err := filepath.Abs(binary)
	if err != nil {
		t.Fatal(err)
	}
	if !isExecutable(absolute) {
		t.Fatalf("no Temporal server at %s: run `make build`, or set %s", absolute, TemporalBinVariable)
	}
	return absolute
}

// testDir is a data directory that the account of Postgres can enter: the
// directories of the testing package are closed to others.
func testDir(t testing.TB) string {
	t.Helper()
	return filepath.Join(openTempDir(t), "data")
}

func openTempDir(t testing.TB) string {
	t.Helper()
	directory := t.TempDir()
	if err := os.Chmod(filepath.Dir(directory), 0o755); err != nil {
		t.Fatal(err)
	}
	return directory
}

func startPostgres(t testing.TB, config Config) *Postgres {
	t.Helper()
	postgres, err := StartPostgres(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stopPostgres(t, postgres) })
	return postgres
}

func stopPostgres(t testing.TB, postgres *Postgres) {
	t.Helper()
	if err := postgres.Stop(context.Background()); err != nil {
		t.Error(err)
	}
}

// waitUntilGone waits for a process that is not our child to end. A zombie that
// nobody has collected yet has ended.
func waitUntilGone(t testing.TB, pid int) {
	t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for processRuns(pid) {
		select {
		case <-deadline:
			t.Fatalf("process %d still runs after %s", pid, patience)
		case <-tick.C:
		}
	}
}

func processRuns(pid int) bool {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, afterName, _ := strings.Cut(string(status), ") ")
	return !strings.HasPrefix(afterName, "Z")
}

// kill kills a process. One that ended just before, with others that were killed, has
// what was wanted.
func kill(t testing.TB, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		t.Fatal(err)
	}
}

// patience bounds waits for what comes soon where all is well, on a busy machine too.
const patience = time.Minute

// receive waits for what a channel yields, or for its end.
func receive[T any](t testing.TB, what string, from <-chan T) (value T, open bool) {
	t.Helper()
	select {
	case value, open = <-from:
	case <-time.After(patience):
		t.Fatalf("waited in vain for %s", what)
	}
	return value, open
}
