package task

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// UnknownOffset is FieldError.Offset when the error does not come from bytes.
const UnknownOffset = -1

// FieldError says which field of a task is wrong and why, in words that a
// trainer's author can act on: the allowed range and the value given.
type FieldError struct {
	// Path is the JSON path of the field, such as
	// tasks[3].environment.turns[2].gap_seconds.
	Path string
	// Problem is what is wrong, without the path.
	Problem string
	// Offset is the byte of the input at which decoding stopped, counted from
	// where the input began, or UnknownOffset.
	Offset int64
}

// Error gives path, problem and, where known, the offset in one line.
func (e *FieldError) Error() string {
	text := e.Problem
	if e.Path != "" {
		text = e.Path + ": " + text
	}
	if e.Offset >= 0 {
		text += fmt.Sprintf(" (at byte %d)", e.Offset)
	}
	return text
}

// field appends a member name to a path.
func field(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// index appends an array index to a path.
func index(path string, i int) string {
	return path + "[" + strconv.Itoa(i) + "]"
}

// wrong builds the error of a value found bad after decoding.
func wrong(path, format string, args ...any) *FieldError {
	return &FieldError{Path: path, Problem: fmt.Sprintf(format, args...), Offset: UnknownOffset}
}

// maxQuotedBytes bounds how much of a bad value an error repeats: enough to
// recognise it, too little to flood a log.
const maxQuotedBytes = 40

// quoted gives a bad value for an error message, shortened and escaped.
func quoted(s string) string {
	short := shortened(s)
	if short == s {
		return strconv.Quote(s)
	}
	return strconv.Quote(strings.TrimSuffix(short, "...")) + "..."
}

// shortened cuts a string at a character boundary and marks the cut.
func shortened(s string) string {
	if len(s) <= maxQuotedBytes {
		return s
	}
	cut := maxQuotedBytes
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "..."
}

// oneOf lists the members of a closed enum for an error message.
func oneOf[K ~string](kinds []K) string {
	names := make([]string, len(kinds))
	for i, k := range kinds {
		names[i] = string(k)
	}
	return strings.Join(names, ", ")
}
