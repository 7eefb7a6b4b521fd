package api_test

import (
	"encoding/json"
	"io"
	"math"
	"net/http"
	"reflect"
	"testing"
	"time"

	"holdfast/api"
	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/router"
	"holdfast/workflows/task"
)

func parseProblem(t testing.TB, response *http.Response, text []byte) wire.Problem {
	t.Helper()
	var problem wire.Problem
	if response.Header.Get("Content-Type") == "application/problem+json" {
		if err := json.Unmarshal(text, &problem); err != nil {
			t.Fatalf("%v in %s", err, text)
		}
	}
	return problem
}

// TestTrainersLoop goes once through everything that the interface can do, with
// all traffic held against the OpenAPI document.
func TestTrainersLoop(t *testing.T) {
	s := start(t, func(c *api.Config) { c.Harness = &loops{turn: echo} })
	ctx := t.Context()

	run := s.openRun()
	sum := 0.0
	for _, class := range run.Contract.Classes {
		sum += class.Share
	}
	if math.Abs(sum-1) > 1e-12 || run.Contract.Given[0].Share != 0.486 {
		t.Errorf("48.6/33.1/18.2 was not normalised: %+v", run.Contract)
	}

	instance, err := s.client.RegisterInstance(ctx, "main", wire.NewInstance{ID: "one", URL: "http://engine-1:8000/", Kind: "vllm", TTLSeconds: 30})
	if err != nil || instance.CapacityBlocks != 1000 || instance.URL != "http://engine-1:8000" {
		t.Fatalf("%+v, %v", instance, err)
	}

	version := int64(0)
	tasks := []task.Spec{oneTask("a", "agent"), oneTask("b", "rlvr")}
	tasks[0].GroupSize = 2
	tasks[0].Metadata = json.RawMessage(`{"row": 7}`)
	batch, err := s.client.SubmitBatch(ctx, run.ID, "first", client.NewBatch{PolicyVersion: &version, Tasks: client.Tasks(tasks), Compress: true})
	if err != nil || batch.Sessions != 3 || batch.SessionsByClass["agent"] != 2 || batch.Replayed {
		t.Fatalf("%+v, %v", batch, err)
	}
	again, err := s.client.SubmitBatch(ctx, run.ID, "first", client.NewBatch{PolicyVersion: &version, Tasks: client.Tasks(tasks)})
	if err != nil || again.ID != batch.ID || !again.Replayed {
		t.Errorf("a repeated submission, uncompressed this time, is not the same batch: %+v, %v", again, err)
	}
	if read, err := s.client.Batch(ctx, run.ID, batch.ID); err != nil || read.ID != batch.ID {
		t.Errorf("%+v, %v", read, err)
	}

	page, err := s.client.Sessions(ctx, run.ID, client.SessionsQuery{Batch: batch.ID, Limit: 2})
	if err != nil || len(page.Sessions) != 2 || page.Next == "" {
		t.Fatalf("%+v, %v", page, err)
	}
	rest, err := s.client.Sessions(ctx, run.ID, client.SessionsQuery{After: page.Next})
	if err != nil || len(rest.Sessions) != 1 {
		t.Fatalf("%+v, %v", rest, err)
	}
	sessions := append(page.Sessions, rest.Sessions...)
	s.finish(&sessions[0], router.Completed)
	s.finish(&sessions[1], router.Failed)
	if err := s.client.PutColumns(ctx, sessions[2].ID, []wire.Column{{Name: "values", DType: "uint8", Shape: []int64{2}, Data: []byte{1, 2}}}); err != nil {
		t.Error(err)
	}
	if ended, err := s.client.CancelSession(ctx, sessions[2].ID, "no longer wanted"); err != nil || ended.ID != sessions[2].ID {
		t.Errorf("%+v, %v", ended, err)
	}
	s.finish(&sessions[2], router.Cancelled)

	s.consume(run, &sessions[0])
	s.observe(run, &sessions[0])
	s.keepBooks(run, &sessions[0])
	s.operate()
	s.loop(run)

	if contract, err := s.client.PutContract(ctx, run.ID, wire.NewContract{Classes: []wire.ClassShare{{Class: "agent", Share: 1}}, MaxConcurrency: 7}); err != nil || contract.Version != 2 {
		t.Errorf("%+v, %v", contract, err)
	}
	if history, err := s.client.ContractHistory(ctx, run.ID); err != nil || len(history.Versions) != 2 {
		t.Errorf("%+v, %v", history, err)
	}
	if ended, err := s.client.EndRun(ctx, run.ID); err != nil || ended.State != "ended" {
		t.Errorf("%+v, %v", ended, err)
	}
	if runs, err := s.client.Runs(ctx, client.RunsQuery{Pool: "main", State: "ended", Limit: 1}); err != nil || len(runs.Runs) != 1 || runs.Runs[0].ID != run.ID {
		t.Errorf("%+v, %v", runs, err)
	}
	if read, err := s.client.Run(ctx, run.ID); err != nil || read.EndedAt == nil {
		t.Errorf("%+v, %v", read, err)
	}
	if missing := s.conformance.uncovered(); len(missing) > 0 {
		t.Errorf("the run-through leaves out %v", missing)
	}
}

// consume reads three samples, of which the first is completed, and acknowledges them.
func (s *service) consume(run wire.Run, completed *wire.Session) {
	t, ctx := s.t, s.t.Context()
	reader := s.client.Read(run.ID, client.SamplesQuery{Consumer: "trainer", Limit: 2})
	var samples []wire.Sample
	for sample, err := range reader.All(ctx) {
		if err != nil {
			t.Fatal(err)
		}
		if samples = append(samples, *sample); len(samples) == 3 {
			break
		}
	}
	first := &samples[0]
	if first.ID != completed.ID || first.Status != "completed" || first.Reward == nil || *first.Reward != 1 || first.TaskID != "a" {
		t.Errorf("the first sample is %+v", first)
	}
	if string(first.Metadata) != `{"row": 7}` && string(first.Metadata) != `{"row":7}` {
		t.Errorf("metadata came back as %s", first.Metadata)
	}
	ids, mask, logprobs, err := first.Arrays()
	if err != nil || !reflect.DeepEqual(ids, []int32{5, 6, 7, 8, 9}) || !reflect.DeepEqual(mask, []uint8{0, 0, 0, 1, 1}) || !reflect.DeepEqual(logprobs, []float32{0, 0, 0, -0.5, -1.25}) {
		t.Errorf("tokens %v, mask %v, logprobs %v, %v", ids, mask, logprobs, err)
	}
	for _, sample := range samples[1:] {
		if sample.Reward != nil || sample.Problem == "" {
			t.Errorf("a sample that is %s has reward %v and problem %q", sample.Status, sample.Reward, sample.Problem)
		}
	}

	plain, err := s.client.Samples(ctx, run.ID, client.SamplesQuery{Encoding: "json", Statuses: []string{"completed", "truncated"}})
	if err != nil || len(plain.Samples) != 1 {
		t.Fatalf("%+v, %v", plain, err)
	}
	plainIDs, plainMask, plainLogprobs, err := plain.Samples[0].Arrays()
	if err != nil || !reflect.DeepEqual(plainIDs, ids) || !reflect.DeepEqual(plainMask, mask) || !reflect.DeepEqual(plainLogprobs, logprobs) {
		t.Errorf("the JSON encoding differs: %v %v %v, %v", plainIDs, plainMask, plainLogprobs, err)
	}
	if bare, err := s.client.Samples(ctx, run.ID, client.SamplesQuery{Encoding: "none", Limit: 1}); err != nil || bare.Samples[0].Packed != nil || bare.Samples[0].Tokens != nil || !bare.More {
		t.Errorf("%+v, %v", bare, err)
	}

	if err := reader.Ack(ctx); err != nil {
		t.Fatal(err)
	}
	if left, err := s.client.Samples(ctx, run.ID, client.SamplesQuery{Consumer: "trainer"}); err != nil || len(left.Samples) != 0 {
		t.Errorf("acknowledged samples came again: %+v, %v", left, err)
	}
	if list, err := s.client.Consumers(ctx, run.ID); err != nil || len(list.Consumers) != 1 || list.Consumers[0].AcknowledgedSeq != 3 {
		t.Errorf("%+v, %v", list, err)
	}
}

func (s *service) observe(run wire.Run, completed *wire.Session) {
	t, ctx := s.t, s.t.Context()
	backlog, err := s.client.Backlog(ctx, run.ID)
	if err != nil || backlog.Total.Released != 3 || backlog.Total.Ended != 3 || backlog.Total.Backlog != 0 || backlog.Total.Failed != 1 {
		t.Errorf("%+v, %v", backlog, err)
	}
	if pace, err := s.client.Pace(ctx, run.ID, client.PaceQuestion{}); err != nil || pace.Run != run.ID {
		t.Errorf("%+v, %v", pace, err)
	}
	mixture, err := s.client.Mixture(ctx, run.ID, client.Window{Last: time.Hour})
	if err != nil || len(mixture.Total.Classes) != 3 || mixture.Window == nil {
		t.Errorf("%+v, %v", mixture, err)
	}
	begin := time.Now().Add(-time.Hour)
	metrics, err := s.client.Metrics(ctx, run.ID, client.Window{From: begin, To: begin.Add(2 * time.Hour)})
	if err != nil || metrics.Total.Samples != 1 || metrics.Total.OutputTokens != 6 {
		t.Errorf("%+v, %v", metrics, err)
	}
	if session, err := s.client.Session(ctx, completed.ID); err != nil || session.State != "ended" || session.Status != "completed" || session.Usage.OutputTokens != 2 {
		t.Errorf("%+v, %v", session, err)
	}
	if turns, err := s.client.Turns(ctx, completed.ID, -1, 0); err != nil || len(turns.Turns) != 1 || turns.Turns[0].CachedTokens != nil || turns.Next != nil {
		t.Errorf("%+v, %v", turns, err)
	}
	events, err := s.client.Events(ctx, completed.ID, 0, 2)
	if err != nil || len(events.Events) != 2 || events.Events[0].Kind != "released" || events.Next == nil {
		t.Fatalf("%+v, %v", events, err)
	}
	if len(events.Deliveries) != 1 || events.Deliveries[0].AcknowledgedAt == nil {
		t.Errorf("deliveries %+v", events.Deliveries)
	}
	rest, err := s.client.Events(ctx, completed.ID, *events.Next, 0)
	if err != nil || len(rest.Events) == 0 || rest.Events[len(rest.Events)-1].Kind != "ended" {
		t.Errorf("%+v, %v", rest, err)
	}
}

// keepBooks exports and audits what the trainer's loop left, and forgets a reader.
func (s *service) keepBooks(run wire.Run, completed *wire.Session) {
	t, ctx := s.t, s.t.Context()
	if n, err := s.client.Export(ctx, run.ID, client.ExportQuery{}, io.Discard); err != nil || n == 0 {
		t.Errorf("an export of %d bytes, %v", n, err)
	}
	if audit, err := s.client.Audit(ctx, completed.ID); err != nil || audit.Session.ID != completed.ID || len(audit.Turns) != 1 {
		t.Errorf("%+v, %v", audit, err)
	}
	if _, err := s.client.Samples(ctx, run.ID, client.SamplesQuery{Consumer: "passing", Start: "now"}); err != nil {
		t.Error(err)
	}
	if err := s.client.RemoveConsumer(ctx, run.ID, "passing"); err != nil {
		t.Error(err)
	}
}

// updateWeights asks for everything about weight updates that can be had without an
// owner, and takes it back.
func (s *service) updateWeights() {
	t, ctx := s.t, s.t.Context()
	if begun, err := s.client.BeginWeightUpdate(ctx, "main", wire.NewWeightUpdate{PolicyVersion: 5, Mode: "keep", Cache: "salt"}); err != nil || begun.State != "pausing" {
		t.Errorf("%+v, %v", begun, err)
	}
	if read, err := s.client.WeightUpdate(ctx, "main", 5); err != nil || read.FromVersion != 4 {
		t.Errorf("%+v, %v", read, err)
	}
	if committed, err := s.client.CommitWeightUpdate(ctx, "main", 4, wire.CommitWeights{}); err != nil || committed.Source != "announced" {
		t.Errorf("%+v, %v", committed, err)
	}
	if cancelling, err := s.client.CancelWeightUpdate(ctx, "main", 5); err != nil || cancelling.State != "cancelling" {
		t.Errorf("%+v, %v", cancelling, err)
	}
	if page, err := s.client.WeightUpdates(ctx, "main", 0, 0); err != nil || len(page.Updates) != 2 {
		t.Errorf("%+v, %v", page, err)
	}
}

func (s *service) operate() {
	t, ctx := s.t, s.t.Context()
	if policy, err := s.client.PutPolicy(ctx, "main", 4); err != nil || policy.PolicyVersion != 4 {
		t.Errorf("%+v, %v", policy, err)
	}
	if policy, err := s.client.Policy(ctx, "main"); err != nil || policy.PolicyVersion != 4 {
		t.Errorf("%+v, %v", policy, err)
	}
	s.updateWeights()
	if list, err := s.client.Pools(ctx); err != nil || len(list.Pools) != 1 || list.Pools[0].PolicyVersion != 4 {
		t.Errorf("%+v, %v", list, err)
	}
	if err := s.client.HeartbeatInstance(ctx, "main", "one"); err != nil {
		t.Error(err)
	}
	if err := s.client.DrainInstance(ctx, "main", "one", true); err != nil {
		t.Error(err)
	}
	if list, err := s.client.Instances(ctx, "main"); err != nil || len(list.Instances) != 1 || list.Instances[0].State != "draining" {
		t.Errorf("%+v, %v", list, err)
	}
	if err := s.client.RemoveInstance(ctx, "main", "one"); err != nil {
		t.Error(err)
	}
	if list, err := s.client.Instances(ctx, "main"); err != nil || len(list.Instances) != 0 {
		t.Errorf("%+v, %v", list, err)
	}
	if view, err := s.client.Router(ctx, "main"); err != nil || view.Text != "cap 3" {
		t.Errorf("%+v, %v", view, err)
	}
	once := s.connect(client.Config{Transport: s.conformance, Attempts: 1})
	if _, err := once.Router(ctx, "other"); problemOf(t, err).Status != http.StatusServiceUnavailable {
		t.Error(err)
	}
}
