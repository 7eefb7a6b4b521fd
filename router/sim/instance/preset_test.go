package instance

import (
	"math"
	"testing"
)

// TestPresetsBehaveAsTheirFiguresSay computes by hand what a lone prompt and a full batch take.
func TestPresetsBehaveAsTheirFiguresSay(t *testing.T) {
	for _, test := range []struct {
		p Params
		// A cold prompt of 38,000 tokens, alone: seconds to its first token.
		coldSeconds float64
		// A step of 48 sequences of 40,000 tokens: seconds.
		stepSeconds float64
	}{
		{QwenLike(), 5*0.0121 + 38_000./60_000*(1+38_000./120_000), 0.012 + 0.0048 + 0.0096},
		{StepLike(), 5*0.01408 + 38_000./50_000*(1+38_000./120_000), 0.014 + 0.00384 + 0.004032},
	} {
		in, err := New(test.p, nil)
		if err != nil {
			t.Fatal(err)
		}
		ch := &Chain{ID: 1}
		if err := in.Submit(Request{ID: 1, Chain: ch, PromptTokens: 38_000, OutputTokens: 1}); err != nil {
			t.Fatal(err)
		}
		events := in.Advance(60e9, nil)
		if got := float64(events[0].At) / 1e9; math.Abs(got-test.coldSeconds) > 1e-3 {
			t.Errorf("%s: a cold prompt takes %.4f s, want %.4f", test.p.Name, got, test.coldSeconds)
		}
		// The same prompt again, a block longer: all of it but the new block is cached.
		if got, want := in.CachedPrefixTokens(ch, 38_016), 38_000; got != want {
			t.Errorf("%s: %d tokens cached, want %d", test.p.Name, got, want)
		}
		if got := float64(test.p.stepCost().step(48, 48*40_000)) / 1e12; math.Abs(got-test.stepSeconds) > 1e-4 {
			t.Errorf("%s: a step takes %.4f s, want %.4f", test.p.Name, got, test.stepSeconds)
		}
	}
}

// TestHostTierBringsEvictedPromptsBack: what the device evicted is loaded, not computed.
func TestHostTierBringsEvictedPromptsBack(t *testing.T) {
	p := QwenLike().WithHostTier(1.3e12, 160e9)
	p.CapacityBlocks = 4_000 // One and a half prompts.
	in, err := New(p, nil)
	if err != nil {
		t.Fatal(err)
	}
	prompts := []*Chain{{ID: 1}, {ID: 2}}
	var events []Event
	for i := range 4 {
		if err := in.Submit(Request{ID: uint64(i), Chain: prompts[i%2], PromptTokens: 38_000 + 100*i, OutputTokens: 1}); err != nil {
			t.Fatal(err)
		}
		events = in.Advance(in.Now()+60e9, events[:0])
		last := events[len(events)-1]
		seconds := float64(last.PrefillNanos) / 1e9
		if i < 2 {
			if last.CachedTokens != 0 || seconds < 0.8 {
				t.Errorf("request %d: %d tokens cached, prefill %.3f s", i, last.CachedTokens, seconds)
			}
			continue
		}
		// Some 2,375 blocks at 107,744 a second are 22 ms at most, and a step follows.
		if want := (38_000 + 100*(i-2)) / 16 * 16; last.CachedTokens != want || last.HostTokens < 10_000 || seconds > 0.05 {
			t.Errorf("request %d: %d tokens cached, %d from the host, prefill %.3f s", i, last.CachedTokens, last.HostTokens, seconds)
		}
	}
}

func TestParametersThatNoEngineHas(t *testing.T) {
	for name, change := range map[string]func(*Params){
		"no blocks":          func(p *Params) { p.CapacityBlocks = 0 },
		"negative block":     func(p *Params) { p.BlockTokens = -16 },
		"budget below batch": func(p *Params) { p.MaxBatchedTokens = p.MaxSequences - 1 },
		"free step":          func(p *Params) { p.StepBaseNanos = 0 },
		"NaN":                func(p *Params) { p.StepPerKVTokenNanos = math.NaN() },
		"infinite":           func(p *Params) { p.PrefillTokenNanos = math.Inf(1) },
		"negative cost":      func(p *Params) { p.StepPerSequenceNanos = -1 },
		"endless step":       func(p *Params) { p.StepPerKVTokenNanos = 1e12 },
		"host without link":  func(p *Params) { p.HostBlocks = 1 },
	} {
		p := QwenLike()
		change(&p)
		if _, err := New(p, nil); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestRequestsThatCannotRun(t *testing.T) {
	p := QwenLike()
	p.CapacityBlocks = 100
	in, err := New(p, nil)
	if err != nil {
		t.Fatal(err)
	}
	ok := Request{ID: 1, PromptTokens: 10, OutputTokens: 10}
	if err := in.Submit(ok); err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]Request{
		"id in use":      ok,
		"no prompt":      {ID: 2, OutputTokens: 1},
		"no output":      {ID: 2, PromptTokens: 1},
		"context":        {ID: 2, PromptTokens: 131_072, OutputTokens: 1},
		"cache":          {ID: 2, PromptTokens: 1600, OutputTokens: 1},
		"absurd numbers": {ID: 2, PromptTokens: math.MaxInt, OutputTokens: math.MaxInt},
	} {
		if err := in.Submit(r); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if s := in.Stats(); s.Submitted != 1 {
		t.Errorf("%d requests submitted", s.Submitted)
	}
}

// TestLongSimulationsKeepTheirPrecision: after a hundred days steps still take what they take.
func TestLongSimulationsKeepTheirPrecision(t *testing.T) {
	in, err := New(QwenLike(), nil)
	if err != nil {
		t.Fatal(err)
	}
	run := func(id uint64) int64 {
		start := in.Now()
		if err := in.Submit(Request{ID: id, PromptTokens: 1000, OutputTokens: 100_000}); err != nil {
			t.Fatal(err)
		}
		events := in.Advance(start+1e14, nil)
		return events[len(events)-1].At - start
	}
	first := run(1)
	in.Advance(100*86_400e9*100, nil)
	if second := run(2); second != first {
		t.Errorf("the same request takes %d ns, then %d ns", first, second)
	}
}
