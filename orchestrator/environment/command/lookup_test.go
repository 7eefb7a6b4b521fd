package command

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestProgramIsFoundWhereItsAccountMayRunIt puts a program that only this process can
// reach before one that everyone can, as a shim in the home of root is.
func TestProgramIsFoundWhereItsAccountMayRunIt(t *testing.T) {
	root := t.TempDir()
	account := effectiveAccount(Account{})
	for folder := root; folder != filepath.Dir(folder); folder = filepath.Dir(folder) {
		if strings.HasPrefix(folder, os.TempDir()+string(filepath.Separator)) {
			if err := os.Chmod(folder, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	closed, open := filepath.Join(root, "home", "shims"), filepath.Join(root, "bin")
	for _, folder := range []string{closed, open} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, "judge"), []byte("#!/bin/sh\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Dir(closed), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Chmod(filepath.Dir(closed), 0o755) })
	path, err := lookUp("judge", root, []string{"PATH=" + closed + ":" + open}, account)
	if err != nil || path != filepath.Join(open, "judge") {
		t.Errorf("found %q, %v", path, err)
	}
	if path, err = lookUp("judge", root, []string{"PATH=" + closed}, account); err == nil {
		t.Errorf("found %q, which the account may not run", path)
	}
}
