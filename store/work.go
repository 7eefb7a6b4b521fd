package store

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"holdfast/workflows/task"
)

// WorkSession is what a worker needs to run a session.
type WorkSession struct {
	ID      uuid.UUID
	RunID   uuid.UUID
	Pool    string
	BatchID uuid.UUID
	// TaskID is the group's id as well.
	TaskID    uuid.UUID
	Member    int
	GroupSize int
	Class     string
	// Spec lacks prompt token ids, which PromptTokens returns.
	Spec task.Spec
	// PromptTokens is the number of prompt tokens, 0 if only the engine can tell.
	PromptTokens int
	// PolicyVersion is the one the task was released at.
	PolicyVersion int64
	State         SessionState
	// Turns is the number of turns committed, ContextTokens the tokens of prompt
	// and committed segments.
	Turns           int
	ContextTokens   int64
	CancelRequested bool
	// FinishRequested: the harness has asked for the end.
	FinishRequested bool
	// FirstAdmittedAt is nil until a turn was admitted; HeldSeconds counts holds
	// that are over.
	FirstAdmittedAt *time.Time
	HeldSeconds     float64
	// Restarts counts how often the session was begun again: it names the attempt that
	// the rest is of.
	Restarts int
}

// LiveSession is a session that the router must know: held, or active somewhere.
type LiveSession struct {
	ID            uuid.UUID
	RunID         uuid.UUID
	GroupID       uuid.UUID
	GroupSize     int
	Class         string
	State         SessionState
	PolicyVersion int64
	// Turn is the one that is asked for, running or next.
	Turn          int
	ContextTokens int64
	// PromptTokens is the length of the prompt that group members share.
	PromptTokens int64
	// Instance protects the session; empty if none does.
	Instance string
	// AdmittedAt is the start of the present admission, HeldSince of the present hold.
	AdmittedAt *time.Time
	HeldSince  *time.Time
	// ResidencySeconds was gathered in earlier admissions.
	ResidencySeconds float64
	// Granted: Turn was admitted and is not committed, so it may be at the engine.
	Granted bool
}

const (
	selectWorkSQL = `
select s.session_id, s.run_id, s.pool, s.batch_id, s.task_id, s.member, t.group_size, s.class, t.spec, t.metadata, t.prompt_tokens,
       s.policy_version, s.state, s.turns, s.context_tokens, s.cancel_requested_at is not null, s.finish is not null, s.first_admitted_at, s.held_seconds, s.restarts
from sessions s join tasks t using (task_id) where s.session_id = $1`

	// A prompt of known length without stored ids is synthetic. Others are not
	// looked into, since a spec with messages can be large.
	promptColumns = ` case when t.prompt_tokens > 0 and t.prompt_ids is null then t.spec->'prompt'->'synthetic' end, t.prompt_tokens, t.prompt_ids `

	selectPromptSQL = `select` + promptColumns + `from tasks t where t.task_id = $1`

	selectPromptOfSessionSQL = `select` + promptColumns + `from sessions s join tasks t using (task_id) where s.session_id = $1`

	selectSegmentTokensSQL = `
select start_tokens, tokens, ids from segments where session_id = $1 order by turn, part`

	selectLiveSQL = `
select s.session_id, s.run_id, s.task_id, t.group_size, s.class, s.state, s.policy_version, s.turns, s.context_tokens, t.prompt_tokens,
       coalesce(s.instance, ''), s.admitted_at, s.held_since, s.residency_seconds, s.granted_turn is not null
from sessions s join tasks t using (task_id)
where s.dispatched_at is not null and s.ended_at is null and s.pool = $1 and s.state in ('held', 'active')
order by coalesce(s.admitted_at, s.held_since, s.first_admitted_at), s.session_id`
)

// SessionForWork returns one session for a worker, or ErrNotFound.
func (s *Store) SessionForWork(ctx context.Context, id uuid.UUID) (WorkSession, error) {
	var w WorkSession
	var spec, metadata []byte
	err := s.pool.QueryRow(ctx, selectWorkSQL, id).Scan(&w.ID, &w.RunID, &w.Pool, &w.BatchID, &w.TaskID, &w.Member, &w.GroupSize, &w.Class,
		&spec, &metadata, &w.PromptTokens, &w.PolicyVersion, &w.State, &w.Turns, &w.ContextTokens, &w.CancelRequested, &w.FinishRequested, &w.FirstAdmittedAt, &w.HeldSeconds, &w.Restarts)
	if err != nil {
		return WorkSession{}, found(err, "reading session", id)
	}
	if err := json.Unmarshal(spec, &w.Spec); err != nil {
		return WorkSession{}, fmt.Errorf("reading the task of session %s: %w", id, err)
	}
	w.Spec.Metadata = metadata
	return w, nil
}

// PromptTokens returns the token ids of a task's prompt: as given, or made from
// the seeds of a synthetic one; none for a prompt of text or messages.
func (s *Store) PromptTokens(ctx context.Context, taskID uuid.UUID) ([]int32, error) {
	var p storedPrompt
	err := s.pool.QueryRow(ctx, selectPromptSQL, taskID).Scan(&p.synthetic, &p.count, &p.packed)
	if err != nil {
		return nil, found(err, "reading the prompt of task", taskID)
	}
	return p.appendTo(nil)
}

// storedPrompt is a task's prompt as far as it is token ids.
type storedPrompt struct {
	synthetic []byte
	count     int
	packed    []byte
}

func (p *storedPrompt) appendTo(dst []int32) ([]int32, error) {
	switch {
	case p.packed != nil:
		return unpackTokens(dst, p.packed, p.count)
	case p.synthetic != nil:
		var synthetic task.Synthetic
		if err := json.Unmarshal(p.synthetic, &synthetic); err != nil {
			return nil, fmt.Errorf("reading a synthetic prompt: %w", err)
		}
		return synthetic.AppendTokens(dst), nil
	}
	return dst, nil
}

// Context returns the session's context so far as token ids: the prompt, then everything
// appended and generated, as the last rewrite left it.
func (s *Store) Context(ctx context.Context, sessionID uuid.UUID) ([]int32, error) {
	var ids []int32
	batch := &pgx.Batch{}
	batch.Queue(selectPromptOfSessionSQL, sessionID).QueryRow(func(row pgx.Row) error {
		var p storedPrompt
		if err := row.Scan(&p.synthetic, &p.count, &p.packed); err != nil {
			return err
		}
		var err error
		ids, err = p.appendTo(nil)
		return err
	})
	batch.Queue(selectSegmentTokensSQL, sessionID).Query(func(rows pgx.Rows) error {
		for rows.Next() {
			var start, count int
			var packed []byte
			if err := rows.Scan(&start, &count, &packed); err != nil {
				return err
			}
			if start > len(ids) {
				return fmt.Errorf("a segment begins at token %d, the one before ends at %d", start, len(ids))
			}
			// A rewrite begins before the end.
			ids = ids[:start]
			var err error
			if ids, err = unpackTokens(ids, packed, count); err != nil {
				return err
			}
		}
		return rows.Err()
	})
	if err := s.pool.SendBatch(ctx, batch).Close(); err != nil {
		return nil, found(err, "reading the context of session", sessionID)
	}
	return ids, nil
}

// LiveSessions returns the pool's held and active sessions, longest admitted or
// held first.
func (s *Store) LiveSessions(ctx context.Context, pool string) ([]LiveSession, error) {
	rows, err := s.pool.Query(ctx, selectLiveSQL, pool)
	if err != nil {
		return nil, fmt.Errorf("listing the live sessions of pool %s: %w", pool, err)
	}
	sessions, err := pgx.CollectRows(rows, pgx.RowToStructByPos[LiveSession])
	if err != nil {
		return nil, fmt.Errorf("listing the live sessions of pool %s: %w", pool, err)
	}
	return sessions, nil
}
