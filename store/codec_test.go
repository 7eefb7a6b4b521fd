package store

import (
	"math"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func TestTokensSurviveStorage(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ids := rapid.SliceOf(rapid.Int32()).Draw(t, "ids")
		got, err := unpackTokens(nil, packTokens(ids), len(ids))
		if len(ids) > 0 && (err != nil || !slices.Equal(got, ids)) {
			t.Fatalf("%v became %v, %v", ids, got, err)
		}
		logprobs := rapid.SliceOf(rapid.Float32()).Draw(t, "logprobs")
		back, err := unpackLogprobs(nil, packLogprobs(logprobs), len(logprobs))
		if len(logprobs) > 0 && (err != nil || !slices.EqualFunc(back, logprobs, func(a, b float32) bool { return math.Float32bits(a) == math.Float32bits(b) })) {
			t.Fatalf("%v became %v, %v", logprobs, back, err)
		}
	})
}

func TestDamagedColumnsAreNoticed(t *testing.T) {
	packed := packTokens([]int32{1, 2, 3, 4, 5, 6, 7, 8})
	if _, err := unpackTokens(nil, packed, 7); err == nil {
		t.Error("a column of 8 ids passed for one of 7")
	}
	for i := range packed {
		damaged := slices.Clone(packed)
		damaged[i] ^= 0x40
		if ids, err := unpackTokens(nil, damaged, 8); err == nil && !slices.Equal(ids, []int32{1, 2, 3, 4, 5, 6, 7, 8}) {
			t.Errorf("with byte %d damaged it reads as %v", i, ids)
		}
	}
}

func TestCleanText(t *testing.T) {
	for _, text := range []string{"", "plain", "n\x00ul", "broken \xff\xfe utf-8", strings.Repeat("ü", maxTextBytes)} {
		clean := cleanText(text)
		if !utf8.ValidString(clean) || strings.Contains(clean, "\x00") || len(clean) > maxTextBytes+2 {
			t.Errorf("%q became %q", text, clean)
		}
	}
	if cleanText("käse") != "käse" {
		t.Error("good text was changed")
	}
}

func BenchmarkPackTurn(b *testing.B) {
	ids := make([]int32, 148)
	logprobs := make([]float32, len(ids))
	for i := range ids {
		ids[i], logprobs[i] = int32(i*7919%150_000), -float32(i)/37
	}
	b.ReportAllocs()
	for b.Loop() {
		packTokens(ids)
		packLogprobs(logprobs)
	}
}
