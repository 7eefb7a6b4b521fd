package api_test

import (
	"testing"
	"time"

	"holdfast/api/client"
	"holdfast/router"
	"holdfast/store"
)

// TestEffortOfCutTurnsIsShown: what losses have cost stands with the turn, the
// sample and the run; what was generated twice is no output.
func TestEffortOfCutTurnsIsShown(t *testing.T) {
	s := start(t, nil)
	ctx := t.Context()
	run := s.openRun()
	session := s.submit(run.ID, "one", 1)[0]
	if _, err := s.store.DispatchQueued(ctx, run.ID, 10); err != nil {
		t.Fatal(err)
	}
	_, err := s.store.CommitTurn(ctx, store.TurnCommit{
		SessionID: session.ID, Instance: "two", Generated: []int32{8, 9, 10}, Logprobs: []float32{-0.5, -1, -2},
		PolicyVersion: 2, Versions: []store.VersionSpan{{Tokens: 1, PolicyVersion: 1}, {Tokens: 2, PolicyVersion: 2}},
		PromptTokens: 3, CachedTokens: -1, StartedAt: time.Now(), FinishReason: "length",
		TurnEffort: store.TurnEffort{Attempts: 4, Resumes: 2, TokensRegenerated: 5},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.store.EndSession(ctx, store.Ending{SessionID: session.ID, Status: router.Completed}); err != nil {
		t.Fatal(err)
	}
	turns, err := s.client.Turns(ctx, session.ID, -1, 10)
	if err != nil {
		t.Fatal(err)
	}
	if turn := turns.Turns[0]; turn.Attempts != 4 || turn.Resumes != 2 || turn.TokensRegenerated != 5 || turn.OutputTokens != 3 || turn.PolicyVersion != 2 {
		t.Errorf("turn %+v", turn)
	}
	page, err := s.client.Samples(ctx, run.ID, client.SamplesQuery{})
	if err != nil {
		t.Fatal(err)
	}
	sample := page.Samples[0]
	if sample.Usage.Resumes != 2 || sample.Usage.TokensRegenerated != 5 || sample.Usage.OutputTokens != 3 {
		t.Errorf("usage %+v", sample.Usage)
	}
	if n := len(sample.Segments); n != 3 || sample.Segments[1].PolicyVersion != 1 || sample.Segments[2].PolicyVersion != 2 || sample.Segments[2].Count != 2 {
		t.Errorf("segments %+v", sample.Segments)
	}
	metrics, err := s.client.Metrics(ctx, run.ID, client.Window{})
	if err != nil {
		t.Fatal(err)
	}
	if total := metrics.Total; total.TokensGenerated != 8 || total.TokensRegenerated != 5 || total.Resumes != 2 {
		t.Errorf("metrics %+v", total)
	}
}
