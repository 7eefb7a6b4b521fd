package engine_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/engine/simulated"
	"holdfast/orchestrator/engine/simulated/fault"
	"holdfast/router/sim/instance"
)

// dialects are the simulated engine in each way that a client must understand.
var dialects = map[string]struct {
	kind string
	cfg  simulated.Config
}{
	"vLLM":                {"vllm", simulated.Config{Dialect: simulated.VLLM}},
	"SGLang":              {"sglang", simulated.Config{Dialect: simulated.SGLang}},
	"SGLang, incremental": {"sglang", simulated.Config{Dialect: simulated.SGLang, IncrementalStream: true}},
}

// inEachDialect runs a test against each; change adds to the engine's configuration.
func inEachDialect(t *testing.T, cfg simulated.Config, test func(t *testing.T, server *simulated.Server, client engine.Client)) {
	for name, dialect := range dialects {
		t.Run(name, func(t *testing.T) {
			cfg := cfg
			cfg.Dialect, cfg.IncrementalStream, cfg.StreamTick = dialect.cfg.Dialect, dialect.cfg.IncrementalStream, time.Millisecond
			server, _ := startEngine(t, cfg)
			client, err := engine.NewClient(dialect.kind, server.URL())
			if err != nil {
				t.Fatal(err)
			}
			test(t, server, client)
		})
	}
}

func controllerOf(t *testing.T, client engine.Client) engine.Controller {
	t.Helper()
	c, ok := engine.ControllerOf(client)
	if !ok {
		t.Fatal("the client has no control")
	}
	return c
}

// inProgress starts a generation and waits for its first tokens.
func inProgress(t *testing.T, client engine.Client, r engine.Request) <-chan engine.Result {
	t.Helper()
	begun, ended := make(chan struct{}), make(chan engine.Result, 1)
	go func() {
		first := sync.OnceFunc(func() { close(begun) })
		result, err := client.Generate(t.Context(), r, func(engine.Progress) { first() })
		if err != nil {
			t.Error(err)
		}
		first()
		ended <- result
	}()
	<-begun
	return ended
}

func class(err error) engine.Class {
	var e *engine.Error
	if !errors.As(err, &e) {
		return 0
	}
	return e.Class
}

func TestSessionInEachDialect(t *testing.T) {
	inEachDialect(t, simulated.Config{TimeScale: 2000, WeightVersion: "v1"}, func(t *testing.T, _ *simulated.Server, client engine.Client) {
		context, cached := tokens(1000, 1), 0
		for turn := range 3 {
			r, err := client.Generate(t.Context(), request(context, 1500), nil)
			if err != nil {
				t.Fatal(err)
			}
			if len(r.OutputIDs) != 1500 || len(r.Logprobs) != 1500 || r.FinishReason != engine.FinishLength || r.PromptTokens != len(context) || r.CachedTokens != cached || r.IDsReencoded {
				t.Fatalf("turn %d: %d ids, %d logprobs, finish %v, prompt %d, cached %d, want %d", turn, len(r.OutputIDs), len(r.Logprobs), r.FinishReason, r.PromptTokens, r.CachedTokens, cached)
			}
			context = append(context, r.OutputIDs...)
			cached = (len(context) - 1) / 16 * 16
			context = append(context, tokens(100, turn+2)...)
		}
		// Another salt finds nothing of it.
		salted := request(context, 1)
		salted.CacheSalt = "v2"
		if r, err := client.Generate(t.Context(), salted, nil); err != nil || r.CachedTokens != 0 {
			t.Errorf("under another salt: %d tokens cached, %v", r.CachedTokens, err)
		}
	})
}

// TestWeightUpdateInEachDialect: what each way of pausing does to a generation.
func TestWeightUpdateInEachDialect(t *testing.T) {
	const output = 5_000
	inEachDialect(t, simulated.Config{TimeScale: 100}, func(t *testing.T, server *simulated.Server, client engine.Client) {
		control := controllerOf(t, client)
		for mode := engine.PauseAbort; mode <= engine.PauseInPlace; mode++ {
			// Slow, so that the pause comes before the end on a busy machine too.
			if err := server.SetFaults(fault.Settings{SlowFactor: 50}); err != nil {
				t.Fatal(err)
			}
			ended := inProgress(t, client, request(tokens(500, int(mode)), output))
			if mode == engine.PauseWait {
				hurry(t, server) // the pause waits for the end
			}
			if err := control.Pause(t.Context(), mode); err != nil {
				t.Fatalf("%v: %v", mode, err)
			}
			hurry(t, server)
			version := "after-" + mode.String()
			if err := control.SetWeightVersion(t.Context(), version); err != nil {
				t.Fatalf("%v: %v", mode, err)
			}
			if got, err := control.WeightVersion(t.Context()); err != nil || got != version {
				t.Errorf("%v: weights %q, %v", mode, got, err)
			}
			var result engine.Result
			if mode == engine.PauseAbort || mode == engine.PauseWait {
				// These end it before the pause is lifted.
				result = <-ended
			}
			if err := control.Resume(t.Context()); err != nil {
				t.Fatalf("%v: %v", mode, err)
			}
			if mode == engine.PauseKeep || mode == engine.PauseInPlace {
				result = <-ended
			}
			if mode == engine.PauseAbort {
				if n := len(result.OutputIDs); result.FinishReason != engine.FinishAbort || n == 0 || n == output || n != len(result.Logprobs) {
					t.Errorf("aborted: %d tokens, %d logprobs, finish %v", n, len(result.Logprobs), result.FinishReason)
				}
			} else if result.FinishReason != engine.FinishLength || len(result.OutputIDs) != output {
				t.Errorf("%v: %d tokens, finish %v", mode, len(result.OutputIDs), result.FinishReason)
			}
			if preempted := server.Stats().Preemptions > 0; preempted != (mode >= engine.PauseKeep) {
				t.Errorf("%v: preempted %v", mode, preempted)
			}
		}
	})
}

func TestCacheResetInEachDialect(t *testing.T) {
	slow := fault.Settings{SlowFactor: 50}
	inEachDialect(t, simulated.Config{TimeScale: 100, Faults: slow}, func(t *testing.T, server *simulated.Server, client engine.Client) {
		control := controllerOf(t, client)
		ctx, cancel := context.WithCancel(t.Context())
		begun, ended := make(chan struct{}), make(chan error, 1)
		first := sync.OnceFunc(func() { close(begun) })
		go func() {
			_, err := client.Generate(ctx, request(tokens(500, 1), 30_000), func(engine.Progress) { first() })
			first()
			ended <- err
		}()
		<-begun
		if err := control.ResetCache(t.Context()); class(err) != engine.RetryHere {
			t.Errorf("while a request runs: %v", err)
		}
		// A caller that leaves frees the engine.
		cancel()
		if err := <-ended; class(err) != engine.Cancelled {
			t.Errorf("cancelled: %v", err)
		}
		until(t, "the engine to be empty", func() bool { return len(server.Requests()) == 0 })
		if len(server.ResidentBlocks()) == 0 {
			t.Error("nothing is cached")
		}
		if err := control.ResetCache(t.Context()); err != nil || len(server.ResidentBlocks()) != 0 {
			t.Errorf("idle: %v, %d blocks cached", err, len(server.ResidentBlocks()))
		}
	})
}

// TestRanksInEachDialect: an instance of two ranks tells its whole capacity and the
// load of each, and a request goes to the rank that it names.
func TestRanksInEachDialect(t *testing.T) {
	p := instance.Demo()
	inEachDialect(t, simulated.Config{Engine: p, Ranks: 2, TimeScale: 50, Faults: fault.Settings{SlowFactor: 20}}, func(t *testing.T, _ *simulated.Server, client engine.Client) {
		info, err := client.Discover(t.Context())
		if err != nil || info.DataParallelSize != 2 || info.CapacityBlocks != 2*int64(p.CapacityBlocks) || info.BlockTokens != p.BlockTokens || info.MaxContextTokens != int64(p.MaxContextTokens) || info.PrefillTokensPerSecond <= 0 {
			t.Errorf("%+v, %v", info, err)
		}
		r := request(tokens(2000, 1), 20_000)
		r.DataParallelRank = 1
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = client.Generate(ctx, r, nil)
		}()
		until(t, "the second rank to work", func() bool {
			m, err := client.Metrics(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if len(m.Ranks) != 2 || m.Ranks[0].Running != 0 || m.CapacityBlocks != info.CapacityBlocks {
				t.Fatalf("%+v", m)
			}
			return m.Ranks[1].Running == 1 && m.Ranks[1].KVUsage > 0 && m.Running == 1
		})
		cancel()
		<-ended
	})
}

// TestNoRequestIsLeftBehind cancels two thousand requests at random moments on
// engines that also refuse and drop: afterwards the engines hold none.
func TestNoRequestIsLeftBehind(t *testing.T) {
	const perDialect = 700
	faults := fault.Settings{
		Seed:     1,
		Refusals: []fault.Refusal{{Status: 503, Probability: 0.03}, {Status: 500, Probability: 0.03}, {Status: 429, Probability: 0.03, RetryAfterSeconds: 1}, {Status: 504, Probability: 0.03}},
		Drops:    fault.Drops{Probability: 0.05, AfterTokens: 20},
	}
	inEachDialect(t, simulated.Config{TimeScale: 300, Faults: faults}, func(t *testing.T, server *simulated.Server, client engine.Client) {
		breaker, err := engine.NewBreaker(client, engine.BreakerConfig{})
		if err != nil {
			t.Fatal(err)
		}
		var group sync.WaitGroup
		var outcomes [5]atomic.Int64 // By class; 0 is success.
		random := rand.New(rand.NewPCG(7, 7))
		slots := make(chan struct{}, 150)
		for i := range perDialect {
			after := time.Duration(random.Int64N(int64(150 * time.Millisecond)))
			output := 1 + random.IntN(2000)
			slots <- struct{}{}
			group.Go(func() {
				defer func() { <-slots }()
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				stopAt := output + 1
				switch i % 4 {
				case 0: // Before anything is sent, or as it is.
					go cancel()
				case 1: // At a random moment: in the queue, in prefill, in the stream.
					ctx, cancel = context.WithTimeout(ctx, after)
					defer cancel()
				case 2: // In the stream.
					stopAt = output / 2
				}
				r, err := breaker.Generate(ctx, request(tokens(50+i%300, i%40), output), func(p engine.Progress) {
					if p.OutputTokens >= stopAt {
						cancel()
					}
				})
				if err != nil && class(err) == 0 {
					t.Errorf("an error that is not sorted: %v", err)
				}
				if err == nil && len(r.OutputIDs) != output {
					t.Errorf("%d of %d tokens", len(r.OutputIDs), output)
				}
				outcomes[class(err)].Add(1)
			})
		}
		group.Wait()
		until(t, "the engine to be empty", func() bool { return len(server.Requests()) == 0 })
		if s := server.Stats(); s.UsedBlocks() != 0 || s.Running() != 0 || s.Waiting != 0 {
			t.Errorf("the engine holds on to something: %+v", s)
		}
		if outcomes[0].Load() == 0 || outcomes[engine.Cancelled].Load() == 0 || outcomes[engine.RetryElsewhere].Load() == 0 {
			t.Errorf("the test is too gentle: %d ended, %d cancelled, %d failed", outcomes[0].Load(), outcomes[engine.Cancelled].Load(), outcomes[engine.RetryElsewhere].Load())
		}
	})
}

// TestRepeatedCallContinuesTheSame: a repeated or resumed call of a session has
// another name, and the session's own sampling.
func TestRepeatedCallContinuesTheSame(t *testing.T) {
	inEachDialect(t, simulated.Config{TimeScale: 5000}, func(t *testing.T, _ *simulated.Server, client engine.Client) {
		r := request(tokens(100, 1), 60)
		r.RequestID = "s-0"
		whole, err := client.Generate(t.Context(), r, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.RequestID, r.Prompt, r.MaxTokens, r.MinTokens = "s-0-2", append(r.Prompt, whole.OutputIDs[:25]...), 35, 35
		rest, err := client.Generate(t.Context(), r, nil)
		if err != nil || !slices.Equal(rest.OutputIDs, whole.OutputIDs[25:]) {
			t.Errorf("resumed: %v\nwant %v, %v", rest.OutputIDs, whole.OutputIDs[25:], err)
		}
	})
}
