package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// Each row of verifySQL is a difference between a counter and what it counts.
const verifySQL = `
with counted as (
    select class, 'released' as what, count(*) as n from sessions where run_id = $1 group by class
    union all select class, state, count(*) from sessions where run_id = $1 and state = 'queued' group by class, state
    union all select class, 'live', count(*) from sessions where run_id = $1 and ` + liveCondition + ` group by class
    union all select class, status, count(*) from samples where run_id = $1 group by class, status
    union all select class, 'ended', count(*) from sessions where run_id = $1 and state = 'ended' group by class
), counters as (
    select c.class, v.what, v.n from class_counters c,
    lateral (values ('released', released), ('queued', queued), ('live', live), ('completed', completed), ('truncated', truncated),
                    ('stale', stale), ('failed', failed), ('cancelled', cancelled), ('ended', ended)) v (what, n)
    where c.run_id = $1
)
select 'class ' || coalesce(k.class, c.class) || ', ' || coalesce(k.what, c.what), coalesce(k.n, 0), coalesce(c.n, 0)
from counters k full join counted c using (class, what) where coalesce(k.n, 0) <> coalesce(c.n, 0)
union all
select 'run, ' || v.what, v.counter, v.counted from run_counters r,
lateral (values
    ('released', r.released, (select sum(released) from class_counters where run_id = $1)),
    ('queued', r.queued, (select sum(queued) from class_counters where run_id = $1)),
    ('live', r.live, (select sum(live) from class_counters where run_id = $1)),
    ('samples', r.sample_seq, (select count(*) from samples where run_id = $1)),
    ('samples of whole groups', r.grouped_seq, (select coalesce(sum(members), 0) from groups where run_id = $1 and ended = members)),
    ('last sample', r.sample_seq, (select coalesce(max(seq), 0) from samples where run_id = $1)),
    ('last batch', r.batch_seq, (select coalesce(max(seq), 0) from batches where run_id = $1))) v (what, counter, counted)
where r.run_id = $1 and v.counter <> v.counted
union all
select 'batch ' || b.seq || ', queued', b.queued, (select count(*) from sessions s where s.batch_id = b.batch_id and s.state = 'queued')
from batches b where b.run_id = $1 and b.queued <> (select count(*) from sessions s where s.batch_id = b.batch_id and s.state = 'queued')
union all
select 'group ' || g.group_id || ', members, ended or usable', g.ended, s.ended
from groups g join (select task_id, count(*) as members, count(*) filter (where state = 'ended') as ended, count(*) filter (where status in ('completed', 'truncated')) as usable
                    from sessions where run_id = $1 group by task_id) s on s.task_id = g.group_id
where g.run_id = $1 and (g.members, g.ended, g.usable) <> (s.members, s.ended, s.usable)
union all
select 'group ' || g.group_id || ', refills', g.refills, coalesce(r.n, 0)
from groups g left join (select s.task_id, count(*) as n from refills f join sessions s using (session_id) where f.run_id = $1 group by s.task_id) r on r.task_id = g.group_id
where g.run_id = $1 and g.refills <> coalesce(r.n, 0)
union all
select 'group ' || group_id || ', place', place, up_to
from (select *, sum(members) over (order by place) as up_to from groups where run_id = $1 and (place is not null or ended = members)) g
where place is distinct from up_to
union all
select 'class ' || c.class || ', groups ended', c.groups_ended, coalesce(g.n, 0)
from class_counters c left join (select class, count(*) as n from groups where run_id = $1 and ended = members group by class) g using (class)
where c.run_id = $1 and c.groups_ended <> coalesce(g.n, 0)
union all
select 'class ' || c.class || ', samples over the bound', c.over_bound, coalesce(m.n, 0)
from class_counters c left join (select class, count(*) as n from samples where run_id = $1 and over_bound group by class) m using (class)
where c.run_id = $1 and c.over_bound <> coalesce(m.n, 0)
union all
select 'class ' || c.class || ', restarts', c.restarts, coalesce(s.n, 0)
from class_counters c left join (select class, sum(restarts) as n from sessions where run_id = $1 group by class) s using (class)
where c.run_id = $1 and c.restarts <> coalesce(s.n, 0)
union all
select 'class ' || c.class || ', groups without signal', c.groups_without_signal, coalesce(g.n, 0)
from class_counters c left join (
    select class, count(*) as n from (
        select s.task_id, m.class from groups g join sessions s on s.task_id = g.group_id join samples m using (session_id)
        where g.run_id = $1 and g.place is not null and m.status in ('completed', 'truncated') group by s.task_id, m.class
        having count(*) > 1 and count(m.reward) = count(*) and min(m.reward) = max(m.reward)) flat group by class) g using (class)
where c.run_id = $1 and c.groups_without_signal <> coalesce(g.n, 0)
union all
select 'session ' || s.session_id || ', turns', s.turns, coalesce(t.n, 0)
from sessions s left join (select session_id, count(*) as n from turns where run_id = $1 group by session_id) t using (session_id)
where s.run_id = $1 and s.turns <> coalesce(t.n, 0) and not ` + historyPrunedCondition + `
union all
select 'session ' || s.session_id || ', history', s.event_seq, coalesce(e.n, 0) + s.turns
from sessions s left join (select session_id, count(*) as n from session_events where run_id = $1 group by session_id) e using (session_id)
where s.run_id = $1 and s.event_seq <> coalesce(e.n, 0) + s.turns and not ` + historyPrunedCondition + `
union all
select 'consumer ' || c.consumer || ', place', c.delivered_seq, least(c.delivered_seq, case when c.grouped then r.grouped_seq else r.sample_seq end)
from consumers c join run_counters r using (run_id)
where c.run_id = $1 and c.delivered_seq > case when c.grouped then r.grouped_seq else r.sample_seq end
union all
select 'consumer ' || c.consumer || ', consumed', coalesce(k.n, 0), n.n
from consumers c left join (select consumer, sum(consumed)::bigint as n from consumer_classes where run_id = $1 group by consumer) k using (consumer),
lateral (select case when c.grouped then (select coalesce(sum(usable), 0) from groups where run_id = $1 and place > c.start_seq and place <= c.acked_seq)
                else (select count(*) from samples where run_id = $1 and seq > c.start_seq and seq <= c.acked_seq and status in ('completed', 'truncated')) end as n) n
where c.run_id = $1 and coalesce(k.n, 0) <> n.n`

// historyPrunedCondition holds for a session s of which events and turns are pruned;
// its row says how many there were.
const historyPrunedCondition = `exists (
    select from samples m join run_pruning p using (run_id) where m.session_id = s.session_id and m.seq <= p.history_seq)`

// VerifyCounters recomputes what the counters of a run count, A, N and Q of every
// class first of all, and returns an error that names every difference. It reads
// all of the run's rows.
func (s *Store) VerifyCounters(ctx context.Context, runID uuid.UUID) error {
	rows, err := s.pool.Query(ctx, verifySQL, runID)
	if err != nil {
		return fmt.Errorf("verifying the counters of run %s: %w", runID, err)
	}
	differences, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (error, error) {
		var what string
		var counter, counted int64
		err := row.Scan(&what, &counter, &counted)
		return fmt.Errorf("%s: counter %d, counted %d", what, counter, counted), err
	})
	if err != nil {
		return fmt.Errorf("verifying the counters of run %s: %w", runID, err)
	}
	if len(differences) > 0 {
		return fmt.Errorf("counters of run %s are wrong: %w", runID, errors.Join(differences...))
	}
	return nil
}
