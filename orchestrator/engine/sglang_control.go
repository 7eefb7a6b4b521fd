package engine

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"holdfast/orchestrator/engine/internal/jsonscan"
)

var _ Controller = (*SGLang)(nil)

const sglangControlHint = "this version of SGLang cannot pause by mode or name its weights, a newer one can"

// Pause implements Controller. SGLang has no mode that lets generations finish, so
// PauseWait polls the engine's load until it is idle and pauses it then: the
// caller must have stopped sending, and what others send meanwhile delays it until
// ctx ends. Should a request slip in between the last look and the pause it is
// frozen, not cut.
func (s *SGLang) Pause(ctx context.Context, mode PauseMode) error {
	var name string
	switch mode {
	case PauseAbort:
		name = "abort"
	case PauseKeep:
		name = "retract"
	case PauseInPlace:
		name = "in_place"
	case PauseWait:
		if err := s.awaitIdle(ctx); err != nil {
			return err
		}
		name = "in_place"
	default:
		return &Error{Class: FailTurn, Message: "pausing: " + mode.String() + " is no mode"}
	}
	_, err := s.post(ctx, "/pause_generation", []byte(`{"mode":"`+name+`"}`))
	return missing(err, "/pause_generation", sglangControlHint)
}

// awaitIdle returns once the engine has nothing running or queued.
func (s *SGLang) awaitIdle(ctx context.Context) error {
	ticker := time.NewTicker(s.idlePoll)
	defer ticker.Stop()
	for {
		busy, err := s.requests(ctx)
		if err != nil {
			return err
		}
		if busy == 0 && s.inFlight.Load() == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return transportError(ctx, "waiting for the engine to be idle", ctx.Err())
		case <-ticker.C:
		}
	}
}

// requests is how many requests the engine runs or keeps queued, from the freshest
// source it has: the metrics page lags by some decode steps.
func (s *SGLang) requests(ctx context.Context) (int64, error) {
	for _, path := range []string{"/v1/loads", "/get_load"} {
		body, err := s.get(ctx, path, maxInfoBodyBytes)
		if hasStatus(err, http.StatusNotFound, http.StatusMethodNotAllowed) {
			continue
		}
		if err != nil {
			return 0, err
		}
		n, err := parseLoads(body)
		if err != nil {
			return 0, &Error{Class: RetryElsewhere, Message: "reading the engine's load", Err: err}
		}
		return n, nil
	}
	m, err := s.Metrics(ctx)
	return int64(m.Running) + int64(m.Waiting), err
}

// parseLoads adds up what the data-parallel ranks have to do. Older versions answer
// with the bare array and count all requests in one figure.
func parseLoads(body []byte) (int64, error) {
	type load struct {
		Running int64 `json:"num_running_reqs"`
		Waiting int64 `json:"num_waiting_reqs"`
		All     int64 `json:"num_reqs"`
	}
	var doc struct {
		Loads []load `json:"loads"`
	}
	if json.Unmarshal(body, &doc.Loads) != nil {
		if err := json.Unmarshal(body, &doc); err != nil {
			return 0, err
		}
	}
	var n int64
	for _, l := range doc.Loads {
		n += max(bounded(1<<40, &l.Running)+bounded(1<<40, &l.Waiting), bounded(1<<40, &l.All))
	}
	return n, nil
}

// Resume implements Controller.
func (s *SGLang) Resume(ctx context.Context) error {
	_, err := s.post(ctx, "/continue_generation", []byte(`{}`))
	return missing(err, "/continue_generation", sglangControlHint)
}

// ResetCache implements Controller. SGLang refuses with 400 while requests are
// running or queued.
func (s *SGLang) ResetCache(ctx context.Context) error {
	_, err := s.post(ctx, "/flush_cache", []byte(`{}`))
	if hasStatus(err, http.StatusBadRequest) {
		return &Error{Class: RetryHere, StatusCode: http.StatusBadRequest, Message: "the cache is not flushed while requests are pending"}
	}
	return missing(err, "/flush_cache", "it is not SGLang, or something before it hides the route")
}

// WeightVersion implements Controller.
func (s *SGLang) WeightVersion(ctx context.Context) (string, error) {
	for _, path := range []string{"/get_weight_version", "/model_info", "/get_model_info"} {
		body, err := s.get(ctx, path, maxInfoBodyBytes)
		if hasStatus(err, http.StatusNotFound, http.StatusMethodNotAllowed) {
			continue
		}
		if err != nil {
			return "", err
		}
		return parseWeightVersion(body)
	}
	return "", nil
}

func parseWeightVersion(body []byte) (string, error) {
	var doc struct {
		WeightVersion json.RawMessage `json:"weight_version"`
	}
	if err := json.Unmarshal(body, &doc); err != nil {
		return "", &Error{Class: RetryElsewhere, Message: "reading the engine's weight version", Err: err}
	}
	return weightVersion(doc.WeightVersion), nil
}

// SetWeightVersion implements Controller. By default SGLang would abort everything.
func (s *SGLang) SetWeightVersion(ctx context.Context, version string) error {
	body := jsonscan.WriteString([]byte(`{"new_version":`), version)
	_, err := s.post(ctx, "/update_weight_version", append(body, `,"abort_all_requests":false}`...))
	return missing(err, "/update_weight_version", sglangControlHint)
}
