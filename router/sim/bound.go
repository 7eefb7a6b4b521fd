package sim

import (
	"fmt"

	"holdfast/router/sim/workload"
)

// BoundResult is the fluid bound of a configuration and what it rests on.
type BoundResult struct {
	// SamplesPerMinute is C / sum_b rho_b Z_b over all instances.
	SamplesPerMinute float64
	// SecondsPerToken is the duration of a decode step with a full cache;
	// ResidentSessions the number of sessions that fill one instance.
	SecondsPerToken  float64
	ResidentSessions float64
	// BlockSeconds is sum_b rho_b Z_b in engine blocks.
	BlockSeconds float64
}

// demand sums what sampled sessions need at one pace.
type demand struct {
	samples               float64
	seconds, modelSeconds float64
	tokenSeconds, modelKV float64
	prefillSeconds        float64
}

// Bound computes the rate that a full cache would give: every block of every
// instance holds context of an unfinished session at all times, nothing is
// computed twice, no turn waits, and a group's shared prompt is held once. Sessions then
// pass at C / sum_b rho_b Z_b, where Z_b follows from the duration of a decode
// step at that fill. It is found by iterating that duration to a fixed point over
// the first tasks of the source.
func Bound(cfg Config, tasks int) (BoundResult, error) {
	if err := cfg.Validate(); err != nil {
		return BoundResult{}, fmt.Errorf("computing the bound: %w", err)
	}
	p := cfg.Instances[0]
	capacityTokens := float64(p.CapacityBlocks * p.BlockTokens)
	sample := make([]Task, tasks)
	for n := range sample {
		sample[n] = cfg.Source.Task(int64(n))
	}
	pace := p.StepBaseNanos / 1e9
	var d demand
	var perSecond, resident float64
	for range 100 {
		d = demand{}
		for i := range sample {
			d.add(&cfg, &sample[i], pace)
		}
		perSecond = capacityTokens / (d.tokenSeconds / d.samples)
		resident = capacityTokens / (d.tokenSeconds / d.seconds)
		decode := (p.StepBaseNanos + p.StepPerSequenceNanos*resident*d.modelSeconds/d.seconds +
			p.StepPerKVTokenNanos*capacityTokens*d.modelKV/d.tokenSeconds) / 1e9
		prefillShare := min(0.9, perSecond*d.prefillSeconds/d.samples)
		// Half-way steps converge where whole ones would swing.
		pace += (decode/(1-prefillShare) - pace) / 2
	}
	return BoundResult{
		SamplesPerMinute: 60 * perSecond * float64(len(cfg.Instances)),
		SecondsPerToken:  pace, ResidentSessions: resident,
		BlockSeconds: d.tokenSeconds / d.samples / float64(p.BlockTokens),
	}, nil
}

func (d *demand) add(cfg *Config, task *Task, pace float64) {
	n := float64(len(task.Members))
	for i := range task.Members {
		s := &task.Members[i]
		d.samples++
		context := float64(s.PromptTokens)
		// The class's prompt is there already; the group's is held and computed once.
		saved := float64(min(task.ClassSharedTokens, s.PromptTokens))
		if n > 1 {
			saved += (float64(s.PromptTokens) - saved) * (n - 1) / n
		}
		d.prefill(cfg, saved, context)
		for _, turn := range s.Turns {
			d.turn(turn, context-saved, context, pace)
			context += float64(turn.OutputTokens)
			if turn.AppendTokens > 0 {
				d.prefill(cfg, context, context+float64(turn.AppendTokens))
			}
			context += float64(turn.AppendTokens)
		}
	}
}

// prefill adds the compute of the positions [from, to).
func (d *demand) prefill(cfg *Config, from, to float64) {
	p := cfg.Instances[0]
	tokens := to - from
	if p.PrefillDoublingTokens > 0 {
		tokens += (to*to - from*from) / (2 * float64(p.PrefillDoublingTokens))
	}
	d.prefillSeconds += tokens * p.PrefillTokenNanos / 1e9
}

// turn adds one model call and the gap after it.
func (d *demand) turn(turn workload.Turn, heldTokens, contextTokens, pace float64) {
	model := float64(turn.OutputTokens) * pace
	grown := float64(turn.OutputTokens)
	d.modelSeconds += model
	d.seconds += model + turn.GapSeconds
	d.modelKV += model * (contextTokens + grown/2)
	d.tokenSeconds += model*(heldTokens+grown/2) + turn.GapSeconds*(heldTokens+grown)
}
