// Package scoring gives finished sessions their reward: by comparing text, ids or
// numbers, by asking a server or a program, or by taking what the environment
// said.
//
// An outcome is a finite reward or an infrastructure failure, and nothing in
// between: a scorer that hangs, dies or answers NaN never makes a reward of zero.
// Scoring the same sample again gives the same outcome as far as the scorer does:
// requests name samples by the session's id.
//
// Not here: when to score again, what a failed sample counts as, storage.
package scoring

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"time"

	"holdfast/orchestrator/environment/command"
	"holdfast/orchestrator/environment/exchange"
	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/environment/spec"
)

// Sample is what a scorer looks at.
type Sample struct {
	// ID is the session's id.
	ID string `json:"id"`
	// Text is the text of the last turn, without tokens that end it.
	Text string `json:"text"`
	// TokenIDs are the generated ids of the last turn.
	TokenIDs []int32 `json:"token_ids,omitempty"`
	// Messages is the whole chat, where the session had one.
	Messages json.RawMessage `json:"messages,omitempty"`
	// Metadata is the task's.
	Metadata json.RawMessage `json:"metadata,omitempty"`
	// EnvironmentReward is the last reward that the environment gave, if it did.
	EnvironmentReward *float64 `json:"environment_reward,omitempty"`
}

// Outcome of one sample: either Failure is nil and Reward is finite, or Failure
// says why there is no reward.
type Outcome struct {
	Reward float64
	// Detail is a JSON object of the scorer's own, or nil.
	Detail  json.RawMessage
	Failure *failure.Error
}

// Scorer scores samples.
type Scorer interface {
	// Score gives one outcome for each sample, in their order. When ctx ends, the
	// samples without an outcome fail as cancelled.
	Score(ctx context.Context, samples []Sample) []Outcome
}

// Config says what scorers of this process may do.
type Config struct {
	// Commands runs programs; nil means that exec scorers are not allowed here.
	Commands *command.Runner
	// Access says which servers specs may name.
	Access exchange.Access
	// Transport carries HTTP; nil means http.DefaultTransport.
	Transport http.RoundTripper
	// FirstRetryDelay is passed on to package exchange.
	FirstRetryDelay time.Duration
}

// New returns the scorer that a task asks for. Errors are *failure.Error.
func New(s spec.Scorer, config Config) (Scorer, error) {
	const doing = "making a scorer"
	if err := s.Validate("scorer"); err != nil {
		return nil, failure.New(failure.Refused, doing, err)
	}
	switch s.Kind {
	case spec.ScorerExactMatch:
		return each(exactMatch(s)), nil
	case spec.ScorerNumericMatch:
		return each(numericMatch(s)), nil
	case spec.ScorerHTTP:
		bearer, err := config.Access.Bearer(s.HTTP.URL, s.HTTP.Credential)
		if err != nil {
			return nil, failure.Within(context.Background(), doing, failure.Disabled, err)
		}
		return newHTTPScorer(*s.HTTP, config, bearer), nil
	case spec.ScorerExec:
		if config.Commands == nil {
			return nil, failure.Newf(failure.Disabled, doing, "this process runs no programs")
		}
		return &execScorer{program: *s.Program, commands: config.Commands}, nil
	}
	return each(environmentReward), nil
}

// each is a scorer that looks at one sample at a time and cannot be kept waiting.
type each func(Sample) Outcome

// Score implements Scorer.
func (f each) Score(_ context.Context, samples []Sample) []Outcome {
	outcomes := make([]Outcome, len(samples))
	for i, sample := range samples {
		outcomes[i] = f(sample)
	}
	return outcomes
}

// environmentReward takes the reward that the environment gave.
func environmentReward(sample Sample) Outcome {
	if sample.EnvironmentReward == nil {
		return failed(failure.Newf(failure.Malformed, scoringOf(sample), "the environment gave no reward"))
	}
	return rewarded(sample, *sample.EnvironmentReward, nil)
}

// rewarded holds a reward to what this package promises.
func rewarded(sample Sample, reward float64, detail json.RawMessage) Outcome {
	if math.IsNaN(reward) || math.IsInf(reward, 0) {
		return failed(failure.Newf(failure.Malformed, scoringOf(sample), "the reward is %v", reward))
	}
	return Outcome{Reward: reward, Detail: detail}
}

func failed(err *failure.Error) Outcome { return Outcome{Failure: err} }

// failedWith gives an error of another package the form of a failure.
func failedWith(ctx context.Context, sample Sample, err error) Outcome {
	var known *failure.Error
	// Within gives every error a kind.
	_ = errors.As(failure.Within(ctx, scoringOf(sample), failure.Died, err), &known)
	return failed(known)
}

func scoringOf(sample Sample) string { return fmt.Sprintf("scoring session %s", sample.ID) }

// match is the outcome of a comparison.
func match(equal bool) Outcome {
	if equal {
		return Outcome{Reward: 1}
	}
	return Outcome{}
}
