package api

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"holdfast/api/wire"
	"holdfast/store"
)

type auditOutput struct{ Body wire.Audit }

func (s *Server) registerAudit() {
	register(s, operation{
		id: "audit-session", method: http.MethodGet, path: "/sessions/{session}/audit", tag: "sessions",
		summary:     "Read everything that is known of a session and its sample",
		description: "When it was released, how long it was held and why, where it was admitted and by which numbers, every turn and retry, when it was scored, delivered and acknowledged: from one snapshot. A sample's id is its session's.",
		terms:       terms{roles: anyone}, problems: []int{http.StatusNotFound},
	}, s.auditSession)
}

func (s *Server) auditSession(ctx context.Context, in *SessionPath) (*auditOutput, error) {
	found, err := s.store.Audit(ctx, in.Session)
	if err != nil {
		return nil, noSession(err, in.Session)
	}
	return &auditOutput{Body: wireAudit(&found)}, nil
}

func wireAudit(found *store.Audit) wire.Audit {
	session := &found.Session
	w := wire.Audit{
		Session: wireSession(session), Release: releaseOf(found), Moves: max(0, len(session.Instances)-1),
		Turns: make([]wire.Turn, len(found.Turns)), Deliveries: wireDeliveries(found.Deliveries), Events: wireEvents(found.Events),
		More: found.More, HistoryPruned: found.HistoryPruned, TranscriptPruned: found.TranscriptPruned,
	}
	for i := range found.Turns {
		w.Turns[i] = wireTurn(&found.Turns[i])
		w.Retries += max(0, found.Turns[i].Attempts-1)
	}
	story := storyteller{audit: &w}
	for i := range found.Events {
		story.tell(&found.Events[i])
	}
	if session.Reward != nil || session.Times.ScoreSeconds > 0 {
		w.Score = &wire.Score{At: story.scoredAt, Seconds: session.Times.ScoreSeconds, Reward: session.Reward, Detail: session.ScoreDetail}
	}
	return w
}

func releaseOf(found *store.Audit) wire.Release {
	session := &found.Session
	r := wire.Release{
		At: session.ReleasedAt.UTC(), BatchSeq: found.BatchSeq, IdempotencyKey: found.IdempotencyKey,
		PolicyVersion: session.PolicyVersion, DispatchedAt: utc(session.DispatchedAt),
	}
	until := session.DispatchedAt
	if until == nil {
		until = session.EndedAt
	}
	if until != nil {
		r.QueuedSeconds = max(0, until.Sub(session.ReleasedAt).Seconds())
	}
	return r
}

func wireEvents(events []store.SessionEvent) []wire.Event {
	w := make([]wire.Event, len(events))
	for i, event := range events {
		w[i] = wire.Event{Seq: event.Seq, At: event.At.UTC(), Kind: string(event.Kind), Detail: event.Detail}
	}
	return w
}

func wireDeliveries(deliveries []store.Delivery) []wire.Delivery {
	w := make([]wire.Delivery, len(deliveries))
	for i, delivery := range deliveries {
		w[i] = wire.Delivery{Consumer: delivery.Consumer, DeliveredAt: utc(delivery.DeliveredAt), AcknowledgedAt: utc(delivery.AcknowledgedAt)}
	}
	return w
}

// storyteller reads holds and admissions out of a history.
type storyteller struct {
	audit *wire.Audit
	// held: the last hold has not ended. place is where it was last admitted.
	held     bool
	place    string
	scoredAt *time.Time
}

// decision is the stored form of the router's decision about a session.
type decision struct {
	Turn     int             `json:"turn"`
	Reason   string          `json:"reason"`
	Instance string          `json:"instance"`
	Epoch    int64           `json:"epoch"`
	Numbers  json.RawMessage `json:"numbers"`
}

func (t *storyteller) tell(event *store.SessionEvent) {
	at := event.At.UTC()
	switch event.Kind {
	case store.EventHeld, store.EventAdmitted, store.EventEnded:
		t.release(at)
	case store.EventScored:
		t.scoredAt = &at
		return
	}
	if event.Kind != store.EventHeld && event.Kind != store.EventAdmitted {
		return
	}
	var d decision
	if err := json.Unmarshal(event.Detail, &d); err != nil {
		// The event itself is among the audit's events, as it is stored.
		return
	}
	if event.Kind == store.EventHeld {
		t.held = true
		t.audit.Holds = append(t.audit.Holds, wire.Hold{Turn: d.Turn, Reason: d.Reason, From: at, Numbers: d.Numbers})
		return
	}
	admission := wire.Admission{Turn: d.Turn, At: at, Instance: d.Instance, Reason: d.Reason, Epoch: d.Epoch, Numbers: d.Numbers}
	if t.place != "" && t.place != d.Instance {
		admission.MovedFrom = t.place
	}
	t.place = d.Instance
	t.audit.Admissions = append(t.audit.Admissions, admission)
}

// release ends the hold that goes on, if any: a hold for another reason begins anew.
func (t *storyteller) release(at time.Time) {
	if !t.held {
		return
	}
	last := &t.audit.Holds[len(t.audit.Holds)-1]
	last.To, last.Seconds = &at, max(0, at.Sub(last.From).Seconds())
	t.held = false
}
