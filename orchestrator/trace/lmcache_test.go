package trace

import (
	"strings"
	"testing"
)

// call is one row of an LMCache trace as it is published.
type call struct {
	Timestamp int64  `json:"timestamp"`
	Input     string `json:"input"`
	Output    string `json:"output"`
	SessionID string `json:"session_id"`
}

const (
	issueText  = "Please mend the roof of the shed, it lets in the rain."
	listAnswer = "I will look for a ladder first."
	listResult = "\n\nThe ladder stands behind the house."
	climbWords = "Now I climb up."
	climbTold  = "\n\nThere are three broken tiles."
)

// Rows are out of order and two sessions are mixed; every next input extends
// the one before by what the tool said, as mini-SWE-agent's do.
func TestLMCacheSortsAndSeparatesSessions(t *testing.T) {
	sessions := mustRead(t, FormatLMCache, jsonLines(t,
		call{3_500_000, issueText + listResult, climbWords, "a"},
		call{2_000_000, "Paint the fence.", "Which colour?", "b"},
		call{5_000_000, issueText + listResult + climbTold, "Done.", "a"},
		call{1_000_000, issueText, listAnswer, "a"},
	))
	if len(sessions) != 2 || sessions[0].ID != "a" || sessions[1].ID != "b" {
		t.Fatalf("got %+v", sessions)
	}
	a, b := sessions[0], sessions[1]
	if a.PromptTokens != tokensOf(t, issueText) || a.StartSeconds != 0 || b.StartSeconds != 1 {
		t.Errorf("prompt %d, starts %v and %v", a.PromptTokens, a.StartSeconds, b.StartSeconds)
	}
	want := []Turn{
		{tokensOf(t, listAnswer), tokensOf(t, listResult), UnknownSeconds, 2.5},
		{tokensOf(t, climbWords), tokensOf(t, climbTold), UnknownSeconds, 1.5},
		{tokensOf(t, "Done."), 0, 0, UnknownSeconds},
	}
	checkTurns(t, a.Turns, want)
	checkTurns(t, b.Turns, []Turn{{tokensOf(t, "Which colour?"), 0, 0, UnknownSeconds}})
}

func checkTurns(t *testing.T, got, want []Turn) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("got %d turns %+v, want %d", len(got), got, len(want))
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("turn %d: got %+v, want %+v", i, got[i], want[i])
		}
	}
}

// Where the answer is repeated in the next input it must not be counted twice.
func TestLMCacheTakesARepeatedAnswerOffTheAppendedText(t *testing.T) {
	sessions := mustRead(t, FormatLMCache, jsonLines(t,
		call{1, issueText, listAnswer, "a"},
		call{2, issueText + "\n" + listAnswer + listResult, climbWords, "a"},
	))
	if got, want := sessions[0].Turns[0].AppendTokens, tokensOf(t, listResult); got != want {
		t.Errorf("appended %d tokens, want the %d of the tool's result alone", got, want)
	}
}

// One id carries the agent's calls and those of the model that plays the user;
// tool calls have an empty output and leave the input as it was. This is the
// shape of the published tau-bench files, where only half of the inputs extend
// the one before.
func TestLMCacheTellsTwoConversationsUnderOneIDApart(t *testing.T) {
	const hello, wish, answer, thanks = "Hello, what can I do?", "I want to fly to Rome.", "On which day?", "On Monday."
	sessions := mustRead(t, FormatLMCache, jsonLines(t,
		call{1_000_000, hello, wish, "s"},
		call{2_000_000, wish, "", "s"},
		call{3_000_000, wish, answer, "s"},
		call{4_000_000, hello + "\n\n" + answer, thanks, "s"},
		call{5_000_000, wish + "\n\n" + thanks, "Booked.", "s"},
	))
	if len(sessions) != 2 || sessions[0].ID != "s/0" || sessions[1].ID != "s/1" {
		t.Fatalf("got %+v", sessions)
	}
	checkTurns(t, sessions[0].Turns, []Turn{
		{tokensOf(t, wish), tokensOf(t, "\n\n"+answer), UnknownSeconds, 3},
		{tokensOf(t, thanks), 0, 0, UnknownSeconds},
	})
	checkTurns(t, sessions[1].Turns, []Turn{
		{Unknown, Unknown, UnknownSeconds, 1},
		{tokensOf(t, answer), tokensOf(t, "\n\n"+thanks), UnknownSeconds, 2},
		{tokensOf(t, "Booked."), 0, 0, UnknownSeconds},
	})
}

// An id with more unrelated inputs than may stay open must still give every
// call, and the oldest conversation is the one that is closed.
func TestLMCacheBoundsOpenConversations(t *testing.T) {
	var rows []any
	for i := range maxOpenConversations + 1 {
		rows = append(rows, call{int64(i), strings.Repeat("x", i+1) + "!", "ok", "s"})
	}
	rows = append(rows, call{1_000, "xx! again", "ok", "s"}, call{1_001, "x! again", "ok", "s"})
	sessions := mustRead(t, FormatLMCache, jsonLines(t, rows...))
	turns := 0
	for _, s := range sessions {
		turns += len(s.Turns)
	}
	if want := maxOpenConversations + 3; turns != want {
		t.Errorf("%d turns, want all %d calls", turns, want)
	}
	if n := len(sessions[0].Turns); n != 1 {
		t.Errorf("the closed conversation got %d turns", n)
	}
	if n := len(sessions[1].Turns); n != 2 {
		t.Errorf("the open conversation got %d turns, want its continuation", n)
	}
}

func TestLMCacheRefuses(t *testing.T) {
	good := `{"timestamp":1,"input":"a","output":"b","session_id":"s"}` + "\n"
	checkBadFiles(t, FormatLMCache, []badFile{
		{"truncated", good + `{"timestamp":1,"input":"a","outp`, `file:2: is not valid JSON: unexpected EOF (at byte 32)`},
		{"not JSON", good + "\n" + "hello\n", `file:3: is not valid JSON: invalid character 'h' at start of value (at byte 0)`},
		{"alien: another format", `{"timestamp":0,"input_length":3,"output_length":1,"hash_ids":[0]}`, `file:1: input: is required and must not be empty`},
		{"no timestamp", `{"input":"a","output":"b","session_id":"s"}`, `file:1: timestamp: is required`},
		{"timestamp as text", `{"timestamp":"now","input":"a","output":"b","session_id":"s"}`, `file:1: timestamp: must be a whole number, is a string (at byte 13)`},
		{"negative timestamp", `{"timestamp":-1,"input":"a","output":"b","session_id":"s"}`, `file:1: timestamp: must not be negative, is -1`},
		{"empty input", `{"timestamp":1,"input":"","output":"b","session_id":"s"}`, `file:1: input: is required and must not be empty`},
		{"no output", good + `{"timestamp":1,"input":"a","session_id":"s"}`, `file:2: output: is required (empty for a tool call)`},
		{"output null", good + `{"timestamp":1,"input":"a","output":null,"session_id":"s"}`, `file:2: output: is required (empty for a tool call)`},
		{"output a number", good + `{"timestamp":1,"input":"a","output":3,"session_id":"s"}`, `file:2: output: must be a string, is a number (at byte 36)`},
		{"no session", `{"timestamp":1,"input":"a","output":"b"}`, `file:1: session_id: is required and must not be empty`},
		{"member twice", `{"timestamp":1,"timestamp":2,"input":"a","output":"b","session_id":"s"}`, `file:1: timestamp: occurs twice (at byte 15)`},
		{"endless id", `{"timestamp":1,"input":"a","output":"b","session_id":"` + strings.Repeat("s", 300) + `"}`, `file:1: id: must be from 1 to 256 bytes long, is 300`},
		{"array", `[1,2]`, `file:1: must be an object, is an array (at byte 0)`},
	})
}

func FuzzLMCache(f *testing.F) {
	fuzzReader(f, FormatLMCache,
		`{"timestamp":1,"input":"a","output":"b","session_id":"s"}`+"\n"+`{"timestamp":2,"input":"a\nc","output":"","session_id":"s"}`,
		`{"timestamp":3,"input":"aa","output":"b","session_id":"t","more":[1]}`+"\r\n\n"+`{"timestamp":1,"input":"a","output":"a","session_id":"t"}`)
}
