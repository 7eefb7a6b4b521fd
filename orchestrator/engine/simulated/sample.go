package simulated

import (
	"math"
	"math/bits"
	"strconv"
)

// sampler generates a request's tokens and their log-probabilities. Each is a
// function of the request and its position alone, so nothing is stored and any
// part can be made at any time.
type sampler struct {
	base       uint64
	vocabulary uint64
}

func (s sampler) bits(i int) uint64 {
	// SplitMix64.
	x := s.base + uint64(i+1)*0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// token is the id of output token i.
func (s sampler) token(i int) int32 {
	hi, _ := bits.Mul64(s.bits(i), s.vocabulary)
	return int32(hi)
}

// appendTokens appends the ids of output tokens [from, to).
func (s sampler) appendTokens(dst []int32, from, to int) []int32 {
	for i := from; i < to; i++ {
		dst = append(dst, s.token(i))
	}
	return dst
}

// logprobThousandths is the negated log-probability of output token i: mostly
// near 0, never above 4.1.
func (s sampler) logprobThousandths(i int) int {
	k := int(s.bits(i) & 1023)
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

// outputTokens is how many tokens the request generates, and whether it stops by itself.
func (s sampler) outputTokens(r *completionRequest, meanTokens int) (n int, stopped bool) {
	n = r.MaxTokens
	if !r.IgnoreEOS {
		u := float64(s.bits(-2)>>11+1) / (1 << 53)
		drawn := max(1+int(-math.Log(u)*float64(meanTokens-1)), r.MinTokens)
		if drawn <= n {
			n, stopped = drawn, true
		}
	}
	if len(r.StopTokenIDs) > 0 {
		stop := make(map[int32]bool, len(r.StopTokenIDs))
		for _, id := range r.StopTokenIDs {
			stop[id] = true
		}
		for i := max(r.MinTokens-1, 0); i < n; i++ {
			if stop[s.token(i)] {
				return i + 1, true
			}
		}
	}
	return n, stopped
}

// appendWord appends a token's text: a short pronounceable word of its own.
func appendWord(buf []byte, token int32) []byte {
	const consonants, vowels = "bdfgjklmnprstvz", "aeiou"
	buf = append(buf, ' ')
	for t := int(token); ; t /= len(consonants) * len(vowels) {
		buf = append(buf, consonants[t%len(consonants)], vowels[t/len(consonants)%len(vowels)])
		if t < len(consonants)*len(vowels) {
			return buf
		}
	}
}

// tokenize turns text into token ids: about four bytes a token, equal words
// becoming equal tokens so that equal beginnings share blocks.
func tokenize(dst []int32, text string, vocabulary int) []int32 {
	const maxTokenBytes = 4
	for start := 0; start < len(text); {
		end := start + 1
		for end < len(text) && end-start < maxTokenBytes && text[end] != ' ' {
			end++
		}
		h := uint64(end - start)
		for _, b := range []byte(text[start:end]) {
			h = mix(h, uint64(b)+1)
		}
		hi, _ := bits.Mul64(h, uint64(vocabulary))
		dst = append(dst, int32(hi))
		start = end
	}
	return dst
}
