package devserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// logTailBytes is how much of a dead server's log an error quotes at most.
const logTailBytes = 2000

// childSpec says how to start a child process.
type childSpec struct {
	name    string // for people: "Postgres", "Temporal"
	path    string
	args    []string
	dir     string
	env     []string
	account account
	logPath string // receives standard output and standard error
	// deathSignal is what the kernel sends the child when we die.
	deathSignal syscall.Signal
	// holdStdin gives the child a pipe as standard input, which closes when we
	// die or close it: a second way to notice, and a polite one.
	holdStdin bool
}

// child is a process bound to ours.
type child struct {
	name    string
	pid     int
	logPath string
	stdin   io.Closer // nil without holdStdin
	process *os.Process

	stopping atomic.Bool   // set before the first signal of a stop
	ended    chan struct{} // closed when the process has been waited for
	endState string        // valid once ended is closed: "exit status 1"
	endOK    bool          // valid once ended is closed: exit status 0
}

// startChild starts the process and returns once it runs.
//
// The kernel sends a parent-death signal when the *thread* that forked ends,
// not the process. The goroutine here therefore keeps its thread to itself
// until the child has ended: the thread can end earlier only with our process.
func startChild(spec childSpec) (*child, error) {
	logFile, err := os.OpenFile(spec.logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("opening the log of %s: %w", spec.name, err)
	}
	defer logFile.Close()
	cmd := exec.Command(spec.path, spec.args...)
	cmd.Dir = spec.dir
	cmd.Env = spec.env
	cmd.Stdout = logFile
	cmd.Stderr = logFile
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig: spec.deathSignal,
		// A group of its own keeps a Ctrl-C in the terminal from reaching the
		// child before we have put our own work in order.
		Setpgid:    true,
		Credential: spec.account.credential(),
	}
	c := &child{name: spec.name, logPath: spec.logPath, ended: make(chan struct{})}
	if spec.holdStdin {
		if c.stdin, err = cmd.StdinPipe(); err != nil {
			return nil, fmt.Errorf("starting %s: %w", spec.name, err)
		}
	}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		if err == nil {
			c.process, c.pid = cmd.Process, cmd.Process.Pid
		}
		started <- err
		if err != nil {
			return
		}
		_ = cmd.Wait() // the state says more than the error
		c.endState, c.endOK = cmd.ProcessState.String(), cmd.ProcessState.Success()
		close(c.ended)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting %s (%s): %w", spec.name, spec.path, err)
	}
	return c, nil
}

// deathError describes an unexpected end, with what the child last said.
func (c *child) deathError() error {
	message := fmt.Sprintf("%s (pid %d) ended: %s", c.name, c.pid, c.endState)
	if tail := logTail(c.logPath); tail != "" {
		message += fmt.Sprintf("; the end of %s:\n%s", c.logPath, tail)
	}
	return errors.New(message)
}

// stopStep is one rung of the ladder from polite to final.
type stopStep struct {
	signal  syscall.Signal
	seconds int
}

// stop climbs the ladder until the child has ended, then kills. It reports an
// error only when the child could not be made to end.
func (c *child) stop(ctx context.Context, steps ...stopStep) error {
	c.stopping.Store(true)
	for _, step := range steps {
		if ctx.Err() != nil {
			break // no patience left: straight to the kill
		}
		c.signal(step.signal)
		if c.stdin != nil {
			_ = c.stdin.Close()
		}
		select {
		case <-c.ended:
			return nil
		case <-ctx.Done():
		case <-time.After(time.Duration(step.seconds) * time.Second):
		}
	}
	// The whole group, for children of the child that would not notice.
	_ = syscall.Kill(-c.pid, syscall.SIGKILL)
	select {
	case <-c.ended:
		return nil
	case <-time.After(afterKillSeconds * time.Second):
		return fmt.Errorf("%s (pid %d) does not end, not even killed", c.name, c.pid)
	}
}

// kill ends the child at once, without waiting for it.
func (c *child) kill() {
	c.stopping.Store(true)
	c.signal(syscall.SIGKILL)
}

// signal ignores a child that has ended: that is what is wanted anyway.
func (c *child) signal(signal syscall.Signal) { _ = c.process.Signal(signal) }

// logTail returns the last lines of a log, "" when there is none.
func logTail(path string) string {
	file, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer file.Close()
	if info, err := file.Stat(); err == nil && info.Size() > logTailBytes {
		if _, err := file.Seek(-logTailBytes, io.SeekEnd); err != nil {
			return ""
		}
	}
	tail, err := io.ReadAll(io.LimitReader(file, logTailBytes))
	if err != nil {
		return ""
	}
	if len(tail) == logTailBytes {
		// The first line is most likely cut.
		if _, rest, found := bytes.Cut(tail, []byte("\n")); found {
			tail = rest
		}
	}
	return strings.TrimRight(string(tail), "\n")
}

// rotateLog keeps one older log beside the one that a start begins.
func rotateLog(path string) error {
	err := os.Rename(path, path+".1")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
