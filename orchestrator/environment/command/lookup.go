package command

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// lookUp finds a program as a shell of the account would, in the PATH that it will
// see: what this process may run, such as a shim in its own home, the account may not.
func lookUp(name, directory string, environment []string, account Account) (string, error) {
	if strings.Contains(name, "/") {
		path := name
		if !filepath.IsAbs(path) {
			path = filepath.Join(directory, path)
		}
		return path, executable(path)
	}
	var closed string
	for _, variable := range environment {
		value, ok := strings.CutPrefix(variable, "PATH=")
		if !ok {
			continue
		}
		for _, folder := range filepath.SplitList(value) {
			path := filepath.Join(folder, name)
			switch {
			case !filepath.IsAbs(path) || executable(path) != nil:
			case account.mayRun(path):
				return path, nil
			case closed == "":
				closed = path
			}
		}
	}
	if closed != "" {
		return "", fmt.Errorf("%s is not open to the account %d that programs run as, and no other folder of PATH has %q", closed, account.UserID, name)
	}
	return "", fmt.Errorf("%q is in no folder of PATH", name)
}

// mayRun tells whether the modes of a program and of the folders above it let the
// account run it. Access lists are not read: what they alone allow is named by its path.
func (a Account) mayRun(path string) bool {
	if a.UserID == 0 {
		return true
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return false
	}
	for _, place := range []string{filepath.Dir(path), real} {
		for ; ; place = filepath.Dir(place) {
			info, err := os.Stat(place)
			if err != nil || !a.mayExecute(info) {
				return false
			}
			if place == filepath.Dir(place) {
				break
			}
		}
	}
	return true
}

// mayExecute tells whether the account may run a file, or search a folder.
func (a Account) mayExecute(info os.FileInfo) bool {
	mode := info.Mode().Perm()
	owner, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case ok && int(owner.Uid) == a.UserID:
		return mode&0o100 != 0
	case ok && int(owner.Gid) == a.GroupID:
		return mode&0o010 != 0
	}
	return mode&0o001 != 0
}

func executable(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.IsDir() || info.Mode()&0o111 == 0 {
		return fmt.Errorf("%s is no program", path)
	}
	return nil
}
