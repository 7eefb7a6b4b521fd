package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ErrCheckpointSuperseded is returned for a checkpoint whose predecessor is no
// more: another worker has taken the turn over from an earlier place.
var ErrCheckpointSuperseded = errors.New("another worker has taken over the turn's output")

// TurnEffort is what a turn has cost beyond its output.
type TurnEffort struct {
	// Attempts counts the calls made for the turn, failed ones included.
	Attempts int
	// Resumes counts the calls that went on from output that there was.
	Resumes int
	// TokensRegenerated were generated again because an earlier copy was lost.
	TokensRegenerated int64
}

// Checkpoint is output of a turn that is not committed yet, from StartTokens on.
type Checkpoint struct {
	SessionID uuid.UUID
	// Restarts is the session's as the worker read it with the context: output of an
	// attempt that was left is refused.
	Restarts int
	Turn     int
	// StartTokens is where the output begins within the turn's.
	StartTokens int
	// Previous is the part that this output follows, the zero value at the beginning.
	Previous uuid.UUID
	IDs      []int32
	// Logprobs of IDs: as many, or none.
	Logprobs []float32
	// Versions cover IDs.
	Versions []VersionSpan
	Instance string
	Epoch    int64
	// The turn's up to the end of this output.
	TurnEffort
}

// PartialTurn is the output of a turn that was cut, as far as it is durable.
type PartialTurn struct {
	IDs      []int32
	Logprobs []float32
	Versions []VersionSpan
	// Last is the part at its end, to be followed by the next checkpoint; Instance
	// sampled it.
	Last     uuid.UUID
	Instance string
	TurnEffort
}

const (
	// The lock orders checkpoints with the turn's commit and the session's end, so
	// that none is left behind.
	lockCheckpointSQL = `
select restarts = $3 and turns = $2 and ` + liveCondition + `, restarts, turns from sessions where session_id = $1 for no key update`

	openTurnCondition = `exists (select from sessions where session_id = $1 and restarts = $5 and turns = $2 and ` + liveCondition + `)`

	followsSQL = `
($3 = 0 or exists (select from turn_checkpoints c where c.session_id = $1 and c.turn = $2 and c.part = $4 and c.start_tokens + c.tokens = $3))`

	// What a worker writes replaces what another wrote from there on.
	replaceCheckpointsSQL = `
delete from turn_checkpoints where session_id = $1 and turn = $2 and start_tokens >= $3 and ` + openTurnCondition + ` and ` + followsSQL

	insertCheckpointsSQL = `
insert into turn_checkpoints (session_id, turn, start_tokens, tokens, part, previous, ids, logprobs, policy_version, instance, epoch,
                              attempts, resumes, tokens_regenerated, at)
select $1, $2, p.start_tokens, p.tokens, p.part, p.previous, p.ids, p.logprobs, p.policy_version, $6, $7, $8, $9, $10, statement_timestamp()
from unnest($11::int[], $12::int[], $13::uuid[], $14::uuid[], $15::bytea[], $16::bytea[], $17::bigint[])
     as p (start_tokens, tokens, part, previous, ids, logprobs, policy_version)
where ` + openTurnCondition + ` and ` + followsSQL

	selectCheckpointsSQL = `
select start_tokens, tokens, part, previous, ids, logprobs, policy_version, instance, attempts, resumes, tokens_regenerated
from turn_checkpoints where session_id = $1 and turn = $2 order by start_tokens`

	dropFromSQL = `
delete from turn_checkpoints where session_id = $1 and turn = $2 and start_tokens >= $3 and ` + openTurnCondition + ` and ` + followsSQL

	dropCheckpointsSQL = `delete from turn_checkpoints where session_id = $1`
)

// SaveCheckpoint makes output of an uncommitted turn durable in one round trip and
// returns the part at its end, which the next checkpoint follows. It replaces what
// is stored from StartTokens on. Refusals: ErrCheckpointSuperseded, ErrSessionEnded,
// ErrSessionRestarted, ErrTurnOutOfOrder once the turn is committed, ErrNotFound, *FieldError.
func (s *Store) SaveCheckpoint(ctx context.Context, c Checkpoint) (last uuid.UUID, err error) {
	if err := c.check(); err != nil {
		return uuid.Nil, err
	}
	var open bool
	var restarts, turns int
	var saved int64
	rows := c.rows()
	batch := &pgx.Batch{}
	batch.Queue(lockCheckpointSQL, c.SessionID, c.Turn, c.Restarts).QueryRow(func(row pgx.Row) error { return row.Scan(&open, &restarts, &turns) })
	batch.Queue(replaceCheckpointsSQL, c.SessionID, c.Turn, c.StartTokens, c.Previous, c.Restarts)
	batch.Queue(insertCheckpointsSQL, c.SessionID, c.Turn, c.StartTokens, c.Previous, c.Restarts, c.Instance, c.Epoch,
		c.Attempts, c.Resumes, c.TokensRegenerated,
		rows.starts, rows.counts, rows.parts, rows.previous, rows.ids, rows.logprobs, rows.versions,
	).Exec(func(tag pgconn.CommandTag) error { saved = tag.RowsAffected(); return nil })
	err = s.pool.SendBatch(ctx, batch).Close()
	switch {
	case err != nil:
	case saved > 0:
		return rows.parts[len(rows.parts)-1], nil
	case open:
		err = ErrCheckpointSuperseded
	case restarts != c.Restarts:
		err = ErrSessionRestarted
	case turns > c.Turn:
		err = fmt.Errorf("it is committed: %w", ErrTurnOutOfOrder)
	case turns < c.Turn:
		err = fmt.Errorf("%d turns are committed: %w", turns, ErrTurnOutOfOrder)
	default:
		err = ErrSessionEnded
	}
	return uuid.Nil, found(err, fmt.Sprintf("saving a checkpoint of turn %d of session", c.Turn), c.SessionID)
}

// DropCheckpoints removes what is stored of an uncommitted turn's output behind a part,
// which ends at startTokens, or all of it if that is 0: it turned out not to be what was
// sampled. Where the turn or the chain is another worker's by now it removes nothing.
func (s *Store) DropCheckpoints(ctx context.Context, c Checkpoint) error {
	_, err := s.pool.Exec(ctx, dropFromSQL, c.SessionID, c.Turn, c.StartTokens, c.Previous, c.Restarts)
	return found(err, fmt.Sprintf("dropping checkpoints of turn %d of session", c.Turn), c.SessionID)
}

// check refuses what could not be read back as it was meant.
func (c *Checkpoint) check() error {
	if len(c.IDs) == 0 {
		return &FieldError{Path: "ids", Problem: "must not be empty"}
	}
	if (c.StartTokens == 0) != (c.Previous == uuid.Nil) {
		return &FieldError{Path: "previous", Problem: fmt.Sprintf("must name a part exactly if the output begins after token 0, it begins at %d", c.StartTokens)}
	}
	if err := checkLogprobs(c.Logprobs, len(c.IDs)); err != nil {
		return err
	}
	return checkVersions(c.Versions, len(c.IDs))
}

// checkpointRows are the columns of a checkpoint's rows, one row per policy version.
type checkpointRows struct {
	starts, counts []int32
	parts          []uuid.UUID
	previous       []*uuid.UUID
	ids, logprobs  [][]byte
	versions       []int64
}

func (c *Checkpoint) rows() (r checkpointRows) {
	previous := &c.Previous
	if c.StartTokens == 0 {
		previous = nil
	}
	eachSpan(c.Versions, func(from, to int, version int64) {
		part := uuid.New()
		r.starts = append(r.starts, int32(c.StartTokens+from))
		r.counts = append(r.counts, int32(to-from))
		r.parts = append(r.parts, part)
		r.previous = append(r.previous, previous)
		r.ids = append(r.ids, packTokens(c.IDs[from:to]))
		r.logprobs = append(r.logprobs, packLogprobs(logprobsOf(c.Logprobs, from, to)))
		r.versions = append(r.versions, version)
		previous = &part
	})
	return r
}

// PartialTurn returns what checkpoints hold of an uncommitted turn's output, which
// is the zero value if there is none. Rows that do not continue the chain from the
// beginning are of a worker that was superseded, and left out.
func (s *Store) PartialTurn(ctx context.Context, sessionID uuid.UUID, turn int) (PartialTurn, error) {
	var partial PartialTurn
	rows, err := s.pool.Query(ctx, selectCheckpointsSQL, sessionID, turn)
	if err == nil {
		err = partial.read(rows)
	}
	if err != nil {
		return PartialTurn{}, fmt.Errorf("reading the checkpoints of turn %d of session %s: %w", turn, sessionID, err)
	}
	return partial, nil
}

func (p *PartialTurn) read(rows pgx.Rows) error {
	defer rows.Close()
	for rows.Next() {
		var start, count int
		var part uuid.UUID
		var previous uuid.NullUUID
		var ids, logprobs []byte
		var version int64
		var instance string
		var effort TurnEffort
		err := rows.Scan(&start, &count, &part, &previous, &ids, &logprobs, &version, &instance, &effort.Attempts, &effort.Resumes, &effort.TokensRegenerated)
		if err != nil {
			return err
		}
		if start != len(p.IDs) || previous.UUID != p.Last {
			break
		}
		if p.IDs, err = unpackTokens(p.IDs, ids, count); err != nil {
			return err
		}
		if logprobs != nil {
			if p.Logprobs, err = unpackLogprobs(p.Logprobs, logprobs, count); err != nil {
				return err
			}
		}
		p.Versions = AppendVersion(p.Versions, count, version)
		p.Last, p.Instance, p.TurnEffort = part, instance, effort
	}
	rows.Close()
	return rows.Err()
}
