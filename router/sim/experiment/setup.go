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
	// Agents, if any, are recorded sessions that take the place of drawn ones.
	Agents []workload.Session
	// OuterPerInstance is the trainer's concurrency for each instance.
	OuterPerInstance int
	// RequestCeilings and SessionCeilings are what the baselines are swept over.
	RequestCeilings []int
	SessionCeilings []int
	// BestSessions is the session ceiling that the sweep finds best in the
	// stationary regime, BestRequests the request ceiling that is best end to end;
	// experiments that do not sweep use them.
	BestSessions int
	BestRequests int
	// ClassTotals are the sessions of all classes in the search of class ceilings,
	// AgentShare the part of Agent among Agent and RLVR by Little's law.
	// AgentCeilings and RLVRCeilings are what the halves of a partitioned pool are
	// swept over.
	ClassTotals   []int
	AgentShare    float64
	AgentCeilings []int
	RLVRCeilings  []int
}

// GroupSize is the number of rollouts of one task.
const GroupSize = 8

// Qwen is 4 instances like Qwen3.6-35B-A3B on TP4 H100-80GB.
func Qwen() Setup {
	return Setup{
		Name: "qwen", Engine: instance.QwenLike(), Instances: 4, EndToEndInstances: 4,
		Gaps: workload.GapsQwen, OuterPerInstance: 160,
		RequestCeilings: []int{16, 32, 48, 64, 80, 96, 112, 128, 144},
		SessionCeilings: every(32, 60, 4),
		BestSessions:    48, BestRequests: 80,
		ClassTotals: []int{40, 44, 48, 52}, AgentShare: 0.45,
		AgentCeilings: []int{40, 48, 56}, RLVRCeilings: []int{48, 56, 64, 72},
	}
}

// Step is 2 instances like Step3.7 on TP8 H200.
func Step() Setup {
	return Setup{
		Name: "step", Engine: instance.StepLike(), Instances: 2, EndToEndInstances: 4,
		Gaps: workload.GapsStep, OuterPerInstance: 320,
		RequestCeilings: []int{64, 96, 128, 160, 192, 224, 256},
		SessionCeilings: every(96, 144, 4),
		BestSessions:    128, BestRequests: 160,
		ClassTotals: []int{112, 120, 128, 136}, AgentShare: 0.42,
		AgentCeilings: []int{100, 116, 132}, RLVRCeilings: []int{124, 140, 156, 172},
	}
}

// Regime is what changes while a run goes on.
type Regime string

// Regimes.
const (
	Stationary Regime = "stationary"
	Drifting   Regime = "drift"
	EndToEnd   Regime = "end-to-end"
	// Ungrouped is stationary with tasks of one member, as the paper's trace
	// shows none of more: nothing but the class's prompt is shared.
	Ungrouped Regime = "ungrouped"
)

// Mixture is the paper's: the target shares and classes after Table 2.
func (s Setup) Mixture() []sim.ComposedClass {
	return []sim.ComposedClass{
		{Class: workload.PaperAgent(s.Gaps), Share: 0.486, Recorded: s.Agents},
		{Class: workload.PaperRLVR(), Share: 0.331},
		{Class: workload.PaperRLHF(), Share: 0.182},
	}
}

// measureSeconds is some three swings of the drift, so that the part of a swing
// at which a run happens to end matters little.
const measureSeconds = 6 * 3600

// Config is a run of this setup.
func (s Setup) Config(regime Regime, seed uint64) (sim.Config, error) {
	instances := s.instances(regime)
	source, err := s.composed(regime, seed).Source()
	if err != nil {
		return sim.Config{}, err
	}
	cfg := sim.Config{
		Seed: seed, Instances: slices.Repeat([]instance.Params{s.Engine}, instances), Source: source,
		Trainer:       sim.Trainer{OuterConcurrency: s.OuterPerInstance * instances},
		Observed:      sim.DefaultObservation(),
		WarmUpSeconds: 5400, MeasureSeconds: measureSeconds, RouterBlockTokens: 256,
	}
	if regime == EndToEnd {
		cfg.Trainer.Batches = &sim.Batches{Iterations: 50, Samples: 256, Staleness: 2, TrainSeconds: 240, SyncSeconds: 20}
	}
	return cfg, nil
}

func (s Setup) composed(regime Regime, seed uint64) sim.Composed {
	c := sim.Composed{Seed: seed, Mixture: s.Mixture(), GroupSize: GroupSize}
	switch regime {
	case Drifting:
		c.Drift = workload.PaperDrift
	case Ungrouped:
		c.GroupSize = 1
	}
	return c
}

func (s Setup) instances(regime Regime) int {
	if regime == EndToEnd {
		return s.EndToEndInstances
	}
	return s.Instances
}

// every lists from, from+step, ... up to to.
func every(from, to, step int) []int {
	var list []int
	for ; from <= to; from += step {
		list = append(list, from)
	}
	return list
}
