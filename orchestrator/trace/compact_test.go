package trace

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func reward(x float64) *float64 { return &x }

// everyField is a pair of sessions that use all that the format can say.
var everyField = []Session{
	{
		ID: `odd "id"`, Group: "g", StartSeconds: 1.25, PromptTokens: 100, SharedTokens: 40, SharedKey: "k",
		Reward: reward(-0.5), DroppedTokens: 3,
		Turns: []Turn{{7, Unknown, 0.75, UnknownSeconds}, {Unknown, 9, UnknownSeconds, 12}, {5, 0, 0, UnknownSeconds}},
	},
	{ID: "plain", PromptTokens: 1, Turns: []Turn{{0, 0, 0, UnknownSeconds}}},
}

func TestCompactReadsBackWhatWasWritten(t *testing.T) {
	got, err := loadFrom("file", bytes.NewReader(writeCompact(t, everyField)))
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got.Sessions, everyField) {
		t.Errorf("got  %+v\nwant %+v", got.Sessions, everyField)
	}
	if got.Header.Name != "n" || got.Header.Version != CompactVersion {
		t.Errorf("header %+v", got.Header)
	}
}

func TestCompactRefuses(t *testing.T) {
	whole := string(writeCompact(t, everyField))
	lines := strings.SplitAfter(whole, "\n")
	header, second, end := lines[0], lines[2], lines[3]
	checkBadFiles(t, FormatHoldfast, []badFile{
		{"alien", `{"timestamp":1,"input":"a"}`, `file:1: holdfast_trace: is required: this is not a compact trace`},
		{"a later version", strings.Replace(header, `trace":1`, `trace":2`, 1), `file:1: holdfast_trace: must be version 1, is 2`},
		{"unknown header member", strings.Replace(header, `{`, `{"mood":"good",`, 1), `file:1: mood: is not a known field (at byte 1)`},
		{"no licence", strings.Replace(header, `"licence":"l"`, `"licence":""`, 1), `file:1: licence: is required`},
		{"other columns", strings.Replace(header, `gap_ms`, `gap_s`, 1), `file:1: turn: must be ["output_tokens" "append_tokens" "gap_ms" "interval_ms"]`},
		{"cut off between lines", header + second, `file: ends without the footer that counts its sessions; it was cut off`},
		{"cut off in a line", header + second[:20], `file:2: is not valid JSON: unexpected EOF (at byte 20)`},
		{"a line lost", header + second + end, `file: has 1 sessions with 1 turns where its footer counts 2 with 4`},
		{"two files in one", whole + second, `file:5: stands after the footer`},
		{"half a footer", header + `{"sessions":0}`, `file:2: sessions, turns: are required`},
		{"unknown member", header + `{"id":"a","prompt":1,"text":"secret","turns":[]}`, `file:2: text: is not a known field (at byte 21)`},
		{"three numbers", header + `{"id":"a","prompt":1,"turns":[[1,0,0]]}`, `file:2: turns[0]: must be an array of 4, has too few array elements (at byte 36)`},
		{"no turns", header + `{"id":"a","prompt":1,"turns":[]}`, `file:2: turns: must be from 1 to 10000, has 0`},
		{"no id", header + `{"prompt":1,"turns":[[1,0,0,null]]}`, `file:2: id: is required`},
		{"no prompt", header + `{"id":"a","turns":[[1,0,0,null]]}`, `file:2: prompt: must be from 1 to 1048576 tokens, is 0`},
		{"more shared than prompt", header + `{"id":"a","prompt":1,"shared":2,"shared_key":"k","turns":[[1,0,0,null]]}`, `file:2: shared: must be from 0 to the prompt's 1 tokens, is 2`},
		{"shared with nobody", header + `{"id":"a","prompt":1,"shared":1,"turns":[[1,0,0,null]]}`, `file:2: shared_key: is required where tokens are shared`},
		{"negative output", header + `{"id":"a","prompt":1,"turns":[[-5,0,0,null]]}`, `file:2: turns[0]: output must be from 0 to 1048576 tokens, is -5`},
		{"gap of two days", header + `{"id":"a","prompt":1,"turns":[[5,0,172800000,null],[1,0,0,null]]}`, `file:2: turns[0]: gap must be from 0 to 86400 seconds, is 172800`},
		{"the same session twice", header + second + second + end, `file:3: session plain occurs twice, first in file`},
	})
}

func FuzzCompact(f *testing.F) {
	fuzzReader(f, FormatHoldfast, `{"holdfast_trace":1,"name":"n","repository":"r","commit":"c","licence":"l","format":"f","token_counts":"recorded","turn":["output_tokens","append_tokens","gap_ms","interval_ms"]}
{"id":"a","group":"g","start_ms":5,"prompt":9,"shared":2,"shared_key":"k","reward":0.5,"dropped":1,"turns":[[1,2,3,null],[null,null,null,4],[5,0,0,null]]}
{"sessions":1,"turns":3}
`)
}

func TestImportWritesACompactTrace(t *testing.T) {
	folder := t.TempDir()
	in := filepath.Join(folder, "in")
	writeFiles(t, in, map[string]string{
		"LICENSE":      "not a trace",
		"a.jsonl":      `{"timestamp":1,"input":"one two","output":"three","session_id":"s"}` + "\n" + `{"timestamp":2,"input":"one two four","output":"five","session_id":"s"}`,
		"deep/b.jsonl": `{"timestamp":1,"input":"one two","output":"three","session_id":"short"}`,
		"empty.jsonl":  "",
	})
	cfg := ImportConfig{
		Format: FormatLMCache, Path: in, Out: filepath.Join(folder, "out.jsonl"),
		Name: "made-up", Repository: "nobody/nothing", Commit: "0", Licence: "MIT", MinTurns: 2,
	}
	report, err := Import(cfg)
	if err != nil {
		t.Fatal(err)
	}
	want := ImportReport{Report: Report{Files: 3, EmptyFiles: 1, Sessions: 2, Turns: 3}, SessionsWritten: 1, TurnsWritten: 2}
	if report != want {
		t.Errorf("report %+v, want %+v", report, want)
	}
	got, err := Load(cfg.Out)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Sessions) != 1 || got.Sessions[0].ID != "s" || got.Header.TokenCounts != TokenizerName || got.Header.Selection != "sessions of at least 2 turns" {
		t.Errorf("got %+v", got)
	}
	if text, _ := os.ReadFile(cfg.Out); bytes.Contains(text, []byte("three")) {
		t.Error("the compact trace holds text")
	}
}

func writeFiles(t *testing.T, folder string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// A failed import must leave what stood there before, and nothing beside it.
func TestImportLeavesNothingHalfDone(t *testing.T) {
	row := `{"timestamp":1,"input":"one","output":"two","session_id":"s"}`
	for name, c := range map[string]struct {
		files map[string]string
		alter func(*ImportConfig)
		want  string
	}{
		"the second file is bad":    {map[string]string{"a.jsonl": row, "b.jsonl": "{"}, nil, "b.jsonl:1: is not valid JSON: unexpected EOF (at byte 1)"},
		"a session in two files":    {map[string]string{"a.jsonl": row, "b.jsonl": row}, nil, "b.jsonl:1: session s occurs twice, first in IN/a.jsonl"},
		"only empty files":          {map[string]string{"a.jsonl": ""}, nil, "importing IN: no session of at least 1 turns in 1 files (1 of them empty)"},
		"no file of the format":     {map[string]string{"a.csv": row}, nil, "folder IN holds no file that ends in .jsonl, as lmcache traces do"},
		"all sessions too short":    {map[string]string{"a.jsonl": row}, func(c *ImportConfig) { c.MinTurns = 9 }, "importing IN: no session of at least 9 turns in 1 files (0 of them empty)"},
		"no licence":                {map[string]string{"a.jsonl": row}, func(c *ImportConfig) { c.Licence = "" }, "importing: OUT: licence: is required"},
		"our own format":            {map[string]string{"a.jsonl": row}, func(c *ImportConfig) { c.Format = FormatHoldfast }, "importing: format must be one of a foreign trace, is holdfast"},
		"no such file":              {map[string]string{"a.jsonl": row}, func(c *ImportConfig) { c.Path += "/c.jsonl" }, "opening trace: stat IN/c.jsonl: no such file or directory"},
		"nowhere to put the result": {map[string]string{"a.jsonl": row}, func(c *ImportConfig) { c.Out += "/x/y" }, "creating compact trace: "},
	} {
		t.Run(name, func(t *testing.T) {
			folder := t.TempDir()
			in, out := filepath.Join(folder, "in"), filepath.Join(folder, "out.jsonl")
			writeFiles(t, in, c.files)
			writeFiles(t, folder, map[string]string{"out.jsonl": "what stood there"})
			cfg := ImportConfig{Format: FormatLMCache, Path: in, Out: out, Name: "n", Repository: "r", Commit: "c", Licence: "l"}
			if c.alter != nil {
				c.alter(&cfg)
			}
			_, err := Import(cfg)
			want := strings.NewReplacer("IN", in, "OUT", out).Replace(c.want)
			if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %v, want one line with %s", err, want)
			}
			if text, err := os.ReadFile(out); err != nil || string(text) != "what stood there" {
				t.Errorf("the old file is now %q, %v", text, err)
			}
			if left, _ := filepath.Glob(filepath.Join(folder, ".trace-*")); len(left) > 0 {
				t.Errorf("left behind %v", left)
			}
		})
	}
}

func TestReadAllGivesNothingWithAnError(t *testing.T) {
	folder := t.TempDir()
	writeFiles(t, folder, map[string]string{"t.csv": csvHeader + "a,1,0,0,8,5,3\nb,1,0,0,8,5\n"})
	sessions, _, err := ReadAll(FormatTraceLabCSV, folder)
	if err == nil || sessions != nil {
		t.Errorf("got %v, %v", sessions, err)
	}
}

func TestFormatsAreNamed(t *testing.T) {
	for _, f := range Formats() {
		if got, err := ParseFormat(f.String()); err != nil || got != f {
			t.Errorf("%s: got %v, %v", f, got, err)
		}
	}
	_, err := ParseFormat("sharegpt")
	if want := `unknown trace format "sharegpt"; known are lmcache, tau-bench, mooncake, tracelab, tracelab-csv, holdfast`; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}
