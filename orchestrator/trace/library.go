package trace

import (
	"bytes"
	"embed"
	"fmt"
	"io/fs"
	"strings"
	"sync"
)

// shippedFiles are the compact traces derived from the public ones; docs/traces.md
// gives the command that made each.
//
//go:embed data/*.jsonl
var shippedFiles embed.FS

// Names of the shipped traces.
const (
	MiniSWE       = "lmcache-miniswe"
	LMCacheTau    = "lmcache-taubench"
	TauBench      = "tau-bench-airline"
	MooncakeChat  = "mooncake-conversation"
	TraceLab      = "tracelab-rounds"
	TraceLabCSVs  = "tracelab-replay"
	shippedFolder = "data"
)

// Shipped lists the names of the traces that the program carries.
func Shipped() []string {
	entries, err := fs.ReadDir(shippedFiles, shippedFolder)
	if err != nil {
		panic("trace: the embedded folder cannot be listed: " + err.Error())
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = strings.TrimSuffix(e.Name(), ".jsonl")
	}
	return names
}

// shippedCache keeps each trace after its first use: name to a func() (Trace, error).
var shippedCache sync.Map

// LoadShipped returns a shipped trace. Its sessions are shared between callers
// and must not be changed.
func LoadShipped(name string) (Trace, error) {
	load, _ := shippedCache.LoadOrStore(name, sync.OnceValues(func() (Trace, error) {
		text, err := shippedFiles.ReadFile(shippedFolder + "/" + name + ".jsonl")
		if err != nil {
			return Trace{}, fmt.Errorf("unknown trace %q; shipped are %s", name, strings.Join(Shipped(), ", "))
		}
		return loadFrom(name+".jsonl", bytes.NewReader(text))
	}))
	return load.(func() (Trace, error))()
}
