package engine

import (
	"context"
	"encoding/json"
	"net/http"

	"holdfast/orchestrator/engine/internal/jsonscan"
)

var _ Controller = (*VLLM)(nil)

// vllmControlHint names what opens these routes; where they are has changed between
// versions.
const vllmControlHint = "vLLM opens it with the environment variable VLLM_SERVER_DEV_MODE=1"

// Pause implements Controller. A version without modes knows only the older flag
// for waiting, which is sent as well; it treats the other modes as abort, so that
// what it cuts comes back as aborted.
func (v *VLLM) Pause(ctx context.Context, mode PauseMode) error {
	var query string
	switch mode {
	case PauseAbort:
		query = "mode=abort"
	case PauseWait:
		query = "mode=wait&wait_for_inflight_requests=true"
	case PauseKeep:
		query = "mode=keep&clear_cache=true"
	case PauseInPlace:
		query = "mode=keep&clear_cache=false"
	default:
		return &Error{Class: FailTurn, Message: "pausing: " + mode.String() + " is no mode"}
	}
	_, err := v.post(ctx, "/pause?"+query, nil)
	return missing(err, "/pause", vllmControlHint)
}

// Resume implements Controller.
func (v *VLLM) Resume(ctx context.Context) error {
	_, err := v.post(ctx, "/resume", nil)
	return missing(err, "/resume", vllmControlHint)
}

// ResetCache implements Controller. Some versions answer 200 although they could
// not reset, because blocks were in use, and only log it: pause first.
func (v *VLLM) ResetCache(ctx context.Context) error {
	body, err := v.post(ctx, "/reset_prefix_cache", nil)
	const pending = "the cache is not reset while requests are pending"
	if hasStatus(err, http.StatusBadRequest, http.StatusConflict, http.StatusServiceUnavailable) {
		return &Error{Class: RetryHere, Message: pending, Err: err}
	}
	if err != nil {
		return missing(err, "/reset_prefix_cache", vllmControlHint)
	}
	var answer struct {
		Success *bool `json:"success"`
	}
	if json.Unmarshal(body, &answer) == nil && answer.Success != nil && !*answer.Success {
		return &Error{Class: RetryHere, Message: pending}
	}
	return nil
}

// WeightVersion implements Controller. Before 2026 vLLM had no word for it.
func (v *VLLM) WeightVersion(ctx context.Context) (string, error) {
	body, err := v.get(ctx, "/weight_info", maxInfoBodyBytes)
	if hasStatus(err, http.StatusNotFound, http.StatusMethodNotAllowed) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return parseWeightVersion(body)
}

// SetWeightVersion implements Controller. It names the weights alone where vLLM can
// do that, and otherwise by ending the update, which some versions refuse if the
// trainer has ended it.
func (v *VLLM) SetWeightVersion(ctx context.Context, version string) error {
	_, err := v.post(ctx, "/update_weight_version", append(jsonscan.WriteString([]byte(`{"new_version":`), version), '}'))
	if hasStatus(err, http.StatusNotFound, http.StatusMethodNotAllowed) {
		_, err = v.post(ctx, "/finish_weight_update", append(jsonscan.WriteString([]byte(`{"weight_version":`), version), '}'))
	}
	return missing(err, "/finish_weight_update", vllmControlHint)
}
