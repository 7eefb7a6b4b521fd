package command

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// workName is the part of a directory that the program sees; beside it are
// records of ours.
const workName = "work"

// removeWait is how long Remove waits for killed processes: the kernel takes
// milliseconds, unless a process hangs in a device.
const removeWait = 5 * time.Second

// Directory is a place of its own for the programs of one session. It is safe
// for concurrent use.
type Directory struct {
	runner *Runner
	id     string
	path   string
	work   string

	mu        sync.Mutex
	processes map[*process]struct{}
	removed   bool
	// removal makes a second Remove wait for the first.
	removal sync.Once
	err     error
}

// ID is the name it was made with.
func (d *Directory) ID() string { return d.id }

// Path is where the programs run.
func (d *Directory) Path() string { return d.work }

// marker is what every process of the directory carries in its environment; the
// owner makes it unique when a session is run again elsewhere.
func (d *Directory) marker() string { return d.runner.owner + "/" + d.id }

func (d *Directory) make() error {
	if err := os.Mkdir(d.path, 0o711); err != nil {
		return err
	}
	if err := os.Mkdir(d.work, 0o700); err != nil {
		return err
	}
	return os.Chown(d.work, d.runner.config.Account.UserID, d.runner.config.Account.GroupID)
}

// Write puts a file below the directory; name is relative and cannot lead out of
// it, whatever links a program has made.
func (d *Directory) Write(name string, content []byte) error {
	root, err := os.OpenRoot(d.work)
	if err != nil {
		return fmt.Errorf("writing %s: %w", name, err)
	}
	defer root.Close()
	account := d.runner.config.Account
	folder := filepath.Dir(filepath.Clean(name))
	if err := root.MkdirAll(folder, 0o755); err != nil {
		return fmt.Errorf("writing %s: %w", name, err)
	}
	for ; folder != "."; folder = filepath.Dir(folder) {
		if err := root.Lchown(folder, account.UserID, account.GroupID); err != nil {
			return fmt.Errorf("writing %s: %w", name, err)
		}
	}
	// Executable, so that a script can be the program.
	if err := root.WriteFile(name, content, 0o755); err != nil {
		return fmt.Errorf("writing %s: %w", name, err)
	}
	if err := root.Lchown(name, account.UserID, account.GroupID); err != nil {
		return fmt.Errorf("writing %s: %w", name, err)
	}
	return nil
}

// Remove kills every process of the directory, waits for them and deletes it. It
// can be called again, and while a program runs: that one ends as killed.
func (d *Directory) Remove() error {
	d.removal.Do(func() { d.err = d.remove() })
	return d.err
}

func (d *Directory) remove() error {
	d.mu.Lock()
	d.removed = true
	var running []*process
	for p := range d.processes {
		running = append(running, p)
	}
	d.mu.Unlock()
	var errs []error
	for _, p := range running {
		p.kill()
	}
	deadline := time.NewTimer(removeWait)
	defer deadline.Stop()
	for _, p := range running {
		select {
		case <-p.done:
		case <-deadline.C:
			errs = append(errs, fmt.Errorf("removing %s: process %d does not end", d.id, p.pid))
			deadline.Reset(0)
		}
	}
	if err := removeTree(d.path); err != nil {
		errs = append(errs, fmt.Errorf("removing %s: %w", d.id, err))
	}
	d.runner.mu.Lock()
	delete(d.runner.directories, d.id)
	d.runner.mu.Unlock()
	return errors.Join(errs...)
}

// removeTree deletes a tree in which a program may have taken permissions away
// from directories.
func removeTree(path string) error {
	if err := os.RemoveAll(path); err == nil || !errors.Is(err, fs.ErrPermission) {
		return err
	}
	// Unreadable directories are made readable on the way down; errors show again
	// in the second attempt.
	_ = filepath.WalkDir(path, func(path string, entry fs.DirEntry, err error) error {
		if entry != nil && entry.IsDir() && err == nil {
			_ = os.Chmod(path, 0o700)
		}
		return nil
	})
	return os.RemoveAll(path)
}
