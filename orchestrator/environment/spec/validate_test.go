package spec

import (
	"encoding/json"
	"strings"
	"testing"

	strictjson "github.com/go-json-experiment/json"
)

func TestEnvironmentValidate(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"http":                {`{"kind":"http","http":{"url":"http://10.0.0.1:8000/env","task":{"id":7}}}`, ""},
		"mcp by program":      {`{"kind":"mcp","tool_format":"hermes","mcp":{"program":{"command":["server"]}}}`, ""},
		"mcp by url":          {`{"kind":"mcp","tool_format":"openai","mcp":{"url":"https://tools.example/mcp","tools":["look"]}}`, ""},
		"exec":                {`{"kind":"exec","exec":{"program":{"command":["sh"],"limits":{"wall_seconds":0.5}},"files":{"a/b.txt":"x"}}}`, ""},
		"exec as a tool":      {`{"kind":"exec","tool_format":"hermes","exec":{"program":{"command":["sh"]},"tool":{"name":"sh","argument":"script"}}}`, ""},
		"no kind":             {`{}`, `e.kind: must be one of http, mcp, exec, is ""`},
		"kind without member": {`{"kind":"http"}`, `e.http: is required for kind http`},
		"member of another":   {`{"kind":"http","http":{"url":"http://a"},"exec":{"program":{"command":["a"]}}}`, `e.exec: belongs to kind exec, kind is http`},
		"format":              {`{"kind":"http","http":{"url":"http://a"},"tool_format":"xml"}`, `e.tool_format: must be one of openai, hermes, is "xml"`},
		"url":                 {`{"kind":"http","http":{"url":"ftp://a"}}`, `e.http.url: must be an absolute http or https URL, is "ftp://a"`},
		"password":            {`{"kind":"http","http":{"url":"http://u:p@a"}}`, `e.http.url: must not hold a user or password: name a credential instead`},
		"time-out":            {`{"kind":"http","http":{"url":"http://a","timeout_seconds":-1}}`, `e.http.timeout_seconds: must be from 0 to 3600, is -1`},
		"task":                {`{"kind":"http","http":{"url":"http://a","task":[1]}}`, `e.http.task: must be a JSON object`},
		"NUL in a task":       {`{"kind":"http","http":{"url":"http://a","task":{"a":"\u0000"}}}`, `e.http.task: must not contain the character U+0000`},
		"no NUL in a task":    {`{"kind":"http","http":{"url":"http://a","task":{"a":"\\u0000"}}}`, ""},
		"binary file":         {`{"kind":"exec","exec":{"program":{"command":["a"]},"files":{"x":"\u0000"}}}`, `e.exec.files."x": must be valid UTF-8 without the character U+0000`},
		"mcp without format":  {`{"kind":"mcp","mcp":{"url":"http://a"}}`, `e.tool_format: is required for kind mcp, one of openai, hermes`},
		"mcp with both":       {`{"kind":"mcp","tool_format":"hermes","mcp":{"url":"http://a","program":{"command":["a"]}}}`, `e.mcp: must have exactly one of program and url`},
		"empty command":       {`{"kind":"exec","exec":{"program":{"command":[]}}}`, `e.exec.program.command: must have from 1 to 256 arguments, has 0`},
		"NUL":                 {`{"kind":"exec","exec":{"program":{"command":["a","b\u0000"]}}}`, `e.exec.program.command[1]: must be valid UTF-8 without the character U+0000`},
		"memory":              {`{"kind":"exec","exec":{"program":{"command":["a"],"limits":{"memory_bytes":4096}}}}`, `e.exec.program.limits.memory_bytes: must be from 16777216 to 281474976710656, is 4096`},
		"variable":            {`{"kind":"exec","exec":{"program":{"command":["a"],"env":{"A=B":"c"}}}}`, `e.exec.program.env."A=B": is no name of a variable`},
		"file outside":        {`{"kind":"exec","exec":{"program":{"command":["a"]},"files":{"../x":""}}}`, `e.exec.files."../x": must be a relative path below the directory`},
		"tool without input":  {`{"kind":"exec","tool_format":"hermes","exec":{"program":{"command":["sh"]},"tool":{"name":"sh"}}}`, `e.exec.tool.argument: is required with input text: it names the argument that the program reads`},
		"observation":         {`{"kind":"http","http":{"url":"http://a"},"observation_bytes":2000000}`, `e.observation_bytes: must be from 0 to 1048576, is 2000000`},
	} {
		t.Run(name, func(t *testing.T) {
			var e Environment
			if err := json.Unmarshal([]byte(c.text), &e); err != nil {
				t.Fatal(err)
			}
			expect(t, e.Validate("e"), c.want)
		})
	}
}

func TestScorerValidate(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"environment":       {`{"kind":"environment"}`, ""},
		"ids":               {`{"kind":"exact_match","token_ids":[1]}`, ""},
		"answers":           {`{"kind":"exact_match","answers":["yes"],"extract":"boxed","ignore_case":true}`, ""},
		"number":            {`{"kind":"numeric_match","target":"1/3","relative_tolerance":0.01}`, ""},
		"http":              {`{"kind":"http","http":{"url":"http://a","batch_samples":8}}`, ""},
		"exec":              {`{"kind":"exec","program":{"command":["score"]}}`, ""},
		"unknown":           {`{"kind":"judge"}`, `s.kind: must be one of environment, exact_match, numeric_match, http, exec, is "judge"`},
		"ids and answers":   {`{"kind":"exact_match","token_ids":[1],"answers":["a"]}`, `s: must have exactly one of token_ids and answers`},
		"negative id":       {`{"kind":"exact_match","token_ids":[1,-2]}`, `s.token_ids[1]: must not be negative, is -2`},
		"target elsewhere":  {`{"kind":"exact_match","answers":["a"],"target":"1"}`, `s.target: belongs to kind numeric_match, kind is exact_match`},
		"no target":         {`{"kind":"numeric_match"}`, `s.target: is required for kind numeric_match`},
		"target no number":  {`{"kind":"numeric_match","target":"about 5"}`, `s.target: must be one number such as 42, 1,000, -2.5e3 or 1/3, is "about 5"`},
		"tolerance":         {`{"kind":"numeric_match","target":"1","relative_tolerance":2}`, `s.relative_tolerance: must be from 0 to 1, is 2`},
		"http without http": {`{"kind":"http"}`, `s.http: is required for kind http`},
	} {
		t.Run(name, func(t *testing.T) {
			var s Scorer
			if err := json.Unmarshal([]byte(c.text), &s); err != nil {
				t.Fatal(err)
			}
			expect(t, s.Validate("s"), c.want)
		})
	}
}

// TestStrictDecoding uses the decoder that reads tasks, which refuses members that
// it does not know.
func TestStrictDecoding(t *testing.T) {
	var e Environment
	text := `{"kind":"exec","exec":{"program":{"command":["a"],"limits":{"wall_seconds":1.5}},"tool":{"name":"t","parameters":{"type":"object"}},"files":{"a":"b"}}}`
	if err := strictjson.Unmarshal([]byte(text), &e, strictjson.RejectUnknownMembers(true)); err != nil {
		t.Fatal(err)
	}
	if e.Exec.Program.Limits.WallSeconds != 1.5 || string(e.Exec.Tool.Parameters) != `{"type":"object"}` || e.Exec.Files["a"] != "b" {
		t.Errorf("got %+v", e.Exec)
	}
	err := strictjson.Unmarshal([]byte(`{"kind":"exec","exec":{"program":{"comand":["a"]}}}`), &e, strictjson.RejectUnknownMembers(true))
	if err == nil || !strings.Contains(err.Error(), "comand") {
		t.Errorf("an unknown member gives %v", err)
	}
	raw, err := json.Marshal(Environment{Kind: Exec, Exec: &ExecProgram{Program: Program{Command: []string{"a"}}}})
	if want := `{"kind":"exec","exec":{"program":{"command":["a"]}}}`; err != nil || string(raw) != want {
		t.Errorf("encoded as %s, %v", raw, err)
	}
}

func expect(t *testing.T, err *FieldError, want string) {
	t.Helper()
	got := ""
	if err != nil {
		got = err.Error()
	}
	if got != want {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestErrorsStayShort(t *testing.T) {
	e := Environment{Kind: Kind(strings.Repeat("x", 10_000))}
	if err := e.Validate(""); err == nil || len(err.Error()) > 200 {
		t.Errorf("an error of %d bytes", len(err.Error()))
	}
}
