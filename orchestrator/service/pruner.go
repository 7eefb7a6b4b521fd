package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"holdfast/store"
)

// Retention says what is kept for how long, and how gently the rest goes.
type Retention struct {
	store.Retention
	// Interval is how often the pruner looks.
	Interval time.Duration
	// StepSamples bounds one step, which is one short transaction of either kind.
	StepSamples int
	// StepPause lies between two steps, so that pruning never has the database to itself.
	StepPause time.Duration
}

// prunable is what the pruner needs of the store.
type prunable interface {
	PrunableRuns(ctx context.Context, pool string) ([]uuid.UUID, error)
	Prune(ctx context.Context, runID uuid.UUID, keep store.Retention, limit int) (store.Pruned, error)
	PruneRouterEvents(ctx context.Context, pool string, keep time.Duration, limit int) (int64, error)
}

// pruner removes what the retention lets go of, while its process owns the pool.
type pruner struct {
	store  prunable
	pool   string
	keep   Retention
	pruned *prometheus.CounterVec
	log    *slog.Logger
}

// run prunes until ctx ends.
func (p *pruner) run(ctx context.Context) error {
	return every(ctx, p.keep.Interval, p.log, "pruning", p.prune)
}

// prune takes every run of the pool as far as it may go. What fails with one keeps
// nothing else from being pruned.
func (p *pruner) prune(ctx context.Context) error {
	runs, err := p.store.PrunableRuns(ctx, p.pool)
	failed := []error{err}
	for _, run := range runs {
		failed = append(failed, p.pruneRun(ctx, run))
	}
	return errors.Join(append(failed, p.pruneRouterEvents(ctx))...)
}

func (p *pruner) pruneRun(ctx context.Context, run uuid.UUID) error {
	for {
		done, err := p.store.Prune(ctx, run, p.keep.Retention, p.keep.StepSamples)
		// What was removed before an error is gone as well.
		for table, n := range done.Rows {
			p.pruned.WithLabelValues(table).Add(float64(n))
		}
		if err != nil {
			return err
		}
		if max(done.Samples, done.Histories) < int64(p.keep.StepSamples) {
			return nil
		}
		if err := p.pause(ctx); err != nil {
			return err
		}
	}
}

func (p *pruner) pruneRouterEvents(ctx context.Context) error {
	for p.keep.RouterEvents > 0 {
		n, err := p.store.PruneRouterEvents(ctx, p.pool, p.keep.RouterEvents, p.keep.StepSamples)
		if err != nil {
			return err
		}
		p.pruned.WithLabelValues("router_events").Add(float64(n))
		if n < int64(p.keep.StepSamples) {
			return nil
		}
		if err := p.pause(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (p *pruner) pause(ctx context.Context) error {
	timer := time.NewTimer(p.keep.StepPause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

func newPrunedMetric(registerer prometheus.Registerer, poolName string) (*prometheus.CounterVec, error) {
	pruned := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "holdfast_pruned_rows_total", ConstLabels: prometheus.Labels{"pool": poolName},
		Help: "Rows removed by retention, by table. If it stands still while the database grows, look for a consumer that acknowledges no more (GET /runs/RUN/consumers) and remove it.",
	}, []string{"table"})
	if err := registerer.Register(pruned); err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	return pruned, nil
}
