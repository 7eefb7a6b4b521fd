package sim_test

import (
	"slices"
	"testing"

	"holdfast/router"
	"holdfast/router/sim"
	"holdfast/router/sim/instance"
	"holdfast/router/sim/policy"
	"holdfast/router/sim/workload"
)

// quarter is a pool of quarter-size engines under sessions of quarter length: the
// shapes of the large one in a fraction of the time.
func quarter(t testing.TB, seed uint64, outer int) sim.Config {
	t.Helper()
	engine := instance.QwenLike()
	engine.CapacityBlocks /= 4
	engine.MaxContextTokens /= 4
	composed := sim.Composed{Seed: seed, GroupSize: 4, Mixture: []sim.ComposedClass{
		{Class: workload.PaperAgent(workload.GapsQwen).Scaled(0.25), Share: 0.486},
		{Class: workload.PaperRLVR().Scaled(0.25), Share: 0.331},
		{Class: workload.PaperRLHF().Scaled(0.25), Share: 0.182},
	}}
	source, err := composed.Source()
	if err != nil {
		t.Fatal(err)
	}
	return sim.Config{
		Seed: seed, Instances: slices.Repeat([]instance.Params{engine}, 2), Source: source,
		Trainer: sim.Trainer{OuterConcurrency: outer}, Observed: sim.DefaultObservation(),
		WarmUpSeconds: 900, MeasureSeconds: 3600, RouterBlockTokens: 64,
	}
}

func run(t testing.TB, cfg sim.Config, spec sim.Spec) *sim.Result {
	t.Helper()
	r, err := sim.Run(cfg, spec)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// every is all policies, with ceilings that suit quarter.
func every() []sim.Spec {
	return []sim.Spec{
		policy.RoundRobin(), policy.LeastLoaded(), policy.RequestCeiling(32), policy.SessionCeiling(44),
		policy.ClassCeilings(map[router.ClassID]int{"agent": 20, "rlvr": 24, "rlhf": 3}),
		policy.Partitioned([]policy.Partition{
			{Classes: []router.ClassID{"agent"}, Instances: []int{0}, Ceiling: 44},
			{Classes: []router.ClassID{"rlvr", "rlhf"}, Instances: []int{1}, Ceiling: 44},
		}),
		policy.Safe128K(), policy.Permissive(), policy.PrebleLike(), policy.StickyLeastLoaded(), policy.StickyLeastInFlight(),
		policy.ThunderAgentLike(), policy.PrimeRLLike(), policy.SessionAdmission(), policy.MISA(), policy.MISAT(),
		policy.MISATPaper(), policy.Holdfast(), policy.Oracle(policy.DefaultOracle()),
	}
}

func TestEqualConfigurationsGiveEqualRuns(t *testing.T) {
	for _, spec := range every() {
		cfg := quarter(t, 7, 320)
		cfg.WarmUpSeconds, cfg.MeasureSeconds = 0, 600
		cfg.Observed.SnapshotJitterSeconds, cfg.Observed.SnapshotLoss, cfg.Observed.BlockLoss = 8, 0.2, 0.1
		first, second := run(t, cfg, spec), run(t, cfg, spec)
		if first.Fingerprint != second.Fingerprint {
			t.Errorf("%s: two runs of one configuration differ", spec.Name)
		}
		cfg = quarter(t, 8, 320)
		cfg.WarmUpSeconds, cfg.MeasureSeconds = 0, 600
		if other := run(t, cfg, spec); other.Fingerprint == first.Fingerprint {
			t.Errorf("%s: another seed gives the same run", spec.Name)
		}
	}
}

// Every sample that the trainer releases is completed in the end or still
// known, and the composition in time follows the mixture.
func TestNoSampleIsLostUnderFaults(t *testing.T) {
	for _, spec := range every() {
		cfg := quarter(t, 3, 160)
		cfg.WarmUpSeconds, cfg.MeasureSeconds, cfg.SeriesSeconds = 0, 1800, 1800
		cfg.Faults = []sim.Fault{
			{Kind: sim.InstanceLost, StartSeconds: 300, EndSeconds: 600, Instance: 1},
			{Kind: sim.SlowTools, StartSeconds: 500, EndSeconds: 700, Factor: 10},
			{Kind: sim.WeightSync, StartSeconds: 900, EndSeconds: 920},
			{Kind: sim.ContextLimit, StartSeconds: 1000, EndSeconds: 1200, Factor: 0.75},
		}
		cfg.Labels = sim.Labels{Confused: 0.2, Missing: 0.1, ReuseIDs: true}
		r := run(t, cfg, spec)
		released, completed := 0, 0
		for _, c := range r.Classes {
			released += c.Released
			completed += c.Completed
			if c.Completed == 0 && spec.Name != "partitioned" {
				t.Errorf("%s: no %s sample was completed", spec.Name, c.Name)
			}
		}
		if released != completed+r.Backlog {
			t.Errorf("%s: %d samples released, %d completed and %d unfinished", spec.Name, released, completed, r.Backlog)
		}
		// Tasks are released whole.
		if r.Backlog > 160 || r.Backlog <= 160-4 {
			t.Errorf("%s: %d samples are unfinished, the trainer keeps 157 to 160", spec.Name, r.Backlog)
		}
	}
}

func TestOverloadCollapsesAndAdmissionDoesNot(t *testing.T) {
	cfg := quarter(t, 5, 320)
	tuned := run(t, cfg, policy.SessionCeiling(44))
	open := run(t, cfg, policy.Permissive())
	holdfast := run(t, cfg, policy.Holdfast())
	if tuned.PrefixHit < 0.9 || open.PrefixHit > 0.35 {
		t.Errorf("hit %.3f under a tuned ceiling and %.3f without, want above 0.9 and below 0.35", tuned.PrefixHit, open.PrefixHit)
	}
	if open.BalancedPerMinute > 0.65*tuned.BalancedPerMinute {
		t.Errorf("%.2f samples/min without admission, %.2f under a tuned ceiling: no collapse", open.BalancedPerMinute, tuned.BalancedPerMinute)
	}
	if holdfast.BalancedPerMinute < 0.97*tuned.BalancedPerMinute {
		t.Errorf("Holdfast completes %.2f samples/min, a tuned ceiling %.2f", holdfast.BalancedPerMinute, tuned.BalancedPerMinute)
	}
}

func TestNoPolicyBeatsTheBound(t *testing.T) {
	cfg := quarter(t, 5, 320)
	bound, err := sim.Bound(cfg, 500)
	if err != nil {
		t.Fatal(err)
	}
	for _, spec := range []sim.Spec{policy.SessionCeiling(44), policy.Holdfast(), policy.Oracle(policy.DefaultOracle())} {
		r := run(t, cfg, spec)
		if share := r.BalancedPerMinute / bound.SamplesPerMinute; share > 1.02 || share < 0.7 {
			t.Errorf("%s reaches %.2f of the bound", spec.Name, share)
		}
	}
}

func TestOpenLoopBelowTheBoundDrains(t *testing.T) {
	cfg := quarter(t, 5, 320)
	bound, err := sim.Bound(cfg, 500)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Trainer = sim.Trainer{ArrivalsPerSecond: 0.7 * bound.SamplesPerMinute / 60}
	cfg.MeasureSeconds = 3 * 3600
	r := run(t, cfg, policy.Holdfast())
	if want := 0.7 * bound.SamplesPerMinute; r.SamplesPerMinute < 0.93*want {
		t.Errorf("%.2f samples/min completed of %.2f that arrive", r.SamplesPerMinute, want)
	}
	if r.Backlog > 250 {
		t.Errorf("%d samples are unfinished at 70 %% of the bound", r.Backlog)
	}
}

func TestEndToEndCountsIterations(t *testing.T) {
	cfg := quarter(t, 5, 160)
	cfg.WarmUpSeconds = 0
	cfg.Trainer.Batches = &sim.Batches{Iterations: 6, Samples: 64, Staleness: 1, TrainSeconds: 30, SyncSeconds: 5}
	r := run(t, cfg, policy.Holdfast())
	if len(r.Iterations) != 6 {
		t.Fatalf("%d iterations, want 6", len(r.Iterations))
	}
	var total float64
	for i, it := range r.Iterations {
		if it.Seconds < 35 {
			t.Errorf("iteration %d took %.1f s, less than training and sync", i, it.Seconds)
		}
		total += it.Seconds
	}
	if diff := total - r.SimulatedSeconds; diff > 1e-6 || diff < -1e-6 {
		t.Errorf("iterations sum to %.3f s of a run of %.3f s", total, r.SimulatedSeconds)
	}
}

func TestLittlesLawHolds(t *testing.T) {
	cfg := quarter(t, 9, 200)
	cfg.MeasureSeconds = 4 * 3600
	r := run(t, cfg, policy.SessionCeiling(40))
	// Outstanding samples = rate x sojourn, whatever the policy does.
	if inFlight := r.SamplesPerMinute / 60 * r.MeanLatencySeconds; inFlight < 190 || inFlight > 210 {
		t.Errorf("rate x latency is %.1f samples, the trainer keeps 200", inFlight)
	}
}

func TestConfigIsValidated(t *testing.T) {
	good := quarter(t, 1, 10)
	for name, spoil := range map[string]func(*sim.Config){
		"no instance":    func(c *sim.Config) { c.Instances = nil },
		"no source":      func(c *sim.Config) { c.Source = nil },
		"both loops":     func(c *sim.Config) { c.Trainer.ArrivalsPerSecond = 1 },
		"odd blocks":     func(c *sim.Config) { c.RouterBlockTokens = 24 },
		"nothing to do":  func(c *sim.Config) { c.MeasureSeconds = 0 },
		"backward fault": func(c *sim.Config) { c.Faults = []sim.Fault{{Kind: sim.SlowTools, StartSeconds: 2, EndSeconds: 1}} },
		"no such fault":  func(c *sim.Config) { c.Faults = []sim.Fault{{Kind: sim.InstanceLost, Instance: 9}} },
	} {
		cfg := good
		spoil(&cfg)
		if _, err := sim.Run(cfg, policy.RoundRobin()); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestRecordedSessionsAreReplayed(t *testing.T) {
	cfg := quarter(t, 1, 8)
	session := workload.Session{PromptTokens: 500, SharedTokens: 100, Turns: []workload.Turn{
		{OutputTokens: 50, AppendTokens: 20, GapSeconds: 2}, {OutputTokens: 30},
	}}
	composed := sim.Composed{GroupSize: 1, Mixture: []sim.ComposedClass{{Class: workload.PaperAgent(workload.GapsQwen), Share: 1, Recorded: []workload.Session{session}}}}
	source, err := composed.Source()
	if err != nil {
		t.Fatal(err)
	}
	cfg.Source = source
	cfg.WarmUpSeconds, cfg.MeasureSeconds = 0, 600
	r := run(t, cfg, policy.Permissive())
	perSample := r.DecodeTokensPerSecond * r.MeasuredSeconds / float64(r.Classes[0].Completed)
	if perSample < 80 || perSample > 82 {
		t.Errorf("%.2f tokens generated per sample of 80", perSample)
	}
	if r.Classes[0].P50Seconds < 2 {
		t.Errorf("a sample takes %.2f s, its tool alone 2 s", r.Classes[0].P50Seconds)
	}
}
