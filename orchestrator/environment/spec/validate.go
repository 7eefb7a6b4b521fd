package spec

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"holdfast/orchestrator/scoring/number"
	"holdfast/orchestrator/toolcall"
)

// FieldError says which field is wrong and why: the allowed range and the value
// given. Path is the JSON path below the path that Validate was given.
type FieldError struct {
	Path    string
	Problem string
}

func (e *FieldError) Error() string {
	if e.Path == "" {
		return e.Problem
	}
	return e.Path + ": " + e.Problem
}

// Validate checks everything that an environment tells about itself and returns
// the first thing wrong, or nil. path is the JSON path of the environment, such
// as "tasks[3].environment"; it may be empty.
func (e *Environment) Validate(path string) *FieldError {
	given := map[Kind]bool{HTTP: e.HTTP != nil, MCP: e.MCP != nil, Exec: e.Exec != nil}
	kinds := []Kind{HTTP, MCP, Exec}
	if !slices.Contains(kinds, e.Kind) {
		return wrong(join(path, "kind"), "must be one of %s, is %s", list(kinds), quoted(string(e.Kind)))
	}
	for _, kind := range kinds {
		if given[kind] && kind != e.Kind {
			return wrong(join(path, string(kind)), "belongs to kind %s, kind is %s", kind, e.Kind)
		}
	}
	if !given[e.Kind] {
		return wrong(join(path, string(e.Kind)), "is required for kind %s", e.Kind)
	}
	if e.ToolFormat != "" && !slices.Contains(toolcall.Formats(), e.ToolFormat) {
		return wrong(join(path, "tool_format"), "must be one of %s, is %s", list(toolcall.Formats()), quoted(string(e.ToolFormat)))
	}
	if err := inRange(join(path, "observation_bytes"), e.ObservationBytes, 0, MaxObservationBytes); err != nil {
		return err
	}
	switch e.Kind {
	case HTTP:
		return e.HTTP.validate(join(path, string(HTTP)))
	case MCP:
		if e.ToolFormat == "" {
			return wrong(join(path, "tool_format"), "is required for kind %s, one of %s", MCP, list(toolcall.Formats()))
		}
		return e.MCP.validate(join(path, string(MCP)))
	}
	if e.Exec.Tool != nil && e.ToolFormat == "" {
		return wrong(join(path, "tool_format"), "is required for a program that is a tool, one of %s", list(toolcall.Formats()))
	}
	return e.Exec.validate(join(path, string(Exec)))
}

func (h *HTTPServer) validate(path string) *FieldError {
	return first(
		checkURL(join(path, "url"), h.URL),
		inRange(join(path, "timeout_seconds"), h.TimeoutSeconds, 0, MaxSeconds),
		checkName(join(path, "credential"), h.Credential, false),
		checkObject(join(path, "task"), h.Task, MaxTaskBytes),
	)
}

func (m *MCPServer) validate(path string) *FieldError {
	if (m.Program == nil) == (m.URL == "") {
		return wrong(path, "must have exactly one of program and url")
	}
	if len(m.Tools) > MaxArguments {
		return wrong(join(path, "tools"), "must have at most %d names, has %d", MaxArguments, len(m.Tools))
	}
	for i, name := range m.Tools {
		if err := checkName(at(join(path, "tools"), i), name, true); err != nil {
			return err
		}
	}
	if err := first(
		inRange(join(path, "timeout_seconds"), m.TimeoutSeconds, 0, MaxSeconds),
		checkName(join(path, "credential"), m.Credential, false),
	); err != nil {
		return err
	}
	if m.Program != nil {
		if m.Credential != "" {
			return wrong(join(path, "credential"), "belongs to a server with a url")
		}
		return m.Program.validate(join(path, "program"))
	}
	return checkURL(join(path, "url"), m.URL)
}

func (x *ExecProgram) validate(path string) *FieldError {
	inputs, outputs := []Input{InputText, InputJSON}, []Output{OutputText, OutputJSON}
	if x.Input != "" && !slices.Contains(inputs, x.Input) {
		return wrong(join(path, "input"), "must be one of %s, is %s", list(inputs), quoted(string(x.Input)))
	}
	if x.Output != "" && !slices.Contains(outputs, x.Output) {
		return wrong(join(path, "output"), "must be one of %s, is %s", list(outputs), quoted(string(x.Output)))
	}
	if x.Tool != nil {
		if err := x.validateTool(join(path, "tool")); err != nil {
			return err
		}
	}
	if err := checkFiles(join(path, "files"), x.Files); err != nil {
		return err
	}
	return x.Program.validate(join(path, "program"))
}

func (x *ExecProgram) validateTool(path string) *FieldError {
	if x.Output == OutputJSON {
		return wrong(path, "needs output %s: a call's result is text", OutputText)
	}
	if x.Input != InputJSON && x.Tool.Argument == "" {
		return wrong(join(path, "argument"), "is required with input %s: it names the argument that the program reads", InputText)
	}
	if x.Input == InputJSON && x.Tool.Argument != "" {
		return wrong(join(path, "argument"), "belongs to input %s", InputText)
	}
	return first(
		checkName(join(path, "name"), x.Tool.Name, true),
		checkName(join(path, "argument"), x.Tool.Argument, false),
		checkText(join(path, "description"), x.Tool.Description, MaxTaskBytes),
		checkObject(join(path, "parameters"), x.Tool.Parameters, MaxTaskBytes),
	)
}

// checkFiles goes through the names in order, so that equal specs give equal
// errors.
func checkFiles(path string, files map[string]string) *FieldError {
	if len(files) > MaxFiles {
		return wrong(path, "must have at most %d files, has %d", MaxFiles, len(files))
	}
	total := 0
	for _, name := range sortedKeys(files) {
		here := join(path, strconv.Quote(name))
		if !filepath.IsLocal(name) || name == "." || strings.ContainsFunc(name, unicode.IsControl) || len(name) > MaxURLBytes {
			return wrong(here, "must be a relative path below the directory")
		}
		if err := checkText(here, files[name], MaxFilesBytes); err != nil {
			return err
		}
		if total += len(files[name]); total > MaxFilesBytes {
			return wrong(here, "brings the files to %d bytes; they may have %d together", total, MaxFilesBytes)
		}
	}
	return nil
}

func (p *Program) validate(path string) *FieldError {
	command := join(path, "command")
	if len(p.Command) < 1 || len(p.Command) > MaxArguments {
		return wrong(command, "must have from 1 to %d arguments, has %d", MaxArguments, len(p.Command))
	}
	for i, argument := range p.Command {
		if err := checkText(at(command, i), argument, MaxArgumentBytes); err != nil {
			return err
		}
	}
	if p.Command[0] == "" {
		return wrong(at(command, 0), "must not be empty")
	}
	if len(p.Env) > MaxVariables {
		return wrong(join(path, "env"), "must have at most %d variables, has %d", MaxVariables, len(p.Env))
	}
	for _, name := range sortedKeys(p.Env) {
		here := join(join(path, "env"), strconv.Quote(name))
		if name == "" || len(name) > MaxNameBytes || strings.ContainsAny(name, "=\x00") {
			return wrong(here, "is no name of a variable")
		}
		if err := checkText(here, p.Env[name], MaxArgumentBytes); err != nil {
			return err
		}
	}
	return p.Limits.validate(join(path, "limits"))
}

func (l *Limits) validate(path string) *FieldError {
	// Below MinMemoryBytes not even a shell starts.
	if l.MemoryBytes != 0 {
		if err := inRange(join(path, "memory_bytes"), l.MemoryBytes, MinMemoryBytes, MaxMemoryBytes); err != nil {
			return err
		}
	}
	return first(
		inRange(join(path, "wall_seconds"), l.WallSeconds, 0, MaxSeconds),
		inRange(join(path, "cpu_seconds"), l.CPUSeconds, 0, int(MaxSeconds)),
		inRange(join(path, "processes"), l.Processes, 0, MaxProcesses),
		inRange(join(path, "file_bytes"), l.FileBytes, 0, MaxFileBytes),
		inRange(join(path, "output_bytes"), l.OutputBytes, 0, MaxOutputBytes),
	)
}

// Validate checks everything that a scorer tells about itself and returns the
// first thing wrong, or nil. Whether the task has an environment is checked
// by whoever knows.
func (s *Scorer) Validate(path string) *FieldError {
	kinds := []ScorerKind{ScorerEnvironment, ScorerExactMatch, ScorerNumericMatch, ScorerHTTP, ScorerExec}
	if !slices.Contains(kinds, s.Kind) {
		return wrong(join(path, "kind"), "must be one of %s, is %s", list(kinds), quoted(string(s.Kind)))
	}
	for _, member := range []struct {
		name  string
		given bool
		kind  ScorerKind
	}{
		{"token_ids", s.TokenIDs != nil, ScorerExactMatch},
		{"answers", s.Answers != nil, ScorerExactMatch},
		{"extract", s.Extract != "", ScorerExactMatch},
		{"ignore_case", s.IgnoreCase, ScorerExactMatch},
		{"target", s.Target != "", ScorerNumericMatch},
		{"absolute_tolerance", s.AbsoluteTolerance != 0, ScorerNumericMatch},
		{"relative_tolerance", s.RelativeTolerance != 0, ScorerNumericMatch},
		{"http", s.HTTP != nil, ScorerHTTP},
		{"program", s.Program != nil, ScorerExec},
	} {
		if member.given && member.kind != s.Kind {
			return wrong(join(path, member.name), "belongs to kind %s, kind is %s", member.kind, s.Kind)
		}
	}
	switch s.Kind {
	case ScorerExactMatch:
		return s.validateExact(path)
	case ScorerNumericMatch:
		return s.validateNumeric(path)
	case ScorerHTTP:
		if s.HTTP == nil {
			return wrong(join(path, "http"), "is required for kind %s", s.Kind)
		}
		return s.HTTP.validate(join(path, "http"))
	case ScorerExec:
		if s.Program == nil {
			return wrong(join(path, "program"), "is required for kind %s", s.Kind)
		}
		return s.Program.validate(join(path, "program"))
	}
	return nil
}

func (s *Scorer) validateExact(path string) *FieldError {
	if (s.TokenIDs == nil) == (s.Answers == nil) {
		return wrong(path, "must have exactly one of token_ids and answers")
	}
	if s.TokenIDs != nil {
		if len(s.TokenIDs) < 1 || len(s.TokenIDs) > MaxScorerTokens {
			return wrong(join(path, "token_ids"), "must have from 1 to %d token ids, has %d", MaxScorerTokens, len(s.TokenIDs))
		}
		for i, id := range s.TokenIDs {
			if id < 0 {
				return wrong(at(join(path, "token_ids"), i), "must not be negative, is %d", id)
			}
		}
		if s.Extract != "" || s.IgnoreCase {
			return wrong(path, "extract and ignore_case belong to answers, not to token_ids")
		}
		return nil
	}
	extracts := []Extract{ExtractText, ExtractLastLine, ExtractBoxed}
	if s.Extract != "" && !slices.Contains(extracts, s.Extract) {
		return wrong(join(path, "extract"), "must be one of %s, is %s", list(extracts), quoted(string(s.Extract)))
	}
	if len(s.Answers) < 1 || len(s.Answers) > MaxAnswers {
		return wrong(join(path, "answers"), "must have from 1 to %d answers, has %d", MaxAnswers, len(s.Answers))
	}
	for i, answer := range s.Answers {
		if err := checkText(at(join(path, "answers"), i), answer, MaxAnswerBytes); err != nil {
			return err
		}
	}
	return nil
}

func (s *Scorer) validateNumeric(path string) *FieldError {
	if s.Target == "" {
		return wrong(join(path, "target"), "is required for kind %s", s.Kind)
	}
	if _, ok := number.Parse(s.Target); !ok {
		return wrong(join(path, "target"), "must be one number such as 42, 1,000, -2.5e3 or 1/3, is %s", quoted(s.Target))
	}
	return first(
		inRange(join(path, "absolute_tolerance"), s.AbsoluteTolerance, 0, 1e300),
		inRange(join(path, "relative_tolerance"), s.RelativeTolerance, 0, 1),
	)
}

func (h *HTTPScorer) validate(path string) *FieldError {
	return first(
		checkURL(join(path, "url"), h.URL),
		inRange(join(path, "timeout_seconds"), h.TimeoutSeconds, 0, MaxSeconds),
		checkName(join(path, "credential"), h.Credential, false),
		inRange(join(path, "batch_samples"), h.BatchSamples, 0, MaxBatchSamples),
		checkObject(join(path, "task"), h.Task, MaxTaskBytes),
	)
}

func checkURL(path, text string) *FieldError {
	if len(text) > MaxURLBytes {
		return wrong(path, "must be at most %d bytes long, is %d", MaxURLBytes, len(text))
	}
	parsed, err := url.Parse(text)
	switch {
	case text == "":
		return wrong(path, "is required")
	case err != nil || (parsed.Scheme != "http" && parsed.Scheme != "https") || parsed.Host == "":
		return wrong(path, "must be an absolute http or https URL, is %s", quoted(text))
	case parsed.User != nil:
		return wrong(path, "must not hold a user or password: name a credential instead")
	case parsed.Fragment != "" || parsed.RawQuery != "":
		return wrong(path, "must have neither query nor fragment, is %s", quoted(text))
	}
	return nil
}

func checkName(path, name string, required bool) *FieldError {
	switch {
	case name == "" && required:
		return wrong(path, "is required")
	case len(name) > MaxNameBytes:
		return wrong(path, "must be at most %d bytes long, is %d", MaxNameBytes, len(name))
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl):
		return wrong(path, "must be text without control characters, is %s", quoted(name))
	}
	return nil
}

func checkText(path, text string, maxBytes int) *FieldError {
	switch {
	case len(text) > maxBytes:
		return wrong(path, "must be at most %d bytes long, is %d", maxBytes, len(text))
	case !utf8.ValidString(text) || strings.ContainsRune(text, 0):
		return wrong(path, "must be valid UTF-8 without the character U+0000")
	}
	return nil
}

func checkObject(path string, raw json.RawMessage, maxBytes int) *FieldError {
	trimmed := bytes.TrimSpace(raw)
	switch {
	case len(trimmed) == 0:
		return nil
	case len(raw) > maxBytes:
		return wrong(path, "must be at most %d bytes long, is %d", maxBytes, len(raw))
	case trimmed[0] != '{' || !json.Valid(trimmed):
		return wrong(path, "must be a JSON object")
	case holdsNUL(raw):
		return wrong(path, "must not contain the character U+0000")
	}
	return nil
}

// holdsNUL looks for the one character that JSON can carry and Postgres cannot
// store. Valid JSON holds it only as an escape, whose backslash is not itself
// escaped.
func holdsNUL(raw []byte) bool {
	for i := 0; i < len(raw); i++ {
		if raw[i] != '\\' {
			continue
		}
		if bytes.HasPrefix(raw[i:], []byte(`\u0000`)) {
			return true
		}
		i++ // whatever is escaped
	}
	return false
}

// inRange is written so that NaN fails it.
func inRange[N int | int64 | float64](path string, value, least, most N) *FieldError {
	if !(value >= least && value <= most) {
		return wrong(path, "must be from %v to %v, is %v", least, most, value)
	}
	return nil
}

func first(errs ...*FieldError) *FieldError {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func wrong(path, format string, args ...any) *FieldError {
	return &FieldError{Path: path, Problem: fmt.Sprintf(format, args...)}
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func at(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }

// quoted repeats a bad value, shortened so that it does not flood a log.
func quoted(s string) string {
	const maxBytes = 40
	if len(s) <= maxBytes {
		return strconv.Quote(s)
	}
	return strconv.Quote(strings.ToValidUTF8(s[:maxBytes], "")) + "..."
}

func list[K ~string](names []K) string {
	texts := make([]string, len(names))
	for i, name := range names {
		texts[i] = string(name)
	}
	return strings.Join(texts, ", ")
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}
