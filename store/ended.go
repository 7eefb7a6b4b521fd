package store

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"holdfast/router"
)

// EndedSession is a session that has ended, and how.
type EndedSession struct {
	ID     uuid.UUID
	Status router.EndStatus
}

const endedAmongSQL = `select session_id, status from sessions where session_id = any($1) and state = 'ended'`

// EndedAmong returns those of the sessions that have ended, in no particular order.
func (s *Store) EndedAmong(ctx context.Context, ids []uuid.UUID) ([]EndedSession, error) {
	rows, err := s.pool.Query(ctx, endedAmongSQL, ids)
	if err != nil {
		return nil, fmt.Errorf("looking for ended sessions: %w", err)
	}
	ended, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (e EndedSession, err error) {
		var status string
		if err := row.Scan(&e.ID, &status); err != nil {
			return e, err
		}
		e.Status, err = parseStatus(status)
		return e, err
	})
	if err != nil {
		return nil, fmt.Errorf("looking for ended sessions: %w", err)
	}
	return ended, nil
}
