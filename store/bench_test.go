package store_test

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
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

// BenchmarkLargeRun reads a run of 100,000 samples and a million events.
func BenchmarkLargeRun(b *testing.B) {
	f := newFixture(b, store.MaxConcurrency)
	f.fill(100_000, 9)
	ctx := b.Context()
	var middle uuid.UUID
	must(b, f.conn().QueryRow(ctx, `select session_id from samples where seq = 50000`).Scan(&middle))
	page, err := f.Samples(ctx, store.SampleQuery{RunID: f.run.ID, Limit: 1_000})
	must(b, err)
	window := store.LastSeconds(600)
	for _, read := range []struct {
		name string
		do   func() error
	}{
		{"backlog", func() error { _, err := f.Backlog(ctx, f.run.ID); return err }},
		{"mixture", func() error { _, err := f.Mixture(ctx, f.run.ID, store.Window{}); return err }},
		{"mixture-ten-minutes", func() error { _, err := f.Mixture(ctx, f.run.ID, window); return err }},
		{"metrics-ten-minutes", func() error { _, err := f.Metrics(ctx, f.run.ID, window); return err }},
		{"metrics-whole", func() error { _, err := f.Metrics(ctx, f.run.ID, store.Window{}); return err }},
		{"session", func() error { _, err := f.Session(ctx, middle); return err }},
		{"history", func() error { _, err := f.SessionEvents(ctx, middle, 0, 1_000); return err }},
		{"samples-100", func() error {
			_, err := f.Samples(ctx, store.SampleQuery{RunID: f.run.ID, After: page.Next, Limit: 100, WithTokens: true})
			return err
		}},
		{"sessions-live-100", func() error {
			_, err := f.Sessions(ctx, store.SessionQuery{RunID: f.run.ID, State: store.SessionActive})
			return err
		}},
	} {
		b.Run(read.name, func(b *testing.B) {
			var times []float64
			for b.Loop() {
				began := time.Now()
				must(b, read.do())
				times = append(times, time.Since(began).Seconds()*1e3)
			}
			slices.Sort(times)
			b.ReportMetric(times[len(times)*95/100], "p95-ms")
		})
	}
}

// fill gives the run n sessions that ended over the last two hours, one a batch of
// a hundred, each with that many turns of three tokens and as many admissions.
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
		 select session_id, 'main', $1::uuid, batch_id, task_id, 0, class, i % 100, 0, 'ended', 'completed', $3::int, 100, 50, 2 * $3::int, 3, 2 * $3::int + 3,
		        ended_at - interval '1 minute', ended_at - interval '1 minute', ended_at from filled where $2::int > 0`,
		`insert into turns select session_id, k, $1::uuid, 2 * k + 4, 'w1', 1, 0, 10, 5, 5, 2, 0, ended_at, ended_at, 0, 0, 0, 0, 0, 'length', 1
		 from filled, generate_series(0, $3::int - 1) k where $2::int > 0`,
		`insert into session_events select session_id, 2 * k + 3, $1::uuid, ended_at, 'admitted', '{"turn":1,"reason":"continuation","instance":"w1","numbers":{"cap":4}}'
		 from filled, generate_series(0, $3::int) k where $2::int > 0`,
		`insert into samples (run_id, seq, session_id, class, status, tokens, ended_at) select $1::uuid, i + 1, session_id, class, 'completed', 3, ended_at from filled where $2::int > 0 and $3::int > 0`,
		`insert into class_counters (run_id, class, released, completed, ended) select $1::uuid, class, count(*), count(*), count(*) from filled where $2::int > 0 and $3::int > 0 group by class
		 on conflict (run_id, class) do update set released = excluded.released, completed = excluded.completed, ended = excluded.ended`,
		`update run_counters set released = $2::int, sample_seq = $2::int, batch_seq = $2::int / 100 where run_id = $1::uuid and $3::int > 0`,
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
	for _, id := range ids[300:] {
		f.decide(f.hold(id, 0, router.AtCap))
	}
}
