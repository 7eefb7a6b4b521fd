package experiment

import (
	"slices"

	"holdfast/router/sim"
	"holdfast/router/sim/instance"
	"holdfast/router/sim/workload"
)

// Setup is one of the two configurations of the paper: engines, workload and
// trainer. Its figures were fixed before policies were compared.
type Setup struct {
	Name   string
	Engine instance.Params
	// Instances is the number of engines in rollout-only regimes,
	// EndToEndInstances that of the end-to-end regime.
	Instances         int
	EndToEndInstances int
	Gaps              workload.LogNormal
	// OuterPerInstance is the trainer's concurrency for each instance.
	OuterPerInstance int
	// RequestCeilings and SessionCeilings are what the baselines are swept over.
	RequestCeilings []int
	SessionCeilings []int
}

// GroupSize is the number of rollouts of one task.
const GroupSize = 8

// Qwen is 4 instances like Qwen3.6-35B-A3B on TP4 H100-80GB.
func Qwen() Setup {
	return Setup{
		Name: "qwen", Engine: instance.QwenLike(), Instances: 4, EndToEndInstances: 4,
		Gaps: workload.GapsQwen, OuterPerInstance: 160,
		RequestCeilings: []int{8, 16, 24, 32, 48, 64, 80, 96, 128},
		SessionCeilings: every(28, 64, 4),
	}
}

// Step is 2 instances like Step3.7 on TP8 H200.
func Step() Setup {
	return Setup{
		Name: "step", Engine: instance.StepLike(), Instances: 2, EndToEndInstances: 4,
		Gaps: workload.GapsStep, OuterPerInstance: 320,
		RequestCeilings: []int{16, 32, 48, 64, 96, 128, 160, 192, 256},
		SessionCeilings: every(80, 160, 4),
	}
}

// Regime is what changes while a run goes on.
type Regime string

// Regimes.
const (
	Stationary Regime = "stationary"
	Drifting   Regime = "drift"
	EndToEnd   Regime = "end-to-end"
)

// Mixture is the paper's: the target shares and classes after Table 2.
func (s Setup) Mixture() []sim.ComposedClass {
	return []sim.ComposedClass{
		{Class: workload.PaperAgent(s.Gaps), Share: 0.486},
		{Class: workload.PaperRLVR(), Share: 0.331},
		{Class: workload.PaperRLHF(), Share: 0.182},
	}
}

// Config is a run of this setup.
func (s Setup) Config(regime Regime, seed uint64) (sim.Config, error) {
	composed := sim.Composed{Seed: seed, Mixture: s.Mixture(), GroupSize: GroupSize}
	instances := s.Instances
	switch regime {
	case Drifting:
		composed.Drift = workload.PaperDrift
	case EndToEnd:
		instances = s.EndToEndInstances
	}
	source, err := composed.Source()
	if err != nil {
		return sim.Config{}, err
	}
	cfg := sim.Config{
		Seed: seed, Instances: slices.Repeat([]instance.Params{s.Engine}, instances), Source: source,
		Trainer:       sim.Trainer{OuterConcurrency: s.OuterPerInstance * instances},
		Observed:      sim.DefaultObservation(),
		WarmUpSeconds: 5400, MeasureSeconds: 4 * 3600, RouterBlockTokens: 256,
	}
	if regime == EndToEnd {
		cfg.WarmUpSeconds = 0
		cfg.Trainer.Batches = &sim.Batches{Iterations: 50, Samples: 512, Staleness: 2, TrainSeconds: 240, SyncSeconds: 20}
	}
	return cfg, nil
}

// every lists from, from+step, ... up to to.
func every(from, to, step int) []int {
	var list []int
	for ; from <= to; from += step {
		list = append(list, from)
	}
	return list
}
