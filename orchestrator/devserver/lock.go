package devserver

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// lockDataDir makes us the only owner of the data directory. The kernel frees
// the lock when our process ends, however it ends, so it is never stale; the
// children do not inherit it.
func lockDataDir(dataDir string) (*os.File, error) {
	path := filepath.Join(dataDir, "lock")
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("opening the lock of the data directory: %w", err)
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		defer file.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("locking %s: %w", path, err)
		}
		owner, _ := io.ReadAll(io.LimitReader(file, 20))
		return nil, fmt.Errorf("the data directory %s is in use by another holdfast (pid %s): stop that one, or choose another data directory",
			dataDir, strings.TrimSpace(string(owner)))
	}
	if err := errors.Join(file.Truncate(0), writeAt(file, fmt.Sprintf("%d\n", os.Getpid()))); err != nil {
		file.Close()
		return nil, fmt.Errorf("writing %s: %w", path, err)
	}
	return file, nil
}

func writeAt(file *os.File, text string) error {
	_, err := file.WriteAt([]byte(text), 0)
	return err
}
