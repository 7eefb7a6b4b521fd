package cli

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Names of the processes that a measurement tells apart.
const (
	processSelf     = "holdfast"
	processTemporal = "holdfast-temporal"
	processPostgres = "postgres"
)

// processUse is what a group of processes has used so far.
type processUse struct {
	cpuSeconds  float64
	residentMiB float64
}

// clockTicksPerSecond is Linux's USER_HZ, which is 100 on every architecture that
// Go runs on.
const clockTicksPerSecond = 100

// readProcesses sums up this process and those below it by name. A simulated
// engine that runs as a child of its own is left out.
func readProcesses() map[string]processUse {
	self := os.Getpid()
	children, stats := map[int][]int{}, map[int][]string{}
	paths, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended meanwhile
		}
		end := bytes.LastIndexByte(text, ')')
		begin := bytes.IndexByte(text, '(')
		if begin < 0 || end < begin {
			continue
		}
		fields := append([]string{string(text[begin+1 : end])}, strings.Fields(string(text[end+1:]))...)
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		parent, _ := strconv.Atoi(fields[2])
		children[parent] = append(children[parent], pid)
		stats[pid] = fields
	}
	use := map[string]processUse{}
	for queue := []int{self}; len(queue) > 0; queue = queue[1:] {
		pid := queue[0]
		queue = append(queue, children[pid]...)
		name := processName(pid, self, stats[pid])
		if name == "" {
			continue
		}
		sum := use[name]
		sum.cpuSeconds += ticks(stats[pid][12]) + ticks(stats[pid][13])
		if pid != self {
			sum.cpuSeconds += ticks(stats[pid][14]) + ticks(stats[pid][15])
		}
		sum.residentMiB += residentMiB(pid)
		use[name] = sum
	}
	return use
}

// processName tells which group a process counts to, empty for none. The kernel
// cuts names at 15 bytes.
func processName(pid, self int, stat []string) string {
	switch {
	case len(stat) < 16:
		return ""
	case pid == self:
		return processSelf
	case strings.HasPrefix(processTemporal, stat[0]) && stat[0] != processSelf:
		return processTemporal
	case strings.HasPrefix(stat[0], processPostgres):
		return processPostgres
	}
	return ""
}

func ticks(text string) float64 {
	n, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return 0
	}
	return n / clockTicksPerSecond
}

// residentMiB is the resident set size of a process, 0 if it has ended.
func residentMiB(pid int) float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(text))
	pages, err := strconv.ParseFloat(fields[1], 64)
	if err != nil {
		return 0
	}
	return pages * float64(os.Getpagesize()) / (1 << 20)
}
