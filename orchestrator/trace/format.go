package trace

import (
	"fmt"
	"strings"
)

// Format is the closed set of trace formats that can be read.
type Format int

// The formats.
const (
	// FormatLMCache is LMCache's agent trace: one JSON line per model call with
	// its whole input and output as text.
	FormatLMCache Format = iota + 1
	// FormatTauBench is tau-bench's result file: a JSON array of trajectories.
	FormatTauBench
	// FormatMooncake is Mooncake's request trace: JSON lines with block hashes.
	FormatMooncake
	// FormatTraceLab is TraceLab's round trace: one JSON line per model call
	// with token counts and event times.
	FormatTraceLab
	// FormatTraceLabCSV is TraceLab's replay CSV for simulators.
	FormatTraceLabCSV
	// FormatHoldfast is the compact numeric trace of this package.
	FormatHoldfast
)

// formatTable holds each format's name, the ending of its files in a folder and
// its reader.
var formatTable = map[Format]struct {
	name   string
	ending string
	read   func(*source, yieldFunc) error
}{
	FormatLMCache:     {"lmcache", ".jsonl", readLMCache},
	FormatTauBench:    {"tau-bench", ".json", readTauBench},
	FormatMooncake:    {"mooncake", ".jsonl", readMooncake},
	FormatTraceLab:    {"tracelab", ".jsonl", readTraceLab},
	FormatTraceLabCSV: {"tracelab-csv", ".csv", readTraceLabCSV},
	FormatHoldfast:    {"holdfast", ".jsonl", readCompactSessions},
}

// Formats lists all formats in order.
func Formats() []Format {
	return []Format{FormatLMCache, FormatTauBench, FormatMooncake, FormatTraceLab, FormatTraceLabCSV, FormatHoldfast}
}

// String returns the name by which a format is asked for.
func (f Format) String() string {
	if entry, ok := formatTable[f]; ok {
		return entry.name
	}
	return fmt.Sprintf("Format(%d)", int(f))
}

// ParseFormat finds a format by its name.
func ParseFormat(name string) (Format, error) {
	var names []string
	for _, f := range Formats() {
		if f.String() == name {
			return f, nil
		}
		names = append(names, f.String())
	}
	return 0, fmt.Errorf("unknown trace format %q; known are %s", name, strings.Join(names, ", "))
}
