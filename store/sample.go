package store

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"holdfast/router"
)

// Sample is the finished product of one session. Sessions of every status have
// one, so that a trainer which counts samples never waits for ever.
type Sample struct {
	// Seq is the place in the run's completion order, from 1 without gaps; Cursor
	// is the opaque place in the order that was asked for.
	Seq            int64
	Cursor         Cursor
	SessionID      uuid.UUID
	RunID          uuid.UUID
	BatchID        uuid.UUID
	TaskID         uuid.UUID // the group's id as well
	ExternalTaskID string
	Member         int
	GroupSize      int
	// GroupMembers counts spare and refilled members too; GroupOutcome is empty
	// until it is known.
	GroupMembers int
	GroupOutcome GroupOutcome
	Class        string
	Status       router.EndStatus
	Reward       *float64
	ScoreDetail  json.RawMessage
	FinishReason string
	Problem      string
	// PolicyVersion is the one of the release; the other two span the turns and
	// equal it in a session without turns.
	PolicyVersion    int64
	MinPolicyVersion int64
	MaxPolicyVersion int64
	// Staleness is how many policy versions the pool was ahead of MinPolicyVersion
	// when the session ended; 0 without turns.
	Staleness int64
	// OverBound: it is usable and Staleness is beyond the contract's bound.
	OverBound bool
	// Restarts counts how often the session was begun again under new weights.
	Restarts        int
	Usage           Usage
	Times           Times
	Instances       []string
	Metadata        json.RawMessage
	ReleasedAt      time.Time
	FirstAdmittedAt *time.Time
	EndedAt         time.Time
	// ColumnBytes is the size of the further columns, which are there if tokens are.
	ColumnBytes int64
	Columns     []Column
	// Tokens is nil unless asked for.
	Tokens *SampleTokens
}

// SampleQuery asks for samples in completion order, or in that of whole groups.
type SampleQuery struct {
	RunID uuid.UUID
	// Consumer names who reads, such as "trainer"; empty reads without a trace.
	Consumer string
	// After is where the last page ended, or any earlier place, such as a trainer's
	// checkpoint has; empty means the consumer's acknowledged place, or Start.
	After Cursor
	// Start is where to begin without After: a consumer that is known goes on from its
	// place whatever Start says.
	Start Start
	// BatchID narrows to one batch. It stands with neither Consumer nor WholeGroups:
	// acknowledging such a page would pass over the other batches' samples.
	BatchID *uuid.UUID
	// Limit is at most 1,000; 0 means 100.
	Limit int
	// MaxBytes bounds the packed size of the page's tokens (9 bytes a token) and columns if
	// they are asked for; a page holds at least one sample. 0 means 64 MiB.
	MaxBytes int64
	// Statuses to return; empty means all.
	Statuses   []router.EndStatus
	WithTokens bool
	// WholeGroups asks for samples of groups whose members have all ended, group by
	// group in the order in which they did, members by number. A page ends with a
	// group unless its first one does not fit. A consumer keeps to one of the orders.
	WholeGroups bool
}

const (
	defaultPageBytes = 64 << 20
	// packedTokenBytes is an int32 id, a float32 log-probability and a mask byte.
	packedTokenBytes = 4 + 4 + 1
)

// SamplePage is a piece of a run's samples.
type SamplePage struct {
	Samples []Sample
	// Next continues after this page, also when it is empty.
	Next Cursor
	// More: a further page is ready now.
	More bool
}

const (
	sampleColumns = `
select m.seq, m.session_id, m.run_id, s.batch_id, s.task_id, t.external_id, s.member, t.group_size, coalesce(g.members, t.group_size), coalesce(g.outcome, ''), m.class, m.status,
       m.reward, m.score_detail, m.finish_reason, m.problem,
       s.policy_version, coalesce(s.min_policy_version, s.policy_version), coalesce(s.max_policy_version, s.policy_version), m.staleness, m.over_bound, s.restarts,
       s.turns, s.prompt_tokens, s.cached_tokens, s.output_tokens, m.tokens, s.token_seconds,
       s.rewrites, s.earlier_tokens, s.resumes, s.tokens_regenerated, s.held_seconds, s.residency_seconds, s.queue_seconds, s.prefill_seconds, s.decode_seconds, s.tool_seconds, m.score_seconds,
       s.instances, t.metadata, s.released_at, s.first_admitted_at, m.ended_at,
       (select coalesce(sum(c.size_bytes), 0)::bigint from sample_columns c where c.session_id = m.session_id)
from samples m join sessions s using (session_id) join tasks t using (task_id) left join groups g on g.group_id = s.task_id`

	selectSampleOfSQL = sampleColumns + ` where m.session_id = $1`

	selectSamplesSQL = sampleColumns + `
where m.run_id = $1 and m.seq > $2 and m.seq <= $3 and ($4::text[] is null or m.status = any($4)) order by m.seq limit $5`

	selectBatchSamplesSQL = sampleColumns + `
where s.batch_id = $6 and m.run_id = $1 and m.seq > $2 and m.seq <= $3 and ($4::text[] is null or m.status = any($4)) order by m.seq limit $5`

	selectPlaceSQL = `
select case when $3 then r.grouped_seq else r.sample_seq end, coalesce(c.delivered_seq, 0), coalesce(c.acked_seq, 0), coalesce(c.grouped, $3),
       case when $3 then p.transcripts_place else p.transcripts_seq end, c.consumer is not null
from run_counters r join run_pruning p using (run_id) left join consumers c on c.run_id = r.run_id and c.consumer = $2 where r.run_id = $1`

	// A first delivery leaves a mark; a repeated one does not. The lock keeps the
	// pruner from passing $5, after which the page began, before it sees the consumer.
	// $6 is where a new consumer starts. Nothing counted means that it has passed.
	deliverSQL = `
with kept as (
    select from run_pruning where run_id = $1 and case when $4 then transcripts_place else transcripts_seq end <= $5 for share
), delivered as (
    insert into consumers as c (run_id, consumer, delivered_seq, acked_seq, start_seq, grouped) select $1, $2, $3, $6, $6, $4 from kept
    on conflict (run_id, consumer) do update set delivered_seq = excluded.delivered_seq, updated_at = statement_timestamp()
    where c.delivered_seq < excluded.delivered_seq and c.grouped = excluded.grouped
    returning delivered_seq, start_seq
), marked as (
    insert into consumer_marks (run_id, consumer, kind, seq, at)
    select $1, $2, 'delivered', delivered_seq, statement_timestamp() from delivered where delivered_seq > start_seq
)
select count(*) from kept`
)

// Samples returns the next page and notes the delivery. A page holds what was
// durable when it was read, without gaps: nothing can later appear before its
// end. Errors: ErrUnknownCursor, ErrNotFound, *FieldError for the consumer's name or a
// batch that cannot be asked for, *ConflictError for a consumer that reads in the other
// order, *PrunedError for a place of which the samples are gone.
func (s *Store) Samples(ctx context.Context, query SampleQuery) (SamplePage, error) {
	if query.Consumer != "" && !classPattern.MatchString(query.Consumer) {
		return SamplePage{}, &FieldError{Path: "consumer", Problem: fmt.Sprintf("must be 1 to 64 letters, digits, dots, dashes or underscores, is %q", query.Consumer)}
	}
	if query.BatchID != nil && (query.Consumer != "" || query.WholeGroups) {
		return SamplePage{}, &FieldError{Path: "batch", Problem: "must stand without consumer and without groups: acknowledging one batch's page would pass over the samples of others"}
	}
	var page SamplePage
	var place readPlace
	var last int64
	err := s.read(ctx, func(tx pgx.Tx) (err error) {
		if place, err = readPlaceOf(ctx, tx, &query); err != nil {
			return err
		}
		if query.WholeGroups {
			page, last, err = readGroupPage(ctx, tx, query, place.after, place.end)
		} else {
			page, last, err = readSamplePage(ctx, tx, query, place.after, place.end)
		}
		if err == nil && query.WithTokens {
			err = s.loadColumns(ctx, tx, page.Samples)
		}
		return err
	})
	if err != nil {
		return SamplePage{}, found(err, "reading the samples of run", query.RunID)
	}
	if query.Consumer != "" && (last > place.delivered || !place.known) {
		if err := s.deliver(ctx, &query, &place, last); err != nil {
			return SamplePage{}, fmt.Errorf("noting a delivery of run %s: %w", query.RunID, err)
		}
	}
	return page, nil
}

// deliver notes that the query's consumer has been given what is up to last.
func (s *Store) deliver(ctx context.Context, query *SampleQuery, place *readPlace, last int64) error {
	var kept int
	err := s.pool.QueryRow(ctx, deliverSQL, query.RunID, query.Consumer, last, query.WholeGroups, place.after, place.start).Scan(&kept)
	switch {
	case err != nil:
		return err
	case kept == 0:
		return s.prunedMeanwhile(ctx, query)
	case place.known:
		return nil
	}
	// A paused run may have waited for a reader of just this order.
	_, err = s.pool.Exec(ctx, notifySQL, string(DispatchTopic()))
	return err
}

// statuses are as they are stored; nil means all.
func (q *SampleQuery) statuses() (names []string) {
	for _, status := range q.Statuses {
		names = append(names, status.String())
	}
	return names
}

// readSamplePage returns the page in (after, end] and the place where it ends.
func readSamplePage(ctx context.Context, tx pgx.Tx, query SampleQuery, after, end int64) (SamplePage, int64, error) {
	limit := pageLimit(query.Limit)
	sql, args := selectSamplesSQL, []any{query.RunID, after, end, query.statuses(), limit + 1}
	if query.BatchID != nil {
		sql, args = selectBatchSamplesSQL, append(args, *query.BatchID)
	}
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return SamplePage{}, 0, err
	}
	samples, err := pgx.CollectRows(rows, scanSample)
	if err != nil {
		return SamplePage{}, 0, err
	}
	fit := pageFit(samples, limit, query)
	page := SamplePage{Samples: samples[:fit], More: fit < len(samples)}
	// A page that holds all there is ends at the end, also past samples of other
	// statuses than those asked for.
	last := end
	if page.More {
		last = samples[fit-1].Seq
	}
	page.Next = cursorOf(query.RunID, false, last)
	if query.WithTokens {
		if err := loadTokens(ctx, tx, page.Samples); err != nil {
			return SamplePage{}, 0, err
		}
	}
	return page, last, nil
}

// pageFit is how many of the samples fit the page's limits, at least one.
func pageFit(samples []Sample, limit int, query SampleQuery) int {
	maxBytes := query.MaxBytes
	if maxBytes <= 0 {
		maxBytes = defaultPageBytes
	}
	bytes := int64(0)
	for i := range samples {
		if i == limit {
			return i
		}
		if query.WithTokens {
			bytes += (samples[i].Usage.ContextTokens + samples[i].Usage.EarlierTokens) * packedTokenBytes
			bytes += samples[i].ColumnBytes
		}
		if i > 0 && bytes > maxBytes {
			return i
		}
	}
	return len(samples)
}

func scanSample(row pgx.CollectableRow) (Sample, error) {
	var x Sample
	var status string
	err := row.Scan(&x.Seq, &x.SessionID, &x.RunID, &x.BatchID, &x.TaskID, &x.ExternalTaskID, &x.Member, &x.GroupSize, &x.GroupMembers, &x.GroupOutcome, &x.Class, &status,
		&x.Reward, &x.ScoreDetail, &x.FinishReason, &x.Problem,
		&x.PolicyVersion, &x.MinPolicyVersion, &x.MaxPolicyVersion, &x.Staleness, &x.OverBound, &x.Restarts,
		&x.Usage.Turns, &x.Usage.PromptTokens, &x.Usage.CachedTokens, &x.Usage.OutputTokens, &x.Usage.ContextTokens, &x.Usage.TokenSeconds,
		&x.Usage.Rewrites, &x.Usage.EarlierTokens, &x.Usage.Resumes, &x.Usage.TokensRegenerated,
		&x.Times.HeldSeconds, &x.Times.ResidencySeconds, &x.Times.QueueSeconds, &x.Times.PrefillSeconds, &x.Times.DecodeSeconds, &x.Times.ToolSeconds, &x.Times.ScoreSeconds,
		&x.Instances, &x.Metadata, &x.ReleasedAt, &x.FirstAdmittedAt, &x.EndedAt, &x.ColumnBytes)
	if err != nil {
		return Sample{}, err
	}
	x.Cursor = cursorOf(x.RunID, false, x.Seq)
	x.Status, err = parseStatus(status)
	return x, err
}

func readSampleOf(ctx context.Context, from queryer, sessionID uuid.UUID) (Sample, error) {
	rows, err := from.Query(ctx, selectSampleOfSQL, sessionID)
	if err != nil {
		return Sample{}, err
	}
	return pgx.CollectExactlyOneRow(rows, scanSample)
}
