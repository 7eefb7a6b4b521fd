//go:build realengine

package enginetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"holdfast/orchestrator/engine"
)

func client(t *testing.T, s *Server, model string) *engine.OpenAI {
	t.Helper()
	c, err := engine.NewOpenAI(engine.OpenAIConfig{URL: s.URL, Model: model, StallTimeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func request(prompt string, maxTokens int) engine.Request {
	seed := int64(7)
	return engine.Request{Prompt: ASCII(prompt), MaxTokens: maxTokens, Temperature: 1, TopP: 1, Seed: &seed, DataParallelRank: -1}
}

func TestRealEngine(t *testing.T) {
	s := Start(t, Ending, Endless)
	t.Run("discovery", func(t *testing.T) { discovers(t, s) })
	t.Run("generation", func(t *testing.T) { generates(t, s) })
	t.Run("ends", func(t *testing.T) { ends(t, s) })
	t.Run("concurrency", func(t *testing.T) { manyAtOnce(t, s) })
	t.Run("abort", func(t *testing.T) { aborts(t, s) })
	t.Run("killed", func(t *testing.T) { killed(t, s) })
}

func discovers(t *testing.T, s *Server) {
	c, err := engine.NewClient("openai", s.URL)
	if err != nil {
		t.Fatal(err)
	}
	info, err := c.Discover(t.Context())
	if err != nil || info.Model != Endless && info.Model != Ending || info.Version == "" || info.CapacityBlocks != 0 {
		t.Errorf("%+v, %v", info, err)
	}
	if err := c.Health(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := c.Metrics(t.Context()); !errors.Is(err, engine.ErrNoMetrics) {
		t.Errorf("metrics: %v", err)
	}
	var e *engine.Error
	if _, err := client(t, s, "nosuch").Generate(t.Context(), request("hi", 1), nil); !errors.As(err, &e) || e.Class != engine.FailTurn {
		t.Errorf("a model that is not served: %v", err)
	}
}

func generates(t *testing.T, s *Server) {
	c := client(t, s, Endless)
	var progress []int
	result, err := c.Generate(t.Context(), request("once upon a time", 200), func(p engine.Progress) { progress = append(progress, p.OutputTokens) })
	if err != nil {
		t.Fatal(err)
	}
	if len(result.OutputIDs) != 200 || result.FinishReason != engine.FinishLength || !result.IDsReencoded || Speaks(result.OutputIDs) != nil {
		t.Errorf("%+v", result)
	}
	if len(progress) < 20 || !slices.IsSorted(progress) || progress[len(progress)-1] != 200 {
		t.Errorf("a stream of 200 tokens told its progress %d times: %v", len(progress), progress)
	}
	if result.TimeToFirstTokenSeconds <= 0 || result.TimeToFirstTokenSeconds >= result.TotalSeconds {
		t.Errorf("first token after %v of %v s", result.TimeToFirstTokenSeconds, result.TotalSeconds)
	}
	other, err := c.Generate(t.Context(), request("twice upon a time", 200), nil)
	if err != nil || slices.Equal(result.OutputIDs, other.OutputIDs) {
		t.Errorf("another prompt gives the same output, %v", err)
	}
	// The next turn: the context goes on from what came.
	next := request("once upon a time", 50)
	next.Prompt = append(next.Prompt, result.OutputIDs...)
	if more, err := c.Generate(t.Context(), next, nil); err != nil || len(more.OutputIDs) != 50 {
		t.Errorf("%+v, %v", more, err)
	}
}

// ends: the model's own end, and a stop token that the server does not know of.
func ends(t *testing.T, s *Server) {
	c := client(t, s, Ending)
	stops := 0
	for seed := range int64(4) {
		r := request("and then", 1500)
		r.Seed = &seed
		result, err := c.Generate(t.Context(), r, nil)
		if err != nil {
			t.Fatal(err)
		}
		if result.FinishReason == engine.FinishStop && len(result.OutputIDs) < 1500 {
			stops++
		}
	}
	if stops == 0 {
		t.Error("no output ended by itself")
	}
	r := request("and then", 1500)
	r.StopTokenIDs = ASCII(".")
	result, err := client(t, s, Endless).Generate(t.Context(), r, nil)
	if err != nil || result.FinishReason != engine.FinishStop || slices.Index(result.OutputIDs, '.') != len(result.OutputIDs)-1 {
		t.Errorf("%+v, %v", result, err)
	}
	s.AwaitIdle(t)
}

// manyAtOnce asks for more than the server runs at a time.
func manyAtOnce(t *testing.T, s *Server) {
	c := client(t, s, Endless)
	var group sync.WaitGroup
	for i := range 4 * Parallel {
		group.Go(func() {
			want := 40 + 10*i
			result, err := c.Generate(t.Context(), request(fmt.Sprintf("member %d says", i), want), nil)
			if err != nil || len(result.OutputIDs) != want {
				t.Errorf("%d: %d of %d tokens, %v", i, len(result.OutputIDs), want, err)
			}
		})
	}
	group.Wait()
}

// aborts: the server stops working for a caller that has left.
func aborts(t *testing.T, s *Server) {
	c := client(t, s, Endless)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	result, err := c.Generate(ctx, request("for ever and ever", 1_000_000), func(p engine.Progress) {
		if p.OutputTokens >= 100 {
			cancel()
		}
	})
	var e *engine.Error
	if !errors.As(err, &e) || e.Class != engine.Cancelled || len(result.OutputIDs) < 100 {
		t.Fatalf("%d tokens, %v", len(result.OutputIDs), err)
	}
	s.AwaitIdle(t)
	if after, err := c.Generate(t.Context(), request("and now", 10), nil); err != nil || len(after.OutputIDs) != 10 {
		t.Errorf("after an abort: %+v, %v", after, err)
	}
}

// killed: what had come is kept, the breaker leaves a dead server alone, and
// a restarted one goes on where the output was cut.
func killed(t *testing.T, s *Server) {
	b, err := engine.NewBreaker(client(t, s, Endless), engine.BreakerConfig{OpenFor: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	first := request("until the end", 1_000_000)
	result, err := b.Generate(t.Context(), first, func(p engine.Progress) {
		if p.OutputTokens >= 100 {
			once.Do(s.Kill)
		}
	})
	var e *engine.Error
	if !errors.As(err, &e) || e.Class != engine.RetryElsewhere || len(result.OutputIDs) < 100 {
		t.Fatalf("%d tokens, %v", len(result.OutputIDs), err)
	}
	for !errors.Is(err, engine.ErrBreakerOpen) {
		if _, err = b.Generate(t.Context(), first, nil); !errors.As(err, &e) || e.Class != engine.RetryElsewhere {
			t.Fatalf("a server that is gone: %v", err)
		}
	}
	s.Restart(t)
	rest := request("until the end", 50)
	rest.Prompt = append(rest.Prompt, result.OutputIDs[:100]...)
	var more engine.Result
	Await(t, startTimeout, "a probe to close the breaker", func() bool {
		more, err = b.Generate(t.Context(), rest, nil)
		return !errors.Is(err, engine.ErrBreakerOpen)
	})
	if err != nil || len(more.OutputIDs) != 50 || b.Stats().State != engine.BreakerClosed {
		t.Errorf("%+v, %v, %+v", more, err, b.Stats())
	}
}
