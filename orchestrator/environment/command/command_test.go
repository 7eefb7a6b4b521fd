package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"holdfast/orchestrator/environment/spec"
)

// eachIsolation runs a test with every isolation that this host allows; the
// process group is allowed everywhere.
func eachIsolation(t *testing.T, test func(t *testing.T, r *Runner)) {
	isolations := []Isolation{IsolationProcessGroup}
	if newRunner(t, IsolationAuto).Isolation() == IsolationNamespaces {
		isolations = append(isolations, IsolationNamespaces)
	}
	for _, isolation := range isolations {
		t.Run(strings.ReplaceAll(isolation.String(), " ", "-"), func(t *testing.T) {
			test(t, newRunner(t, isolation))
		})
	}
}

// openRoot is a directory that any account can reach.
func openRoot(t testing.TB) string {
	t.Helper()
	root := t.TempDir()
	if err := os.Chmod(filepath.Dir(root), 0o755); err != nil {
		t.Fatal(err)
	}
	return root
}

// newRunner makes a runner and checks at the end that nothing is left of it.
func newRunner(t *testing.T, isolation Isolation) *Runner {
	t.Helper()
	r, err := NewRunner(t.Context(), Config{Root: openRoot(t), Isolation: isolation, StopGrace: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Errorf("closing: %v", err)
		}
		if left := marked(r.owner + "/"); len(left) > 0 {
			t.Errorf("processes %v are left", left)
		}
		if _, err := os.Stat(r.path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left: %v", r.path, err)
		}
	})
	return r
}

// marked lists the processes whose marker begins with prefix.
func marked(prefix string) []int {
	var pids []int
	for _, pid := range processIDs() {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err == nil && bytes.Contains(raw, []byte(markerName+"="+prefix)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func newDirectory(t *testing.T, r *Runner) *Directory {
	t.Helper()
	d, err := r.NewDirectory("session-1")
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func shell(script string, limits spec.Limits) Request {
	return Request{Program: spec.Program{Command: []string{"sh", "-c", script}, Limits: limits}, KeepBytes: 4096}
}

func run(t *testing.T, d *Directory, request Request) Result {
	t.Helper()
	result, err := d.Run(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

func TestRunGivesWhatTheProgramDid(t *testing.T) {
	t.Setenv("HOLDFAST_SECRET", "s3cret")
	eachIsolation(t, func(t *testing.T, r *Runner) {
		d := newDirectory(t, r)
		if err := d.Write("lib/greet.sh", []byte("#!/bin/sh\necho \"$GREETING $(cat)\"\n")); err != nil {
			t.Fatal(err)
		}
		result := run(t, d, Request{
			Program: spec.Program{Command: []string{"lib/greet.sh"}, Env: map[string]string{"GREETING": "hello"}},
			Stdin:   []byte("world"), KeepBytes: 100,
		})
		if result.Stdout.Text != "hello world\n" || result.ExitCode != 0 || result.Reached != LimitNone {
			t.Errorf("got %+v", result)
		}
		result = run(t, d, shell("echo out; echo err >&2; exit 7", spec.Limits{}))
		if result.Stdout.Text != "out\n" || result.Stderr.Text != "err\n" || result.ExitCode != 7 {
			t.Errorf("got %+v", result)
		}
		result = run(t, d, shell("env; id -u; pwd; echo kept > file", spec.Limits{}))
		if strings.Contains(result.Stdout.Text, "s3cret") || strings.Contains(result.Stdout.Text, "\n0\n") || !strings.Contains(result.Stdout.Text, d.Path()) {
			t.Errorf("the program sees %s", result.Stdout.Text)
		}
		if result = run(t, d, shell("cat file", spec.Limits{})); result.Stdout.Text != "kept\n" {
			t.Errorf("the next program sees %q", result.Stdout.Text)
		}
	})
}

func TestLimitsEndPrograms(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		limits spec.Limits
		reach  Limit
		exit   int
		says   string
	}{
		"hangs":           {"exec sleep 1000", spec.Limits{WallSeconds: 0.1}, LimitWall, -1, ""},
		"ignores signals": {"trap '' TERM INT HUP XCPU; while :; do :; done", spec.Limits{WallSeconds: 0.1}, LimitWall, -1, ""},
		"floods":          {"exec yes", spec.Limits{OutputBytes: 1 << 20}, LimitOutput, -1, "bytes cut"},
		"writes too much": {"exec head -c 2000000 /dev/zero >file", spec.Limits{FileBytes: 1 << 20}, LimitFile, exitFile, ""},
		"takes memory":    {"dd if=/dev/zero of=/dev/null bs=200M count=1 2>&1", spec.Limits{MemoryBytes: 64 << 20}, LimitNone, 1, "memory exhausted"},
		"kills itself":    {"kill -9 $$", spec.Limits{}, LimitNone, exitKill, ""},
	} {
		t.Run(name, func(t *testing.T) {
			eachIsolation(t, func(t *testing.T, r *Runner) {
				result := run(t, newDirectory(t, r), shell(c.script, c.limits))
				if result.Reached != c.reach || result.ExitCode != c.exit || !strings.Contains(result.Stdout.Text, c.says) {
					t.Errorf("got %+v", result)
				}
			})
		})
	}
}

// TestCPUTimeIsBounded needs a second of CPU time, so it tries one isolation only.
func TestCPUTimeIsBounded(t *testing.T) {
	t.Parallel()
	result := run(t, newDirectory(t, newRunner(t, IsolationAuto)), shell("while :; do :; done", spec.Limits{CPUSeconds: 1}))
	if result.Reached != LimitCPU || result.ExitCode != exitCPU || result.CPUSeconds < 0.5 {
		t.Errorf("got %+v", result)
	}
}

// TestForksAreBounded lets a program start what it can, up to a number that the
// host bears: the limit stops it well before.
func TestForksAreBounded(t *testing.T) {
	eachIsolation(t, func(t *testing.T, r *Runner) {
		script := `i=0; echo $i; while [ $i -lt 200 ]; do sleep 1000 & i=$((i+1)); echo $i; done`
		limit, least, most := 20, 10, 20
		if r.Isolation() == IsolationProcessGroup {
			// There the account's other processes count, which come and go: those of
			// another run of these tests, for one.
			limit, least, most = 60, 1, 190
		}
		result := run(t, newDirectory(t, r), shell(script, spec.Limits{Processes: limit}))
		lines := strings.Fields(result.Stdout.Text)
		if len(lines) == 0 {
			t.Fatalf("nothing was started: status %d: %s", result.ExitCode, result.Stderr.Text)
		}
		last, err := strconv.Atoi(lines[len(lines)-1])
		if err != nil || last < least || last > most || result.ExitCode == 0 {
			t.Errorf("%d processes were started, then status %d: %s", last, result.ExitCode, result.Stderr.Text)
		}
		if left := marked(r.owner + "/"); len(left) > 0 {
			t.Errorf("processes %v outlive the program", left)
		}
	})
}

func TestNothingOutlivesTheProgram(t *testing.T) {
	eachIsolation(t, func(t *testing.T, r *Runner) {
		result := run(t, newDirectory(t, r), shell("sleep 1000 & setsid sleep 1001 & nohup sleep 1002 >/dev/null & echo done", spec.Limits{}))
		if result.Stdout.Text != "done\n" || result.Reached != LimitNone {
			t.Errorf("got %+v", result)
		}
		if left := marked(r.owner + "/"); len(left) > 0 {
			t.Errorf("processes %v outlive the program", left)
		}
	})
}

// fifo is how a program tells that it runs: its channel is closed when the
// program has opened it for writing.
func fifo(t *testing.T, d *Directory) (opened <-chan struct{}) {
	t.Helper()
	path := filepath.Join(d.Path(), "ready")
	if err := syscall.Mkfifo(path, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		if file, err := os.Open(path); err == nil {
			_ = file.Close()
			close(done)
		}
	}()
	return done
}

func TestCancelAndRemoveEndARunningProgram(t *testing.T) {
	eachIsolation(t, func(t *testing.T, r *Runner) {
		for _, how := range []string{"cancel", "remove"} {
			d := newDirectory(t, r)
			running := fifo(t, d)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() {
				result, err := d.Run(ctx, shell("trap '' TERM; setsid sleep 1000 & echo >ready; sleep 1000", spec.Limits{}))
				if err == nil {
					err = fmt.Errorf("it ended with %+v", result)
				}
				ended <- err
			}()
			select {
			case <-running:
			case err := <-ended:
				t.Fatalf("the program ended early: %v", err)
			}
			want := context.Canceled
			if how == "remove" {
				want = ErrRemoved
				if err := d.Remove(); err != nil {
					t.Error(err)
				}
			} else {
				cancel()
			}
			if err := <-ended; !errors.Is(err, want) {
				t.Errorf("after %s: %v", how, err)
			}
			cancel()
			if left := marked(d.marker()); len(left) > 0 {
				t.Errorf("after %s processes %v are left", how, left)
			}
			if err := d.Remove(); err != nil {
				t.Error(err)
			}
			if _, err := d.Run(t.Context(), shell(":", spec.Limits{})); err == nil {
				t.Error("a removed directory runs programs")
			}
		}
	})
}

func TestRemoveCopesWithPermissions(t *testing.T) {
	eachIsolation(t, func(t *testing.T, r *Runner) {
		d := newDirectory(t, r)
		run(t, d, shell("mkdir -p a/b && echo x >a/b/c && chmod 0 a/b a && chmod 0 .", spec.Limits{}))
		if err := d.Remove(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(d.path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the directory is left: %v", err)
		}
	})
}

func TestWhatCannotRunIsAnError(t *testing.T) {
	r := newRunner(t, IsolationAuto)
	d := newDirectory(t, r)
	for _, command := range []string{"no-such-program", "./no-such-program", "/etc/passwd", "/"} {
		if _, err := d.Run(t.Context(), Request{Program: spec.Program{Command: []string{command}}}); err == nil {
			t.Errorf("%s ran", command)
		}
	}
	for _, id := range []string{"", ".", "..", "a/b", "-x", strings.Repeat("x", 129), "session-1"} {
		if _, err := r.NewDirectory(id); err == nil {
			t.Errorf("a directory %q was made", id)
		}
	}
	if err := d.Write("../outside", nil); err == nil {
		t.Error("a file was written outside of the directory")
	}
}

func TestServiceStops(t *testing.T) {
	for name, script := range map[string]string{
		"when its input closes":  `echo ready; cat >/dev/null; exit 0`,
		"at SIGTERM":             `trap 'exit 0' TERM; echo ready; while :; do sleep 1000 & wait; done`,
		"at SIGKILL":             `trap '' TERM; echo ready; while :; do sleep 1000; done`,
		"though it died already": `echo ready; kill -9 $$`,
	} {
		t.Run(name, func(t *testing.T) {
			eachIsolation(t, func(t *testing.T, r *Runner) {
				s, err := newDirectory(t, r).Start(t.Context(), spec.Program{Command: []string{"sh", "-c", "echo complaint >&2; " + script}})
				if err != nil {
					t.Fatal(err)
				}
				line := make([]byte, len("ready\n"))
				if _, err := s.Output().Read(line); err != nil || string(line) != "ready\n" {
					t.Errorf("read %q, %v", line, err)
				}
				for range 2 {
					if err := s.Stop(); err != nil {
						t.Error(err)
					}
				}
				if s.Complaints() != "complaint\n" && !strings.HasPrefix(s.Complaints(), "complaint\n") {
					t.Errorf("it complained %q", s.Complaints())
				}
				if left := marked(r.owner + "/"); len(left) > 0 {
					t.Errorf("processes %v are left", left)
				}
			})
		})
	}
}
