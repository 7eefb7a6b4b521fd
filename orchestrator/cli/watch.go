package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/mattn/go-isatty"
	"github.com/spf13/cobra"

	"holdfast/api/client"
	"holdfast/api/wire"
)

func newWatch() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Show a run's progress: per class released, held, active, done, rate and drift",
		Args:  cobra.NoArgs,
	}
	r := addRemoteFlags(cmd)
	run := cmd.Flags().String("run", "", "run to watch; empty takes the pool's active run")
	pool := cmd.Flags().String("pool", "default", "pool of the run, when --run is empty")
	interval := cmd.Flags().Duration("interval", 2*time.Second, "time between two looks, at least 200ms")
	untilDone := cmd.Flags().Bool("until-done", false, "end when nothing that was released is left")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *interval < 200*time.Millisecond {
			return badInput(fmt.Errorf("--interval: %s is less than 200ms", *interval))
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
		p := newProgress(cmd.OutOrStdout())
		err = follow(cmd.Context(), c, id, *interval, p, func(b wire.Backlog) bool { return *untilDone && b.Total.Backlog == 0 })
		if cmd.Context().Err() != nil {
			return nil
		}
		return refusal(err)
	}
	return cmd
}

func watchedRun(ctx context.Context, c *client.Client, name, pool string) (uuid.UUID, error) {
	if name != "" {
		id, err := uuid.Parse(name)
		if err != nil {
			return id, badInput(fmt.Errorf("--run: %q is not the id of a run", name))
		}
		return id, nil
	}
	runs, err := c.Runs(ctx, client.RunsQuery{Pool: pool, State: "active"})
	if err != nil {
		return uuid.Nil, err
	}
	if len(runs.Runs) == 0 {
		return uuid.Nil, badInput(fmt.Errorf("pool %s has no active run; name one with --run", pool))
	}
	return runs.Runs[0].ID, nil
}

// follow shows the run at every interval until done says so.
func follow(ctx context.Context, c *client.Client, run uuid.UUID, interval time.Duration, p *progress, done func(wire.Backlog) bool) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		backlog, err := c.Backlog(ctx, run)
		if err != nil {
			return err
		}
		mixture, err := c.Mixture(ctx, run, client.Window{})
		if err != nil {
			return err
		}
		over := done(backlog)
		p.show(backlog, mixture, over)
		if over {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}

// progress draws a table that stays in place on a terminal, and prints one line
// now and then elsewhere.
type progress struct {
	out      io.Writer
	terminal bool
	began    time.Time
	doneAt   map[string]int64 // ended when the display began
	lines    int
	printed  time.Time
}

// plainInterval is how often a line is printed where nobody sees it live.
const plainInterval = 10 * time.Second

func newProgress(out io.Writer) *progress {
	file, ok := out.(*os.File)
	return &progress{out: out, terminal: ok && isatty.IsTerminal(file.Fd())}
}

func (p *progress) show(backlog wire.Backlog, mixture wire.Mixture, last bool) {
	if p.began.IsZero() {
		p.began, p.doneAt = backlog.At, map[string]int64{}
		for _, c := range append(backlog.Classes, backlog.Total) {
			p.doneAt[c.Class] = c.Ended
		}
	}
	if p.terminal {
		p.table(backlog, mixture)
		return
	}
	if !last && time.Since(p.printed) < plainInterval {
		return
	}
	p.printed = time.Now()
	parts := make([]string, 0, len(backlog.Classes))
	for _, c := range backlog.Classes {
		parts = append(parts, fmt.Sprintf("%s %d/%d done, %d held, %d active", c.Class, c.Ended, c.Released, c.Held, c.Active))
	}
	fmt.Fprintf(p.out, "[%5.1f s] %s; %.1f samples/min, drift %.1f pp\n", backlog.At.Sub(p.began).Seconds(),
		strings.Join(parts, "; "), p.rate(backlog.At, backlog.Total), mixture.Total.TVReleasedPP)
}

func (p *progress) table(backlog wire.Backlog, mixture wire.Mixture) {
	var b strings.Builder
	if p.lines > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", p.lines)
	}
	row := func(format string, args ...any) { fmt.Fprintf(&b, "\x1b[2K"+format+"\n", args...) }
	row("%-10s %9s %8s %8s %8s %8s %8s %8s %12s", "class", "released", "queued", "pending", "held", "active", "done", "failed", "samples/min")
	total := backlog.Total
	total.Class = "all"
	for _, c := range append(backlog.Classes, total) {
		row("%-10s %9d %8d %8d %8d %8d %8d %8d %12.1f", c.Class, c.Released, c.Queued, c.Pending, c.Held, c.Active, c.Ended, c.Failed, p.rate(backlog.At, c))
	}
	row("drift of completed against released: %.2f pp   oldest hold: %.0f s   running for %.0f s",
		mixture.Total.TVReleasedPP, total.OldestHoldSeconds, backlog.At.Sub(p.began).Seconds())
	p.lines = len(backlog.Classes) + 3
	fmt.Fprint(p.out, b.String())
}

// rate is samples per minute of wall time since the display began.
func (p *progress) rate(at time.Time, c wire.ClassBacklog) float64 {
	minutes := at.Sub(p.began).Minutes()
	if minutes <= 0 {
		return 0
	}
	if c.Class == "all" {
		c.Class = ""
	}
	return float64(c.Ended-p.doneAt[c.Class]) / minutes
}
