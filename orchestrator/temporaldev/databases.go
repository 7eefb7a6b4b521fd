package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"

	"github.com/iancoleman/strcase"
	"github.com/jackc/pgx/v5"
	"github.com/jmoiron/sqlx"
	"go.temporal.io/server/common/config"
	"go.temporal.io/server/common/log"
	"go.temporal.io/server/common/persistence/sql/sqlplugin/postgresql"
	"go.temporal.io/server/common/persistence/sql/sqlplugin/postgresql/driver"
	"go.temporal.io/server/tools/common/schema"
	temporalsql "go.temporal.io/server/tools/sql"
)

// The two databases that a Temporal cluster keeps in Postgres, and the
// directories of the server's embedded schema that belong to them.
const (
	mainDatabase       = "temporal"
	visibilityDatabase = "temporal_visibility"
	mainSchema         = "postgresql/v12/temporal"
	visibilitySchema   = "postgresql/v12/visibility"
)

// unfinishedComment marks a database whose first schema is being set up. The
// server's schema tool runs statement by statement, outside a transaction, so
// a kill in the middle leaves a state that it cannot continue from. A database
// that carries the mark has never been served from and is created anew.
const unfinishedComment = "holdfast-temporal: first schema set-up has not finished"

// prepareDatabases creates what is missing and brings both schemas up to the
// version that this server needs.
func prepareDatabases(ctx context.Context, postgres *url.URL, logger log.Logger) error {
	admin, err := pgx.Connect(ctx, databaseURL(postgres, "postgres"))
	if err != nil {
		return fmt.Errorf("connecting to Postgres: %w", err)
	}
	defer admin.Close(context.WithoutCancel(ctx))
	for _, database := range []struct{ name, schemaName string }{
		{mainDatabase, mainSchema},
		{visibilityDatabase, visibilitySchema},
	} {
		if err := prepareDatabase(ctx, admin, postgres, database.name, database.schemaName, logger); err != nil {
			return fmt.Errorf("preparing database %s: %w", database.name, err)
		}
	}
	return nil
}

func prepareDatabase(ctx context.Context, admin *pgx.Conn, postgres *url.URL, name, schemaName string, logger log.Logger) error {
	quoted := pgx.Identifier{name}.Sanitize()
	var comment string
	err := admin.QueryRow(ctx,
		`SELECT coalesce(shobj_description(oid, 'pg_database'), '') FROM pg_database WHERE datname = $1`, name).Scan(&comment)
	exists := err == nil
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("looking for it: %w", err)
	}
	fresh := !exists || comment == unfinishedComment
	if fresh {
		statements := []string{
			"CREATE DATABASE " + quoted,
			"COMMENT ON DATABASE " + quoted + " IS '" + unfinishedComment + "'",
		}
		if exists {
			statements = append([]string{"DROP DATABASE " + quoted + " WITH (FORCE)"}, statements...)
		}
		for _, statement := range statements {
			if _, err := admin.Exec(ctx, statement); err != nil {
				return fmt.Errorf("%s: %w", statement, err)
			}
		}
	}
	if err := applySchema(postgres, name, schemaName, fresh, logger); err != nil {
		return err
	}
	if fresh {
		if _, err := admin.Exec(ctx, "COMMENT ON DATABASE "+quoted+" IS NULL"); err != nil {
			return fmt.Errorf("marking the schema as complete: %w", err)
		}
	}
	return nil
}

// applySchema runs the server's own schema tool with its embedded scripts.
func applySchema(postgres *url.URL, name, schemaName string, fresh bool, logger log.Logger) error {
	if fresh {
		// Some hundred statements need not wait for the disk one by one: until
		// the mark of an unfinished set-up is taken away, none of them counts.
		postgres = withoutWaiting(postgres)
	}
	connection, err := temporalsql.NewConnection(sqlConfig(postgres, name, 1), logger)
	if err != nil {
		return fmt.Errorf("connecting: %w", err)
	}
	defer connection.Close()
	if fresh {
		setup := schema.NewSetupSchemaTask(connection, &schema.SetupConfig{InitialVersion: "0.0"}, logger)
		if err := setup.Run(); err != nil {
			return fmt.Errorf("setting up the schema: %w", err)
		}
	}
	update := schema.NewUpdateSchemaTask(connection, &schema.UpdateConfig{DBName: name, SchemaName: schemaName}, logger)
	if err := update.Run(); err != nil {
		return fmt.Errorf("updating the schema: %w", err)
	}
	return nil
}

// sqlConfig connects by our URL as it is: the server's own way puts a URL
// together from parts, and spaces in a password or socket directory get lost.
func sqlConfig(postgres *url.URL, database string, maxConns int) *config.SQL {
	address := databaseURL(postgres, database)
	return &config.SQL{
		PluginName:      postgresql.PluginNamePGX,
		DatabaseName:    database,
		ConnectProtocol: "tcp",    // required, not used
		ConnectAddr:     database, // required, not used
		Connect: func(*config.SQL) (*sqlx.DB, error) {
			pool, err := (&driver.PGXDriver{}).CreateConnection(address)
			if err != nil {
				return nil, err
			}
			pool.SetMaxOpenConns(maxConns)
			pool.SetMaxIdleConns(maxConns)
			pool.MapperFunc(strcase.ToSnake) // columns are named after fields
			return pool, nil
		},
	}
}

// databaseURL is the URL of one database of the server.
func databaseURL(postgres *url.URL, database string) string {
	withDatabase := *postgres
	withDatabase.Path = "/" + database
	return withDatabase.String()
}

// withoutWaiting is the URL for sessions that commit without waiting for the
// disk.
func withoutWaiting(postgres *url.URL) *url.URL {
	changed := *postgres
	if changed.RawQuery != "" {
		changed.RawQuery += "&"
	}
	changed.RawQuery += "synchronous_commit=off"
	return &changed
}
