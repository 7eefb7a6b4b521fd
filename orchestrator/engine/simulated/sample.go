package simulated

import (
	"math"
	"math/bits"
	"slices"
	"strconv"
)

// place is a position in some content: what comes next depends on the tokens
// before it and not on where a prompt ended. At the end of a full block
// its hash is the block's.
type place struct {
	hash   blockHash // of the full blocks and the pairs of tokens after them
	odd    int32     // a token without partner, if filled is odd
	filled int       // tokens in the block so far
}

// push moves the place past a token.
func (p *place) push(token int32, blockTokens int) {
	if p.filled&1 == 0 {
		p.odd = token
	} else {
		p.hash = blockHash(mix(uint64(p.hash), uint64(uint32(p.odd))|uint64(uint32(token))<<32))
	}
	if p.filled++; p.filled < blockTokens {
		return
	}
	if p.filled&1 == 1 {
		p.hash = blockHash(mix(uint64(p.hash), uint64(uint32(p.odd))))
	}
	p.hash = blockHash(mix(uint64(p.hash), blockEnd))
	p.filled = 0
}

// content identifies all tokens before the place.
func (p *place) content() uint64 {
	if p.filled&1 == 1 {
		return mix(uint64(p.hash), uint64(uint32(p.odd))|1<<63)
	}
	return uint64(p.hash)
}

// sampler generates tokens and their log-probabilities. A token is a function of
// the engine's seed, the name of who samples, the weights' version, and all tokens
// before it. So a request that continues another one's prompt and output under
// the same version gets the tokens that the other would have got, on any engine
// with the same seed; and who knows these can tell which weights made a token.
type sampler struct {
	vocabulary  uint64
	blockTokens int
	identity    uint64
	// weights are the versions under which the output is generated, in order; the
	// first holds from output token 0 on. It is only ever appended to.
	weights []weightSpan
	// script is what the output begins with, whatever the noise; see Script.
	script []int32
}

// weightSpan says that output tokens from one on were generated under a version.
type weightSpan struct {
	from    int
	version string
	base    uint64
}

// under makes the output from a token on depend on a version.
func (s *sampler) under(version string, from int) {
	span := weightSpan{from, version, mix(s.identity, uint64(hashName(version)))}
	for n := len(s.weights); n > 0 && s.weights[n-1].from >= from; n = len(s.weights) {
		// Nothing was generated under the last one. Readers may hold the slice.
		s.weights = slices.Clone(s.weights[:n-1])
	}
	s.weights = append(s.weights, span)
}

// span is the weights that generate an output token.
func (s *sampler) span(token int) *weightSpan {
	i := len(s.weights) - 1
	for s.weights[i].from > token {
		i--
	}
	return &s.weights[i]
}

// token is the id that some noise chooses.
func (s *sampler) token(noise uint64) int32 {
	hi, _ := bits.Mul64(noise, s.vocabulary)
	return int32(hi)
}

// noiseFor is noise that chooses the given token, and a log-probability by other noise.
func (s *sampler) noiseFor(token int32, other uint64) uint64 {
	least, rest := bits.Div64(uint64(token), 0, s.vocabulary)
	if rest > 0 {
		least++
	}
	return least + other&1023
}

// tape generates an output token by token.
type tape struct {
	at   place
	next int // output token
}

// noise is what the next token and its log-probability are made of.
func (t *tape) noise(s *sampler) uint64 {
	// SplitMix64's finish.
	x := t.at.content() ^ s.span(t.next).base
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	x ^= x >> 31
	if t.next < len(s.script) {
		x = s.noiseFor(s.script[t.next], x)
	}
	t.at.push(s.token(x), s.blockTokens)
	t.next++
	return x
}

// read appends the noise of the output up to a token.
func (t *tape) read(dst []uint64, s *sampler, to int) []uint64 {
	for t.next < to {
		dst = append(dst, t.noise(s))
	}
	return dst
}

// outputTokens is how many tokens a request generates from t on, whether it stops
// by itself, and the token that stopped it. Every token ends the output with
// equal probability, so that a continuation ends where the whole would have.
// When the weights change in mid-generation the length stays what it was.
func (s *sampler) outputTokens(t tape, r *completionRequest, meanTokens int) (n int, stopped bool, last int32) {
	if n := len(s.script); n > 0 {
		return min(n, r.MaxTokens), n <= r.MaxTokens, s.script[n-1]
	}
	if r.IgnoreEOS && len(r.StopTokenIDs) == 0 {
		return r.MaxTokens, false, 0
	}
	end := uint64(math.MaxUint64)
	if meanTokens > 1 {
		end /= uint64(meanTokens)
	}
	for t.next < r.MaxTokens {
		noise := t.noise(s)
		if t.next < r.MinTokens {
			continue
		}
		token := s.token(noise)
		if !r.IgnoreEOS && mix(noise, blockEnd) <= end || slices.Contains(r.StopTokenIDs, token) {
			return t.next, true, token
		}
	}
	return r.MaxTokens, false, 0
}

// logprobThousandths is a negated log-probability: mostly near 0, never above 4.1.
func logprobThousandths(noise uint64) int {
	k := int(noise & 1023)
	return k * k / 256
}

// appendLogprob appends a number such as -0.042.
func appendLogprob(buf []byte, thousandths int) []byte {
	if thousandths > 0 {
		buf = append(buf, '-')
	}
	buf = strconv.AppendInt(buf, int64(thousandths/1000), 10)
	f := thousandths % 1000
	return append(buf, '.', byte('0'+f/100), byte('0'+f/10%10), byte('0'+f%10))
}

// Sampling names what the tokens of a simulated engine depend on, besides the
// tokens before them.
type Sampling struct {
	// Seed and VocabularySize are the engine's.
	Seed           uint64
	VocabularySize int
	// Session is the X-Session-Id or, without one, the request's id. It does not
	// count with RequestSeed, and neither of them at temperature 0.
	Session     string
	RequestSeed *int64
	Temperature float64
	// WeightVersion is the version of the weights.
	WeightVersion string
}

func (s Sampling) identity() uint64 {
	seed := mix(s.Seed, uint64(hashStart))
	switch {
	case s.Temperature == 0:
		return seed
	case s.RequestSeed != nil:
		return mix(seed, uint64(*s.RequestSeed)+1)
	}
	return mix(seed, uint64(hashName(s.Session)))
}

func (s Sampling) sampler(blockTokens int) sampler {
	return sampler{vocabulary: uint64(s.VocabularySize), blockTokens: blockTokens, identity: s.identity()}
}

// Continue returns the n tokens that an engine with blocks of a size generates
// after a context. Tests compare them with what came.
func (s Sampling) Continue(context []int32, n, blockTokens int) []int32 {
	x := s.sampler(blockTokens)
	x.under(s.WeightVersion, 0)
	t := tape{at: place{hash: hashStart}}
	for _, token := range context {
		t.at.push(token, blockTokens)
	}
	tokens := make([]int32, 0, n)
	for range n {
		tokens = append(tokens, x.token(t.noise(&x)))
	}
	return tokens
}
