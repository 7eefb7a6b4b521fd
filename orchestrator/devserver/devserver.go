// Package devserver starts and supervises the servers that `holdfast dev`
// brings along: a private Postgres from binaries found on the machine, and the
// Temporal development server holdfast-temporal, which keeps its state in that
// same Postgres.
//
// Three promises shape it. No set-up: no port, account, password or file has to
// be chosen by anybody. Nothing lost: a second start finds the data of the
// first, whatever ended the first, SIGKILL included. Nothing left: the servers
// end with the process that started them, whatever ends it, because the kernel
// itself signals them when their parent dies.
//
// Non-goals: servers for production, Postgres upgrades across major versions,
// restarting a server that died (its death is reported, and the caller stops),
// systems other than Linux.
package devserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// Environment variables that override the search for binaries.
const (
	// PostgresBinVariable names a directory with initdb and postgres. When it
	// is set, nothing else is searched.
	PostgresBinVariable = "HOLDFAST_POSTGRES_BIN"
	// TemporalBinVariable names the holdfast-temporal executable. When it is
	// set, nothing else is searched.
	TemporalBinVariable = "HOLDFAST_TEMPORAL_BIN"
)

// DatabaseName is Holdfast's own database, and the role that owns it.
const DatabaseName = "holdfast"

// Limits of a stop, chosen so that both servers are gone within 10 s even when
// neither reacts to a polite request.
const (
	temporalStopSeconds     = 4
	postgresFastSeconds     = 3 // fast shutdown: sessions ended, shutdown checkpoint written
	postgresQuitSeconds     = 1 // immediate shutdown: recovery at the next start
	afterKillSeconds        = 1 // the kernel's own time to take a killed process away
	defaultStartSeconds     = 120
	orphanPatienceSeconds   = 10
	defaultSharedDir        = "/var/lib/holdfast"
	defaultNamespace        = "holdfast"
	defaultRetentionHours   = 72
	defaultTemporalLogLevel = "warn"
)

// Config says where the servers keep their data and what they are made of. Only
// DataDir is required.
type Config struct {
	// DataDir is the directory for data, logs and the lock; created if absent.
	// One process at a time owns it.
	DataDir string
	// SharedDir is where Postgres keeps its data when we run as root and the
	// account that Postgres runs as cannot enter DataDir, such as below a /root
	// that is closed to others. Default /var/lib/holdfast.
	SharedDir string
	// PostgresBin is a directory with initdb and postgres; empty: search.
	PostgresBin string
	// PostgresSettings are server settings on top of (and instead of) ours.
	PostgresSettings map[string]string
	// TemporalBin is the holdfast-temporal executable; empty: search.
	TemporalBin string
	// Namespace is the Temporal namespace to serve. Default holdfast.
	Namespace string
	// RetentionHours is how long closed workflows stay readable. Default 72.
	RetentionHours int
	// TemporalLogLevel is debug, info, warn or error. Default warn.
	TemporalLogLevel string
	// StartSeconds bounds the whole start, crash recovery of Postgres included.
	// Default 120.
	StartSeconds int
	// Progress is told each step as it begins, in words for a person. May be nil.
	Progress func(step string)
}

// validated returns the config with defaults filled in and DataDir absolute.
func (c Config) validated() (Config, error) {
	if c.DataDir == "" {
		return c, errors.New("no data directory given")
	}
	absolute, err := filepath.Abs(c.DataDir)
	if err != nil {
		return c, fmt.Errorf("resolving data directory %s: %w", c.DataDir, err)
	}
	c.DataDir = absolute
	if c.SharedDir == "" {
		c.SharedDir = defaultSharedDir
	}
	if c.PostgresBin == "" {
		c.PostgresBin = os.Getenv(PostgresBinVariable)
	}
	if c.TemporalBin == "" {
		c.TemporalBin = os.Getenv(TemporalBinVariable)
	}
	if c.Namespace == "" {
		c.Namespace = defaultNamespace
	}
	if c.RetentionHours == 0 {
		c.RetentionHours = defaultRetentionHours
	}
	if c.TemporalLogLevel == "" {
		c.TemporalLogLevel = defaultTemporalLogLevel
	}
	if c.StartSeconds == 0 {
		c.StartSeconds = defaultStartSeconds
	}
	if c.StartSeconds < 0 || c.RetentionHours < 0 {
		return c, errors.New("StartSeconds and RetentionHours must not be negative")
	}
	if c.Progress == nil {
		c.Progress = func(string) {}
	}
	return c, nil
}

// Servers are a running Postgres and a running Temporal.
type Servers struct {
	postgres *Postgres
	temporal *temporalServer
	done     chan error
}

// Start brings up Postgres and then Temporal, and returns when both serve. The
// context bounds the start only: cancelling it during the start ends what was
// begun, cancelling it later changes nothing. The error names what is missing
// and how to get it, or carries the tail of the log of a server that died.
func Start(ctx context.Context, config Config) (*Servers, error) {
	config, err := config.validated()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(config.StartSeconds)*time.Second)
	defer cancel()
	// Looked for first, so that a missing build is told before anything runs.
	temporalBin, err := findTemporal(config.TemporalBin)
	if err != nil {
		return nil, err
	}
	postgres, err := StartPostgres(ctx, config)
	if err != nil {
		return nil, err
	}
	temporal, err := startTemporal(ctx, config, temporalBin, postgres.serverURL())
	if err != nil {
		return nil, errors.Join(err, postgres.Stop(context.WithoutCancel(ctx)))
	}
	servers := &Servers{postgres: postgres, temporal: temporal, done: make(chan error, 1)}
	go servers.watch()
	return servers, nil
}

// watch reports the first server that ends without having been told to.
func (s *Servers) watch() {
	defer close(s.done)
	var died *child
	select {
	case <-s.temporal.child.ended:
		died = s.temporal.child
	case <-s.postgres.child.ended:
		died = s.postgres.child
		if !died.stopping.Load() {
			// What Temporal remembers may be newer than what the next Postgres
			// recovers, so it must not live to meet that one.
			s.temporal.child.kill()
		}
	}
	if !died.stopping.Load() {
		s.done <- died.deathError()
	}
}

// DatabaseURL is the URL of Holdfast's own database, for pgx and psql.
func (s *Servers) DatabaseURL() string { return s.postgres.DatabaseURL() }

// TemporalAddress is the host:port of Temporal's gRPC frontend.
func (s *Servers) TemporalAddress() string { return s.temporal.address }

// PostgresDataDir is where Postgres keeps its data: below Config.DataDir, or
// below Config.SharedDir when its account cannot enter the former.
func (s *Servers) PostgresDataDir() string { return s.postgres.dataDir }

// Done yields one error when a server ends without having been told to, and is
// closed after that or once Stop has ended the servers. The caller then stops.
func (s *Servers) Done() <-chan error { return s.done }

// Stop ends Temporal, then Postgres, within 10 s, by force if they do not
// react, and releases the data directory. A context that ends first shortens
// the patience, not the result. Stop may be called again.
func (s *Servers) Stop(ctx context.Context) error {
	return errors.Join(s.temporal.stop(ctx), s.postgres.Stop(ctx))
}
