package trace

import (
	"cmp"
	"slices"

	"holdfast/router/sim/workload"
	"holdfast/workflows/task"
)

// DemoTimeScale is how much faster than its traces the demonstration runs: fast
// enough for a minute or two, slow enough that what orchestration adds to a turn
// stays small beside the turn.
const DemoTimeScale = 20.0

// DemoContextTokens is the context limit of the demonstration's engines: the
// 32,768-token variant of the paper's 131,072.
const DemoContextTokens = workload.PaperContextTokens / 4

// Demo is the demonstration's batch: 60 agent sessions with recorded lengths,
// half of them mini-SWE-agent's and half tau-bench's, and 40 RLVR and 22 RLHF
// sessions at a quarter of Table 2's lengths. docs/traces.md says what it asks
// of two engines.
func Demo(seed uint64) Composition {
	return Composition{
		Seed:                seed,
		Agent:               ClassMix{Sessions: 60},
		RLVR:                ClassMix{Sessions: 40},
		RLHF:                ClassMix{Sessions: 22},
		AgentTraces:         []string{MiniSWE, TauBench},
		MinAgentTurns:       8,
		AgentSystemTokens:   1_024,
		ComposedLengthScale: float64(DemoContextTokens) / workload.PaperContextTokens,
		MaxContextTokens:    DemoContextTokens,
		TimeScale:           DemoTimeScale,
	}
}

// DemoBatch composes the demonstration's batch.
func DemoBatch(seed uint64) ([]task.Spec, error) {
	return Compose(Demo(seed))
}

// Totals is what a class of a batch asks of engines and environments. Members
// of a group count each.
type Totals struct {
	Class    string
	Sessions int
	Turns    int
	// PromptTokens are the inputs of all turns together, FreshTokens the part of
	// them that no earlier turn of the session had: what must be prefilled even
	// if every prefix is found. OutputTokens are generated.
	PromptTokens int64
	FreshTokens  int64
	OutputTokens int64
	// GapSeconds are tool gaps in trace seconds.
	GapSeconds float64
	// ContextTokens are the lengths of the final contexts: their sum, median and
	// largest.
	ContextTokens       int64
	MedianContextTokens int
	MaxContextTokens    int
}

// Summarise adds up a batch of replayed tasks with synthetic prompts by class,
// in the order of the classes' names.
func Summarise(specs []task.Spec) []Totals {
	byClass := map[string]*Totals{}
	contexts := map[string][]int{}
	for i := range specs {
		spec := &specs[i]
		if spec.Prompt.Synthetic == nil || spec.Environment == nil {
			continue
		}
		t := byClass[spec.Class]
		if t == nil {
			t = &Totals{Class: spec.Class}
			byClass[spec.Class] = t
		}
		for range spec.Members() {
			contexts[spec.Class] = append(contexts[spec.Class], t.add(spec))
		}
	}
	var all []Totals
	for class, t := range byClass {
		slices.Sort(contexts[class])
		t.MedianContextTokens = contexts[class][len(contexts[class])/2]
		all = append(all, *t)
	}
	slices.SortFunc(all, func(a, b Totals) int { return cmp.Compare(a.Class, b.Class) })
	return all
}

// add counts one session and returns the length of its final context.
func (t *Totals) add(spec *task.Spec) int {
	context := spec.Prompt.Synthetic.Tokens
	t.Sessions++
	t.FreshTokens += int64(context)
	for _, turn := range spec.Environment.Turns {
		t.Turns++
		t.PromptTokens += int64(context)
		t.OutputTokens += int64(turn.OutputTokens)
		t.FreshTokens += int64(turn.AppendTokens)
		t.GapSeconds += turn.GapSeconds
		context += turn.OutputTokens + turn.AppendTokens
	}
	t.ContextTokens += int64(context)
	t.MaxContextTokens = max(t.MaxContextTokens, context)
	return context
}
