package task

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"

	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/toolcall"
)

func pointer[T any](v T) *T { return &v }

// valid is a task that uses every field, so that each case below breaks one.
func valid() Spec {
	return Spec{
		ID:        "task-1",
		Class:     "agent",
		Prompt:    Prompt{Synthetic: &Synthetic{Tokens: 1_000, Seed: 7, SharedTokens: 400, SharedSeed: 9}},
		GroupSize: 4,
		Sampling: Sampling{
			MinTokens: 1, IgnoreEOS: true, Temperature: pointer(0.7), TopP: pointer(1.0),
			Seed: pointer(int64(-5)), StopTokens: []int32{0, 2}, Logprobs: pointer(false),
		},
		Limits: Limits{MaxTurns: 10, MaxContextTokens: 32_768, MaxRunSeconds: 3_600},
		Environment: &Environment{
			Kind:      EnvironmentReplay,
			Turns:     []ReplayTurn{{OutputTokens: 10, GapSeconds: 1.5, AppendTokens: 20}, {OutputTokens: 5}, {OutputTokens: 8}},
			TimeScale: 30,
			Reward:    pointer(1.0),
		},
		Scorer:   &Scorer{Kind: ScorerEnvironment},
		Metadata: json.RawMessage(`{"source":"made up"}`),
	}
}

func TestValidateAcceptsEveryPromptFormAndTheLimitsThemselves(t *testing.T) {
	cases := map[string]func(*Spec){
		"as it stands":             func(*Spec) {},
		"token ids":                func(s *Spec) { s.Prompt = Prompt{TokenIDs: []int32{0, 1, math.MaxInt32}} },
		"text":                     func(s *Spec) { s.Prompt = Prompt{Text: "What is 2 + 2?"} },
		"messages":                 func(s *Spec) { s.Prompt = Prompt{Messages: json.RawMessage(`[{"role":"user","content":"hi"}]`)} },
		"null messages are absent": func(s *Spec) { s.Prompt.Messages = json.RawMessage(`null`) },
		"no environment, with max_tokens": func(s *Spec) {
			s.Environment, s.Scorer, s.Sampling.MaxTokens = nil, nil, MaxOutputTokens
		},
		"exact match":         func(s *Spec) { s.Scorer = &Scorer{Kind: ScorerExactMatch, TokenIDs: []int32{4}} },
		"exact match of text": func(s *Spec) { s.Scorer = &Scorer{Kind: ScorerExactMatch, Answers: []string{"four"}} },
		"numeric match":       func(s *Spec) { s.Scorer = &Scorer{Kind: ScorerNumericMatch, Target: "4"} },
		"scored by a server":  func(s *Spec) { s.Scorer = &Scorer{Kind: ScorerHTTP, HTTP: &spec.HTTPScorer{URL: "http://judge"}} },
		"scored by a program": func(s *Spec) {
			s.Scorer = &Scorer{Kind: ScorerExec, Program: &spec.Program{Command: []string{"judge"}}}
		},
		"no metadata":          func(s *Spec) { s.Metadata = nil },
		"escaped backslash":    func(s *Spec) { s.Metadata = json.RawMessage(`{"path":"C:\\u0000"}`) },
		"largest group":        func(s *Spec) { s.GroupSize = MaxGroupSize },
		"longest gap":          func(s *Spec) { s.Environment.Turns[0].GapSeconds = MaxGapSeconds },
		"longest id":           func(s *Spec) { s.ID = strings.Repeat("x", MaxExternalIDBytes) },
		"all shared":           func(s *Spec) { s.Prompt.Synthetic.SharedTokens = 1_000 },
		"negative reward":      func(s *Spec) { s.Environment.Reward = pointer(-3.5) },
		"greedy":               func(s *Spec) { s.Sampling.Temperature = pointer(0.0) },
		"as many turns as may": func(s *Spec) { s.Environment.Turns = repeatTurn(MaxTurns, ReplayTurn{OutputTokens: 1}) },
	}
	for name, change := range cases {
		t.Run(name, func(t *testing.T) {
			spec := valid()
			change(&spec)
			if err := spec.Validate("tasks[0]"); err != nil {
				t.Fatalf("refused: %v", err)
			}
		})
	}
}

func repeatTurn(n int, turn ReplayTurn) []ReplayTurn {
	turns := make([]ReplayTurn, n)
	for i := range turns {
		turns[i] = turn
	}
	return turns
}

func TestValidateNamesTheFieldTheRangeAndTheValue(t *testing.T) {
	cases := []struct {
		name   string
		change func(*Spec)
		want   string
	}{
		{"id too long", func(s *Spec) { s.ID = strings.Repeat("x", 257) }, "tasks[3].id: must be at most 256 bytes long, is 257"},
		{"id with a line break", func(s *Spec) { s.ID = "a\nb" }, `tasks[3].id: must not contain control characters, is "a\nb"`},
		{"id not UTF-8", func(s *Spec) { s.ID = "\xff" }, `tasks[3].id: must be valid UTF-8, is "\xff"`},
		{"no class", func(s *Spec) { s.Class = "" }, "tasks[3].class: is required"},
		{"class too long", func(s *Spec) { s.Class = strings.Repeat("c", 65) }, "tasks[3].class: must be at most 64 bytes long, is 65"},
		{"negative group", func(s *Spec) { s.GroupSize = -1 }, "tasks[3].group_size: must be from 0 to 1024, is -1"},
		{"absurd group", func(s *Spec) { s.GroupSize = 1_025 }, "tasks[3].group_size: must be from 0 to 1024, is 1025"},

		{"no prompt", func(s *Spec) { s.Prompt = Prompt{} }, "tasks[3].prompt: must have one of token_ids, text, messages or synthetic, has none"},
		{"two prompts", func(s *Spec) { s.Prompt.Text = "x" }, "tasks[3].prompt: must have exactly one of token_ids, text, messages or synthetic, has text and synthetic"},
		{"empty token ids", func(s *Spec) { s.Prompt = Prompt{TokenIDs: []int32{}} }, "tasks[3].prompt.token_ids: must have from 1 to 1048576 token ids, has 0"},
		{"negative token id", func(s *Spec) { s.Prompt = Prompt{TokenIDs: []int32{1, 2, -7}} }, "tasks[3].prompt.token_ids[2]: must not be negative, is -7"},
		{"text with NUL", func(s *Spec) { s.Prompt = Prompt{Text: "a\x00b"} }, "tasks[3].prompt.text: must not contain the character U+0000"},
		{"text too long", func(s *Spec) { s.Prompt = Prompt{Text: strings.Repeat("x", MaxPromptBytes+1)} }, "tasks[3].prompt.text: must be at most 4194304 bytes long, is 4194305"},
		{"messages not an array", func(s *Spec) { s.Prompt = Prompt{Messages: json.RawMessage(`{"role":"user"}`)} }, "tasks[3].prompt.messages: must be an array of messages"},
		{"no messages", func(s *Spec) { s.Prompt = Prompt{Messages: json.RawMessage(`[]`)} }, "tasks[3].prompt.messages: must not be empty"},
		{"message not an object", func(s *Spec) { s.Prompt = Prompt{Messages: json.RawMessage(`[{"role":"user"},"hi"]`)} }, "tasks[3].prompt.messages[1]: must be an object"},
		{"message without role", func(s *Spec) { s.Prompt = Prompt{Messages: json.RawMessage(`[{"content":"hi"}]`)} }, "tasks[3].prompt.messages[0].role: must be a string that is not empty"},
		{"synthetic of no tokens", func(s *Spec) { s.Prompt.Synthetic.Tokens = 0 }, "tasks[3].prompt.synthetic.tokens: must be from 1 to 1048576, is 0"},
		{"more shared than there is", func(s *Spec) { s.Prompt.Synthetic.SharedTokens = 1_001 }, "tasks[3].prompt.synthetic.shared_tokens: must be from 0 to tokens (1000), is 1001"},

		{"max_tokens missing", func(s *Spec) { s.Environment, s.Scorer = nil, nil }, "tasks[3].sampling.max_tokens: is required (from 1 to 1048576) unless a replay environment gives every turn's length"},
		{"negative max_tokens", func(s *Spec) { s.Sampling.MaxTokens = -1 }, "tasks[3].sampling.max_tokens: must be from 0 to 1048576, is -1"},
		{"absurd max_tokens", func(s *Spec) { s.Sampling.MaxTokens = 1 << 40 }, "tasks[3].sampling.max_tokens: must be from 0 to 1048576, is 1099511627776"},
		{"min above max", func(s *Spec) { s.Sampling.MinTokens, s.Sampling.MaxTokens = 9, 8 }, "tasks[3].sampling.min_tokens: must be at most max_tokens (8), is 9"},
		{"temperature NaN", func(s *Spec) { s.Sampling.Temperature = pointer(math.NaN()) }, "tasks[3].sampling.temperature: must be from 0 to 100, is NaN"},
		{"temperature below zero", func(s *Spec) { s.Sampling.Temperature = pointer(-0.1) }, "tasks[3].sampling.temperature: must be from 0 to 100, is -0.1"},
		{"top_p zero", func(s *Spec) { s.Sampling.TopP = pointer(0.0) }, "tasks[3].sampling.top_p: must be above 0 and at most 1, is 0"},
		{"top_p NaN", func(s *Spec) { s.Sampling.TopP = pointer(math.NaN()) }, "tasks[3].sampling.top_p: must be above 0 and at most 1, is NaN"},
		{"negative stop token", func(s *Spec) { s.Sampling.StopTokens = []int32{-1} }, "tasks[3].sampling.stop_token_ids[0]: must not be negative, is -1"},
		{"too many stop tokens", func(s *Spec) { s.Sampling.StopTokens = make([]int32, 257) }, "tasks[3].sampling.stop_token_ids: must have from 0 to 256 token ids, has 257"},

		{"negative turns", func(s *Spec) { s.Limits.MaxTurns = -2 }, "tasks[3].limits.max_turns: must be from 0 to 10000, is -2"},
		{"absurd context", func(s *Spec) { s.Limits.MaxContextTokens = math.MaxInt }, "tasks[3].limits.max_context_tokens: must be from 0 to 2097152, is 9223372036854775807"},
		{"endless run", func(s *Spec) { s.Limits.MaxRunSeconds = math.Inf(1) }, "tasks[3].limits.max_run_seconds: must be from 0 to 2.592e+06, is +Inf"},

		{"unknown environment", func(s *Spec) { s.Environment.Kind = "gym" }, `tasks[3].environment.kind: must be one of replay, external, http, mcp, exec, is "gym"`},
		{"no environment kind", func(s *Spec) { s.Environment.Kind = "" }, `tasks[3].environment.kind: must be one of replay, external, http, mcp, exec, is ""`},
		{"external with turns", func(s *Spec) { s.Environment.Kind = EnvironmentExternal }, "tasks[3].environment.turns: belongs to kind replay, kind is external"},
		{"external with a reward", func(s *Spec) {
			s.Environment = &Environment{Kind: EnvironmentExternal, Reward: pointer(1.0)}
		}, "tasks[3].environment.reward: belongs to kind replay, kind is external"},
		{"idle for too long", func(s *Spec) {
			s.Environment = &Environment{Kind: EnvironmentExternal, IdleSeconds: 86_401}
		}, "tasks[3].environment.idle_seconds: must be from 0 to 86400, is 86401"},
		{"rewrites of another kind", func(s *Spec) { s.Environment.Rewrites = RewritesRefuse }, "tasks[3].environment.rewrites: belongs to kind external, kind is replay"},
		{"rewrites unknown", func(s *Spec) {
			s.Environment = &Environment{Kind: EnvironmentExternal, Rewrites: "keep"}
		}, `tasks[3].environment.rewrites: must be one of sequence, refuse, is "keep"`},
		{"a harness's tool format unknown", func(s *Spec) {
			s.Environment = &Environment{Kind: EnvironmentExternal, ToolFormat: "yaml"}
		}, `tasks[3].environment.tool_format: must be one of openai, hermes, is "yaml"`},
		{"idle in a replay", func(s *Spec) { s.Environment.IdleSeconds = 5 }, "tasks[3].environment.idle_seconds: belongs to kind external, kind is replay"},
		{"a server for a replay", func(s *Spec) { s.Environment.HTTP = &spec.HTTPServer{URL: "http://a/b"} }, "tasks[3].environment.http: belongs to kind http, kind is replay"},
		{"tool format of a replay", func(s *Spec) { s.Environment.ToolFormat = toolcall.Hermes }, "tasks[3].environment.tool_format: belongs to kind http, mcp, exec, external, kind is replay"},
		{"no server", func(s *Spec) { s.Environment = &Environment{Kind: EnvironmentHTTP} }, "tasks[3].environment.http: is required for kind http"},
		{"a server without an address", func(s *Spec) {
			s.Environment = &Environment{Kind: EnvironmentMCP, ToolFormat: toolcall.Hermes, MCP: &spec.MCPServer{}}
		}, "tasks[3].environment.mcp: must have exactly one of program and url"},
		{"no command", func(s *Spec) { s.Environment = &Environment{Kind: EnvironmentExec, Exec: &spec.ExecProgram{}} }, "tasks[3].environment.exec.program.command: must have from 1 to 256 arguments, has 0"},
		{"no output length for a server", func(s *Spec) {
			s.Sampling.MaxTokens, s.Environment = 0, &Environment{Kind: EnvironmentHTTP, HTTP: &spec.HTTPServer{URL: "http://a/b"}}
		}, "tasks[3].sampling.max_tokens: is required (from 1 to 1048576) unless a replay environment gives every turn's length"},
		{"no turns", func(s *Spec) { s.Environment.Turns = nil }, "tasks[3].environment.turns: must have from 1 to 10000 turns, has 0"},
		{"too many turns", func(s *Spec) { s.Environment.Turns = repeatTurn(MaxTurns+1, ReplayTurn{OutputTokens: 1}) }, "tasks[3].environment.turns: must have from 1 to 10000 turns, has 10001"},
		{"turn of no output", func(s *Spec) { s.Environment.Turns[1].OutputTokens = 0 }, "tasks[3].environment.turns[1].output_tokens: must be from 1 to 1048576, is 0"},
		{"negative append", func(s *Spec) { s.Environment.Turns[0].AppendTokens = -4 }, "tasks[3].environment.turns[0].append_tokens: must be from 0 to 1048576, is -4"},
		{"gap too long", func(s *Spec) { s.Environment.Turns[2].GapSeconds = 86_401 }, "tasks[3].environment.turns[2].gap_seconds: must be from 0 to 86400, is 86401"},
		{"gap NaN", func(s *Spec) { s.Environment.Turns[2].GapSeconds = math.NaN() }, "tasks[3].environment.turns[2].gap_seconds: must be from 0 to 86400, is NaN"},
		{"replay longer than any context", func(s *Spec) {
			s.Environment.Turns = repeatTurn(8, ReplayTurn{OutputTokens: MaxOutputTokens})
		}, "tasks[3].environment.turns[3]: brings the context to 4195304 tokens; a replayed session may have at most 4194304"},
		{"time scale zero means one, below does not", func(s *Spec) { s.Environment.TimeScale = -1 }, "tasks[3].environment.time_scale: must be from 0.001 to 1e+06, is -1"},
		{"reward NaN", func(s *Spec) { s.Environment.Reward = pointer(math.NaN()) }, "tasks[3].environment.reward: must be a finite number, is NaN"},

		{"unknown scorer", func(s *Spec) { s.Scorer.Kind = "judge" }, `tasks[3].scorer.kind: must be one of environment, exact_match, numeric_match, http, exec, is "judge"`},
		{"scorer without environment", func(s *Spec) { s.Environment, s.Sampling.MaxTokens = nil, 5 }, "tasks[3].scorer.kind: environment needs a task with an environment"},
		{"scorer without recorded reward", func(s *Spec) { s.Environment.Reward = nil }, "tasks[3].scorer.kind: environment needs environment.reward, which a replay without a recorded reward does not have"},
		{"tokens with the wrong scorer", func(s *Spec) { s.Scorer.TokenIDs = []int32{1} }, "tasks[3].scorer.token_ids: belongs to kind exact_match, kind is environment"},
		{"exact match of nothing", func(s *Spec) { s.Scorer = &Scorer{Kind: ScorerExactMatch} }, "tasks[3].scorer: must have exactly one of token_ids and answers"},
		{"scorer without a server", func(s *Spec) { s.Scorer = &Scorer{Kind: ScorerHTTP, HTTP: &spec.HTTPScorer{URL: "judge:80"}} }, `tasks[3].scorer.http.url: must be an absolute http or https URL, is "judge:80"`},
		{"scorer without a program", func(s *Spec) { s.Scorer = &Scorer{Kind: ScorerExec} }, "tasks[3].scorer.program: is required for kind exec"},
		{"target that is no number", func(s *Spec) { s.Scorer = &Scorer{Kind: ScorerNumericMatch, Target: "four"} }, `tasks[3].scorer.target: must be one number such as 42, 1,000, -2.5e3 or 1/3, is "four"`},

		{"metadata not an object", func(s *Spec) { s.Metadata = json.RawMessage(`[1]`) }, "tasks[3].metadata: must be a JSON object"},
		{"metadata broken", func(s *Spec) { s.Metadata = json.RawMessage(`{"a":`) }, "tasks[3].metadata: must be a JSON object"},
		{"metadata too large", func(s *Spec) {
			s.Metadata = json.RawMessage(`{"a":"` + strings.Repeat("x", MaxMetadataBytes) + `"}`)
		}, "tasks[3].metadata: must be at most 65536 bytes long, is 65544"},
		{"metadata with NUL", func(s *Spec) { s.Metadata = json.RawMessage(`{"a":"\\\u0000"}`) }, "tasks[3].metadata: must not contain the character U+0000"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			spec := valid()
			c.change(&spec)
			err := spec.Validate("tasks[3]")
			var fieldError *FieldError
			if !errors.As(err, &fieldError) {
				t.Fatalf("got %v, want a FieldError", err)
			}
			if err.Error() != c.want {
				t.Errorf("got  %s\nwant %s", err, c.want)
			}
		})
	}
}

func TestValidateWithoutAPath(t *testing.T) {
	spec := valid()
	spec.Environment.Turns[1].OutputTokens = -1
	want := "environment.turns[1].output_tokens: must be from 1 to 1048576, is -1"
	if err := spec.Validate(""); err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

// A batch may carry millions of turns; checking them must not cost an
// allocation each.
func TestValidateDoesNotAllocatePerTurn(t *testing.T) {
	spec := valid()
	spec.Environment.Turns = repeatTurn(5_000, ReplayTurn{OutputTokens: 1})
	if n := testing.AllocsPerRun(10, func() { _ = spec.Validate("tasks[0]") }); n > 100 {
		t.Errorf("%v allocations for 5,000 turns", n)
	}
}
