package api_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/router"
	"holdfast/store/storetest"
	"holdfast/workflows/task"
)

// TestGroups: the contract's policy is kept, refilled and spare members show, and a
// long poll for whole groups ends when the last member does.
func TestGroups(t *testing.T) {
	s := start(t, nil)
	ctx := t.Context()
	contract := threeClasses()
	refills := 3
	contract.GroupPolicy, contract.GroupRefills, contract.SpareMembers = "refill", &refills, 1
	run, err := s.client.CreateRun(ctx, wire.NewRun{Name: "groups", Pool: "main", Contract: contract})
	if err != nil {
		t.Fatal(err)
	}
	if c := run.Contract; c.GroupPolicy != "refill" || c.GroupRefills == nil || *c.GroupRefills != 3 || c.SpareMembers != 1 {
		t.Errorf("the contract came back as %+v", c)
	}
	spec := oneTask("a", "agent")
	spec.GroupSize = 2
	batch, err := s.client.SubmitBatch(ctx, run.ID, "one", client.NewBatch{Tasks: client.Tasks([]task.Spec{spec})})
	if err != nil || batch.Sessions != 3 {
		t.Fatalf("%+v, %v", batch, err)
	}
	members := func() []wire.Session {
		t.Helper()
		page, err := s.client.Sessions(ctx, run.ID, client.SessionsQuery{Limit: 100})
		if err != nil {
			t.Fatal(err)
		}
		slices.SortFunc(page.Sessions, func(a, b wire.Session) int { return a.Member - b.Member })
		return page.Sessions
	}
	m := members()
	s.finish(&m[0], router.Failed) // the spare member stands in
	s.finish(&m[1], router.Failed) // this one is refilled
	if m = members(); len(m) != 4 || m[3].State != "dispatched" {
		t.Fatalf("%d members, want 4: %+v", len(m), m)
	}

	whole := client.SamplesQuery{Consumer: "trainer", WholeGroups: true, Encoding: "none"}
	if page, err := s.client.Samples(ctx, run.ID, whole); err != nil || len(page.Samples) != 0 {
		t.Fatalf("of a group that is not whole came %+v, %v", page, err)
	}
	pages := make(chan wire.SamplePage, 1)
	go func() {
		waiting := whole
		waiting.Wait = 55 * time.Second
		page, err := s.client.Samples(ctx, run.ID, waiting)
		if err != nil {
			t.Error(err)
		}
		pages <- page
	}()
	s.finish(&m[2], router.Completed)
	s.finish(&m[3], router.Completed)
	page := storetest.Came(t, "the group", pages)
	var ids []uuid.UUID
	for _, sample := range page.Samples {
		ids = append(ids, sample.ID)
		if sample.GroupOutcome != "complete" || sample.GroupMembers != 4 || sample.GroupSize != 2 {
			t.Errorf("member %d: %+v", sample.Member, sample)
		}
	}
	if want := []uuid.UUID{m[0].ID, m[1].ID, m[2].ID, m[3].ID}; !slices.Equal(ids, want) {
		t.Errorf("the group came as %v, want %v", ids, want)
	}
	if place, err := s.client.Ack(ctx, run.ID, "trainer", page.Next); err != nil || place.Groups != "whole" || place.AcknowledgedSeq != 4 {
		t.Errorf("%+v, %v", place, err)
	}
	backlog, err := s.client.Backlog(ctx, run.ID)
	if err != nil || backlog.Total.GroupsEnded != 1 || backlog.Total.GroupsWithoutSignal != 1 || backlog.Total.Released != 4 {
		t.Errorf("%+v, %v", backlog.Total, err)
	}

	_, err = s.client.Samples(ctx, run.ID, client.SamplesQuery{Consumer: "trainer", Encoding: "none"})
	if problem := problemOf(t, err); problem.Status != 409 || !strings.Contains(problem.Detail, "reads whole groups; a consumer keeps to one order") {
		t.Errorf("the other order for the same consumer: %+v", problem)
	}
	_, err = s.client.Samples(ctx, run.ID, client.SamplesQuery{After: page.Next, Encoding: "none"})
	if problem := problemOf(t, err); problem.Status != 422 || !strings.HasSuffix(problem.Type, "unknown-cursor") {
		t.Errorf("a cursor of the other order: %+v", problem)
	}
	if err := s.store.VerifyCounters(ctx, run.ID); err != nil {
		t.Error(err)
	}
}
