package store_test

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
)

func TestRunKeepsTheContractAsGivenAndNormalised(t *testing.T) {
	f := newFixture(t, 7)
	run, err := f.Run(t.Context(), f.run.ID)
	must(t, err)
	if got := run.Contract.Given[0]; got != (store.ClassShare{Class: "agent", Share: 0.486}) {
		t.Errorf("given share %+v", got)
	}
	if got := run.Contract.Contract.Classes[0].Share; math.Abs(got-0.486/0.999) > 1e-12 {
		t.Errorf("normalised share %v", got)
	}
	if run.Contract.Contract.MaxConcurrency != 7 || run.Contract.Version != 1 || run.State != store.RunActive {
		t.Errorf("run %+v", run)
	}
}

func TestOneActiveRunPerPool(t *testing.T) {
	f := newFixture(t, 1)
	ctx := t.Context()
	_, err := f.CreateRun(ctx, store.NewRun{Name: "second", Pool: pool, Contract: contract(1)})
	var conflict *store.ConflictError
	if !errors.As(err, &conflict) || conflict.Existing != f.run.ID.String() {
		t.Fatalf("a second run: %v", err)
	}
	other, err := f.CreateRun(ctx, store.NewRun{Name: "elsewhere", Pool: "other", Contract: contract(1)})
	must(t, err)
	if _, err := f.EndRun(ctx, f.run.ID); err != nil {
		t.Fatal(err)
	}
	next, err := f.CreateRun(ctx, store.NewRun{Name: "next", Pool: pool, Contract: contract(1)})
	must(t, err)
	active, err := f.Runs(ctx, store.RunQuery{State: store.RunActive})
	must(t, err)
	if len(active) != 2 || active[0].ID != next.ID || active[1].ID != other.ID {
		t.Errorf("active runs %v", active)
	}
	older, err := f.Runs(ctx, store.RunQuery{Pool: pool, Before: &next.ID})
	must(t, err)
	if len(older) != 1 || older[0].ID != f.run.ID || older[0].EndedAt == nil {
		t.Errorf("runs before the latest of the pool: %v", older)
	}
}

func TestCreateRunRefusals(t *testing.T) {
	f := newFixture(t, 1)
	bad := contract(1)
	bad.Classes[1].Share = 0.5
	for _, test := range []struct {
		run  store.NewRun
		path string
	}{
		{store.NewRun{Name: "", Pool: "p", Contract: contract(1)}, "name"},
		{store.NewRun{Name: strings.Repeat("x", 257), Pool: "p", Contract: contract(1)}, "name"},
		{store.NewRun{Name: "x", Pool: "a pool", Contract: contract(1)}, "pool"},
		{store.NewRun{Name: "x", Pool: "", Contract: contract(1)}, "pool"},
		{store.NewRun{Name: "x", Pool: "p", Contract: bad}, "contract.classes"},
	} {
		_, err := f.CreateRun(t.Context(), test.run)
		var field *store.FieldError
		if !errors.As(err, &field) || field.Path != test.path {
			t.Errorf("%+v: %v, want a refusal of %s", test.run, err, test.path)
		}
	}
	if _, err := f.Run(t.Context(), uuid.New()); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("an unknown run: %v", err)
	}
}

func TestPutContract(t *testing.T) {
	f := newFixture(t, 1)
	ctx := t.Context()
	same, err := f.PutContract(ctx, f.run.ID, contract(1))
	must(t, err)
	if same.Version != 1 {
		t.Errorf("an equal contract became version %d", same.Version)
	}
	f.submit("before", prompted("rlhf", 2))
	two := store.Contract{Classes: []store.ClassShare{{Class: "agent", Share: 0.5}, {Class: "judge", Share: 0.5}}, MaxConcurrency: 4}
	second, err := f.PutContract(ctx, f.run.ID, two)
	must(t, err)
	if second.Version != 2 || second.Contract.MaxConcurrency != 4 {
		t.Errorf("second version %+v", second)
	}
	f.submit("after", prompted("judge", 1))
	_, _, err = f.SubmitBatch(ctx, submission(t, f.run.ID, "gone", prompted("rlhf", 1)))
	var unknown *store.UnknownClassError
	if !errors.As(err, &unknown) || unknown.Path != "tasks[0].class" {
		t.Errorf("a class that is no longer declared: %v", err)
	}
	// What was released of the class goes on, and still counts.
	if ids := f.dispatch(); len(ids) != 3 {
		t.Errorf("%d sessions dispatched, want 3", len(ids))
	}
	f.verify()
	history, err := f.ContractHistory(ctx, f.run.ID)
	must(t, err)
	if len(history) != 2 || history[0].Version != 1 || len(history[1].Contract.Classes) != 2 {
		t.Errorf("history %+v", history)
	}
	mixture, err := f.Mixture(ctx, f.run.ID, store.Window{})
	must(t, err)
	for _, class := range mixture.Classes {
		if class.Class == "rlhf" && (class.Rho != 0 || class.Released != 2) {
			t.Errorf("a class outside the contract: %+v", class)
		}
	}
}

func TestEndRunLeavesNothingOpen(t *testing.T) {
	f := newFixture(t, 2)
	ctx := t.Context()
	f.submit("one", prompted("agent", 3), prompted("rlvr", 2))
	live := f.dispatch()
	f.decide(f.admit(live[0], 0, "w1"))
	run, err := f.EndRun(ctx, f.run.ID)
	must(t, err)
	if run.State != store.RunEnded || run.EndedAt == nil {
		t.Errorf("run %+v", run)
	}
	f.verify()
	backlog, err := f.Backlog(ctx, f.run.ID)
	must(t, err)
	var open, cancelled int64
	for _, class := range backlog {
		open += class.Backlog
		cancelled += class.Cancelled
	}
	if open != 2 || cancelled != 3 {
		t.Errorf("%d open and %d cancelled, want 2 and 3", open, cancelled)
	}
	messages, err := f.ClaimOutbox(ctx, 100, 60)
	must(t, err)
	cancels := 0
	for _, message := range messages {
		if message.Kind == store.OutboxCancel {
			cancels++
		}
	}
	if cancels != 2 {
		t.Errorf("%d sessions under way were asked to cancel, want 2", cancels)
	}
	if _, _, err := f.SubmitBatch(ctx, submission(t, f.run.ID, "late", prompted("agent", 1))); !errors.Is(err, store.ErrRunEnded) {
		t.Errorf("a batch for an ended run: %v", err)
	}
	if _, err := f.PutContract(ctx, f.run.ID, contract(9)); !errors.Is(err, store.ErrRunEnded) {
		t.Errorf("a contract for an ended run: %v", err)
	}
	if n, err := f.DispatchQueued(ctx, f.run.ID, 10); err != nil || n != 0 {
		t.Errorf("dispatched %d, %v", n, err)
	}
	if _, err := f.EndRun(ctx, f.run.ID); err != nil {
		t.Errorf("ending it again: %v", err)
	}
	for _, id := range live {
		f.end(id, router.Cancelled)
	}
	f.verify()
}
