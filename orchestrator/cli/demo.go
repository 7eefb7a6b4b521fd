package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/orchestrator/config"
	"holdfast/orchestrator/trace"
)

// The demo's engines: small enough that a third of the batch waits for a place.
const (
	demoRunName        = "demo"
	demoConsumer       = "demo-trainer"
	demoCapacityTokens = 400_000
	demoPage           = 32
)

// errDemoDone ends the process tree when the demo is over.
var errDemoDone = errors.New("the demo is over")

func newDemo() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run a mixed batch on two simulated engines and print a summary",
		Long: `Starts what "holdfast dev" starts, submits 60 agent sessions with lengths from recorded
traces, 40 RLVR and 22 RLHF sessions, consumes and acknowledges the samples as a trainer
would, and prints a summary whose last line is one JSON object. Stopped in the middle, the
next start finds the run and finishes it.`,
		Args: cobra.NoArgs,
	}
	flags := addConfigFlags(cmd, demoConfig(), poolFlags, routerFlags, limitFlags, devFlags, logFlags)
	seed := cmd.Flags().Uint64("seed", 1, "seed of the batch")
	faults := cmd.Flags().Bool("faults", false, "crash an engine, lose KV events, stall a metrics page and update the weights while the batch runs, on three engines")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := flags.load((*config.Config).ValidateDev)
		if err != nil {
			return err
		}
		if *faults {
			withFaults(cmd, &cfg)
		}
		log, closeLog, err := demoLogger(cfg)
		if err != nil {
			return err
		}
		defer closeLog()
		d := demo{cfg: cfg, seed: *seed, faults: *faults, out: cmd.OutOrStdout()}
		err = runDev(cmd.Context(), cfg, log, d.out, d.run)
		switch {
		case errors.Is(err, errDemoDone):
			return json.NewEncoder(d.out).Encode(d.result)
		case cmd.Context().Err() != nil:
			return errors.New("interrupted; the next start goes on where this one stopped")
		}
		return err
	}
	return cmd
}

// demoConfig is what the demo runs with where nobody says otherwise.
func demoConfig() config.Config {
	cfg := config.Default()
	cfg.Listen = "127.0.0.1:0"
	cfg.Dev.DataDir = ".holdfast/demo"
	cfg.Dev.TimeScale = trace.DemoTimeScale
	cfg.Dev.EngineCapacityTokens = demoCapacityTokens
	return cfg
}

// demoLogger logs to a file beside the data, so that the display stays readable.
func demoLogger(cfg config.Config) (*slog.Logger, func(), error) {
	if err := os.MkdirAll(cfg.Dev.DataDir, 0o755); err != nil {
		return nil, nil, fmt.Errorf("creating the data directory: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(cfg.Dev.DataDir, "holdfast.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, nil, fmt.Errorf("opening the log: %w", err)
	}
	return slog.New(slog.NewTextHandler(f, &slog.HandlerOptions{Level: slog.LevelInfo})), func() { f.Close() }, nil
}

// demo is one run of the demo against the service that this process started.
type demo struct {
	cfg     config.Config
	seed    uint64
	faults  bool
	out     io.Writer
	summary Summary
	// result is what the last line says.
	result any
}

// run submits or finds the batch and sees it through to its last sample.
func (d *demo) run(ctx context.Context, address string) error {
	c, err := client.New(client.Config{BaseURL: "http://" + address})
	if err != nil {
		return err
	}
	defer c.Close()
	run, err := d.openRun(ctx, c)
	if err != nil {
		return err
	}
	fmt.Fprintf(d.out, "API: http://%s   run %s\n\n", address, run)
	group, working := errgroup.WithContext(ctx)
	var disturbed *disturbance
	if d.faults {
		disturbed = &disturbance{client: c, pool: d.cfg.Pool, run: run, out: d.out, began: time.Now()}
		group.Go(func() error { return disturbed.inject(working) })
	}
	group.Go(func() error { return d.consume(working, c, run) })
	group.Go(func() error {
		return follow(working, c, run, time.Second, newProgress(d.out), func(b wire.Backlog) bool { return b.Total.Backlog == 0 })
	})
	if err := group.Wait(); err != nil {
		return err
	}
	samples, err := d.report(ctx, c, run)
	if err != nil {
		return err
	}
	d.result = d.summary
	if disturbed != nil {
		cost, err := disturbed.cost(ctx, samples)
		if err != nil {
			return err
		}
		cost.Summary = d.summary
		cost.print(d.out)
		d.result = cost
	}
	d.pointOn()
	return errDemoDone
}

// openRun goes on with an unfinished demo, or ends the last one and opens the next.
func (d *demo) openRun(ctx context.Context, c *client.Client) (uuid.UUID, error) {
	active, err := c.Runs(ctx, client.RunsQuery{Pool: d.cfg.Pool, State: "active"})
	if err != nil {
		return uuid.Nil, err
	}
	for _, run := range active.Runs {
		if run.Name == demoRunName {
			backlog, err := c.Backlog(ctx, run.ID)
			if err != nil {
				return uuid.Nil, err
			}
			if backlog.Total.Released == 0 || backlog.Total.Backlog > 0 {
				fmt.Fprintf(d.out, "going on with an unfinished run: %d of %d samples are done\n", backlog.Total.Ended, backlog.Total.Released)
				return run.ID, d.submit(ctx, c, run.ID)
			}
		}
		if _, err := c.EndRun(ctx, run.ID); err != nil {
			return uuid.Nil, err
		}
	}
	run, err := c.CreateRun(ctx, demoRun(demoRunName, d.cfg.Pool))
	if err != nil {
		return uuid.Nil, err
	}
	return run.ID, d.submit(ctx, c, run.ID)
}

// submit releases the batch. Its key is fixed, so that doing it again after an
// interruption releases nothing twice.
func (d *demo) submit(ctx context.Context, c *client.Client, run uuid.UUID) error {
	specs, err := trace.DemoBatch(d.seed)
	if err != nil {
		return err
	}
	batch, err := c.SubmitBatch(ctx, run, "demo-batch", client.NewBatch{Tasks: client.Tasks(specs)})
	if err != nil {
		return err
	}
	if !batch.Replayed {
		fmt.Fprintf(d.out, "submitted %d tasks, %d sessions\n", batch.Tasks, batch.Sessions)
	}
	return nil
}

// consume reads and acknowledges samples with their tokens, as a trainer does,
// until the run has no backlog left.
func (d *demo) consume(ctx context.Context, c *client.Client, run uuid.UUID) error {
	after := ""
	for {
		page, err := c.Samples(ctx, run, client.SamplesQuery{Consumer: demoConsumer, After: after, Limit: demoPage, Wait: 2 * time.Second})
		if err != nil {
			return err
		}
		if len(page.Samples) > 0 {
			after = page.Next
			if _, err := c.Ack(ctx, run, demoConsumer, after); err != nil {
				return err
			}
			continue
		}
		backlog, err := c.Backlog(ctx, run)
		if err != nil {
			return err
		}
		if backlog.Total.Backlog == 0 && !page.More {
			return nil
		}
	}
}

// report reads all samples once more, without their tokens, and sums them up.
func (d *demo) report(ctx context.Context, c *client.Client, run uuid.UUID) ([]wire.Sample, error) {
	backlog, err := c.Backlog(ctx, run)
	if err != nil {
		return nil, err
	}
	released := map[string]int64{}
	for _, class := range backlog.Classes {
		released[class.Class] = class.Released
	}
	var samples []wire.Sample
	for after := ""; ; {
		page, err := c.Samples(ctx, run, client.SamplesQuery{After: after, Limit: 1_000, Encoding: "none"})
		if err != nil {
			return nil, err
		}
		samples = append(samples, page.Samples...)
		if !page.More {
			break
		}
		after = page.Next
	}
	d.summary = summarise(released, samples)
	d.printSamples(samples)
	return samples, nil
}

// pointOn says where to look next.
func (d *demo) pointOn() {
	fmt.Fprintf(d.out, `
where to look next
  bin/holdfast dev                 a service of your own; then: bin/holdfast submit --demo, bin/holdfast watch
  bin/holdfast sim paper           what each admission policy is worth, in simulation
  %-32s the service's log of this run
  docs/architecture.md             how it works, on one page

`, filepath.Join(d.cfg.Dev.DataDir, "holdfast.log"))
}

// printSamples shows the figures per class.
func (d *demo) printSamples(samples []wire.Sample) {
	classes := map[string][]wire.Sample{}
	for _, s := range samples {
		classes[s.Class] = append(classes[s.Class], s)
	}
	fmt.Fprintf(d.out, "\n%-8s %9s %7s %8s %14s %14s %12s %12s\n", "class", "completed", "turns", "held", "latency p50 s", "latency p95 s", "prefix hit", "output tok")
	for _, class := range sortedKeys(classes) {
		list := classes[class]
		s := summarise(map[string]int64{class: int64(len(list))}, list)
		latencies := make([]float64, len(list))
		var output int64
		for i := range list {
			latencies[i] = list[i].EndedAt.Sub(list[i].ReleasedAt).Seconds()
			output += list[i].Usage.OutputTokens
		}
		fmt.Fprintf(d.out, "%-8s %9d %7d %8d %14.1f %14.1f %11.1f%% %12s\n", class, s.Completed, s.Turns, s.Held,
			quantile(latencies, 0.5), quantile(latencies, 0.95), 100*s.PrefixHit, thousands(output))
	}
}
