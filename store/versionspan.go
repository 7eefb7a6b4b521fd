package store

import (
	"fmt"
	"math"
)

// VersionSpan is a stretch of generated tokens under one policy version.
type VersionSpan struct {
	Tokens        int
	PolicyVersion int64
}

// AppendVersion adds tokens to the spans; those of the last span's version make it longer.
func AppendVersion(spans []VersionSpan, tokens int, policyVersion int64) []VersionSpan {
	if tokens <= 0 {
		return spans
	}
	if last := len(spans) - 1; last >= 0 && spans[last].PolicyVersion == policyVersion {
		spans[last].Tokens += tokens
		return spans
	}
	return append(spans, VersionSpan{Tokens: tokens, PolicyVersion: policyVersion})
}

// eachSpan calls do with the token range of each span, as one where neighbours are
// of one version.
func eachSpan(spans []VersionSpan, do func(from, to int, policyVersion int64)) {
	from := 0
	for i := 0; i < len(spans); {
		to, version := from, spans[i].PolicyVersion
		for ; i < len(spans) && spans[i].PolicyVersion == version; i++ {
			to += spans[i].Tokens
		}
		if to > from {
			do(from, to, version)
		}
		from = to
	}
}

// logprobsOf is the range of log-probabilities, or nil if there are none.
func logprobsOf(logprobs []float32, from, to int) []float32 {
	if len(logprobs) == 0 {
		return nil
	}
	return logprobs[from:to]
}

func checkVersions(spans []VersionSpan, tokens int) error {
	sum := 0
	for i, span := range spans {
		if span.Tokens < 0 || span.PolicyVersion < 0 {
			return &FieldError{Path: fmt.Sprintf("versions[%d]", i), Problem: fmt.Sprintf("must not be negative, is %+v", span)}
		}
		sum += span.Tokens
	}
	if sum != tokens {
		return &FieldError{Path: "versions", Problem: fmt.Sprintf("must cover the %d generated tokens, cover %d", tokens, sum)}
	}
	return nil
}

func checkLogprobs(logprobs []float32, tokens int) error {
	if len(logprobs) > 0 && len(logprobs) != tokens {
		return &FieldError{Path: "logprobs", Problem: fmt.Sprintf("must be as many as the %d generated tokens, are %d", tokens, len(logprobs))}
	}
	for i, logprob := range logprobs {
		if math.IsNaN(float64(logprob)) || math.IsInf(float64(logprob), 0) {
			return &FieldError{Path: fmt.Sprintf("logprobs[%d]", i), Problem: fmt.Sprintf("must be finite, is %v", logprob)}
		}
	}
	return nil
}
