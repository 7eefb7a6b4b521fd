package trace

import (
	"errors"
	"fmt"

	"holdfast/workflows/task"
)

// ClassMix says how much of one class a batch holds.
type ClassMix struct {
	// Sessions is the number of rollouts, groups' members counted each.
	Sessions int
	// GroupSize is the number of members of each task; 0 means 1. It must divide
	// Sessions. All members of a task replay the same numbers.
	GroupSize int
}

// Composition describes a batch. The same composition always gives the same
// batch.
type Composition struct {
	Seed uint64
	// Agent sessions replay recorded ones; RLVR and RLHF are composed.
	Agent ClassMix
	RLVR  ClassMix
	RLHF  ClassMix
	// AgentTraces names the shipped traces that agent sessions are taken from,
	// in rotation; within a trace every session is used once before one is used
	// again.
	AgentTraces []string
	// MinAgentTurns leaves out recorded sessions with fewer model calls.
	MinAgentTurns int
	// AgentSystemTokens is the length of the shared system prompt that is put
	// before agent sessions whose trace has none.
	AgentSystemTokens int
	// AgentLengthScale and ComposedLengthScale multiply lengths in tokens; 0
	// means 1. ComposedLengthScale 0.25 makes RLVR and RLHF the 32,768-token
	// variant of Table 2.
	AgentLengthScale    float64
	ComposedLengthScale float64
	// MaxContextTokens ends agent sessions before the turn that would exceed it
	// and clips composed answers; it becomes each task's limit.
	MaxContextTokens int
	// TimeScale is trace seconds per wall second, written into every task so
	// that gaps shrink as the simulated engines run; 0 means 1.
	TimeScale float64
}

// maxComposedSessions bounds one composition: ten full batches.
const maxComposedSessions = 100_000

// minContextTokens is the smallest context in which a composed session makes sense.
const minContextTokens = 256

// validate names the first field that is out of range.
func (c Composition) validate() error {
	total := 0
	for _, m := range []struct {
		name string
		mix  ClassMix
	}{{"Agent", c.Agent}, {"RLVR", c.RLVR}, {"RLHF", c.RLHF}} {
		switch {
		case m.mix.Sessions < 0 || m.mix.Sessions > maxComposedSessions:
			return fmt.Errorf("%s.Sessions: must be from 0 to %d, is %d", m.name, maxComposedSessions, m.mix.Sessions)
		case m.mix.GroupSize < 0 || m.mix.GroupSize > task.MaxGroupSize:
			return fmt.Errorf("%s.GroupSize: must be from 0 to %d, is %d", m.name, task.MaxGroupSize, m.mix.GroupSize)
		case m.mix.Sessions%m.mix.members() != 0:
			return fmt.Errorf("%s.GroupSize: %d must divide the %d sessions", m.name, m.mix.GroupSize, m.mix.Sessions)
		}
		total += m.mix.Sessions
	}
	for _, f := range []struct {
		name        string
		value       float64
		least, most float64
	}{
		{"AgentLengthScale", orOne(c.AgentLengthScale), 1e-3, 1e3},
		{"ComposedLengthScale", orOne(c.ComposedLengthScale), 1e-3, 1e3},
		{"TimeScale", orOne(c.TimeScale), task.MinTimeScale, task.MaxTimeScale},
	} {
		if !(f.value >= f.least && f.value <= f.most) {
			return fmt.Errorf("%s: must be from %v to %v, is %v", f.name, f.least, f.most, f.value)
		}
	}
	switch {
	case total == 0:
		return errors.New("no sessions are asked for")
	case total > maxComposedSessions:
		return fmt.Errorf("must ask for at most %d sessions, asks for %d", maxComposedSessions, total)
	case c.MaxContextTokens < minContextTokens || c.MaxContextTokens > task.MaxPromptTokens:
		return fmt.Errorf("MaxContextTokens: must be from %d to %d, is %d", minContextTokens, task.MaxPromptTokens, c.MaxContextTokens)
	case c.AgentSystemTokens < 0 || c.AgentSystemTokens >= c.MaxContextTokens:
		return fmt.Errorf("AgentSystemTokens: must be from 0 to below the context's %d, is %d", c.MaxContextTokens, c.AgentSystemTokens)
	case c.Agent.Sessions > 0 && len(c.AgentTraces) == 0:
		return errors.New("AgentTraces: agent sessions need at least one trace")
	}
	return nil
}

// members is the group size with its default.
func (m ClassMix) members() int { return max(m.GroupSize, 1) }

// tasks is the number of tasks that give the sessions.
func (m ClassMix) tasks() int { return m.Sessions / m.members() }

func orOne(x float64) float64 {
	if x == 0 {
		return 1
	}
	return x
}

// Origin is the metadata of every composed task: where its numbers come from,
// and which of them were not recorded.
type Origin struct {
	// Source is the trace's repository, or "composed" for a task without one.
	Source  string `json:"source"`
	Commit  string `json:"commit,omitempty"`
	Licence string `json:"licence,omitempty"`
	Trace   string `json:"trace,omitempty"`
	Session string `json:"session,omitempty"`
	// Group is the recorded group key: sessions with the same one are rollouts
	// of the same task.
	Group string `json:"group,omitempty"`
	// Basis is what composed numbers were drawn from.
	Basis string `json:"basis,omitempty"`
	// Derived names the fields computed from recorded numbers, Composed those
	// drawn from published quantiles.
	Derived  []string `json:"derived,omitempty"`
	Composed []string `json:"composed,omitempty"`
	// LengthScale is the factor on all lengths.
	LengthScale float64 `json:"length_scale"`
	// TurnsCut counts recorded turns left out because of the context limit.
	TurnsCut int `json:"turns_cut,omitempty"`
}

// SourceComposed is Origin.Source where nothing was recorded.
const SourceComposed = "composed"

// basisTableTwo names the published quantiles that composed numbers come from.
const basisTableTwo = "arXiv 2608.11152, Table 2; docs/traces.md"
