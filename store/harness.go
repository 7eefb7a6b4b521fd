package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"holdfast/router"
)

// Finish is how a harness asks for its session's end.
type Finish struct {
	// Status is completed, truncated or failed.
	Status router.EndStatus
	// Reward must be finite; without one the task's scorer gives it.
	Reward *float64
	// Detail is the harness's JSON, at most 64 KiB, if any; it stands as the score's detail.
	Detail json.RawMessage
	// Problem says what went wrong in a session that failed.
	Problem string
}

// storedFinish is Finish as the row keeps it.
type storedFinish struct {
	Status  string          `json:"status"`
	Reward  *float64        `json:"reward,omitempty"`
	Detail  json.RawMessage `json:"detail,omitempty"`
	Problem string          `json:"problem,omitempty"`
}

// Harness is what a worker must know of a harness's session to tell whether it is over.
type Harness struct {
	// Finish is nil until the harness has asked for the end.
	Finish *Finish
	// QuietSince is when the harness was last heard of: its last turn's end, or its dispatch.
	QuietSince time.Time
	// Now is the database's clock.
	Now time.Time
}

// ErrTurnOfOtherRequest is returned when a request id has been used for another turn.
var ErrTurnOfOtherRequest = errors.New("the request id belongs to an earlier turn")

const (
	lockHarnessSQL = `
select state, finish from sessions where session_id = $1 for no key update`

	setFinishSQL = `
with session as (
    update sessions set finish = $2 where session_id = $1 returning pool, run_id, session_id
)
insert into outbox (pool, run_id, session_id, kind, next_at) select pool, run_id, session_id, 'finish', statement_timestamp() from session`

	selectHarnessSQL = `
select finish, greatest(dispatched_at, (select max(committed_at) from turns t where t.session_id = s.session_id)), statement_timestamp()
from sessions s where session_id = $1`

	selectTurnOfRequestSQL = `
select turn, instance, epoch, policy_version, prompt_tokens, predicted_cached_tokens, coalesce(cached_tokens, -1), output_tokens,
       appended_tokens, started_at, committed_at, queue_seconds, prefill_seconds, decode_seconds, total_seconds, tool_seconds,
       finish_reason, kept_tokens, attempts, resumes, tokens_regenerated
from turns where session_id = $1 and request_id = $2`

	selectRequestsSQL = `select request_id from turns where session_id = $1 and request_id is not null`

	selectHarnessStateSQL = `
select s.earlier_tokens, least(t.prompt_tokens, (select min(kept_tokens) from turns where session_id = $1)),
       coalesce(l.finish_reason, ''), coalesce(l.output_tokens, 0), l.seen_length, l.seen_digest
from sessions s join tasks t using (task_id) left join turns l on l.session_id = s.session_id and l.turn = s.turns - 1
where s.session_id = $1`

	selectGeneratedSQL = `
select tokens, ids, logprobs from segments where session_id = $1 and turn = $2 and kind = 'generated' order by part`
)

func (f *Finish) check() error {
	switch f.Status {
	case router.Completed, router.Truncated:
		if f.Problem != "" {
			return &FieldError{Path: "problem", Problem: "belongs to status failed"}
		}
	case router.Failed:
		if f.Reward != nil {
			return &FieldError{Path: "reward", Problem: "must not stand with status failed: a failure is no reward"}
		}
	default:
		return &FieldError{Path: "status", Problem: fmt.Sprintf("must be completed, truncated or failed, is %s", f.Status)}
	}
	return (&Ending{Status: f.Status, Reward: f.Reward, ScoreDetail: f.Detail, Problem: f.Problem}).check()
}

// RequestFinish notes how a harness wants its session to end, and owes that to its
// workflow. Asking for the same again changes nothing. Refusals: ErrNotFound,
// *FieldError; *ConflictError for a session that has ended otherwise or was asked to.
func (s *Store) RequestFinish(ctx context.Context, id uuid.UUID, finish Finish) error {
	if err := finish.check(); err != nil {
		return err
	}
	wanted, err := json.Marshal(storedFinish{finish.Status.String(), finish.Reward, finish.Detail, cleanText(finish.Problem)})
	if err != nil {
		return fmt.Errorf("encoding the end of session %s: %w", id, err)
	}
	err = s.write(ctx, func(tx pgx.Tx) error {
		var state SessionState
		var before []byte
		if err := tx.QueryRow(ctx, lockHarnessSQL, id).Scan(&state, &before); err != nil {
			return err
		}
		switch {
		case before != nil && bytes.Equal(before, wanted):
			return nil
		case before != nil:
			return &ConflictError{Subject: "session", Existing: id.String(), Problem: "was asked to end otherwise before"}
		case state == SessionEnded:
			return &ConflictError{Subject: "session", Existing: id.String(), Problem: "has ended"}
		case state == SessionQueued:
			return &ConflictError{Subject: "session", Existing: id.String(), Problem: "has not begun; cancel it instead"}
		}
		batch := &pgx.Batch{}
		batch.Queue(setFinishSQL, id, wanted)
		notify(batch, OutboxTopic())
		return tx.SendBatch(ctx, batch).Close()
	})
	return found(err, "asking for the end of session", id)
}

// Harness returns what is known of a harness's session, or ErrNotFound.
func (s *Store) Harness(ctx context.Context, id uuid.UUID) (Harness, error) {
	var h Harness
	var finish []byte
	var quietSince *time.Time
	if err := s.pool.QueryRow(ctx, selectHarnessSQL, id).Scan(&finish, &quietSince, &h.Now); err != nil {
		return Harness{}, found(err, "reading session", id)
	}
	h.QuietSince = h.Now
	if quietSince != nil {
		h.QuietSince = *quietSince
	}
	if finish == nil {
		return h, nil
	}
	var stored storedFinish
	if err := json.Unmarshal(finish, &stored); err != nil {
		return Harness{}, fmt.Errorf("reading the asked end of session %s: %w", id, err)
	}
	status, err := router.ParseEndStatus(stored.Status)
	if err != nil {
		return Harness{}, fmt.Errorf("reading the asked end of session %s: %w", id, err)
	}
	h.Finish = &Finish{Status: status, Reward: stored.Reward, Detail: stored.Detail, Problem: stored.Problem}
	return h, nil
}

// HarnessState is what a worker must know of a harness's session, beside its context,
// to make the next turn.
type HarnessState struct {
	// EarlierTokens sums the sequences that rewrites left. PromptTokens of the task's
	// prompt are still in the context.
	EarlierTokens int64
	PromptTokens  int
	// FinishReason and OutputTokens are the last turn's, Seen what the harness has seen
	// after it; empty before the first.
	FinishReason string
	OutputTokens int64
	Seen         *Seen
	// Requests made the session's turns.
	Requests []string
}

// HarnessState returns what is known of a harness's session, or ErrNotFound.
func (s *Store) HarnessState(ctx context.Context, id uuid.UUID) (HarnessState, error) {
	var h HarnessState
	batch := &pgx.Batch{}
	batch.Queue(selectHarnessStateSQL, id).QueryRow(func(row pgx.Row) error {
		var length *int
		var digest []byte
		err := row.Scan(&h.EarlierTokens, &h.PromptTokens, &h.FinishReason, &h.OutputTokens, &length, &digest)
		if length != nil {
			h.Seen = &Seen{Length: *length, Digest: digest}
		}
		return err
	})
	batch.Queue(selectRequestsSQL, id).Query(func(rows pgx.Rows) (err error) {
		h.Requests, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	if err := s.pool.SendBatch(ctx, batch).Close(); err != nil {
		return HarnessState{}, found(err, "reading the turns of session", id)
	}
	return h, nil
}

// TurnOfRequest returns the turn that a harness's request made, with what it
// generated; ErrNotFound if there is none.
func (s *Store) TurnOfRequest(ctx context.Context, id uuid.UUID, requestID string) (turn Turn, ids []int32, logprobs []float32, err error) {
	rows, err := s.pool.Query(ctx, selectTurnOfRequestSQL, id, requestID)
	if err == nil {
		turn, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Turn])
	}
	if err != nil {
		return Turn{}, nil, nil, found(err, "reading the turn of a request in session", id)
	}
	rows, err = s.pool.Query(ctx, selectGeneratedSQL, id, turn.Turn)
	if err != nil {
		return Turn{}, nil, nil, fmt.Errorf("reading turn %d of session %s: %w", turn.Turn, id, err)
	}
	defer rows.Close()
	for rows.Next() {
		var count int
		var packedIDs, packedLogprobs []byte
		if err := rows.Scan(&count, &packedIDs, &packedLogprobs); err != nil {
			return Turn{}, nil, nil, fmt.Errorf("reading turn %d of session %s: %w", turn.Turn, id, err)
		}
		if ids, err = unpackTokens(ids, packedIDs, count); err != nil {
			return Turn{}, nil, nil, err
		}
		if packedLogprobs != nil {
			if logprobs, err = unpackLogprobs(logprobs, packedLogprobs, count); err != nil {
				return Turn{}, nil, nil, err
			}
		}
	}
	return turn, ids, logprobs, rows.Err()
}
