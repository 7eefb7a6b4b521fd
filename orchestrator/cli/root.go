// Package cli is the command line of Holdfast: it reads the configuration, wires
// the rooms together and shows a person what happens.
//
// It holds no logic of its own beyond wiring and display; only it and main import
// everything.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"

	"holdfast/orchestrator/config"
)

// Exit codes of the binary.
const (
	exitOK       = 0
	exitFailed   = 1
	exitBadInput = 2
)

// inputError is a mistake in what the user gave: exit code 2 and one line.
type inputError struct{ err error }

func (e *inputError) Error() string { return e.err.Error() }
func (e *inputError) Unwrap() error { return e.err }

func badInput(err error) error {
	if err == nil {
		return nil
	}
	return &inputError{err}
}

// Main runs the command line and returns the exit code.
func Main(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	began := false
	root := newRoot(&began)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	fmt.Fprintln(stderr, "holdfast:", err)
	var input *inputError
	var field *config.FieldError
	// What stops a command before it begins is a mistake in its flags or arguments.
	if !began || errors.As(err, &input) || errors.As(err, &field) {
		return exitBadInput
	}
	return exitFailed
}

// newRoot makes the command tree; began is set once a command's own work begins.
func newRoot(began *bool) *cobra.Command {
	root := &cobra.Command{
		Use:   "holdfast",
		Short: "Orchestrates RL rollouts on a shared pool of LLM inference engines",
		Long: `Holdfast stands between RL trainers and a shared pool of inference engines. Every
rollout is a durable workflow; a router decides which session is admitted to which
engine and which one is held, without changing the trainer's task mixture.

Start with "holdfast demo" to see it work, or "holdfast dev" for a service of your
own with nothing to set up.`,
		Version:       version(),
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w (see %q)", err, cmd.CommandPath()+" --help")
	})
	root.AddCommand(newDev(), newDemo(), newServe(), newMigrate(), newSubmit(), newWatch(), newAudit(), newExport(), newPrune(), newWeights(), newEngine(), newBench(), newTrace(), NewSimCommand(), newConfig())
	markBeginning(root, began)
	return root
}

// markBeginning lets every command say when its own work begins.
func markBeginning(cmd *cobra.Command, began *bool) {
	if run := cmd.RunE; run != nil {
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			*began = true
			return run(cmd, args)
		}
	}
	for _, sub := range cmd.Commands() {
		markBeginning(sub, began)
	}
}

// version is the module version or the commit that the binary was built from.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, setting := range info.Settings {
		if setting.Key == "vcs.revision" && len(setting.Value) >= 12 {
			return setting.Value[:12]
		}
	}
	return info.Main.Version
}

// newLogger logs to stderr as configured.
func newLogger(cfg config.Log) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(cfg.Level)); err != nil {
		return nil, &config.FieldError{Field: "log.level", Problem: fmt.Sprintf("%q is none of debug, info, warn, error", cfg.Level)}
	}
	options := &slog.HandlerOptions{Level: level}
	if cfg.Format == "json" {
		return slog.New(slog.NewJSONHandler(os.Stderr, options)), nil
	}
	return slog.New(slog.NewTextHandler(os.Stderr, options)), nil
}
