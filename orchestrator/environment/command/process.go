package command

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/orchestrator/environment/spec"
)

// gateScript waits until the process is written down, sets its limits, runs the
// program and ends with its status. If we die before opening the gate, read fails.
//
// It does not exec the program: as the first process of a PID namespace the
// program would find that signals do not end it and that it has to wait for
// orphans, which a shell does. The limits are set in here and not by prlimit(2)
// from outside, since that needs a capability once the account has changed.
// Shells differ in the option for processes: -u is bash's, -p dash's and ash's.
const gateScript = `read -r _ <&3 || exit 125
exec 3<&-
ulimit -c 0 && ulimit -n "$1" && ulimit -v "$2" && ulimit -f "$3" && ulimit -S -t "$4" && ulimit -H -t "$5" || exit 125
if (ulimit -u "$6") 2>/dev/null; then ulimit -u "$6"; else ulimit -p "$6"; fi || exit 125
shift 6
"$@"
exit $?`

// copyWait is how long output may still come after a program has ended, where
// something that escaped holds its pipe open.
const copyWait = time.Second

// openFiles is how many files a process may have open.
const openFiles = 1024

// process is one started program.
type process struct {
	directory *Directory
	cmd       *exec.Cmd
	pid       int
	record    string
	// done is closed when the program and all that the isolation holds together
	// with it have ended.
	done chan struct{}

	mu     sync.Mutex
	reaped bool
}

// start starts a program whose standard streams cmd has already.
func (d *Directory) start(cmd *exec.Cmd, program spec.Program) (*process, error) {
	environment := d.runner.environment(d, program.Env)
	path, err := lookUp(program.Command[0], d.work, environment, d.runner.config.Account)
	if err != nil {
		return nil, fmt.Errorf("finding the program: %w", err)
	}
	gate, opener, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("making a gate: %w", err)
	}
	defer gate.Close()
	defer opener.Close()
	cmd.Path = "/bin/sh"
	cmd.Args = append([]string{"sh", "-c", gateScript, "sh"}, d.runner.limitArguments(program.Limits.WithDefaults())...)
	cmd.Args = append(append(cmd.Args, path), program.Command[1:]...)
	cmd.Env = environment
	cmd.Dir = d.work
	cmd.ExtraFiles = []*os.File{gate}
	cmd.WaitDelay = copyWait
	cmd.SysProcAttr = d.runner.attributes(program.Network)
	// Held until the process is known to the directory, so that Remove either
	// sees it or keeps it from starting.
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.removed {
		return nil, errors.New("the directory has been removed")
	}
	if err := d.runner.onForkThread(cmd.Start); err != nil {
		return nil, fmt.Errorf("starting a shell: %w", err)
	}
	p := &process{directory: d, cmd: cmd, pid: cmd.Process.Pid, done: make(chan struct{})}
	d.processes[p] = struct{}{}
	err = p.register()
	if err == nil {
		_, err = opener.Write([]byte("\n"))
	}
	go p.reap()
	if err != nil {
		p.kill()
		return nil, fmt.Errorf("registering the program: %w", err)
	}
	return p, nil
}

// attributes says how a program is forked.
func (r *Runner) attributes(network bool) *syscall.SysProcAttr {
	account := r.config.Account
	root := os.Geteuid() == 0
	attributes := &syscall.SysProcAttr{
		Setsid:    true,
		Pdeathsig: syscall.SIGKILL,
		// Root gives its other groups up; others cannot, and lose nothing by it.
		Credential: &syscall.Credential{Uid: uint32(account.UserID), Gid: uint32(account.GroupID), NoSetGroups: !root},
	}
	if r.config.Isolation != IsolationNamespaces {
		if !root {
			attributes.Credential = nil
		}
		return attributes
	}
	attributes.Cloneflags = syscall.CLONE_NEWUSER | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC
	if !network {
		attributes.Cloneflags |= syscall.CLONE_NEWNET
	}
	// Only the one account exists in the namespace, so set-user-id programs do
	// nothing, and as it is not root there, it holds no capability.
	attributes.UidMappings = []syscall.SysProcIDMap{{ContainerID: account.UserID, HostID: account.UserID, Size: 1}}
	attributes.GidMappings = []syscall.SysProcIDMap{{ContainerID: account.GroupID, HostID: account.GroupID, Size: 1}}
	attributes.GidMappingsEnableSetgroups = root
	return attributes
}

// limitArguments gives the limits in the order and the units in which the gate
// takes them. Where ours are lower already, those stay.
func (r *Runner) limitArguments(limits spec.Limits) []string {
	const blockBytes = 512
	processes := uint64(limits.Processes) + 1 // the shell at the gate
	if r.config.Isolation != IsolationNamespaces {
		processes += tasksOf(r.config.Account.UserID)
	}
	cpu := uint64(limits.CPUSeconds)
	return []string{
		bounded(unix.RLIMIT_NOFILE, openFiles, 1),
		bounded(unix.RLIMIT_AS, uint64(limits.MemoryBytes), 1<<10),
		bounded(unix.RLIMIT_FSIZE, uint64(limits.FileBytes), blockBytes),
		// A program that ignores the signal at the soft limit is killed a second later.
		bounded(unix.RLIMIT_CPU, cpu, 1),
		bounded(unix.RLIMIT_CPU, cpu+1, 1),
		bounded(unix.RLIMIT_NPROC, processes, 1),
	}
}

// bounded gives a limit in units, rounded up, and not above what this process
// itself may hand on.
func bounded(resource int, wanted, unit uint64) string {
	var own unix.Rlimit
	if err := unix.Getrlimit(resource, &own); err == nil && own.Max < wanted {
		return strconv.FormatUint(own.Max/unit, 10)
	}
	return strconv.FormatUint((wanted+unit-1)/unit, 10)
}

// register writes the process down for a sweep.
func (p *process) register() error {
	started, err := startTime(p.pid)
	if err != nil {
		return err
	}
	p.record = filepath.Join(p.directory.path, recordPrefix+strconv.Itoa(p.pid))
	if err := writeRecord(p.record, processRecord{PID: p.pid, StartTime: started, Boot: bootID()}); err != nil {
		return err
	}
	// When memory runs out, the kernel shall take programs before it takes us. A
	// host that does not let us say so decides alone.
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", p.pid), []byte("1000"), 0)
	return nil
}

// reap waits for the program, kills what it left, and forgets it.
func (p *process) reap() {
	inGroup := p.directory.runner.config.Isolation != IsolationNamespaces
	if inGroup {
		// The process stays a zombie, so that its number, which is the group's, is
		// not given to others before the group has been killed.
		for {
			err := unix.Waitid(unix.P_PID, p.pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
			if !errors.Is(err, unix.EINTR) {
				break
			}
		}
		_ = unix.Kill(-p.pid, unix.SIGKILL)
	}
	p.mu.Lock()
	p.reaped = inGroup
	p.mu.Unlock()
	// The state is read from cmd.ProcessState; an error here is the exit status or
	// a pipe that something held open.
	_ = p.cmd.Wait()
	if inGroup {
		killMarked(map[string]bool{p.directory.marker(): true}, p.isOther)
	}
	if p.record != "" {
		_ = os.Remove(p.record)
	}
	p.directory.mu.Lock()
	delete(p.directory.processes, p)
	p.directory.mu.Unlock()
	close(p.done)
}

// isOther tells whether a session belongs to another program that runs in the
// same directory. A program that is just being started counts, since the
// directory is locked until it is known.
func (p *process) isOther(session int) bool {
	p.directory.mu.Lock()
	defer p.directory.mu.Unlock()
	for other := range p.directory.processes {
		if other != p && other.pid == session {
			return true
		}
	}
	return false
}

// kill ends the program and what is held together with it.
func (p *process) kill() { p.signal(unix.SIGKILL) }

// signal reaches the whole process group, which is led by the shell at the gate.
func (p *process) signal(signal unix.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reaped {
		return
	}
	if signal == unix.SIGKILL && p.directory.runner.config.Isolation == IsolationNamespaces {
		// Through the handle that the standard library keeps: never a stranger.
		_ = p.cmd.Process.Kill()
		return
	}
	_ = unix.Kill(-p.pid, signal)
}
