package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"holdfast/orchestrator/config"
)

func newServe() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve one pool against a Temporal and a Postgres that others run",
		Long: `Serves the API and, whenever it can own the pool, its router and workers. Run as many
replicas as you like: one owns the pool, the others answer the API and stand by.
The database's schema must be up to date: see "holdfast migrate".`,
		Example: `  holdfast serve --temporal-address temporal:7233 --database-url postgres://holdfast@db/holdfast \
    --listen 0.0.0.0:8080 --token trainer:SECRET --token operator:OTHER`,
		Args: cobra.NoArgs,
	}
	flags := addConfigFlags(cmd, config.Default(), poolFlags, databaseFlags, temporalFlags, routerFlags, limitFlags, logFlags)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := flags.load((*config.Config).ValidateServe)
		if err != nil {
			return err
		}
		log, err := newLogger(cfg.Log)
		if err != nil {
			return err
		}
		s, err := newStack(cmd.Context(), cfg, log)
		if err != nil {
			return err
		}
		defer s.close()
		return s.run(cmd.Context(), func(_ context.Context, address string) error {
			fmt.Fprintf(cmd.OutOrStdout(), "API: http://%s\n", address)
			return nil
		})
	}
	return cmd
}
