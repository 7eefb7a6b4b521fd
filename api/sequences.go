package api

import (
	"holdfast/api/wire"
	"holdfast/store"
)

// putTokens puts a sample's tokens into its document: into the sample itself, or as
// sequences where a harness rewrote its history.
func putTokens(w *wire.Sample, tokens *store.SampleTokens, encoding string) {
	if len(tokens.Earlier) == 0 {
		sequence := wireSequence(tokens, encoding)
		w.Segments, w.Tokens, w.Packed = sequence.Segments, sequence.Tokens, sequence.Packed
		return
	}
	w.Sequences = make([]wire.Sequence, 0, len(tokens.Earlier)+1)
	for i := range tokens.Earlier {
		w.Sequences = append(w.Sequences, wireSequence(&tokens.Earlier[i], encoding))
	}
	w.Sequences = append(w.Sequences, wireSequence(tokens, encoding))
}

func wireSequence(tokens *store.SampleTokens, encoding string) wire.Sequence {
	w := wire.Sequence{KeptTokens: tokens.Kept, Segments: make([]wire.Segment, len(tokens.Segments))}
	for i, segment := range tokens.Segments {
		w.Segments[i] = wire.Segment{Kind: string(segment.Kind), Turn: segment.Turn, Start: segment.Start, Count: segment.Count, PolicyVersion: segment.PolicyVersion}
	}
	if encoding == encodingPacked {
		w.Packed = wire.Pack(tokens.TokenIDs, tokens.LossMask, tokens.Logprobs)
		return w
	}
	mask := make([]int8, len(tokens.LossMask))
	for i, bit := range tokens.LossMask {
		mask[i] = int8(bit)
	}
	w.Tokens = &wire.Tokens{TokenIDs: tokens.TokenIDs, LossMask: mask, Logprobs: tokens.Logprobs}
	return w
}
