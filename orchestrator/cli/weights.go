package cli

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"holdfast/api/client"
	"holdfast/api/wire"
)

func newWeights() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "weights",
		Short: "Update the weights of a pool's engines: begin, commit, cancel, status",
		Long: `Begin pauses the pool's engines and waits until they are; load the new weights then, and
commit: caches are parted with, the version comes into force, the engines go on. Cancel
lets them go on with the old weights. All are harmless to repeat.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newWeightsBegin(), newWeightsCommit(), newWeightsCancel(), newWeightsStatus())
	return cmd
}

// weightsCommand is what the subcommands have in common: a version, the service,
// and a wait for the outcome.
type weightsCommand struct {
	*cobra.Command
	remote *remote
	pool   *string
	wait   *time.Duration
}

func newWeightsCommand(use, short string, wait time.Duration) *weightsCommand {
	w := &weightsCommand{Command: &cobra.Command{Use: use + " VERSION", Short: short, Args: cobra.ExactArgs(1)}}
	w.remote = addRemoteFlags(w.Command)
	w.pool = w.Flags().String("pool", "default", "pool of the engines")
	w.wait = w.Flags().Duration("wait", wait, "how long to wait for the outcome; 0 asks and returns")
	return w
}

// run asks for something and waits until the update has come to a state.
func (w *weightsCommand) run(args []string, state string, ask func(ctx context.Context, c *client.Client, version int64) (wire.WeightUpdate, error)) error {
	version, err := strconv.ParseInt(args[0], 10, 64)
	if err != nil {
		return badInput(fmt.Errorf("%q is not a policy version", args[0]))
	}
	c, err := w.remote.connect(w.Command)
	if err != nil {
		return err
	}
	defer c.Close()
	update, err := ask(w.Context(), c, version)
	if err == nil && *w.wait > 0 && update.State != state {
		waiting, cancel := context.WithTimeout(w.Context(), *w.wait)
		defer cancel()
		update, err = c.AwaitWeightUpdate(waiting, *w.pool, version, state)
	}
	if update.State != "" {
		printWeights(w.OutOrStdout(), &update)
	}
	return refusal(err)
}

func newWeightsBegin() *cobra.Command {
	w := newWeightsCommand("begin", "Pause the engines for new weights and wait until they are paused", 10*time.Minute)
	mode := w.Flags().String("mode", "abort", "what happens to generations under way: abort, wait, keep or in_place")
	cache := w.Flags().String("cache", "reset", "how old prefixes are parted with: reset or salt")
	control := w.Flags().String("control", "manage", "who pauses and resumes the engines: manage (the service) or observe (you)")
	timeout := w.Flags().Duration("pause-timeout", 5*time.Minute, "how long an engine may take to pause")
	w.RunE = func(_ *cobra.Command, args []string) error {
		return w.run(args, "paused", func(ctx context.Context, c *client.Client, version int64) (wire.WeightUpdate, error) {
			return c.BeginWeightUpdate(ctx, *w.pool, wire.NewWeightUpdate{
				PolicyVersion: version, Mode: *mode, Cache: *cache, Control: *control, PauseTimeoutSeconds: timeout.Seconds(),
			})
		})
	}
	return w.Command
}

func newWeightsCommit() *cobra.Command {
	w := newWeightsCommand("commit", "Bring loaded weights into force and let the engines go on", 10*time.Minute)
	cache := w.Flags().String("cache", "", "reset or salt, instead of what was chosen at the beginning")
	w.RunE = func(_ *cobra.Command, args []string) error {
		return w.run(args, "committed", func(ctx context.Context, c *client.Client, version int64) (wire.WeightUpdate, error) {
			return c.CommitWeightUpdate(ctx, *w.pool, version, wire.CommitWeights{Cache: *cache})
		})
	}
	return w.Command
}

func newWeightsCancel() *cobra.Command {
	w := newWeightsCommand("cancel", "Give an update up and let the engines go on with the old weights", 10*time.Minute)
	w.RunE = func(_ *cobra.Command, args []string) error {
		return w.run(args, "cancelled", func(ctx context.Context, c *client.Client, version int64) (wire.WeightUpdate, error) {
			return c.CancelWeightUpdate(ctx, *w.pool, version)
		})
	}
	return w.Command
}

func newWeightsStatus() *cobra.Command {
	cmd := &cobra.Command{Use: "status", Short: "Show the latest updates of a pool's weights", Args: cobra.NoArgs}
	r := addRemoteFlags(cmd)
	pool := cmd.Flags().String("pool", "default", "pool of the engines")
	limit := cmd.Flags().Int("limit", 5, "updates to show, newest first, at most 1,000")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := r.connect(cmd)
		if err != nil {
			return err
		}
		defer c.Close()
		policy, err := c.Policy(cmd.Context(), *pool)
		if err != nil {
			return refusal(err)
		}
		page, err := c.WeightUpdates(cmd.Context(), *pool, 0, *limit)
		if err != nil {
			return refusal(err)
		}
		fmt.Fprintf(cmd.OutOrStdout(), "pool %s is at policy version %d\n", *pool, policy.PolicyVersion)
		for i := range page.Updates {
			printWeights(cmd.OutOrStdout(), &page.Updates[i])
		}
		return nil
	}
	return cmd
}

func printWeights(out io.Writer, u *wire.WeightUpdate) {
	fmt.Fprintf(out, "version %d: %s, %s", u.PolicyVersion, u.State, u.Source)
	if u.Mode != "" {
		fmt.Fprintf(out, ", mode %s, cache %s, control %s", u.Mode, u.Cache, u.Control)
	}
	if u.SessionsOverBound > 0 {
		fmt.Fprintf(out, ", %d sessions over the staleness bound (%d ended)", u.SessionsOverBound, u.SessionsEnded)
	}
	if u.FailedStep != "" {
		fmt.Fprintf(out, "; step %s: %s", u.FailedStep, u.Problem)
	}
	fmt.Fprintln(out)
	for _, in := range u.Instances {
		fmt.Fprintf(out, "  %-20s %s", in.Instance, in.State)
		if in.Problem != "" {
			fmt.Fprintf(out, " (%s)", in.Problem)
		}
		fmt.Fprintln(out)
	}
}
