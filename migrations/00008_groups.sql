-- Groups: what an unusable member does, members to spare, and samples by whole
-- groups.

-- +goose Up
-- group_refills is null for the size of the group.
alter table contract_versions add column group_refills int check (group_refills between 0 and 1024);
alter table contract_versions add column spare_members int not null default 0 check (spare_members between 0 and 1024);

-- policy and refills_allowed are the contract's at the release. outcome is set once:
-- complete when size members are usable, ended by the policy, else partial when the
-- last member has ended. place is drawn then, from run_counters.grouped_seq: member
-- m of the group has place - members + 1 + m in the order of whole groups.
-- reward_min and reward_max span the rewards of the usable members that have one.
alter table groups
    add column policy          text not null default 'partial' check (policy in ('partial', 'refill', 'end')),
    add column refills_allowed int  not null default 0 check (refills_allowed >= 0),
    add column refills         int  not null default 0,
    add column outcome         text check (outcome in ('complete', 'partial', 'ended')),
    add column place           bigint,
    add column rewarded        int  not null default 0,
    add column reward_min      double precision,
    add column reward_max      double precision,
    add constraint groups_refills  check (refills between 0 and refills_allowed and members >= size + refills),
    add constraint groups_place    check (place is null or (ended = members and place >= members and outcome is not null)),
    add constraint groups_rewarded check (rewarded between 0 and usable and (rewarded = 0) = (reward_min is null));
create index groups_in_order on groups (run_id, place) where place is not null;

-- Members released in the place of unusable ones.
create table refills (
    run_id      uuid        not null references runs,
    released_at timestamptz not null,
    session_id  uuid        not null,
    class       text        not null,
    replaces    uuid        not null unique,
    primary key (run_id, released_at, session_id)
);

alter table run_counters add column grouped_seq bigint not null default 0;
alter table run_counters add constraint run_counters_grouped check (grouped_seq >= 0);

-- A group is without signal if it has two usable members or more, all with one and
-- the same reward.
alter table class_counters add column groups_ended bigint not null default 0;
alter table class_counters add column groups_without_signal bigint not null default 0;
alter table class_counters add constraint class_counters_groups check (groups_without_signal between 0 and groups_ended);

-- The places count the order of whole groups, not that of completion.
alter table consumers add column grouped boolean not null default false;

-- What was released before this step.
update groups g set rewarded = r.n, reward_min = r.low, reward_max = r.high
from (select s.task_id, count(*) as n, min(m.reward) as low, max(m.reward) as high
      from samples m join sessions s using (session_id) where m.reward is not null group by s.task_id) r
where g.group_id = r.task_id;

update groups g set place = r.place, outcome = case when g.usable >= g.size then 'complete' else 'partial' end
from (select e.group_id, sum(e.members) over (partition by e.run_id order by l.last_seq) as place
      from groups e join (select s.task_id, max(m.seq) as last_seq from samples m join sessions s using (session_id) group by s.task_id) l
           on l.task_id = e.group_id
      where e.ended = e.members) r
where g.group_id = r.group_id;

update run_counters c set grouped_seq = r.place
from (select run_id, max(place) as place from groups where place is not null group by run_id) r where r.run_id = c.run_id;

update class_counters c set groups_ended = r.n, groups_without_signal = r.flat
from (select run_id, class, count(*) as n, count(*) filter (where usable > 1 and rewarded = usable and reward_min = reward_max) as flat
      from groups where place is not null group by run_id, class) r
where r.run_id = c.run_id and r.class = c.class;

-- +goose Down
alter table consumers drop column grouped;
alter table class_counters drop constraint class_counters_groups;
alter table class_counters drop column groups_without_signal;
alter table class_counters drop column groups_ended;
alter table run_counters drop constraint run_counters_grouped;
alter table run_counters drop column grouped_seq;
drop table refills;
drop index groups_in_order;
alter table groups
    drop constraint groups_rewarded,
    drop constraint groups_place,
    drop constraint groups_refills,
    drop column reward_max,
    drop column reward_min,
    drop column rewarded,
    drop column place,
    drop column outcome,
    drop column refills,
    drop column refills_allowed,
    drop column policy;
alter table contract_versions drop column spare_members;
alter table contract_versions drop column group_refills;
