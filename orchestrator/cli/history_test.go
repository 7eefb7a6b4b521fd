package cli

import (
	"context"
	"flag"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.temporal.io/api/enums/v1"
	"go.temporal.io/api/history/v1"
	"google.golang.org/protobuf/encoding/protojson"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/migrations"
	"holdfast/orchestrator/config"
	"holdfast/orchestrator/devserver"
	"holdfast/orchestrator/engine/simulated/fault"
	"holdfast/workflows/task"
)

// update rewrites the recorded histories that package workflows replays.
var update = flag.Bool("update", false, "rewrite workflows/testdata from this run")

// inProcess is the service in this process, so that a test can look at Temporal.
type inProcess struct {
	*stack
	client  *client.Client
	engines *simulatedEngines
}

// startInProcess runs the service against a private Postgres and Temporal, with
// engines that are started and not yet registered.
func startInProcess(t *testing.T, engines int, adjust ...func(*config.Config)) *inProcess {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	servers, err := devserver.Start(ctx, devserver.Config{DataDir: filepath.Join(openDir(t), "data")})
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := servers.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	cfg := config.Default()
	cfg.Listen = "127.0.0.1:0"
	cfg.Database.URL, cfg.Temporal.Address = servers.DatabaseURL(), servers.TemporalAddress()
	cfg.Dev.Engines, cfg.Dev.TimeScale = engines, 500
	for _, change := range adjust {
		change(&cfg)
	}
	if err := migrations.Up(ctx, cfg.Database.URL); err != nil {
		cancel()
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	s := &inProcess{}
	if s.engines, err = startEngines(cfg.Dev, log); err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Cleanup(s.engines.stop)
	if s.stack, err = newStack(ctx, cfg, log); err != nil {
		cancel()
		t.Fatal(err)
	}
	served, ended := make(chan string, 1), make(chan error, 1)
	go func() {
		ended <- s.run(ctx, func(_ context.Context, address string) error { served <- address; return nil })
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(2 * patience):
			stacks := make([]byte, 1<<20)
			t.Errorf("the service does not end:\n%s", stacks[:runtime.Stack(stacks, true)])
		}
		s.close()
	})
	select {
	case address := <-served:
		if s.client, err = client.New(client.Config{BaseURL: "http://" + address}); err != nil {
			t.Fatal(err)
		}
	case err := <-ended:
		ended <- err // for the cleanup
		t.Fatalf("the service ended before it served: %v", err)
	}
	return s
}

// slow makes the engines so many times slower than they are: whoever looks into the
// middle of a model call must come in time, however busy the machine is. 1 is their speed.
func (s *inProcess) slow(t *testing.T, factor float64) {
	t.Helper()
	for _, server := range s.engines.servers {
		if err := server.SetFaults(fault.Settings{SlowFactor: factor}); err != nil {
			t.Fatal(err)
		}
	}
}

// submitOne opens a run and releases one replayed agent session; it returns its id.
func (s *inProcess) submitOne(ctx context.Context, t *testing.T, turns int) (run, session uuid.UUID) {
	t.Helper()
	opened, err := s.client.CreateRun(ctx, demoRun("one", "default"))
	if err != nil {
		t.Fatal(err)
	}
	spec := task.Spec{
		Class: "agent", Prompt: task.Prompt{Synthetic: &task.Synthetic{Tokens: 200, Seed: 1}},
		Environment: &task.Environment{Kind: task.EnvironmentReplay},
	}
	for range turns {
		spec.Environment.Turns = append(spec.Environment.Turns, task.ReplayTurn{OutputTokens: 3, AppendTokens: 2})
	}
	if _, err := s.client.SubmitBatch(ctx, opened.ID, "one", client.NewBatch{Tasks: client.Tasks([]task.Spec{spec})}); err != nil {
		t.Fatal(err)
	}
	page, err := s.client.Sessions(ctx, opened.ID, client.SessionsQuery{})
	if err != nil || len(page.Sessions) != 1 {
		t.Fatalf("sessions %+v, error %v", page, err)
	}
	return opened.ID, page.Sessions[0].ID
}

// await waits for the run's next sample.
func (s *inProcess) await(ctx context.Context, t *testing.T, run uuid.UUID) *wire.Sample {
	t.Helper()
	sample, err := s.client.Read(run, client.SamplesQuery{}).Next(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return sample
}

// histories returns the event histories of all runs of a workflow, oldest first.
func (s *inProcess) histories(ctx context.Context, t *testing.T, session uuid.UUID) []*history.History {
	t.Helper()
	described, err := s.temporal.DescribeWorkflow(ctx, session.String(), "")
	if err != nil {
		t.Fatal(err)
	}
	var all []*history.History
	for run := described.RawResponse.WorkflowExecutionInfo.FirstRunId; run != ""; {
		h := &history.History{}
		events := s.temporal.GetWorkflowHistory(ctx, session.String(), run, true, enums.HISTORY_EVENT_FILTER_TYPE_ALL_EVENT)
		run = ""
		for events.HasNext() {
			event, err := events.Next()
			if err != nil {
				t.Fatal(err)
			}
			h.Events = append(h.Events, event)
			if next := event.GetWorkflowExecutionContinuedAsNewEventAttributes(); next != nil {
				run = next.NewExecutionRunId
			}
		}
		all = append(all, h)
	}
	return all
}

// record keeps a history for the replay test of package workflows.
func record(t *testing.T, name string, h *history.History) {
	t.Helper()
	if !*update {
		return
	}
	text, err := protojson.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("..", "..", "workflows", "testdata", name+".json")
	if err := os.WriteFile(path, text, 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestHoldCostsFewEvents holds a session until an engine appears, and counts what
// the hold cost its history.
func TestHoldCostsFewEvents(t *testing.T) {
	ctx := within(t, 4*time.Minute)
	s := startInProcess(t, 1)
	run, session := s.submitOne(ctx, t, 2)
	eventually(t, time.Minute, "the session is held", func() bool {
		got, err := s.client.Session(ctx, session)
		if err != nil {
			t.Fatal(err)
		}
		return got.State == "held" && got.HoldReason == "no_instance"
	})
	if _, err := s.client.RegisterInstance(ctx, "default", wire.NewInstance{ID: "late", URL: s.engines.servers[0].URL(), Kind: "simulated"}); err != nil {
		t.Fatal(err)
	}
	if sample := s.await(ctx, t, run); sample.Status != "completed" || sample.Times.HeldSeconds <= 0 || sample.Usage.Turns != 2 {
		t.Fatalf("sample %+v", sample)
	}
	runs := s.histories(ctx, t, session)
	if len(runs) != 1 {
		t.Fatalf("a short hold took %d workflow runs", len(runs))
	}
	// From the question for admission to the last event before the turn is asked for.
	first, last := 0, 0
	for i, event := range runs[0].Events {
		switch name := event.GetActivityTaskScheduledEventAttributes().GetActivityType().GetName(); {
		case name == "holdfast.admit" && first == 0:
			first = i
		case name == "holdfast.turn" && last == 0:
			last = i
		}
	}
	if cost := last - first; first == 0 || cost <= 0 || cost > 15 {
		t.Fatalf("the hold cost %d events (from event %d to %d)", cost, first, last)
	}
	record(t, "held", runs[0])
}

// TestFourHundredTurnsContinueAsNew runs a session that outgrows one history.
func TestFourHundredTurnsContinueAsNew(t *testing.T) {
	ctx := within(t, 5*time.Minute)
	s := startInProcess(t, 1)
	if err := s.engines.register(ctx, s.store, "default"); err != nil {
		t.Fatal(err)
	}
	run, session := s.submitOne(ctx, t, 400)
	sample := s.await(ctx, t, run)
	if sample.Status != "completed" || sample.Usage.Turns != 400 || sample.Usage.OutputTokens != 1_200 {
		t.Fatalf("sample %+v", sample)
	}
	ids, mask, _, err := sample.Packed.Unpack()
	if err != nil || len(ids) != 200+400*3+399*2 || len(mask) != len(ids) {
		t.Fatalf("%d tokens, %d of mask, error %v", len(ids), len(mask), err)
	}
	runs := s.histories(ctx, t, session)
	if len(runs) < 2 {
		t.Fatalf("400 turns took %d workflow run", len(runs))
	}
	for i, h := range runs {
		if len(h.Events) > 2_100 {
			t.Errorf("run %d has %d events", i, len(h.Events))
		}
	}
	record(t, "last-of-a-chain", runs[len(runs)-1])
	s.expectSession(ctx, t, session, "completed")
}

// TestCancelStopsTheEngine cancels a session in the middle of a model call.
func TestCancelStopsTheEngine(t *testing.T) {
	ctx := within(t, 4*time.Minute)
	s := startInProcess(t, 1)
	if err := s.engines.register(ctx, s.store, "default"); err != nil {
		t.Fatal(err)
	}
	opened, err := s.client.CreateRun(ctx, demoRun("cancel", "default"))
	if err != nil {
		t.Fatal(err)
	}
	// 100,000 tokens would take minutes.
	s.slow(t, 50)
	spec := task.Spec{Class: "rlvr", Prompt: task.Prompt{Synthetic: &task.Synthetic{Tokens: 100, Seed: 1}},
		Environment: &task.Environment{Kind: task.EnvironmentReplay, Turns: []task.ReplayTurn{{OutputTokens: 100_000}}}}
	if _, err := s.client.SubmitBatch(ctx, opened.ID, "one", client.NewBatch{Tasks: client.Tasks([]task.Spec{spec})}); err != nil {
		t.Fatal(err)
	}
	page, err := s.client.Sessions(ctx, opened.ID, client.SessionsQuery{})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "the engine runs the session", func() bool { return s.engines.servers[0].Stats().Running() == 1 })
	if _, err := s.client.CancelSession(ctx, page.Sessions[0].ID, "not needed"); err != nil {
		t.Fatal(err)
	}
	if sample := s.await(ctx, t, opened.ID); sample.Status != "cancelled" || sample.Reward != nil {
		t.Fatalf("sample %+v", sample)
	}
	eventually(t, patience, "the engine runs nothing", func() bool { return s.engines.servers[0].Stats().Running() == 0 })
	record(t, "cancelled", s.histories(ctx, t, page.Sessions[0].ID)[0])
	s.expectSession(ctx, t, page.Sessions[0].ID, "cancelled")
}

// expectSession checks the audit trail's end and the workflow's.
func (s *inProcess) expectSession(ctx context.Context, t *testing.T, id uuid.UUID, status string) {
	t.Helper()
	got, err := s.client.Session(ctx, id)
	if err != nil || got.State != "ended" || got.Status != status {
		t.Fatalf("session %+v, error %v", got, err)
	}
	if err := s.temporal.GetWorkflow(ctx, id.String(), "").Get(ctx, nil); err != nil {
		t.Fatalf("the workflow ended with %v", err)
	}
	view, err := s.client.Router(ctx, "default")
	if err != nil || view.Text == "" || len(view.Instances) != 1 || view.Instances[0].Protected != 0 || view.HeldTotal != 0 {
		t.Fatalf("after the session ended the router shows %+v, %v", view, err)
	}
}
