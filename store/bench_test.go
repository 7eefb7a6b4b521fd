package store_test

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
)

// BenchmarkTurn is what one turn costs the store with 32 sessions at a time: its
// admission recorded, together with those that arrived meanwhile, as a pool's loop
// does; its grant read; a turn of 148 tokens with log-probabilities committed.
func BenchmarkTurn(b *testing.B) {
	const sessions = 32
	f := newFixture(b, sessions)
	f.submit("bench", repeat("agent", sessions)...)
	ids := f.dispatch()
	tokens := make([]int32, 148)
	logprobs := make([]float32, len(tokens))
	for i := range tokens {
		tokens[i], logprobs[i] = int32(i*7919%150_000), -float32(i)/37
	}
	requests := make(chan turnRequest, sessions)
	go f.recordRequests(requests)
	var next atomic.Int64
	b.SetParallelism(sessions / 2)
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		id := ids[int(next.Add(1)-1)%sessions]
		for number := 0; pb.Next(); number++ {
			request := turnRequest{id: id, turn: number, recorded: make(chan error, 1)}
			requests <- request
			if err := <-request.recorded; err != nil {
				b.Error(err)
				return
			}
			if _, ok, err := f.Grant(b.Context(), id, number); err != nil || !ok {
				b.Errorf("grant of turn %d: %v, %v", number, ok, err)
				return
			}
			commit := turn(id, number)
			commit.Generated, commit.Logprobs, commit.Appended = tokens, logprobs, tokens[:100]
			if _, err := f.CommitTurn(b.Context(), commit); err != nil {
				b.Error(err)
				return
			}
		}
	})
	close(requests)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "turns/s")
}

type turnRequest struct {
	id       uuid.UUID
	turn     int
	recorded chan error
}

// recordRequests admits what waits, all in one transaction, until requests is closed.
func (f *fixture) recordRequests(requests <-chan turnRequest) {
	for first := range requests {
		round := []turnRequest{first}
		for waiting := len(requests); waiting > 0; waiting-- {
			round = append(round, <-requests)
		}
		records := make([]store.DecisionRecord, len(round))
		for i, request := range round {
			records[i] = store.DecisionRecord{Decision: router.Decision{Kind: router.Admit, Reason: router.Continuation, At: time.Now().UnixNano(),
				Session: router.SessionID(request.id), Turn: request.turn, Instance: "w1", Numbers: router.Numbers{Cap: 4, Protected: 3, PromptTokens: 4_000, CostSeconds: 0.1}}}
		}
		err := f.RecordDecisions(f.t.Context(), pool, f.epoch, records)
		for _, request := range round {
			request.recorded <- err
		}
	}
}

// BenchmarkDecisions is what one of 32 decisions costs that are recorded together.
func BenchmarkDecisions(b *testing.B) {
	const sessions = 32
	f := newFixture(b, sessions)
	f.submit("bench", repeat("agent", sessions)...)
	ids := f.dispatch()
	reasons := []router.Reason{router.AtCap, router.NoBlocks}
	b.ResetTimer()
	for n := range b.N / sessions {
		records := make([]store.DecisionRecord, 0, sessions)
		for _, id := range ids {
			records = append(records, f.hold(id, 0, reasons[n%2]))
		}
		must(b, f.RecordDecisions(b.Context(), pool, f.epoch, records))
	}
}

// BenchmarkEndSession is what one ending costs; endings of a run take turns.
func BenchmarkEndSession(b *testing.B) {
	f := newFixture(b, store.MaxConcurrency)
	var ids []uuid.UUID
	for n := 0; len(ids) < b.N; n++ {
		f.submit(fmt.Sprint("bench ", n), repeat("agent", min(b.N-len(ids), 10_000))...)
		_, err := f.DispatchQueued(b.Context(), f.run.ID, 10_000)
		must(b, err)
		ids = ids[:0]
		must(b, f.conn().QueryRow(b.Context(), `select array_agg(session_id) from sessions`).Scan(&ids))
	}
	b.ResetTimer()
	for i := range b.N {
		f.end(ids[i], router.Completed)
	}
}

// BenchmarkLargeRun reads a run of 100,000 samples and 1.9 million entries of sessions'
// histories, a million of them events: alone, and while a pruner works beside it.
func BenchmarkLargeRun(b *testing.B) {
	f := newFixture(b, store.MaxConcurrency)
	f.fill(100_000, 9)
	f.verify()
	reads := f.largeReads()
	for _, read := range reads {
		b.Run(read.name, func(b *testing.B) { measure(b, read.do) })
	}
	pruned, stop := f.pruneBeside()
	for _, read := range reads {
		b.Run("pruning/"+read.name, func(b *testing.B) {
			before := pruned.Load()
			measure(b, read.do)
			b.ReportMetric(float64(pruned.Load()-before)/b.Elapsed().Seconds(), "pruned/s")
		})
	}
	stop()
	f.verify()
}

// measure reports the 95th percentile of what do takes.
func measure(b *testing.B, do func() error) {
	var times []float64
	for b.Loop() {
		began := time.Now()
		must(b, do())
		times = append(times, time.Since(began).Seconds()*1e3)
	}
	slices.Sort(times)
	b.ReportMetric(times[len(times)*95/100], "p95-ms")
}

type namedRead struct {
	name string
	do   func() error
}

// largeReads read near the end of the run, which is pruned last.
func (f *fixture) largeReads() []namedRead {
	f.t.Helper()
	ctx := f.t.Context()
	var session uuid.UUID
	must(f.t, f.conn().QueryRow(ctx, `select session_id from samples where seq = 95000`).Scan(&session))
	near, err := storetest.SampleOf(ctx, f.Store, session)
	must(f.t, err)
	var batch uuid.UUID
	must(f.t, f.conn().QueryRow(ctx, `select batch_id from samples join sessions using (session_id) where seq = 95001`).Scan(&batch))
	window := store.LastSeconds(600)
	page := func(query store.SampleQuery) func() error {
		query.RunID = f.run.ID
		return func() error { _, err := f.Samples(ctx, query); return err }
	}
	return []namedRead{
		{"backlog", func() error { _, err := f.Backlog(ctx, f.run.ID); return err }},
		{"pace", func() error { _, err := f.Pace(ctx, f.run.ID); return err }},
		{"back-pressure", func() error { _, err := f.BackPressure(ctx, f.run.ID); return err }},
		{"mixture", func() error { _, err := f.Mixture(ctx, f.run.ID, store.Window{}); return err }},
		{"mixture-ten-minutes", func() error { _, err := f.Mixture(ctx, f.run.ID, window); return err }},
		{"metrics-ten-minutes", func() error { _, err := f.Metrics(ctx, f.run.ID, window); return err }},
		{"metrics-whole", func() error { _, err := f.Metrics(ctx, f.run.ID, store.Window{}); return err }},
		{"session", func() error { _, err := f.Session(ctx, session); return err }},
		{"history", func() error { _, err := f.SessionEvents(ctx, session, 0, 1_000); return err }},
		{"audit", func() error { _, err := f.Audit(ctx, session); return err }},
		{"samples-100", page(store.SampleQuery{After: near.Cursor, Limit: 100, WithTokens: true})},
		{"samples-100-of-a-batch", page(store.SampleQuery{BatchID: &batch, After: near.Cursor, Limit: 100, WithTokens: true})},
		{"sessions-live-100", func() error {
			_, err := f.Sessions(ctx, store.SessionQuery{RunID: f.run.ID, State: store.SessionActive})
			return err
		}},
	}
}

// pruneBeside prunes as the owner of a pool does, in small steps, until it is stopped
// or everything acknowledged is gone.
func (f *fixture) pruneBeside() (pruned *atomic.Int64, stop func()) {
	ctx, cancel := context.WithCancel(f.t.Context())
	pruned, done := &atomic.Int64{}, make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			step, err := f.Prune(ctx, f.run.ID, store.Retention{Transcripts: time.Nanosecond, History: time.Nanosecond}, 100)
			if err != nil {
				if ctx.Err() == nil {
					f.t.Error(err)
				}
				return
			}
			if step.Samples == 0 {
				return
			}
			pruned.Add(step.Samples)
			select {
			case <-ctx.Done():
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	return pruned, func() {
		cancel()
		<-done
	}
}

// fill gives the run n sessions that ended over the last two hours, a hundred a batch,
// each with that many turns, an admission before each and after the last one, a segment
// of a thousand tokens with log-probabilities, and a consumer that has acknowledged nine
// tenths of them.
func (f *fixture) fill(n, turns int) {
	f.t.Helper()
	conn := f.conn()
	for _, statement := range []string{
		`create temp table filled as select i, md5('s' || i)::uuid as session_id, md5('t' || i)::uuid as task_id, md5('b' || i / 100)::uuid as batch_id,
		        (array['agent', 'rlvr', 'rlhf'])[1 + i % 3] as class, now() - interval '2 hours' * (1 - i::float8 / $2::int) as ended_at
		 from generate_series(0, $2::int - 1) i where $1::uuid is not null and $3::int > 0`,
		`insert into batches (batch_id, pool, run_id, seq, idempotency_key, body_sha256, policy_version, tasks, sessions, classes, next_ordinal, queued, created_at)
		 select batch_id, 'main', $1::uuid, i / 100 + 1, i::text, sha256('x'), 0, 100, 100, '{"agent": 34, "rlvr": 33, "rlhf": 33}', 100, 0, ended_at - interval '1 minute'
		 from filled where i % 100 = 0 and $2::int > 0 and $3::int > 0`,
		`insert into tasks (task_id, pool, run_id, batch_id, ordinal, external_id, class, group_size, spec, prompt_tokens)
		 select task_id, 'main', $1::uuid, batch_id, i % 100, '', class, 1, '{"class":"agent","prompt":{"synthetic":{"tokens":3,"seed":1}}}', 3 from filled where $2::int > 0 and $3::int > 0`,
		`insert into sessions (session_id, pool, run_id, batch_id, task_id, member, class, dispatch_ordinal, policy_version, state, status, turns,
		                       prompt_tokens, cached_tokens, output_tokens, context_tokens, event_seq, released_at, dispatched_at, ended_at)
		 select session_id, 'main', $1::uuid, batch_id, task_id, 0, class, i % 100, 0, 'ended', 'completed', $3::int, 100, 50, 2 * $3::int, 1003, 2 * $3::int + 1,
		        ended_at - interval '1 minute', ended_at - interval '1 minute', ended_at from filled where $2::int > 0`,
		`insert into turns (session_id, turn, run_id, event_seq, instance, epoch, policy_version, prompt_tokens, predicted_cached_tokens, cached_tokens, output_tokens, appended_tokens,
		                    started_at, committed_at, queue_seconds, prefill_seconds, decode_seconds, total_seconds, tool_seconds, finish_reason, attempts)
		 select session_id, k, $1::uuid, 2 * k + 2, 'w1', 1, 0, 10, 5, 5, 2, 0, ended_at, ended_at, 0, 0, 0, 0, 0, 'length', 1
		 from filled, generate_series(0, $3::int - 1) k where $2::int > 0`,
		`insert into session_events select session_id, 2 * k + 1, $1::uuid, ended_at, 'admitted', '{"turn":1,"reason":"continuation","instance":"w1","numbers":{"cap":4}}'
		 from filled, generate_series(0, $3::int) k where $2::int > 0`,
		`insert into samples (run_id, seq, session_id, class, status, tokens, ended_at) select $1::uuid, i + 1, session_id, class, 'completed', 1003, ended_at from filled where $2::int > 0 and $3::int > 0`,
		`insert into groups (group_id, pool, run_id, batch_id, class, size, members, ended, usable, outcome, place)
		 select task_id, 'main', $1::uuid, batch_id, class, 1, 1, 1, 1, 'complete', i + 1 from filled where $2::int > 0 and $3::int > 0`,
		`insert into consumers (run_id, consumer, delivered_seq, acked_seq) select $1::uuid, 'trainer', $2::int, $2::int / 10 * 9 where $3::int > 0`,
		`insert into consumer_marks (run_id, consumer, kind, seq, at) select $1::uuid, 'trainer', 'acknowledged', k * 100, now() - interval '1 hour'
		 from generate_series(1, $2::int / 1000 * 9) k where $3::int > 0`,
		`insert into consumer_classes (run_id, consumer, class, consumed) select $1::uuid, 'trainer', class, count(*) from filled where i < $2::int / 10 * 9 and $3::int > 0 group by class`,
		`insert into class_counters (run_id, class, released, completed, ended, groups_ended) select $1::uuid, class, count(*), count(*), count(*), count(*) from filled where $2::int > 0 and $3::int > 0 group by class
		 on conflict (run_id, class) do update set released = excluded.released, completed = excluded.completed, ended = excluded.ended, groups_ended = excluded.groups_ended`,
		`update run_counters set released = $2::int, sample_seq = $2::int, grouped_seq = $2::int, batch_seq = $2::int / 100 where run_id = $1::uuid and $3::int > 0`,
		`update runs set created_at = now() - interval '3 hours' where run_id = $1::uuid and $2::int > 0 and $3::int > 0`,
		`analyze`,
	} {
		args := []any{f.run.ID, n, turns}
		if statement == `analyze` {
			args = nil
		}
		_, err := conn.Exec(f.t.Context(), statement, args...)
		must(f.t, err)
	}
	f.submit("live", repeat("agent", 500)...)
	ids := f.dispatch()
	for _, id := range ids[:300] {
		f.decide(f.admit(id, 0, "w1"))
	}
	commit := turn(ids[0], 0)
	commit.Generated, commit.Logprobs = nil, nil
	for i := range 1_000 {
		commit.Generated, commit.Logprobs = append(commit.Generated, int32(i*7919%150_000)), append(commit.Logprobs, -float32(i)/37)
	}
	_, err := f.CommitTurn(f.t.Context(), commit)
	must(f.t, err)
	_, err = conn.Exec(f.t.Context(), `
		insert into segments (session_id, turn, part, run_id, kind, policy_version, start_tokens, tokens, ids, logprobs)
		select f.session_id, 0, 0, s.run_id, s.kind, 0, 3, s.tokens, s.ids, s.logprobs from filled f, segments s where s.session_id = $1`, ids[0])
	must(f.t, err)
	for _, id := range ids[300:] {
		f.decide(f.hold(id, 0, router.AtCap))
	}
}
