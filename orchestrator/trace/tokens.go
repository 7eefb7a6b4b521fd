package trace

import (
	"sync"

	"github.com/tiktoken-go/tokenizer/codec"
)

// TokenizerName names the byte-pair vocabulary by which text is counted. It is
// the one from which Qwen's is derived, it is inside the library, and at 4 MB
// it is half the size of its successor; on tau-bench's file the two differ by
// 0.3 %.
const TokenizerName = "cl100k_base"

// bpe builds the vocabulary on first use, since it takes 70 ms and 12 MB that a
// process which imports nothing should not pay.
var bpe = sync.OnceValue(codec.NewCl100kBase)

// countTokens returns the number of tokens of a text by itself: neither a chat
// template's markers nor merges across its ends are counted.
func countTokens(text string) (int, error) {
	if text == "" {
		return 0, nil
	}
	return bpe().Count(text)
}
