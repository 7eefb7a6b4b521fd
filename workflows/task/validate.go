package task

import (
	"bytes"
	"encoding/json"
	"math"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"holdfast/orchestrator/toolcall"
)

// More limits of one task, beside those of Spec.
const (
	// MaxClassBytes bounds the name of a class.
	MaxClassBytes = 64
	// MaxPromptBytes bounds a prompt given as text or messages: four bytes for
	// each of MaxPromptTokens.
	MaxPromptBytes = 4 * MaxPromptTokens
	// MaxReplayTokens bounds prompt, outputs and appended tokens of one replayed
	// session together, since all of them end up in one context.
	MaxReplayTokens = 4 << 20
	// MaxStopTokens bounds a list that every turn carries.
	MaxStopTokens = 256
	// MaxTemperature is far above any temperature that is used; what lies
	// beyond is a mistake in units.
	MaxTemperature = 100.0
	// MinTimeScale and MaxTimeScale bound how far a replay stretches or
	// shortens its gaps.
	MinTimeScale = 1e-3
	MaxTimeScale = 1e6
)

// Validate checks everything that a task tells about itself and returns the
// first thing wrong as a *FieldError, or nil. path is the JSON path of the task
// itself, such as "tasks[3]"; it may be empty. Whether the class is declared
// and whether the prompt fits the engine is checked by whoever knows.
func (s *Spec) Validate(path string) error {
	for _, check := range []func(string) *FieldError{
		s.checkNames, s.checkPrompt, s.checkEnvironment, s.checkSampling,
		s.checkLimits, s.checkScorer, s.checkMetadata,
	} {
		if err := check(path); err != nil {
			return err
		}
	}
	return nil
}

func (s *Spec) checkNames(path string) *FieldError {
	if err := checkName(field(path, "id"), s.ID, MaxExternalIDBytes); err != nil {
		return err
	}
	if s.Class == "" {
		return wrong(field(path, "class"), "is required")
	}
	if err := checkName(field(path, "class"), s.Class, MaxClassBytes); err != nil {
		return err
	}
	if err := checkInt(field(path, "group_size"), s.GroupSize, 0, MaxGroupSize); err != nil {
		return err
	}
	return checkFloat(field(path, "deadline_seconds"), s.DeadlineSeconds, 0, MaxDeadlineSeconds)
}

// checkName bounds a name that appears in logs, URLs and SQL text columns.
func checkName(path, name string, maxBytes int) *FieldError {
	switch {
	case len(name) > maxBytes:
		return wrong(path, "must be at most %d bytes long, is %d", maxBytes, len(name))
	case !utf8.ValidString(name):
		return wrong(path, "must be valid UTF-8, is %s", quoted(name))
	case strings.ContainsFunc(name, unicode.IsControl):
		return wrong(path, "must not contain control characters, is %s", quoted(name))
	}
	return nil
}

func (s *Spec) checkPrompt(path string) *FieldError {
	path = field(path, "prompt")
	p := &s.Prompt
	var given []string
	if p.TokenIDs != nil {
		given = append(given, "token_ids")
	}
	if p.Text != "" {
		given = append(given, "text")
	}
	if !absent(p.Messages) {
		given = append(given, "messages")
	}
	if p.Synthetic != nil {
		given = append(given, "synthetic")
	}
	switch {
	case len(given) == 0:
		return wrong(path, "must have one of token_ids, text, messages or synthetic, has none")
	case len(given) > 1:
		return wrong(path, "must have exactly one of token_ids, text, messages or synthetic, has %s", strings.Join(given, " and "))
	}
	switch {
	case p.TokenIDs != nil:
		return checkTokens(field(path, "token_ids"), p.TokenIDs, 1, MaxPromptTokens)
	case p.Text != "":
		return checkText(field(path, "text"), p.Text)
	case p.Synthetic != nil:
		return p.Synthetic.check(field(path, "synthetic"))
	}
	return checkMessages(field(path, "messages"), p.Messages)
}

func checkText(path, text string) *FieldError {
	switch {
	case len(text) > MaxPromptBytes:
		return wrong(path, "must be at most %d bytes long, is %d", MaxPromptBytes, len(text))
	case !utf8.ValidString(text):
		return wrong(path, "must be valid UTF-8")
	case strings.ContainsRune(text, 0):
		return wrong(path, "must not contain the character U+0000")
	}
	return nil
}

// checkMessages checks the shape that every chat template relies on and leaves
// the rest to the engine.
func checkMessages(path string, raw json.RawMessage) *FieldError {
	if len(raw) > MaxPromptBytes {
		return wrong(path, "must be at most %d bytes long, is %d", MaxPromptBytes, len(raw))
	}
	var messages []json.RawMessage
	if err := json.Unmarshal(raw, &messages); err != nil {
		return wrong(path, "must be an array of messages")
	}
	if len(messages) == 0 {
		return wrong(path, "must not be empty")
	}
	for i, m := range messages {
		var message struct {
			Role string `json:"role"`
		}
		if !isObject(m) {
			return wrong(index(path, i), "must be an object")
		}
		if err := json.Unmarshal(m, &message); err != nil || message.Role == "" {
			return wrong(field(index(path, i), "role"), "must be a string that is not empty")
		}
	}
	return checkNoNUL(path, raw)
}

func (y *Synthetic) check(path string) *FieldError {
	if err := checkInt(field(path, "tokens"), y.Tokens, 1, MaxPromptTokens); err != nil {
		return err
	}
	if y.SharedTokens < 0 || y.SharedTokens > y.Tokens {
		return wrong(field(path, "shared_tokens"), "must be from 0 to tokens (%d), is %d", y.Tokens, y.SharedTokens)
	}
	return nil
}

func (s *Spec) checkSampling(path string) *FieldError {
	path = field(path, "sampling")
	m := &s.Sampling
	if err := checkInt(field(path, "max_tokens"), m.MaxTokens, 0, MaxOutputTokens); err != nil {
		return err
	}
	replayed := s.Environment != nil && s.Environment.Kind == EnvironmentReplay
	if m.MaxTokens == 0 && !replayed {
		return wrong(field(path, "max_tokens"), "is required (from 1 to %d) unless a replay environment gives every turn's length", MaxOutputTokens)
	}
	if err := checkInt(field(path, "min_tokens"), m.MinTokens, 0, MaxOutputTokens); err != nil {
		return err
	}
	if m.MaxTokens > 0 && m.MinTokens > m.MaxTokens {
		return wrong(field(path, "min_tokens"), "must be at most max_tokens (%d), is %d", m.MaxTokens, m.MinTokens)
	}
	if m.Temperature != nil {
		if err := checkFloat(field(path, "temperature"), *m.Temperature, 0, MaxTemperature); err != nil {
			return err
		}
	}
	if m.TopP != nil && !(*m.TopP > 0 && *m.TopP <= 1) {
		return wrong(field(path, "top_p"), "must be above 0 and at most 1, is %v", *m.TopP)
	}
	return checkTokens(field(path, "stop_token_ids"), m.StopTokens, 0, MaxStopTokens)
}

func (s *Spec) checkLimits(path string) *FieldError {
	path = field(path, "limits")
	if err := checkInt(field(path, "max_turns"), s.Limits.MaxTurns, 0, MaxTurns); err != nil {
		return err
	}
	if err := checkInt(field(path, "max_context_tokens"), s.Limits.MaxContextTokens, 0, MaxPromptTokens+MaxOutputTokens); err != nil {
		return err
	}
	return checkFloat(field(path, "max_run_seconds"), s.Limits.MaxRunSeconds, 0, MaxRunSeconds)
}

func (s *Spec) checkEnvironment(path string) *FieldError {
	if s.Environment == nil {
		return nil
	}
	path = field(path, "environment")
	e := s.Environment
	if !slices.Contains(environmentKinds, e.Kind) {
		return wrong(field(path, "kind"), "must be one of %s, is %s", oneOf(environmentKinds), quoted(string(e.Kind)))
	}
	if err := e.checkMembers(path); err != nil {
		return err
	}
	if stepped := e.stepped(); stepped != nil {
		if err := stepped.Validate(path); err != nil {
			return wrong(err.Path, "%s", err.Problem)
		}
		return nil
	}
	if e.Kind == EnvironmentExternal {
		return e.checkExternal(path)
	}
	if e.TimeScale != 0 {
		if err := checkFloat(field(path, "time_scale"), e.TimeScale, MinTimeScale, MaxTimeScale); err != nil {
			return err
		}
	}
	if e.Reward != nil {
		if err := checkFinite(field(path, "reward"), *e.Reward); err != nil {
			return err
		}
	}
	return s.checkReplayTurns(field(path, "turns"))
}

func (e *Environment) checkExternal(path string) *FieldError {
	rewrites := []Rewrites{RewritesSequence, RewritesRefuse}
	if e.Rewrites != "" && !slices.Contains(rewrites, e.Rewrites) {
		return wrong(field(path, "rewrites"), "must be one of %s, is %s", oneOf(rewrites), quoted(string(e.Rewrites)))
	}
	if e.ToolFormat != "" && !slices.Contains(toolcall.Formats(), e.ToolFormat) {
		return wrong(field(path, "tool_format"), "must be one of %s, is %s", oneOf(toolcall.Formats()), quoted(string(e.ToolFormat)))
	}
	return checkFloat(field(path, "idle_seconds"), e.IdleSeconds, 0, MaxGapSeconds)
}

// checkMembers refuses members that belong to another kind.
func (e *Environment) checkMembers(path string) *FieldError {
	stepped := []EnvironmentKind{EnvironmentHTTP, EnvironmentMCP, EnvironmentExec}
	replay, external := []EnvironmentKind{EnvironmentReplay}, []EnvironmentKind{EnvironmentExternal}
	for _, member := range []struct {
		name  string
		given bool
		kinds []EnvironmentKind
	}{
		{"turns", e.Turns != nil, replay},
		{"time_scale", e.TimeScale != 0, replay},
		{"reward", e.Reward != nil, replay},
		{"idle_seconds", e.IdleSeconds != 0, external},
		{"rewrites", e.Rewrites != "", external},
		{"http", e.HTTP != nil, stepped[:1]},
		{"mcp", e.MCP != nil, stepped[1:2]},
		{"exec", e.Exec != nil, stepped[2:]},
		{"tool_format", e.ToolFormat != "", append(stepped, external...)},
		{"observation_bytes", e.ObservationBytes != 0, stepped},
	} {
		if member.given && !slices.Contains(member.kinds, e.Kind) {
			return wrong(field(path, member.name), "belongs to kind %s, kind is %s", oneOf(member.kinds), e.Kind)
		}
	}
	return nil
}

func (s *Spec) checkReplayTurns(path string) *FieldError {
	turns := s.Environment.Turns
	if len(turns) < 1 || len(turns) > MaxTurns {
		return wrong(path, "must have from 1 to %d turns, has %d", MaxTurns, len(turns))
	}
	total := len(s.Prompt.TokenIDs)
	if s.Prompt.Synthetic != nil {
		total = s.Prompt.Synthetic.Tokens
	}
	for i, turn := range turns {
		// A batch may hold millions of turns, so paths are put together only for
		// the one that is wrong.
		if err := turn.check(); err != nil {
			err.Path = field(index(path, i), err.Path)
			return err
		}
		if total += turn.OutputTokens + turn.AppendTokens; total > MaxReplayTokens {
			return wrong(index(path, i), "brings the context to %d tokens; a replayed session may have at most %d", total, MaxReplayTokens)
		}
	}
	return nil
}

// check names the member that is wrong, without the turn's own path.
func (t ReplayTurn) check() *FieldError {
	if err := checkInt("output_tokens", t.OutputTokens, 1, MaxOutputTokens); err != nil {
		return err
	}
	if err := checkInt("append_tokens", t.AppendTokens, 0, MaxReplayAppendTokens); err != nil {
		return err
	}
	return checkFloat("gap_seconds", t.GapSeconds, 0, MaxGapSeconds)
}

func (s *Spec) checkScorer(path string) *FieldError {
	if s.Scorer == nil {
		return nil
	}
	path = field(path, "scorer")
	if err := s.Scorer.Validate(path); err != nil {
		return wrong(err.Path, "%s", err.Problem)
	}
	if s.Scorer.Kind != ScorerEnvironment {
		return nil
	}
	if s.Environment == nil {
		return wrong(field(path, "kind"), "%s needs a task with an environment", ScorerEnvironment)
	}
	if s.Environment.Kind == EnvironmentReplay && s.Environment.Reward == nil {
		return wrong(field(path, "kind"), "%s needs environment.reward, which a replay without a recorded reward does not have", ScorerEnvironment)
	}
	return nil
}

func (s *Spec) checkMetadata(path string) *FieldError {
	path = field(path, "metadata")
	if absent(s.Metadata) {
		return nil
	}
	if len(s.Metadata) > MaxMetadataBytes {
		return wrong(path, "must be at most %d bytes long, is %d", MaxMetadataBytes, len(s.Metadata))
	}
	if !isObject(s.Metadata) || !json.Valid(s.Metadata) {
		return wrong(path, "must be a JSON object")
	}
	return checkNoNUL(path, s.Metadata)
}

// checkNoNUL refuses the one character that JSON can carry and Postgres cannot
// store. It looks for the escape only, since raw JSON strings cannot hold it;
// an escaped backslash before "u0000" is not that escape.
func checkNoNUL(path string, raw []byte) *FieldError {
	for rest := raw; ; {
		at := bytes.Index(rest, []byte(`\u0000`))
		if at < 0 {
			return nil
		}
		backslashes := 1
		for at-backslashes >= 0 && rest[at-backslashes] == '\\' {
			backslashes++
		}
		if backslashes%2 == 1 {
			return wrong(path, "must not contain the character U+0000")
		}
		rest = rest[at+len(`\u0000`):]
	}
}

func checkTokens(path string, ids []int32, least, most int) *FieldError {
	if len(ids) < least || len(ids) > most {
		return wrong(path, "must have from %d to %d token ids, has %d", least, most, len(ids))
	}
	for i, id := range ids {
		if id < 0 {
			return wrong(index(path, i), "must not be negative, is %d", id)
		}
	}
	return nil
}

func checkInt(path string, value, least, most int) *FieldError {
	if value < least || value > most {
		return wrong(path, "must be from %d to %d, is %d", least, most, value)
	}
	return nil
}

// checkFloat is written so that NaN fails it.
func checkFloat(path string, value, least, most float64) *FieldError {
	if !(value >= least && value <= most) {
		return wrong(path, "must be from %v to %v, is %v", least, most, value)
	}
	return nil
}

func checkFinite(path string, value float64) *FieldError {
	if math.IsNaN(value) || math.IsInf(value, 0) {
		return wrong(path, "must be a finite number, is %v", value)
	}
	return nil
}

// absent tells a JSON value that is not there, or is null, from one that is.
func absent(raw json.RawMessage) bool {
	trimmed := bytes.TrimSpace(raw)
	return len(trimmed) == 0 || bytes.Equal(trimmed, []byte("null"))
}

func isObject(raw json.RawMessage) bool {
	return bytes.HasPrefix(bytes.TrimSpace(raw), []byte("{"))
}
