// Package jsonscan reads and writes the long number arrays of the completions
// protocol without reflection: a 100,000-token prompt costs the standard
// library's decoder some 17 ms and about 1 ms here. It splits an object into its
// members and leaves everything but the arrays to encoding/json. It is not
// a general JSON parser.
package jsonscan

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
)

// ErrSyntax marks text that is not the JSON expected.
var ErrSyntax = errors.New("malformed JSON")

const maxDepth = 256

// Object calls visit with each member of the object that data holds. Values are
// spans of data; visit decides how to read them. Spans that hold an object or array are only
// checked for balance, so visit must validate what it does not decode itself.
func Object(data []byte, visit func(key string, value []byte) error) error {
	i := space(data, 0)
	if i >= len(data) || data[i] != '{' {
		return fmt.Errorf("%w: want an object", ErrSyntax)
	}
	i = space(data, i+1)
	if i < len(data) && data[i] == '}' {
		return trailing(data, i+1)
	}
	for {
		end, err := valueEnd(data, i)
		if err != nil {
			return err
		}
		if data[i] != '"' {
			return fmt.Errorf("%w: want a member name at byte %d", ErrSyntax, i)
		}
		key, err := name(data[i:end])
		if err != nil {
			return err
		}
		i = space(data, end)
		if i >= len(data) || data[i] != ':' {
			return fmt.Errorf("%w: want ':' at byte %d", ErrSyntax, i)
		}
		i = space(data, i+1)
		if end, err = valueEnd(data, i); err != nil {
			return err
		}
		if err := visit(key, data[i:end]); err != nil {
			return err
		}
		i = space(data, end)
		if i >= len(data) {
			return fmt.Errorf("%w: the object does not end", ErrSyntax)
		}
		if data[i] == '}' {
			return trailing(data, i+1)
		}
		if data[i] != ',' {
			return fmt.Errorf("%w: want ',' at byte %d", ErrSyntax, i)
		}
		i = space(data, i+1)
	}
}

// Elements calls visit with each element of the array that data holds.
func Elements(data []byte, visit func(value []byte) error) error {
	i := space(data, 0)
	if i >= len(data) || data[i] != '[' {
		return fmt.Errorf("%w: want an array", ErrSyntax)
	}
	i = space(data, i+1)
	if i < len(data) && data[i] == ']' {
		return trailing(data, i+1)
	}
	for {
		end, err := valueEnd(data, i)
		if err != nil {
			return err
		}
		if err := visit(data[i:end]); err != nil {
			return err
		}
		i = space(data, end)
		switch {
		case i < len(data) && data[i] == ',':
			i = space(data, i+1)
		case i < len(data) && data[i] == ']':
			return trailing(data, i+1)
		default:
			return fmt.Errorf("%w: want ',' or ']' at byte %d", ErrSyntax, i)
		}
	}
}

func trailing(data []byte, i int) error {
	if space(data, i) < len(data) {
		return fmt.Errorf("%w: text after the value, at byte %d", ErrSyntax, i)
	}
	return nil
}

func name(quoted []byte) (string, error) {
	if bytes.IndexByte(quoted, '\\') < 0 {
		return string(quoted[1 : len(quoted)-1]), nil
	}
	var s string
	if err := json.Unmarshal(quoted, &s); err != nil {
		return "", fmt.Errorf("%w: %w", ErrSyntax, err)
	}
	return s, nil
}

func space(data []byte, i int) int {
	for i < len(data) && (data[i] == ' ' || data[i] == '\n' || data[i] == '\r' || data[i] == '\t') {
		i++
	}
	return i
}

// valueEnd is the index after the value that begins at i.
func valueEnd(data []byte, i int) (int, error) {
	if i >= len(data) {
		return 0, fmt.Errorf("%w: unexpected end", ErrSyntax)
	}
	switch data[i] {
	case '"':
		return stringEnd(data, i)
	case '{', '[':
		return nestedEnd(data, i)
	case ',', ':', '}', ']':
		return 0, fmt.Errorf("%w: want a value at byte %d", ErrSyntax, i)
	}
	return scalarEnd(data, i), nil
}

func scalarEnd(data []byte, i int) int {
	for i < len(data) {
		switch data[i] {
		case ',', ':', ']', '}', ' ', '\n', '\r', '\t':
			return i
		}
		i++
	}
	return i
}

func stringEnd(data []byte, i int) (int, error) {
	for i++; i < len(data); i++ {
		switch c := data[i]; {
		case c == '\\':
			i++
		case c == '"':
			return i + 1, nil
		case c < ' ':
			return 0, fmt.Errorf("%w: control character at byte %d", ErrSyntax, i)
		}
	}
	return 0, fmt.Errorf("%w: a string does not end", ErrSyntax)
}

func nestedEnd(data []byte, i int) (int, error) {
	if data[i] == '[' {
		// An array without strings, arrays or objects in it ends at its first bracket.
		if n := bytes.IndexByte(data[i:], ']'); n > 0 && !nests(data[i+1:i+n]) {
			return i + n + 1, nil
		}
	}
	// The stack holds the closers that are due.
	var stack [maxDepth]byte
	depth := 0
	for i < len(data) {
		switch c := data[i]; c {
		case '"':
			end, err := stringEnd(data, i)
			if err != nil {
				return 0, err
			}
			i = end
			continue
		case '{', '[':
			if depth == maxDepth {
				return 0, fmt.Errorf("%w: nested deeper than %d", ErrSyntax, maxDepth)
			}
			stack[depth] = c + 2 // '}' and ']' follow their openers by two.
			depth++
		case '}', ']':
			depth--
			if stack[depth] != c {
				return 0, fmt.Errorf("%w: %q does not close anything at byte %d", ErrSyntax, c, i)
			}
			if depth == 0 {
				return i + 1, nil
			}
		}
		i++
	}
	return 0, fmt.Errorf("%w: a value does not end", ErrSyntax)
}

func nests(data []byte) bool {
	return bytes.IndexByte(data, '"') >= 0 || bytes.IndexByte(data, '[') >= 0 || bytes.IndexByte(data, '{') >= 0 || bytes.IndexByte(data, '}') >= 0
}

// AppendInts reads an array of non-negative int32 and appends it to dst.
func AppendInts(dst []int32, data []byte) ([]int32, error) {
	i := space(data, 0)
	if i >= len(data) || data[i] != '[' {
		return dst, fmt.Errorf("%w: want an array of integers", ErrSyntax)
	}
	i = space(data, i+1)
	if i < len(data) && data[i] == ']' {
		return dst, trailing(data, i+1)
	}
	for {
		start := i
		var v int64
		for i < len(data) && data[i]-'0' <= 9 {
			if v = v*10 + int64(data[i]-'0'); v > math.MaxInt32 {
				return dst, fmt.Errorf("%w: the integer at byte %d is above %d", ErrSyntax, start, math.MaxInt32)
			}
			i++
		}
		if i == start || data[start] == '0' && i > start+1 {
			return dst, fmt.Errorf("%w: want an integer from 0 on at byte %d", ErrSyntax, start)
		}
		dst = append(dst, int32(v))
		i = space(data, i)
		switch {
		case i < len(data) && data[i] == ',':
			i = space(data, i+1)
		case i < len(data) && data[i] == ']':
			return dst, trailing(data, i+1)
		default:
			return dst, fmt.Errorf("%w: want an integer from 0 on at byte %d", ErrSyntax, i)
		}
	}
}

// AppendFloats reads an array of numbers and appends it to dst; null becomes NaN.
func AppendFloats(dst []float32, data []byte) ([]float32, error) {
	i := space(data, 0)
	if i >= len(data) || data[i] != '[' {
		return dst, fmt.Errorf("%w: want an array of numbers", ErrSyntax)
	}
	i = space(data, i+1)
	if i < len(data) && data[i] == ']' {
		return dst, trailing(data, i+1)
	}
	for {
		end := scalarEnd(data, i)
		v, err := float(data[i:end])
		if err != nil {
			return dst, fmt.Errorf("%w: want a number at byte %d: %w", ErrSyntax, i, err)
		}
		dst = append(dst, v)
		i = space(data, end)
		switch {
		case i < len(data) && data[i] == ',':
			i = space(data, i+1)
		case i < len(data) && data[i] == ']':
			return dst, trailing(data, i+1)
		default:
			return dst, fmt.Errorf("%w: want ',' or ']' at byte %d", ErrSyntax, i)
		}
	}
}

func float(text []byte) (float32, error) {
	if v, ok := decimal(text); ok {
		return v, nil
	}
	if string(text) == "null" {
		return float32(math.NaN()), nil
	}
	v, err := strconv.ParseFloat(string(text), 32)
	return float32(v), err
}

var negativePowers = [...]float64{1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15}

// decimal reads a plain decimal of at most 15 digits exactly as strconv does: both
// the digits and the power of ten are exact in float64, so the quotient is
// rounded once, and a second time to float32. strconv rounds once, which differs
// only if the float64 lies on a tie, so those go to strconv too.
func decimal(s []byte) (float32, bool) {
	i := 0
	negative := len(s) > 0 && s[0] == '-'
	if negative {
		i++
	}
	var digits int64
	count, point := 0, -1
	for ; i < len(s); i++ {
		switch c := s[i]; {
		case c >= '0' && c <= '9':
			digits = digits*10 + int64(c-'0')
			count++
		case c == '.' && point < 0:
			point = count
		default:
			return 0, false
		}
	}
	if count == 0 || count > 15 {
		return 0, false
	}
	places := 0
	if point >= 0 {
		places = count - point
	}
	v := float64(digits) / negativePowers[places]
	if math.Float64bits(v)&(1<<29-1) == 1<<28 {
		return 0, false
	}
	if negative {
		v = -v
	}
	return float32(v), true
}

// WriteInts appends values to buf as a JSON array. It reserves the room that
// token ids usually take at once: prompts are long.
func WriteInts(buf []byte, values []int32) []byte {
	const usual = len("1234567,")
	buf = slices.Grow(buf, usual*len(values)+2)
	buf = append(buf, '[')
	for _, v := range values {
		buf = AppendInt(buf, v)
		buf = append(buf, ',')
	}
	if len(values) > 0 {
		buf = buf[:len(buf)-1]
	}
	return append(buf, ']')
}

// AppendInt appends a value in decimal, faster than strconv for the six digits
// of a token id.
func AppendInt(buf []byte, v int32) []byte {
	if v < 0 || v >= 1e6 {
		return strconv.AppendInt(buf, int64(v), 10)
	}
	u := uint32(v)
	high, low := u/1000*3, u%1000*3
	if u >= 1000 {
		skip := 0
		if u < 100_000 {
			skip = 1
			if u < 10_000 {
				skip = 2
			}
		}
		buf = append(buf, thousands[high+uint32(skip):high+3]...)
		return append(buf, thousands[low:low+3]...)
	}
	skip := uint32(0)
	if u < 100 {
		skip = 1
		if u < 10 {
			skip = 2
		}
	}
	return append(buf, thousands[low+skip:low+3]...)
}

// thousands is "000001002" and so on up to 999.
var thousands = func() string {
	b := make([]byte, 0, 3000)
	for i := range 1000 {
		b = append(b, byte('0'+i/100), byte('0'+i/10%10), byte('0'+i%10))
	}
	return string(b)
}()

// WriteString appends a JSON string.
func WriteString(buf []byte, s string) []byte {
	quoted, err := json.Marshal(s)
	if err != nil {
		// A string always encodes; invalid UTF-8 is replaced.
		panic(err)
	}
	return append(buf, quoted...)
}
