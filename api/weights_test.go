package api_test

import (
	"maps"
	"net/http"
	"strings"
	"testing"

	"holdfast/api/wire"
	"holdfast/store"
)

const updates = "/api/v1/pools/main/weight-updates"

// badUpdates are wrong in a pool at version 3 with version 5 paused and version 4
// cancelled.
func badUpdates() []badInput {
	begin := func(name, body string, bad badInput) badInput {
		bad.name, bad.method, bad.path, bad.body = "begin "+name, "POST", updates, body
		return bad
	}
	refused := func(location, says string) badInput {
		return badInput{status: 422, kind: "invalid-request", location: location, says: says}
	}
	return []badInput{
		begin("without a version", `{"mode":"abort"}`, refused("body", "policy_version")),
		begin("without a mode", `{"policy_version":9}`, refused("body", "mode")),
		begin("in an unknown mode", `{"policy_version":9,"mode":"halt"}`, refused("body.mode", "halt")),
		begin("of version 0", `{"policy_version":0,"mode":"abort"}`, refused("body.policy_version", "0")),
		begin("of a negative version", `{"policy_version":-1,"mode":"abort"}`, refused("body.policy_version", "-1")),
		begin("of half a version", `{"policy_version":1.5,"mode":"abort"}`, refused("body.policy_version", "")),
		begin("of a version beyond numbers", `{"policy_version":1e30,"mode":"abort"}`, refused("body.policy_version", "")),
		begin("of the current version", `{"policy_version":3,"mode":"abort"}`, refused("body.policy_version", "greater than the pool's current version 3, is 3")),
		begin("with an unknown cache", `{"policy_version":9,"mode":"abort","cache":"none"}`, refused("body.cache", "none")),
		begin("that resets a cache in place", `{"policy_version":9,"mode":"in_place"}`, refused("body.cache", "must be salt")),
		begin("under unknown control", `{"policy_version":9,"mode":"abort","control":"mine"}`, refused("body.control", "mine")),
		begin("with no time to pause", `{"policy_version":9,"mode":"abort","pause_timeout_seconds":-1}`, refused("body.pause_timeout_seconds", "-1")),
		begin("with a week to pause", `{"policy_version":9,"mode":"abort","pause_timeout_seconds":604800}`, refused("body.pause_timeout_seconds", "604800")),
		begin("with an unknown field", `{"policy_version":9,"mode":"abort","salt":"x"}`, refused("", "salt")),
		begin("while another is open", `{"policy_version":9,"mode":"abort"}`, badInput{status: 409, kind: "conflict", says: "version 5 is paused"}),
		begin("with other terms", `{"policy_version":5,"mode":"keep"}`, badInput{status: 409, kind: "conflict", says: "other terms"}),
		begin("that is no JSON", `{"policy_version":`, badInput{status: 400, kind: "invalid-json", location: "body", offset: true}),
		begin("without a body", ``, badInput{status: 400, kind: "invalid-json"}),
		{name: "begin in an unknown pool", method: "POST", path: "/api/v1/pools/none/weight-updates", body: `{"policy_version":9,"mode":"abort"}`, status: 404, kind: "not-found", says: "none"},
		{name: "list of an unknown pool", method: "GET", path: "/api/v1/pools/none/weight-updates", status: 404, kind: "not-found", says: "none"},
		{name: "list with limit 0", method: "GET", path: updates + "?limit=0", status: 422, kind: "invalid-request", location: "query.limit"},
		{name: "list before nothing", method: "GET", path: updates + "?before=-1", status: 422, kind: "invalid-request", location: "query.before"},
		{name: "read of an unknown version", method: "GET", path: updates + "/7", status: 404, kind: "not-found", says: "weight update 7"},
		{name: "read of a version that is none", method: "GET", path: updates + "/latest", status: 422, kind: "invalid-request", location: "path.version"},
		{name: "commit of an unknown version", method: "POST", path: updates + "/7/commit", status: 404, kind: "not-found"},
		{name: "commit of a cancelled version", method: "POST", path: updates + "/4/commit", status: 409, kind: "conflict", says: "was cancelled"},
		{name: "commit with an unknown cache", method: "POST", path: updates + "/5/commit", body: `{"cache":"none"}`, status: 422, kind: "invalid-request", location: "body.cache"},
		{name: "cancel of an unknown version", method: "POST", path: updates + "/7/cancel", status: 404, kind: "not-found"},
		{name: "cancel of a version in force", method: "POST", path: updates + "/3/cancel", status: 409, kind: "conflict", says: "in force"},
		{name: "announcement past an open update", method: "PUT", path: "/api/v1/pools/main/policy", body: `{"policy_version":6}`, status: 409, kind: "conflict", says: "version 5 is paused"},
		{name: "contract with an unknown stale policy", method: "PUT", path: "/api/v1/runs/RUN/contract", body: `{"classes":[{"class":"a","share":1}],"max_concurrency":1,"stale_policy":"drop"}`, status: 422, kind: "invalid-request", location: "body.stale_policy", says: "drop"},
		{name: "contract that forgets stale sessions", method: "PUT", path: "/api/v1/runs/RUN/contract", body: `{"classes":[{"class":"a","share":1}],"max_concurrency":1,"stale_policy":"forget"}`, status: 422, kind: "invalid-request", location: "body.stale_policy", says: "finish, end or restart"},
	}
}

// settle moves the open update on, as the pool's owner would.
func (s *service) settle(epoch int64, to store.WeightState, failed store.WeightStep, problem string) {
	s.t.Helper()
	u, open, err := s.store.OpenWeightUpdate(s.t.Context(), "main")
	if err != nil || !open {
		s.t.Fatal(open, err)
	}
	if settled, err := s.store.SettleWeightUpdate(s.t.Context(), epoch, &u, to, failed, problem); err != nil || !settled {
		s.t.Fatal(settled, err)
	}
}

func (s *service) own() int64 {
	s.t.Helper()
	epoch, ok, err := s.store.AcquirePool(s.t.Context(), "main", "test", 60)
	if err != nil || !ok {
		s.t.Fatal(ok, err)
	}
	return epoch
}

func TestBadWeightUpdates(t *testing.T) {
	s := start(t, nil)
	run, epoch, ctx := s.openRun(), s.own(), t.Context()
	if _, err := s.client.PutPolicy(ctx, "main", 3); err != nil {
		t.Fatal(err)
	}
	for _, version := range []int64{4, 5} {
		if _, err := s.client.BeginWeightUpdate(ctx, "main", wire.NewWeightUpdate{PolicyVersion: version, Mode: "abort"}); err != nil {
			t.Fatal(err)
		}
		if version == 4 {
			if _, err := s.client.CancelWeightUpdate(ctx, "main", version); err != nil {
				t.Fatal(err)
			}
			s.settle(epoch, store.WeightCancelled, "", "")
		}
	}
	s.settle(epoch, store.WeightPaused, "", "")
	rows := s.counting()
	before := rows()
	for _, bad := range badUpdates() {
		t.Run(bad.name, func(t *testing.T) {
			status, problem, text := s.send(bad.method, strings.ReplaceAll(bad.path, "RUN", run.ID.String()), bad.body, "Content-Type", "application/json")
			bad.judge(t, status, &problem, text)
			if after := rows(); !maps.Equal(before, after) {
				t.Errorf("something was stored: rows were %v, are %v", before, after)
			}
		})
	}
}

func TestWeightUpdateOverTheAPI(t *testing.T) {
	s := start(t, nil)
	s.openRun()
	epoch, ctx := s.own(), t.Context()
	ask := wire.NewWeightUpdate{PolicyVersion: 2, Mode: "wait", PauseTimeoutSeconds: 7}
	begun, err := s.client.BeginWeightUpdate(ctx, "main", ask)
	if err != nil || begun.State != "pausing" || begun.Cache != "reset" || begun.Control != "manage" || begun.PauseTimeoutSeconds != 7 {
		t.Fatalf("begun as %+v, %v", begun, err)
	}
	if again, err := s.client.BeginWeightUpdate(ctx, "main", ask); err != nil || again.Attempt != 1 {
		t.Fatalf("begun twice: %+v, %v", again, err)
	}
	mark := store.WeightMark{Pool: "main", PolicyVersion: 2, Instance: "one", Attempt: 1, State: store.PlaceRefused, Reached: store.PlacePending, Problem: "no such call"}
	if err := s.store.MarkWeightInstance(ctx, epoch, mark); err != nil {
		t.Fatal(err)
	}
	s.settle(epoch, store.WeightFailed, store.StepPause, "1 of 1 instances refused to pause: one: no such call")
	failed, err := s.client.AwaitWeightUpdate(ctx, "main", 2, "paused")
	if err == nil || failed.State != "failed" || failed.FailedStep != "pause" || !strings.Contains(err.Error(), "no such call") ||
		len(failed.Instances) != 1 || failed.Instances[0].State != "refused" {
		t.Fatalf("failed as %+v, %v", failed, err)
	}
	if again, err := s.client.BeginWeightUpdate(ctx, "main", ask); err != nil || again.Attempt != 2 || again.State != "pausing" {
		t.Fatalf("asked again: %+v, %v", again, err)
	}
	mark.Attempt, mark.State, mark.Problem = 2, store.PlaceGone, "it left"
	if err := s.store.MarkWeightInstance(ctx, epoch, mark); err != nil {
		t.Fatal(err)
	}
	s.settle(epoch, store.WeightPaused, "", "")
	committing, err := s.client.CommitWeightUpdate(ctx, "main", 2, wire.CommitWeights{Cache: "salt"})
	if err != nil || committing.State != "committing" || committing.Cache != "salt" || committing.Gone != 1 {
		t.Fatalf("committing: %+v, %v", committing, err)
	}
	u, _, err := s.store.OpenWeightUpdate(ctx, "main")
	if err != nil {
		t.Fatal(err)
	}
	if advanced, err := s.store.AdvanceWeights(ctx, epoch, &u); err != nil || !advanced {
		t.Fatal(advanced, err)
	}
	s.settle(epoch, store.WeightCommitted, "", "")
	committed, err := s.client.AwaitWeightUpdate(ctx, "main", 2, "committed")
	if err != nil || committed.AdvancedAt == nil {
		t.Fatalf("committed as %+v, %v", committed, err)
	}
	if policy, err := s.client.Policy(ctx, "main"); err != nil || policy.PolicyVersion != 2 {
		t.Fatalf("policy %+v, %v", policy, err)
	}
	if _, err := s.client.PutPolicy(ctx, "main", 3); err != nil {
		t.Fatal(err)
	}
	page, err := s.client.WeightUpdates(ctx, "main", 0, 1)
	if err != nil || len(page.Updates) != 1 || page.Updates[0].Source != "announced" || page.Next != 3 {
		t.Fatalf("first page %+v, %v", page, err)
	}
	if page, err = s.client.WeightUpdates(ctx, "main", page.Next, 0); err != nil || len(page.Updates) != 1 || page.Updates[0].PolicyVersion != 2 || page.Next != 0 {
		t.Fatalf("second page %+v, %v", page, err)
	}
	if status, _, text := s.send(http.MethodPost, updates+"/2/commit", ""); status != http.StatusAccepted {
		t.Fatalf("a commit without a body is answered with %d: %s", status, text)
	}
}
