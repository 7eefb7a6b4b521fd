// Package command runs programs that nobody trusts much: commands that a model
// wrote, tool servers, scorers. Each belongs to a directory that is thrown away,
// has limits, and leaves no process behind, also when this process is killed.
//
// What it does. A program starts as /bin/sh waiting at a gate until it is written
// down; then the shell sets its resource limits and runs the program. Address space, CPU time, file
// size and open files are limits of each process; the number of processes is
// counted for the program as a whole; wall time and output are watched from here.
// Its environment holds a few named variables and nothing inherited otherwise.
// It never runs as root: a runner that is root gives it another account.
//
// Where the kernel allows it (IsolationNamespaces), the program lives in user,
// PID, IPC and, unless it asks for the network, network namespaces of its own.
// Its shell is the first process of the PID namespace, so when it ends, for any
// reason, the kernel kills every other process in it; and the kernel kills it
// when this process dies. Elsewhere (IsolationProcessGroup) the session's process
// group is killed, and then every process that carries the directory's marker in
// its environment.
//
// What this is not: a jail. There is no mount namespace: the program reads and
// writes whatever its account may, sees the host's /proc, and what it writes
// outside of its directory stays. There is no seccomp filter and no quota for a
// directory. In a process group the network is not cut off, the number of
// processes is that of the whole account, and a program that starts a session
// and clears its environment escapes being killed. Memory is bounded for each
// process, not for all of them together. Where that is too little, run the worker
// itself in a container or a virtual machine made for it.
//
// Linux only.
package command

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"holdfast/orchestrator/environment/spec"
)

// Isolation says what keeps a program and what it starts together.
type Isolation uint8

const (
	// IsolationAuto takes namespaces where they work and a process group
	// elsewhere. A runner never stays at it.
	IsolationAuto Isolation = iota
	// IsolationNamespaces: namespaces of its own; NewRunner fails without them.
	IsolationNamespaces
	// IsolationProcessGroup: a session and process group of its own.
	IsolationProcessGroup
)

func (i Isolation) String() string {
	switch i {
	case IsolationAuto:
		return "auto"
	case IsolationNamespaces:
		return "namespaces"
	case IsolationProcessGroup:
		return "process group"
	}
	return fmt.Sprintf("Isolation(%d)", uint8(i))
}

// Account is who a program runs as.
type Account struct {
	UserID, GroupID int
}

// nobody is the account that owns nothing on most systems.
const nobody = 65534

// DefaultInherited are the variables that a program gets from this process.
var DefaultInherited = []string{"PATH", "LANG", "LC_ALL", "TZ"}

// Config says where and as whom a runner runs programs.
type Config struct {
	// Root is a directory that runners of any number of processes on this host
	// share. It is created if missing and must be reachable for Account.
	Root string
	// Account is used when this process is root; zero means 65534 (nobody).
	// Otherwise programs run as this process's own account.
	Account Account
	// Inherited names the variables passed on; nil means DefaultInherited.
	Inherited []string
	Isolation Isolation
	// StopGrace is how long a program that is asked to end may take before it is
	// asked more firmly; 0 means one second.
	StopGrace time.Duration
}

// Swept counts what processes that are gone had left behind.
type Swept struct {
	Directories, Processes int
}

// Runner keeps the directories of this process. It is safe for concurrent use.
type Runner struct {
	config  Config
	owner   string // the name of our directory below Root
	path    string
	lock    *os.File
	swept   Swept
	forks   chan func()
	stopped chan struct{}

	mu          sync.Mutex
	directories map[string]*Directory
	closed      bool
}

// NewRunner removes what dead processes left below the root, finds out which
// isolation the kernel allows, and takes a place below the root for itself.
func NewRunner(ctx context.Context, config Config) (*Runner, error) {
	if config.Root == "" {
		return nil, errors.New("a runner of commands needs a root directory")
	}
	root, err := filepath.Abs(config.Root)
	if err != nil {
		return nil, fmt.Errorf("finding the root of commands: %w", err)
	}
	config.Root = root
	if config.Inherited == nil {
		config.Inherited = DefaultInherited
	}
	if config.StopGrace == 0 {
		config.StopGrace = time.Second
	}
	config.Account = effectiveAccount(config.Account)
	r := &Runner{
		config: config, owner: ownerPrefix + uuid.NewString(), forks: make(chan func()), stopped: make(chan struct{}),
		directories: make(map[string]*Directory),
	}
	r.path = filepath.Join(root, r.owner)
	if err := r.takePlace(); err != nil {
		return nil, err
	}
	go r.forkLoop()
	if err := r.chooseIsolation(ctx); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// effectiveAccount never gives root's: an account cannot be changed by others
// than root, and root's programs run as somebody else.
func effectiveAccount(wanted Account) Account {
	if os.Geteuid() != 0 {
		return Account{UserID: os.Geteuid(), GroupID: os.Getegid()}
	}
	if wanted.UserID == 0 {
		wanted.UserID = nobody
	}
	if wanted.GroupID == 0 {
		wanted.GroupID = nobody
	}
	return wanted
}

// takePlace sweeps the root and makes this runner's directory, both under the
// root's lock: a directory whose owner's lock is free belongs to nobody.
func (r *Runner) takePlace() error {
	if err := os.MkdirAll(r.config.Root, 0o711); err != nil {
		return fmt.Errorf("making the root of commands: %w", err)
	}
	rootLock, err := lockFile(filepath.Join(r.config.Root, lockName), unix.LOCK_EX)
	if err != nil {
		return fmt.Errorf("locking the root of commands: %w", err)
	}
	defer rootLock.Close()
	if r.swept, err = sweep(r.config.Root); err != nil {
		return err
	}
	if err := os.Mkdir(r.path, 0o711); err != nil {
		return fmt.Errorf("making a place for commands: %w", err)
	}
	if r.lock, err = lockFile(filepath.Join(r.path, lockName), unix.LOCK_EX); err != nil {
		return fmt.Errorf("locking the place for commands: %w", err)
	}
	return nil
}

// chooseIsolation tries namespaces by running an empty program in them.
func (r *Runner) chooseIsolation(ctx context.Context) error {
	if r.config.Isolation == IsolationProcessGroup {
		return nil
	}
	wanted := r.config.Isolation
	r.config.Isolation = IsolationNamespaces
	err := r.probe(ctx)
	if err == nil {
		return nil
	}
	if wanted == IsolationNamespaces || ctx.Err() != nil {
		return fmt.Errorf("trying namespaces: %w", err)
	}
	r.config.Isolation = IsolationProcessGroup
	if err := r.probe(ctx); err != nil {
		return fmt.Errorf("trying a process group: %w", err)
	}
	return nil
}

func (r *Runner) probe(ctx context.Context) error {
	directory, err := r.NewDirectory("probe")
	if err != nil {
		return err
	}
	result, err := directory.Run(ctx, Request{Program: spec.Program{Command: []string{"/bin/sh", "-c", ":"}}, KeepBytes: 1 << 10})
	if err == nil && result.ExitCode != 0 {
		err = fmt.Errorf("a shell ends with status %d: %s", result.ExitCode, result.Stderr.Text)
	}
	return errors.Join(err, directory.Remove())
}

// Isolation is what this runner uses; never IsolationAuto.
func (r *Runner) Isolation() Isolation { return r.config.Isolation }

// Root is the directory below which this runner and others keep theirs.
func (r *Runner) Root() string { return r.config.Root }

// Swept is what NewRunner removed.
func (r *Runner) Swept() Swept { return r.swept }

// forkLoop starts all programs on one thread that lives as long as the runner:
// the kernel sends a parent-death signal when the thread that forked ends.
func (r *Runner) forkLoop() {
	runtime.LockOSThread()
	defer close(r.stopped)
	for fork := range r.forks {
		fork()
	}
}

// onForkThread runs f on the thread that starts programs.
func (r *Runner) onForkThread(f func() error) error {
	done := make(chan error, 1)
	r.forks <- func() { done <- f() }
	return <-done
}

// directoryID is what a directory may be called: also a name in a file system
// and in an environment variable.
var directoryID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

// NewDirectory makes an empty directory. An id can be used again when the
// directory of that name has been removed.
func (r *Runner) NewDirectory(id string) (*Directory, error) {
	if !directoryID.MatchString(id) {
		return nil, fmt.Errorf("making a directory for commands: %q is no name for it", id)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, errClosed
	}
	if _, taken := r.directories[id]; taken {
		return nil, fmt.Errorf("making a directory for commands: %s exists", id)
	}
	d := &Directory{runner: r, id: id, path: filepath.Join(r.path, id), processes: make(map[*process]struct{})}
	d.work = filepath.Join(d.path, workName)
	if err := d.make(); err != nil {
		return nil, errors.Join(fmt.Errorf("making a directory for commands: %w", err), removeTree(d.path))
	}
	r.directories[id] = d
	return d, nil
}

// Close removes every directory with its processes and gives the place up. It
// can be called again.
func (r *Runner) Close() error {
	r.mu.Lock()
	wasClosed := r.closed
	r.closed = true
	var remaining []*Directory
	for _, d := range r.directories {
		remaining = append(remaining, d)
	}
	r.mu.Unlock()
	if wasClosed {
		return nil
	}
	var errs []error
	for _, d := range remaining {
		errs = append(errs, d.Remove())
	}
	close(r.forks)
	<-r.stopped
	errs = append(errs, removeTree(r.path), r.lock.Close())
	return errors.Join(errs...)
}

var errClosed = errors.New("the runner of commands is closed")

// environment puts together what a program sees, sorted by nothing but the order
// of the list: later entries win, and a program's own come last.
func (r *Runner) environment(d *Directory, own map[string]string) []string {
	variables := map[string]string{"PATH": "/usr/local/bin:/usr/bin:/bin"}
	for _, name := range r.config.Inherited {
		if value, ok := os.LookupEnv(name); ok {
			variables[name] = value
		}
	}
	variables["HOME"] = d.work
	variables["TMPDIR"] = d.work
	for name, value := range own {
		variables[name] = value
	}
	variables[markerName] = d.marker()
	list := make([]string, 0, len(variables))
	for name, value := range variables {
		list = append(list, name+"="+value)
	}
	return list
}
