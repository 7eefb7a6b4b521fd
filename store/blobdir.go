package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// DirBlobs keeps blobs as files below a directory that all replicas share.
type DirBlobs struct{ root *os.Root }

// NewDirBlobs makes the directory if it is not there.
func NewDirBlobs(dir string) (*DirBlobs, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the directory of columns: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("opening the directory of columns: %w", err)
	}
	return &DirBlobs{root}, nil
}

// Put writes beside the name and renames, so that a blob is whole or not there.
func (d *DirBlobs) Put(_ context.Context, key string, data []byte) error {
	if err := d.root.MkdirAll(filepath.Dir(key), 0o700); err != nil {
		return fmt.Errorf("making the directory of a blob: %w", err)
	}
	partial := key + ".partial"
	file, err := d.root.Create(partial)
	if err != nil {
		return fmt.Errorf("writing a blob: %w", err)
	}
	_, err = file.Write(data)
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err == nil {
		err = d.root.Rename(partial, key)
	}
	if err != nil {
		return fmt.Errorf("writing a blob: %w", err)
	}
	return d.syncDir(filepath.Dir(key))
}

// syncDir makes a new name durable.
func (d *DirBlobs) syncDir(name string) error {
	dir, err := d.root.Open(name)
	if err != nil {
		return fmt.Errorf("writing a blob: %w", err)
	}
	if err := errors.Join(dir.Sync(), dir.Close()); err != nil {
		return fmt.Errorf("writing a blob: %w", err)
	}
	return nil
}

// Get reads a blob.
func (d *DirBlobs) Get(_ context.Context, key string) ([]byte, error) {
	data, err := d.root.ReadFile(key)
	if err != nil {
		return nil, fmt.Errorf("reading a blob: %w", err)
	}
	return data, nil
}

// Delete removes a blob, and its session's directory with the last one.
func (d *DirBlobs) Delete(_ context.Context, key string) error {
	if err := d.root.Remove(key); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing a blob: %w", err)
	}
	// It is not empty while others are there.
	_ = d.root.Remove(filepath.Dir(key))
	return nil
}
