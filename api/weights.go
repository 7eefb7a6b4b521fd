package api

import (
	"context"
	"fmt"
	"net/http"

	"holdfast/api/wire"
	"holdfast/store"
)

// WeightPath names one update of a pool.
type WeightPath struct {
	PoolPath
	Version int64 `path:"version" minimum:"0" doc:"Policy version of the update."`
}

type weightOutput struct{ Body wire.WeightUpdate }

type weightPageOutput struct{ Body wire.WeightUpdatePage }

type beginWeightsInput struct {
	PoolPath
	Body wire.NewWeightUpdate
}

type listWeightsInput struct {
	PoolPath
	Before int64 `query:"before" minimum:"0" doc:"Only versions below this one: the next of the page before."`
	Limit  int   `query:"limit" minimum:"1" maximum:"1000" default:"100"`
}

type commitWeightsInput struct {
	WeightPath
	Body *wire.CommitWeights `required:"false"`
}

func (s *Server) registerWeights() {
	const tag = "weights"
	asked := append([]int{http.StatusNotFound, http.StatusConflict}, withBody...)
	register(s, operation{
		id: "begin-weight-update", method: http.MethodPost, path: "/pools/{pool}/weight-updates", tag: tag, status: http.StatusAccepted,
		summary:     "Begin an update of the engines' weights: they are paused",
		description: "Answers at once; read the update until it is paused, load the weights, then commit. Asking the same again returns the update, and tries again one that failed to pause. While another update is open it is refused with 409.",
		terms:       terms{roles: trainers}, problems: asked,
	}, s.beginWeights)
	register(s, operation{
		id: "list-weight-updates", method: http.MethodGet, path: "/pools/{pool}/weight-updates", tag: tag,
		summary: "List the history of a pool's policy versions, newest first", terms: terms{roles: anyone}, problems: []int{http.StatusNotFound},
	}, s.listWeights)
	register(s, operation{
		id: "get-weight-update", method: http.MethodGet, path: "/pools/{pool}/weight-updates/{version}", tag: tag,
		summary: "Read an update with every instance's place in it", terms: terms{roles: anyone}, problems: []int{http.StatusNotFound},
	}, s.getWeights)
	register(s, operation{
		id: "commit-weight-update", method: http.MethodPost, path: "/pools/{pool}/weight-updates/{version}/commit", tag: tag, status: http.StatusAccepted,
		summary:     "Bring the version into force, once its weights are loaded",
		description: "Caches are reset or salted and the weights named; then the pool, its instances and the update change in one step, and the engines are resumed. Repeating it changes nothing, and tries again one that failed.",
		terms:       terms{roles: trainers}, problems: asked,
	}, s.commitWeights)
	register(s, operation{
		id: "cancel-weight-update", method: http.MethodPost, path: "/pools/{pool}/weight-updates/{version}/cancel", tag: tag, status: http.StatusAccepted,
		summary:     "Give the update up: the engines are resumed with the old weights",
		description: "Put the old weights back first if they were replaced. Refused with 409 while the update is committing and once its version is in force. The version may be begun anew.",
		terms:       terms{roles: caretakers}, problems: []int{http.StatusNotFound, http.StatusConflict},
	}, s.cancelWeights)
}

func noWeights(err error, in *WeightPath) error {
	return notFound(err, fmt.Sprintf("weight update %d of pool %q", in.Version, in.Pool))
}

func (s *Server) beginWeights(ctx context.Context, in *beginWeightsInput) (*weightOutput, error) {
	update, err := s.store.BeginWeightUpdate(ctx, store.NewWeightUpdate{
		Pool: in.Pool, PolicyVersion: in.Body.PolicyVersion, Mode: in.Body.Mode, Cache: store.WeightCache(in.Body.Cache),
		Control: store.InstanceControl(in.Body.Control), PauseTimeoutSeconds: in.Body.PauseTimeoutSeconds,
	})
	if err != nil {
		return nil, noPool(err, in.Pool)
	}
	return &weightOutput{Body: wireWeights(&update)}, nil
}

func (s *Server) listWeights(ctx context.Context, in *listWeightsInput) (*weightPageOutput, error) {
	var before *int64
	if in.Before > 0 {
		before = &in.Before
	}
	updates, err := s.store.WeightUpdates(ctx, in.Pool, before, in.Limit)
	if err != nil {
		return nil, noPool(err, in.Pool)
	}
	page := wire.WeightUpdatePage{Pool: in.Pool, Updates: make([]wire.WeightUpdate, len(updates))}
	for i := range updates {
		page.Updates[i] = wireWeights(&updates[i])
	}
	if len(updates) == in.Limit {
		page.Next = updates[len(updates)-1].PolicyVersion
	}
	return &weightPageOutput{Body: page}, nil
}

func (s *Server) getWeights(ctx context.Context, in *WeightPath) (*weightOutput, error) {
	update, err := s.store.WeightUpdate(ctx, in.Pool, in.Version)
	if err != nil {
		return nil, noWeights(err, in)
	}
	return &weightOutput{Body: wireWeights(&update)}, nil
}

func (s *Server) commitWeights(ctx context.Context, in *commitWeightsInput) (*weightOutput, error) {
	var cache store.WeightCache
	if in.Body != nil {
		cache = store.WeightCache(in.Body.Cache)
	}
	update, err := s.store.CommitWeightUpdate(ctx, in.Pool, in.Version, cache)
	if err != nil {
		return nil, noWeights(err, &in.WeightPath)
	}
	return &weightOutput{Body: wireWeights(&update)}, nil
}

func (s *Server) cancelWeights(ctx context.Context, in *WeightPath) (*weightOutput, error) {
	update, err := s.store.CancelWeightUpdate(ctx, in.Pool, in.Version)
	if err != nil {
		return nil, noWeights(err, in)
	}
	return &weightOutput{Body: wireWeights(&update)}, nil
}

func wireWeights(u *store.WeightUpdate) wire.WeightUpdate {
	update := wire.WeightUpdate{
		Pool: u.Pool, PolicyVersion: u.PolicyVersion, FromVersion: u.FromVersion, Source: string(u.Source), Mode: u.Mode,
		Cache: string(u.Cache), Control: string(u.Control), State: string(u.State), FailedStep: string(u.FailedStep), Problem: u.Problem,
		Attempt: u.Attempt, PauseTimeoutSeconds: u.PauseTimeoutSeconds, SessionsOverBound: u.SessionsOverBound, SessionsEnded: u.SessionsEnded,
		BeganAt: u.BeganAt.UTC(), ChangedAt: u.ChangedAt.UTC(), AdvancedAt: utc(u.AdvancedAt),
		Instances: make([]wire.WeightInstance, len(u.Instances)),
	}
	for i, in := range u.Instances {
		update.Instances[i] = wire.WeightInstance{
			Instance: in.Instance, State: string(in.State), Reached: string(in.Reached), Problem: in.Problem, ChangedAt: in.ChangedAt.UTC(),
		}
		if in.State == store.PlaceGone {
			update.Gone++
		}
	}
	return update
}
