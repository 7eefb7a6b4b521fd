package trace

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

// readText runs a format's reader over a file given as text, as Read does.
func readText(format Format, name, text string) ([]Session, Report, error) {
	var sessions []Session
	var report Report
	src := &source{name: name, file: bytes.NewReader([]byte(text)), report: &report}
	err := formatTable[format].read(src, checked(name, map[string]string{}, &report, func(s Session) error {
		sessions = append(sessions, s)
		return nil
	}))
	return sessions, report, err
}

// mustRead is readText for files that are well formed.
func mustRead(t *testing.T, format Format, text string) []Session {
	t.Helper()
	sessions, _, err := readText(format, "file", text)
	if err != nil {
		t.Fatal(err)
	}
	return sessions
}

// badFile is one case of a table of files that must be refused.
type badFile struct{ name, text, want string }

func checkBadFiles(t *testing.T, format Format, cases []badFile) {
	t.Helper()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			_, _, err := readText(format, "file", c.text)
			var fileError *FileError
			if !errors.As(err, &fileError) {
				t.Fatalf("got %v, want a FileError", err)
			}
			if err.Error() != c.want {
				t.Errorf("got  %s\nwant %s", err, c.want)
			}
		})
	}
}

// tokensOf counts a text by the tokeniser that TestCountTokens pins.
func tokensOf(t *testing.T, text string) int {
	t.Helper()
	n, err := countTokens(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// jsonLines writes values one a line.
func jsonLines(t *testing.T, rows ...any) string {
	t.Helper()
	var b strings.Builder
	for _, row := range rows {
		text, err := json.Marshal(row)
		if err != nil {
			t.Fatal(err)
		}
		b.Write(append(text, '\n'))
	}
	return b.String()
}

// fuzzReader checks for one format that no file panics, that every refusal
// names the file, and that what is accepted can be written as a compact trace
// and read back the same.
func fuzzReader(f *testing.F, format Format, seeds ...string) {
	for _, seed := range seeds {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		sessions, _, err := readText(format, "file", text)
		if err != nil {
			var fileError *FileError
			if !errors.As(err, &fileError) || fileError.Problem == "" || fileError.File != "file" {
				t.Fatalf("error without a place: %#v", err)
			}
			return
		}
		first := writeCompact(t, sessions)
		again, err := loadFrom("again", bytes.NewReader(first))
		if err != nil {
			t.Fatalf("what was written cannot be read: %v\n%s", err, first)
		}
		if second := writeCompact(t, again.Sessions); !bytes.Equal(first, second) {
			t.Fatalf("changed on the way:\n%s\n%s", first, second)
		}
	})
}

func writeCompact(t *testing.T, sessions []Session) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := newCompactWriter(&b, Header{
		Name: "n", Repository: "r", Commit: "c", Licence: "l", Format: "f", TokenCounts: "recorded",
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range sessions {
		if err := w.add(&sessions[i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.finish(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
