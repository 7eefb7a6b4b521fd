package store

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

const (
	requeueStartsSQL = `
insert into outbox (pool, run_id, session_id, kind)
select pool, run_id, session_id, 'start' from sessions s
where pool = $1 and ` + liveCondition + `
  and not exists (select from outbox o where o.session_id = s.session_id and o.kind = 'start')`

	requeueGrantsSQL = `
insert into outbox (pool, run_id, session_id, kind, turn)
select pool, run_id, session_id, 'grant', granted_turn from sessions s
where pool = $1 and ` + liveCondition + ` and granted_turn is not null
  and not exists (select from outbox o where o.session_id = s.session_id and o.kind = 'grant' and o.turn = s.granted_turn)`

	requeueCancelsSQL = `
insert into outbox (pool, run_id, session_id, kind, reason)
select pool, run_id, session_id, 'cancel', cancel_reason from sessions s
where pool = $1 and ` + liveCondition + ` and cancel_requested_at is not null
  and not exists (select from outbox o where o.session_id = s.session_id and o.kind = 'cancel')`

	requeueFinishesSQL = `
insert into outbox (pool, run_id, session_id, kind)
select pool, run_id, session_id, 'finish' from sessions s
where pool = $1 and ` + liveCondition + ` and finish is not null
  and not exists (select from outbox o where o.session_id = s.session_id and o.kind = 'finish')`
)

// RequeueMessages puts back what a dead owner of the pool may have owed to
// workflows: the start of every session under way, the grant of every turn that
// was admitted and not committed, every cancellation, and every end that a harness
// asked for, unless the message is
// there still. Delivering them again is harmless. It returns how many were added.
func (s *Store) RequeueMessages(ctx context.Context, pool string) (int, error) {
	added := 0
	err := s.write(ctx, func(tx pgx.Tx) error {
		for _, query := range []string{requeueStartsSQL, requeueGrantsSQL, requeueCancelsSQL, requeueFinishesSQL} {
			tag, err := tx.Exec(ctx, query, pool)
			if err != nil {
				return err
			}
			added += int(tag.RowsAffected())
		}
		if added == 0 {
			return nil
		}
		_, err := tx.Exec(ctx, notifySQL, string(OutboxTopic()))
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("putting back messages of pool %s: %w", pool, err)
	}
	return added, nil
}
