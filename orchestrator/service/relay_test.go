package service

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"log/slog"
	"os"
	"slices"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"go.temporal.io/api/serviceerror"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/workflow"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
	"holdfast/workflows/task"
)

func TestMain(m *testing.M) { os.Exit(storetest.Main(m)) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// oneWorkflow is a Temporal server that knows the present run of one workflow.
type oneWorkflow struct {
	client.Client
	run string
	// named is called after the run was told, or where it is asked to cancel.
	named, asked func()
	// cancels are the runs that were asked to cancel, endedRun is one that cannot be.
	cancels  []string
	endedRun string
}

func (w *oneWorkflow) DescribeWorkflow(_ context.Context, id, _ string) (*client.WorkflowExecutionDescription, error) {
	described := &client.WorkflowExecutionDescription{}
	described.WorkflowExecution = workflow.Execution{ID: id, RunID: w.run}
	w.named()
	return described, nil
}

func (w *oneWorkflow) CancelWorkflow(_ context.Context, _, run string) error {
	w.asked()
	if run == w.endedRun {
		return serviceerror.NewNotFound("workflow execution already completed")
	}
	w.cancels = append(w.cancels, run)
	return nil
}

// TestCancellationOfAnAttemptThatWasLeft: the relay holds the cancellation while the
// session, which reads of it by itself, begins again. The run of the new attempt does
// not hear of it, whenever that happens.
func TestCancellationOfAnAttemptThatWasLeft(t *testing.T) {
	for name, c := range map[string]struct {
		// when it begins again, if it does
		when    string
		cancels []string
		left    int
	}{
		"not begun again":          {cancels: []string{"old run"}},
		"before the run is named":  {when: "claimed"},
		"after the run is named":   {when: "named"},
		"while the run is asked":   {when: "asked"},
		"the run ends, another on": {when: "continued", left: 1},
	} {
		t.Run(name, func(t *testing.T) {
			url := storetest.URL(t)
			s := storetest.Open(t, url)
			id := cancelling(t, s, url)
			temporal := &oneWorkflow{run: "old run", named: func() {}, asked: func() {}}
			beginAgain := func() {
				if _, _, err := s.EndSession(t.Context(), store.Ending{SessionID: id, Status: router.Cancelled}); !errors.Is(err, store.ErrSessionRestarted) {
					t.Errorf("the session ended: %v", err)
				}
				temporal.run, temporal.endedRun = "new run", "old run"
			}
			r := &relay{store: s, temporal: temporal, cancelLocal: func(uuid.UUID) {}, log: slog.New(slog.DiscardHandler)}
			rows, err := s.ClaimOutbox(t.Context(), relayBatch, relayLeaseSeconds)
			must(t, err)
			i := slices.IndexFunc(rows, func(row store.OutboxRow) bool { return row.Kind == store.OutboxCancel })
			switch c.when {
			case "claimed":
				beginAgain()
			case "named":
				temporal.named = beginAgain
			case "asked":
				temporal.asked = beginAgain
			case "continued":
				temporal.endedRun = "old run"
			}
			if err := r.send(t.Context(), &rows[i]); (err != nil) != (c.left == 1) {
				t.Errorf("delivered: %v", err)
			}
			if !slices.Equal(temporal.cancels, c.cancels) {
				t.Errorf("asked to cancel were %q, want %q", temporal.cancels, c.cancels)
			}
		})
	}
}

// cancelling is a session under way that is asked to end so that it can begin again.
func cancelling(t *testing.T, s *store.Store, url string) uuid.UUID {
	t.Helper()
	ctx := t.Context()
	run, err := s.CreateRun(ctx, store.NewRun{Name: "test", Pool: "main", Contract: store.Contract{
		Classes: []store.ClassShare{{Class: "agent", Share: 1}}, MaxConcurrency: 1,
	}})
	must(t, err)
	given := false
	_, _, err = s.SubmitBatch(ctx, store.BatchSubmission{
		RunID: run.ID, IdempotencyKey: "one",
		Next: func() (*task.Spec, error) {
			if given {
				return nil, io.EOF
			}
			given = true
			return &task.Spec{Class: "agent", Prompt: task.Prompt{TokenIDs: []int32{1, 2, 3}}, Sampling: task.Sampling{MaxTokens: 8}}, nil
		},
		BodyHash: func() []byte { sum := sha256.Sum256([]byte("one")); return sum[:] },
	})
	must(t, err)
	_, err = s.DispatchQueued(ctx, run.ID, 1)
	must(t, err)
	sessions, err := s.Sessions(ctx, store.SessionQuery{RunID: run.ID})
	must(t, err)
	id := sessions[0].ID
	_, err = s.CancelSession(ctx, id, "stale")
	must(t, err)
	conn, err := pgx.Connect(ctx, url)
	must(t, err)
	_, err = conn.Exec(ctx, `update sessions set stale = true, restarting = true where session_id = $1`, id)
	must(t, err)
	must(t, conn.Close(ctx))
	return id
}
