package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/workflows/task"
)

// openHarnessed opens a run with n sessions whose loop the test runs.
func (s *inProcess) openHarnessed(ctx context.Context, t *testing.T, n int) (run uuid.UUID, sessions []uuid.UUID) {
	t.Helper()
	if err := s.engines.register(ctx, s.store, "default"); err != nil {
		t.Fatal(err)
	}
	opened, err := s.client.CreateRun(ctx, demoRun("harness", "default"))
	if err != nil {
		t.Fatal(err)
	}
	var specs []task.Spec
	for i := range n {
		specs = append(specs, task.Spec{
			Class: "agent", Prompt: task.Prompt{Synthetic: &task.Synthetic{Tokens: 100, Seed: uint64(i + 1)}},
			Sampling: task.Sampling{MaxTokens: 20}, Environment: &task.Environment{Kind: task.EnvironmentExternal},
		})
	}
	if _, err := s.client.SubmitBatch(ctx, opened.ID, "harness", client.NewBatch{Tasks: client.Tasks(specs)}); err != nil {
		t.Fatal(err)
	}
	page, err := s.client.Sessions(ctx, opened.ID, client.SessionsQuery{})
	if err != nil || len(page.Sessions) != n {
		t.Fatalf("%d sessions, error %v", len(page.Sessions), err)
	}
	for _, session := range page.Sessions {
		sessions = append(sessions, session.ID)
	}
	return opened.ID, sessions
}

func TestHarnessRunsItsLoopThroughTheAPI(t *testing.T) {
	s := startInProcess(t, 2)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	run, sessions := s.openHarnessed(ctx, t, 3)

	// The first harness makes three turns and ends with a reward.
	var generated []int32
	for turn := range 3 {
		made, err := s.client.Generate(ctx, sessions[0], wire.NewTurn{RequestID: fmt.Sprint(turn), AppendTokenIDs: []int32{11, 12}})
		if err != nil {
			t.Fatal(err)
		}
		again, err := s.client.Generate(ctx, sessions[0], wire.NewTurn{RequestID: fmt.Sprint(turn), AppendTokenIDs: []int32{11, 12}})
		if err != nil || !again.Repeated || !slices.Equal(again.TokenIDs, made.TokenIDs) {
			t.Fatalf("turn %d again: %+v, %v", turn, again, err)
		}
		if made.Turn != turn || len(made.TokenIDs) == 0 || len(made.Logprobs) != len(made.TokenIDs) || made.Repeated {
			t.Fatalf("turn %d: %+v", turn, made)
		}
		generated = append(generated, made.TokenIDs...)
	}
	reward := 0.75
	if _, err := s.client.CompleteSession(ctx, sessions[0], wire.FinishSession{Status: "completed", Reward: &reward, Detail: json.RawMessage(`{"tests":3}`)}); err != nil {
		t.Fatal(err)
	}
	sample := s.await(ctx, t, run)
	tokens, mask, logprobs, err := sample.Arrays()
	if err != nil {
		t.Fatal(err)
	}
	var trained []int32
	for i, bit := range mask {
		if bit == 1 {
			trained = append(trained, tokens[i])
		}
	}
	if sample.ID != sessions[0] || sample.Status != "completed" || sample.Reward == nil || *sample.Reward != reward || sample.Usage.Turns != 3 ||
		len(tokens) != 100+3*2+len(generated) || len(logprobs) != len(tokens) || !slices.Equal(trained, generated) {
		t.Fatalf("sample %+v of %d tokens, trained %v, generated %v", sample, len(tokens), trained, generated)
	}
	if _, err := s.client.Generate(ctx, sessions[0], wire.NewTurn{RequestID: "late"}); !isStatus(err, http.StatusConflict) {
		t.Fatalf("a call after the end got %v", err)
	}
	// The second is cancelled by the trainer, the third breaks.
	if _, err := s.client.Generate(ctx, sessions[1], wire.NewTurn{RequestID: "a"}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.CancelSession(ctx, sessions[1], "enough"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.CompleteSession(ctx, sessions[2], wire.FinishSession{Status: "failed", Problem: "the container died"}); err != nil {
		t.Fatal(err)
	}
	statuses := map[uuid.UUID]string{}
	reader := s.client.Read(run, client.SamplesQuery{})
	for range sessions {
		sample, err := reader.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		statuses[sample.ID] = sample.Status + " " + sample.Problem
	}
	if !strings.HasPrefix(statuses[sessions[1]], "cancelled") || statuses[sessions[2]] != "failed the container died" {
		t.Fatalf("ended as %v", statuses)
	}
}

func isStatus(err error, status int) bool {
	var problem *wire.Problem
	return errors.As(err, &problem) && problem.Status == status
}

func TestHarnessStreamTellsOfTheHoldAndSendsTokensAsTheyCome(t *testing.T) {
	s := startInProcess(t, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	_, sessions := s.openHarnessed(ctx, t, 1)
	s.slow(t, 20) // so that it comes in pieces on a busy machine too
	body, err := json.Marshal(wire.NewTurn{RequestID: "a", MaxTokens: 2_000, MinTokens: 2_000, Stream: true})
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.api.Addr()+"/api/v1/sessions/"+sessions[0].String()+"/generate", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	var streamed []int32
	var turn wire.HarnessTurn
	pieces := 0
	for event := range strings.SplitSeq(string(text), "\n\n") {
		name, data, _ := strings.Cut(strings.TrimPrefix(event, "event: "), "\ndata: ")
		var piece wire.HarnessTurn
		if name != "tokens" && name != "turn" {
			continue
		}
		if err := json.Unmarshal([]byte(data), &piece); err != nil {
			t.Fatal(err)
		}
		if name == "turn" {
			turn = piece
			continue
		}
		pieces++
		streamed = append(streamed, piece.TokenIDs...)
	}
	if response.Header.Get("Content-Type") != "text/event-stream" || pieces < 2 || len(turn.TokenIDs) != 2_000 || !slices.Equal(streamed, turn.TokenIDs[:len(streamed)]) {
		t.Fatalf("%s %s: %d pieces of %d tokens, a turn of %d: %.300s", response.Status, response.Header.Get("Content-Type"), pieces, len(streamed), len(turn.TokenIDs), text)
	}
}
