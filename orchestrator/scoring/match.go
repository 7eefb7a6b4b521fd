package scoring

import (
	"math/big"
	"slices"
	"strings"

	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/scoring/number"
)

// exactMatch gives 1 when the last turn's ids end with the wanted ones, or when
// the part of its text that is asked for equals one of the answers, and 0
// otherwise. White space around texts does not count, inside of them it does.
func exactMatch(s spec.Scorer) func(Sample) Outcome {
	if s.TokenIDs != nil {
		return func(sample Sample) Outcome {
			from := len(sample.TokenIDs) - len(s.TokenIDs)
			return match(from >= 0 && slices.Equal(sample.TokenIDs[from:], s.TokenIDs))
		}
	}
	return func(sample Sample) Outcome {
		text, ok := extract(s.Extract, sample.Text)
		if !ok {
			return match(false)
		}
		return match(slices.ContainsFunc(s.Answers, func(answer string) bool {
			answer = strings.TrimSpace(answer)
			return text == answer || s.IgnoreCase && strings.EqualFold(text, answer)
		}))
	}
}

func extract(how spec.Extract, text string) (part string, ok bool) {
	text = strings.TrimSpace(text)
	switch how {
	case spec.ExtractLastLine:
		return strings.TrimSpace(text[strings.LastIndexByte(text, '\n')+1:]), true
	case spec.ExtractBoxed:
		inside, ok := number.Boxed(text)
		return strings.TrimSpace(inside), ok
	}
	return text, true
}

// numericMatch gives 1 when the last number of the text (see package number) is
// within the tolerance of the target, and 0 otherwise, also when there is none.
// The comparison is exact: |x - target| <= max(absolute, relative*|target|), in
// rationals.
func numericMatch(s spec.Scorer) func(Sample) Outcome {
	// Validate has read the target and bounded the tolerances.
	target, _ := number.Parse(s.Target)
	allowed := rational(s.AbsoluteTolerance)
	relative := rational(s.RelativeTolerance)
	relative.Mul(relative, new(big.Rat).Abs(target))
	if relative.Cmp(allowed) > 0 {
		allowed = relative
	}
	return func(sample Sample) Outcome {
		value, ok := number.Last(sample.Text)
		if !ok {
			return match(false)
		}
		distance := new(big.Rat).Sub(value, target)
		return match(distance.Abs(distance).Cmp(allowed) <= 0)
	}
}

func rational(x float64) *big.Rat { return new(big.Rat).SetFloat64(x) }
