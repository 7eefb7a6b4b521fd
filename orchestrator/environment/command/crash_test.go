package command

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/orchestrator/environment/spec"
)

// crashVariable makes the test binary a process that starts a program and then
// waits to be killed.
const crashVariable = "HOLDFAST_TEST_CRASH_ROOT"

func TestMain(m *testing.M) {
	if root := os.Getenv(crashVariable); root != "" {
		if err := waitForTheEnd(root); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func waitForTheEnd(root string) error {
	isolation := IsolationProcessGroup
	if os.Getenv(crashVariable+"_NAMESPACES") != "" {
		isolation = IsolationNamespaces
	}
	ctx := context.Background()
	r, err := NewRunner(ctx, Config{Root: root, Isolation: isolation})
	if err != nil {
		return err
	}
	d, err := r.NewDirectory("session-1")
	if err != nil {
		return err
	}
	s, err := d.Start(ctx, spec.Program{Command: []string{"sh", "-c", "sleep 1000 & setsid sleep 1001 & echo ready; wait"}})
	if err != nil {
		return err
	}
	if _, err := bufio.NewReader(s.Output()).ReadString('\n'); err != nil {
		return err
	}
	fmt.Println(d.marker())
	<-s.Done()
	return errors.New("the program ended")
}

func TestACrashLeavesNothing(t *testing.T) {
	eachIsolation(t, func(t *testing.T, r *Runner) {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		root := openRoot(t)
		victim := exec.Command(self)
		victim.Env = append(os.Environ(), crashVariable+"="+root)
		if r.Isolation() == IsolationNamespaces {
			victim.Env = append(victim.Env, crashVariable+"_NAMESPACES=1")
		}
		victim.Stderr = os.Stderr
		output, err := victim.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := victim.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = victim.Process.Kill() }) // should this test end early
		// One that says nothing is killed, which ends the wait for its word.
		defer time.AfterFunc(time.Minute, func() { _ = victim.Process.Kill() }).Stop()
		marker, err := bufio.NewReader(output).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		marker = strings.TrimSpace(marker)

		// As long as the owner lives, nobody takes its directory away.
		other, err := NewRunner(t.Context(), Config{Root: root, Isolation: r.Isolation()})
		if err != nil {
			t.Fatal(err)
		}
		if err := other.Close(); err != nil {
			t.Error(err)
		}
		if running := marked(marker); other.Swept() != (Swept{}) || len(running) < 3 {
			t.Fatalf("a living owner was swept: %+v, running are %v", other.Swept(), running)
		}

		handles := processHandles(t, marked(marker))
		if err := victim.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = victim.Wait() // "killed" is what was wanted
		if r.Isolation() == IsolationNamespaces {
			// The kernel ends them all, without anybody's help.
			waitForEnd(t, handles)
		}
		heir, err := NewRunner(t.Context(), Config{Root: root, Isolation: r.Isolation()})
		if err != nil {
			t.Fatal(err)
		}
		defer heir.Close()
		waitForEnd(t, handles)
		if heir.Swept().Directories != 1 {
			t.Errorf("swept %+v, want one directory", heir.Swept())
		}
		owner, _, _ := strings.Cut(marker, "/")
		if _, err := os.Stat(filepath.Join(root, owner)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the directory is left: %v", err)
		}
	})
}

func processHandles(t *testing.T, pids []int) []unix.PollFd {
	t.Helper()
	var handles []unix.PollFd
	for _, pid := range pids {
		handle, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(handle) })
		handles = append(handles, unix.PollFd{Fd: int32(handle), Events: unix.POLLIN})
	}
	return handles
}

// waitForEnd waits until every process has ended, at most half a minute each.
func waitForEnd(t *testing.T, handles []unix.PollFd) {
	t.Helper()
	for i := range handles {
		for {
			n, err := unix.Poll(handles[i:i+1], int((30 * time.Second).Milliseconds()))
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if n != 1 || err != nil {
				t.Fatalf("a process lives on: %d, %v", n, err)
			}
			break
		}
	}
}
