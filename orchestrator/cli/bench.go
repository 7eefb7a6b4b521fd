package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/orchestrator/config"
	"holdfast/workflows/task"
)

// errBenchDone ends the process tree when everything is measured.
var errBenchDone = errors.New("everything is measured")

// benchResult is the last line of the output.
type benchResult struct {
	Single  turnCost      `json:"one_session"`
	Many    turnCost      `json:"sessions_32"`
	WithGap turnCost      `json:"sessions_32_with_gap_timer"`
	Held    heldCost      `json:"held"`
	Harness []harnessCost `json:"harness"`
	Disk    diskCost      `json:"disk"`
}

// turnCost is what orchestration adds to a turn: the time from one turn's commit
// to the next one's, less the model call itself.
type turnCost struct {
	Sessions       int     `json:"sessions"`
	Turns          int     `json:"turns"`
	AddedP50MS     float64 `json:"added_p50_ms"`
	AddedP99MS     float64 `json:"added_p99_ms"`
	TurnsPerSecond float64 `json:"turns_per_s"`
	// CPU per turn by process, simulated engines excluded, in milliseconds.
	CPUMS         float64 `json:"cpu_ms_per_turn"`
	HoldfastCPUMS float64 `json:"holdfast_cpu_ms_per_turn"`
	TemporalCPUMS float64 `json:"temporal_cpu_ms_per_turn"`
	PostgresCPUMS float64 `json:"postgres_cpu_ms_per_turn"`
}

// heldCost is what sessions cost while they are held. Memory is resident set size
// of holdfast and the Temporal server together; Postgres is apart.
type heldCost struct {
	Sessions         int     `json:"sessions"`
	OpenedInSeconds  float64 `json:"opened_in_s"`
	BeforeMiB        float64 `json:"before_mib"`
	HeldMiB          float64 `json:"held_mib"`
	KiBPerSession    float64 `json:"kib_per_session"`
	ReleasedInSecond float64 `json:"released_and_ended_in_s"`
}

func newBench() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure what orchestration costs on this machine",
		Long: `Runs the service as "holdfast dev" does, with engines in a process of their own that
answer at once, and measures: time added to a turn at one session and at 32, turns a
second, CPU a turn by process, what a harness's endpoint adds to a call, and memory of held
sessions. Takes about six minutes.
Nothing else should be running. The last line is one JSON object.`,
		Args: cobra.NoArgs,
	}
	held := cmd.Flags().Int("held", 2_000, "sessions to hold at once")
	flags := addConfigFlags(cmd, benchConfig(), routerFlags, limitFlags, logFlags)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *held < 1 || *held > 20_000 {
			return badInput(fmt.Errorf("--held: %d is not between 1 and 20,000", *held))
		}
		cfg, err := flags.load((*config.Config).ValidateDev)
		if err != nil {
			return err
		}
		if cfg.Dev.DataDir, err = os.MkdirTemp("", "holdfast-bench-"); err != nil {
			return fmt.Errorf("creating a data directory: %w", err)
		}
		defer os.RemoveAll(cfg.Dev.DataDir)
		if err := os.Chmod(cfg.Dev.DataDir, 0o755); err != nil {
			return fmt.Errorf("opening the data directory: %w", err)
		}
		b := bench{out: cmd.OutOrStdout(), pool: cfg.Pool, dataDir: cfg.Dev.DataDir, held: *held}
		engine, url, err := startEngineProcess(cmd.Context())
		if err != nil {
			return err
		}
		defer engine()
		b.engineURL = url
		err = runDev(cmd.Context(), cfg, slog.New(slog.DiscardHandler), b.out, b.run)
		if errors.Is(err, errBenchDone) {
			return json.NewEncoder(b.out).Encode(b.result)
		}
		return err
	}
	return cmd
}

func benchConfig() config.Config {
	cfg := config.Default()
	cfg.Listen = "127.0.0.1:0"
	cfg.Dev.Engines = 0
	cfg.Dev.DataDir = "a temporary directory"
	return cfg
}

// startEngineProcess runs an engine that answers at once in a process of its own,
// so that its CPU is not counted as ours.
func startEngineProcess(ctx context.Context) (stop func(), url string, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, "", fmt.Errorf("finding our own binary: %w", err)
	}
	cmd := exec.CommandContext(ctx, self, "engine", "--time-scale", "10000", "--engine-capacity-tokens", "50000000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, "", fmt.Errorf("starting an engine: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, "", fmt.Errorf("starting an engine: %w", err)
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	url, ok := strings.CutPrefix(strings.TrimSpace(line), "engine: ")
	if err != nil || !ok {
		return nil, "", fmt.Errorf("the engine printed %q: %w", line, err)
	}
	return func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	}, url, nil
}

// bench is one measurement.
type bench struct {
	out       io.Writer
	pool      string
	engineURL string
	// dataDir is where Postgres has its files.
	dataDir string
	held    int
	result  benchResult
}

func (b *bench) run(ctx context.Context, address string) error {
	c, err := client.New(client.Config{BaseURL: "http://" + address})
	if err != nil {
		return err
	}
	defer c.Close()
	run, err := c.CreateRun(ctx, wire.NewRun{Name: "bench", Pool: b.pool, Contract: wire.NewContract{
		Classes: []wire.ClassShare{{Class: "agent", Share: 1}}, MaxConcurrency: 100_000,
	}})
	if err != nil {
		return err
	}
	if _, err := c.RegisterInstance(ctx, b.pool, wire.NewInstance{ID: "bench", URL: b.engineURL, Kind: engineKindSimulated}); err != nil {
		return err
	}
	fmt.Fprintf(b.out, "\n%-28s %8s %14s %14s %10s %12s   %s\n", "turns of 8 tokens", "turns", "added p50 ms", "added p99 ms", "turns/s", "CPU ms/turn", "(holdfast + temporal + postgres)")
	for _, step := range []struct {
		name            string
		sessions, turns int
		gapSeconds      float64
		into            *turnCost
	}{
		{"warm-up", 8, 20, 0, nil},
		{"1 session", 1, 200, 0, &b.result.Single},
		{"32 sessions", 32, 80, 0, &b.result.Many},
		{"32 sessions, gap timers", 32, 40, 0.001, &b.result.WithGap},
	} {
		cost, err := b.turns(ctx, c, run.ID, step.name, step.sessions, step.turns, step.gapSeconds)
		if err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
		if step.into != nil {
			*step.into = cost
		}
		fmt.Fprintf(b.out, "%-28s %8d %14.1f %14.1f %10.1f %12.2f   (%.2f + %.2f + %.2f)\n", step.name, cost.Turns, cost.AddedP50MS, cost.AddedP99MS,
			cost.TurnsPerSecond, cost.CPUMS, cost.HoldfastCPUMS, cost.TemporalCPUMS, cost.PostgresCPUMS)
	}
	if b.result.Disk, err = measureDisk(ctx, b.dataDir); err != nil {
		return err
	}
	fmt.Fprintf(b.out, "\na flush of 8 KiB to the disk, once in every commit: p50 %.2f ms, after a pause of %s %.2f ms\n", b.result.Disk.FlushP50MS, diskPause, b.result.Disk.AfterPauseP50MS)
	if err := b.harness(ctx, address, run.ID); err != nil {
		return fmt.Errorf("harness: %w", err)
	}
	if err := b.awaitDone(ctx, c, run.ID); err != nil {
		return err
	}
	if err := b.hold(ctx, c, run.ID); err != nil {
		return fmt.Errorf("held sessions: %w", err)
	}
	return errBenchDone
}

// turns runs sessions of equal length side by side and sums up what they cost.
func (b *bench) turns(ctx context.Context, c *client.Client, run uuid.UUID, key string, sessions, turns int, gapSeconds float64) (turnCost, error) {
	before, began := readProcesses(), time.Now()
	batch, err := c.SubmitBatch(ctx, run, key, client.NewBatch{Tasks: client.Tasks(benchTasks(sessions, turns, gapSeconds))})
	if err != nil {
		return turnCost{}, err
	}
	if err := b.awaitDone(ctx, c, run); err != nil {
		return turnCost{}, err
	}
	wall, after := time.Since(began), readProcesses()
	cost := turnCost{Sessions: sessions, Turns: sessions * turns}
	cost.TurnsPerSecond = round(float64(cost.Turns)/wall.Seconds(), 1)
	perTurn := func(name string) float64 {
		return round((after[name].cpuSeconds-before[name].cpuSeconds)*1e3/float64(cost.Turns), 2)
	}
	cost.HoldfastCPUMS, cost.TemporalCPUMS, cost.PostgresCPUMS = perTurn(processSelf), perTurn(processTemporal), perTurn(processPostgres)
	cost.CPUMS = round(cost.HoldfastCPUMS+cost.TemporalCPUMS+cost.PostgresCPUMS, 2)
	added, err := b.added(ctx, c, run, batch.ID, gapSeconds)
	if err != nil {
		return turnCost{}, err
	}
	cost.AddedP50MS, cost.AddedP99MS = round(quantile(added, 0.5), 2), round(quantile(added, 0.99), 2)
	return cost, nil
}

// added lists, for every turn but a session's first, the milliseconds between the
// commit before and its own that were not the model call or the tool gap.
func (b *bench) added(ctx context.Context, c *client.Client, run, batch uuid.UUID, gapSeconds float64) ([]float64, error) {
	var added []float64
	page, err := c.Sessions(ctx, run, client.SessionsQuery{Batch: batch, Limit: 1_000})
	if err != nil {
		return nil, err
	}
	for _, session := range page.Sessions {
		turns, err := c.Turns(ctx, session.ID, -1, 1_000)
		if err != nil {
			return nil, err
		}
		for i := 1; i < len(turns.Turns); i++ {
			between := turns.Turns[i].CommittedAt.Sub(turns.Turns[i-1].CommittedAt).Seconds()
			added = append(added, 1e3*(between-turns.Turns[i].TotalSeconds-gapSeconds))
		}
	}
	return added, nil
}

// hold takes the engine out of new admissions, releases sessions, weighs them
// once all are held, and lets them go.
func (b *bench) hold(ctx context.Context, c *client.Client, run uuid.UUID) error {
	if err := c.DrainInstance(ctx, b.pool, "bench", true); err != nil {
		return err
	}
	before, began := readProcesses(), time.Now()
	if _, err := c.SubmitBatch(ctx, run, "held", client.NewBatch{Tasks: client.Tasks(benchTasks(b.held, 1, 0))}); err != nil {
		return err
	}
	if err := b.await(ctx, c, run, func(total wire.ClassBacklog) bool { return total.Held >= int64(b.held) }); err != nil {
		return err
	}
	opened, during := time.Since(began), readProcesses()
	began = time.Now()
	if err := c.DrainInstance(ctx, b.pool, "bench", false); err != nil {
		return err
	}
	if err := b.awaitDone(ctx, c, run); err != nil {
		return err
	}
	memory := func(p map[string]processUse) float64 {
		return p[processSelf].residentMiB + p[processTemporal].residentMiB
	}
	b.result.Held = heldCost{
		Sessions: b.held, OpenedInSeconds: round(opened.Seconds(), 1), BeforeMiB: round(memory(before), 1), HeldMiB: round(memory(during), 1),
		KiBPerSession:    round((memory(during)-memory(before))*1024/float64(b.held), 1),
		ReleasedInSecond: round(time.Since(began).Seconds(), 1),
	}
	h := b.result.Held
	fmt.Fprintf(b.out, "\n%d sessions held after %.1f s: %.0f MiB in holdfast and Temporal (%.0f MiB before; %.0f KiB a session); all released and ended in %.1f s\n\n",
		h.Sessions, h.OpenedInSeconds, h.HeldMiB, h.BeforeMiB, h.KiBPerSession, h.ReleasedInSecond)
	return nil
}

func benchTasks(sessions, turns int, gapSeconds float64) []task.Spec {
	specs := make([]task.Spec, sessions)
	for i := range specs {
		specs[i] = task.Spec{
			Class: "agent", Prompt: task.Prompt{Synthetic: &task.Synthetic{Tokens: 512, Seed: uint64(i + 1)}},
			Environment: &task.Environment{Kind: task.EnvironmentReplay},
		}
		for range turns {
			specs[i].Environment.Turns = append(specs[i].Environment.Turns, task.ReplayTurn{OutputTokens: 8, AppendTokens: 8, GapSeconds: gapSeconds})
		}
	}
	return specs
}

func (b *bench) awaitDone(ctx context.Context, c *client.Client, run uuid.UUID) error {
	return b.await(ctx, c, run, func(total wire.ClassBacklog) bool { return total.Backlog == 0 })
}

// await looks at the backlog now and then, rarely enough not to be measured.
func (b *bench) await(ctx context.Context, c *client.Client, run uuid.UUID, enough func(wire.ClassBacklog) bool) error {
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		backlog, err := c.Backlog(ctx, run)
		if err != nil {
			return err
		}
		if enough(backlog.Total) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}
