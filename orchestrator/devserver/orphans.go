package devserver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// endOrphans waits for the servers of an earlier run that work in the data
// directory to end. When that run was killed the kernel told them to, and they
// are on their way; those that are not are killed. We hold the lock of the data
// directory, so nobody else can have a use for them.
func endOrphans(ctx context.Context, dataDir string, progress func(string)) error {
	orphans := postgresIn(dataDir)
	if len(orphans) == 0 {
		return nil
	}
	progress(fmt.Sprintf("waiting for the Postgres of an earlier run to end (%d processes)", len(orphans)))
	if postmaster := postmasterOf(dataDir); slices.Contains(orphans, postmaster) {
		// To the postmaster a fast shutdown, which it may have begun already;
		// to the others the signal would mean something else.
		signalAll([]int{postmaster}, syscall.SIGINT)
	}
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	kill := time.After(orphanPatienceSeconds * time.Second)
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for processes %v of an earlier Postgres in %s to end: %w", orphans, dataDir, ctx.Err())
		case <-kill:
			signalAll(orphans, syscall.SIGKILL)
		case <-tick.C:
		}
		if orphans = postgresIn(dataDir); len(orphans) == 0 {
			return nil
		}
	}
}

// postgresIn lists the Postgres processes, postmaster and others, that work in
// the directory: each of them has it as its working directory. Processes that
// may not be looked at belong to other accounts and are not ours.
func postgresIn(dataDir string) []int {
	resolved, err := filepath.EvalSymlinks(dataDir)
	if err != nil {
		return nil // no directory, no processes in it
	}
	links, err := filepath.Glob("/proc/[0-9]*/cwd")
	if err != nil {
		panic(err) // a malformed pattern of ours
	}
	var pids []int
	for _, link := range links {
		directory, err := os.Readlink(link)
		if err != nil || directory != resolved {
			continue
		}
		process := filepath.Dir(link)
		// A replaced binary is shown as "/path/postgres (deleted)".
		executable, err := os.Readlink(filepath.Join(process, "exe"))
		if err != nil || !strings.HasPrefix(filepath.Base(executable), "postgres") {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(process)); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// postmasterOf is the process that the pid file names; 0: none.
func postmasterOf(dataDir string) int {
	text, err := os.ReadFile(filepath.Join(dataDir, "postmaster.pid"))
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(first))
	if err != nil {
		return 0
	}
	return pid
}

func signalAll(pids []int, signal syscall.Signal) {
	for _, pid := range pids {
		_ = syscall.Kill(pid, signal) // one that has just ended is what we want
	}
}
