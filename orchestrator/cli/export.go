package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"holdfast/api/client"
)

func newExport() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "export",
		Short: "Write a run's samples to a file, as JSONL or Parquet",
		Long: `Writes the samples that have ended by now, in completion order, from the first or from a
cursor on. Where samples are pruned, that is refused, unless --start is available, which
begins with the first that is there. No consumer's place moves. The file appears under its
name once it is whole.`,
		Example: `  holdfast export --run 0f6d1c0a-... --format parquet --out samples.parquet
  holdfast export --format jsonl --out - | jq .reward`,
		Args: cobra.NoArgs,
	}
	r := addRemoteFlags(cmd)
	run := cmd.Flags().String("run", "", "run to export; empty takes the pool's active run")
	pool := cmd.Flags().String("pool", "default", "pool of the run, when --run is empty")
	format := cmd.Flags().String("format", "jsonl", "jsonl or parquet")
	out := cmd.Flags().String("out", "", "file to write; - is standard output")
	after := cmd.Flags().String("after", "", "cursor: only samples after it")
	start := cmd.Flags().String("start", "beginning", "where to begin without a cursor: beginning or available")
	if err := cmd.MarkFlagRequired("out"); err != nil {
		panic("cli: the flag was just added: " + err.Error())
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *format != "jsonl" && *format != "parquet" {
			return badInput(fmt.Errorf("--format: %q is neither jsonl nor parquet", *format))
		}
		if *start != "beginning" && *start != "available" {
			return badInput(fmt.Errorf("--start: %q is neither beginning nor available", *start))
		}
		c, err := r.connect(cmd)
		if err != nil {
			return err
		}
		defer c.Close()
		id, err := watchedRun(cmd.Context(), c, *run, *pool)
		if err != nil {
			return refusal(err)
		}
		query := client.ExportQuery{Format: *format, After: *after, Start: *start}
		if *out == "-" {
			_, err := c.Export(cmd.Context(), id, query, cmd.OutOrStdout())
			return refusal(err)
		}
		n, err := exportFile(cmd.Context(), c, id, query, *out)
		if err != nil {
			return refusal(err)
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s: %d bytes of run %s\n", *out, n, id)
		return nil
	}
	return cmd
}

// exportFile writes beside the file and renames at the end, so that a file that is
// there is whole.
func exportFile(ctx context.Context, c *client.Client, run uuid.UUID, query client.ExportQuery, name string) (n int64, err error) {
	partial := name + ".partial"
	file, err := os.Create(partial)
	if err != nil {
		return 0, badInput(fmt.Errorf("--out: %w", err))
	}
	n, err = c.Export(ctx, run, query, io.Writer(file))
	err = errors.Join(err, file.Close())
	if err == nil {
		err = os.Rename(partial, name)
	}
	if err != nil {
		return n, errors.Join(err, os.Remove(partial))
	}
	return n, nil
}
