package store_test

import (
	"errors"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/router"
	"holdfast/store"
)

// TestConstraintsBite: the schema itself refuses states that must not be, whoever
// writes them.
func TestConstraintsBite(t *testing.T) {
	f := newFixture(t, 10)
	f.submit("one", repeat("agent", 4)...)
	ids := f.dispatch()
	f.decide(f.admit(ids[0], 0, "w1"), f.hold(ids[1], 0, router.AtCap))
	f.commit(ids[0], 0)
	f.save(checkpoint(ids[0], 1, 0, 3, 1, uuid.Nil))
	f.end(ids[2], router.Completed)
	f.samples(store.SampleQuery{Consumer: "trainer"})
	conn := f.conn()
	const check, unique, foreign, notNull = "23514", "23505", "23503", "23502"
	for _, test := range []struct{ statement, code string }{
		{`update class_counters set released = released + 1`, check},
		{`update class_counters set queued = queued - 1, live = live + 1 where class = 'agent'`, check},
		{`update class_counters set completed = completed + 1`, check},
		{`update class_counters set completed = completed + 1, ended = ended + 1`, check},
		{`update run_counters set sample_seq = sample_seq + 1`, check},
		{`update run_counters set live = live - 1`, check},
		{`update batches set queued = 5`, check},
		{`update sessions set state = 'ended' where state = 'active'`, check},
		{`update sessions set status = 'completed' where state = 'active'`, check},
		{`update sessions set state = 'done'`, check},
		{`update sessions set state = 'queued' where state = 'active'`, check},
		{`update sessions set dispatched_at = null where state = 'active'`, check},
		{`update sessions set status = null where state = 'ended'`, check},
		{`update sessions set hold_reason = null where state = 'held'`, check},
		{`update sessions set held_since = null where state = 'held'`, check},
		{`update sessions set held_since = now() where state = 'active'`, check},
		{`update sessions set granted_turn = 3 where state = 'held'`, check},
		{`update sessions set granted_turn = 0, granted_at = now() where state = 'active'`, check},
		{`update sessions set instance = 'w1' where state = 'ended'`, check},
		{`update sessions set cached_tokens = prompt_tokens + 1`, check},
		{`update sessions set first_admitted_at = null where state = 'active'`, check},
		{`update groups set ended = members + 1`, check},
		{`update groups set usable = ended + 1`, check},
		{`update groups set refills = 1`, check},
		{`update groups set place = members where ended < members`, check},
		{`update groups set rewarded = 1 where usable = 1`, check},
		{`update class_counters set groups_without_signal = groups_ended + 1`, check},
		{`update samples set reward = 'NaN'`, check},
		{`update samples set reward = '-Infinity'`, check},
		{`update samples set reward = 'Infinity'`, check},
		{`update samples set status = 'failed', reward = 0`, check},
		{`insert into samples select run_id, 2, session_id, class, status, reward, score_detail, score_seconds, finish_reason, problem, tokens, ended_at from samples`, unique},
		{`insert into turns select * from turns`, unique},
		{`insert into segments select * from segments`, unique},
		{`update segments set kind = 'prompt' where logprobs is not null`, check},
		{`update turn_checkpoints set previous = gen_random_uuid()`, check},
		{`update turn_checkpoints set start_tokens = 1`, check},
		{`update turn_checkpoints set tokens = 0`, check},
		{`insert into turn_checkpoints select * from turn_checkpoints`, unique},
		{`update consumers set acked_seq = delivered_seq + 1`, check},
		{`insert into runs (run_id, pool, name, state, contract_version) values (gen_random_uuid(), 'main', 'x', 'active', 1)`, unique},
		{`update runs set state = 'ended'`, check},
		{`insert into runs (run_id, pool, name, state, contract_version) values (gen_random_uuid(), 'nowhere', 'x', 'active', 1)`, foreign},
		{`update contract_classes set share = 'NaN'`, check},
		{`update contract_versions set max_concurrency = 0`, check},
		{`insert into batches select gen_random_uuid(), pool, run_id, seq, 'k2', body_sha256, policy_version, tasks, sessions, classes, next_ordinal, queued, created_at from batches`, unique},
		{`insert into batches select gen_random_uuid(), pool, run_id, 2, idempotency_key, body_sha256, policy_version, tasks, sessions, classes, next_ordinal, queued, created_at from batches`, unique},
		{`update batches set body_sha256 = 'short'`, check},
		{`insert into outbox (pool, run_id, session_id, kind) select pool, run_id, session_id, 'grant' from sessions`, check},
		{`insert into session_events (session_id, seq, run_id, at, kind) select session_id, 1, run_id, now(), 'ended' from sessions`, unique},
		{`insert into instances select 'main', 'w9', url, kind, 0, 16, 1, 0, 0, 0, 0, 'active', now(), now() from instances`, check},
		{`update pool_owners set epoch = 0`, check},
		{`update sessions set run_id = null`, notNull},
	} {
		_, err := conn.Exec(t.Context(), test.statement)
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != test.code {
			t.Errorf("%s: %v, want a violation %s", test.statement, err, test.code)
		}
	}
	f.verify()
}
