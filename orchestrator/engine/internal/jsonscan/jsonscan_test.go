package jsonscan

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
)

func TestObjectFindsTheMembersThatTheStandardLibraryFinds(t *testing.T) {
	for _, text := range []string{
		`{}`, ` { } `, `{"a":1}`, `{"a" : [1,2,{"b":"]}"}] , "c\n":null,"d":"x\"y\\"}`, `{"":{}}`,
	} {
		var want map[string]json.RawMessage
		if err := json.Unmarshal([]byte(text), &want); err != nil {
			t.Fatal(err)
		}
		got := map[string]string{}
		if err := Object([]byte(text), func(k string, v []byte) error { got[k] = string(v); return nil }); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if len(got) != len(want) {
			t.Fatalf("%s: got %v", text, got)
		}
		for k, v := range want {
			if got[k] != string(v) {
				t.Errorf("%s: member %q is %q, want %q", text, k, got[k], v)
			}
		}
	}
}

func TestMalformedTextIsRefused(t *testing.T) {
	for _, text := range []string{
		``, `[`, `{`, `{"a"`, `{"a":`, `{"a":1`, `{"a":1,`, `{"a":1,}`, `{"a":}`, `{a:1}`, `{"a":[1}`, `{"a":1}x`, `{"a" 1}`,
		`{"a":"\"}`, `{"a":1 "b":2}`, `nil`,
	} {
		if err := Object([]byte(text), func(string, []byte) error { return nil }); err == nil {
			t.Errorf("Object accepted %q", text)
		}
	}
	for _, text := range []string{``, `[1`, `[1,`, `[1,]`, `[,1]`, `[-1]`, `[1.5]`, `[1 2]`, `[2147483648]`, `[01]`, `["1"]`, `[1]]`, `[null]`, `{}`} {
		if got, err := AppendInts(nil, []byte(text)); err == nil {
			t.Errorf("AppendInts read %v from %q", got, text)
		}
	}
}

func TestIntsRoundTrip(t *testing.T) {
	want := []int32{0, 7, 10, math.MaxInt32}
	for v := int64(1); v < math.MaxInt32; v = v*3/2 + 1 {
		want = append(want, int32(v), int32(v-1), int32(v/10*10), int32(v/1000*1000))
	}
	got, err := AppendInts(nil, WriteInts(nil, want))
	if err != nil || !slices.Equal(got, want) {
		t.Fatalf("got %v, %v", got, err)
	}
	if got, err := AppendInts(nil, []byte(" [ 1 ,\n2 ] ")); err != nil || !slices.Equal(got, []int32{1, 2}) {
		t.Fatalf("got %v, %v", got, err)
	}
}

func TestFloatsAreThoseOfStrconv(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	values := []string{"0", "-0.0", "-9999.0", "-1.1", "1e-5", "-0.00012345678901234567", "16777217", "16777217.0000001"}
	for range 20000 {
		values = append(values, strconv.FormatFloat(-rng.ExpFloat64(), 'f', rng.IntN(17), 64))
		values = append(values, strconv.FormatFloat(-rng.ExpFloat64()*1e-6, 'g', -1, 32))
	}
	for _, text := range values {
		got, err := AppendFloats(nil, []byte("["+text+"]"))
		want, wantErr := strconv.ParseFloat(text, 32)
		if err != nil || wantErr != nil || math.Float32bits(got[0]) != math.Float32bits(float32(want)) {
			t.Fatalf("%s: got %v %v, want %v", text, got, err, float32(want))
		}
	}
	got, err := AppendFloats(nil, []byte("[null, -1]"))
	if err != nil || len(got) != 2 || got[0] == got[0] || got[1] != -1 {
		t.Fatalf("got %v, %v", got, err)
	}
}

func FuzzObject(f *testing.F) {
	f.Add([]byte(`{"prompt":[1,2],"x":{"y":"z"}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		valid := true
		err := Object(data, func(_ string, v []byte) error {
			valid = valid && json.Valid(v)
			return nil
		})
		// Whatever is accepted with valid values is an object to the standard library too.
		if err == nil && valid && !json.Valid(data) {
			t.Fatalf("accepted %q", data)
		}
		if err != nil && json.Valid(data) && len(data) > 0 && data[space(data, 0)] == '{' {
			t.Fatalf("refused %q: %v", data, err)
		}
	})
}

func FuzzNumbers(f *testing.F) {
	f.Add([]byte(`[1,2]`))
	f.Add([]byte(`[-1.5e3,null]`))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := AppendInts(nil, data)
		var want []int32
		if stdErr := json.Unmarshal(data, &want); err == nil && (stdErr != nil || !slices.Equal(got, want)) {
			t.Fatalf("%q: got %v, standard library %v %v", data, got, want, stdErr)
		}
		_, _ = AppendFloats(nil, data)
	})
}

func BenchmarkAppendInts(b *testing.B) {
	tokens := make([]int32, 100_000)
	for i := range tokens {
		tokens[i] = int32(i * 7919 % 150_000)
	}
	text := WriteInts(nil, tokens)
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		tokens, _ = AppendInts(tokens[:0], text)
	}
}

func BenchmarkWriteInts(b *testing.B) {
	tokens := make([]int32, 100_000)
	for i := range tokens {
		tokens[i] = int32(i * 7919 % 150_000)
	}
	var buf []byte
	for b.Loop() {
		buf = WriteInts(buf[:0], tokens)
	}
}
