package task

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strconv"
	"time"

	strictjson "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// Decode reads one task from its JSON text and validates it. Unknown members,
// duplicate members, wrong types and bytes that are not UTF-8 are errors, each a
// *FieldError with the path of the member below path and its offset in raw.
func Decode(raw []byte, path string) (Spec, error) {
	return decodeAt(raw, path, 0)
}

// DecodeNext reads the next task from a decoder that stands in an array of
// tasks, so that a batch of any size is decoded one task at a time. Errors of
// the task are *FieldErrors whose offset counts from the decoder's first byte;
// errors of the underlying reader are wrapped and can be told apart by that.
func DecodeNext(decoder *json.Decoder, path string) (Spec, error) {
	var raw json.RawMessage
	if err := decoder.Decode(&raw); err != nil {
		var syntax *json.SyntaxError
		switch {
		case errors.As(err, &syntax):
			return Spec{}, &FieldError{Path: path, Problem: "is not valid JSON: " + syntax.Error(), Offset: syntax.Offset}
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return Spec{}, &FieldError{Path: path, Problem: "the document ends before this task does", Offset: decoder.InputOffset()}
		}
		return Spec{}, fmt.Errorf("reading %s: %w", path, err)
	}
	return decodeAt(raw, path, decoder.InputOffset()-int64(len(raw)))
}

// decodeAt decodes raw, which begins at byte start of the whole input.
func decodeAt(raw []byte, path string, start int64) (Spec, error) {
	if !isObject(raw) {
		return Spec{}, &FieldError{Path: path, Problem: "must be an object", Offset: start}
	}
	var spec Spec
	if err := strictjson.Unmarshal(raw, &spec, strictjson.RejectUnknownMembers(true)); err != nil {
		return Spec{}, Explain(err, path, start)
	}
	if err := spec.Validate(path); err != nil {
		return Spec{}, err
	}
	return spec, nil
}

// Explain puts an error of the JSON decoder into words: which field below path,
// what it must be and what it is. start is the offset at which the decoded text
// begins in the whole input. Readers of other JSON documents use it as well.
func Explain(err error, path string, start int64) *FieldError {
	var semantic *strictjson.SemanticError
	if errors.As(err, &semantic) {
		return &FieldError{
			Path:    belowPath(path, semantic.JSONPointer),
			Problem: describeSemantic(semantic),
			Offset:  start + semantic.ByteOffset,
		}
	}
	var syntactic *jsontext.SyntacticError
	if errors.As(err, &syntactic) {
		problem := "is not valid JSON: " + syntactic.Err.Error()
		if errors.Is(syntactic, jsontext.ErrDuplicateName) {
			problem = "occurs twice"
		}
		return &FieldError{
			Path:    belowPath(path, syntactic.JSONPointer),
			Problem: problem,
			Offset:  start + syntactic.ByteOffset,
		}
	}
	return &FieldError{Path: path, Problem: err.Error(), Offset: UnknownOffset}
}

func describeSemantic(err *strictjson.SemanticError) string {
	if errors.Is(err.Err, strictjson.ErrUnknownName) {
		return "is not a known field"
	}
	wanted := describeType(err.GoType)
	switch given := describeKind(err.JSONKind); {
	case wanted == base64 && err.Err != nil:
		return fmt.Sprintf("must be %s, has %v", wanted, err.Err)
	case len(err.JSONValue) > 0:
		return fmt.Sprintf("must be %s, is %s", wanted, shortened(string(err.JSONValue)))
	case given != "":
		return fmt.Sprintf("must be %s, is %s", wanted, given)
	case err.Err != nil:
		return fmt.Sprintf("must be %s, has %v", wanted, err.Err)
	}
	return "must be " + wanted
}

// base64 is what bytes are in JSON.
const base64 = "base64"

func describeType(t reflect.Type) string {
	if t == nil {
		return "something else"
	}
	switch t.Kind() {
	case reflect.Pointer:
		return describeType(t.Elem())
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Int32:
		return "a whole number below 2147483648"
	case reflect.Int, reflect.Int64:
		return "a whole number"
	case reflect.Uint64:
		return "a whole number from 0 to 18446744073709551615"
	case reflect.Float64:
		return "a number that a 64-bit float can hold"
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return base64
		}
		return "an array"
	case reflect.Array:
		return fmt.Sprintf("an array of %d", t.Len())
	}
	if t == reflect.TypeFor[time.Time]() {
		return "a time such as 2006-01-02T15:04:05Z"
	}
	return "an object"
}

func describeKind(kind jsontext.Kind) string {
	switch kind {
	case '"':
		return "a string"
	case '0':
		return "a number"
	case 't', 'f':
		return "true or false"
	case 'n':
		return "null"
	case '[':
		return "an array"
	case '{':
		return "an object"
	}
	return ""
}

// belowPath turns a JSON pointer (RFC 6901) below a task into the path
// notation of the API: /environment/turns/2 becomes .environment.turns[2].
func belowPath(path string, pointer jsontext.Pointer) string {
	for token := range pointer.Tokens() {
		if i, err := strconv.ParseUint(token, 10, 31); err == nil {
			path = index(path, int(i))
			continue
		}
		path = field(path, shortened(token))
	}
	return path
}
