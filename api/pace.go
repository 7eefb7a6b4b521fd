package api

import (
	"context"
	"math"
	"net/http"

	"holdfast/api/wire"
	"holdfast/orchestrator/pace"
	"holdfast/store"
)

// paceQuery is what a trainer tells of itself when it asks for advice.
type paceQuery struct {
	RunPath
	GroupSize       int64   `query:"group_size" minimum:"1" maximum:"1024" default:"1" doc:"Members of each task that would be released: the advice is in whole groups."`
	StepSamples     int64   `query:"step_samples" minimum:"0" maximum:"10000000" doc:"Usable samples that one training step consumes. Then the bound is kept by counting samples, which is exact; without it what was acknowledged between two versions stands in."`
	AskAgainSeconds float64 `query:"ask_again_seconds" minimum:"0" maximum:"3600" default:"15" doc:"When the advice is asked for again: until then the pool should have enough to do."`
}

type paceOutput struct{ Body wire.Pace }

func (s *Server) registerPace() {
	register(s, operation{
		id: "pace", method: http.MethodGet, path: "/runs/{run}/pace", tag: "observation",
		summary:     "Ask how many more sessions of each class may be released now",
		description: "So that samples stay within the contract's staleness bound, the pool stays busy and the released shares stay rho. Computed from durable counters and from what was measured over the run's last endings and the pool's last versions; it is advice, and nothing is refused for not following it. Acknowledge samples when the step that used them is committed: what is unacknowledged counts as waiting for a step.",
		terms:       terms{roles: anyone}, problems: []int{http.StatusNotFound},
	}, s.pace)
}

func (s *Server) pace(ctx context.Context, in *paceQuery) (*paceOutput, error) {
	if math.IsNaN(in.AskAgainSeconds) {
		return nil, invalid("query.ask_again_seconds", "must be a number of seconds from 0 to 3600")
	}
	figures, err := s.store.Pace(ctx, in.Run)
	if err != nil {
		return nil, noRun(err, in.Run)
	}
	ask := pace.Ask{GroupSize: in.GroupSize, StepSamples: in.StepSamples, AskAgainSeconds: in.AskAgainSeconds}
	if in.GroupSize > 1 {
		ask.SpareMembers = figures.SpareMembers
	}
	state := paceState(&figures)
	advice := pace.Advise(&state, ask)
	answer := wirePace(&figures, &advice, ask)
	answer.Run, answer.Why = in.Run, advice.Why(&state)
	return &paceOutput{Body: answer}, nil
}

func paceState(f *store.PaceFigures) pace.State {
	state := pace.State{
		RunEnded: f.RunEnded, MaxConcurrency: f.MaxConcurrency, StalenessBound: f.StalenessBound,
		VersionSeconds: f.VersionSeconds, VersionAgeSeconds: f.VersionAgeSeconds, BusySeconds: f.BusySeconds, ServiceMeanSeconds: f.ServiceMeanSeconds, SecondsSinceEnded: f.SecondsSinceEnded,
		Unacknowledged: f.Unacknowledged, StepSamples: f.StepSamples, Undelivered: f.Undelivered,
		Classes: make([]pace.Class, len(f.Classes)),
	}
	if f.UndeliveredLimit != nil {
		state.UndeliveredLimit = int64(*f.UndeliveredLimit)
	}
	for i, c := range f.Classes {
		state.Held += c.Held
		state.UnderWay += c.Waiting
		state.Classes[i] = pace.Class{
			Name: c.Class, Share: c.Rho, Released: c.Released, Outstanding: c.Outstanding,
			EndedInWindow: c.EndedInWindow, ServiceP99Seconds: c.ServiceP99Seconds,
		}
	}
	return state
}

func wirePace(f *store.PaceFigures, a *pace.Advice, ask pace.Ask) wire.Pace {
	answer := wire.Pace{
		At: f.At.UTC(), PolicyVersion: f.PolicyVersion, ReleaseSessions: a.Sessions, Classes: make([]wire.ClassPace, len(f.Classes)),
		LimitedBy: a.Limit.String(), LimitedByClass: a.LimitClass, Idle: a.Idle,
		StalenessRoomSessions: a.StalenessRoom, UndeliveredRoomSessions: a.UndeliveredRoom, BacklogRoomSessions: a.BacklogRoom,
		TargetBacklogSessions: a.TargetBacklog, StalenessBound: f.StalenessBound, HorizonSeconds: a.HorizonSeconds,
		VersionSeconds: f.VersionSeconds, VersionAgeSeconds: f.VersionAgeSeconds, EndingsPerSecond: a.EndingsPerSecond,
		StepSamples: a.StepSamples, UnacknowledgedSamples: f.Unacknowledged, GroupSize: ask.GroupSize, SpareMembers: ask.SpareMembers,
	}
	var released int64
	for i := range f.Classes {
		released += f.Classes[i].Released
	}
	for i, c := range f.Classes {
		class := wire.ClassPace{
			Class: c.Class, ReleaseSessions: a.Classes[i].Sessions, ReleaseGroups: a.Classes[i].Groups, Rho: c.Rho, Released: c.Released,
			Backlog: c.Outstanding, EndedInWindow: c.EndedInWindow, ServiceP99Seconds: c.ServiceP99Seconds,
		}
		if released > 0 {
			class.ReleasedShare = float64(c.Released) / float64(released)
		}
		answer.Classes[i] = class
	}
	return answer
}
