package activities

import (
	"slices"
	"testing"

	"holdfast/router"
	"holdfast/router/prefix"
)

const testBlockTokens = 4

func contextOf(n int) []int32 {
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = int32(i * i)
	}
	return tokens
}

// applied is the chain that a router builds from the requests it was sent.
func applied(chain []prefix.Hash, request router.TurnRequested) []prefix.Hash {
	return append(chain[:request.KnownBlocks:request.KnownBlocks], request.NewBlocks...)
}

func TestChainIsToldOncePerTurnAndAgainOnRetry(t *testing.T) {
	tokens := contextOf(50)
	var b blockChain
	var told []prefix.Hash
	for turn, step := range []struct{ tokens, known, added int }{
		{tokens: 10, known: 0, added: 2},
		{tokens: 11, known: 2, added: 0},
		{tokens: 29, known: 2, added: 5},
		{tokens: 50, known: 7, added: 5},
	} {
		for try := range 3 {
			request := router.TurnRequested{Turn: turn}
			b.describe(&request, tokens[:step.tokens], 3, testBlockTokens)
			if request.KnownBlocks != step.known || len(request.NewBlocks) != step.added {
				t.Fatalf("turn %d, try %d: known %d and %d new blocks, want %d and %d", turn, try, request.KnownBlocks, len(request.NewBlocks), step.known, step.added)
			}
			told = applied(told, request)
		}
		want := prefix.NewHasher(3, testBlockTokens).AppendChain(nil, prefix.NewHasher(3, testBlockTokens).Root(), tokens[:step.tokens])
		if !slices.Equal(told, want) {
			t.Fatalf("turn %d: the router's chain is %x, want %x", turn, told, want)
		}
	}
}

func TestRetryOfALongerPromptAddsItsBlocks(t *testing.T) {
	// A turn that resumes with partial output asks again with a longer prompt.
	tokens := contextOf(40)
	var b blockChain
	first, second := router.TurnRequested{Turn: 1}, router.TurnRequested{Turn: 1}
	b.describe(&first, tokens[:12], 0, testBlockTokens)
	b.describe(&second, tokens[:40], 0, testBlockTokens)
	want := prefix.NewHasher(0, testBlockTokens).AppendChain(nil, prefix.NewHasher(0, testBlockTokens).Root(), tokens)
	if got := applied(nil, second); second.KnownBlocks != 0 || !slices.Equal(got, want) {
		t.Fatalf("known %d, chain %x, want the whole chain %x", second.KnownBlocks, got, want)
	}
}

func TestChainBeginsAnewWhereItCannotGoOn(t *testing.T) {
	tokens := contextOf(40)
	for _, c := range []struct {
		name        string
		version     int64
		blockTokens int
		tokens      int
	}{
		{"new policy version", 4, testBlockTokens, 40},
		{"another block size", 3, 8, 40},
		{"shorter context", 3, testBlockTokens, 17},
	} {
		t.Run(c.name, func(t *testing.T) {
			var b blockChain
			b.describe(&router.TurnRequested{Turn: 5}, tokens[:30], 3, testBlockTokens)
			request := router.TurnRequested{Turn: 6}
			b.describe(&request, tokens[:c.tokens], c.version, c.blockTokens)
			hasher := prefix.NewHasher(c.version, c.blockTokens)
			want := hasher.AppendChain(nil, hasher.Root(), tokens[:c.tokens])
			if request.KnownBlocks != 0 || !slices.Equal(request.NewBlocks, want) {
				t.Fatalf("known %d, new %x, want 0 and %x", request.KnownBlocks, request.NewBlocks, want)
			}
		})
	}
}

func TestNothingIsHashedWhereNobodyListens(t *testing.T) {
	var b blockChain
	request := router.TurnRequested{Turn: 0}
	b.describe(&request, contextOf(40), 3, 0)
	if request.KnownBlocks != 0 || request.NewBlocks != nil || b.stream != nil {
		t.Fatalf("known %d, new %x", request.KnownBlocks, request.NewBlocks)
	}
}
