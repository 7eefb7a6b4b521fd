package simulated

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/router/sim/instance"
)

func smallEngine() instance.Params {
	p := instance.Demo()
	p.CapacityBlocks, p.MaxContextTokens, p.MaxSequences, p.MaxBatchedTokens = 64, 1024, 8, 256
	return p
}

func newTestServer(t *testing.T, cfg Config) *Server {
	t.Helper()
	if cfg.Engine.BlockTokens == 0 {
		cfg.Engine = smallEngine()
	}
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// core is the first rank.
func (s *Server) core() *core { return s.life.Load().cores[0] }

// newCall prepares a call as accept does.
func (s *Server) newCall(prompt []int32, output int, name string) (*call, []int32) {
	x := &call{
		requestID: name, request: &completionRequest{MaxTokens: output, IgnoreEOS: true, Temperature: 1, StreamInterval: 1},
		promptTokens: len(prompt), wallStart: time.Now(),
	}
	s.prepare(x, nil, prompt, s.cfg.WeightVersion)
	return x, prompt
}

func (s *Server) submit(x *call, prompt []int32) error {
	return s.core().submit(context.Background(), x, hashPrompt(nil, hashSalt(""), prompt, s.cfg.Engine.BlockTokens), prompt)
}

// output is what a call generates.
func (s *Server) output(x *call) (tokens []int32) {
	t := tape{at: x.promptEnd}
	for _, noise := range t.read(nil, &x.sampler, x.outputTokens) {
		tokens = append(tokens, x.sampler.token(noise))
	}
	return tokens
}

// run submits a call and waits for its end.
func run(t *testing.T, s *Server, x *call, prompt []int32) {
	t.Helper()
	if err := s.submit(x, prompt); err != nil {
		t.Fatal(err)
	}
	for done := false; !done; {
		p, err := s.core().wait(t.Context(), x)
		if err != nil {
			t.Fatal(err)
		}
		done = p.done()
	}
}

// TestCallsTakeTheModelsTime compares wall time with the model's own, times the scale.
func TestCallsTakeTheModelsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(t, Config{TimeScale: 60})
		model, err := instance.New(smallEngine(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := model.Submit(instance.Request{ID: 1, PromptTokens: 500, OutputTokens: 400}); err != nil {
			t.Fatal(err)
		}
		events := model.Advance(int64(time.Hour), nil)
		want := time.Duration(float64(events[len(events)-1].At) / 60)
		x, prompt := s.newCall(make([]int32, 500), 400, "a")
		start := time.Now()
		run(t, s, x, prompt)
		if got := time.Since(start); got < want || got > want+10*time.Microsecond {
			t.Errorf("the call took %s, want %s", got, want)
		}
		if x.generated != 400 || x.event.QueueNanos != 0 {
			t.Errorf("generated %d, queue %d ns", x.generated, x.event.QueueNanos)
		}
		s.core().close(shutDown)
	})
}

// TestCachedTokensFollowContent drives random branching sessions and compares
// what the engine reports as cached with the longest prefix among the hashes of its resident blocks.
func TestCachedTokensFollowContent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(t, Config{})
		size := s.cfg.Engine.BlockTokens
		rng := rand.New(rand.NewPCG(3, 5))
		var contexts [][]int32
		hits := 0
		for i := range 400 {
			var prompt []int32
			if len(contexts) > 0 && rng.IntN(5) > 0 {
				old := contexts[rng.IntN(len(contexts))]
				cut := len(old)
				if rng.IntN(2) == 0 {
					cut = rng.IntN(len(old))
				}
				prompt = slices.Clone(old[:cut])
			}
			for range 1 + rng.IntN(60) {
				prompt = append(prompt, int32(rng.IntN(3)))
			}
			if len(prompt) > 800 {
				prompt = prompt[:800]
			}
			resident := s.ResidentBlocks()
			x, _ := s.newCall(prompt, 1+rng.IntN(80), string(rune('a'+i%26)))
			hashes := hashPrompt(nil, hashSalt(""), prompt, size)
			want := 0
			for want < (len(prompt)-1)/size {
				if _, found := slices.BinarySearch(resident, uint64(hashes[want])); !found {
					break
				}
				want++
			}
			run(t, s, x, prompt)
			if x.event.CachedTokens != want*size {
				t.Fatalf("call %d: %d tokens cached, resident blocks hold %d", i, x.event.CachedTokens, want*size)
			}
			if want > 0 {
				hits++
			}
			// What the request computed can be hit now, its output included.
			context := append(prompt, s.output(x)...)
			if resident = s.ResidentBlocks(); len(resident) > s.cfg.Engine.CapacityBlocks {
				t.Fatalf("%d blocks resident", len(resident))
			}
			for b, h := range hashPrompt(nil, hashSalt(""), context[:len(context)-1], size) {
				if _, found := slices.BinarySearch(resident, uint64(h)); !found {
					t.Fatalf("call %d: block %d of its context is not resident", i, b)
				}
			}
			contexts = append(contexts, context)
			if stats := s.Stats(); stats.CachedBlocks() < len(resident) {
				t.Fatalf("%d hashes for %d cached blocks", len(resident), stats.CachedBlocks())
			}
		}
		if hits < 50 {
			t.Errorf("only %d of 400 calls hit anything", hits)
		}
		s.ResetPrefixCache()
		if n := len(s.core().chains.byID) + len(s.core().chains.heads); n != 0 {
			t.Errorf("%d chains left with nothing cached", n)
		}
		s.core().close(shutDown)
	})
}

// TestConcurrentCallsLeaveNothingBehind runs calls that overlap, share prompts
// and are aborted at random moments.
func TestConcurrentCallsLeaveNothingBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(t, Config{})
		rng := rand.New(rand.NewPCG(7, 7))
		group := make([]int32, 200)
		ends := make(chan error, 1000)
		const calls = 300
		for i := range calls {
			prompt := slices.Clone(group[:50+rng.IntN(150)])
			if rng.IntN(2) == 0 {
				prompt = append(prompt, int32(i))
			}
			x, prompt := s.newCall(prompt, 1+rng.IntN(500), string(rune(i)))
			x.request.Stream = i%2 == 0
			ctx, cancel := context.WithCancel(t.Context())
			if i%3 == 0 {
				ctx, cancel = context.WithTimeout(t.Context(), time.Duration(rng.IntN(20_000))*time.Millisecond)
			}
			if err := s.submit(x, prompt); err != nil {
				t.Fatal(err)
			}
			go func() {
				defer cancel()
				last := 0
				for {
					p, err := s.core().wait(ctx, x)
					if err != nil || p.done() {
						ends <- err
						return
					}
					if p.generated < last {
						t.Errorf("progress went from %d to %d", last, p.generated)
					}
					last = p.generated
				}
			}()
			time.Sleep(time.Duration(rng.IntN(200)) * time.Millisecond) // Virtual time of the bubble.
			if i%50 == 49 {
				s.ResetPrefixCache()
			}
		}
		for range calls {
			<-ends
		}
		if stats := s.Stats(); stats.UsedBlocks() != 0 || stats.Running()+stats.Waiting != 0 || stats.Finished+stats.Aborted != calls || stats.Aborted == 0 {
			t.Errorf("left over: %+v", stats)
		}
		if len(s.core().calls)+len(s.core().streams) != 0 {
			t.Error("calls left over")
		}
		s.ResetPrefixCache()
		if n := len(s.core().chains.byID) + len(s.core().chains.heads); n != 0 {
			t.Errorf("%d chains left over", n)
		}
		s.core().close(shutDown)
	})
}

// TestStreamsSendWholeIntervals: the first token at once, then chunks of the interval.
func TestStreamsSendWholeIntervals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(t, Config{})
		x, prompt := s.newCall(make([]int32, 20), 205, "a")
		x.request.Stream, x.request.StreamInterval = true, 50
		if err := s.submit(x, prompt); err != nil {
			t.Fatal(err)
		}
		var got []int
		for done := false; !done; {
			p, err := s.core().wait(t.Context(), x)
			if err != nil {
				t.Fatal(err)
			}
			done = p.done()
			got = append(got, p.generated)
		}
		if want := []int{1, 51, 101, 151, 201, 205}; !slices.Equal(got, want) {
			t.Errorf("told %v, want %v", got, want)
		}
		s.core().close(shutDown)
	})
}

func TestClosingAbortsWhatRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(t, Config{})
		x, prompt := s.newCall(make([]int32, 20), 900, "a")
		if err := s.submit(x, prompt); err != nil {
			t.Fatal(err)
		}
		if err := s.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		if p, err := s.core().wait(t.Context(), x); !p.done() || err == nil {
			t.Errorf("done %v, error %v", p.done(), err)
		}
		if err := s.submit(x, prompt); err == nil {
			t.Error("a closed engine took a request")
		}
	})
}
