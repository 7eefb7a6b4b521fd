package sim

import (
	"errors"
	"fmt"

	"holdfast/router/sim/instance"
)

// Config is one run: everything but the policy.
type Config struct {
	Seed uint64
	// Instances are the engines; they all have one block size.
	Instances []instance.Params
	Source    Source
	Trainer   Trainer
	Observed  Observation
	Labels    Labels
	Faults    []Fault
	// WarmUpSeconds pass before MeasureSeconds of measurement begin. With batches
	// the run ends with the last iteration instead.
	WarmUpSeconds  float64
	MeasureSeconds float64
	// RouterBlockTokens is the block size in which the policy is told of caches and
	// capacities, a multiple of the engines' own. Larger blocks make runs faster
	// and footprints coarser (by half a block per session).
	RouterBlockTokens int
	// SeriesSeconds is the resolution of Result.Series, 0 for none.
	SeriesSeconds float64
}

// Trainer says how samples are released. Exactly one of OuterConcurrency (closed
// loop) and ArrivalsPerSecond (open loop) is positive.
type Trainer struct {
	// OuterConcurrency is the most unfinished samples at a time. Tasks are
	// released whole, as soon as all members fit.
	OuterConcurrency int
	// ArrivalsPerSecond is the rate of samples; tasks arrive as a Poisson process.
	ArrivalsPerSecond float64
	// Batches, if set, consumes completed samples in batches and syncs weights.
	Batches *Batches
}

// Batches is the training side of an end-to-end run. The trainer takes the first
// Samples that are complete, trains on them while rollouts go on, and then syncs
// weights: every instance pauses, and its cache is cleared.
type Batches struct {
	Iterations int
	Samples    int
	// Staleness is how many batches ahead of the trainer samples may be released:
	// at most (iterations done + 1 + Staleness) x Samples in all.
	Staleness    int
	TrainSeconds float64
	SyncSeconds  float64
}

// Observation says how late and how reliably the policy sees the engines.
type Observation struct {
	// Snapshots are taken every SnapshotPeriodSeconds and arrive after
	// SnapshotDelaySeconds, plus up to SnapshotJitterSeconds (a jitter above the
	// period reorders them). A share of SnapshotLoss never arrives.
	SnapshotPeriodSeconds float64
	SnapshotDelaySeconds  float64
	SnapshotJitterSeconds float64
	SnapshotLoss          float64
	// Block events are gathered for BlockPeriodSeconds, arrive BlockDelaySeconds
	// later, in order, and a share of BlockLoss of these batches never does.
	BlockPeriodSeconds float64
	BlockDelaySeconds  float64
	BlockLoss          float64
}

// DefaultObservation is a service that scrapes every five seconds.
func DefaultObservation() Observation {
	return Observation{
		SnapshotPeriodSeconds: 5, SnapshotDelaySeconds: 0.5,
		BlockPeriodSeconds: 0.5, BlockDelaySeconds: 0.1,
	}
}

// Labels are errors in what sessions say of themselves.
type Labels struct {
	// Confused is the share of sessions that bear another class's label, Missing
	// the share without any.
	Confused float64
	Missing  float64
	// ReuseIDs gives a new session the id of the one that ended last.
	ReuseIDs bool
}

// FaultKind is what goes wrong.
type FaultKind uint8

const (
	// SlowTools multiplies the tool gaps that begin during the fault by Factor.
	SlowTools FaultKind = iota + 1
	// InstanceLost takes an instance away; it is back, empty, when the fault ends.
	InstanceLost
	// WeightSync pauses all instances for the time of the fault, then clears their caches.
	WeightSync
	// ContextLimit announces every instance with its context limit multiplied by
	// Factor, until the fault ends.
	ContextLimit
)

func (k FaultKind) String() string {
	switch k {
	case SlowTools:
		return "slow-tools"
	case InstanceLost:
		return "instance-lost"
	case WeightSync:
		return "weight-sync"
	case ContextLimit:
		return "context-limit"
	}
	return fmt.Sprintf("FaultKind(%d)", uint8(k))
}

// Fault is a disturbance between two times.
type Fault struct {
	Kind         FaultKind
	StartSeconds float64
	EndSeconds   float64
	Factor       float64
	Instance     int
}

// Validate reports everything that cannot be run.
func (c *Config) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf("configuring a run: "+format, args...))
		}
	}
	check(len(c.Instances) > 0, "no instance")
	check(c.Source != nil, "no source of samples")
	for i, p := range c.Instances {
		check(p.Validate() == nil, "instance %d: %w", i, p.Validate())
		check(p.BlockTokens == c.Instances[0].BlockTokens, "instance %d has blocks of %d tokens, instance 0 of %d",
			i, p.BlockTokens, c.Instances[0].BlockTokens)
		check(p.BlockTokens > 0 && c.RouterBlockTokens >= p.BlockTokens && c.RouterBlockTokens%p.BlockTokens == 0,
			"router blocks of %d tokens are no multiple of the engine's %d", c.RouterBlockTokens, p.BlockTokens)
	}
	check((c.Trainer.OuterConcurrency > 0) != (c.Trainer.ArrivalsPerSecond > 0),
		"outer concurrency %d and arrival rate %v: one of the two must be positive", c.Trainer.OuterConcurrency, c.Trainer.ArrivalsPerSecond)
	if b := c.Trainer.Batches; b != nil {
		check(b.Iterations > 0 && b.Samples > 0 && b.Staleness >= 0 && b.TrainSeconds >= 0 && b.SyncSeconds >= 0, "batches %+v", *b)
	} else {
		check(c.MeasureSeconds > 0, "nothing to measure")
	}
	check(c.WarmUpSeconds >= 0, "negative warm-up")
	o := c.Observed
	check(o.SnapshotPeriodSeconds > 0 && o.BlockPeriodSeconds > 0, "observations need periods")
	check(o.SnapshotDelaySeconds >= 0 && o.SnapshotJitterSeconds >= 0 && o.BlockDelaySeconds >= 0, "negative delay of an observation")
	for _, f := range c.Faults {
		check(f.EndSeconds >= f.StartSeconds && f.StartSeconds >= 0, "%s ends before it starts", f.Kind)
		check(f.Instance >= 0 && f.Instance < len(c.Instances), "%s of instance %d", f.Kind, f.Instance)
	}
	return errors.Join(errs...)
}
