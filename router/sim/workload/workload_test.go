package workload

import (
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
)

func quantile[T int | float64](values []T, q float64) float64 {
	sorted := slices.Clone(values)
	slices.Sort(sorted)
	return float64(sorted[int(q*float64(len(sorted)-1))])
}

func within(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if math.Abs(got/want-1) > tolerance {
		t.Errorf("%s is %.0f, want %.0f within %.0f %%", what, got, want, 100*tolerance)
	}
}

// The published figures are the oracle here: request inputs count every turn's
// whole context, as the paper counts them.
func TestAgentHasTableTwosQuantiles(t *testing.T) {
	class := PaperAgent(GapsQwen)
	var inputs, outputs []int
	const sessions = 6_000
	for n := range int64(sessions) {
		s := class.Sample(Source(1, Agent, n), Steady)
		context := s.PromptTokens
		for _, turn := range s.Turns {
			inputs = append(inputs, context)
			outputs = append(outputs, turn.OutputTokens)
			context += turn.OutputTokens + turn.AppendTokens
		}
	}
	within(t, "input p50", quantile(inputs, 0.50), 37_757, 0.03)
	within(t, "input p95", quantile(inputs, 0.95), 103_209, 0.02)
	within(t, "input p99", quantile(inputs, 0.99), 123_207, 0.02)
	within(t, "output p50", quantile(outputs, 0.50), 148, 0.02)
	within(t, "turns a session, in hundredths", float64(100*len(inputs)/sessions), 100*73_659/1_058, 0.04)
}

func TestRLVRHasTableTwosQuantiles(t *testing.T) {
	class := PaperRLVR()
	var inputs, outputs []int
	for n := range int64(20_000) {
		s := class.Sample(Source(1, RLVR, n), Steady)
		if len(s.Turns) != 1 || s.Turns[0].AppendTokens != 0 || s.Turns[0].GapSeconds != 0 {
			t.Fatalf("sample %d is not one turn: %+v", n, s)
		}
		inputs = append(inputs, s.PromptTokens)
		outputs = append(outputs, s.Turns[0].OutputTokens)
	}
	within(t, "input p50", quantile(inputs, 0.50), 156, 0.02)
	within(t, "output p50", quantile(outputs, 0.50), 47_583, 0.02)
	within(t, "output p95", quantile(outputs, 0.95), 130_815, 0.01)
	within(t, "output p99", quantile(outputs, 0.99), 130_958, 0.01)
}

func TestGapsHaveTheirMedian(t *testing.T) {
	var gaps []float64
	for n := range int64(500) {
		s := PaperAgent(GapsStep).Sample(Source(3, Agent, n), Steady)
		for _, turn := range s.Turns[:len(s.Turns)-1] {
			gaps = append(gaps, turn.GapSeconds)
		}
	}
	within(t, "gap p50, in ms", 1000*quantile(gaps, 0.5), 300, 0.05)
}

// Sessions of any class, seed, scale and drift keep within what an engine with
// that context limit can run.
func TestSessionsFitTheContext(t *testing.T) {
	drift := Drift{Lengths: 5, Gaps: 5, PeriodSamples: 40}
	for _, scale := range []float64{0.01, 0.25, 1} {
		for _, class := range []Class{PaperAgent(GapsQwen), PaperRLVR(), PaperRLHF()} {
			class = class.Scaled(scale)
			for n := range int64(400) {
				s := class.Sample(Source(9, class.Name, n), drift.At(n))
				if s.PromptTokens < 1 || s.SharedTokens > s.PromptTokens || s.ContextTokens() > class.MaxContextTokens {
					t.Fatalf("scale %v %s sample %d: prompt %d shared %d context %d of %d", scale, class.Name, n,
						s.PromptTokens, s.SharedTokens, s.ContextTokens(), class.MaxContextTokens)
				}
				for i, turn := range s.Turns {
					last := i == len(s.Turns)-1
					if turn.OutputTokens < 1 || turn.AppendTokens < 0 || last && (turn.AppendTokens != 0 || turn.GapSeconds != 0) {
						t.Fatalf("scale %v %s sample %d turn %d of %d: %+v", scale, class.Name, n, i, len(s.Turns), turn)
					}
				}
			}
		}
	}
}

func TestASampleDependsOnItsNumberOnly(t *testing.T) {
	class := PaperAgent(GapsQwen)
	first := class.Sample(Source(4, Agent, 17), Steady)
	class.Sample(Source(4, Agent, 3), Steady)
	if again := class.Sample(Source(4, Agent, 17), Steady); !reflect.DeepEqual(first, again) {
		t.Error("sample 17 changed when another was drawn in between")
	}
	for _, other := range []*rand.Rand{Source(5, Agent, 17), Source(4, Agent, 18), Source(4, RLVR, 17)} {
		if reflect.DeepEqual(first, class.Sample(other, Steady)) {
			t.Error("another seed, number or class gave the same session")
		}
	}
}

func TestGroupMembersShareTheWholePromptOnly(t *testing.T) {
	members := PaperRLVR().SampleGroup(Source(2, RLVR, 0), 8, Steady)
	outputs := map[int]bool{}
	for _, m := range members {
		if m.PromptTokens != members[0].PromptTokens || m.SharedTokens != m.PromptTokens {
			t.Errorf("member has prompt %d shared %d, first has prompt %d", m.PromptTokens, m.SharedTokens, members[0].PromptTokens)
		}
		outputs[m.Turns[0].OutputTokens] = true
	}
	if len(outputs) < 5 {
		t.Errorf("eight members have only %d different answers", len(outputs))
	}
}

func TestDriftSwingsByTheFactorAndBack(t *testing.T) {
	d := Drift{Lengths: 1.7, Gaps: 1.7, PeriodSamples: 400}
	for n, want := range map[int64]Factors{
		0:   {1, 1 / 1.7},
		100: {1.7, 1},
		200: {1, 1.7},
		300: {1 / 1.7, 1},
		500: {1.7, 1},
	} {
		got := d.At(n)
		if math.Abs(got.Lengths-want.Lengths) > 1e-9 || math.Abs(got.Gaps-want.Gaps) > 1e-9 {
			t.Errorf("sample %d: got %+v, want %+v", n, got, want)
		}
	}
	if (Drift{}).At(123) != Steady {
		t.Error("no drift is not steady")
	}
	long := PaperRLHF().Sample(Source(1, RLHF, 5), d.At(100))
	plain := PaperRLHF().Sample(Source(1, RLHF, 5), Steady)
	within(t, "a drifted answer", float64(long.Turns[0].OutputTokens), 1.7*float64(plain.Turns[0].OutputTokens), 0.01)
}
