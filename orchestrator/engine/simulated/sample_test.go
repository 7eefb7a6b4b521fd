package simulated

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestPlacesHashLikeBlocks: a block's hash is the same whether its tokens come from
// a prompt or one by one.
func TestPlacesHashLikeBlocks(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, size := range []int{1, 2, 3, 16, 17} {
		tokens := make([]int32, 5*size)
		for i := range tokens {
			tokens[i] = rng.Int32()
		}
		want := hashPrompt(nil, 0, tokens, size)
		p := place{hash: hashStart}
		seen := map[uint64]bool{p.content(): true}
		for i, token := range tokens {
			p.push(token, size)
			if (i+1)%size == 0 && p.hash != want[i/size] {
				t.Errorf("blocks of %d: block %d hashes to %x, want %x", size, i/size, p.hash, want[i/size])
			}
			if seen[p.content()] {
				t.Errorf("blocks of %d: two places in one content are the same", size)
			}
			seen[p.content()] = true
		}
	}
}

func ids(t *testing.T, s *Server, body string) (tokens []int32, reason string) {
	t.Helper()
	choice := decode(t, post(t, s, body).Body.Bytes()).Choices[0]
	return choice.TokenIDs, *choice.FinishReason
}

// TestContinuationEqualsTheWhole: prompt and partial output, sent as a prompt to
// another engine, bring the rest of what the uninterrupted request got, its end included.
func TestContinuationEqualsTheWhole(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 8))
	for name, options := range map[string]string{
		"named":     `"temperature":1`,
		"seeded":    `"temperature":0.7,"seed":5`,
		"greedy":    `"temperature":0,"cache_salt":"v1"`,
		"fixed":     `"ignore_eos":true`,
		"with stop": `"ignore_eos":true,"stop_token_ids":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20]`,
	} {
		one := newTestServer(t, Config{TimeScale: 1e5, Seed: 3, VocabularySize: 2000, MeanOutputTokens: 120})
		two := newTestServer(t, Config{TimeScale: 1e5, Seed: 3, VocabularySize: 2000, MeanOutputTokens: 120})
		ends := map[string]int{}
		for i := range 20 {
			prompt := make([]int32, 1+rng.IntN(100))
			for k := range prompt {
				prompt[k] = rng.Int32N(2000)
			}
			body := func(prompt []int32, most int) string {
				return fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"return_token_ids":true,%s}`, jsonInts(prompt), most, options)
			}
			whole, reason := ids(t, one, body(prompt, 300))
			ends[reason]++
			for range 3 {
				cut := rng.IntN(len(whole))
				rest, end := ids(t, two, body(append(slices.Clone(prompt), whole[:cut]...), 300-cut))
				if !slices.Equal(rest, whole[cut:]) || end != reason {
					t.Fatalf("%s, request %d, cut at %d of %d: got %d tokens ending by %s, want ending by %s", name, i, cut, len(whole), len(rest), end, reason)
				}
			}
		}
		if fixed := name == "fixed"; fixed != (ends["stop"] == 0) {
			t.Errorf("%s: ends %v", name, ends)
		}
	}
}

// TestTokensTellTheirWeights: Continue says what an engine generates, under which version.
func TestTokensTellTheirWeights(t *testing.T) {
	s := newTestServer(t, Config{TimeScale: 1e5, Seed: 9, WeightVersion: "7"})
	const body = `{"prompt":[4,5,6],"max_tokens":40,"ignore_eos":true,"return_token_ids":true}`
	sampling := Sampling{Seed: 9, VocabularySize: 151_936, Session: "r7", Temperature: 1, WeightVersion: "7"}
	first, _ := ids(t, s, body)
	if !slices.Equal(first, sampling.Continue([]int32{4, 5, 6}, 40, 16)) {
		t.Error("Continue says other tokens than came")
	}
	control(t, s, "POST", "/finish_weight_update", `{"weight_version":"8"}`, 200)
	second, _ := ids(t, s, body)
	sampling.WeightVersion = "8"
	if slices.Equal(first, second) || !slices.Equal(second, sampling.Continue([]int32{4, 5, 6}, 40, 16)) {
		t.Error("new weights do not generate the tokens that Continue says")
	}
	if got := control(t, s, "GET", "/weight_info", "", 200); got["weight_version"] != "8" {
		t.Errorf("weights %v", got)
	}
}
