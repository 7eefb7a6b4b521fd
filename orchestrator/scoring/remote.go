package scoring

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"holdfast/orchestrator/environment/command"
	"holdfast/orchestrator/environment/excerpt"
	"holdfast/orchestrator/environment/exchange"
	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/environment/spec"
)

// Bounds of what a scorer may answer.
const (
	maxAnswerBytes   = 4 << 20
	maxDetailBytes   = 64 << 10
	maxProblemBytes  = 300
	defaultBatchSize = spec.DefaultBatchSamples
)

// The documents of the http scorer; docs/environments.md describes them. A
// program reads one sample and writes one result.
type (
	samplesDocument struct {
		Task    json.RawMessage `json:"task,omitempty"`
		Samples []Sample        `json:"samples"`
	}
	resultsDocument struct {
		Results []resultDocument `json:"results"`
	}
	resultDocument struct {
		ID     string          `json:"id"`
		Reward *float64        `json:"reward"`
		Detail json.RawMessage `json:"detail"`
		Error  string          `json:"error"`
	}
)

// outcome holds a result to the schema.
func (r *resultDocument) outcome(sample Sample) Outcome {
	malformed := func(format string, args ...any) Outcome {
		return failed(failure.Newf(failure.Malformed, scoringOf(sample), format, args...))
	}
	detail := bytes.TrimSpace(r.Detail)
	if len(detail) == 0 || string(detail) == "null" {
		detail = nil
	}
	switch {
	case r.Error != "":
		return failed(failure.Newf(failure.Refused, scoringOf(sample), "the scorer says: %s", excerpt.Line(r.Error, maxProblemBytes)))
	case r.Reward == nil:
		return malformed("the result has neither reward nor error")
	case len(detail) > maxDetailBytes:
		return malformed("detail has %d bytes, more than %d", len(detail), maxDetailBytes)
	case detail != nil && detail[0] != '{':
		return malformed("detail must be a JSON object")
	}
	return rewarded(sample, *r.Reward, detail)
}

// httpScorer asks a server, several samples at a time.
type httpScorer struct {
	spec   spec.HTTPScorer
	batch  int
	poster *exchange.Poster
}

func newHTTPScorer(s spec.HTTPScorer, config Config, bearer string) *httpScorer {
	if s.TimeoutSeconds == 0 {
		s.TimeoutSeconds = spec.DefaultTimeoutSeconds
	}
	batch := s.BatchSamples
	if batch == 0 {
		batch = defaultBatchSize
	}
	return &httpScorer{spec: s, batch: batch, poster: exchange.New(exchange.Config{
		Transport: config.Transport, Bearer: bearer, FirstDelay: config.FirstRetryDelay, MaxResponseBytes: maxAnswerBytes,
		Timeout: time.Duration(s.TimeoutSeconds * float64(time.Second)),
	})}
}

// Score implements Scorer. A batch that fails takes no other batch with it.
func (h *httpScorer) Score(ctx context.Context, samples []Sample) []Outcome {
	outcomes := make([]Outcome, 0, len(samples))
	for batch := range slices.Chunk(samples, h.batch) {
		outcomes = append(outcomes, h.scoreBatch(ctx, batch)...)
	}
	return outcomes
}

func (h *httpScorer) scoreBatch(ctx context.Context, samples []Sample) []Outcome {
	outcomes := make([]Outcome, len(samples))
	var answer resultsDocument
	err := h.poster.Post(ctx, h.spec.URL, samplesDocument{Task: h.spec.Task, Samples: samples}, &answer)
	results := make(map[string]*resultDocument, len(answer.Results))
	twice := map[string]bool{}
	for i := range answer.Results {
		id := answer.Results[i].ID
		twice[id] = twice[id] || results[id] != nil
		results[id] = &answer.Results[i]
	}
	for i, sample := range samples {
		result, ok := results[sample.ID]
		switch {
		case err != nil:
			outcomes[i] = failedWith(ctx, sample, err)
		case twice[sample.ID]:
			outcomes[i] = failed(failure.Newf(failure.Malformed, scoringOf(sample), "the answer has more than one result with this id"))
		case !ok:
			outcomes[i] = failed(failure.Newf(failure.Malformed, scoringOf(sample), "the answer has no result with this id"))
		default:
			outcomes[i] = result.outcome(sample)
		}
	}
	return outcomes
}

// execScorer runs a program for each sample, each in a directory of its own.
type execScorer struct {
	program  spec.Program
	commands *command.Runner
}

// Score implements Scorer.
func (x *execScorer) Score(ctx context.Context, samples []Sample) []Outcome {
	outcomes := make([]Outcome, len(samples))
	for i, sample := range samples {
		result, err := x.run(ctx, sample)
		if err != nil {
			outcomes[i] = failedWith(ctx, sample, err)
			continue
		}
		outcomes[i] = result.outcome(sample)
	}
	return outcomes
}

func (x *execScorer) run(ctx context.Context, sample Sample) (document *resultDocument, err error) {
	input, err := json.Marshal(sample)
	if err != nil {
		return nil, fmt.Errorf("encoding the sample: %w", err)
	}
	// A name of its own, since the session's environment may still have that of
	// the session, and since a sample may be scored twice at a time.
	directory, err := x.commands.NewDirectory("score-" + uuid.NewString())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, directory.Remove()) }()
	result, err := directory.Run(ctx, command.Request{Program: x.program, Stdin: input, KeepBytes: maxAnswerBytes})
	if err != nil {
		return nil, err
	}
	answer, err := result.Answer()
	if err != nil {
		return nil, err
	}
	document = new(resultDocument)
	if err := json.Unmarshal([]byte(answer), document); err != nil {
		return nil, failure.NotAsDocumented("the output", err)
	}
	return document, nil
}
