package instance

// QwenLike is one TP4 instance of an H100-80GB node serving a model like
// Qwen3.6-35B-A3B (mixture of experts, 3 B active parameters) at 128K context.
// Where each figure comes from is written in docs/engine-model.md.
func QwenLike() Params {
	return Params{
		Name:                  "qwen",
		BlockTokens:           16,
		CapacityBlocks:        138_750, // 2.22 M tokens
		BlockBytes:            1_485_000,
		MaxContextTokens:      131_072,
		MaxSequences:          256,
		MaxBatchedTokens:      8_192,
		StepBaseNanos:         12e6,
		StepPerSequenceNanos:  100e3,
		StepPerKVTokenNanos:   5,
		PrefillTokenNanos:     1e9 / 60_000,
		PrefillDoublingTokens: 60_000,
	}
}

// StepLike is one TP8 instance of an H200 node serving a model like Step3.7
// (196 B parameters, 11 B active) at 128K context. Where each figure comes from
// is written in docs/engine-model.md.
func StepLike() Params {
	return Params{
		Name:                  "step",
		BlockTokens:           16,
		CapacityBlocks:        375_000, // 6.0 M tokens
		BlockBytes:            1_580_000,
		MaxContextTokens:      131_072,
		MaxSequences:          512,
		MaxBatchedTokens:      8_192,
		StepBaseNanos:         14e6,
		StepPerSequenceNanos:  80e3,
		StepPerKVTokenNanos:   2.1,
		PrefillTokenNanos:     1e9 / 50_000,
		PrefillDoublingTokens: 60_000,
	}
}

// Demo is QwenLike with an eighth of its cache, so that a batch of some hundred
// sessions already crowds two instances.
func Demo() Params {
	p := QwenLike()
	p.Name = "demo"
	p.CapacityBlocks /= 8
	return p
}
