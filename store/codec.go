package store

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/klauspost/compress/zstd"
)

// maxColumnBytes bounds what one stored column may unpack to: four times the
// longest context the service accepts.
const maxColumnBytes = 64 << 20

// The encoder's and decoder's tables are large and their one-shot calls safe for
// concurrent use, so one of each serves the process. Fastest is chosen because
// token ids of natural text gain little from more effort.
var (
	encoder = sync.OnceValue(func() *zstd.Encoder {
		e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(1<<20), zstd.WithLowerEncoderMem(true))
		if err != nil {
			panic("store: zstd encoder options are constants and must hold: " + err.Error())
		}
		return e
	})
	decoder = sync.OnceValue(func() *zstd.Decoder {
		d, err := zstd.NewReader(nil, zstd.WithDecoderMaxMemory(maxColumnBytes), zstd.WithDecoderConcurrency(0))
		if err != nil {
			panic("store: zstd decoder options are constants and must hold: " + err.Error())
		}
		return d
	})
	rawBuffers = sync.Pool{New: func() any { return new([]byte) }}
)

// packTokens returns zstd of little-endian int32, with a checksum; nil for none.
func packTokens(ids []int32) []byte {
	if len(ids) == 0 {
		return nil
	}
	buffer := rawBuffers.Get().(*[]byte)
	defer rawBuffers.Put(buffer)
	raw := (*buffer)[:0]
	for _, id := range ids {
		raw = binary.LittleEndian.AppendUint32(raw, uint32(id))
	}
	*buffer = raw
	return encoder().EncodeAll(raw, nil)
}

// packLogprobs returns zstd of little-endian float32; nil for none.
func packLogprobs(logprobs []float32) []byte {
	if len(logprobs) == 0 {
		return nil
	}
	buffer := rawBuffers.Get().(*[]byte)
	defer rawBuffers.Put(buffer)
	raw := (*buffer)[:0]
	for _, logprob := range logprobs {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(logprob))
	}
	*buffer = raw
	return encoder().EncodeAll(raw, nil)
}

// unpackTokens appends exactly count ids to dst.
func unpackTokens(dst []int32, packed []byte, count int) ([]int32, error) {
	err := unpackWords(packed, count, func(word uint32) { dst = append(dst, int32(word)) })
	return dst, err
}

// unpackLogprobs appends exactly count log-probabilities to dst.
func unpackLogprobs(dst []float32, packed []byte, count int) ([]float32, error) {
	err := unpackWords(packed, count, func(word uint32) { dst = append(dst, math.Float32frombits(word)) })
	return dst, err
}

func unpackWords(packed []byte, count int, yield func(uint32)) error {
	buffer := rawBuffers.Get().(*[]byte)
	defer rawBuffers.Put(buffer)
	raw, err := decoder().DecodeAll(packed, (*buffer)[:0])
	*buffer = raw
	if err != nil {
		return fmt.Errorf("unpacking a stored column: %w", err)
	}
	if len(raw) != 4*count {
		return fmt.Errorf("unpacking a stored column: holds %d bytes, should hold %d", len(raw), 4*count)
	}
	for ; len(raw) > 0; raw = raw[4:] {
		yield(binary.LittleEndian.Uint32(raw))
	}
	return nil
}

// maxTextBytes bounds free text such as an engine's error message.
const maxTextBytes = 4 << 10

// cleanText makes text from outside fit for a Postgres text column, which takes
// neither NUL nor broken UTF-8: a strange error message must not keep a session
// from ending.
func cleanText(text string) string {
	if len(text) > maxTextBytes {
		text = text[:maxTextBytes]
	}
	if !utf8.ValidString(text) {
		text = strings.ToValidUTF8(text, "\uFFFD")
	}
	return strings.ReplaceAll(text, "\x00", "\uFFFD")
}
