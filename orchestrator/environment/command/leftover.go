package command

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Names of what lies below the root: a lock for it, a folder for each owner with
// a lock of its own, in it a folder for each directory, and in that a record of
// each running process.
const (
	lockName     = "lock"
	ownerPrefix  = "owner-"
	recordPrefix = "process-"
	markerName   = "HOLDFAST_ENVIRONMENT"
)

// processRecord names a process beyond doubt: numbers are given again, but not
// within the same tick of the same boot.
type processRecord struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time"`
	Boot      string `json:"boot"`
}

func writeRecord(path string, record processRecord) error {
	raw, err := json.Marshal(record)
	if err != nil {
		return fmt.Errorf("recording a process: %w", err)
	}
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		return fmt.Errorf("recording a process: %w", err)
	}
	return nil
}

// lockFile opens path and locks it for as long as the file is open. A process
// that dies gives the lock back.
func lockFile(path string, how int) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(file.Fd()), how)
		if err == nil {
			return file, nil
		}
		if !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(err, file.Close())
		}
	}
}

// sweep removes what owners that are gone left below root. The caller holds the
// root's lock.
func sweep(root string) (Swept, error) {
	var swept Swept
	entries, err := os.ReadDir(root)
	if err != nil {
		return swept, fmt.Errorf("looking for leftovers: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		if !entry.IsDir() || !strings.HasPrefix(entry.Name(), ownerPrefix) {
			continue
		}
		owner := filepath.Join(root, entry.Name())
		lock, err := lockFile(filepath.Join(owner, lockName), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) {
			continue // its owner lives
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		found, err := sweepOwner(owner)
		swept.Directories += found.Directories
		swept.Processes += found.Processes
		errs = append(errs, err, lock.Close())
	}
	if err := errors.Join(errs...); err != nil {
		return swept, fmt.Errorf("removing leftovers: %w", err)
	}
	return swept, nil
}

func sweepOwner(owner string) (Swept, error) {
	var swept Swept
	entries, err := os.ReadDir(owner)
	if err != nil {
		return swept, err
	}
	markers := make(map[string]bool)
	for _, entry := range entries {
		if !entry.IsDir() {
			continue
		}
		swept.Directories++
		markers[filepath.Base(owner)+"/"+entry.Name()] = true
		records, err := filepath.Glob(filepath.Join(owner, entry.Name(), recordPrefix+"*"))
		if err != nil {
			return swept, err
		}
		for _, record := range records {
			swept.Processes += killRecorded(record)
		}
	}
	swept.Processes += killMarked(markers, func(int) bool { return false })
	return swept, removeTree(owner)
}

// killRecorded kills the group of a recorded process if it is still that one.
func killRecorded(path string) int {
	raw, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	var record processRecord
	// A record that a crash cut short names nobody; the marker finds its process.
	if json.Unmarshal(raw, &record) != nil || record.PID <= 1 || record.Boot != bootID() {
		return 0
	}
	if started, err := startTime(record.PID); err != nil || started != record.StartTime {
		return 0
	}
	if unix.Kill(-record.PID, unix.SIGKILL) != nil {
		return 0
	}
	return 1
}

// killRounds bounds the search for processes that fork while they are killed.
const killRounds = 20

// killMarked kills every process whose environment carries one of the markers,
// except those whose session is spared, and returns how many there were.
func killMarked(markers map[string]bool, spared func(session int) bool) int {
	if len(markers) == 0 {
		return 0
	}
	killed := 0
	for range killRounds {
		found := 0
		for _, pid := range processIDs() {
			if hasMarker(pid, markers) && !spared(sessionOf(pid)) && killSame(pid, markers) {
				found++
			}
		}
		if found == 0 {
			break
		}
		killed += found
	}
	return killed
}

// killSame kills through a handle taken before looking again, so that a number
// given to somebody else in between does no harm.
func killSame(pid int, markers map[string]bool) bool {
	handle, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return false
	}
	defer unix.Close(handle)
	return hasMarker(pid, markers) && unix.PidfdSendSignal(handle, unix.SIGKILL, nil, 0) == nil
}

func hasMarker(pid int, markers map[string]bool) bool {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return false // gone, a zombie, or not ours
	}
	for variable := range bytes.SplitSeq(raw, []byte{0}) {
		if value, ok := bytes.CutPrefix(variable, []byte(markerName+"=")); ok && markers[string(value)] {
			return true
		}
	}
	return false
}

func sessionOf(pid int) int {
	session, err := unix.Getsid(pid)
	if err != nil {
		return -1
	}
	return session
}

func processIDs() []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var ids []int
	for _, entry := range entries {
		if id, err := strconv.Atoi(entry.Name()); err == nil {
			ids = append(ids, id)
		}
	}
	return ids
}

// startTime is when a process began, in clock ticks since boot: field 22 of its
// stat, counted behind the name, which may hold anything.
func startTime(pid int) (uint64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, fmt.Errorf("reading the start of process %d: %w", pid, err)
	}
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	const startField = 22 - 3
	if len(fields) <= startField {
		return 0, fmt.Errorf("reading the start of process %d: its stat has %d fields", pid, len(fields))
	}
	started, err := strconv.ParseUint(fields[startField], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("reading the start of process %d: %w", pid, err)
	}
	return started, nil
}

var bootID = sync.OnceValue(func() string {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(raw))
})

// tasksOf counts the threads of an account, which is what the kernel's limit on
// processes counts.
func tasksOf(userID int) uint64 {
	var tasks uint64
	for _, pid := range processIDs() {
		path := fmt.Sprintf("/proc/%d", pid)
		var stat unix.Stat_t
		if unix.Stat(path, &stat) != nil || int(stat.Uid) != userID {
			continue
		}
		threads, err := os.ReadDir(path + "/task")
		if err == nil {
			tasks += uint64(len(threads))
		}
	}
	return tasks
}
