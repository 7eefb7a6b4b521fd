// Package simulated is an HTTP server that speaks vLLM and behaves like one
// engine instance: it has the engine model of router/sim/instance for a body, and wall
// time multiplied by a factor for a clock. It exists to run and test the whole
// service without an accelerator.
//
// Tokens it generates are noise, reproducible from seed and request. Timing,
// queueing, prefix cache, eviction and preemption are the model's; this package
// only maps token ids to the model's chains and events to HTTP. It does not
// validate what a model would say, nor serve chat or tools.
package simulated

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"holdfast/orchestrator/engine/simulated/publish"
	"holdfast/router/sim/instance"
)

// Config describes a simulated engine.
type Config struct {
	// Engine is the instance that is modelled.
	Engine instance.Params
	// Model is the served model's name. Default "simulated".
	Model string
	// TimeScale is engine seconds that pass per wall second. Default 1.
	TimeScale float64
	// Seed makes the generated tokens of two servers differ.
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
	case c.MeanOutputTokens < 1 || c.StreamIntervalTokens < 1 || c.MaxBodyBytes < 1:
		return fmt.Errorf("%w: MeanOutputTokens, StreamIntervalTokens and MaxBodyBytes must be positive", errConfig)
	case c.StreamTick < time.Millisecond:
		return fmt.Errorf("%w: StreamTick = %s, want at least 1ms", errConfig, c.StreamTick)
	}
	return nil
}
