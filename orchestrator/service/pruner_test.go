package service

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"holdfast/store"
)

// damaged is a store in which one run cannot be pruned.
type damaged struct {
	runs   []uuid.UUID
	at     uuid.UUID
	err    error
	pruned []uuid.UUID
	events int
}

func (d *damaged) PrunableRuns(context.Context, string) ([]uuid.UUID, error) { return d.runs, nil }

func (d *damaged) Prune(_ context.Context, run uuid.UUID, _ store.Retention, _ int) (store.Pruned, error) {
	if run == d.at {
		return store.Pruned{}, d.err
	}
	d.pruned = append(d.pruned, run)
	return store.Pruned{}, nil
}

func (d *damaged) PruneRouterEvents(context.Context, string, time.Duration, int) (int64, error) {
	d.events++
	return 0, nil
}

// TestOneRunDoesNotKeepTheOthersFromBeingPruned: what fails is told, and the later runs
// and the router's events have their turn in the same round.
func TestOneRunDoesNotKeepTheOthersFromBeingPruned(t *testing.T) {
	runs := []uuid.UUID{uuid.New(), uuid.New(), uuid.New()}
	d := &damaged{runs: runs, at: runs[0], err: errors.New("a file cannot be removed")}
	counted, err := newPrunedMetric(prometheus.NewRegistry(), "main")
	if err != nil {
		t.Fatal(err)
	}
	p := pruner{store: d, pool: "main", pruned: counted, keep: Retention{Retention: store.Retention{RouterEvents: time.Hour}, StepSamples: 10}}
	if err := p.prune(t.Context()); !errors.Is(err, d.err) {
		t.Errorf("the round ended with %v", err)
	}
	if !slices.Equal(d.pruned, runs[1:]) || d.events != 1 {
		t.Errorf("%d other runs and %d times the router's events were pruned, want 2 and 1", len(d.pruned), d.events)
	}
}
