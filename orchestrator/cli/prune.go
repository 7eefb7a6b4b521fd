package cli

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"holdfast/orchestrator/config"
	"holdfast/store"
)

func newPrune() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "prune",
		Short: "Remove what retention lets go of now, or say with --dry-run how much that is",
		Long: `The owner of a pool prunes by itself; this does the same at once, beside it if need be,
by the section "retention" of the configuration. It removes the tokens of samples that
every consumer acknowledged long enough ago, and the events and turns of their sessions.`,
		Args: cobra.NoArgs,
	}
	flags := addConfigFlags(cmd, config.Default(), databaseFlags, logFlags)
	pool := cmd.Flags().String("pool", "default", "pool whose runs are pruned")
	dryRun := cmd.Flags().Bool("dry-run", false, "count only")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := flags.load((*config.Config).ValidateDatabase)
		if err != nil {
			return err
		}
		log, err := newLogger(cfg.Log)
		if err != nil {
			return badInput(err)
		}
		db, err := openStore(cmd.Context(), &cfg.Database, log)
		if err != nil {
			return err
		}
		defer db.Close()
		keep := retention(&cfg.Retention)
		runs, err := db.PrunableRuns(cmd.Context(), *pool)
		if err != nil {
			return err
		}
		for _, run := range runs {
			if *dryRun {
				err = countPrunable(cmd.Context(), cmd.OutOrStdout(), db, run, keep.Retention)
			} else {
				err = pruneRun(cmd.Context(), cmd.OutOrStdout(), db, run, keep.Retention, keep.StepSamples)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	return cmd
}

func countPrunable(ctx context.Context, out io.Writer, db *store.Store, run uuid.UUID, keep store.Retention) error {
	samples, histories, err := db.Prunable(ctx, run, keep)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "run %s: transcripts of %d samples, histories of %d sessions may go\n", run, samples, histories)
	return nil
}

func pruneRun(ctx context.Context, out io.Writer, db *store.Store, run uuid.UUID, keep store.Retention, step int) error {
	rows := map[string]int64{}
	for {
		done, err := db.Prune(ctx, run, keep, step)
		if err != nil {
			return err
		}
		for table, n := range done.Rows {
			rows[table] += n
		}
		if max(done.Samples, done.Histories) < int64(step) {
			break
		}
	}
	fmt.Fprintf(out, "run %s: removed", run)
	for _, table := range slices.Sorted(maps.Keys(rows)) {
		fmt.Fprintf(out, " %d %s", rows[table], table)
	}
	fmt.Fprintln(out)
	return nil
}
