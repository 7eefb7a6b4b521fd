package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"holdfast/router"
)

// Observation is what an environment answered to one message of a session, as far as
// the session goes on from it.
type Observation struct {
	SessionID uuid.UUID
	// Restarts is the session's as the worker read it: an observation of an attempt that
	// was left is refused.
	Restarts int
	// Step is 0 for the reset; n answers the message of turn n-1.
	Step int
	// EpisodeStep is the number of the environment's own step that gave it: the last
	// one's where the message never reached the environment.
	EpisodeStep int
	// IDs are appended to the context before the next turn.
	IDs []int32
	// Reward is finite, or nil where the environment gave none.
	Reward *float64
	// Seconds passed in the environment.
	Seconds float64
	// Status is how the session ends with it, 0 where another turn follows. Then
	// Seconds count into the session's tool time at once, else with that turn.
	Status router.EndStatus
	// Problem says why, if Status is Failed.
	Problem string
}

const (
	// The session's row lock orders two workers that make the same step: the loser's
	// row violates the key.
	saveObservationSQL = `
with session as (
    update sessions set event_seq = event_seq + 1, tool_seconds = tool_seconds + case when $8::text is null then 0 else $7::double precision end
    where session_id = $1 and restarts = $11 and ` + liveCondition + ` and not exists (select from observations where session_id = $1 and step = $2)
    returning run_id, event_seq
), observation as (
    insert into observations (session_id, step, episode_step, tokens, ids, reward, seconds, status, problem, at)
    select $1, $2, $3, $4, $5, $6, $7, $8, $9, statement_timestamp() from session
)
insert into session_events (session_id, seq, run_id, at, kind, detail)
select $1, event_seq, run_id, statement_timestamp(), 'tool', $10::json from session`

	selectObservationSQL = `
select step, episode_step, tokens, ids, reward, seconds, coalesce(status, ''), problem from observations
where session_id = $1 and step = $2`

	selectEnvironmentRewardSQL = `
select reward from observations where session_id = $1 and reward is not null order by step desc limit 1`

	selectRestartsSQL = `select restarts from sessions where session_id = $1`

	dropObservationsSQL = `delete from observations where session_id = $1`
)

// SaveObservation makes an observation count and writes its event, with that detail.
// It returns what is stored: where the step was made before, the earlier observation
// stands. Refusals: ErrSessionEnded, ErrSessionRestarted, ErrNotFound, *FieldError.
func (s *Store) SaveObservation(ctx context.Context, o Observation, detail json.RawMessage) (Observation, error) {
	if o.Reward != nil && (math.IsNaN(*o.Reward) || math.IsInf(*o.Reward, 0)) {
		return o, &FieldError{Path: "reward", Problem: fmt.Sprintf("must be finite, is %v", *o.Reward)}
	}
	if err := checkDetail("detail", detail); err != nil {
		return o, err
	}
	var status *string
	if o.Status != 0 {
		name := o.Status.String()
		status = &name
	}
	doing := fmt.Sprintf("saving observation %d of session", o.Step)
	tag, err := s.pool.Exec(ctx, saveObservationSQL, o.SessionID, o.Step, o.EpisodeStep, len(o.IDs), packTokens(o.IDs), o.Reward, o.Seconds,
		status, cleanText(o.Problem), nullJSON(detail), o.Restarts)
	if err != nil && !violates(err, "observations_pkey") {
		return o, found(err, doing, o.SessionID)
	}
	if err == nil && tag.RowsAffected() == 1 {
		return o, nil
	}
	var restarts int
	if err := s.pool.QueryRow(ctx, selectRestartsSQL, o.SessionID).Scan(&restarts); err != nil {
		return o, found(err, doing, o.SessionID)
	}
	if restarts != o.Restarts {
		// What is stored is another attempt's.
		return o, fmt.Errorf("%s %s: %w", doing, o.SessionID, ErrSessionRestarted)
	}
	stored, ok, err := s.Observation(ctx, o.SessionID, o.Step)
	if err != nil || ok {
		stored.Restarts = o.Restarts
		return stored, err
	}
	return o, fmt.Errorf("%s %s: %w", doing, o.SessionID, ErrSessionEnded)
}

// Observation returns what a step gave; ok is false if it was not made yet, or the
// session has ended.
func (s *Store) Observation(ctx context.Context, sessionID uuid.UUID, step int) (o Observation, ok bool, err error) {
	o.SessionID = sessionID
	var count int
	var packed []byte
	var status string
	err = s.pool.QueryRow(ctx, selectObservationSQL, sessionID, step).Scan(&o.Step, &o.EpisodeStep, &count, &packed, &o.Reward, &o.Seconds, &status, &o.Problem)
	if errors.Is(err, pgx.ErrNoRows) {
		return o, false, nil
	}
	if err == nil && packed != nil {
		o.IDs, err = unpackTokens(nil, packed, count)
	}
	if err == nil && status != "" {
		o.Status, err = router.ParseEndStatus(status)
	}
	if err != nil {
		return o, false, fmt.Errorf("reading observation %d of session %s: %w", step, sessionID, err)
	}
	return o, true, nil
}

// EnvironmentReward returns the last reward that a session's environment gave, or nil.
func (s *Store) EnvironmentReward(ctx context.Context, sessionID uuid.UUID) (*float64, error) {
	var reward *float64
	err := s.pool.QueryRow(ctx, selectEnvironmentRewardSQL, sessionID).Scan(&reward)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, fmt.Errorf("reading the environment's reward of session %s: %w", sessionID, err)
	}
	return reward, nil
}

// DropObservations forgets what a session that has ended needs no more.
func (s *Store) DropObservations(ctx context.Context, sessionID uuid.UUID) error {
	if _, err := s.pool.Exec(ctx, dropObservationsSQL, sessionID); err != nil {
		return fmt.Errorf("dropping the observations of session %s: %w", sessionID, err)
	}
	return nil
}
