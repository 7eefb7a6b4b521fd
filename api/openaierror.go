package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/labstack/echo/v4"
)

// openAIError is OpenAI's form of a refusal.
type openAIError struct {
	Error openAIErrorBody `json:"error"`
}

type openAIErrorBody struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    string  `json:"code"`
}

// retryHeader tells OpenAI's client libraries whether to try again, which they would
// otherwise guess from the status.
const retryHeader = "X-Should-Retry"

// openAIErrorOf translates a problem; the code is the end of the problem's type.
func openAIErrorOf(p *problem) openAIError {
	body := openAIErrorBody{Message: p.Detail, Type: "invalid_request_error", Code: strings.TrimPrefix(p.Type, problemTypePrefix)}
	switch {
	case p.Status == http.StatusUnauthorized:
		body.Type, body.Code = "authentication_error", "invalid_api_key"
	case p.Status == http.StatusForbidden:
		body.Type = "permission_error"
	case p.Status == http.StatusNotFound:
		body.Type = "not_found_error"
	case p.Status == http.StatusConflict:
		body.Type = "conflict_error"
	case p.Status == http.StatusTooManyRequests:
		body.Type = "rate_limit_error"
	case p.Status >= http.StatusInternalServerError:
		body.Type = "server_error"
	}
	if len(p.Errors) > 0 {
		param := strings.TrimPrefix(p.Errors[0].Location, "body.")
		if param != "body" {
			body.Param = &param
		}
		body.Message = param + " " + p.Errors[0].Message
	}
	return openAIError{Error: body}
}

// worthRepeating is empty where the status says it well enough.
func worthRepeating(p *problem) string {
	if p.Status == http.StatusConflict && p.Type != problemTypePrefix+string(kindBusy) {
		return "false"
	}
	return ""
}

// writeOpenAIProblem answers a call with a problem.
func writeOpenAIProblem(c echo.Context, p *problem) error {
	state := stateOf(c.Request().Context())
	state.failed(p)
	for name, values := range p.header {
		c.Response().Header()[name] = values
	}
	if again := worthRepeating(p); again != "" {
		c.Response().Header().Set(retryHeader, again)
	}
	c.Response().Header().Set(echo.HeaderContentType, jsonMediaType)
	// 400 is what OpenAI's own service answers to a request that makes no sense.
	status := p.Status
	if status == http.StatusUnprocessableEntity {
		status = http.StatusBadRequest
	}
	c.Response().WriteHeader(status)
	if err := json.NewEncoder(c.Response()).Encode(openAIErrorOf(p)); err != nil {
		state.cause = errors.Join(state.cause, fmt.Errorf("writing the answer: %w", err))
	}
	return nil
}
