package store

import (
	"context"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// PaceFigures are what a release pace is computed from: durable counters, and rates
// measured over the run's last endings and the pool's last policy versions. They are
// the same for every process and after every restart.
type PaceFigures struct {
	At             time.Time
	RunEnded       bool
	MaxConcurrency int64
	StalenessBound *int
	SpareMembers   int64
	// UndeliveredLimit is nil for none; Undelivered waits for the slowest consumer.
	UndeliveredLimit *int
	Undelivered      int64
	PolicyVersion    int64
	// VersionSeconds is the mean time between the pool's last policy versions since the
	// run's first release, which begins the first of them; 0 before the second.
	VersionSeconds    float64
	VersionAgeSeconds float64
	// BusySeconds of the window had a session under way. The window holds the last
	// 1,000 endings and is at most half an hour long.
	BusySeconds float64
	// ServiceMeanSeconds is the mean time from first admission to end in the window.
	ServiceMeanSeconds float64
	SecondsSinceEnded  float64
	// Unacknowledged usable samples wait for the furthest consumer, the one that has
	// acknowledged most since its start; StepSamples is the most it acknowledged between
	// two of the last versions. Of a reader of whole groups that began later than the run
	// the ended members of open groups count whatever their status.
	Unacknowledged int64
	StepSamples    int64
	Classes        []PaceClass
}

// PaceClass is one class of the contract, or one that is no longer in it and has
// sessions outstanding.
type PaceClass struct {
	Class string
	Rho   float64
	// Released counts since the shares became what they are.
	Released                   int64
	Outstanding, Held, Waiting int64
	// EndedInWindow and ServiceP99Seconds, from first admission to end, are the window's.
	EndedInWindow     int64
	ServiceP99Seconds float64
}

const (
	// The counters answer for a consumer that began at the beginning. For another one
	// what follows its place is counted, which costs as much as it has left to read, and
	// not as much as the run has had. Members of open groups have no place yet: those of
	// any status that have ended are what the two orders differ by. Ends that say nothing new have the planner expect a
	// short stretch of an index.
	paceRunSQL = `
select now(), r.state = 'ended', v.max_concurrency, v.staleness_bound, v.spare_members, v.undelivered_limit,` + undeliveredOfRun + `, p.policy_version,
       case when f.start_seq > 0 and f.grouped
            then c.sample_seq - c.grouped_seq + (select coalesce(sum(g.usable), 0) from groups g where g.run_id = r.run_id and g.place > f.acked_seq and g.place <= c.grouped_seq)
            when f.start_seq > 0
            then (select count(*) from samples m where m.run_id = r.run_id and m.seq > f.acked_seq and m.seq <= c.sample_seq and m.status in ('completed', 'truncated'))
            else (select sum(k.completed + k.truncated) from class_counters k where k.run_id = r.run_id)
                 - coalesce((select sum(k.consumed) from consumer_classes k where k.run_id = r.run_id and k.consumer = f.consumer), 0)
       end::bigint
from runs r join run_counters c using (run_id) join pools p using (pool)
     join contract_versions v on v.run_id = r.run_id and v.version = r.contract_version
     left join lateral (` + furthestConsumerSQL + `) f on true
where r.run_id = $1`

	paceClassesSQL = `
with live as (
    select s.class, count(*) filter (where s.state = 'held') as held, count(*) filter (where s.state <> 'held') as waiting
    from runs r join sessions s on s.dispatched_at is not null and s.ended_at is null and s.pool = r.pool and s.run_id = r.run_id
    where r.run_id = $1 group by s.class
)
select k.class, coalesce(c.share, 0), case when c.class is null then 0 else k.released - c.released_before end, k.backlog,
       coalesce(l.held, 0), coalesce(l.waiting, 0), 0::bigint, 0::float8
from runs r join class_counters k using (run_id)
     left join contract_classes c on c.run_id = r.run_id and c.version = r.contract_version and c.class = k.class left join live l on l.class = k.class
where r.run_id = $1 and (c.class is not null or k.backlog > 0) order by c.ordinal nulls last, k.class`

	// The last endings by class, and of all of them under no class. The times under way
	// are summed up as a union; what is under way now has been so without a break since
	// the first of it was dispatched.
	paceWindowSQL = `
with latest as (
    select m.class, m.status, m.ended_at, m.session_id from samples m where m.run_id = $1 order by m.seq desc limit 1000
), since as (
    select greatest(now() - interval '30 minutes', case when count(*) = 1000 then min(ended_at) end) as at, max(ended_at) as last from latest
), recent as (
    select l.class, l.status, l.ended_at, s.dispatched_at, s.first_admitted_at
    from since, latest l join sessions s using (session_id) where l.ended_at > since.at
), spans as (
    select greatest(dispatched_at, since.at) as a, ended_at as b from recent, since where dispatched_at is not null
    union all
    select greatest(min(s.dispatched_at), min(since.at)), now()
    from since, runs r join sessions s on s.dispatched_at is not null and s.ended_at is null and s.pool = r.pool and s.run_id = r.run_id
    where r.run_id = $1 having count(*) > 0
), ordered as (
    select a, b, max(b) over (order by a, b rows between unbounded preceding and 1 preceding) as reach from spans
)
select class, count(*), coalesce(percentile_cont(0.99) within group (order by service) filter (where served), 0),
       coalesce(avg(service) filter (where served), 0),
       coalesce((select sum(greatest(0, extract(epoch from b - greatest(a, reach)))) from ordered), 0)::float8,
       extract(epoch from now() - coalesce((select last from since), (select created_at from batches where run_id = $1 and seq = 1), now()))::float8
from (select class, status in ('completed', 'truncated', 'stale') and first_admitted_at is not null as served,
             extract(epoch from ended_at - first_admitted_at)::float8 as service from recent) r
group by grouping sets ((class), ())`

	paceVersionsSQL = `
with first as (
    select created_at as at from batches where run_id = $1 and seq = 1
), times as (
    select at from (
        select u.advanced_at as at from runs r join weight_updates u using (pool), first where r.run_id = $1 and u.advanced_at > first.at
        union all select at from first) t order by at desc limit 9
), furthest as (` + furthestConsumerSQL + `
), acked as (
    select t.at, coalesce((select m.seq from consumer_marks m where m.run_id = $1 and m.consumer = f.consumer
                               and m.kind = 'acknowledged' and m.at <= t.at order by m.seq desc limit 1), f.start_seq) as seq
    from (select at from times union all select now()) t, furthest f
), steps as (
    select at, seq - lag(seq) over (order by at) as step from acked
)
select coalesce((extract(epoch from max(at) - min(at)) / nullif(count(*) - 1, 0)), 0)::float8, coalesce(extract(epoch from now() - max(at)), 0)::float8,
       coalesce((select max(step) from steps where (select count(*) from times) > 1), 0)
from times`
)

// Pace returns what a release pace of the run is computed from, of one instant.
func (s *Store) Pace(ctx context.Context, runID uuid.UUID) (PaceFigures, error) {
	var f PaceFigures
	err := s.read(ctx, func(tx pgx.Tx) error {
		batch := &pgx.Batch{}
		batch.Queue(paceRunSQL, runID).QueryRow(func(row pgx.Row) error {
			return row.Scan(&f.At, &f.RunEnded, &f.MaxConcurrency, &f.StalenessBound, &f.SpareMembers, &f.UndeliveredLimit, &f.Undelivered, &f.PolicyVersion, &f.Unacknowledged)
		})
		batch.Queue(paceClassesSQL, runID).Query(func(rows pgx.Rows) (err error) {
			f.Classes, err = pgx.CollectRows(rows, pgx.RowToStructByPos[PaceClass])
			return err
		})
		batch.Queue(paceWindowSQL, runID).Query(f.scanWindow)
		batch.Queue(paceVersionsSQL, runID).QueryRow(func(row pgx.Row) error {
			return row.Scan(&f.VersionSeconds, &f.VersionAgeSeconds, &f.StepSamples)
		})
		return tx.SendBatch(ctx, batch).Close()
	})
	return f, found(err, "reading the pace of run", runID)
}

func (f *PaceFigures) scanWindow(rows pgx.Rows) error {
	at := make(map[string]*PaceClass, len(f.Classes))
	for i := range f.Classes {
		at[f.Classes[i].Class] = &f.Classes[i]
	}
	var class *string
	var ended int64
	var longest, mean, busy, since float64
	_, err := pgx.ForEachRow(rows, []any{&class, &ended, &longest, &mean, &busy, &since}, func() error {
		switch {
		case class == nil:
			f.BusySeconds, f.ServiceMeanSeconds, f.SecondsSinceEnded = busy, mean, since
		case at[*class] != nil:
			at[*class].EndedInWindow, at[*class].ServiceP99Seconds = ended, longest
		}
		return nil
	})
	return err
}
