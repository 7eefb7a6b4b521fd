package api

import (
	"context"
	"errors"
	"net/http"

	"github.com/google/uuid"

	"holdfast/api/wire"
	"holdfast/store"
)

// RunPath is exported for huma, which passes over embedded types that are not. It is the path parameter of everything below a run.
type RunPath struct {
	Run uuid.UUID `path:"run" format:"uuid" doc:"Id of the run."`
}

type runOutput struct{ Body wire.Run }

type contractOutput struct{ Body wire.Contract }

type createRunInput struct{ Body wire.NewRun }

type listRunsInput struct {
	Pool   string    `query:"pool" doc:"Only runs of this pool."`
	State  string    `query:"state" enum:"active,ended" doc:"Only runs in this state."`
	Before uuid.UUID `query:"before" format:"uuid" doc:"Only runs created before this one: the next of the page before."`
	Limit  int       `query:"limit" minimum:"1" maximum:"1000" default:"100"`
}

type runPageOutput struct{ Body wire.RunPage }

type putContractInput struct {
	RunPath
	Body wire.NewContract
}

type contractHistoryOutput struct{ Body wire.ContractHistory }

// withBody are the problems of operations that read a body.
var withBody = []int{http.StatusBadRequest, http.StatusRequestTimeout, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType}

const tagRuns = "runs"

func (s *Server) registerRuns() {
	register(s, operation{
		id: "create-run", method: http.MethodPost, path: "/runs", tag: tagRuns, status: http.StatusCreated,
		summary:     "Open a run with its contract",
		description: "A pool serves one active run at a time; a second one is refused with 409.",
		terms:       terms{roles: trainers}, problems: append([]int{http.StatusConflict}, withBody...),
	}, s.createRun)
	register(s, operation{
		id: "list-runs", method: http.MethodGet, path: "/runs", tag: tagRuns,
		summary: "List runs, newest first", terms: terms{roles: anyone},
	}, s.listRuns)
	register(s, operation{
		id: "get-run", method: http.MethodGet, path: "/runs/{run}", tag: tagRuns,
		summary: "Read a run with its current contract", terms: terms{roles: anyone}, problems: []int{http.StatusNotFound},
	}, s.getRun)
	register(s, operation{
		id: "end-run", method: http.MethodPost, path: "/runs/{run}/end", tag: tagRuns,
		summary:     "End a run for good",
		description: "Queued sessions end as cancelled at once, those under way are asked to cancel. Samples stay readable. Ending it again changes nothing.",
		terms:       terms{roles: caretakers}, problems: []int{http.StatusNotFound},
	}, s.endRun)
	register(s, operation{
		id: "put-contract", method: http.MethodPut, path: "/runs/{run}/contract", tag: tagRuns,
		summary:     "Make a new version of the contract current",
		description: "It holds for what is released from then on. A contract equal to the current one makes no new version.",
		terms:       terms{roles: trainers}, problems: append([]int{http.StatusNotFound, http.StatusConflict}, withBody...),
	}, s.putContract)
	register(s, operation{
		id: "contract-history", method: http.MethodGet, path: "/runs/{run}/contract/history", tag: tagRuns,
		summary: "Read all versions of the contract, oldest first", terms: terms{roles: anyone}, problems: []int{http.StatusNotFound},
	}, s.contractHistory)
}

func (s *Server) createRun(ctx context.Context, in *createRunInput) (*runOutput, error) {
	run, err := s.store.CreateRun(ctx, store.NewRun{Name: in.Body.Name, Pool: in.Body.Pool, Contract: contractOf(&in.Body.Contract)})
	if err != nil {
		return nil, err
	}
	return &runOutput{Body: wireRun(&run)}, nil
}

func (s *Server) listRuns(ctx context.Context, in *listRunsInput) (*runPageOutput, error) {
	query := store.RunQuery{Pool: in.Pool, State: store.RunState(in.State), Before: optionalID(in.Before), Limit: in.Limit}
	runs, err := s.store.Runs(ctx, query)
	if err != nil {
		return nil, err
	}
	page := wire.RunPage{Runs: make([]wire.Run, len(runs))}
	for i := range runs {
		page.Runs[i] = wireRun(&runs[i])
	}
	if len(runs) == in.Limit {
		page.Next = runs[len(runs)-1].ID.String()
	}
	return &runPageOutput{Body: page}, nil
}

func (s *Server) getRun(ctx context.Context, in *RunPath) (*runOutput, error) {
	run, err := s.store.Run(ctx, in.Run)
	if err != nil {
		return nil, noRun(err, in.Run)
	}
	return &runOutput{Body: wireRun(&run)}, nil
}

func (s *Server) endRun(ctx context.Context, in *RunPath) (*runOutput, error) {
	run, err := s.store.EndRun(ctx, in.Run)
	if err != nil {
		return nil, noRun(err, in.Run)
	}
	return &runOutput{Body: wireRun(&run)}, nil
}

func (s *Server) putContract(ctx context.Context, in *putContractInput) (*contractOutput, error) {
	version, err := s.store.PutContract(ctx, in.Run, contractOf(&in.Body))
	if err != nil {
		return nil, noRun(err, in.Run)
	}
	return &contractOutput{Body: wireContract(&version)}, nil
}

func (s *Server) contractHistory(ctx context.Context, in *RunPath) (*contractHistoryOutput, error) {
	versions, err := s.store.ContractHistory(ctx, in.Run)
	if err != nil {
		return nil, noRun(err, in.Run)
	}
	history := wire.ContractHistory{Run: in.Run, Versions: make([]wire.Contract, len(versions))}
	for i := range versions {
		history.Versions[i] = wireContract(&versions[i])
	}
	return &contractHistoryOutput{Body: history}, nil
}

// notFound says what is not there; other errors pass.
func notFound(err error, what string) error {
	if !errors.Is(err, store.ErrNotFound) {
		return err
	}
	return newProblem(http.StatusNotFound, kindNotFound, "there is no "+what).because(err)
}

func noRun(err error, run uuid.UUID) error { return notFound(err, "run "+run.String()) }

// optionalID turns an absent query parameter into nil.
func optionalID(id uuid.UUID) *uuid.UUID {
	if id == uuid.Nil {
		return nil
	}
	return &id
}

func contractOf(given *wire.NewContract) store.Contract {
	contract := store.Contract{
		MaxConcurrency: given.MaxConcurrency, StalenessBound: given.StalenessBound, StalePolicy: store.StalePolicy(given.StalePolicy),
		GroupPolicy: store.GroupPolicy(given.GroupPolicy), GroupRefills: given.GroupRefills, SpareMembers: given.SpareMembers,
		UndeliveredLimit: given.UndeliveredLimit, MaxRestarts: given.MaxRestarts, FreshnessBudgetSeconds: given.FreshnessBudgetSeconds,
	}
	for _, class := range given.Classes {
		contract.Classes = append(contract.Classes, store.ClassShare{Class: class.Class, Share: class.Share, FreshnessBudgetSeconds: class.FreshnessBudgetSeconds})
	}
	return contract
}

func wireRun(run *store.Run) wire.Run {
	return wire.Run{
		ID: run.ID, Name: run.Name, Pool: run.Pool, State: string(run.State), Contract: wireContract(&run.Contract),
		CreatedAt: run.CreatedAt.UTC(), EndedAt: utc(run.EndedAt),
	}
}

func wireContract(version *store.ContractVersion) wire.Contract {
	return wire.Contract{
		Version: version.Version, Classes: wireShares(version.Contract.Classes), Given: wireShares(version.Given),
		MaxConcurrency: version.Contract.MaxConcurrency, StalenessBound: version.Contract.StalenessBound,
		StalePolicy: string(version.Contract.StalePolicy), GroupPolicy: string(version.Contract.GroupPolicy),
		GroupRefills: version.Contract.GroupRefills, SpareMembers: version.Contract.SpareMembers,
		MaxRestarts: version.Contract.MaxRestarts, FreshnessBudgetSeconds: version.Contract.FreshnessBudgetSeconds,
		UndeliveredLimit: version.Contract.UndeliveredLimit, CreatedAt: version.CreatedAt.UTC(),
	}
}

func wireShares(classes []store.ClassShare) []wire.ClassShare {
	shares := make([]wire.ClassShare, len(classes))
	for i, class := range classes {
		shares[i] = wire.ClassShare{Class: class.Class, Share: class.Share, FreshnessBudgetSeconds: class.FreshnessBudgetSeconds}
	}
	return shares
}
