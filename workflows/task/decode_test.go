package task

import (
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
)

func TestDecodeReadsBackWhatWasWritten(t *testing.T) {
	want := valid()
	raw, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Decode(raw, "")
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestDecodeNamesPathAndOffset(t *testing.T) {
	cases := []struct{ name, raw, want string }{
		{"not an object", `[1]`, "tasks[3]: must be an object (at byte 0)"},
		{"null", `null`, "tasks[3]: must be an object (at byte 0)"},
		{"nothing", ``, "tasks[3]: must be an object (at byte 0)"},
		{"unknown field", `{"class":"a","group":4}`, "tasks[3].group: is not a known field (at byte 13)"},
		{"unknown field deep down", `{"environment":{"turns":[{"output_tokens":1},{"gap":2}]}}`, "tasks[3].environment.turns[1].gap: is not a known field (at byte 46)"},
		{"field in another case", `{"Class":"a"}`, "tasks[3].Class: is not a known field (at byte 1)"},
		{"field twice", `{"class":"a","class":"b"}`, "tasks[3].class: occurs twice (at byte 13)"},
		{"string for a number", `{"group_size":"4"}`, "tasks[3].group_size: must be a whole number, is a string (at byte 14)"},
		{"fraction for a whole number", `{"sampling":{"max_tokens":1.5}}`, "tasks[3].sampling.max_tokens: must be a whole number, is 1.5 (at byte 26)"},
		{"NaN", `{"environment":{"turns":[{"gap_seconds":NaN}]}}`, "tasks[3].environment.turns[0].gap_seconds: is not valid JSON: invalid character 'N' at start of value (at byte 40)"},
		{"infinite by size", `{"environment":{"turns":[{"gap_seconds":1e999}]}}`, "tasks[3].environment.turns[0].gap_seconds: must be a number that a 64-bit float can hold, is 1e999 (at byte 40)"},
		{"token id above 32 bits", `{"prompt":{"token_ids":[1,4294967296]}}`, "tasks[3].prompt.token_ids[1]: must be a whole number below 2147483648, is 4294967296 (at byte 26)"},
		{"negative seed", `{"prompt":{"synthetic":{"seed":-1}}}`, "tasks[3].prompt.synthetic.seed: must be a whole number from 0 to 18446744073709551615, is -1 (at byte 31)"},
		{"array for an object", `{"limits":[]}`, "tasks[3].limits: must be an object, is an array (at byte 10)"},
		{"not UTF-8", "{\"id\":\"\xff\"}", "tasks[3].id: is not valid JSON: invalid UTF-8 (at byte 7)"},
		{"metadata member twice", `{"metadata":{"a":1,"a":2}}`, "tasks[3].metadata.a: occurs twice (at byte 19)"},
		{"decoded but not valid", `{"class":"a","prompt":{"text":"x"},"sampling":{"max_tokens":-1}}`, "tasks[3].sampling.max_tokens: must be from 0 to 1048576, is -1"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			_, err := Decode([]byte(c.raw), "tasks[3]")
			var fieldError *FieldError
			if !errors.As(err, &fieldError) {
				t.Fatalf("got %v, want a FieldError", err)
			}
			if err.Error() != c.want {
				t.Errorf("got  %s\nwant %s", err, c.want)
			}
		})
	}
}

func TestDecodeNextReadsAnArrayTaskByTask(t *testing.T) {
	document := `[ {"class":"a","prompt":{"text":"x"},"sampling":{"max_tokens":1}},
	{"class":"b","prompt":{"text":"x"},"sampling":{"max_tokens":2.5}} ]`
	decoder := json.NewDecoder(strings.NewReader(document))
	if _, err := decoder.Token(); err != nil {
		t.Fatal(err)
	}
	first, err := DecodeNext(decoder, "tasks[0]")
	if err != nil || first.Class != "a" {
		t.Fatalf("got %+v, %v", first, err)
	}
	_, err = DecodeNext(decoder, "tasks[1]")
	var fieldError *FieldError
	if !errors.As(err, &fieldError) {
		t.Fatalf("got %v, want a FieldError", err)
	}
	if fieldError.Path != "tasks[1].sampling.max_tokens" || fieldError.Offset != int64(strings.Index(document, "2.5")) {
		t.Errorf("got path %s offset %d, want the offset of 2.5 in the whole document, %d", fieldError.Path, fieldError.Offset, strings.Index(document, "2.5"))
	}
}

func TestDecodeNextTellsBadInputFromABrokenReader(t *testing.T) {
	errLine := errors.New("line cut")
	cases := []struct {
		name      string
		reader    io.Reader
		wantField string
		wantCause error
	}{
		{"truncated", strings.NewReader(`{"class":"a"`), "tasks[0]: the document ends before this task does", nil},
		{"malformed", strings.NewReader(`{"class":}`), "tasks[0]: is not valid JSON: invalid character '}'", nil},
		{"reader fails", io.MultiReader(strings.NewReader(`{"cla`), iotest.ErrReader(errLine)), "", errLine},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			_, err := DecodeNext(json.NewDecoder(c.reader), "tasks[0]")
			var fieldError *FieldError
			isField := errors.As(err, &fieldError)
			if c.wantCause != nil {
				if isField || !errors.Is(err, c.wantCause) {
					t.Fatalf("got %v, want the reader's own error", err)
				}
				return
			}
			if !isField || !strings.HasPrefix(err.Error(), c.wantField) {
				t.Fatalf("got %v, want %s", err, c.wantField)
			}
		})
	}
}

// FuzzDecode checks that no input panics, that every refusal names a field,
// and that what is accepted survives being written and read again.
func FuzzDecode(f *testing.F) {
	full, err := json.Marshal(valid())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(full)
	f.Add([]byte(`{"class":"a","prompt":{"messages":[{"role":"user"}]},"sampling":{"max_tokens":1},"metadata":{"a":"\u0000"}}`))
	f.Add([]byte(`{"prompt":{"token_ids":[1e3]},"environment":{"kind":"replay","turns":[{}]}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		spec, err := Decode(raw, "tasks[0]")
		if err != nil {
			var fieldError *FieldError
			if !errors.As(err, &fieldError) || fieldError.Problem == "" {
				t.Fatalf("error without a field: %v", err)
			}
			return
		}
		again, err := json.Marshal(spec)
		if err != nil {
			t.Fatalf("accepted but cannot be written: %v", err)
		}
		if _, err := Decode(again, "tasks[0]"); err != nil {
			t.Fatalf("accepted, but refused when read again: %v\n%s", err, again)
		}
	})
}
