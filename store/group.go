package store

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"holdfast/router"
)

// GroupOutcome is the closed set of how a group turned out.
type GroupOutcome string

// Group outcomes. Empty means that it is not known yet.
const (
	// GroupComplete: as many members are usable as the task asked for.
	GroupComplete GroupOutcome = "complete"
	// GroupFellShort: all members have ended and fewer are usable.
	GroupFellShort GroupOutcome = "partial"
	// GroupEnded: an unusable member ended the group, as its policy says.
	GroupEnded GroupOutcome = "ended"
)

const completeReason = "the group is complete"

// maxMembersBeyond bounds spare members and refills, each.
const maxMembersBeyond = 1_024

const (
	// Some groups' endings cancel the other members: those that may end by policy,
	// and those with members to spare.
	groupCancelsCondition = `(g.members > 1 and (g.policy = 'end' or g.members - g.refills > g.size))`

	selectGroupOfSQL = `
select g.group_id, g.members from sessions s join groups g on g.group_id = s.task_id where s.session_id = $1`

	lockMembersSQL = `select from sessions where session_id = any($1) order by session_id for no key update`

	// $3 is the reward, $4 how many members are released in its place, $5 what the
	// group turns out to be, if that is known now, $6 its place, if this was the last.
	countEndedGroupSQL = `
update groups set ended = ended + 1, usable = usable + ($2 in ('completed', 'truncated'))::int,
       rewarded = rewarded + ($3::float8 is not null)::int, reward_min = least(reward_min, $3), reward_max = greatest(reward_max, $3),
       members = members + $4, refills = refills + $4, outcome = coalesce(outcome, nullif($5, '')), place = $6
where group_id = $1`

	// $1 the session that is replaced, $2 and $3 the new one and its number, $4 its
	// state. It stands where the replaced one stood: in the queue, or under way.
	refillSQL = `
with refilled as (
    insert into sessions (session_id, pool, run_id, batch_id, task_id, member, class, dispatch_ordinal, policy_version,
                          state, context_tokens, event_seq, released_at, dispatched_at)
    select $2::uuid, s.pool, s.run_id, s.batch_id, s.task_id, $3::int, s.class, s.dispatch_ordinal, p.policy_version,
           $4::text, t.prompt_tokens, case $4 when 'queued' then 1 else 2 end, statement_timestamp(), case $4 when 'queued' then null else statement_timestamp() end
    from sessions s join tasks t on t.task_id = s.task_id join pools p on p.pool = s.pool where s.session_id = $1
    returning *, (state = 'queued')::int as queues
), noted as (
    insert into refills (run_id, released_at, session_id, class, replaces) select run_id, released_at, session_id, class, $1::uuid from refilled
), events as (
    insert into session_events (session_id, seq, run_id, at, kind, detail)
    select session_id, 1, run_id, released_at, 'released', json_build_object('batch', batch_id, 'policy_version', policy_version, 'replaces', $1::uuid) from refilled
    union all
    select session_id, 2, run_id, dispatched_at, 'dispatched', null from refilled where queues = 0
), starts as (
    insert into outbox (pool, run_id, session_id, kind, next_at) select pool, run_id, session_id, 'start', dispatched_at from refilled where queues = 0
), classes as (
    update class_counters c set released = c.released + 1, backlog = c.backlog + 1, queued = c.queued + r.queues, live = c.live + 1 - r.queues
    from refilled r where c.run_id = r.run_id and c.class = r.class
), batch as (
    update batches b set queued = b.queued + 1 from refilled r where r.queues = 1 and b.batch_id = r.batch_id
)
update run_counters c set released = c.released + 1, queued = c.queued + r.queues, live = c.live + 1 - r.queues
from refilled r where c.run_id = r.run_id`

	// $1 run, $2 groups, of which those whose members have all ended get their place.
	// The run is locked. It is what judge does, for many groups.
	settleGroupsSQL = `
with ready as (
    select group_id, class, members, sum(members) over (order by group_id) as up_to,
           usable > 1 and rewarded = usable and reward_min = reward_max as flat
    from groups where group_id = any($2) and ended = members and place is null
), settled as (
    update groups g set place = c.grouped_seq + r.up_to, outcome = coalesce(g.outcome, case when g.usable >= g.size then 'complete' else 'partial' end)
    from ready r, run_counters c where g.group_id = r.group_id and c.run_id = $1
), classes as (
    update class_counters c set groups_ended = c.groups_ended + r.n, groups_without_signal = c.groups_without_signal + r.flat
    from (select class, count(*) as n, count(*) filter (where flat) as flat from ready group by class) r
    where c.run_id = $1 and c.class = r.class
)
update run_counters set grouped_seq = grouped_seq + (select sum(members) from ready) where run_id = $1 and exists (select from ready)`
)

// endingGroup is what an ending needs of its group.
type endingGroup struct {
	size, members, ended, usable, refills, refillsAllowed int
	policy                                                GroupPolicy
	outcome                                               GroupOutcome
	// rewarded usable members have a reward, from rewardMin to rewardMax.
	rewarded             int
	rewardMin, rewardMax *float64
	// expired: its deadline has passed, so that nothing is released for it any more.
	expired bool
}

// verdict is what the ending of a member does to its group.
type verdict struct {
	// outcome is empty unless it is known now.
	outcome GroupOutcome
	// refill: another member is released in its place.
	refill bool
	// cancel is why the other members are cancelled, empty if they are not.
	cancel string
	// settled: it was the last member; flat: the group is without signal.
	settled, flat bool
}

// judge counts the ending of a member. wished: it was to be cancelled, which is
// nobody's failure. Members to spare stand in for unusable ones before the policy
// does anything.
func (g *endingGroup) judge(member int, ending *Ending, wished, runActive bool) verdict {
	status := ending.Status
	good := usable(status)
	g.count(good, ending.Reward)
	lost := g.ended - g.usable
	var v verdict
	switch {
	case g.outcome != "":
	case g.usable >= g.size:
		v = verdict{outcome: GroupComplete, cancel: completeReason}
	case good, wished, status == router.Cancelled, g.members-lost >= g.size:
	case g.policy == GroupEnd:
		v = verdict{outcome: GroupEnded, cancel: fmt.Sprintf("the group ended: member %d %s", member, became(status))}
	case g.policy == GroupRefill:
		v.refill = runActive && !g.expired && g.refills < g.refillsAllowed
	}
	if v.refill {
		g.members++
		g.refills++
	}
	if g.ended == g.members {
		v.cancel, v.settled = "", true
		v.flat = g.usable > 1 && g.rewarded == g.usable && *g.rewardMin == *g.rewardMax
		if g.outcome == "" && v.outcome == "" {
			v.outcome = GroupFellShort
		}
	}
	return v
}

func (g *endingGroup) count(usable bool, reward *float64) {
	g.ended++
	if usable {
		g.usable++
	}
	if reward == nil {
		return
	}
	g.rewarded++
	if g.rewardMin == nil || *reward < *g.rewardMin {
		g.rewardMin = reward
	}
	if g.rewardMax == nil || *reward > *g.rewardMax {
		g.rewardMax = reward
	}
}

func became(status router.EndStatus) string {
	if status == router.Stale {
		return "became stale"
	}
	return status.String()
}

// memberIDs are the sessions of a group, in ascending order.
func memberIDs(groupID uuid.UUID, members int) []uuid.UUID {
	ids := make([]uuid.UUID, members)
	for member := range ids {
		ids[member] = SessionID(groupID, member)
	}
	slices.SortFunc(ids, func(a, b uuid.UUID) int { return bytes.Compare(a[:], b[:]) })
	return ids
}

// lockMembers locks all members of the session's group. Whoever cancels the others
// must, since sessions are locked by ascending id.
func lockMembers(ctx context.Context, tx pgx.Tx, sessionID uuid.UUID) error {
	var groupID uuid.UUID
	var members int
	if err := tx.QueryRow(ctx, selectGroupOfSQL, sessionID).Scan(&groupID, &members); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, lockMembersSQL, memberIDs(groupID, members))
	return err
}

// cancelMembers cancels what is left of a group: queued members end at once, those
// under way are asked to. sampleSeq is the run's last sample number.
func cancelMembers(ctx context.Context, tx pgx.Tx, row *endingRow, sampleSeq int64, reason string) error {
	ids := memberIDs(row.taskID, row.group.members)
	if _, err := cancelQueued(ctx, tx, sampleSeq, row.runID, ids, reason); err != nil {
		return err
	}
	batch := &pgx.Batch{}
	batch.Queue(requestCancelSQL, row.pool, row.runID, ids, reason)
	notify(batch, OutboxTopic())
	return tx.SendBatch(ctx, batch).Close()
}
