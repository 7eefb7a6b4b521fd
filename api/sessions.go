package api

import (
	"context"
	"fmt"
	"net/http"

	"github.com/google/uuid"

	"holdfast/api/wire"
	"holdfast/store"
)

type SessionPath struct {
	Session uuid.UUID `path:"session" format:"uuid" doc:"Id of the session, which is its sample's id."`
}

type sessionOutput struct{ Body wire.Session }

type listSessionsInput struct {
	RunPath
	Batch uuid.UUID `query:"batch" format:"uuid" doc:"Only sessions of this batch."`
	Task  uuid.UUID `query:"task" format:"uuid" doc:"Only members of this task."`
	Class string    `query:"class" doc:"Only sessions of this class."`
	State string    `query:"state" enum:"queued,dispatched,held,active,ended" doc:"Only sessions in this state."`
	After uuid.UUID `query:"after" format:"uuid" doc:"The next of the page before."`
	Limit int       `query:"limit" minimum:"1" maximum:"1000" default:"100"`
}

type sessionPageOutput struct{ Body wire.SessionPage }

type listTurnsInput struct {
	SessionPath
	After int `query:"after" minimum:"-1" default:"-1" doc:"Only turns after this one."`
	Limit int `query:"limit" minimum:"1" maximum:"1000" default:"100"`
}

type turnPageOutput struct{ Body wire.TurnPage }

type listEventsInput struct {
	SessionPath
	After int64 `query:"after" minimum:"0" default:"0" doc:"Only events with a greater seq."`
	Limit int   `query:"limit" minimum:"1" maximum:"1000" default:"100"`
}

type eventPageOutput struct{ Body wire.EventPage }

type cancelInput struct {
	SessionPath
	Body *wire.Cancel `required:"false"`
}

func (s *Server) registerSessions() {
	const tag = "sessions"
	missing := []int{http.StatusNotFound}
	register(s, operation{
		id: "list-sessions", method: http.MethodGet, path: "/runs/{run}/sessions", tag: tag,
		summary: "List sessions of a run in release order", terms: terms{roles: anyone}, problems: missing,
	}, s.listSessions)
	register(s, operation{
		id: "get-session", method: http.MethodGet, path: "/sessions/{session}", tag: tag,
		summary: "Read a session: where it stands, where its time went", terms: terms{roles: anyone}, problems: missing,
	}, s.getSession)
	register(s, operation{
		id: "list-turns", method: http.MethodGet, path: "/sessions/{session}/turns", tag: tag,
		summary: "Read a session's model calls, with predicted and actual cached tokens", terms: terms{roles: anyone}, problems: []int{http.StatusNotFound, http.StatusGone},
	}, s.listTurns)
	register(s, operation{
		id: "list-events", method: http.MethodGet, path: "/sessions/{session}/events", tag: tag,
		summary: "Read a session's history: released, held and why, admitted where and by which numbers, ended, delivered", terms: terms{roles: anyone}, problems: []int{http.StatusNotFound, http.StatusGone},
	}, s.listEvents)
	register(s, operation{
		id: "cancel-session", method: http.MethodPost, path: "/sessions/{session}/cancel", tag: tag,
		summary:     "Cancel a session",
		description: "A queued session ends at once, one under way soon. A session that has ended is returned as it is.",
		terms:       terms{roles: caretakers}, problems: append(missing, withBody...),
	}, s.cancelSession)
}

func (s *Server) listSessions(ctx context.Context, in *listSessionsInput) (*sessionPageOutput, error) {
	sessions, err := s.store.Sessions(ctx, store.SessionQuery{
		RunID: in.Run, BatchID: optionalID(in.Batch), TaskID: optionalID(in.Task), Class: in.Class,
		State: store.SessionState(in.State), After: optionalID(in.After), Limit: in.Limit,
	})
	if err != nil {
		return nil, noRun(err, in.Run)
	}
	page := wire.SessionPage{Sessions: make([]wire.Session, len(sessions))}
	for i := range sessions {
		page.Sessions[i] = wireSession(&sessions[i])
	}
	if err := s.addQueueReasons(ctx, page.Sessions); err != nil {
		return nil, noRun(err, in.Run)
	}
	if len(sessions) == in.Limit {
		page.Next = sessions[len(sessions)-1].ID.String()
	}
	return &sessionPageOutput{Body: page}, nil
}

// historyGone refuses what is left of a history that was pruned; found entries are
// of one that was not.
func (s *Server) historyGone(ctx context.Context, session uuid.UUID, found int) error {
	if found > 0 {
		return nil
	}
	gone, err := s.store.HistoryPruned(ctx, session)
	if err == nil && gone {
		err = newProblem(http.StatusGone, kindPruned, fmt.Sprintf("events and turns of session %s are pruned; the session itself and its sample's numbers are kept", session))
	}
	return err
}

func noSession(err error, session uuid.UUID) error {
	return notFound(err, "session "+session.String())
}

func (s *Server) getSession(ctx context.Context, in *SessionPath) (*sessionOutput, error) {
	session, err := s.store.Session(ctx, in.Session)
	if err != nil {
		return nil, noSession(err, in.Session)
	}
	one := []wire.Session{wireSession(&session)}
	if err := s.addQueueReasons(ctx, one); err != nil {
		return nil, noSession(err, in.Session)
	}
	return &sessionOutput{Body: one[0]}, nil
}

// addQueueReasons says of sessions of one run why those that are queued are.
func (s *Server) addQueueReasons(ctx context.Context, sessions []wire.Session) error {
	reason := ""
	for i := range sessions {
		if sessions[i].State != string(store.SessionQueued) {
			continue
		}
		if reason == "" {
			pressure, err := s.store.BackPressure(ctx, sessions[i].Run)
			if err != nil {
				return err
			}
			if reason = pressure.QueueReason(); reason == "" {
				return nil
			}
		}
		sessions[i].QueueReason = reason
	}
	return nil
}

func (s *Server) cancelSession(ctx context.Context, in *cancelInput) (*sessionOutput, error) {
	reason := "cancelled over the API"
	if in.Body != nil && in.Body.Reason != "" {
		reason = in.Body.Reason
	}
	session, err := s.store.CancelSession(ctx, in.Session, reason)
	if err != nil {
		return nil, noSession(err, in.Session)
	}
	return &sessionOutput{Body: wireSession(&session)}, nil
}

func (s *Server) listTurns(ctx context.Context, in *listTurnsInput) (*turnPageOutput, error) {
	turns, err := s.store.SessionTurns(ctx, in.Session, in.After, in.Limit)
	if err != nil {
		return nil, noSession(err, in.Session)
	}
	if err := s.historyGone(ctx, in.Session, len(turns)); err != nil {
		return nil, err
	}
	page := wire.TurnPage{Session: in.Session, Turns: make([]wire.Turn, len(turns))}
	for i := range turns {
		page.Turns[i] = wireTurn(&turns[i])
	}
	if len(turns) == in.Limit {
		page.Next = &turns[len(turns)-1].Turn
	}
	return &turnPageOutput{Body: page}, nil
}

func (s *Server) listEvents(ctx context.Context, in *listEventsInput) (*eventPageOutput, error) {
	found, err := s.store.SessionEvents(ctx, in.Session, in.After, in.Limit)
	if err != nil {
		return nil, noSession(err, in.Session)
	}
	if err := s.historyGone(ctx, in.Session, len(found.Events)); err != nil {
		return nil, err
	}
	page := wire.EventPage{
		Session: in.Session, Events: wireEvents(found.Events), Deliveries: wireDeliveries(found.Deliveries),
	}
	if found.More && len(found.Events) > 0 {
		page.Next = &found.Events[len(found.Events)-1].Seq
	}
	return &eventPageOutput{Body: page}, nil
}

func wireSession(session *store.Session) wire.Session {
	w := wire.Session{
		ID: session.ID, Run: session.RunID, Pool: session.Pool, Batch: session.BatchID, Task: session.TaskID, TaskID: session.ExternalTaskID,
		Member: session.Member, GroupSize: session.GroupSize, Class: session.Class, State: string(session.State),
		PolicyVersion: session.PolicyVersion, Instance: session.Instance, Instances: session.Instances,
		HoldReason: session.HoldReason, Holds: session.Holds, CancelRequested: session.CancelRequested, CancelReason: session.CancelReason,
		Usage: wireUsage(&session.Usage), Times: wireTimes(&session.Times), ReleasedAt: session.ReleasedAt.UTC(),
		DispatchedAt: utc(session.DispatchedAt), FirstAdmittedAt: utc(session.FirstAdmittedAt), HeldSince: utc(session.HeldSince), EndedAt: utc(session.EndedAt),
		SampleSeq: session.SampleSeq, Reward: session.Reward, ScoreDetail: session.ScoreDetail, Problem: session.Problem,
		Restarts: session.Restarts, DeadlineAt: utc(session.DeadlineAt),
	}
	if session.Status != 0 {
		w.Status = session.Status.String()
	}
	return w
}

func wireTurn(turn *store.Turn) wire.Turn {
	w := wire.Turn{
		Turn: turn.Turn, Instance: turn.Instance, Epoch: turn.Epoch, PolicyVersion: turn.PolicyVersion,
		PromptTokens: turn.PromptTokens, PredictedCachedTokens: turn.PredictedCachedTokens,
		OutputTokens: turn.OutputTokens, AppendedTokens: turn.AppendedTokens,
		StartedAt: turn.StartedAt.UTC(), CommittedAt: turn.CommittedAt.UTC(),
		QueueSeconds: turn.QueueSeconds, PrefillSeconds: turn.PrefillSeconds, DecodeSeconds: turn.DecodeSeconds,
		TotalSeconds: turn.TotalSeconds, ToolSeconds: turn.ToolSeconds, FinishReason: turn.FinishReason, KeptTokens: turn.KeptTokens, Attempts: turn.Attempts,
		Resumes: turn.Resumes, TokensRegenerated: turn.TokensRegenerated,
	}
	if turn.CachedTokens >= 0 {
		w.CachedTokens = &turn.CachedTokens
	}
	return w
}

func wireUsage(usage *store.Usage) wire.Usage {
	return wire.Usage{
		Turns: usage.Turns, PromptTokens: usage.PromptTokens, CachedTokens: usage.CachedTokens,
		OutputTokens: usage.OutputTokens, ContextTokens: usage.ContextTokens, TokenSeconds: usage.TokenSeconds,
		Rewrites: usage.Rewrites, EarlierTokens: usage.EarlierTokens,
		Resumes: usage.Resumes, TokensRegenerated: usage.TokensRegenerated,
	}
}

func wireTimes(times *store.Times) wire.Times {
	return wire.Times{
		HeldSeconds: times.HeldSeconds, ResidencySeconds: times.ResidencySeconds, QueueSeconds: times.QueueSeconds,
		PrefillSeconds: times.PrefillSeconds, DecodeSeconds: times.DecodeSeconds, ToolSeconds: times.ToolSeconds, ScoreSeconds: times.ScoreSeconds,
	}
}
