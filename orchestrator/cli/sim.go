package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"holdfast/orchestrator/trace"
	"holdfast/router/sim/experiment"
	"holdfast/router/sim/workload"
)

// simFlags are what every experiment takes.
type simFlags struct {
	json        bool
	seeds       int
	parallel    int
	hours       float64
	setups      []string
	policies    []string
	agentTraces []string
}

// textResult is what an experiment gives: JSON by its fields, or a table.
type textResult interface {
	WriteText(w io.Writer) error
}

// NewSimCommand is the simulator's command line. Results go to standard output,
// progress to standard error.
func NewSimCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "sim",
		Short: "Simulate rollout pools: compare routing policies, disturb them, measure what they are worth",
		Long: `Runs the service's own router and other policies in virtual time on modelled engines
and workloads (docs/simulation.md). Equal seeds give equal results. Times are simulated
seconds, lengths are tokens, rates are per simulated minute or second as named.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newSimPaper(),
		newSimExperiment("curve", "Gain against the trainer's outer concurrency, samples per instance",
			func(ctx context.Context, o experiment.Options) (textResult, error) { return experiment.Curve(ctx, o) }),
		newSimExperiment("stress", "Holdfast under disturbances: wrong labels, late and lost observations, lost instances, shifts",
			func(ctx context.Context, o experiment.Options) (textResult, error) { return experiment.Stress(ctx, o) }),
		newSimExperiment("open-loop", "Backlog when samples arrive by themselves at 80, 85 and 90 % of the bound",
			func(ctx context.Context, o experiment.Options) (textResult, error) {
				return experiment.OpenLoop(ctx, o)
			}),
		newSimExperiment("sensitivity", "Each parameter of the router core, changed one at a time, under drift",
			func(ctx context.Context, o experiment.Options) (textResult, error) {
				return experiment.Sensitivity(ctx, o)
			}),
		newSimExperiment("assumptions", "The order of policies with a cache 20 % smaller and larger, and with flat prefill cost",
			func(ctx context.Context, o experiment.Options) (textResult, error) {
				return experiment.Assumptions(ctx, o)
			}),
		newSimExperiment("offload", "Admission together with a KV tier in host memory",
			func(ctx context.Context, o experiment.Options) (textResult, error) { return experiment.Offload(ctx, o) }),
		newSimFigures())
	return cmd
}

func newSimPaper() *cobra.Command {
	var f simFlags
	var full, markdown bool
	var regimes []string
	var from string
	var iterations int
	all := []string{string(experiment.Stationary), string(experiment.Drifting), string(experiment.EndToEnd), string(experiment.Ungrouped)}
	cmd := &cobra.Command{
		Use:   "paper",
		Short: "Compare all policies on the paper's two configurations, the paper's figures beside",
		Long: `Compares every policy on both configurations: stationary lengths, lengths and tool gaps
that drift by 1.7 up and down, end to end over 50 training iterations with weight syncs,
and stationary without groups. Swept baselines get the ceiling that is best in hindsight
on the judged seeds.`,
		Args: cobra.NoArgs,
	}
	f.register(cmd)
	cmd.Flags().BoolVar(&full, "full", false, "ten paired seeds instead of three")
	cmd.Flags().StringSliceVar(&regimes, "regimes", all, "regimes to run")
	cmd.Flags().IntVar(&iterations, "iterations", 0, "training iterations of the end-to-end regime; 0 is 50")
	cmd.Flags().BoolVar(&markdown, "markdown", false, "print the tables of docs/simulation-results.md")
	cmd.Flags().StringVar(&from, "from", "", "print an earlier result, a file that --json wrote, instead of running")
	cmd.MarkFlagsMutuallyExclusive("json", "markdown")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if full {
			f.seeds = len(experiment.JudgingSeeds)
		}
		if iterations < 0 {
			return badInput(fmt.Errorf("--iterations %d: cannot be negative", iterations))
		}
		var chosen []experiment.Regime
		for _, r := range regimes {
			if !slices.Contains(all, r) {
				return badInput(fmt.Errorf("no regime is called %q: %s are", r, strings.Join(all, ", ")))
			}
			chosen = append(chosen, experiment.Regime(r))
		}
		return f.run(cmd, func(ctx context.Context, o experiment.Options) (textResult, error) {
			o.Iterations = iterations
			result, err := paperResult(ctx, o, chosen, from)
			if err != nil || !markdown {
				return result, err
			}
			return markdownResult{result}, nil
		})
	}
	return cmd
}

// paperResult runs the comparison, or reads an earlier one.
func paperResult(ctx context.Context, o experiment.Options, regimes []experiment.Regime, from string) (*experiment.PaperResult, error) {
	if from == "" {
		return experiment.Paper(ctx, o, regimes)
	}
	return readPaper(from)
}

func readPaper(from string) (*experiment.PaperResult, error) {
	text, err := os.ReadFile(from)
	if err != nil {
		return nil, badInput(fmt.Errorf("reading an earlier comparison: %w", err))
	}
	var result experiment.PaperResult
	if err := json.Unmarshal(text, &result); err != nil {
		return nil, badInput(fmt.Errorf("reading an earlier comparison from %s: %w", from, err))
	}
	return &result, nil
}

// markdownResult prints a comparison as the documentation shows it.
type markdownResult struct{ *experiment.PaperResult }

func (r markdownResult) WriteText(w io.Writer) error { return r.WriteMarkdown(w) }

func newSimExperiment(name, short string, run func(context.Context, experiment.Options) (textResult, error)) *cobra.Command {
	var f simFlags
	cmd := &cobra.Command{Use: name, Short: short, Args: cobra.NoArgs}
	f.register(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return f.run(cmd, run) }
	return cmd
}

func newSimFigures() *cobra.Command {
	var f simFlags
	var out, from string
	cmd := &cobra.Command{
		Use:   "figures",
		Short: "Draw the charts of docs/simulation.md anew, as SVG",
		Args:  cobra.NoArgs,
	}
	f.register(cmd)
	cmd.Flags().StringVar(&out, "out", filepath.Join("docs", "figures"), "folder to write to")
	cmd.Flags().StringVar(&from, "from", "", "take the gains from an earlier result of \"sim paper --json\", a file")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o, err := f.options(cmd)
		if err != nil {
			return err
		}
		if from != "" {
			if o.Earlier, err = readPaper(from); err != nil {
				return err
			}
		}
		figures, err := experiment.Figures(cmd.Context(), o)
		if err != nil {
			return err
		}
		if err := os.MkdirAll(out, 0o755); err != nil {
			return fmt.Errorf("making the folder for figures: %w", err)
		}
		for _, figure := range figures {
			path := filepath.Join(out, figure.Name+".svg")
			if err := os.WriteFile(path, figure.SVG, 0o644); err != nil {
				return fmt.Errorf("writing a figure: %w", err)
			}
			fmt.Fprintln(cmd.OutOrStdout(), path)
		}
		return nil
	}
	return cmd
}

func (f *simFlags) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.BoolVar(&f.json, "json", false, "print one JSON object instead of tables")
	flags.IntVar(&f.seeds, "seeds", 3, fmt.Sprintf("number of paired seeds, 1 to %d", len(experiment.JudgingSeeds)))
	flags.IntVar(&f.parallel, "parallel", 0, "runs at a time; 0 is one per processor")
	flags.Float64Var(&f.hours, "hours", 0, "simulated hours to measure after the warm-up; 0 is each experiment's own")
	flags.StringSliceVar(&f.setups, "config", nil, "configurations to run: qwen, step (default both)")
	flags.StringSliceVar(&f.policies, "policies", nil, "policies to compare, where an experiment compares (default all)")
	flags.StringSliceVar(&f.agentTraces, "agent-traces", nil,
		"recorded sessions instead of drawn ones for the Agent class: shipped traces by name ("+strings.Join(trace.Shipped(), ", ")+") or files made by \"trace import\"")
}

func (f *simFlags) options(cmd *cobra.Command) (experiment.Options, error) {
	if f.seeds < 1 || f.seeds > len(experiment.JudgingSeeds) {
		return experiment.Options{}, badInput(fmt.Errorf("--seeds %d: 1 to %d are there", f.seeds, len(experiment.JudgingSeeds)))
	}
	if f.hours < 0 || f.parallel < 0 {
		return experiment.Options{}, badInput(fmt.Errorf("--hours %v, --parallel %d: neither can be negative", f.hours, f.parallel))
	}
	for _, name := range f.setups {
		if name != "qwen" && name != "step" {
			return experiment.Options{}, badInput(fmt.Errorf("--config %s: qwen and step are there", name))
		}
	}
	agents, err := recordedAgents(f.agentTraces)
	if err != nil {
		return experiment.Options{}, badInput(err)
	}
	return experiment.Options{
		Seeds: experiment.JudgingSeeds[:f.seeds], Parallel: f.parallel, Progress: cmd.ErrOrStderr(),
		Setups: f.setups, Policies: f.policies, MeasureSeconds: f.hours * 3600, Agents: agents,
	}, nil
}

func (f *simFlags) run(cmd *cobra.Command, run func(context.Context, experiment.Options) (textResult, error)) error {
	o, err := f.options(cmd)
	if err != nil {
		return err
	}
	result, err := run(cmd.Context(), o)
	if err != nil {
		return err
	}
	if !f.json {
		return result.WriteText(cmd.OutOrStdout())
	}
	encoder := json.NewEncoder(cmd.OutOrStdout())
	encoder.SetIndent("", " ")
	return encoder.Encode(result)
}

// recordedSessions is how many sessions are dealt from the traces, round and round.
const recordedSessions = 1024

// recordedAgents turns traces into the simulator's sessions, lengths that a trace
// does not tell drawn as package trace documents.
func recordedAgents(names []string) ([]workload.Session, error) {
	if len(names) == 0 {
		return nil, nil
	}
	traces := make([]trace.Trace, len(names))
	for i, name := range names {
		var err error
		if slices.Contains(trace.Shipped(), name) {
			traces[i], err = trace.LoadShipped(name)
		} else {
			traces[i], err = trace.Load(name)
		}
		if err != nil {
			return nil, err
		}
	}
	specs, err := trace.ComposeFrom(trace.Composition{
		Seed: 1, Agent: trace.ClassMix{Sessions: recordedSessions}, AgentTraces: names, MinAgentTurns: 2,
		AgentSystemTokens: workload.PaperAgent(workload.GapsQwen).SharedTokens,
		MaxContextTokens:  workload.PaperContextTokens, TimeScale: 1,
	}, traces)
	if err != nil {
		return nil, err
	}
	sessions := make([]workload.Session, len(specs))
	for i := range specs {
		prompt := specs[i].Prompt.Synthetic
		s := workload.Session{PromptTokens: prompt.Tokens, SharedTokens: prompt.SharedTokens}
		for _, turn := range specs[i].Environment.Turns {
			s.Turns = append(s.Turns, workload.Turn{OutputTokens: turn.OutputTokens, AppendTokens: turn.AppendTokens, GapSeconds: turn.GapSeconds})
		}
		sessions[i] = s
	}
	return sessions, nil
}
