package experiment

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"sync"
	"time"

	"holdfast/router/sim"
	"holdfast/router/sim/workload"
)

// Options are what every experiment is given.
type Options struct {
	// Seeds are judged on; the first of JudgingSeeds if empty.
	Seeds []uint64
	// Parallel is the number of runs at a time, the number of processors if 0.
	Parallel int
	// Progress, if set, is told how far a long experiment has come.
	Progress io.Writer
	// Setups and Policies restrict what is run, if not empty.
	Setups   []string
	Policies []string
	// Scenarios restrict the stress list, if not empty; the undisturbed run is
	// always there.
	Scenarios []string
	// Agents, if any, are recorded sessions that replace the drawn Agent sessions.
	Agents []workload.Session
	// MeasureSeconds shortens the measured part, if positive.
	MeasureSeconds float64
	// Earlier, if set, is a comparison whose gains are drawn instead of run again.
	Earlier *PaperResult
	// Iterations, if positive, is the length of end-to-end runs.
	Iterations int
}

// job is one run and where its result goes.
type job struct {
	cfg  func() (sim.Config, error)
	spec sim.Spec
	into **sim.Result
}

// batch collects jobs and runs them on all processors.
type batch struct {
	options *Options
	title   string
	jobs    []job
}

func (o *Options) batch(title string) *batch { return &batch{options: o, title: title} }

// add queues one run and returns where its result will be.
func (b *batch) add(spec sim.Spec, cfg func() (sim.Config, error)) **sim.Result {
	into := new(*sim.Result)
	b.jobs = append(b.jobs, job{cfg, spec, into})
	return into
}

// run carries out what was added. It stops at the first error, or when the
// context ends.
func (b *batch) run(ctx context.Context) error {
	workers := b.options.Parallel
	if workers <= 0 {
		workers = runtime.GOMAXPROCS(0)
	}
	var (
		mu      sync.Mutex
		next    int
		done    int
		failure error
		wait    sync.WaitGroup
		started = time.Now()
	)
	take := func() (job, bool) {
		mu.Lock()
		defer mu.Unlock()
		if next == len(b.jobs) || failure != nil || ctx.Err() != nil {
			return job{}, false
		}
		next++
		return b.jobs[next-1], true
	}
	report := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		done++
		if err != nil && failure == nil {
			failure = err
		}
		if b.options.Progress != nil && (done%20 == 0 || done == len(b.jobs)) {
			fmt.Fprintf(b.options.Progress, "%s: %d of %d runs, %.0f s\n", b.title, done, len(b.jobs), time.Since(started).Seconds())
		}
	}
	for range min(workers, len(b.jobs)) {
		wait.Add(1)
		go func() {
			defer wait.Done()
			for j, ok := take(); ok; j, ok = take() {
				report(j.do())
			}
		}()
	}
	wait.Wait()
	b.jobs = nil
	if failure != nil {
		return failure
	}
	return ctx.Err()
}

func (j job) do() error {
	cfg, err := j.cfg()
	if err != nil {
		return err
	}
	*j.into, err = sim.Run(cfg, j.spec)
	return err
}

// config is a run of a setup under the options.
func (o *Options) config(s Setup, regime Regime, seed uint64, change func(*sim.Config)) func() (sim.Config, error) {
	return func() (sim.Config, error) {
		cfg, err := s.Config(regime, seed)
		if err != nil {
			return cfg, err
		}
		if o.MeasureSeconds > 0 {
			cfg.MeasureSeconds = o.MeasureSeconds
		}
		if cfg.Trainer.Batches != nil && o.Iterations > 0 {
			cfg.Trainer.Batches.Iterations = o.Iterations
		}
		if change != nil {
			change(&cfg)
		}
		return cfg, nil
	}
}

func (o *Options) setups() ([]Setup, error) {
	all := []Setup{Qwen(), Step()}
	for i := range all {
		all[i].Agents = o.Agents
	}
	if len(o.Setups) == 0 {
		return all, nil
	}
	var chosen []Setup
	for _, name := range o.Setups {
		found := false
		for _, s := range all {
			if s.Name == name {
				chosen, found = append(chosen, s), true
			}
		}
		if !found {
			return nil, fmt.Errorf("no configuration is called %q: qwen and step are", name)
		}
	}
	return chosen, nil
}

func (o *Options) seeds() []uint64 {
	if len(o.Seeds) == 0 {
		return JudgingSeeds[:3]
	}
	return o.Seeds
}
