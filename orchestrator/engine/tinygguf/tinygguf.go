// Package tinygguf writes a language model small enough to make up on the spot: the
// llama architecture with random weights and a vocabulary of bytes, half a megabyte
// in the GGUF format that llama.cpp and Ollama load. Real servers then do real
// inference in tests without a download. What it says is noise: lower-case letters,
// spaces and full stops. It is not a general GGUF writer.
package tinygguf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
)

// Config chooses a model. Equal configurations give equal bytes.
type Config struct {
	Seed uint64
	// ContextTokens is the context limit that the model declares. Default 2048.
	ContextTokens int
	// Endless leaves out the end of the sequence, so that only a limit ends an
	// output; without it outputs are some hundred tokens long.
	Endless bool
}

// The model's shape.
const (
	vocabulary   = 257 // The bytes and the end of sequence.
	endOfText    = 256
	embedding    = 64
	heads        = 4
	layers       = 2
	feedForward  = 128
	alignment    = 32
	ggufVersion  = 3
	ropeDims     = embedding / heads
	normEpsilon  = 1e-5
	tokenNormal  = 1
	tokenControl = 3
)

// said is what the model says.
const said = "abcdefghijklmnopqrstuvwxyz ."

// The first dimension of the residual stream is the same for every token, large and
// little changed by the layers: through it the output layer has a bias, which
// the architecture lacks, and with it what is never said.
const (
	biasValue     = 8
	outputSpread  = 0.3
	layerSpread   = 0.1
	neverWeight   = -6
	endWeight     = -0.2
	biasDimension = 0
)

// WriteFile writes a model to a new file.
func WriteFile(path string, cfg Config) error {
	file, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("writing a tiny model: %w", err)
	}
	err = Write(file, cfg)
	if err = errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("writing a tiny model: %w", err)
	}
	return nil
}

// Write writes a model.
func Write(w io.Writer, cfg Config) error {
	if cfg.ContextTokens < 0 {
		return fmt.Errorf("a context of %d tokens is none", cfg.ContextTokens)
	}
	if cfg.ContextTokens == 0 {
		cfg.ContextTokens = 2048
	}
	var e encoder
	tensors := weights(cfg)
	e.header(len(tensors), cfg)
	offset := uint64(0)
	for _, t := range tensors {
		e.string(t.name)
		e.put(uint32(len(t.shape)))
		for _, n := range t.shape {
			e.put(uint64(n))
		}
		e.put(uint32(0)) // 32-bit floats.
		e.put(offset)
		offset += uint64(padded(4 * len(t.values)))
	}
	e.pad()
	for _, t := range tensors {
		e.put(t.values)
		e.pad()
	}
	_, err := w.Write(e.Bytes())
	return err
}

func padded(n int) int { return (n + alignment - 1) / alignment * alignment }

type tensor struct {
	name   string
	shape  []int // The fastest dimension first.
	values []float32
}

func weights(cfg Config) []tensor {
	rng := rand.New(rand.NewPCG(cfg.Seed, 1))
	random := func(name string, spread float64, shape ...int) tensor {
		n := 1
		for _, s := range shape {
			n *= s
		}
		values := make([]float32, n)
		for i := range values {
			values[i] = float32(rng.NormFloat64() * spread)
		}
		return tensor{name, shape, values}
	}
	ones := func(name string) tensor {
		values := make([]float32, embedding)
		for i := range values {
			values[i] = 1
		}
		return tensor{name, []int{embedding}, values}
	}
	tokens := random("token_embd.weight", 1, embedding, vocabulary)
	output := random("output.weight", outputSpread, embedding, vocabulary)
	for token := range vocabulary {
		tokens.values[token*embedding+biasDimension] = biasValue
		output.values[token*embedding+biasDimension] = outputBias(token, cfg.Endless)
	}
	all := []tensor{tokens, ones("output_norm.weight"), output}
	for layer := range layers {
		name := func(part string) string { return fmt.Sprintf("blk.%d.%s.weight", layer, part) }
		all = append(all,
			ones(name("attn_norm")),
			random(name("attn_q"), layerSpread, embedding, embedding),
			random(name("attn_k"), layerSpread, embedding, embedding),
			random(name("attn_v"), layerSpread, embedding, embedding),
			random(name("attn_output"), layerSpread, embedding, embedding),
			ones(name("ffn_norm")),
			random(name("ffn_gate"), layerSpread, embedding, feedForward),
			random(name("ffn_up"), layerSpread, embedding, feedForward),
			random(name("ffn_down"), layerSpread, feedForward, embedding),
		)
	}
	return all
}

func outputBias(token int, endless bool) float32 {
	switch {
	case token == endOfText && !endless:
		return endWeight
	case token < endOfText && bytes.IndexByte([]byte(said), byte(token)) >= 0:
		return 0
	}
	return neverWeight
}

// encoder writes GGUF: little-endian, strings and arrays with their length first.
type encoder struct{ bytes.Buffer }

// The types of metadata values that are used here.
const (
	typeUint32  = 4
	typeInt32   = 5
	typeFloat32 = 6
	typeBool    = 7
	typeString  = 8
	typeArray   = 9
)

func (e *encoder) put(v any) {
	if err := binary.Write(e, binary.LittleEndian, v); err != nil {
		// A buffer takes everything of a fixed size.
		panic(err)
	}
}

func (e *encoder) string(s string) {
	e.put(uint64(len(s)))
	e.WriteString(s)
}

func (e *encoder) pad() { e.Write(make([]byte, padded(e.Len())-e.Len())) }

func (e *encoder) header(tensors int, cfg Config) {
	var meta encoder
	entries := uint64(0)
	entry := func(key string, kind uint32, value any) {
		entries++
		meta.string(key)
		meta.put(kind)
		switch v := value.(type) {
		case string:
			meta.string(v)
		case []string:
			meta.put(uint32(typeString))
			meta.put(uint64(len(v)))
			for _, s := range v {
				meta.string(s)
			}
		case []int32:
			meta.put(uint32(typeInt32))
			meta.put(uint64(len(v)))
			meta.put(v)
		default:
			meta.put(v)
		}
	}
	entry("general.architecture", typeString, "llama")
	entry("general.name", typeString, "tiny")
	entry("general.file_type", typeUint32, uint32(0))
	entry("llama.context_length", typeUint32, uint32(cfg.ContextTokens))
	entry("llama.embedding_length", typeUint32, uint32(embedding))
	entry("llama.block_count", typeUint32, uint32(layers))
	entry("llama.feed_forward_length", typeUint32, uint32(feedForward))
	entry("llama.attention.head_count", typeUint32, uint32(heads))
	entry("llama.attention.head_count_kv", typeUint32, uint32(heads))
	entry("llama.attention.layer_norm_rms_epsilon", typeFloat32, float32(normEpsilon))
	entry("llama.rope.dimension_count", typeUint32, uint32(ropeDims))
	entry("llama.vocab_size", typeUint32, uint32(vocabulary))
	tokens, kinds := tokenizer()
	entry("tokenizer.ggml.model", typeString, "gpt2")
	entry("tokenizer.ggml.pre", typeString, "gpt-2")
	entry("tokenizer.ggml.tokens", typeArray, tokens)
	entry("tokenizer.ggml.token_type", typeArray, kinds)
	// Reading needs one merge; this one never applies, since the model has no token for it.
	entry("tokenizer.ggml.merges", typeArray, []string{"! \""})
	entry("tokenizer.ggml.bos_token_id", typeUint32, uint32(endOfText))
	entry("tokenizer.ggml.eos_token_id", typeUint32, uint32(endOfText))
	entry("tokenizer.ggml.add_bos_token", typeBool, false)

	e.WriteString("GGUF")
	e.put(uint32(ggufVersion))
	e.put(uint64(tensors))
	e.put(entries)
	e.Write(meta.Bytes())
}

// tokenizer is GPT-2's without merges: each byte is a token, written as a printable
// character; those that are not printable have stand-ins from U+0100 on.
func tokenizer() (tokens []string, kinds []int32) {
	standIn := rune(0x100)
	for b := range endOfText {
		r := rune(b)
		if !(r >= '!' && r <= '~' || r >= '¡' && r <= '¬' || r >= '®' && r <= 'ÿ') {
			r = standIn
			standIn++
		}
		tokens, kinds = append(tokens, string(r)), append(kinds, tokenNormal)
	}
	return append(tokens, "<|endoftext|>"), append(kinds, tokenControl)
}
