package store

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// Retention says for how long what nobody needs any more is kept; 0 is for ever.
//
// A sample is done with once every consumer of its run has acknowledged it and all of
// its group has ended. A run without consumers keeps everything, until it has been over
// for EndedRuns. What is kept for good is a row per session, sample, task, group and
// batch, without tokens, prompt and metadata: all counters are recomputed from those.
type Retention struct {
	// Transcripts is how long after that the tokens, prompts, metadata and further
	// columns are kept; then the sample can be read no more.
	Transcripts time.Duration
	// History is how long after that events and turns are kept.
	History time.Duration
	// EndedRuns is how long after its end a run keeps what was not acknowledged.
	EndedRuns time.Duration
	// RouterEvents is how long decisions about instances are kept.
	RouterEvents time.Duration
}

// Pruned counts what was removed.
type Pruned struct {
	// Samples lost their transcripts, Histories their events and turns.
	Samples, Histories int64
	// Rows by table.
	Rows map[string]int64
}

// add counts another step.
func (p *Pruned) add(step Pruned) {
	p.Samples += step.Samples
	p.Histories += step.Histories
	for table, n := range step.Rows {
		if p.Rows == nil {
			p.Rows = map[string]int64{}
		}
		p.Rows[table] += n
	}
}

// pruneKind is what a step removes.
type pruneKind uint8

const (
	pruneTranscripts pruneKind = iota
	pruneHistory
)

const (
	// Runs of a pool with something left to prune, if it is old enough.
	selectPrunableSQL = `
select r.run_id from runs r join run_counters c using (run_id) join run_pruning p using (run_id)
where r.pool = $1 and (p.transcripts_seq < c.sample_seq or p.history_seq < c.sample_seq) order by r.created_at`

	// Whoever prunes a run already is not waited for.
	lockPruningSQL = `
select transcripts_seq, transcripts_place, history_seq from run_pruning where run_id = $1 for update skip locked`

	readPruningSQL = `select transcripts_seq, transcripts_place, history_seq from run_pruning where run_id = $1`

	// $2 is the age in seconds, $3 that of ended runs or null. For each order how far
	// every consumer had acknowledged by then; null where no consumer reads it.
	selectPruneLimitsSQL = `
select coalesce(r.ended_at < statement_timestamp() - make_interval(secs => $3), false),
       (select count(*) from consumers c where c.run_id = r.run_id),
       (select min(a.seq) from acked a where not a.grouped), (select min(a.seq) from acked a where a.grouped)
from runs r where r.run_id = $1`

	ackedBeforeSQL = `
with acked as (
    select c.grouped, greatest(c.start_seq, coalesce((
        select m.seq from consumer_marks m
        where m.run_id = c.run_id and m.consumer = c.consumer and m.kind = 'acknowledged' and m.at < statement_timestamp() - make_interval(secs => $2)
        order by m.seq desc limit 1), 0)) as seq
    from consumers c where c.run_id = $1
)`

	// The next samples in completion order, with their places in that of whole groups.
	selectPruneCandidatesSQL = `
select m.seq, m.session_id, s.task_id, g.members, g.place
from samples m join sessions s using (session_id) join groups g on g.group_id = s.task_id
where m.run_id = $1 and m.seq > $2 order by m.seq limit $3`

	selectHistoryPrunedSQL = `
select exists (select from samples m join run_pruning p using (run_id) where m.session_id = $1 and m.seq <= p.history_seq)`

	selectSeqsSQL = `select session_id, seq from samples where session_id = any($1)`

	deleteSegmentsSQL = `delete from segments where session_id = any($1)`
	deleteColumnsSQL  = `delete from sample_columns where session_id = any($1)`
	deleteEventsSQL   = `delete from session_events where session_id = any($1)`
	deleteTurnsSQL    = `delete from turns where session_id = any($1)`
	// What restarts left goes with what the session has.
	deleteAbandonedSegmentsSQL = `delete from abandoned_segments where session_id = any($1)`
	deleteAbandonedTurnsSQL    = `delete from abandoned_turns where session_id = any($1)`
	// What is left of a task is its name, class and sizes.
	emptyTasksSQL = `update tasks set spec = '{}', metadata = null, prompt_ids = null where task_id = any($1)`

	advanceTranscriptsSQL = `update run_pruning set transcripts_seq = $2, transcripts_place = greatest(transcripts_place, $3) where run_id = $1`
	advanceHistorySQL     = `update run_pruning set history_seq = $2 where run_id = $1`

	deleteRouterEventsSQL = `
delete from router_events where pool = $1 and seq in (
    select seq from router_events where pool = $1 and at < statement_timestamp() - make_interval(secs => $2) order by seq limit $3 for update skip locked)`
)

// PrunableRuns lists the pool's runs that have samples with something to prune,
// oldest first, whatever their age.
func (s *Store) PrunableRuns(ctx context.Context, pool string) ([]uuid.UUID, error) {
	rows, err := s.pool.Query(ctx, selectPrunableSQL, pool)
	if err != nil {
		return nil, fmt.Errorf("looking for runs to prune in pool %s: %w", pool, err)
	}
	runs, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return nil, fmt.Errorf("looking for runs to prune in pool %s: %w", pool, err)
	}
	return runs, nil
}

// Prune removes what the retention lets go of one run: one step, of at most limit
// samples' transcripts and as many histories, each in a short transaction that locks
// nothing that the run's sessions, readers or other pruners need. Nothing pruned means
// that nothing more is due, or that another process is at it.
func (s *Store) Prune(ctx context.Context, runID uuid.UUID, keep Retention, limit int) (Pruned, error) {
	var done Pruned
	for _, kind := range []pruneKind{pruneTranscripts, pruneHistory} {
		age := keep.age(kind)
		if age <= 0 {
			continue
		}
		var step Pruned
		err := s.write(ctx, func(tx pgx.Tx) (err error) {
			step, err = s.pruneStep(ctx, tx, pruning{runID: runID, kind: kind, age: age, endedRuns: keep.EndedRuns, limit: limit})
			return err
		})
		if err != nil {
			return done, fmt.Errorf("pruning run %s: %w", runID, err)
		}
		done.add(step)
	}
	return done, nil
}

func (r *Retention) age(kind pruneKind) time.Duration {
	if kind == pruneTranscripts {
		return r.Transcripts
	}
	return r.History
}

// pruning is one step's task.
type pruning struct {
	runID          uuid.UUID
	kind           pruneKind
	age, endedRuns time.Duration
	limit          int
}

// pruneLimits are how far a run may be pruned.
type pruneLimits struct {
	// over: the run has ended and nobody is waited for.
	over      bool
	consumers int
	// seq and place are nil where no consumer reads that order.
	seq, place *int64
}

// allow tells whether a sample at those numbers may go. Its group must be whole:
// a group that is still to be delivered keeps all of its members.
func (l *pruneLimits) allow(seq int64, place *int64) bool {
	switch {
	case place == nil:
		return false
	case l.over:
		return true
	case l.consumers == 0:
		return false
	}
	return (l.seq == nil || seq <= *l.seq) && (l.place == nil || *place <= *l.place)
}

func readPruneLimits(ctx context.Context, from queryer, p *pruning) (pruneLimits, error) {
	var l pruneLimits
	var ended *float64
	if p.endedRuns > 0 {
		seconds := p.endedRuns.Seconds()
		ended = &seconds
	}
	err := from.QueryRow(ctx, ackedBeforeSQL+selectPruneLimitsSQL, p.runID, p.age.Seconds(), ended).Scan(&l.over, &l.consumers, &l.seq, &l.place)
	return l, err
}

// pruneCandidate is a sample that may be next.
type pruneCandidate struct {
	Seq       int64
	SessionID uuid.UUID
	TaskID    uuid.UUID
	// Members of its group.
	Members int
	// Place is the group's, null while it is open.
	Place *int64
}

// pruneStep prunes the next samples in completion order, as far as they may go.
func (s *Store) pruneStep(ctx context.Context, tx pgx.Tx, p pruning) (Pruned, error) {
	var transcripts, place, history int64
	err := tx.QueryRow(ctx, lockPruningSQL, p.runID).Scan(&transcripts, &place, &history)
	if err == pgx.ErrNoRows {
		return Pruned{}, nil
	}
	if err != nil {
		return Pruned{}, err
	}
	from := transcripts
	if p.kind == pruneHistory {
		from = history
	}
	// A statement of its own sees every consumer that was there when the lock was had.
	limits, err := readPruneLimits(ctx, tx, &p)
	if err != nil {
		return Pruned{}, err
	}
	rows, err := tx.Query(ctx, selectPruneCandidatesSQL, p.runID, from, p.limit)
	if err != nil {
		return Pruned{}, err
	}
	due, err := pgx.CollectRows(rows, pgx.RowToStructByPos[pruneCandidate])
	if err != nil {
		return Pruned{}, err
	}
	for i := range due {
		if !limits.allow(due[i].Seq, due[i].Place) {
			due = due[:i]
			break
		}
	}
	if len(due) == 0 {
		return Pruned{}, nil
	}
	if p.kind == pruneHistory {
		return dropHistory(ctx, tx, p.runID, due)
	}
	return s.dropTranscripts(ctx, tx, p.runID, due)
}

func sessionsOf(due []pruneCandidate) []uuid.UUID {
	ids := make([]uuid.UUID, len(due))
	for i := range due {
		ids[i] = due[i].SessionID
	}
	return ids
}

func dropHistory(ctx context.Context, tx pgx.Tx, runID uuid.UUID, due []pruneCandidate) (Pruned, error) {
	done := Pruned{Histories: int64(len(due)), Rows: map[string]int64{}}
	ids := sessionsOf(due)
	batch := &pgx.Batch{}
	done.queue(batch, "session_events", deleteEventsSQL, ids)
	done.queue(batch, "turns", deleteTurnsSQL, ids)
	done.queue(batch, "abandoned_turns", deleteAbandonedTurnsSQL, ids)
	batch.Queue(advanceHistorySQL, runID, due[len(due)-1].Seq)
	return done, tx.SendBatch(ctx, batch).Close()
}

func (s *Store) dropTranscripts(ctx context.Context, tx pgx.Tx, runID uuid.UUID, due []pruneCandidate) (Pruned, error) {
	last := due[len(due)-1].Seq
	tasks, err := tasksDone(ctx, tx, due)
	if err != nil {
		return Pruned{}, err
	}
	lastPlace := int64(0)
	for i := range due {
		lastPlace = max(lastPlace, *due[i].Place)
	}
	done := Pruned{Samples: int64(len(due)), Rows: map[string]int64{}}
	ids := sessionsOf(due)
	if err := s.deleteBlobs(ctx, tx, ids); err != nil {
		return Pruned{}, err
	}
	batch := &pgx.Batch{}
	done.queue(batch, "segments", deleteSegmentsSQL, ids)
	done.queue(batch, "abandoned_segments", deleteAbandonedSegmentsSQL, ids)
	done.queue(batch, "sample_columns", deleteColumnsSQL, ids)
	batch.Queue(emptyTasksSQL, tasks)
	batch.Queue(advanceTranscriptsSQL, runID, last, lastPlace)
	return done, tx.SendBatch(ctx, batch).Close()
}

// queue deletes and counts.
func (p *Pruned) queue(batch *pgx.Batch, table, sql string, ids []uuid.UUID) {
	query := batch.Queue(sql, ids)
	query.Fn = func(results pgx.BatchResults) error {
		tag, err := results.Exec()
		p.Rows[table] += tag.RowsAffected()
		return err
	}
}

// tasksDone are the tasks of which the last member is among the candidates. All
// members of their groups have ended, and numbers that are not among them are either
// pruned already or still to come.
func tasksDone(ctx context.Context, tx pgx.Tx, due []pruneCandidate) ([]uuid.UUID, error) {
	last := due[len(due)-1].Seq
	var members []uuid.UUID
	taskOf := map[uuid.UUID]uuid.UUID{}
	open := map[uuid.UUID]bool{}
	for _, candidate := range due {
		if _, seen := open[candidate.TaskID]; seen {
			continue
		}
		open[candidate.TaskID] = false
		if candidate.Members == 1 {
			continue
		}
		for member := range candidate.Members {
			id := SessionID(candidate.TaskID, member)
			members, taskOf[id] = append(members, id), candidate.TaskID
		}
	}
	if len(members) > 0 {
		rows, err := tx.Query(ctx, selectSeqsSQL, members)
		if err != nil {
			return nil, err
		}
		var id uuid.UUID
		var seq int64
		if _, err := pgx.ForEachRow(rows, []any{&id, &seq}, func() error {
			open[taskOf[id]] = open[taskOf[id]] || seq > last
			return nil
		}); err != nil {
			return nil, err
		}
	}
	var tasks []uuid.UUID
	for id, stays := range open {
		if !stays {
			tasks = append(tasks, id)
		}
	}
	return tasks, nil
}

// Prunable counts the samples of a run whose transcripts, and those whose histories,
// the retention lets go now. It changes nothing. Open groups may hold back some.
func (s *Store) Prunable(ctx context.Context, runID uuid.UUID, keep Retention) (samples, histories int64, err error) {
	err = s.read(ctx, func(tx pgx.Tx) error {
		var transcripts, place, history int64
		if err := tx.QueryRow(ctx, readPruningSQL, runID).Scan(&transcripts, &place, &history); err != nil {
			return err
		}
		for _, part := range []struct {
			kind pruneKind
			from int64
			n    *int64
		}{{pruneTranscripts, transcripts, &samples}, {pruneHistory, history, &histories}} {
			age := keep.age(part.kind)
			if age <= 0 {
				continue
			}
			limits, err := readPruneLimits(ctx, tx, &pruning{runID: runID, kind: part.kind, age: age, endedRuns: keep.EndedRuns})
			if err != nil {
				return err
			}
			*part.n, err = countPrunable(ctx, tx, runID, part.from, &limits)
			if err != nil {
				return err
			}
		}
		return nil
	})
	return samples, histories, found(err, "counting what to prune of run", runID)
}

// countPrunable walks the candidates as Prune would.
func countPrunable(ctx context.Context, tx pgx.Tx, runID uuid.UUID, from int64, limits *pruneLimits) (n int64, err error) {
	const stride = 10_000
	for {
		rows, err := tx.Query(ctx, selectPruneCandidatesSQL, runID, from, stride)
		if err != nil {
			return n, err
		}
		due, err := pgx.CollectRows(rows, pgx.RowToStructByPos[pruneCandidate])
		if err != nil {
			return n, err
		}
		for i := range due {
			if !limits.allow(due[i].Seq, due[i].Place) {
				return n, nil
			}
			n++
		}
		if len(due) < stride {
			return n, nil
		}
		from = due[len(due)-1].Seq
	}
}

// PruneRouterEvents removes up to limit of the pool's decisions about instances that
// are older than keep, and returns how many.
func (s *Store) PruneRouterEvents(ctx context.Context, pool string, keep time.Duration, limit int) (int64, error) {
	tag, err := s.pool.Exec(ctx, deleteRouterEventsSQL, pool, keep.Seconds(), limit)
	if err != nil {
		return 0, fmt.Errorf("pruning the router events of pool %s: %w", pool, err)
	}
	return tag.RowsAffected(), nil
}

// HistoryPruned tells whether events and turns of a session are pruned.
func (s *Store) HistoryPruned(ctx context.Context, sessionID uuid.UUID) (gone bool, err error) {
	if err := s.pool.QueryRow(ctx, selectHistoryPrunedSQL, sessionID).Scan(&gone); err != nil {
		return false, fmt.Errorf("looking whether the history of session %s is pruned: %w", sessionID, err)
	}
	return gone, nil
}
