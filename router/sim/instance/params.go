package instance

import (
	"errors"
	"fmt"
	"math"
)

// Params describes one engine instance: the shape of its cache, the limits of
// its scheduler, and how long one engine step takes.
//
// A step that decodes n sequences whose contexts hold K tokens of KV and that
// prefills the tokens at positions [a, b) of a prompt takes
//
//	StepBaseNanos + StepPerSequenceNanos*n + StepPerKVTokenNanos*K
//	  + PrefillTokenNanos * ((b-a) + (b*b-a*a)/(2*PrefillDoublingTokens))
//
// so a prompt token at position p costs PrefillTokenNanos*(1+p/PrefillDoublingTokens).
type Params struct {
	// Name labels the parameter set in reports.
	Name string

	// BlockTokens is the number of tokens in one KV cache block.
	BlockTokens int
	// CapacityBlocks is the number of blocks in the device's KV cache.
	CapacityBlocks int
	// BlockBytes is the size of a block over all devices of the instance. Only
	// WithHostTier reads it.
	BlockBytes int
	// MaxContextTokens bounds prompt plus output of one request.
	MaxContextTokens int
	// MaxSequences bounds the requests that run at the same time (max_num_seqs).
	MaxSequences int
	// MaxBatchedTokens is the token budget of one step, shared by decode (one
	// token a sequence) and prefill (max_num_batched_tokens). At least MaxSequences.
	MaxBatchedTokens int

	// StepBaseNanos is the part of a step that does not depend on the batch.
	StepBaseNanos float64
	// StepPerSequenceNanos is added for each sequence in the step.
	StepPerSequenceNanos float64
	// StepPerKVTokenNanos is added for each token of KV that the decoding
	// sequences attend to.
	StepPerKVTokenNanos float64
	// PrefillTokenNanos is the compute time of a prompt token at position 0.
	PrefillTokenNanos float64
	// PrefillDoublingTokens is the position at which a prompt token costs twice
	// as much as the first one; 0 means that the cost does not grow.
	PrefillDoublingTokens int

	// HostBlocks is the capacity of a second cache tier in host memory, 0 for none.
	// What a request leaves behind is copied there at no cost in time; blocks
	// that are missing on the device are loaded from it.
	HostBlocks int
	// HostBlocksPerSecond is the bandwidth of loading, shared by all loads in turn.
	HostBlocksPerSecond float64

	// PriorityScheduling orders the waiting queue by Request.Priority (lower
	// first), then by arrival, and preempts the request that is last in that
	// order. Without it the queue is first come, first served and the request
	// admitted last is preempted first.
	PriorityScheduling bool
}

// WithHostTier returns the parameters with a host memory tier of a size in bytes
// and a loading bandwidth in bytes per second, both over all devices of the instance.
func (p Params) WithHostTier(bytes, bytesPerSecond float64) Params {
	p.HostBlocks = int(bytes / float64(p.BlockBytes))
	p.HostBlocksPerSecond = bytesPerSecond / float64(p.BlockBytes)
	return p
}

var errParams = errors.New("invalid engine parameters")

// Validate reports the first figure that no engine could have.
func (p Params) Validate() error {
	positive := []struct {
		name  string
		value int
	}{
		{"BlockTokens", p.BlockTokens},
		{"CapacityBlocks", p.CapacityBlocks},
		{"MaxContextTokens", p.MaxContextTokens},
		{"MaxSequences", p.MaxSequences},
		{"MaxBatchedTokens", p.MaxBatchedTokens},
	}
	for _, f := range positive {
		if f.value < 1 || f.value > math.MaxInt32 {
			return fmt.Errorf("%w: %s = %d, want 1 to %d", errParams, f.name, f.value, math.MaxInt32)
		}
	}
	if p.MaxBatchedTokens < p.MaxSequences {
		return fmt.Errorf("%w: MaxBatchedTokens = %d is below MaxSequences = %d, so one step could not decode every sequence",
			errParams, p.MaxBatchedTokens, p.MaxSequences)
	}
	const maxNanos = 1e12 // A thousand seconds: beyond it the sums of a leap could overflow.
	durations := []struct {
		name  string
		value float64
	}{
		{"StepBaseNanos", p.StepBaseNanos},
		{"StepPerSequenceNanos", p.StepPerSequenceNanos},
		{"StepPerKVTokenNanos", p.StepPerKVTokenNanos},
		{"PrefillTokenNanos", p.PrefillTokenNanos},
	}
	for _, f := range durations {
		if !(f.value >= 0 && f.value <= maxNanos) {
			return fmt.Errorf("%w: %s = %v, want 0 to %g", errParams, f.name, f.value, maxNanos)
		}
	}
	if p.StepBaseNanos < 1 {
		return fmt.Errorf("%w: StepBaseNanos = %v: a step must take time", errParams, p.StepBaseNanos)
	}
	if p.PrefillDoublingTokens < 0 {
		return fmt.Errorf("%w: PrefillDoublingTokens = %d is negative", errParams, p.PrefillDoublingTokens)
	}
	if p.HostBlocks < 0 || p.HostBlocks > math.MaxInt32 {
		return fmt.Errorf("%w: HostBlocks = %d, want 0 to %d", errParams, p.HostBlocks, math.MaxInt32)
	}
	if p.HostBlocks > 0 && !(p.HostBlocksPerSecond >= 1 && p.HostBlocksPerSecond <= 1e12) {
		return fmt.Errorf("%w: HostBlocksPerSecond = %v, want 1 to 1e12", errParams, p.HostBlocksPerSecond)
	}
	longest := p.stepCost().step(p.MaxSequences, int64(p.CapacityBlocks)*int64(p.BlockTokens)) +
		p.stepCost().prefill(0, p.MaxContextTokens)
	if longest > maxStepPicos {
		return fmt.Errorf("%w: a step could take %d s, want at most %d s", errParams, longest/1_000_000_000_000, maxStepPicos/1_000_000_000_000)
	}
	return nil
}

// maxStepPicos bounds one step to 1,000 s, far above any real one and far below
// what int64 picoseconds hold.
const maxStepPicos int64 = 1000 * 1_000_000_000_000

// stepCost is the cost model in integers. Integer picoseconds make k steps in
// closed form equal k steps one by one, to the last bit.
type stepCost struct {
	basePicos        int64
	perSequencePicos int64
	perKVTokenPicos  int64
	perTokenPicos    int64
	// perSquareFemtos is the cost of one unit of b*b-a*a.
	perSquareFemtos int64
	loadBlockPicos  int64
}

func (p Params) stepCost() stepCost {
	picos := func(nanos float64) int64 { return int64(math.Round(nanos * 1000)) }
	c := stepCost{
		basePicos:        picos(p.StepBaseNanos),
		perSequencePicos: picos(p.StepPerSequenceNanos),
		perKVTokenPicos:  picos(p.StepPerKVTokenNanos),
		perTokenPicos:    picos(p.PrefillTokenNanos),
	}
	if p.HostBlocks > 0 {
		c.loadBlockPicos = int64(math.Round(1e12 / p.HostBlocksPerSecond))
	}
	if p.PrefillDoublingTokens > 0 {
		c.perSquareFemtos = int64(math.Round(p.PrefillTokenNanos * 1e6 / (2 * float64(p.PrefillDoublingTokens))))
	}
	return c
}

// step is the duration of a step with n sequences over kvTokens of context,
// prefill compute left out.
func (c stepCost) step(n int, kvTokens int64) int64 {
	return c.basePicos + int64(n)*c.perSequencePicos + kvTokens*c.perKVTokenPicos
}

// prefill is the compute time of the prompt positions [from, to).
func (c stepCost) prefill(from, to int) int64 {
	a, b := int64(from), int64(to)
	return (b-a)*c.perTokenPicos + (b*b-a*a)*c.perSquareFemtos/1000
}
