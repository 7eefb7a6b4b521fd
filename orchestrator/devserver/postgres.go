package devserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// postgresPort is part of the name of the socket; no TCP port is opened.
const postgresPort = 5432

// pollInterval is how often we look whether something outside our process has
// happened that nobody signals: a server that begins to accept connections, an
// orphan that ends, a file that appears.
const pollInterval = 20 * time.Millisecond

// Postgres is a running private Postgres. It listens on a unix socket in a
// private directory only and admits only our own account, checked by the
// kernel: no port to collide on, no password to keep.
type Postgres struct {
	child     *child
	lock      *os.File
	dataDir   string
	socketDir string
}

// StartPostgres starts the private Postgres of config.DataDir and returns when
// it accepts connections and Holdfast's database exists. What it says about the
// context and about errors is as for Start. Of the config, what concerns
// Temporal is ignored.
func StartPostgres(ctx context.Context, config Config) (*Postgres, error) {
	config, err := config.validated()
	if err != nil {
		return nil, err
	}
	// Others may pass through when we are root, because the account that
	// Postgres runs as has to; the data itself is closed to them all the same.
	mode := os.FileMode(0o700)
	if os.Geteuid() == 0 {
		mode = 0o755
	}
	if err := os.MkdirAll(config.DataDir, mode); err != nil {
		return nil, fmt.Errorf("creating the data directory: %w", err)
	}
	lock, err := lockDataDir(config.DataDir)
	if err != nil {
		return nil, err
	}
	postgres, err := startLockedPostgres(ctx, config)
	if err != nil {
		lock.Close()
		return nil, err
	}
	postgres.lock = lock
	return postgres, nil
}

func startLockedPostgres(ctx context.Context, config Config) (*Postgres, error) {
	home, err := choosePostgresHome(config)
	if err != nil {
		return nil, err
	}
	for _, directory := range []string{home.dataDir, home.unfinishedDir()} {
		if err := endOrphans(ctx, directory, config.Progress); err != nil {
			return nil, err
		}
	}
	if err := initialise(ctx, config, &home); err != nil {
		return nil, err
	}
	socketDir, err := prepareSocketDir(config.DataDir, home)
	if err != nil {
		return nil, err
	}
	if err := writeAccessRules(home); err != nil {
		return nil, err
	}
	config.Progress(fmt.Sprintf("starting PostgreSQL %s on %s", home.installation.version, home.dataDir))
	logPath := filepath.Join(config.DataDir, "postgres.log")
	if err := rotateLog(logPath); err != nil {
		return nil, fmt.Errorf("rotating the log of Postgres: %w", err)
	}
	child, err := startChild(childSpec{
		name:        "Postgres",
		path:        filepath.Join(home.installation.binDir, "postgres"),
		args:        serverArguments(home.dataDir, socketDir, config.PostgresSettings),
		dir:         home.dataDir,
		env:         serverEnvironment(),
		account:     home.account,
		logPath:     logPath,
		deathSignal: syscall.SIGINT, // to Postgres: fast shutdown
	})
	if err != nil {
		return nil, err
	}
	postgres := &Postgres{child: child, dataDir: home.dataDir, socketDir: socketDir}
	if err := postgres.createDatabase(ctx); err != nil {
		return nil, errors.Join(err, postgres.Stop(context.WithoutCancel(ctx)))
	}
	return postgres, nil
}

// Pid is the process id of the postmaster.
func (p *Postgres) Pid() int { return p.child.pid }

// DatabaseURL is the URL of Holdfast's own database, for pgx and psql.
func (p *Postgres) DatabaseURL() string { return p.urlOf(DatabaseName) }

// serverURL is the URL of the server without a database.
func (p *Postgres) serverURL() string { return p.urlOf("") }

func (p *Postgres) urlOf(database string) string {
	query := url.Values{"host": {p.socketDir}, "port": {strconv.Itoa(postgresPort)}}.Encode()
	address := url.URL{
		Scheme: "postgres",
		User:   url.User(DatabaseName),
		Path:   "/" + database,
		// Clients of Postgres, unlike browsers, take a plus for a plus.
		RawQuery: strings.ReplaceAll(query, "+", "%20"),
	}
	return address.String()
}

// Done yields one error when Postgres ends without having been told to, and is
// closed once it has ended.
func (p *Postgres) Done() <-chan error {
	done := make(chan error, 1)
	go func() {
		defer close(done)
		<-p.child.ended
		if !p.child.stopping.Load() {
			done <- p.child.deathError()
		}
	}()
	return done
}

// Stop shuts Postgres down, harder and harder, and releases the data directory.
func (p *Postgres) Stop(ctx context.Context) error {
	err := p.child.stop(ctx,
		stopStep{syscall.SIGINT, postgresFastSeconds},
		stopStep{syscall.SIGQUIT, postgresQuitSeconds})
	if p.lock != nil {
		err = errors.Join(err, p.lock.Close())
		p.lock = nil
	}
	return err
}

// createDatabase waits until the server accepts connections, which after a
// crash takes as long as its recovery, and creates Holdfast's database.
func (p *Postgres) createDatabase(ctx context.Context) error {
	connection, err := p.connect(ctx)
	if err != nil {
		return err
	}
	defer connection.Close(context.WithoutCancel(ctx))
	var exists bool
	if err := connection.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)`, DatabaseName).Scan(&exists); err != nil {
		return fmt.Errorf("looking for database %s: %w", DatabaseName, err)
	}
	if exists {
		return nil
	}
	if _, err := connection.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{DatabaseName}.Sanitize()); err != nil {
		return fmt.Errorf("creating database %s: %w", DatabaseName, err)
	}
	return nil
}

func (p *Postgres) connect(ctx context.Context) (*pgx.Conn, error) {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		connection, err := pgx.Connect(ctx, p.urlOf("postgres"))
		if err == nil {
			return connection, nil
		}
		select {
		case <-p.child.ended:
			return nil, p.child.deathError()
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for Postgres to accept connections: %w (last: %w)", ctx.Err(), err)
		case <-tick.C:
		}
	}
}

// serverArguments are settings fit for a machine that does other work as well.
// fsync and synchronous_commit stay on: a commit that was reported survives.
// (Temporal's sessions choose otherwise, and make up for it before they reply.)
func serverArguments(dataDir, socketDir string, overrides map[string]string) []string {
	settings := map[string]string{
		"listen_addresses":        "", // no TCP
		"unix_socket_directories": socketDir,
		"port":                    strconv.Itoa(postgresPort),
		"cluster_name":            "holdfast-dev", // seen in ps
		"max_connections":         "200",
		"shared_buffers":          "192MB",
		// Checkpoints far apart: after each, the first change of every page
		// writes the whole page to the log.
		"checkpoint_timeout": "15min",
		"max_wal_size":       "1GB",
		"wal_compression":    "on",
		// After the crash of one of its processes Postgres ends rather than
		// restarts: Temporal must not go on from memory that is newer than what
		// was recovered. The next start of ours recovers.
		"restart_after_crash": "off",
		// Short statements only: compiling or parallelising them costs more
		// than it saves, and takes the cores from the engines.
		"jit":                             "off",
		"max_parallel_workers_per_gather": "0",
		"update_process_title":            "off",
		"log_checkpoints":                 "off",
		"log_timezone":                    "UTC",
		"timezone":                        "UTC",
	}
	maps.Copy(settings, overrides)
	arguments := []string{"-D", dataDir}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		arguments = append(arguments, "-c", name+"="+settings[name])
	}
	return arguments
}

// writeAccessRules admits, over the socket and nowhere else, the accounts that
// may be us: the kernel vouches for the peer's account.
func writeAccessRules(home postgresHome) error {
	ours, err := user.Current()
	if err != nil {
		return fmt.Errorf("looking up our own account: %w", err)
	}
	names := []string{ours.Username, home.account.name, "root"}
	slices.Sort(names)
	var identities strings.Builder
	for _, name := range slices.Compact(names) {
		fmt.Fprintf(&identities, "holdfast %q %s\n", name, DatabaseName)
	}
	return errors.Join(
		home.writeFile("pg_hba.conf", "local all "+DatabaseName+" peer map=holdfast\n"),
		home.writeFile("pg_ident.conf", identities.String()))
}
