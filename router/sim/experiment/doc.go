// Package experiment asks the simulator the questions that the documentation
// answers: what each policy is worth on the paper's two configurations, how gains
// depend on outer concurrency, what disturbances do, and how sensitive the
// controller is. Each experiment is one function that returns plain rows;
// writing tables and charts is apart from running.
//
// Engines and workload are fixed in setup.go. Seeds are of two kinds: parameters
// of policies were chosen on TuningSeeds, and figures come from JudgingSeeds only. The
// ceilings of the swept baselines are the exception in their favour: they
// are the best in hindsight, on the very seeds that are judged.
package experiment

// Seeds. No seed is of both kinds.
var (
	TuningSeeds  = []uint64{1, 2, 3, 4}
	JudgingSeeds = []uint64{101, 102, 103, 104, 105, 106, 107, 108, 109, 110}
)
