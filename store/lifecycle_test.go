package store_test

import (
	"encoding/json"
	"slices"
	"testing"

	"holdfast/router"
	"holdfast/store"
)

// TestSessionFromReleaseToAcknowledgement follows one session through everything
// that can happen to it and reads its history back.
func TestSessionFromReleaseToAcknowledgement(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	spec := prompted("agent", 1)
	spec.ID, spec.Metadata = "task-a", json.RawMessage(`{"answer": "<42>", "nul": "\u0000"}`)
	batch := f.submit("one", spec)
	id := f.dispatch()[0]

	f.decide(f.hold(id, 0, router.AtCap))
	f.tick(3)
	f.decide(f.hold(id, 0, router.AtCap), f.hold(id, 0, router.NoBlocks), f.admit(id, 0, "w1"))
	grant, ok, err := f.Grant(ctx, id, 0)
	must(t, err)
	if !ok || grant.Instance != "w1" || grant.URL != "http://127.0.0.1:1/w1" || grant.Epoch != f.epoch || grant.PredictedCachedTokens != 2 {
		t.Fatalf("grant %+v, %v", grant, ok)
	}
	f.commit(id, 0)
	if _, ok, err := f.Grant(ctx, id, 0); err != nil || ok {
		t.Fatalf("a committed turn still has a grant: %v, %v", ok, err)
	}
	must(t, f.AppendEvents(ctx, []store.SessionEvent{{SessionID: id, At: f.clock, Kind: store.EventTool, Detail: json.RawMessage(`{"seconds":2}`)}}))
	f.decide(f.admit(id, 1, "w2"))
	f.commit(id, 1)
	ids, err := f.Context(ctx, id)
	must(t, err)
	if want := []int32{1, 2, 3, 100, 200, 51, 101, 201}; !slices.Equal(ids, want) {
		t.Fatalf("context %v, want %v", ids, want)
	}
	reward := 0.75
	already, ended, err := f.EndSession(ctx, store.Ending{SessionID: id, Status: router.Completed, Reward: &reward, ScoreDetail: json.RawMessage(`{"by":"test"}`), ScoreSeconds: 0.125})
	must(t, err)
	if already || ended.Seq != 1 {
		t.Fatalf("ended as sample %d, already %v", ended.Seq, already)
	}
	f.verify()

	page, err := f.Samples(ctx, store.SampleQuery{RunID: f.run.ID, Consumer: "trainer", WithTokens: true})
	must(t, err)
	if len(page.Samples) != 1 || page.More {
		t.Fatalf("%d samples, more %v", len(page.Samples), page.More)
	}
	checkSample(t, page.Samples[0], batch)
	if _, err := f.Ack(ctx, f.run.ID, "trainer", page.Next); err != nil {
		t.Fatal(err)
	}

	history, err := f.SessionEvents(ctx, id, 0, 0)
	must(t, err)
	var kinds []store.EventKind
	for i, e := range history.Events {
		kinds = append(kinds, e.Kind)
		if e.Seq != int64(i+1) {
			t.Errorf("event %d has seq %d", i, e.Seq)
		}
	}
	want := []store.EventKind{store.EventReleased, store.EventDispatched, store.EventHeld, store.EventHeld, store.EventAdmitted,
		store.EventTurn, store.EventTool, store.EventAdmitted, store.EventTurn, store.EventScored, store.EventEnded}
	if !slices.Equal(kinds, want) {
		t.Errorf("history %v, want %v", kinds, want)
	}
	if len(history.Deliveries) != 1 || history.Deliveries[0].DeliveredAt == nil || history.Deliveries[0].AcknowledgedAt == nil {
		t.Errorf("deliveries %+v", history.Deliveries)
	}
	var admitted struct {
		Reason  string         `json:"reason"`
		Numbers map[string]int `json:"numbers"`
	}
	must(t, json.Unmarshal(history.Events[4].Detail, &admitted))
	if admitted.Reason != "new_session" || admitted.Numbers["cap"] != 4 || admitted.Numbers["predicted_cached_tokens"] != 2 {
		t.Errorf("admitted with %s", history.Events[4].Detail)
	}
}

func checkSample(t *testing.T, sample store.Sample, batch store.Batch) {
	t.Helper()
	tokens := sample.Tokens
	if want := []int32{1, 2, 3, 100, 200, 51, 101, 201}; !slices.Equal(tokens.TokenIDs, want) {
		t.Errorf("token ids %v, want %v", tokens.TokenIDs, want)
	}
	if want := []uint8{0, 0, 0, 1, 1, 0, 1, 1}; !slices.Equal(tokens.LossMask, want) {
		t.Errorf("loss mask %v, want %v", tokens.LossMask, want)
	}
	if want := []float32{0, 0, 0, -0.5, 0, 0, -0.5, -1}; !slices.Equal(tokens.Logprobs, want) {
		t.Errorf("log-probabilities %v, want %v", tokens.Logprobs, want)
	}
	wantSegments := []store.Segment{
		{Kind: store.SegmentPrompt, Start: 0, Count: 3}, {Kind: store.SegmentGenerated, Start: 3, Count: 2},
		{Kind: store.SegmentAppended, Turn: 1, Start: 5, Count: 1}, {Kind: store.SegmentGenerated, Turn: 1, Start: 6, Count: 2},
	}
	if !slices.Equal(tokens.Segments, wantSegments) {
		t.Errorf("segments %+v, want %+v", tokens.Segments, wantSegments)
	}
	if sample.BatchID != batch.ID || sample.ExternalTaskID != "task-a" || sample.Class != "agent" || sample.Status != router.Completed || *sample.Reward != 0.75 {
		t.Errorf("sample %+v", sample)
	}
	if string(sample.Metadata) != `{"answer": "<42>", "nul": "\u0000"}` || string(sample.ScoreDetail) != `{"by":"test"}` {
		t.Errorf("metadata %s, score detail %s", sample.Metadata, sample.ScoreDetail)
	}
	usage := sample.Usage
	usage.TokenSeconds = 0
	if want := (store.Usage{Turns: 2, PromptTokens: 9, CachedTokens: 2, OutputTokens: 4, ContextTokens: 8}); usage != want {
		t.Errorf("usage %+v, want %+v", usage, want)
	}
	times := sample.Times
	if times.HeldSeconds < 3 || times.HeldSeconds > 3.01 {
		t.Errorf("held %v s, want 3", times.HeldSeconds)
	}
	if times.QueueSeconds != 0.5 || times.PrefillSeconds != 1 || times.DecodeSeconds != 2 || times.ToolSeconds != 2 || times.ScoreSeconds != 0.125 {
		t.Errorf("times %+v", times)
	}
	if !slices.Equal(sample.Instances, []string{"w1", "w2"}) {
		t.Errorf("instances %v", sample.Instances)
	}
}
