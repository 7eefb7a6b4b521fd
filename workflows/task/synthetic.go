package task

// SyntheticVocabulary is the number of distinct ids that synthetic prompts and
// replayed tool results are drawn from. It is smaller than any real vocabulary,
// so the ids are valid for every engine.
const SyntheticVocabulary = 30_000

// AppendTokens appends the ids that a synthetic prompt stands for to dst.
func (p Synthetic) AppendTokens(dst []int32) []int32 {
	shared := min(p.SharedTokens, p.Tokens)
	dst = appendSeeded(dst, p.SharedSeed, shared)
	return appendSeeded(dst, p.Seed, p.Tokens-shared)
}

// AppendToolResult appends count ids standing for the tool result that follows
// turn (counted from 0) of the session with that seed.
func AppendToolResult(dst []int32, seed uint64, turn, count int) []int32 {
	return appendSeeded(dst, seed^(uint64(turn)+1)*0x9e3779b97f4a7c15, count)
}

// appendSeeded is splitmix64 (Steele, Lea, Flood 2014) reduced to the vocabulary:
// small, fast and the same on every machine.
func appendSeeded(dst []int32, seed uint64, count int) []int32 {
	state := seed
	for range count {
		state += 0x9e3779b97f4a7c15
		z := state
		z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9
		z = (z ^ (z >> 27)) * 0x94d049bb133111eb
		z ^= z >> 31
		dst = append(dst, int32(z%SyntheticVocabulary))
	}
	return dst
}
