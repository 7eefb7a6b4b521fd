package activities

import (
	"context"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/router/prefix"
)

// blockChain hashes the growing context of one session for the prefix index, each
// token once as long as the context stays in this process.
type blockChain struct {
	policyVersion int64
	blockTokens   int
	stream        *prefix.Stream
	// hashed tokens of the context are in the stream. The blocks that were complete
	// before the present turn are known to the router; those that it added are sent
	// again with each try of the turn.
	hashed int
	turn   int
	known  int
	added  []prefix.Hash
}

// describe puts the blocks of a turn's prompt into its request. A new policy
// version shares no block with the old one, so the chain then begins anew, as it
// does for a context that is shorter than what was hashed.
func (b *blockChain) describe(request *router.TurnRequested, tokens []int32, policyVersion int64, blockTokens int) {
	if blockTokens < 1 {
		return
	}
	if b.stream == nil || b.policyVersion != policyVersion || b.blockTokens != blockTokens || len(tokens) < b.hashed {
		*b = blockChain{
			policyVersion: policyVersion, blockTokens: blockTokens, turn: request.Turn,
			stream: prefix.NewHasher(policyVersion, blockTokens).NewStream(), added: b.added[:0],
		}
	}
	if request.Turn != b.turn {
		b.turn, b.known, b.added = request.Turn, b.stream.Blocks(), b.added[:0]
	}
	b.added = b.stream.Append(b.added, tokens[b.hashed:])
	b.hashed = len(tokens)
	request.KnownBlocks, request.NewBlocks = b.known, b.added
}

// hashBeforeAdmission puts the prompt's blocks into a question for admission, so
// that a new session is placed where its prefix is. The context that this reads is
// to be kept for the turn that follows; it is nil where nothing is hashed.
func (a *Activities) hashBeforeAdmission(ctx context.Context, id uuid.UUID, request *router.TurnRequested) (*sessionContext, error) {
	policyVersion, blockTokens := a.cfg.Engines.Hashing()
	if blockTokens < 1 {
		return nil, nil
	}
	sc, err := a.load(ctx, id, request.Turn)
	if err != nil {
		return nil, err
	}
	committed := len(sc.tokens)
	sc.tokens = appendToolResult(sc.tokens, &sc.work, request.Turn)
	sc.chain.describe(request, sc.tokens, policyVersion, blockTokens)
	sc.tokens = sc.tokens[:committed]
	return sc, nil
}
