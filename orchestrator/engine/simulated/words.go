package simulated

import "math/bits"

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
