// Package storetest gives tests a real Postgres: each test a database of its own
// at the latest schema, cloned from a template or emptied after another test.
//
// The server is the one named by HOLDFAST_TEST_DATABASE_URL if set (its role must
// be allowed to create databases). Otherwise one private server per test binary
// is started from the binaries found on the machine, at the first use; it ends
// with the test binary, also when that panics or is killed. There is no fake.
package storetest

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"holdfast/migrations"
	"holdfast/orchestrator/devserver"
	"holdfast/store"
)

// URLVariable names a server to use instead of starting one.
const URLVariable = "HOLDFAST_TEST_DATABASE_URL"

const (
	// Both are of a cold, busy machine: elsewhere they cost nothing.
	startLimit = 5 * time.Minute
	callLimit  = 3 * time.Minute
	dirPrefix  = "holdfast-storetest-"
)

// server is the one of this test binary.
var server = struct {
	sync.Mutex
	adminURL string
	template string
	strategy string
	postgres *devserver.Postgres // nil for a server that others run
	dir      string
	err      error
	created  int
	// free are databases that earlier tests have used, emptied.
	free []string
}{}

// Main runs the tests and then stops the server, if one was started, and removes
// its data. Use it as
//
//	func TestMain(m *testing.M) { os.Exit(storetest.Main(m)) }
//
// A test binary without it leaves its data directory to the next one to remove.
func Main(m *testing.M) int {
	code := m.Run()
	if err := stop(); err != nil {
		fmt.Fprintln(os.Stderr, "storetest:", err)
		return max(code, 1)
	}
	return code
}

// New returns a store on an empty database at the latest schema. Both go with the
// test, which must leave the schema as it is.
func New(t testing.TB) *store.Store {
	t.Helper()
	return Open(t, URL(t))
}

// Open returns a further store on the database of that URL; it is closed with the
// test.
func Open(t testing.TB, databaseURL string) *store.Store {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	s, err := store.Open(ctx, store.Config{URL: databaseURL})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// URL returns the URL of an empty database at the latest schema, which the test
// must leave as it is.
func URL(t testing.TB) string {
	t.Helper()
	return create(t, true)
}

// EmptyURL returns the URL of a fresh database without any schema.
func EmptyURL(t testing.TB) string {
	t.Helper()
	return create(t, false)
}

func create(t testing.TB, migrated bool) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	server.Lock()
	defer server.Unlock()
	if err := startOnce(ctx); err != nil {
		t.Fatal(err)
	}
	if last := len(server.free) - 1; migrated && last >= 0 {
		name := server.free[last]
		server.free = server.free[:last]
		t.Cleanup(func() { giveBack(t, name) })
		return withDatabase(server.adminURL, name)
	}
	name := uniqueName("test")
	statement := "create database " + name
	if migrated {
		statement += " template " + server.template + server.strategy
	}
	if err := admin(ctx, statement); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if migrated {
			giveBack(t, name)
		} else {
			drop(t, name)
		}
	})
	return withDatabase(server.adminURL, name)
}

// giveBack empties a database for the next test, which takes a tenth of the time
// that a new one does. One that has grown, or cannot be emptied, is dropped.
func giveBack(t testing.TB, name string) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	emptied, err := empty(ctx, withDatabase(server.adminURL, name))
	if err != nil || !emptied {
		drop(t, name)
		return
	}
	server.Lock()
	defer server.Unlock()
	server.free = append(server.free, name)
}

func drop(t testing.TB, name string) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	if err := admin(ctx, "drop database "+name+" with (force)"); err != nil {
		t.Error(err)
	}
}

const (
	// maxReusedBytes is a little above the size of an empty database.
	maxReusedBytes = 32 << 20

	othersSQL = `
select count(*) filter (where pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()`

	tablesSQL = `
select string_agg(format('delete from %I', tablename), ';') from pg_tables where schemaname = 'public' and tablename <> 'goose_db_version'`
)

// empty deletes all rows; emptied is false for a database that is better dropped.
// Foreign keys are not followed meanwhile, which the role must be allowed to ask.
func empty(ctx context.Context, databaseURL string) (emptied bool, err error) {
	conn, err := pgx.Connect(ctx, databaseURL)
	if err != nil {
		return false, err
	}
	defer conn.Close(ctx)
	var size int64
	if err := conn.QueryRow(ctx, `select pg_database_size(current_database())`).Scan(&size); err != nil || size > maxReusedBytes {
		return false, err
	}
	var others int
	if err := conn.QueryRow(ctx, othersSQL).Scan(&others); err != nil {
		return false, err
	}
	var deletes string
	if err := conn.QueryRow(ctx, tablesSQL).Scan(&deletes); err != nil {
		return false, err
	}
	_, err = conn.Exec(ctx, "set session_replication_role = replica;"+deletes)
	return err == nil, err
}

// startOnce finds or starts the server and builds the template. A failure is kept:
// starting again for every test would only take longer to say the same.
func startOnce(ctx context.Context) error {
	if server.template != "" || server.err != nil {
		return server.err
	}
	server.err = start(ctx)
	return server.err
}

func start(ctx context.Context) error {
	server.adminURL = os.Getenv(URLVariable)
	if server.adminURL == "" {
		if err := startPostgres(ctx); err != nil {
			return err
		}
	}
	if err := chooseStrategy(ctx); err != nil {
		return err
	}
	template := uniqueName("template")
	if err := admin(ctx, "create database "+template); err != nil {
		return err
	}
	if err := migrations.Up(ctx, withDatabase(server.adminURL, template)); err != nil {
		return err
	}
	server.template = template
	return nil
}

func startPostgres(ctx context.Context) error {
	removeLeftovers()
	dir, err := os.MkdirTemp("", dirPrefix+strconv.Itoa(os.Getpid())+"-")
	if err != nil {
		return fmt.Errorf("making a data directory: %w", err)
	}
	server.dir = dir
	// The account that Postgres runs as when we are root must be able to enter.
	if err := os.Chmod(dir, 0o755); err != nil {
		return fmt.Errorf("opening the data directory: %w", err)
	}
	server.postgres, err = devserver.StartPostgres(ctx, devserver.Config{
		DataDir: dir,
		// Nothing here needs to survive the machine, so nothing waits for the disk.
		PostgresSettings: map[string]string{
			"fsync":            "off",
			"full_page_writes": "off",
			"wal_level":        "minimal",
			"max_wal_senders":  "0",
			"shared_buffers":   "128MB",
		},
	})
	if err != nil {
		return fmt.Errorf("starting a private Postgres: %w", err)
	}
	server.adminURL = server.postgres.DatabaseURL()
	return nil
}

// removeLeftovers removes the data of test binaries that were killed.
func removeLeftovers() {
	entries, err := os.ReadDir(os.TempDir())
	if err != nil {
		return
	}
	for _, entry := range entries {
		rest, ours := strings.CutPrefix(entry.Name(), dirPrefix)
		text, _, _ := strings.Cut(rest, "-")
		pid, err := strconv.Atoi(text)
		if ours && err == nil && syscall.Kill(pid, 0) == syscall.ESRCH {
			// Another test binary may be removing it as well, so errors mean nothing.
			_ = os.RemoveAll(os.TempDir() + "/" + entry.Name())
		}
	}
}

func stop() error {
	server.Lock()
	defer server.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	if server.postgres != nil {
		if err := server.postgres.Stop(ctx); err != nil {
			return err
		}
	} else if server.template != "" {
		for _, name := range append(server.free, server.template) {
			if err := admin(ctx, "drop database "+name+" with (force)"); err != nil {
				return err
			}
		}
	}
	if server.dir != "" {
		return os.RemoveAll(server.dir)
	}
	return nil
}

// chooseStrategy copies the template's files where the server lets us choose, as
// older ones always do: it is twice as fast as writing them to the log.
func chooseStrategy(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, server.adminURL)
	if err != nil {
		return fmt.Errorf("connecting to the test server: %w", err)
	}
	defer conn.Close(ctx)
	var canChoose bool
	err = conn.QueryRow(ctx, `select current_setting('server_version_num')::int >= 150000`).Scan(&canChoose)
	if err != nil {
		return fmt.Errorf("asking for the server's version: %w", err)
	}
	if canChoose {
		server.strategy = " strategy file_copy"
	}
	return nil
}

// admin runs one statement outside the tests' databases.
func admin(ctx context.Context, statement string) error {
	conn, err := pgx.Connect(ctx, server.adminURL)
	if err != nil {
		return fmt.Errorf("connecting to the test server: %w", err)
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, statement); err != nil {
		return fmt.Errorf("%s: %w", statement, err)
	}
	return nil
}

// uniqueName keeps test binaries that share a server apart.
func uniqueName(kind string) string {
	server.created++
	return fmt.Sprintf("holdfast_%s_%d_%d_%d", kind, os.Getpid(), server.created, time.Now().UnixNano()%1e9)
}

func withDatabase(serverURL, name string) string {
	u, err := url.Parse(serverURL)
	if err != nil {
		panic(fmt.Sprintf("storetest: %s is no URL: %v", URLVariable, err))
	}
	u.Path = "/" + name
	return u.String()
}
