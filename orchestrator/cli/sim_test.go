package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// runSim runs the simulator's command line in process.
func runSim(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd := NewSimCommand()
	cmd.SilenceUsage = true
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&errs)
	err = cmd.ExecuteContext(t.Context())
	return out.String(), errs.String(), err
}

func TestSimPrintsOneObjectAndNothingElse(t *testing.T) {
	stdout, stderr, err := runSim(t, "paper", "--json", "--config", "qwen", "--regimes", "stationary",
		"--policies", "permissive,holdfast", "--seeds", "1", "--hours", "0.25")
	if err != nil {
		t.Fatal(err)
	}
	var result struct {
		Rows []struct {
			Config, Regime, Policy string
			Balanced               float64 `json:"balanced_per_min"`
			Seeds                  int
		}
	}
	if err := json.Unmarshal([]byte(stdout), &result); err != nil {
		t.Fatalf("standard output is no JSON object: %v", err)
	}
	if len(result.Rows) != 2 || result.Rows[1].Policy != "holdfast" || result.Rows[1].Balanced <= 0 || result.Rows[1].Seeds != 1 {
		t.Errorf("rows %+v", result.Rows)
	}
	if !strings.Contains(stderr, "2 of 2 runs") {
		t.Errorf("no progress on standard error: %q", stderr)
	}
}

func TestSimPrintsAnEarlierResultAsMarkdown(t *testing.T) {
	args := []string{"paper", "--config", "step", "--regimes", "end-to-end", "--policies", "holdfast", "--seeds", "1", "--iterations", "8"}
	result, _, err := runSim(t, append(args, "--json")...)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "paper.json")
	if err := os.WriteFile(file, []byte(result), 0o600); err != nil {
		t.Fatal(err)
	}
	page, progress, err := runSim(t, "paper", "--from", file, "--markdown")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(page, "## step-like, end-to-end") || !strings.Contains(page, "| holdfast |") || progress != "" {
		t.Errorf("page %q, progress %q", page, progress)
	}
	fresh, _, err := runSim(t, append(args, "--markdown")...)
	if err != nil {
		t.Fatal(err)
	}
	if fresh != page {
		t.Error("a page from a file differs from that of the run which wrote it")
	}
}

func TestSimReplaysRecordedSessions(t *testing.T) {
	args := []string{"paper", "--config", "qwen", "--regimes", "ungrouped", "--policies", "holdfast", "--seeds", "1", "--hours", "0.25"}
	drawn, _, err := runSim(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	recorded, _, err := runSim(t, append(args, "--agent-traces", "lmcache-miniswe")...)
	if err != nil {
		t.Fatal(err)
	}
	if drawn == recorded {
		t.Error("recorded sessions make no difference")
	}
}

func TestSimRefusesNonsense(t *testing.T) {
	for _, args := range [][]string{
		{"paper", "--seeds", "0"},
		{"paper", "--seeds", "11"},
		{"paper", "--config", "llama"},
		{"paper", "--regimes", "weekly"},
		{"paper", "--iterations", "-1"},
		{"paper", "--json", "--markdown"},
		{"paper", "--from", "no-such-file"},
		{"stress", "--hours", "-1"},
		{"curve", "--agent-traces", "no-such-trace"},
	} {
		if _, _, err := runSim(t, args...); err == nil {
			t.Errorf("%v is accepted", args)
		}
	}
}
