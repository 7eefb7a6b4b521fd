// Command holdfast-temporal is the Temporal server that `holdfast dev` starts
// as a child, so that a developer needs no Temporal cluster of their own.
//
// It is a program and a Go module of its own because go.temporal.io/server
// brings some 450 modules and minutes of compilation with it: holdfast itself
// stays small, builds quickly and may use a newer Temporal SDK than the server
// compiles with.
//
// All four Temporal services run in this one process, on loopback ports chosen
// at start, with their state in two databases of a Postgres that somebody else
// runs. Nothing is kept in memory only: after a kill -9 the next start carries
// on with every workflow.
//
// Non-goals: production use, several hosts, TLS, authentication, archival. A
// deployment points `holdfast serve` at a real Temporal cluster instead.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"go.temporal.io/server/common/log"
)

// stopLimitSeconds bounds a graceful stop. All state is in Postgres, so giving
// up on a stop loses nothing; the bound only keeps the promise to end in time.
const stopLimitSeconds = 8

func main() {
	settings, err := parseSettings(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "holdfast-temporal: %v\n", err)
		os.Exit(2)
	}
	if err := run(settings); err != nil {
		fmt.Fprintf(os.Stderr, "holdfast-temporal: %v\n", err)
		os.Exit(1)
	}
}

// run serves until a signal arrives or the parent closes our standard input.
func run(settings settings) error {
	ctx, stopSignals := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stopSignals()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if isPipe(os.Stdin) {
		go func() {
			waitForEOF(os.Stdin)
			cancel()
		}()
	}

	logger := log.NewZapLogger(log.BuildZapLogger(log.Config{Level: settings.logLevel, Format: "console"}))
	if err := prepareDatabases(ctx, settings.postgres, logger); err != nil {
		return err
	}
	// The replies of a graceful stop still have to become durable, so what
	// serves them outlives ctx.
	serving, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopServing()
	server, frontendAddress, err := newServer(serving, settings, logger)
	if err != nil {
		return err
	}
	if err := server.Start(); err != nil {
		return fmt.Errorf("starting the Temporal services: %w", err)
	}
	if err := ensureNamespace(ctx, frontendAddress, settings.namespace, settings.retention); err != nil {
		stopWithin(stopLimitSeconds*time.Second, server.Stop)
		if ctx.Err() != nil {
			return nil // asked to stop while starting: not a failure
		}
		return err
	}
	if settings.addressFile != "" {
		if err := writeFileAtomically(settings.addressFile, frontendAddress+"\n"); err != nil {
			stopWithin(stopLimitSeconds*time.Second, server.Stop)
			return fmt.Errorf("writing the address file: %w", err)
		}
	}
	fmt.Printf("Temporal serves namespace %s at %s\n", settings.namespace, frontendAddress)

	<-ctx.Done()
	// A second Ctrl-C ends the process at once.
	stopSignals()
	stopWithin(stopLimitSeconds*time.Second, server.Stop)
	return nil
}

// stopWithin runs stop, and ends the process when stop takes longer than the
// limit: whatever hangs then hangs on something that will not come back, such
// as a Postgres that went away first.
func stopWithin(limit time.Duration, stop func() error) {
	done := make(chan error, 1)
	go func() { done <- stop() }()
	select {
	case err := <-done:
		if err != nil {
			fmt.Fprintf(os.Stderr, "holdfast-temporal: stopping: %v\n", err)
		}
	case <-time.After(limit):
		fmt.Fprintf(os.Stderr, "holdfast-temporal: not stopped after %s, ending anyway (all state is in Postgres)\n", limit)
		os.Exit(3)
	}
}
