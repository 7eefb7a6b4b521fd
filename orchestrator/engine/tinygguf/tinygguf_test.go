package tinygguf

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"testing"
)

func TestModelIsDeterministicAndSmall(t *testing.T) {
	write := func(cfg Config) []byte {
		var b bytes.Buffer
		if err := Write(&b, cfg); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	one := write(Config{Seed: 1})
	if sha256.Sum256(one) != sha256.Sum256(write(Config{Seed: 1})) {
		t.Error("the same seed gives another model")
	}
	for name, other := range map[string]Config{"seed": {Seed: 2}, "end": {Seed: 1, Endless: true}, "context": {Seed: 1, ContextTokens: 99}} {
		if bytes.Equal(one, write(other)) {
			t.Errorf("another %s gives the same model", name)
		}
	}
	if len(one) > 600_000 || len(one)%alignment != 0 {
		t.Errorf("%d bytes", len(one))
	}
	if string(one[:4]) != "GGUF" || binary.LittleEndian.Uint32(one[4:]) != 3 || binary.LittleEndian.Uint64(one[8:]) != 3+9*layers {
		t.Errorf("header % x", one[:24])
	}
	if err := Write(&bytes.Buffer{}, Config{ContextTokens: -1}); err == nil {
		t.Error("a negative context was accepted")
	}
}

func TestEveryByteHasItsToken(t *testing.T) {
	tokens, kinds := tokenizer()
	seen := map[string]bool{}
	for _, token := range tokens {
		seen[token] = true
	}
	if len(seen) != vocabulary || len(kinds) != vocabulary {
		t.Errorf("%d tokens, %d kinds", len(seen), len(kinds))
	}
	// As GPT-2 writes them.
	for b, want := range map[int]string{'a': "a", ' ': "Ġ", '\n': "Ċ", 0: "Ā", 0xad: "Ń", 0xff: "ÿ"} {
		if tokens[b] != want {
			t.Errorf("byte %#x is %q, want %q", b, tokens[b], want)
		}
	}
}
