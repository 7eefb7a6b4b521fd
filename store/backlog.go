package store

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// ClassBacklog is where one class's released samples are. Released is A, Ended N,
// Backlog Q: Released = Ended + Backlog; Backlog = Queued + Pending + Held + Active.
type ClassBacklog struct {
	Class                                          string
	Released                                       int64
	Completed, Truncated, Stale, Failed, Cancelled int64
	Ended                                          int64
	Backlog                                        int64
	Queued, Pending, Held, Active                  int64
	OldestHoldSeconds                              float64
	// OldestQueuedSeconds and OldestOutstandingSeconds are ages since the release: of
	// the oldest session that was not dispatched, and of any that has not ended.
	OldestQueuedSeconds, OldestOutstandingSeconds float64
	// LiveTokenSeconds and LiveBlockSeconds are the block-time that sessions under way
	// have used so far, the latter nil while no instance tells its block size.
	LiveTokenSeconds float64
	LiveBlockSeconds *float64
	// FreshnessBudgetSeconds is the class's, 0 for none.
	FreshnessBudgetSeconds float64
	// OverBound counts usable samples older than the contract's staleness bound,
	// Restarts sessions that were begun again under new weights, and Expired the stale
	// samples whose deadline had passed.
	OverBound, Restarts, Expired int64
	// DrainSeconds is the backlog over the class's rate of endings in the last ten
	// minutes, or since the run's first release if that is later; nil while nothing
	// has ended in them.
	DrainSeconds *float64
	// GroupsEnded counts groups whose members have all ended; GroupsWithoutSignal
	// those of them with two usable members or more that all have the same reward.
	GroupsEnded, GroupsWithoutSignal int64
}

// selectBacklogSQL is one statement, so that all numbers are of one instant.
const selectBacklogSQL = `
with run as (
    select r.run_id, r.pool, greatest(now() - interval '10 minutes', (select b.created_at from batches b where b.run_id = r.run_id and b.seq = 1)) as since
    from runs r where r.run_id = $1
), live as (
    select s.class, count(*) filter (where s.state = 'dispatched') as pending, count(*) filter (where s.state = 'held') as held,
           count(*) filter (where s.state = 'active') as active, min(s.held_since) as oldest_hold, min(s.released_at) as oldest_live,
           sum(s.token_seconds + coalesce(greatest(0, extract(epoch from now() - s.token_mark)) * s.context_tokens, 0))::float8 as token_seconds
    from run r join sessions s on s.dispatched_at is not null and s.ended_at is null and s.pool = r.pool and s.run_id = r.run_id group by s.class
), waits as (
    select c.class, (
        select s.released_at from batches b join sessions s using (batch_id)
        where b.run_id = c.run_id and b.queued > 0 and s.class = c.class and s.state = 'queued'
        order by b.seq, s.dispatch_ordinal limit 1) as oldest_queued
    from run join class_counters c using (run_id) where c.queued > 0
), rate as (
    select m.class, count(*) / extract(epoch from now() - min(r.since)) as per_second
    from run r join samples m on m.run_id = r.run_id and m.ended_at > r.since group by m.class
)
select c.class, c.released, c.completed, c.truncated, c.stale, c.failed, c.cancelled, c.ended, c.backlog, c.queued,
       coalesce(l.pending, 0), coalesce(l.held, 0), coalesce(l.active, 0),
       coalesce(greatest(0, extract(epoch from now() - l.oldest_hold)), 0)::float8,
       coalesce(greatest(0, extract(epoch from now() - w.oldest_queued)), 0)::float8,
       coalesce(greatest(0, extract(epoch from now() - least(w.oldest_queued, l.oldest_live))), 0)::float8,
       coalesce(l.token_seconds, 0), coalesce(l.token_seconds, 0) / (select max(i.block_tokens) from instances i where i.pool = r.pool and i.state <> 'removed'),
       coalesce(k.freshness_budget_seconds, v.freshness_budget_seconds, 0), c.over_bound, c.restarts, c.expired, (c.backlog / nullif(rate.per_second, 0))::float8,
       c.groups_ended, c.groups_without_signal
from run r join class_counters c using (run_id) left join live l using (class) left join rate using (class) left join waits w using (class)
     join runs on runs.run_id = r.run_id join contract_versions v on v.run_id = r.run_id and v.version = runs.contract_version
     left join contract_classes k on k.run_id = v.run_id and k.version = v.version and k.class = c.class
order by c.class`

// Backlog returns one entry per class of the run, by name, from one snapshot.
func (s *Store) Backlog(ctx context.Context, runID uuid.UUID) ([]ClassBacklog, error) {
	rows, err := s.pool.Query(ctx, selectBacklogSQL, runID)
	if err != nil {
		return nil, fmt.Errorf("reading the backlog of run %s: %w", runID, err)
	}
	classes, err := pgx.CollectRows(rows, pgx.RowToStructByPos[ClassBacklog])
	if err == nil && len(classes) == 0 {
		err = pgx.ErrNoRows
	}
	return classes, found(err, "reading the backlog of run", runID)
}
