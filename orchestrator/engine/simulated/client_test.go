package simulated_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/engine/simulated"
	"holdfast/orchestrator/engine/simulated/fault"
	"holdfast/router/sim/instance"
)

// clientOf starts an engine of a dialect and returns the project's own client for it.
func clientOf(t *testing.T, dialect simulated.Dialect, ranks int) (*simulated.Server, engine.Client) {
	t.Helper()
	s, err := simulated.New(simulated.Config{
		Engine: instance.Demo(), Dialect: dialect, TimeScale: 60, StreamTick: time.Millisecond, StreamIntervalTokens: 16, Ranks: ranks, FirstRank: ranks - 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	c, err := engine.NewClient(dialect.String(), s.URL())
	if err != nil {
		t.Fatal(err)
	}
	return s, c
}

// seed stands for the session, which not every client names to the engine.
var seed = int64(7)

func order(prompt []int32, output, rank int) engine.Request {
	return engine.Request{
		RequestID: "r", SessionID: "s", Prompt: prompt, MaxTokens: output, MinTokens: output, IgnoreEOS: true,
		Temperature: 1, TopP: 1, Seed: &seed, WithLogprobs: true, DataParallelRank: rank,
	}
}

// TestOurClientUnderAWeightUpdate: in either dialect, through every mode of pausing, a
// generation that is cut can be continued, one that is kept goes on, and each token is
// of the weights that were loaded when it was generated.
func TestOurClientUnderAWeightUpdate(t *testing.T) {
	const output = 1500
	prompt := []int32{3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3}
	for _, dialect := range []simulated.Dialect{simulated.VLLM, simulated.SGLang} {
		for mode := engine.PauseAbort; mode <= engine.PauseInPlace; mode++ {
			t.Run(dialect.String()+" "+mode.String(), func(t *testing.T) {
				s, client := clientOf(t, dialect, 1)
				control := client.(engine.Controller)
				ctx := t.Context()
				// Slow until the pause has come in the middle, however busy the machine is.
				speed := func(slow float64) {
					if err := s.SetFaults(fault.Settings{SlowFactor: slow}); err != nil {
						t.Fatal(err)
					}
				}
				speed(50)
				ended, began := make(chan engine.Result, 1), make(chan struct{}, 1)
				go func() {
					r, err := client.Generate(ctx, order(prompt, output, -1), func(engine.Progress) {
						select {
						case began <- struct{}{}:
						default:
						}
					})
					if err != nil {
						t.Error(err)
					}
					ended <- r
				}()
				select {
				case <-began:
				case r := <-ended:
					t.Fatalf("ended with %d tokens before it could be paused", len(r.OutputIDs))
				}
				if mode == engine.PauseWait {
					speed(1) // The pause waits for the end.
				}
				if err := control.Pause(ctx, mode); err != nil {
					t.Fatal(err)
				}
				speed(1)
				kept := len(s.Requests())
				if err := control.SetWeightVersion(ctx, "v2"); err != nil {
					t.Fatal(err)
				}
				if version, err := control.WeightVersion(ctx); err != nil || version != "v2" {
					t.Errorf("version %q, %v", version, err)
				}
				if err := control.Resume(ctx); err != nil {
					t.Fatal(err)
				}
				r := <-ended
				if mode == engine.PauseAbort {
					cut := len(r.OutputIDs)
					if r.FinishReason != engine.FinishAbort || cut == 0 || cut == output {
						t.Fatalf("%d tokens, finish %s", cut, r.FinishReason)
					}
					rest, err := client.Generate(ctx, order(append(slices.Clone(prompt), r.OutputIDs...), output-cut, -1), nil)
					if err != nil {
						t.Fatal(err)
					}
					r.OutputIDs = append(r.OutputIDs, rest.OutputIDs...)
				}
				v1 := simulated.Sampling{VocabularySize: 151_936, RequestSeed: &seed, Temperature: 1, WeightVersion: "default"}
				v2 := v1
				v2.WeightVersion = "v2"
				old := v1.Continue(prompt, output, 16)
				cut := 0
				for cut < len(r.OutputIDs) && r.OutputIDs[cut] == old[cut] {
					cut++
				}
				// Only what had to finish is of the old weights alone.
				if whole := mode == engine.PauseWait; cut == 0 || whole != (cut == output) || (mode >= engine.PauseKeep) != (kept == 1) {
					t.Errorf("%d tokens are of the old weights, %d requests were kept", cut, kept)
				}
				old = old[:cut:cut]
				if want := append(old, v2.Continue(append(slices.Clone(prompt), old...), output-cut, 16)...); !slices.Equal(r.OutputIDs, want) {
					t.Errorf("cut at %d, %d tokens: not what the two versions make", cut, len(r.OutputIDs))
				}
				if err := control.ResetCache(ctx); err != nil || len(s.ResidentBlocks()) != 0 {
					t.Errorf("resetting an idle engine: %v", err)
				}
			})
		}
	}
}

func TestOurClientChoosesRanks(t *testing.T) {
	for _, dialect := range []simulated.Dialect{simulated.VLLM, simulated.SGLang} {
		s, client := clientOf(t, dialect, 3) // Global ranks 2 to 4.
		for turn := range 2 {
			r, err := client.Generate(t.Context(), order(make([]int32, 40), 5, 4), nil)
			if err != nil {
				t.Fatal(err)
			}
			if r.CachedTokens != turn*32 {
				t.Errorf("%s, turn %d: %d tokens cached", dialect, turn, r.CachedTokens)
			}
		}
		if len(s.RankResidentBlocks(4)) == 0 || len(s.RankResidentBlocks(2))+len(s.RankResidentBlocks(3)) != 0 {
			t.Errorf("%s: the request ran elsewhere", dialect)
		}
		if m, err := client.Metrics(t.Context()); err != nil || m.GeneratedTokens != 10 || m.CachedPromptTokens != 32 {
			t.Errorf("%s: %+v, %v", dialect, m, err)
		}
		if info, err := client.Discover(t.Context()); err != nil || info.BlockTokens != 16 || info.MaxContextTokens != 131_072 {
			t.Errorf("%s: %+v, %v", dialect, info, err)
		}
	}
}
