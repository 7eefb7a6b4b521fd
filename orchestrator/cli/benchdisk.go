package cli

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// diskCost is what the disk below Postgres takes for a flush of 8 KiB, as each commit
// needs at least one, at once after another and after a pause. It is part of every turn.
type diskCost struct {
	FlushP50MS      float64 `json:"flush_p50_ms"`
	AfterPauseP50MS float64 `json:"flush_after_pause_p50_ms"`
}

const (
	diskFlushes    = 100
	diskFlushBytes = 8 << 10
	// diskPause is about that of one harness between its calls.
	diskPause = 40 * time.Millisecond
)

// measureDisk flushes a file in dir, which it removes.
func measureDisk(ctx context.Context, dir string) (cost diskCost, err error) {
	file, err := os.Create(filepath.Join(dir, "flushed"))
	if err != nil {
		return cost, fmt.Errorf("measuring the disk: %w", err)
	}
	defer os.Remove(file.Name())
	defer file.Close()
	// As Postgres' log, the file has its size before.
	block := make([]byte, diskFlushBytes)
	for range diskFlushes {
		if _, err := file.Write(block); err != nil {
			return cost, fmt.Errorf("measuring the disk: %w", err)
		}
	}
	if err := file.Sync(); err != nil {
		return cost, fmt.Errorf("measuring the disk: %w", err)
	}
	flushes := func(pause time.Duration) (p50 float64, err error) {
		taken := make([]float64, diskFlushes)
		for i := range taken {
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return 0, ctx.Err()
			}
			began := time.Now()
			if _, err := file.WriteAt(block, int64(i)*diskFlushBytes); err != nil {
				return 0, fmt.Errorf("measuring the disk: %w", err)
			}
			if err := syscall.Fdatasync(int(file.Fd())); err != nil {
				return 0, fmt.Errorf("measuring the disk: %w", err)
			}
			taken[i] = float64(time.Since(began).Nanoseconds()) / 1e6
		}
		return round(quantile(taken, 0.5), 2), nil
	}
	if cost.FlushP50MS, err = flushes(0); err != nil {
		return cost, err
	}
	cost.AfterPauseP50MS, err = flushes(diskPause)
	return cost, err
}
