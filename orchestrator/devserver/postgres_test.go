package devserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
)

func exec1(t testing.TB, url, statement string, args ...any) {
	t.Helper()
	connection, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close(context.Background())
	if _, err := connection.Exec(t.Context(), statement, args...); err != nil {
		t.Fatal(err)
	}
}

func query1[T any](t testing.TB, url, query string, args ...any) T {
	t.Helper()
	connection, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close(context.Background())
	var value T
	if err := connection.QueryRow(t.Context(), query, args...).Scan(&value); err != nil {
		t.Fatal(err)
	}
	return value
}

func TestPostgresSecondStartFindsTheData(t *testing.T) {
	config := Config{DataDir: testDir(t)}
	first := startPostgres(t, config)
	exec1(t, first.DatabaseURL(), "CREATE TABLE kept (value int)")
	exec1(t, first.DatabaseURL(), "INSERT INTO kept VALUES (17)")
	stopPostgres(t, first)
	if !first.child.endOK {
		t.Errorf("an idle Postgres that was asked to stop ended with %s", first.child.endState)
	}

	var steps []string
	config.Progress = func(step string) { steps = append(steps, step) }
	second := startPostgres(t, config)
	if got := query1[int](t, second.DatabaseURL(), "SELECT value FROM kept"); got != 17 {
		t.Errorf("the second start finds %d, want 17", got)
	}
	for _, step := range steps {
		if strings.Contains(step, "creating") {
			t.Errorf("the second start creates a cluster again: %q", step)
		}
	}
}

func TestPostgresIsPrivateAndDurable(t *testing.T) {
	postgres := startPostgres(t, Config{DataDir: testDir(t)})
	for setting, want := range map[string]string{
		"listen_addresses":   "",
		"fsync":              "on",
		"synchronous_commit": "on",
		"full_page_writes":   "on",
		"server_encoding":    "UTF8",
	} {
		if got := query1[string](t, postgres.DatabaseURL(), "SELECT current_setting($1)", setting); got != want {
			t.Errorf("%s is %q, want %q", setting, got, want)
		}
	}
	if info, err := os.Stat(postgres.socketDir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the socket directory is not closed to others: %v, %v", info.Mode(), err)
	}
	if uid := ownerOf(t, postgres.dataDir); uid == 0 {
		t.Error("the data belongs to root, as whom Postgres does not run")
	}
}

func ownerOf(t *testing.T, path string) int {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return int(info.Sys().(*syscall.Stat_t).Uid)
}

func TestPostgresSecondOwnerIsRefused(t *testing.T) {
	config := Config{DataDir: testDir(t)}
	first := startPostgres(t, config)
	_, err := StartPostgres(t.Context(), config)
	if err == nil {
		t.Fatal("a second Postgres starts on the same data directory")
	}
	for _, part := range []string{config.DataDir, "in use", fmt.Sprintf("pid %d", os.Getpid())} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error does not say %q: %v", part, err)
		}
	}
	if got := query1[int](t, first.DatabaseURL(), "SELECT 1"); got != 1 {
		t.Errorf("the first Postgres is disturbed: %d", got)
	}
	stopPostgres(t, first)
	startPostgres(t, config) // free again
}

// A postmaster that is killed with SIGKILL leaves a pid file, a socket and, for
// a moment, processes that still hold the shared memory.
func TestPostgresStartsAfterItWasKilled(t *testing.T) {
	config := Config{DataDir: testDir(t)}
	first := startPostgres(t, config)
	exec1(t, first.DatabaseURL(), "CREATE TABLE kept AS SELECT generate_series(1, 1000) AS value")
	kill(t, first.Pid())
	if err, _ := receive(t, "the report of the death", first.Done()); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("the death is reported as %v", err)
	}
	stopPostgres(t, first)
	// A pid file that names a living process which is no Postgres, as after a
	// restart of a container: this test itself.
	pidFile := filepath.Join(first.dataDir, "postmaster.pid")
	text, err := os.ReadFile(pidFile)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "\n")
	if err := os.WriteFile(pidFile, []byte(fmt.Sprintf("%d\n%s", os.Getppid(), rest)), 0o600); err != nil {
		t.Fatal(err)
	}

	second := startPostgres(t, config)
	if got := query1[int](t, second.DatabaseURL(), "SELECT count(*) FROM kept"); got != 1000 {
		t.Errorf("%d rows survive, want 1000", got)
	}
}

// An unexpected orphan: a postmaster that serves on although its parent died.
func TestPostgresEndsAnOrphanOnItsData(t *testing.T) {
	config := Config{DataDir: testDir(t)}
	orphan := startPostgres(t, config)
	orphan.child.stopping.Store(true)
	if err := orphan.lock.Close(); err != nil {
		t.Fatal(err)
	}
	orphan.lock = nil
	var steps []string
	config.Progress = func(step string) { steps = append(steps, step) }
	next := startPostgres(t, config)
	waitUntilGone(t, orphan.Pid())
	if len(steps) == 0 || !strings.Contains(steps[0], "earlier run") {
		t.Errorf("the wait is not told: %q", steps)
	}
	if got := query1[int](t, next.DatabaseURL(), "SELECT 1"); got != 1 {
		t.Errorf("the next Postgres answers %d", got)
	}
}

func TestPostgresOfAnotherMajorVersion(t *testing.T) {
	config := Config{DataDir: testDir(t)}
	first := startPostgres(t, config)
	found, err := majorOfData(first.dataDir)
	if err != nil {
		t.Fatal(err)
	}
	stopPostgres(t, first)
	versionFile := filepath.Join(first.dataDir, "PG_VERSION")
	if err := os.WriteFile(versionFile, []byte("9\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = StartPostgres(t.Context(), config)
	if err == nil {
		t.Fatal("data of another major version is served")
	}
	for _, part := range []string{"PostgreSQL 9", fmt.Sprintf("PostgreSQL %d", found), first.dataDir} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error does not name %q: %v", part, err)
		}
	}
}

func TestPostgresMissingNamesTheOneCommand(t *testing.T) {
	_, err := StartPostgres(t.Context(), Config{DataDir: testDir(t), PostgresBin: filepath.Join(t.TempDir(), "nowhere")})
	if err == nil || !strings.Contains(err.Error(), installHint) {
		t.Errorf("the error does not name %s: %v", installHint, err)
	}
}

// Socket paths are limited to 107 bytes, and their characters mean something to
// clients and servers; data directories are free.
func TestPostgresBelowUnusualPaths(t *testing.T) {
	for name, test := range map[string]struct {
		path   string
		inside bool // the socket is in the data directory
	}{
		"long":  {strings.Repeat("long-directory-name/", 6), false},
		"comma": {"a, b + 100%", false},
		"space": {"my data", true},
	} {
		t.Run(name, func(t *testing.T) {
			dataDir := filepath.Join(openTempDir(t), test.path)
			postgres := startPostgres(t, Config{DataDir: dataDir})
			if got := query1[int](t, postgres.DatabaseURL(), "SELECT 1"); got != 1 {
				t.Errorf("it answers %d", got)
			}
			if inside := strings.HasPrefix(postgres.socketDir, dataDir); inside != test.inside {
				t.Errorf("the socket is in %s", postgres.socketDir)
			} else if !inside {
				t.Cleanup(func() { os.RemoveAll(postgres.socketDir) })
			}
		})
	}
}

// As root the server runs as another account, which may be unable to enter the
// data directory. As an ordinary user a closed parent is no obstacle, and the
// data stays inside.
func TestPostgresBelowAClosedDirectory(t *testing.T) {
	closed := filepath.Join(openTempDir(t), "closed")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	config := Config{DataDir: filepath.Join(closed, "data"), SharedDir: filepath.Join(openTempDir(t), "shared")}
	var steps []string
	config.Progress = func(step string) { steps = append(steps, step) }
	first := startPostgres(t, config)
	exec1(t, first.DatabaseURL(), "CREATE TABLE kept AS SELECT 17 AS value")
	stopPostgres(t, first)
	if os.Geteuid() == 0 {
		if !strings.HasPrefix(first.dataDir, config.SharedDir) {
			t.Errorf("the data is in %s, want below %s", first.dataDir, config.SharedDir)
		}
		if !strings.Contains(strings.Join(steps, "\n"), first.dataDir) {
			t.Errorf("it is not told where the data is: %q", steps)
		}
	} else if !strings.HasPrefix(first.dataDir, config.DataDir) {
		t.Errorf("the data is in %s, want below %s", first.dataDir, config.DataDir)
	}
	second := startPostgres(t, config)
	if got := query1[int](t, second.DatabaseURL(), "SELECT value FROM kept"); got != 17 {
		t.Errorf("the second start finds %d, want 17", got)
	}
	stopPostgres(t, second)

	// Removing the data directory means starting afresh, elsewhere or not.
	if err := os.RemoveAll(config.DataDir); err != nil {
		t.Fatal(err)
	}
	third := startPostgres(t, config)
	if query1[bool](t, third.DatabaseURL(), "SELECT to_regclass('kept') IS NOT NULL") {
		t.Error("the data outlives the removal of the data directory")
	}
}

func TestPostgresStartThatIsCancelledLeavesNothing(t *testing.T) {
	config := Config{DataDir: testDir(t)}
	ctx, cancel := context.WithCancel(t.Context())
	config.Progress = func(step string) {
		if strings.HasPrefix(step, "creating a database cluster") {
			cancel()
		}
	}
	if _, err := StartPostgres(ctx, config); !errors.Is(err, context.Canceled) {
		t.Fatalf("the start returns %v", err)
	}
	if pids := postgresIn(filepath.Join(config.DataDir, "postgres.unfinished")); len(pids) > 0 {
		t.Errorf("processes %v are left", pids)
	}
	config.Progress = nil
	startPostgres(t, config)
}
