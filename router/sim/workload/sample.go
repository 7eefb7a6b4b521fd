package workload

import (
	"hash/fnv"
	"math"
	"math/rand/v2"
)

// Source returns the random source of one sample. Drawing sample n from
// Source(seed, class, n) gives the same session whatever was drawn before it,
// so that policies which release in different orders still see the same work.
func Source(seed uint64, class string, sample int64) *rand.Rand {
	h := fnv.New64a()
	h.Write([]byte(class))
	return rand.New(rand.NewPCG(seed^h.Sum64(), uint64(sample)*0x9e3779b97f4a7c15+1))
}

// Sample draws one session.
func (c Class) Sample(r *rand.Rand, f Factors) Session {
	return c.sampleFrom(c.samplePrompt(r, f), r, f)
}

// SampleGroup draws the n members of one group: the first prompt is drawn once
// and shared whole, answers and turns differ.
func (c Class) SampleGroup(r *rand.Rand, n int, f Factors) []Session {
	prompt := c.samplePrompt(r, f)
	members := make([]Session, n)
	for i := range members {
		members[i] = c.sampleFrom(prompt, r, f)
		if n > 1 {
			members[i].SharedTokens = prompt
		}
	}
	return members
}

// samplePrompt draws the length of a first prompt. Drift stretches what comes
// after the system prompt, since that one is the same text for everybody.
func (c Class) samplePrompt(r *rand.Rand, f Factors) int {
	own := c.PromptTokens.Draw(r) - float64(c.SharedTokens)
	prompt := c.SharedTokens + atLeastOne(own*f.Lengths)
	return min(prompt, c.MaxContextTokens-1)
}

func (c Class) sampleFrom(prompt int, r *rand.Rand, f Factors) Session {
	turns := min(atLeastOne(c.Turns.Draw(r)), maxTurns)
	appendMean := c.AppendTokens.Draw(r) * f.Lengths
	s := Session{
		PromptTokens: prompt,
		SharedTokens: min(c.SharedTokens, prompt),
		Turns:        make([]Turn, 0, turns),
	}
	context := prompt
	for i := range turns {
		output := min(atLeastOne(c.OutputTokens.Draw(r)*f.Lengths), c.MaxOutputTokens)
		room := c.MaxContextTokens - context
		if output > room && i > 0 {
			break
		}
		turn := Turn{OutputTokens: min(output, room)}
		if turns > 1 {
			turn.AppendTokens = atLeastOne(appendMean * c.appendNoise(r))
			turn.GapSeconds = c.GapSeconds.Draw(r) * f.Gaps
		}
		s.Turns = append(s.Turns, turn)
		context += turn.OutputTokens + turn.AppendTokens
	}
	// Nothing follows the last turn, so no tool runs after it.
	last := &s.Turns[len(s.Turns)-1]
	last.AppendTokens, last.GapSeconds = 0, 0
	return s
}

// appendNoise is lognormal with mean 1, so that it spreads a session's growth
// without changing it.
func (c Class) appendNoise(r *rand.Rand) float64 {
	return math.Exp(c.AppendNoise*r.NormFloat64() - c.AppendNoise*c.AppendNoise/2)
}

func atLeastOne(x float64) int {
	return max(1, int(math.Round(x)))
}
