package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

const (
	// The run's lock decides between two workers that tokenise one prompt, and keeps
	// members from being released in another one's place meanwhile.
	setPromptSQL = `
update tasks set prompt_ids = $2, prompt_tokens = $3 where task_id = $1 and prompt_tokens = 0
returning (select members from groups where group_id = $1)`

	// Members that ended before are left as they were delivered: with no tokens.
	countPromptSQL = `
with member as (
    select session_id from sessions where session_id = any($1) and state <> 'ended' and context_tokens = 0 order by session_id for no key update
)
update sessions s set context_tokens = $2 from member m where s.session_id = m.session_id`

	selectLastOutputSQL = `
select g.tokens, g.ids, t.finish_reason
from turns t left join segments g on g.session_id = t.session_id and g.turn = t.turn and g.kind = 'generated'
where t.session_id = $1 and t.turn = (select max(turn) from turns where session_id = $1) order by g.part`
)

// SetPromptTokens keeps the ids that an engine has made of a task's prompt of text or
// messages, for all members of its group and for good: where ids are kept already,
// those stand and it changes nothing. Refusals: ErrNotFound, *FieldError for no ids.
func (s *Store) SetPromptTokens(ctx context.Context, taskID uuid.UUID, ids []int32) error {
	if len(ids) == 0 {
		return &FieldError{Path: "prompt", Problem: "must have at least one token"}
	}
	err := s.write(ctx, func(tx pgx.Tx) error {
		var runID uuid.UUID
		if err := tx.QueryRow(ctx, `select run_id from tasks where task_id = $1`, taskID).Scan(&runID); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, lockRunSQL, runID); err != nil {
			return err
		}
		var members int
		err := tx.QueryRow(ctx, setPromptSQL, taskID, packTokens(ids), len(ids)).Scan(&members)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, countPromptSQL, memberIDs(taskID, members), len(ids))
		return err
	})
	return found(err, "keeping the prompt of task", taskID)
}

// LastOutput returns the ids that the session's last committed turn generated and why
// it finished; no ids and no reason before the first turn.
func (s *Store) LastOutput(ctx context.Context, sessionID uuid.UUID) (ids []int32, finishReason string, err error) {
	rows, err := s.pool.Query(ctx, selectLastOutputSQL, sessionID)
	if err != nil {
		return nil, "", fmt.Errorf("reading the last output of session %s: %w", sessionID, err)
	}
	defer rows.Close()
	for rows.Next() {
		var count *int
		var packed []byte
		if err := rows.Scan(&count, &packed, &finishReason); err != nil {
			return nil, "", fmt.Errorf("reading the last output of session %s: %w", sessionID, err)
		}
		if count == nil {
			continue // a turn without output
		}
		if ids, err = unpackTokens(ids, packed, *count); err != nil {
			return nil, "", fmt.Errorf("reading the last output of session %s: %w", sessionID, err)
		}
	}
	if err := rows.Err(); err != nil {
		return nil, "", fmt.Errorf("reading the last output of session %s: %w", sessionID, err)
	}
	return ids, finishReason, nil
}
