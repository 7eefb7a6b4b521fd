package trace

import (
	"fmt"
	"strings"
	"testing"
)

// roundLine is one row of a round trace: a model call of 10 seconds that starts
// at the given second, followed by tools whose results come at the given
// seconds after it ended.
func roundLine(session string, index, prefix, appended, output, second int, resultsAfter ...int) string {
	var tools []string
	for i, after := range resultsAfter {
		tools = append(tools, fmt.Sprintf(`{"tool_index":%d,"tool_name":"Bash","result_at":"%s"}`, i, clock(second+10+after)))
	}
	return fmt.Sprintf(`{"provider":"claude","model":"m","session_id":%q,"round_index":%d,"round_id":"r%d","input_tokens_total":%d,`+
		`"prefix_tokens":%d,"newly_append_tokens":%d,"output_tokens":%d,"reasoning_output_tokens":null,`+
		`"timing_events":[{"event_type":"user_message","timestamp":"%s"},{"event_type":"tool_call","timestamp":"%s"}],"tools":[%s]}`+"\n",
		session, index, index, prefix+appended, prefix, appended, output, clock(second), clock(second+10), strings.Join(tools, ","))
}

func clock(second int) string {
	return fmt.Sprintf("2026-01-02T03:%02d:%02d.500Z", second/60, second%60)
}

func TestTraceLabLinksRounds(t *testing.T) {
	text := roundLine("s", 1, 1_000, 250, 40, 25, 3, 8) + // out of order; two tools side by side
		roundLine("t", 0, 0, 90, 5, 20) +
		roundLine("s", 0, 700, 300, 100, 0, 12) +
		roundLine("s", 1, 1_000, 250, 40, 25, 3, 8) + // the same round again
		roundLine("s", 2, 1_250, 30, 60, 50) + // less than input + output: 10 dropped; a person is asked
		roundLine("s", 3, 1_340, 110, 7, 100, 1)
	sessions, report, err := readText(FormatTraceLab, "file", text)
	if err != nil {
		t.Fatal(err)
	}
	if len(sessions) != 2 || sessions[0].ID != "s" || sessions[1].ID != "t" || report.SkippedRows != 1 {
		t.Fatalf("got %+v, %+v", sessions, report)
	}
	s := sessions[0]
	if s.PromptTokens != 1_000 || s.SharedTokens != 700 || s.SharedKey != "claude/m" || s.DroppedTokens != 10 {
		t.Errorf("got %+v", s)
	}
	checkTurns(t, s.Turns, []Turn{
		{100, 150, 12, UnknownSeconds},
		{40, 0, 8, UnknownSeconds},
		{60, 110, UnknownSeconds, UnknownSeconds},
		{7, 0, 0, UnknownSeconds},
	})
	if other := sessions[1]; other.StartSeconds != 20 || other.SharedTokens != 0 {
		t.Errorf("got %+v", other)
	}
}

// After a compaction the prefix is gone, so nothing of what was kept in a cache
// for the session so far is of use to it.
func TestTraceLabStartsASessionAfterACompaction(t *testing.T) {
	sessions := mustRead(t, FormatTraceLab, roundLine("s", 0, 0, 10_000, 500, 0, 1)+
		roundLine("s", 1, 3_000, 1_000, 20, 60, 1)+
		roundLine("s", 2, 4_000, 100, 20, 90))
	if len(sessions) != 2 || sessions[1].ID != "s#2" {
		t.Fatalf("got %+v", sessions)
	}
	checkTurns(t, sessions[0].Turns, []Turn{{500, 0, 0, UnknownSeconds}})
	if s := sessions[1]; s.PromptTokens != 4_000 || s.SharedTokens != 3_000 {
		t.Errorf("got %+v", s)
	}
	checkTurns(t, sessions[1].Turns, []Turn{{20, 80, 1, UnknownSeconds}, {20, 0, 0, UnknownSeconds}})
}

func TestTraceLabRefuses(t *testing.T) {
	good := roundLine("s", 0, 700, 300, 100, 0, 12)
	checkBadFiles(t, FormatTraceLab, []badFile{
		{"truncated", good + good[:20], `file:2: is not valid JSON: unexpected EOF (at byte 20)`},
		{"alien: another format", `{"timestamp":1,"input":"a","output":"b","session_id":"s"}`, `file:1: round_index: must be from 0 to 1048576, is missing`},
		{"no session", strings.Replace(good, `"session_id":"s"`, `"session_id":""`, 1), `file:1: session_id: is required and must not be empty`},
		{"sum does not agree", strings.Replace(good, `_total":1000`, `_total":1001`, 1), `file:1: input_tokens_total: must be prefix_tokens + newly_append_tokens (1000), is 1001`},
		{"negative prefix", strings.Replace(good, `prefix_tokens":700`, `prefix_tokens":-700`, 1), `file:1: prefix_tokens: must be from 0 to 1048576, is -700`},
		{"no output", strings.Replace(good, `"output_tokens":100`, `"output_tokens":null`, 1), `file:1: output_tokens: must be from 0 to 1048576, is missing`},
		{"not a time", strings.Replace(good, clock(10), "half past three", 1), `file:1: timing_events[1].timestamp: must be a time such as 2006-01-02T15:04:05Z, is a string (at byte 329)`},
		{"no time", strings.Replace(good, `"`+clock(10)+`"`, "null", 1), `file:1: timing_events[1].timestamp: is required`},
		{"one index, two rounds", good + strings.Replace(good, `"r0"`, `"r9"`, 1), `file:2: round_index: 0 occurs twice in session s with different round_id`},
	})
}

func FuzzTraceLab(f *testing.F) {
	fuzzReader(f, FormatTraceLab,
		roundLine("s", 0, 700, 300, 100, 0, 12)+roundLine("s", 1, 1_000, 250, 40, 25, 3, 8),
		roundLine("s", 0, 0, 10_000, 500, 0)+roundLine("s", 1, 0, 100, 1, 9))
}

const csvHeader = "session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n"

func TestTraceLabCSV(t *testing.T) {
	sessions := mustRead(t, FormatTraceLabCSV, csvHeader+
		"a,1500,0,0,800,50,300\n"+
		"a,1500,1,850,40,60,7\n"+
		"b,2000,0,20,100,9,0\n")
	if len(sessions) != 2 || sessions[0].ID != "a" || sessions[1].ID != "b" {
		t.Fatalf("got %+v", sessions)
	}
	a, b := sessions[0], sessions[1]
	if a.PromptTokens != 800 || a.StartSeconds != 1.5 || b.SharedTokens != 20 || b.PromptTokens != 120 {
		t.Errorf("got %+v, %+v", a, b)
	}
	checkTurns(t, a.Turns, []Turn{{50, 40, 0.3, UnknownSeconds}, {60, 0, 0, UnknownSeconds}})
}

// The converter in the same repository names the columns otherwise, orders them
// otherwise and counts the last answer into input_len.
func TestTraceLabCSVAsItsConverterWritesIt(t *testing.T) {
	sessions := mustRead(t, FormatTraceLabCSV, "id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len\n"+
		"x,800,50,12.500000,0,300.000000,0\n"+
		"x,90,60,12.500000,1,0.000000,800\n")
	checkTurns(t, sessions[0].Turns, []Turn{{50, 40, 0.3, UnknownSeconds}, {60, 0, 0, UnknownSeconds}})
}

func TestTraceLabCSVRefuses(t *testing.T) {
	checkBadFiles(t, FormatTraceLabCSV, []badFile{
		{"alien: no such column", "time,value\n1,2\n", `file:1: session_id or id: column is missing`},
		{"a column less", strings.Replace(csvHeader, ",output_len", "", 1), `file:1: output_len: column is missing`},
		{"a column twice", strings.Replace(csvHeader, "prefix_len", "input_len", 1), `file:1: input_len: column occurs twice`},
		{"truncated", csvHeader + "a,1,0,0,8,5,3\na,1,1,1", `file:3: is not valid CSV: wrong number of fields`},
		{"open quote", csvHeader + "\"a,1,0,0,8,5,3\n", `file:2: is not valid CSV: extraneous or missing " in quoted-field`},
		{"not a number", csvHeader + "a,1,0,0,eight,5,3\n", `file:2: input_len: must be a whole number from 1 to 1048576, is "eight"`},
		{"no input", csvHeader + "a,1,0,0,0,5,3\n", `file:2: input_len: must be a whole number from 1 to 1048576, is "0"`},
		{"negative output", csvHeader + "a,1,0,0,8,-5,3\n", `file:2: output_len: must be a whole number from 0 to 1048576, is "-5"`},
		{"wait NaN", csvHeader + "a,1,0,0,8,5,NaN\n", `file:2: tool_wait_after_ms: must be a number of at least 0, is "NaN"`},
		{"arrival infinite", csvHeader + "a,Inf,0,0,8,5,3\n", `file:2: arrival_time: must be a number of at least 0, is "Inf"`},
		{"a round left out", csvHeader + "a,1,0,0,8,5,3\na,1,2,13,8,5,3\n", `file:3: round_idx: must be 1, the next of session a, is 2`},
		{"a session goes on later", csvHeader + "a,1,0,0,8,5,3\nb,1,0,0,8,5,3\na,1,1,13,8,5,3\n", `file:4: session_id: session "a" goes on after another; its rows must stand together`},
		{"id not UTF-8", csvHeader + "\xff,1,0,0,8,5,3\n", `file:2: id: must be valid UTF-8, is "\xff"`},
		{"no id", csvHeader + ",1,0,0,8,5,3\n", `file:2: session_id: must not be empty`},
	})
}

func FuzzTraceLabCSV(f *testing.F) {
	fuzzReader(f, FormatTraceLabCSV, csvHeader+"a,1500,0,0,800,50,300\na,1500,1,850,40,60,7\nb,2000,0,20,100,9,0\n")
}
