package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"holdfast/router"
)

// DecisionRecord is one decision of a pool's router, to be made durable before
// anyone acts on it.
type DecisionRecord struct {
	router.Decision
	// Signal asks for an outbox message with an Admit: the session's workflow is
	// not waiting for the answer of a call.
	Signal bool
}

// Grant is the permission to run one turn at one instance.
type Grant struct {
	SessionID uuid.UUID
	Turn      int
	Instance  string
	// URL and Kind are those of the instance.
	URL  string
	Kind string
	// Epoch is the ownership under which the grant was given.
	Epoch int64
	// PolicyVersion is the instance's as last announced.
	PolicyVersion         int64
	PredictedCachedTokens int64
	GrantedAt             time.Time
}

const (
	// The share lock keeps another owner from taking the pool before this
	// transaction has ended, so that nothing is written under an epoch that is over.
	fencePoolSQL = `select epoch from pool_owners where pool = $1 for share`

	// Sessions that are queued or ended are left out: a decision about them is late.
	lockDecidedSQL = `
select session_id, run_id, state, coalesce(instance, ''), granted_turn, granted_at, predicted_cached_tokens, epoch,
       coalesce(hold_reason, ''), holds, held_since, held_seconds, first_admitted_at,
       admitted_at, residency_seconds, token_seconds, token_mark, context_tokens, turns, instances, event_seq
from sessions where session_id = any($1) and ` + liveCondition + ` order by session_id for no key update`

	updateDecidedSQL = `
update sessions set state = $2, instance = nullif($3, ''), granted_turn = $4, granted_at = $5, predicted_cached_tokens = $6, epoch = $7,
       hold_reason = nullif($8, ''), holds = $9, held_since = $10, held_seconds = $11, first_admitted_at = $12,
       admitted_at = $13, residency_seconds = $14, token_seconds = $15, token_mark = $16, instances = $17, event_seq = $18
where session_id = $1`

	insertEventsSQL = `
insert into session_events (session_id, seq, run_id, at, kind, detail)
select e.session_id, e.seq, e.run_id, e.at, e.kind, e.detail::json
from unnest($1::uuid[], $2::bigint[], $3::uuid[], $4::timestamptz[], $5::text[], $6::text[]) as e (session_id, seq, run_id, at, kind, detail)`

	insertGrantMessageSQL = `
insert into outbox (pool, run_id, session_id, kind, turn, next_at) values ($1, $2, $3, 'grant', $4, statement_timestamp())`

	insertRouterEventSQL = `
insert into router_events (pool, epoch, at, kind, reason, instance, detail) values ($1, $2, $3, $4, $5, $6, $7)`

	selectGrantSQL = `
select s.session_id, s.granted_turn, s.instance, i.url, i.kind, s.epoch, i.policy_version, s.predicted_cached_tokens, s.granted_at
from sessions s join instances i on i.pool = s.pool and i.instance = s.instance
where s.session_id = $1 and s.granted_turn = $2`

	selectRouterEventsSQL = `
select seq, at, kind, reason, instance, detail from router_events where pool = $1 order by seq desc limit $2`
)

// RecordDecisions makes decisions durable in one transaction, in their order.
//
// Decision times are Unix nanoseconds. An Admit makes the session active at its
// instance and grants the turn; a Hold makes it held (a repeated Hold with the
// same reason writes nothing); ProtectionEnded withdraws instance and grant;
// CapChanged goes to the pool's router events. Each leaves an event with its
// numbers. Decisions about sessions that have ended meanwhile are dropped. If
// epoch is not the pool's current one, nothing is written and the error is
// ErrFenced.
func (s *Store) RecordDecisions(ctx context.Context, pool string, epoch int64, records []DecisionRecord) error {
	if len(records) == 0 {
		return nil
	}
	w := decisionWriter{pool: pool, epoch: epoch, sessions: make(map[router.SessionID]*decidedSession, len(records))}
	err := s.writeInTwoTrips(ctx, w.lock(records), func() (*pgx.Batch, error) {
		for i := range records {
			if err := w.apply(&records[i]); err != nil {
				return nil, err
			}
		}
		return w.batch(), nil
	})
	if err != nil {
		return fmt.Errorf("recording %d decisions of pool %s: %w", len(records), pool, err)
	}
	return nil
}

// decidedSession is the part of a session's row that decisions change.
type decidedSession struct {
	id, runID       uuid.UUID
	state           SessionState
	instance        string
	grantedTurn     *int
	grantedAt       *time.Time
	predictedCached int64
	epoch           int64
	holdReason      string
	holds           int
	heldSince       *time.Time
	heldSeconds     float64
	firstAdmittedAt *time.Time
	residency       residency
	turns           int
	instances       []string
	eventSeq        int64
	changed         bool
}

func (d *decidedSession) scan(row pgx.Row) error {
	r := &d.residency
	return row.Scan(&d.id, &d.runID, &d.state, &d.instance, &d.grantedTurn, &d.grantedAt, &d.predictedCached, &d.epoch,
		&d.holdReason, &d.holds, &d.heldSince, &d.heldSeconds, &d.firstAdmittedAt,
		&r.admittedAt, &r.seconds, &r.tokenSeconds, &r.tokenMark, &r.contextTokens, &d.turns, &d.instances, &d.eventSeq)
}

func (d *decidedSession) queueUpdate(batch *pgx.Batch) {
	r := &d.residency
	batch.Queue(updateDecidedSQL, d.id, string(d.state), d.instance, d.grantedTurn, d.grantedAt, d.predictedCached, d.epoch,
		d.holdReason, d.holds, d.heldSince, d.heldSeconds, d.firstAdmittedAt,
		r.admittedAt, r.seconds, r.tokenSeconds, r.tokenMark, d.instances, d.eventSeq)
}

// admit grants the turn and returns whether that changed anything.
func (d *decidedSession) admit(decision *router.Decision, epoch int64, at time.Time) bool {
	instance := string(decision.Instance)
	if d.state == SessionActive && d.instance == instance && d.epoch == epoch && d.grantedTurn != nil && *d.grantedTurn == decision.Turn {
		return false
	}
	if d.heldSince != nil {
		d.heldSeconds += secondsBetween(*d.heldSince, at)
		d.heldSince, d.holdReason = nil, ""
	}
	if d.firstAdmittedAt == nil {
		d.firstAdmittedAt = &at
	}
	if len(d.instances) == 0 || d.instances[len(d.instances)-1] != instance {
		d.instances = append(d.instances, instance)
	}
	turn := decision.Turn
	d.state, d.instance, d.epoch = SessionActive, instance, epoch
	d.grantedTurn, d.grantedAt, d.predictedCached = &turn, &at, decision.Numbers.PredictedCachedTokens
	d.residency.start(at)
	return true
}

// hold makes the session wait and returns whether that changed anything.
func (d *decidedSession) hold(decision *router.Decision, epoch int64, at time.Time) bool {
	reason := decision.Reason.String()
	if d.state == SessionHeld && d.holdReason == reason && d.epoch == epoch {
		return false
	}
	if d.state != SessionHeld {
		d.holds++
		d.heldSince = &at
	}
	d.residency.stop(at)
	d.state, d.holdReason, d.epoch = SessionHeld, reason, epoch
	d.grantedTurn, d.grantedAt = nil, nil
	return true
}

// endProtection withdraws instance and grant.
func (d *decidedSession) endProtection(at time.Time) bool {
	if d.instance == "" {
		return false
	}
	d.residency.stop(at)
	d.instance, d.grantedTurn, d.grantedAt = "", nil, nil
	return true
}

// decisionWriter collects what a set of decisions writes.
type decisionWriter struct {
	pool     string
	epoch    int64
	sessions map[router.SessionID]*decidedSession
	events   eventRows
	messages []*DecisionRecord
	router   pgx.Batch
}

// lock checks the epoch and locks and reads the sessions that the records concern.
func (w *decisionWriter) lock(records []DecisionRecord) *pgx.Batch {
	ids := make([]uuid.UUID, 0, len(records))
	for i := range records {
		if records[i].Session != (router.SessionID{}) {
			ids = append(ids, uuid.UUID(records[i].Session))
		}
	}
	batch := &pgx.Batch{}
	batch.Queue(fencePoolSQL, w.pool).QueryRow(func(row pgx.Row) error {
		var current int64
		err := row.Scan(&current)
		if errors.Is(err, pgx.ErrNoRows) || (err == nil && current != w.epoch) {
			return fmt.Errorf("epoch %d: %w", w.epoch, ErrFenced)
		}
		return err
	})
	batch.Queue(lockDecidedSQL, ids).Query(func(rows pgx.Rows) error {
		for rows.Next() {
			d := &decidedSession{}
			if err := d.scan(rows); err != nil {
				return err
			}
			w.sessions[router.SessionID(d.id)] = d
		}
		return rows.Err()
	})
	return batch
}

// apply takes one decision into the collected rows.
func (w *decisionWriter) apply(record *DecisionRecord) error {
	decision := &record.Decision
	at := time.Unix(0, decision.At).UTC()
	if decision.Kind == router.CapChanged {
		detail, err := json.Marshal(numbersOf(&decision.Numbers))
		if err != nil {
			return fmt.Errorf("describing a change of the cap: %w", err)
		}
		w.router.Queue(insertRouterEventSQL, w.pool, w.epoch, at, decision.Kind.String(), decision.Reason.String(), string(decision.Instance), detail)
		return nil
	}
	d := w.sessions[decision.Session]
	if d == nil || (decision.Kind != router.ProtectionEnded && decision.Turn < d.turns) {
		// The session has ended, or the turn was committed, since the router decided.
		return nil
	}
	var changed bool
	var kind EventKind
	switch decision.Kind {
	case router.Admit:
		changed, kind = d.admit(decision, w.epoch, at), EventAdmitted
		if record.Signal {
			w.messages = append(w.messages, record)
		}
	case router.Hold:
		changed, kind = d.hold(decision, w.epoch, at), EventHeld
	case router.ProtectionEnded:
		changed, kind = d.endProtection(at), EventProtectionEnded
	default:
		return fmt.Errorf("decision of unknown kind %v", decision.Kind)
	}
	if !changed {
		return nil
	}
	d.changed = true
	d.eventSeq++
	detail, err := json.Marshal(decisionDetail{
		Turn: decision.Turn, Reason: decision.Reason.String(), Instance: string(decision.Instance), Epoch: w.epoch, Numbers: numbersOf(&decision.Numbers)})
	if err != nil {
		return fmt.Errorf("describing a decision: %w", err)
	}
	w.events.add(SessionEvent{SessionID: d.id, Seq: d.eventSeq, At: at, Kind: kind, Detail: detail}, d.runID)
	return nil
}

// batch is everything that the decisions write.
func (w *decisionWriter) batch() *pgx.Batch {
	batch := &w.router
	for _, d := range w.sorted() {
		if d.changed {
			d.queueUpdate(batch)
		}
	}
	w.events.queue(batch)
	for _, message := range w.messages {
		d := w.sessions[message.Session]
		batch.Queue(insertGrantMessageSQL, w.pool, d.runID, d.id, message.Turn)
	}
	if len(w.messages) > 0 {
		notify(batch, OutboxTopic())
	}
	return batch
}

func (w *decisionWriter) sorted() []*decidedSession {
	all := make([]*decidedSession, 0, len(w.sessions))
	for _, d := range w.sessions {
		all = append(all, d)
	}
	slices.SortFunc(all, func(a, b *decidedSession) int { return bytes.Compare(a.id[:], b.id[:]) })
	return all
}

// Grant returns the grant of that turn; ok is false while there is none.
func (s *Store) Grant(ctx context.Context, sessionID uuid.UUID, turn int) (grant Grant, ok bool, err error) {
	err = s.pool.QueryRow(ctx, selectGrantSQL, sessionID, turn).Scan(&grant.SessionID, &grant.Turn, &grant.Instance, &grant.URL, &grant.Kind,
		&grant.Epoch, &grant.PolicyVersion, &grant.PredictedCachedTokens, &grant.GrantedAt)
	if errors.Is(err, pgx.ErrNoRows) {
		return Grant{}, false, nil
	}
	if err != nil {
		return Grant{}, false, fmt.Errorf("reading the grant of session %s: %w", sessionID, err)
	}
	return grant, true, nil
}

// RouterEvent is a decision that concerns an instance and no session.
type RouterEvent struct {
	Seq      int64
	At       time.Time
	Kind     string
	Reason   string
	Instance string
	// Detail is a JSON object with the numbers of the decision.
	Detail json.RawMessage
}

// RouterEvents returns the pool's latest router events, newest first; limit is at
// most 1,000.
func (s *Store) RouterEvents(ctx context.Context, pool string, limit int) ([]RouterEvent, error) {
	rows, err := s.pool.Query(ctx, selectRouterEventsSQL, pool, pageLimit(limit))
	if err != nil {
		return nil, fmt.Errorf("reading the router events of pool %s: %w", pool, err)
	}
	events, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (e RouterEvent, err error) {
		err = row.Scan(&e.Seq, &e.At, &e.Kind, &e.Reason, &e.Instance, &e.Detail)
		return e, err
	})
	if err != nil {
		return nil, fmt.Errorf("reading the router events of pool %s: %w", pool, err)
	}
	return events, nil
}
