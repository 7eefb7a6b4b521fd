// Package migrations brings a Postgres database to the schema that package store
// needs, and back. The steps are numbered SQL files, embedded in the binary and
// applied by goose, each in a transaction of its own.
//
// It does not create databases or roles, and it never edits a step that a release
// has carried: a change of the schema is a new step.
package migrations

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver named "pgx"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

//go:embed *.sql
var files embed.FS

// Step is one migration and whether the database has it.
type Step struct {
	Version int64
	Name    string
	Applied bool
	// AppliedAt is zero for a step that is not applied.
	AppliedAt time.Time
}

// Up applies all steps that the database lacks. Processes that start together may
// all call it: they take turns.
func Up(ctx context.Context, url string) error {
	return with(ctx, url, func(provider *goose.Provider) error {
		if _, err := provider.Up(ctx); err != nil {
			return fmt.Errorf("migrating up: %w", err)
		}
		return nil
	})
}

// Down takes back the latest step, with the data in it.
func Down(ctx context.Context, url string) error {
	return with(ctx, url, func(provider *goose.Provider) error {
		if _, err := provider.Down(ctx); err != nil {
			return fmt.Errorf("migrating down: %w", err)
		}
		return nil
	})
}

// Status lists all steps in order.
func Status(ctx context.Context, url string) ([]Step, error) {
	var steps []Step
	err := with(ctx, url, func(provider *goose.Provider) error {
		states, err := provider.Status(ctx)
		if err != nil {
			return fmt.Errorf("reading the migration status: %w", err)
		}
		for _, state := range states {
			steps = append(steps, Step{
				Version:   state.Source.Version,
				Name:      state.Source.Path,
				Applied:   state.State == goose.StateApplied,
				AppliedAt: state.AppliedAt,
			})
		}
		return nil
	})
	return steps, err
}

func with(ctx context.Context, url string, do func(*goose.Provider) error) error {
	db, err := sql.Open("pgx", url)
	if err != nil {
		return fmt.Errorf("opening the database: %w", err)
	}
	defer db.Close()
	if err := db.PingContext(ctx); err != nil {
		return fmt.Errorf("reaching the database: %w", err)
	}
	locker, err := lock.NewPostgresSessionLocker()
	if err != nil {
		return fmt.Errorf("preparing the migration lock: %w", err)
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files, goose.WithSessionLocker(locker))
	if err != nil {
		return fmt.Errorf("reading the migrations: %w", err)
	}
	return do(provider)
}
