package store

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// Start is where a reader begins that has no place yet.
type Start string

// Starts. Empty is StartBeginning.
const (
	// StartBeginning is the run's first sample.
	StartBeginning Start = "beginning"
	// StartAvailable is the first sample that is not pruned.
	StartAvailable Start = "available"
	// StartNow is behind the last sample there is.
	StartNow Start = "now"
)

// readPlace is where a page begins, and what is known of its reader.
type readPlace struct {
	after, end int64
	// delivered is how far a known consumer has been given samples.
	delivered int64
	// start is where a consumer that is not known yet begins for good. It is written
	// down with the first page, also an empty one: from then on the consumer is waited
	// for, and what it cannot have yet is not held against it.
	start int64
	known bool
}

// readPlaceOf finds where the query's page begins.
func readPlaceOf(ctx context.Context, tx pgx.Tx, query *SampleQuery) (readPlace, error) {
	var p readPlace
	var acked, pruned int64
	var grouped bool
	err := tx.QueryRow(ctx, selectPlaceSQL, query.RunID, query.Consumer, query.WholeGroups).Scan(&p.end, &p.delivered, &acked, &grouped, &pruned, &p.known)
	if err != nil {
		return p, err
	}
	if grouped != query.WholeGroups {
		return p, &ConflictError{Subject: "consumer", Existing: query.Consumer, Problem: "reads " + orderName(grouped) + "; a consumer keeps to one order, so read " + orderName(!grouped) + " under another name"}
	}
	switch {
	case query.After != "":
		if p.after, err = query.After.seq(query.RunID, query.WholeGroups); err != nil {
			return p, err
		}
		if p.after > p.end {
			return p, fmt.Errorf("a cursor beyond the end: %w", ErrUnknownCursor)
		}
	case p.known:
		p.after = acked
	case query.Start == StartNow:
		p.after, p.start = p.end, p.end
	case query.Start == StartAvailable:
		p.after, p.start = pruned, pruned
	}
	if p.after < pruned {
		return p, prunedBefore(query.RunID, query.WholeGroups, pruned)
	}
	return p, nil
}

// prunedBefore is the refusal of a place at which the samples are gone.
func prunedBefore(runID uuid.UUID, grouped bool, pruned int64) error {
	return &PrunedError{Subject: fmt.Sprintf("samples up to number %d of %s", pruned, orderName(grouped)), First: cursorOf(runID, grouped, pruned)}
}

const selectPrunedPlaceSQL = `select case when $2 then transcripts_place else transcripts_seq end from run_pruning where run_id = $1`

// prunedMeanwhile is the refusal of a page that a prune overtook.
func (s *Store) prunedMeanwhile(ctx context.Context, query *SampleQuery) error {
	var pruned int64
	if err := s.pool.QueryRow(ctx, selectPrunedPlaceSQL, query.RunID, query.WholeGroups).Scan(&pruned); err != nil {
		return err
	}
	return prunedBefore(query.RunID, query.WholeGroups, pruned)
}
