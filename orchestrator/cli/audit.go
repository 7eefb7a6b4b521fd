package cli

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"holdfast/api/wire"
)

func newAudit() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "audit SAMPLE",
		Short: "Show everything that happened to a sample, from its release to its acknowledgement",
		Long:  `A sample's id is its session's. GET /api/v1/sessions/ID/audit gives the same for programs.`,
		Args:  cobra.ExactArgs(1),
	}
	r := addRemoteFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		id, err := uuid.Parse(args[0])
		if err != nil {
			return badInput(fmt.Errorf("%q is not the id of a sample", args[0]))
		}
		c, err := r.connect(cmd)
		if err != nil {
			return err
		}
		defer c.Close()
		audit, err := c.Audit(cmd.Context(), id)
		if err != nil {
			return refusal(err)
		}
		return printAudit(cmd.OutOrStdout(), &audit)
	}
	return cmd
}

// printAudit writes the timeline, a line an event, with times from the release on.
func printAudit(out io.Writer, audit *wire.Audit) error {
	s, release := &audit.Session, &audit.Release
	fmt.Fprintf(out, "session %s, class %s, member %d of %d of task %s: %s %s\n", s.ID, s.Class, s.Member, s.GroupSize, s.TaskID, s.State, s.Status)
	fmt.Fprintf(out, "released %s by batch %d (key %q) at policy version %d\n", release.At.Format(time.RFC3339Nano), release.BatchSeq, release.IdempotencyKey, release.PolicyVersion)
	fmt.Fprintf(out, "queued %.1f s, held %.1f s in %d holds, %d turns, %d calls made again, %d moves\n", release.QueuedSeconds, s.Times.HeldSeconds, len(audit.Holds), s.Usage.Turns, audit.Retries, audit.Moves)
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	line := func(at time.Time, what, detail string) {
		fmt.Fprintf(table, "%+.3fs\t%s\t%s\n", at.Sub(release.At).Seconds(), what, detail)
	}
	for i := range audit.Events {
		event := &audit.Events[i]
		line(event.At, event.Kind, string(event.Detail))
	}
	if audit.HistoryPruned {
		fmt.Fprintln(table, "\tthe history is pruned\t")
	}
	for _, delivery := range audit.Deliveries {
		if delivery.DeliveredAt != nil {
			line(*delivery.DeliveredAt, "delivered", "to "+delivery.Consumer)
		}
		if delivery.AcknowledgedAt != nil {
			line(*delivery.AcknowledgedAt, "acknowledged", "by "+delivery.Consumer)
		}
	}
	if err := table.Flush(); err != nil {
		return fmt.Errorf("writing the audit: %w", err)
	}
	return nil
}
