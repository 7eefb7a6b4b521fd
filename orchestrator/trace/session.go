package trace

import (
	"fmt"
	"math"
	"unicode/utf8"

	"holdfast/workflows/task"
)

// Unknown stands for a length that a trace does not tell.
const Unknown = -1

// UnknownSeconds stands for a time that a trace does not tell.
const UnknownSeconds = -1.0

// Session is one recorded session as numbers.
type Session struct {
	// ID names the session within its source.
	ID string
	// Group is the same for all rollouts of one task, empty where the trace
	// knows no groups.
	Group string
	// StartSeconds is the first request's time after the trace's first one.
	StartSeconds float64
	// PromptTokens is the length of the first prompt. Its first SharedTokens are
	// the same as those of every session with the same SharedKey.
	PromptTokens int
	SharedTokens int
	SharedKey    string
	// Reward is the recorded reward, nil where there is none.
	Reward *float64
	// DroppedTokens counts what the recorded context lost between turns (an
	// agent that trims its history); a replay cannot lose it.
	DroppedTokens int
	// Turns are the model calls in order, at least one.
	Turns []Turn
}

// Turn is one recorded model call.
type Turn struct {
	// OutputTokens is what the model generated, or Unknown.
	OutputTokens int
	// AppendTokens is what was added to the context before the next call, or
	// Unknown; 0 for the last turn.
	AppendTokens int
	// GapSeconds is the time between the end of this call and the start of the
	// next, or UnknownSeconds; 0 for the last turn.
	GapSeconds float64
	// IntervalSeconds is the time between the starts of this call and the next,
	// or UnknownSeconds. It bounds the gap from above.
	IntervalSeconds float64
}

// ContextTokens is the length of the recorded context at the end, unknown
// lengths counted as nothing.
func (s *Session) ContextTokens() int {
	total := s.PromptTokens
	for _, turn := range s.Turns {
		total += max(turn.OutputTokens, 0) + max(turn.AppendTokens, 0)
	}
	return total
}

// end marks the last turn: nothing follows it, so nothing is appended.
func (s *Session) end() {
	if len(s.Turns) == 0 {
		return
	}
	last := &s.Turns[len(s.Turns)-1]
	last.AppendTokens = 0
	last.GapSeconds = 0
	last.IntervalSeconds = UnknownSeconds
}

// Bounds of what any importer accepts; beyond them a file is taken for broken.
const (
	maxTokens     = task.MaxPromptTokens
	maxGapSeconds = task.MaxGapSeconds
	maxNameBytes  = 256
)

// check says what is wrong with a session, field first, as a format's own
// names would; importers call it before they hand a session on.
func (s *Session) check() error {
	switch {
	case s.ID == "" || len(s.ID) > maxNameBytes:
		return fmt.Errorf("id: must be from 1 to %d bytes long, is %d", maxNameBytes, len(s.ID))
	case !utf8.ValidString(s.ID):
		return fmt.Errorf("id: must be valid UTF-8, is %.40q", s.ID)
	case len(s.Group) > maxNameBytes || len(s.SharedKey) > maxNameBytes:
		return fmt.Errorf("group, shared_key: must be at most %d bytes long", maxNameBytes)
	case s.PromptTokens < 1 || s.PromptTokens > maxTokens:
		return fmt.Errorf("prompt: must be from 1 to %d tokens, is %d", maxTokens, s.PromptTokens)
	case s.SharedTokens < 0 || s.SharedTokens > s.PromptTokens:
		return fmt.Errorf("shared: must be from 0 to the prompt's %d tokens, is %d", s.PromptTokens, s.SharedTokens)
	case s.SharedTokens > 0 && s.SharedKey == "":
		return fmt.Errorf("shared_key: is required where tokens are shared")
	case s.DroppedTokens < 0:
		return fmt.Errorf("dropped: must not be negative, is %d", s.DroppedTokens)
	case !finiteFrom(s.StartSeconds, 0):
		return fmt.Errorf("start: must not be negative, is %v", s.StartSeconds)
	case s.Reward != nil && !finiteFrom(*s.Reward, -math.MaxFloat64):
		return fmt.Errorf("reward: must be finite, is %v", *s.Reward)
	case len(s.Turns) < 1 || len(s.Turns) > task.MaxTurns:
		return fmt.Errorf("turns: must be from 1 to %d, has %d", task.MaxTurns, len(s.Turns))
	}
	for i, turn := range s.Turns {
		if err := turn.check(); err != nil {
			return fmt.Errorf("turns[%d]: %w", i, err)
		}
	}
	return nil
}

func (t Turn) check() error {
	switch {
	case t.OutputTokens < Unknown || t.OutputTokens > task.MaxOutputTokens:
		return fmt.Errorf("output must be from 0 to %d tokens, is %d", task.MaxOutputTokens, t.OutputTokens)
	case t.AppendTokens < Unknown || t.AppendTokens > task.MaxReplayAppendTokens:
		return fmt.Errorf("append must be from 0 to %d tokens, is %d", task.MaxReplayAppendTokens, t.AppendTokens)
	case t.GapSeconds != UnknownSeconds && !(t.GapSeconds >= 0 && t.GapSeconds <= maxGapSeconds):
		return fmt.Errorf("gap must be from 0 to %v seconds, is %v", maxGapSeconds, t.GapSeconds)
	case t.IntervalSeconds != UnknownSeconds && !(t.IntervalSeconds >= 0 && t.IntervalSeconds <= maxGapSeconds):
		return fmt.Errorf("interval must be from 0 to %v seconds, is %v", maxGapSeconds, t.IntervalSeconds)
	}
	return nil
}

func finiteFrom(x, least float64) bool {
	return x >= least && x <= math.MaxFloat64
}
