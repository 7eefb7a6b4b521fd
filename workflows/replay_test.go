package workflows

import (
	"path/filepath"
	"testing"

	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"
)

// TestRecordedHistoriesReplay replays histories that a real server wrote: a change
// of the workflow's code that would break sessions under way fails here. They are
// recorded anew, after a deliberate change only, with
//
//	go test ./orchestrator/cli -run 'Hold|FourHundred|CancelStops|EveryEnvironment' -update
func TestRecordedHistoriesReplay(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("testdata", "*.json"))
	if err != nil || len(files) < 4 {
		t.Fatalf("recorded histories %v, error %v", files, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			replayer := worker.NewWorkflowReplayer()
			replayer.RegisterWorkflowWithOptions(Session, workflow.RegisterOptions{Name: SessionWorkflow})
			if err := replayer.ReplayWorkflowHistoryFromJSONFile(nil, file); err != nil {
				t.Fatal(err)
			}
		})
	}
}
