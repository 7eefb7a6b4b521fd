package simulated

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"

	"holdfast/orchestrator/engine/internal/jsonscan"
)

// completionRequest is a generation in either dialect, as far as it matters here.
type completionRequest struct {
	// RequestID and Rank are what the body says of them; vLLM has them in headers.
	RequestID string
	Rank      string

	Model        string
	Prompt       []int32
	MaxTokens    int
	MinTokens    int
	IgnoreEOS    bool
	Temperature  float64
	Seed         *int64
	StopTokenIDs []int32
	Logprobs     bool
	CacheSalt    string
	Priority     int

	Stream             bool
	IncludeUsage       bool
	StreamInterval     int
	ReturnTokenIDs     bool
	ReturnPromptTokens bool
}

// apiError is an error document of vLLM's.
type apiError struct {
	status  int
	kind    string
	message string
	param   string
}

func (e *apiError) Error() string { return e.message }

func badRequest(param, format string, args ...any) *apiError {
	return &apiError{http.StatusBadRequest, "BadRequestError", fmt.Sprintf(format, args...), param}
}

// maxLogprobs is vLLM's default limit.
const maxLogprobs = 20

// parseCompletion reads and checks a request. The prompt is appended to prompt,
// which may be reused when the request has been submitted.
func parseCompletion(body []byte, prompt []int32, cfg *Config) (*completionRequest, error) {
	r := &completionRequest{Prompt: prompt[:0], MaxTokens: 16, Temperature: 1, StreamInterval: cfg.StreamIntervalTokens}
	returnPrompt := true
	err := jsonscan.Object(body, func(key string, value []byte) error {
		if string(value) == "null" {
			return nil
		}
		switch key {
		case "prompt":
			return r.readPrompt(value, cfg.VocabularySize)
		case "model":
			return field(key, value, &r.Model)
		case "max_tokens":
			return field(key, value, &r.MaxTokens)
		case "min_tokens":
			return field(key, value, &r.MinTokens)
		case "ignore_eos":
			return field(key, value, &r.IgnoreEOS)
		case "temperature":
			return field(key, value, &r.Temperature)
		case "seed":
			return field(key, value, &r.Seed)
		case "stop_token_ids":
			return field(key, value, &r.StopTokenIDs)
		case "logprobs":
			return r.readLogprobs(value)
		case "cache_salt":
			return field(key, value, &r.CacheSalt)
		case "priority":
			return field(key, value, &r.Priority)
		case "n", "best_of":
			return wantOne(key, value)
		case "stream":
			return field(key, value, &r.Stream)
		case "stream_options":
			var options struct {
				IncludeUsage bool `json:"include_usage"`
			}
			err := field(key, value, &options)
			r.IncludeUsage = options.IncludeUsage
			return err
		case "stream_interval":
			return field(key, value, &r.StreamInterval)
		case "return_token_ids":
			return field(key, value, &r.ReturnTokenIDs)
		case "return_prompt_token_ids":
			return field(key, value, &returnPrompt)
		}
		if !json.Valid(value) {
			return badRequest(key, "%s is not valid JSON", key)
		}
		return nil
	})
	var api *apiError
	switch {
	case errors.As(err, &api):
		return nil, api
	case err != nil:
		return nil, badRequest("", "the body is not a completion request: %v", err)
	}
	r.ReturnPromptTokens = r.ReturnTokenIDs && returnPrompt
	return r, r.check(cfg)
}

func field(key string, value []byte, into any) error {
	if err := json.Unmarshal(value, into); err != nil {
		return badRequest(key, "%s: %v", key, err)
	}
	return nil
}

func wantOne(key string, value []byte) error {
	var n int
	if err := field(key, value, &n); err != nil {
		return err
	}
	if n != 1 {
		return badRequest(key, "%s = %d, this engine generates one completion per request", key, n)
	}
	return nil
}

func (r *completionRequest) readLogprobs(value []byte) error {
	var n int
	if err := field("logprobs", value, &n); err != nil {
		return err
	}
	if n < 0 || n > maxLogprobs {
		return badRequest("logprobs", "logprobs = %d, want 0 to %d", n, maxLogprobs)
	}
	r.Logprobs = true
	return nil
}

// readPrompt accepts a string, token ids, or a list of one of either.
func (r *completionRequest) readPrompt(value []byte, vocabulary int) error {
	if value[0] == '[' {
		var err error
		if r.Prompt, err = jsonscan.AppendInts(r.Prompt[:0], value); err == nil {
			return nil
		}
		var only []byte
		count := 0
		elementsErr := jsonscan.Elements(value, func(v []byte) error { only = v; count++; return nil })
		if elementsErr != nil || len(only) == 0 || only[0] != '[' && only[0] != '"' {
			return badRequest("prompt", "prompt: %v", err)
		}
		if count != 1 {
			return badRequest("prompt", "prompt holds %d prompts, this engine takes one per request", count)
		}
		return r.readPrompt(only, vocabulary)
	}
	var text string
	if err := field("prompt", value, &text); err != nil {
		return err
	}
	r.Prompt = tokenize(r.Prompt[:0], text, vocabulary)
	return nil
}

func (r *completionRequest) check(cfg *Config) error {
	contextTokens := cfg.Engine.MaxContextTokens
	switch {
	case r.Model != "" && r.Model != cfg.Model:
		return &apiError{http.StatusNotFound, "NotFoundError", fmt.Sprintf("The model `%s` does not exist.", r.Model), "model"}
	case len(r.Prompt) == 0:
		return badRequest("prompt", "prompt is missing or empty")
	case r.MaxTokens < 1:
		return badRequest("max_tokens", "max_tokens must be at least 1, got %d.", r.MaxTokens)
	case r.MinTokens < 0 || r.MinTokens > r.MaxTokens:
		return badRequest("min_tokens", "min_tokens must be 0 to max_tokens=%d, got %d.", r.MaxTokens, r.MinTokens)
	case !(r.Temperature >= 0) || math.IsInf(r.Temperature, 0):
		return badRequest("temperature", "temperature must be non-negative, got %v.", r.Temperature)
	case r.StreamInterval < 1:
		return badRequest("stream_interval", "stream_interval must be at least 1, got %d.", r.StreamInterval)
	case r.MaxTokens > contextTokens || len(r.Prompt) > contextTokens-r.MaxTokens:
		return badRequest("max_tokens", "This model's maximum context length is %d tokens. However, you requested %d tokens (%d in the prompt, %d in the completion). Please reduce the length of the prompt or completion.",
			contextTokens, len(r.Prompt)+r.MaxTokens, len(r.Prompt), r.MaxTokens)
	case r.Priority != 0 && !cfg.Engine.PriorityScheduling:
		return badRequest("priority", "Got priority %d but priority scheduling is not enabled.", r.Priority)
	}
	for i, id := range r.Prompt {
		if int(id) >= cfg.VocabularySize {
			return badRequest("prompt", "Token id %d at position %d is out of vocabulary", id, i)
		}
	}
	return nil
}
