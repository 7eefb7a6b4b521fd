// Package simulated is an HTTP server that speaks vLLM or SGLang and behaves like
// one engine instance: it has the engine model of router/sim/instance for a body, and wall
// time multiplied by a factor for a clock. It exists to run and test the whole
// service without an accelerator, and to break on demand.
//
// Tokens it generates are noise, a pure function of what Sampling names and of the
// tokens before. Timing, queueing, prefix cache, eviction and preemption are the
// model's; this package only maps token ids to the model's chains and events to
// HTTP and ZeroMQ. It serves no chat and knows nothing of tools; where a session needs
// a model that says something, a Script gives it words.
//
// A request goes: accept (parse, hash, choose a rank) - core.submit - core.wait, until
// it ends - the dialect's answer.
package simulated

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"holdfast/orchestrator/engine/simulated/fault"
	"holdfast/orchestrator/engine/simulated/publish"
	"holdfast/router/sim/instance"
)

// Dialect is whose HTTP interface an engine speaks.
type Dialect uint8

const (
	// VLLM is the OpenAI-compatible server of vLLM with its control endpoints.
	VLLM Dialect = iota
	// SGLang is the native server of SGLang. KV events are then in its encoding.
	SGLang
)

func (d Dialect) String() string {
	switch d {
	case VLLM:
		return "vllm"
	case SGLang:
		return "sglang"
	}
	return fmt.Sprintf("Dialect(%d)", uint8(d))
}

// ParseDialect is the inverse of String.
func ParseDialect(s string) (Dialect, error) {
	for d := VLLM; d <= SGLang; d++ {
		if d.String() == s {
			return d, nil
		}
	}
	return 0, fmt.Errorf("unknown dialect %q, want vllm or sglang", s)
}

// Config describes a simulated engine.
type Config struct {
	// Engine is the instance that is modelled.
	Engine instance.Params
	// Dialect is whose HTTP it speaks.
	Dialect Dialect
	// Ranks is how many data-parallel ranks there are behind the one address, each
	// a whole Engine. Default 1. The first one's global number is FirstRank.
	Ranks, FirstRank int
	// WeightVersion names the weights at the start and after a crash. Default
	// "default", as SGLang has it.
	WeightVersion string
	// Model is the served model's name. Default "simulated".
	Model string
	// TimeScale is engine seconds that pass per wall second. Default 1.
	TimeScale float64
	// Seed stands for the model: servers with the same seed generate the same tokens
	// from the same context, see Sampling.
	Seed uint64
	// VocabularySize bounds token ids. Default 151,936.
	VocabularySize int
	// MeanOutputTokens is the mean output of a request that does not ignore the
	// end-of-sequence token; lengths are exponential. Default 512.
	MeanOutputTokens int
	// StreamIntervalTokens is how many tokens a stream sends at a time unless the
	// request says otherwise, as vLLM's flag of that name. Default 1.
	StreamIntervalTokens int
	// StreamTick is how often, in wall time, running streams are looked at. Default 20 ms.
	StreamTick time.Duration
	// MaxBodyBytes bounds a request. Default 64 MiB.
	MaxBodyBytes int64
	// IncrementalStream makes SGLang's streams send what is new instead of all so far.
	IncrementalStream bool
	// Faults are switched on from the start; see SetFaults.
	Faults fault.Settings
	// Script is what the engine says, in force from the start; see SetScript.
	Script Script
	// KVEvents publishes what enters and leaves the prefix cache; without an
	// endpoint nothing is published.
	KVEvents KVEvents
	Logger   *slog.Logger
}

// KVEvents says where and how a simulated engine publishes the events of its block table.
type KVEvents struct {
	// Endpoint such as tcp://127.0.0.1:5557 is bound, or connected to with Connect.
	// Port 0 takes a free one; see Server.KVEndpoints.
	Endpoint string
	Connect  bool
	// ReplayEndpoint is bound for replays of the last HistoryBatches (default
	// 10,000) batches; empty for none.
	ReplayEndpoint string
	HistoryBatches int
	// OldReplies leaves the topic out of replies, as vLLM before 0.26.
	OldReplies bool
	Topic      string
	Encoding   publish.Encoding
	// FlushIdle publishes a cache reset at once. By default it waits for the engine's
	// next step, as in vLLM, where an idle or paused engine sends nothing.
	FlushIdle bool
}

func (c Config) withDefaults() Config {
	if c.Model == "" {
		c.Model = "simulated"
	}
	if c.WeightVersion == "" {
		c.WeightVersion = "default"
	}
	if c.Ranks == 0 {
		c.Ranks = 1
	}
	if c.Dialect == SGLang {
		c.KVEvents.Encoding = publish.SGLang
	}
	if c.TimeScale == 0 {
		c.TimeScale = 1
	}
	if c.VocabularySize == 0 {
		c.VocabularySize = 151_936
	}
	if c.MeanOutputTokens == 0 {
		c.MeanOutputTokens = 512
	}
	if c.StreamIntervalTokens == 0 {
		c.StreamIntervalTokens = 1
	}
	if c.StreamTick == 0 {
		c.StreamTick = 20 * time.Millisecond
	}
	if c.MaxBodyBytes == 0 {
		c.MaxBodyBytes = 64 << 20
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

var errConfig = errors.New("invalid configuration of a simulated engine")

func (c Config) validate() error {
	switch {
	case !(c.TimeScale >= 1e-3 && c.TimeScale <= 1e6):
		return fmt.Errorf("%w: TimeScale = %v, want 0.001 to 1,000,000 engine seconds per second", errConfig, c.TimeScale)
	case c.VocabularySize < 2 || c.VocabularySize > 1<<30:
		return fmt.Errorf("%w: VocabularySize = %d, want 2 to 2^30", errConfig, c.VocabularySize)
	case c.Dialect > SGLang:
		return fmt.Errorf("%w: %s", errConfig, c.Dialect)
	case c.Ranks < 1 || c.Ranks > 64 || c.FirstRank < 0:
		return fmt.Errorf("%w: Ranks = %d from FirstRank = %d, want 1 to 64 ranks from 0 on", errConfig, c.Ranks, c.FirstRank)
	case c.KVEvents.Connect && publish.FreePort(c.KVEvents.Endpoint):
		return fmt.Errorf("%w: KVEvents.Endpoint = %q is nothing to connect to", errConfig, c.KVEvents.Endpoint)
	case c.MeanOutputTokens < 1 || c.StreamIntervalTokens < 1 || c.MaxBodyBytes < 1:
		return fmt.Errorf("%w: MeanOutputTokens, StreamIntervalTokens and MaxBodyBytes must be positive", errConfig)
	case c.StreamTick < time.Millisecond:
		return fmt.Errorf("%w: StreamTick = %s, want at least 1ms", errConfig, c.StreamTick)
	}
	return c.Script.validate()
}
