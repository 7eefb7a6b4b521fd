package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"holdfast/orchestrator/trace"
)

func newTrace() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "trace",
		Short: "Turn recorded traces into compact numeric ones",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newTraceImport(), newTraceList())
	return cmd
}

func newTraceImport() *cobra.Command {
	names := make([]string, 0, len(trace.Formats()))
	for _, f := range trace.Formats() {
		names = append(names, f.String())
	}
	var format string
	var imported trace.ImportConfig
	cmd := &cobra.Command{
		Use:   "import --format FORMAT --in PATH --out FILE --name NAME",
		Short: "Derive a compact numeric trace (lengths, gaps, prefix structure; no text)",
		Long: `Reads a file, or a folder of files, of one of the public trace formats and writes the
numbers that a replay needs. A file that is malformed, cut off or of another format is
refused with its line and field, and nothing is written.`,
		Example: `  holdfast trace import --format tau-bench --in trajectories.json --name tau --repository sierra-research/tau-bench \
    --commit 59a200c --licence MIT --out tau.jsonl`,
		Args: cobra.NoArgs,
	}
	cmd.Flags().StringVar(&format, "format", "", "format of the input: "+strings.Join(names, ", "))
	cmd.Flags().StringVar(&imported.Path, "in", "", "file, or folder of files, to read")
	cmd.Flags().StringVar(&imported.Out, "out", "", "file to write")
	cmd.Flags().StringVar(&imported.Name, "name", "", "name of the trace, by which a composition asks for it")
	cmd.Flags().StringVar(&imported.Repository, "repository", "", "where the input comes from; kept in the header")
	cmd.Flags().StringVar(&imported.Commit, "commit", "", "its version there; kept in the header")
	cmd.Flags().StringVar(&imported.Licence, "licence", "", "its licence; kept in the header")
	cmd.Flags().BoolVar(&imported.Synthetic, "synthetic", false, "the source is not a record of real work; kept in the header")
	cmd.Flags().IntVar(&imported.MinTurns, "min-turns", 0, "leave out sessions of fewer model calls")
	for _, name := range []string{"format", "in", "out", "name"} {
		_ = cmd.MarkFlagRequired(name)
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		parsed, err := trace.ParseFormat(format)
		if err != nil {
			return badInput(err)
		}
		imported.Format = parsed
		report, err := trace.Import(imported)
		if err != nil {
			return badInput(err)
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s: %d sessions, %d turns\n", imported.Out, report.SessionsWritten, report.TurnsWritten)
		return nil
	}
	return cmd
}

func newTraceList() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the traces that this binary carries, with their sources",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, name := range trace.Shipped() {
				t, err := trace.LoadShipped(name)
				if err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%-24s %4d sessions  %s %s (%s)\n", name, len(t.Sessions), t.Header.Repository, t.Header.Commit, t.Header.Licence)
			}
			return nil
		},
	}
}
