// Package orchestrator_test keeps the directions of imports between the rooms.
package orchestrator_test

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// allowed lists, for each room, the rooms of this module that it may import. The
// longest matching prefix names a package's room. What is not listed may not be
// imported, so a new direction is a decision made here.
var allowed = map[string][]string{
	"holdfast/router":                            {"holdfast/router/quota", "holdfast/router/residency", "holdfast/router/prefix", "holdfast/router/forecast"},
	"holdfast/router/quota":                      {},
	"holdfast/router/residency":                  {},
	"holdfast/router/prefix":                     {},
	"holdfast/router/forecast":                   {},
	"holdfast/router/sim":                        {"holdfast/router", "holdfast/router/quota", "holdfast/router/residency", "holdfast/router/prefix", "holdfast/router/sim/instance", "holdfast/router/sim/workload"},
	"holdfast/router/sim/instance":               {},
	"holdfast/router/sim/workload":               {},
	"holdfast/workflows/task":                    {"holdfast/orchestrator/environment/spec", "holdfast/orchestrator/toolcall"},
	"holdfast/workflows":                         {"holdfast/router", "holdfast/workflows/task"},
	"holdfast/workflows/activities":              {"holdfast/router", "holdfast/router/prefix", "holdfast/workflows", "holdfast/workflows/task", "holdfast/orchestrator/pool", "holdfast/orchestrator/engine", "holdfast/orchestrator/scoring", "holdfast/orchestrator/environment/spec", "holdfast/store", "holdfast/orchestrator/environment", "holdfast/orchestrator/environment/failure", "holdfast/orchestrator/toolcall", "holdfast/orchestrator/transcript"},
	"holdfast/migrations":                        {},
	"holdfast/store":                             {"holdfast/router", "holdfast/workflows/task"},
	"holdfast/store/storetest":                   {"holdfast/migrations", "holdfast/store", "holdfast/router", "holdfast/workflows/task", "holdfast/orchestrator/devserver"},
	"holdfast/api/wire":                          {"holdfast/workflows/task"},
	"holdfast/api/client":                        {"holdfast/api/wire", "holdfast/workflows/task"},
	"holdfast/api/export":                        {"holdfast/api/wire"},
	"holdfast/api":                               {"holdfast/api/wire", "holdfast/api/export", "holdfast/store", "holdfast/router", "holdfast/workflows", "holdfast/workflows/task", "holdfast/orchestrator/environment/spec", "holdfast/orchestrator/pace", "holdfast/orchestrator/toolcall"},
	"holdfast/orchestrator/config":               {},
	"holdfast/orchestrator/devserver":            {},
	"holdfast/orchestrator/engine":               {"holdfast/router"},
	"holdfast/orchestrator/engine/simulated":     {"holdfast/orchestrator/engine", "holdfast/router/sim/instance", "holdfast/router/prefix"},
	"holdfast/orchestrator/kvevents":             {"holdfast/router", "holdfast/router/prefix"},
	"holdfast/orchestrator/engine/tinygguf":      {},
	"holdfast/orchestrator/enginetest":           {"holdfast/orchestrator/engine/tinygguf"},
	"holdfast/orchestrator/pace":                 {},
	"holdfast/orchestrator/pool":                 {"holdfast/router"},
	"holdfast/orchestrator/fleet":                {"holdfast/router", "holdfast/store", "holdfast/orchestrator/engine", "holdfast/orchestrator/kvevents"},
	"holdfast/orchestrator/weights":              {"holdfast/router", "holdfast/store", "holdfast/orchestrator/engine"},
	"holdfast/orchestrator/service":              {"holdfast/router", "holdfast/store", "holdfast/workflows", "holdfast/workflows/activities", "holdfast/orchestrator/engine", "holdfast/orchestrator/fleet", "holdfast/orchestrator/weights", "holdfast/orchestrator/pool", "holdfast/orchestrator/scoring", "holdfast/orchestrator/environment"},
	"holdfast/orchestrator/trace":                {"holdfast/workflows/task", "holdfast/router/sim/workload", "holdfast/orchestrator/trace"},
	"holdfast/orchestrator/toolcall":             {},
	"holdfast/orchestrator/transcript":           {"holdfast/orchestrator/toolcall"},
	"holdfast/orchestrator/scoring":              {"holdfast/orchestrator/scoring/number", "holdfast/orchestrator/environment/command", "holdfast/orchestrator/environment/exchange", "holdfast/orchestrator/environment/excerpt", "holdfast/orchestrator/environment/failure", "holdfast/orchestrator/environment/spec"},
	"holdfast/orchestrator/scoring/number":       {},
	"holdfast/orchestrator/environment":          {"holdfast/orchestrator/environment/command", "holdfast/orchestrator/environment/exchange", "holdfast/orchestrator/environment/excerpt", "holdfast/orchestrator/environment/failure", "holdfast/orchestrator/environment/spec", "holdfast/orchestrator/toolcall"},
	"holdfast/orchestrator/environment/spec":     {"holdfast/orchestrator/toolcall", "holdfast/orchestrator/scoring/number"},
	"holdfast/orchestrator/environment/failure":  {},
	"holdfast/orchestrator/environment/excerpt":  {},
	"holdfast/orchestrator/environment/command":  {"holdfast/orchestrator/environment/excerpt", "holdfast/orchestrator/environment/failure", "holdfast/orchestrator/environment/spec"},
	"holdfast/orchestrator/environment/exchange": {"holdfast/orchestrator/environment/excerpt", "holdfast/orchestrator/environment/failure"},
	"holdfast/orchestrator":                      {},
	"holdfast/orchestrator/cli":                  {"holdfast"},
	"holdfast/orchestrator/cmd":                  {"holdfast"},
}

// pureRooms may not import these packages: the router's decisions must depend on
// events alone.
var (
	pureRooms      = []string{"holdfast/router", "holdfast/router/quota", "holdfast/router/residency", "holdfast/router/prefix", "holdfast/router/forecast", "holdfast/router/sim/instance", "holdfast/orchestrator/pace"}
	impurePackages = []string{"os", "net", "net/http", "context", "log", "log/slog", "math/rand", "math/rand/v2", "sync", "runtime", "syscall"}
)

type listedPackage struct {
	ImportPath string
	Imports    []string
}

func TestImportsGoOneWay(t *testing.T) {
	packages := listPackages(t)
	for _, p := range packages {
		room, rooms, ok := roomOf(p.ImportPath)
		if !ok {
			t.Errorf("%s belongs to no room: give it one in this test", p.ImportPath)
			continue
		}
		for _, imported := range p.Imports {
			if !strings.HasPrefix(imported, "holdfast/") || imported == room {
				continue
			}
			target, _, _ := roomOf(imported)
			if target != room && !slices.Contains(rooms, target) && !slices.Contains(rooms, "holdfast") {
				t.Errorf("%s imports %s: room %s may not import room %s", p.ImportPath, imported, room, target)
			}
		}
	}
}

func TestRouterCoreIsPure(t *testing.T) {
	seen := 0
	for _, p := range listPackages(t) {
		if !slices.Contains(pureRooms, p.ImportPath) {
			continue
		}
		seen++
		for _, imported := range p.Imports {
			if slices.Contains(impurePackages, imported) {
				t.Errorf("%s imports %s, which lets something other than events reach a decision", p.ImportPath, imported)
			}
		}
	}
	if seen != len(pureRooms) {
		t.Errorf("%d of %d pure rooms exist", seen, len(pureRooms))
	}
}

// roomOf returns the room of a package: the longest listed prefix of its path.
func roomOf(path string) (room string, rooms []string, ok bool) {
	for candidate := path; candidate != "holdfast"; {
		if rooms, ok := allowed[candidate]; ok {
			return candidate, rooms, true
		}
		slash := strings.LastIndexByte(candidate, '/')
		if slash < 0 {
			break
		}
		candidate = candidate[:slash]
	}
	return "", nil, false
}

func listPackages(t *testing.T) []listedPackage {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", "./...")
	cmd.Dir = ".."
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("go list: %v\n%s", err, exit.Stderr)
		}
		t.Fatalf("go list: %v", err)
	}
	var packages []listedPackage
	decoder := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p listedPackage
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("go list: %v", err)
		}
		if strings.HasPrefix(p.ImportPath, "holdfast/") {
			packages = append(packages, p)
		}
	}
	if len(packages) < 10 {
		t.Fatalf("go list found only %d packages", len(packages))
	}
	return packages
}
