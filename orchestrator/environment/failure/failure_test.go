package failure

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"testing"
)

func TestEveryKindHasAName(t *testing.T) {
	seen := map[string]bool{}
	for k := Unreachable; k <= Cancelled; k++ {
		name := k.String()
		if seen[name] || name == fmt.Sprintf("Kind(%d)", uint8(k)) {
			t.Errorf("kind %d is called %q", uint8(k), name)
		}
		seen[name] = true
	}
}

func TestWithin(t *testing.T) {
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancelLate := context.WithTimeout(t.Context(), 0)
	defer cancelLate()
	for name, c := range map[string]struct {
		ctx  context.Context
		err  error
		kind Kind
		text string
	}{
		"no kind yet":         {t.Context(), io.EOF, Died, "stepping: died: EOF"},
		"the caller gave up":  {cancelled, io.EOF, Cancelled, "stepping: cancelled: context canceled"},
		"a deadline passed":   {late, io.EOF, Timeout, "stepping: timeout: context deadline exceeded"},
		"a kind keeps itself": {cancelled, &Error{Kind: Refused, Status: 422, Message: "no"}, Refused, "stepping: refused (status 422): no"},
		"words keep":          {t.Context(), New(Lost, "resetting", io.EOF), Lost, "resetting: lost: EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			err := Within(c.ctx, "stepping", Died, c.err)
			if kind, ok := KindOf(err); !ok || kind != c.kind || err.Error() != c.text {
				t.Errorf("got %v (%v), want %q", err, kind, c.text)
			}
		})
	}
	if err := Within(cancelled, "stepping", Died, nil); err != nil {
		t.Errorf("no error became %v", err)
	}
	if _, ok := KindOf(errors.New("plain")); ok {
		t.Error("a plain error has a kind")
	}
}

func TestNotAsDocumentedSpeaksOfTheDocument(t *testing.T) {
	for raw, text := range map[string]string{
		`{"results":[{"reward":"1"}]}`:   "malformed: the answer is not as documented: results.reward cannot be a string",
		`{"results":[{"reward":1e999}]}`: "malformed: the answer is not as documented: results.reward cannot be a number 1e999",
		`[]`:                             "malformed: the answer is not as documented: the document cannot be an array",
		`{`:                              "malformed: the answer is not as documented: unexpected end of JSON input",
	} {
		var document struct {
			Results []struct {
				Reward float64 `json:"reward"`
			} `json:"results"`
		}
		err := NotAsDocumented("the answer", json.Unmarshal([]byte(raw), &document))
		if err.Kind != Malformed || err.Error() != text {
			t.Errorf("%s: %q, want %q", raw, err, text)
		}
	}
}
