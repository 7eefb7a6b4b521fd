// Package store keeps everything Holdfast must not lose: runs and their
// contracts, released batches, sessions with their turns and tokens, samples and
// who has consumed them, instances, pool ownership and the outbox.
//
// Each method is one transaction. Counters (A released, N ended, Q backlog per
// class) change only in the transactions that cause them, and constraints of the
// schema refuse a state in which they disagree. Every number that a reader uses
// as a cursor is drawn under a locked counter row, so that a reader that has seen
// number n has seen everything up to n.
//
// The store decides nothing: which session runs where is the router's business,
// what a session does next the workflow's. It knows neither Temporal nor HTTP.
package store

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Config says which database is used and how much of it.
type Config struct {
	// URL is a Postgres connection URL or keyword string. The schema must be at
	// the version that package migrations brings it to.
	URL string
	// MaxConnections bounds the pool; 0 means 16.
	MaxConnections int
	// Blobs keeps the bytes of samples' columns; nil means Postgres.
	Blobs Blobs
	// Logger receives what no caller is told, such as a lost LISTEN connection;
	// nil means slog.Default.
	Logger *slog.Logger
}

const (
	defaultMaxConnections = 16
	maxMaxConnections     = 1_000
)

// Store is safe for concurrent use.
type Store struct {
	pool  *pgxpool.Pool
	blobs Blobs
	log   *slog.Logger
}

// Open connects to the database and checks that it answers.
func Open(ctx context.Context, config Config) (*Store, error) {
	if config.MaxConnections == 0 {
		config.MaxConnections = defaultMaxConnections
	}
	if config.MaxConnections < 1 || config.MaxConnections > maxMaxConnections {
		return nil, &FieldError{Path: "max_connections", Problem: fmt.Sprintf("must be between 1 and %d, is %d", maxMaxConnections, config.MaxConnections)}
	}
	if config.Logger == nil {
		config.Logger = slog.Default()
	}
	poolConfig, err := pgxpool.ParseConfig(config.URL)
	if err != nil {
		return nil, fmt.Errorf("reading the database URL: %w", err)
	}
	poolConfig.MaxConns = int32(config.MaxConnections)
	poolConfig.AfterConnect = readTimesAsUTC
	pool, err := pgxpool.NewWithConfig(ctx, poolConfig)
	if err != nil {
		return nil, fmt.Errorf("opening the database pool: %w", err)
	}
	s := &Store{pool: pool, blobs: config.Blobs, log: config.Logger}
	if err := s.Ping(ctx); err != nil {
		pool.Close()
		return nil, err
	}
	return s, nil
}

// readTimesAsUTC makes equal instants equal values, whatever the process's zone.
func readTimesAsUTC(_ context.Context, conn *pgx.Conn) error {
	conn.TypeMap().RegisterType(&pgtype.Type{Name: "timestamptz", OID: pgtype.TimestamptzOID, Codec: &pgtype.TimestamptzCodec{ScanLocation: time.UTC}})
	return nil
}

// Close waits for running calls and closes all connections.
func (s *Store) Close() { s.pool.Close() }

// Ping asks the database for an answer.
func (s *Store) Ping(ctx context.Context) error {
	if err := s.pool.Ping(ctx); err != nil {
		return fmt.Errorf("reaching the database: %w", err)
	}
	return nil
}
