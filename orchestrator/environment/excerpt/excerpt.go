// Package excerpt keeps the beginning and the end of a text that is too long and
// says how much was cut from its middle.
//
// A tool's output ends up in a model's context and in Postgres. Its beginning
// names what was done and its end how it went, so these are kept. Memory is
// bounded by what is kept, however much is written. Texts come out as valid
// UTF-8 without the character U+0000, which JSON can carry and Postgres cannot
// store.
package excerpt

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Buffer collects what is written to it and keeps at most the number of bytes it
// was made for. The zero value keeps nothing. It is not safe for concurrent use.
type Buffer struct {
	headBytes, tailBytes int
	head, tail           []byte
	written              int64
}

// NewBuffer returns a buffer that keeps keepBytes: the first half, rounded up,
// from the beginning and the rest from the end.
func NewBuffer(keepBytes int) *Buffer {
	head := (keepBytes + 1) / 2
	return &Buffer{headBytes: head, tailBytes: keepBytes - head}
}

// Write never fails and never keeps p.
func (b *Buffer) Write(p []byte) (int, error) {
	b.written += int64(len(p))
	n := len(p)
	if room := b.headBytes - len(b.head); room > 0 {
		taken := min(room, len(p))
		b.head = append(b.head, p[:taken]...)
		p = p[taken:]
	}
	if len(p) > b.tailBytes {
		p = p[len(p)-b.tailBytes:]
	}
	// The tail may grow to twice its size before it is moved down, so that each
	// byte is copied a bounded number of times.
	if len(b.tail)+len(p) > 2*b.tailBytes {
		keep := min(len(b.tail), b.tailBytes)
		b.tail = append(b.tail[:0], b.tail[len(b.tail)-keep:]...)
	}
	b.tail = append(b.tail, p...)
	return n, nil
}

// WrittenBytes is how much was written, kept or not.
func (b *Buffer) WrittenBytes() int64 { return b.written }

// Text returns what was kept, with a line that names the number of bytes cut
// where something was, and that number. Cuts never split a character; bytes that
// are no UTF-8 are replaced by U+FFFD.
func (b *Buffer) Text() (text string, cutBytes int64) {
	tail := b.tail[max(0, len(b.tail)-b.tailBytes):]
	cutBytes = b.written - int64(len(b.head)+len(tail))
	if cutBytes == 0 {
		return clean(string(b.head) + string(tail)), 0
	}
	head := b.head[:len(b.head)-incompleteEnd(b.head)]
	tail = tail[incompleteStart(tail):]
	cutBytes = b.written - int64(len(head)+len(tail))
	return clean(string(head)) + fmt.Sprintf("\n[... %d bytes cut ...]\n", cutBytes) + clean(string(tail)), cutBytes
}

// Of returns text if it is at most keepBytes long, and otherwise its beginning
// and end, as a Buffer would.
func Of(text string, keepBytes int) (kept string, cutBytes int64) {
	if len(text) <= keepBytes {
		return clean(text), 0
	}
	b := NewBuffer(keepBytes)
	_, _ = b.Write([]byte(text))
	return b.Text()
}

// Line shortens a text to one line of at most keepBytes for an error message.
func Line(text string, keepBytes int) string {
	text = strings.Join(strings.Fields(clean(text)), " ")
	if len(text) <= keepBytes {
		return text
	}
	return text[:keepBytes-incompleteEnd([]byte(text[:keepBytes]))] + "..."
}

// incompleteEnd is how many bytes at the end of p begin a character that p does
// not hold whole.
func incompleteEnd(p []byte) int {
	for n := 1; n <= min(utf8.UTFMax-1, len(p)); n++ {
		rest := p[len(p)-n:]
		if utf8.RuneStart(rest[0]) {
			if utf8.FullRune(rest) {
				return 0
			}
			return n
		}
	}
	return 0
}

// incompleteStart is how many bytes at the start of p go on a character that
// began before it: at most three, since no character is longer than four.
func incompleteStart(p []byte) int {
	n := 0
	for n < min(utf8.UTFMax-1, len(p)) && !utf8.RuneStart(p[n]) {
		n++
	}
	return n
}

func clean(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	return strings.ReplaceAll(s, "\x00", "\uFFFD")
}
