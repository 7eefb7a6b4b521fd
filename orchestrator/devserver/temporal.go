package devserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// portAttempts is how often Temporal is started anew when another process took
// one of the ports between its choice and its use.
const portAttempts = 3

// temporalServer is a running holdfast-temporal.
type temporalServer struct {
	child   *child
	address string
}

// startTemporal starts the server against the given Postgres and returns when
// its frontend serves.
func startTemporal(ctx context.Context, config Config, binary, postgresURL string) (*temporalServer, error) {
	config.Progress("starting Temporal")
	logPath := filepath.Join(config.DataDir, "temporal.log")
	if err := rotateLog(logPath); err != nil {
		return nil, fmt.Errorf("rotating the log of Temporal: %w", err)
	}
	var err error
	for range portAttempts {
		var server *temporalServer
		if server, err = tryTemporal(ctx, config, binary, postgresURL, logPath); err == nil {
			return server, nil
		}
		if !strings.Contains(err.Error(), "address already in use") {
			break
		}
	}
	return nil, err
}

func tryTemporal(ctx context.Context, config Config, binary, postgresURL, logPath string) (*temporalServer, error) {
	addressPath := filepath.Join(config.DataDir, "temporal.address")
	if err := os.Remove(addressPath); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("removing the address of an earlier Temporal: %w", err)
	}
	ours, err := ourAccount()
	if err != nil {
		return nil, err
	}
	child, err := startChild(childSpec{
		name: "Temporal",
		path: binary,
		args: []string{
			"--postgres-url", postgresURL,
			"--address-file", addressPath,
			"--namespace", config.Namespace,
			"--retention-hours", strconv.Itoa(config.RetentionHours),
			"--log-level", config.TemporalLogLevel,
			// Its two conditions are ours to keep: see serverArguments for the
			// one, and Servers.watch and the death signals for the other.
			"--batch-commits",
		},
		dir:     config.DataDir,
		env:     serverEnvironment(),
		account: ours,
		logPath: logPath,
		// Its state is in Postgres, so it needs no time to put things away.
		deathSignal: syscall.SIGKILL,
		holdStdin:   true,
	})
	if err != nil {
		return nil, err
	}
	server := &temporalServer{child: child}
	if server.address, err = waitForAddress(ctx, child, addressPath); err != nil {
		return nil, errors.Join(err, server.stop(context.WithoutCancel(ctx)))
	}
	return server, nil
}

// waitForAddress returns the content of the address file once it is there.
func waitForAddress(ctx context.Context, child *child, path string) (string, error) {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		address, err := os.ReadFile(path)
		if err == nil {
			return strings.TrimSpace(string(address)), nil
		}
		if !errors.Is(err, os.ErrNotExist) {
			return "", fmt.Errorf("reading the address of Temporal: %w", err)
		}
		select {
		case <-child.ended:
			return "", child.deathError()
		case <-ctx.Done():
			return "", fmt.Errorf("waiting for Temporal to serve: %w; the end of %s:\n%s", ctx.Err(), child.logPath, logTail(child.logPath))
		case <-tick.C:
		}
	}
}

func (t *temporalServer) stop(ctx context.Context) error {
	return t.child.stop(ctx, stopStep{syscall.SIGTERM, temporalStopSeconds})
}
