// Package engine talks to inference engines: token ids in, token ids and
// log-probabilities out, metrics, and what an engine says about itself. One
// Client speaks to one instance in that engine's own dialect.
//
// It neither chooses an instance nor retries: it sorts each failure into what
// the caller may do about it (see Class), and hands back what was generated
// before the failure. It turns tokens into text and back only for servers that take
// nothing else (see OpenAI), and says so in the result; elsewhere it asks the engine
// (see Tokenizer).
package engine

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Client is one engine instance. Implementations may be used concurrently.
type Client interface {
	// Generate runs one generation. onProgress, if not nil, is called as tokens
	// arrive, from the calling goroutine. When ctx ends the connection is closed,
	// which makes the engine abort the request. After an error other than
	// a refusal the result holds what had been generated. Errors are *Error.
	Generate(ctx context.Context, request Request, onProgress func(Progress)) (Result, error)
	// Metrics reads the engine's load.
	Metrics(ctx context.Context) (Metrics, error)
	// Discover asks what the engine serves and how much of it.
	Discover(ctx context.Context) (Info, error)
	// Health returns nil if the engine says it can serve.
	Health(ctx context.Context) error
}

// ErrNoMetrics is what Metrics returns where the engine has none to give: it can be
// asked whether it is well, and nothing else.
var ErrNoMetrics = errors.New("the engine exports no metrics")

// Request is one generation.
type Request struct {
	// RequestID names the request in the engine's logs; SessionID the session it belongs to.
	RequestID, SessionID string
	// Prompt is the whole context as token ids. It must not change during the call.
	Prompt []int32
	// MaxTokens, at least 1, bounds the output; MinTokens is how many are
	// generated before a stop counts.
	MaxTokens, MinTokens int
	// IgnoreEOS generates on after the model's end-of-sequence token.
	IgnoreEOS    bool
	Temperature  float64
	TopP         float64
	Seed         *int64
	StopTokenIDs []int32
	// WithLogprobs asks for the log-probability of each generated token.
	WithLogprobs bool
	// CacheSalt keeps the prefix cache of different salts apart.
	CacheSalt string
	// Priority is the engine's scheduling priority, lower first; 0 does not ask for one.
	Priority int
	// DataParallelRank is the global rank to run on; negative lets the engine choose.
	DataParallelRank int
}

// Progress is the output so far. The slices are the result's own: read them
// during the call only.
type Progress struct {
	OutputTokens int
	OutputIDs    []int32
	Logprobs     []float32
}

// Result is a generation.
type Result struct {
	OutputIDs []int32
	// IDsReencoded says that the engine gave text and OutputIDs are a codec's for that
	// text, not the ids that were sampled: no log-probability belongs to them.
	IDsReencoded bool
	// Logprobs has one value per output token, or is nil if not asked for or with
	// IDsReencoded.
	Logprobs     []float32
	FinishReason FinishReason
	PromptTokens int
	// CachedTokens is the part of the prompt that the engine found in its cache;
	// -1 if it did not say.
	CachedTokens int
	// WeightVersion is what the engine says of the weights that generated this, empty
	// if it does not.
	WeightVersion string
	// QueueSeconds is the time in the engine's waiting queue, 0 if the engine does not say.
	QueueSeconds float64
	// TimeToFirstTokenSeconds and TotalSeconds are measured here, from the start of the call.
	TimeToFirstTokenSeconds float64
	TotalSeconds            float64
}

// FinishReason says why a generation ended.
type FinishReason uint8

const (
	// FinishUnknown: it did not end, or for a reason this package does not know.
	FinishUnknown FinishReason = iota
	// FinishStop: the model ended, or a stop token came.
	FinishStop
	// FinishLength: MaxTokens or the context limit was reached.
	FinishLength
	// FinishAbort: the engine gave the request up.
	FinishAbort
)

func (f FinishReason) String() string {
	switch f {
	case FinishUnknown:
		return "unknown"
	case FinishStop:
		return "stop"
	case FinishLength:
		return "length"
	case FinishAbort:
		return "abort"
	}
	return fmt.Sprintf("FinishReason(%d)", uint8(f))
}

func parseFinishReason(s string) FinishReason {
	switch s {
	case "stop", "eos_token", "stop_sequence":
		// The latter two are TGI's.
		return FinishStop
	case "length":
		return FinishLength
	case "abort":
		return FinishAbort
	}
	return FinishUnknown
}

// Metrics is an engine's load. Totals count from the engine's start.
type Metrics struct {
	Running, Waiting int
	// KVUsage is the used share of the KV cache, 0 to 1.
	KVUsage     float64
	Preemptions int64
	// CachedPromptTokens is -1 if the engine does not count it.
	PromptTokens, CachedPromptTokens int64
	GeneratedTokens                  int64
	// PrefixQueries and PrefixHits are tokens looked up and found. Engines before
	// mid-2026 count a request again with each scheduling retry, so under pressure
	// prefer the per-response figure, then CachedPromptTokens.
	PrefixQueries, PrefixHits int64
	// CapacityBlocks and BlockTokens are 0 if not exported.
	CapacityBlocks int64
	BlockTokens    int
	// Asleep says that the engine has given its memory up.
	Asleep bool
	// Ranks splits the load by data-parallel rank, in order; nil if there is one rank
	// or the engine does not say. The other figures are of all ranks.
	Ranks []RankMetrics
}

// RankMetrics is the load of one data-parallel rank of an instance.
type RankMetrics struct {
	Rank             int
	Running, Waiting int
	KVUsage          float64
}

// Info is what an engine says about itself. A figure it does not give is 0.
type Info struct {
	Model, Version         string
	BlockTokens            int
	CapacityBlocks         int64
	MaxContextTokens       int64
	MaxRunning             int
	PrefillTokensPerSecond float64
	// DataParallelSize is how many ranks share the instance; the capacity is of all.
	DataParallelSize int
	// WeightVersion is what the engine says of its weights, empty if it does not.
	WeightVersion string
}

// NewClient returns a client for an engine of a kind at a base URL. It makes no call.
// Kinds: "vllm", "sglang", "openai" for any server that takes and gives text, and
// "simulated" for the project's own engine, which speaks vLLM.
func NewClient(kind, url string) (Client, error) { return Connector(0)(kind, url) }

// Connector returns NewClient for engines whose generations may be silent for so long
// before they are made elsewhere, their wait in the engine's queue included; 0 means
// half an hour.
func Connector(silence time.Duration) func(kind, url string) (Client, error) {
	return func(kind, url string) (Client, error) {
		switch kind {
		case "vllm", "simulated":
			return NewVLLM(VLLMConfig{URL: url, StallTimeout: silence})
		case "sglang":
			return NewSGLang(SGLangConfig{URL: url, StallTimeout: silence})
		case "openai":
			return NewOpenAI(OpenAIConfig{URL: url, StallTimeout: silence})
		}
		return nil, fmt.Errorf("unknown kind of engine %q, want vllm, sglang, openai or simulated", kind)
	}
}
