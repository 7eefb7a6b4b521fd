package workload

import (
	"math"
	"math/rand/v2"
)

// Names of the default classes.
const (
	Agent = "agent"
	RLVR  = "rlvr"
	RLHF  = "rlhf"
)

// PaperContextTokens is the context limit under which Table 2 was measured.
const PaperContextTokens = 131_072

// maxTurns bounds a drawn session; Table 2's means lie near 70.
const maxTurns = 1_000

// LogNormal is a distribution given by its median and the standard deviation
// of its logarithm. Sigma 0 is the constant Median.
type LogNormal struct {
	Median float64
	Sigma  float64
}

// Draw returns one value.
func (d LogNormal) Draw(r *rand.Rand) float64 {
	if d.Sigma == 0 {
		return d.Median
	}
	return d.Median * math.Exp(d.Sigma*r.NormFloat64())
}

func (d LogNormal) scaled(by float64) LogNormal {
	return LogNormal{Median: d.Median * by, Sigma: d.Sigma}
}

// Turn is one model call: it generates OutputTokens; then, unless it is the
// last, the tool takes GapSeconds and AppendTokens are appended.
type Turn struct {
	OutputTokens int
	AppendTokens int
	GapSeconds   float64
}

// Session is one rollout as numbers.
type Session struct {
	// PromptTokens is the length of the first prompt, SharedTokens of it the
	// leading part that other sessions have as well.
	PromptTokens int
	SharedTokens int
	Turns        []Turn
}

// ContextTokens is the length of the context when the session ends.
func (s Session) ContextTokens() int {
	total := s.PromptTokens
	for i, turn := range s.Turns {
		total += turn.OutputTokens
		if i < len(s.Turns)-1 {
			total += turn.AppendTokens
		}
	}
	return total
}

// Class describes how sessions of one class are drawn.
type Class struct {
	Name string
	// Turns is the number of model calls of a session.
	Turns LogNormal
	// PromptTokens is the length of the first prompt; its first SharedTokens
	// are a system prompt that all sessions of the class share.
	PromptTokens LogNormal
	SharedTokens int
	// OutputTokens is the length of one answer, at most MaxOutputTokens.
	OutputTokens    LogNormal
	MaxOutputTokens int
	// AppendTokens is what a tool appends per turn on average, drawn once for a
	// session; AppendNoise is the sigma of a turn's deviation from that mean.
	AppendTokens LogNormal
	AppendNoise  float64
	// GapSeconds is the time a tool takes between two turns.
	GapSeconds LogNormal
	// MaxContextTokens ends a session before the turn that would exceed it and
	// clips the answer of a session's first turn.
	MaxContextTokens int
}

// Tool gaps of the paper's two set-ups. Their medians are fitted so that the
// share of gaps in a session's life agrees with the paper's Table 3 (6.6 % and
// 22.7 %) on engines of the modelled speed; the paper gives no quantiles.
var (
	GapsStep = LogNormal{Median: 0.3, Sigma: 1.4}
	GapsQwen = LogNormal{Median: 1.1, Sigma: 1.4}
)

// PaperAgent draws sessions whose requests have Table 2's quantiles: input p50
// / p95 / p99 of 37,757 / 103,209 / 123,207 tokens, output p50 148, about 70
// turns a session. The shape of the parts (turns, first prompt, growth) is ours.
func PaperAgent(gaps LogNormal) Class {
	return Class{
		Name:             Agent,
		Turns:            LogNormal{Median: 66, Sigma: 0.5},
		PromptTokens:     LogNormal{Median: 8_000, Sigma: 0.45},
		SharedTokens:     2_000,
		OutputTokens:     LogNormal{Median: 148, Sigma: 1.25},
		MaxOutputTokens:  8_192,
		AppendTokens:     LogNormal{Median: 480, Sigma: 0.65},
		AppendNoise:      0.5,
		GapSeconds:       gaps,
		MaxContextTokens: PaperContextTokens,
	}
}

// PaperRLVR draws sessions of one turn with Table 2's quantiles: input p50 156,
// output p50 47,583 tokens; p95 and p99 sit at the context limit.
func PaperRLVR() Class {
	return Class{
		Name:             RLVR,
		Turns:            LogNormal{Median: 1},
		PromptTokens:     LogNormal{Median: 156, Sigma: 0.5},
		OutputTokens:     LogNormal{Median: 47_583, Sigma: 0.72},
		MaxOutputTokens:  PaperContextTokens,
		MaxContextTokens: PaperContextTokens,
	}
}

// PaperRLHF draws sessions of one turn. Table 2 says only that RLHF lies between
// the other two; 2,000 tokens in and 4,000 out are our reading of that.
func PaperRLHF() Class {
	return Class{
		Name:             RLHF,
		Turns:            LogNormal{Median: 1},
		PromptTokens:     LogNormal{Median: 2_000, Sigma: 0.5},
		OutputTokens:     LogNormal{Median: 4_000, Sigma: 0.6},
		MaxOutputTokens:  PaperContextTokens,
		MaxContextTokens: PaperContextTokens,
	}
}

// Scaled returns the class with every length, the context limit included,
// multiplied by the factor: 0.25 makes the 32,768-token variant of a class.
func (c Class) Scaled(by float64) Class {
	c.PromptTokens = c.PromptTokens.scaled(by)
	c.SharedTokens = int(math.Round(float64(c.SharedTokens) * by))
	c.OutputTokens = c.OutputTokens.scaled(by)
	c.MaxOutputTokens = max(1, int(math.Round(float64(c.MaxOutputTokens)*by)))
	c.AppendTokens = c.AppendTokens.scaled(by)
	c.MaxContextTokens = max(2, int(math.Round(float64(c.MaxContextTokens)*by)))
	return c
}
