package excerpt

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestOfKeepsBothEnds(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		keep int
		want string
		cut  int64
	}{
		"short":                    {"hello", 5, "hello", 0},
		"empty":                    {"", 0, "", 0},
		"even":                     {"abcdefghij", 4, "ab\n[... 6 bytes cut ...]\nij", 6},
		"odd gives the head more":  {"abcdefghij", 3, "ab\n[... 7 bytes cut ...]\nj", 7},
		"nothing kept":             {"abc", 0, "\n[... 3 bytes cut ...]\n", 3},
		"no character is split":    {"äöüäöü", 6, "ä\n[... 8 bytes cut ...]\nü", 8},
		"four byte characters":     {"😀😀😀", 6, "\n[... 12 bytes cut ...]\n", 12},
		"bytes that are no text":   {"a\xffb\x00c", 10, "a\uFFFDb\uFFFDc", 0},
		"stray continuation bytes": {"\x80\x80\x80\x80\x80\x80", 4, "\uFFFD\n[... 4 bytes cut ...]\n", 4},
	} {
		t.Run(name, func(t *testing.T) {
			got, cut := Of(c.text, c.keep)
			if got != c.want || cut != c.cut {
				t.Errorf("Of(%q, %d) = %q, %d; want %q, %d", c.text, c.keep, got, cut, c.want, c.cut)
			}
		})
	}
}

// FuzzBuffer compares a buffer written to in pieces with the plain definition:
// the parts kept are a prefix and a suffix, and what was cut lies between.
func FuzzBuffer(f *testing.F) {
	f.Add("hello world", 4, 3)
	f.Add("äöü😀\xff\x00", 5, 1)
	f.Fuzz(func(t *testing.T, text string, keep, piece int) {
		if keep < 0 || keep > 1<<10 || piece < 1 {
			return
		}
		b := NewBuffer(keep)
		for rest := text; rest != ""; {
			n := min(piece, len(rest))
			if written, err := b.Write([]byte(rest[:n])); written != n || err != nil {
				t.Fatalf("Write = %d, %v", written, err)
			}
			rest = rest[n:]
		}
		if held := len(b.head) + len(b.tail); held > 2*keep {
			t.Fatalf("holds %d bytes to keep %d", held, keep)
		}
		got, cut := b.Text()
		whole, wholeCut := Of(text, keep)
		if got != whole || cut != wholeCut {
			t.Fatalf("in pieces %q, %d; at once %q, %d", got, cut, whole, wholeCut)
		}
		if !utf8.ValidString(got) || strings.ContainsRune(got, 0) {
			t.Fatalf("%q is not storable text", got)
		}
		if !utf8.ValidString(text) || strings.ContainsRune(text, 0) {
			return
		}
		if cut == 0 {
			if got != text {
				t.Fatalf("%q became %q", text, got)
			}
			return
		}
		note := fmt.Sprintf("\n[... %d bytes cut ...]\n", cut)
		found := false
		for i := 0; i+len(note) <= len(got); i++ {
			head, tail := got[:i], got[i+len(note):]
			if got[i:i+len(note)] == note && strings.HasPrefix(text, head) && strings.HasSuffix(text, tail) &&
				int64(len(head)+len(tail))+cut == int64(len(text)) && len(head)+len(tail) <= keep {
				found = true
			}
		}
		if !found {
			t.Fatalf("%q is no excerpt of %q with %d bytes cut", got, text, cut)
		}
	})
}
