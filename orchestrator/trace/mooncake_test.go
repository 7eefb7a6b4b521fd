package trace

import (
	"strings"
	"testing"
)

// request is one row of a Mooncake trace.
type request struct {
	Timestamp    int64   `json:"timestamp"`
	InputLength  int64   `json:"input_length"`
	OutputLength int64   `json:"output_length"`
	HashIDs      []int64 `json:"hash_ids"`
}

func TestMooncakeDerivesSessionsFromPrefixes(t *testing.T) {
	sessions := mustRead(t, FormatMooncake, jsonLines(t,
		request{0, 1_100, 200, []int64{0, 1, 2}},           // two full blocks: can be continued
		request{1_000, 1_100, 100, []int64{0, 7, 8}},       // another session with the same first block
		request{2_000, 600, 10, []int64{0, 1}},             // shorter than what it would continue
		request{61_000, 1_500, 90, []int64{0, 1, 3}},       // continues the first: 200 appended
		request{62_000, 1_400, 5, []int64{0, 1, 4}},        // a branch: the first has gone on
		request{90_000, 2_100, 50, []int64{0, 7, 9, 6, 5}}, // continues the second
		request{99_000, 1_700, 1, []int64{0, 1, 4, 11}},    // continues the branch
		request{99_000, 1_720, 1, []int64{0, 1, 4, 11}},    // at the same instant: not a continuation
	))
	var ids []string
	for _, s := range sessions {
		ids = append(ids, s.ID)
	}
	if got, want := strings.Join(ids, " "), "request-1 request-2 request-3 request-5 request-8"; got != want {
		t.Fatalf("sessions %s, want %s", got, want)
	}
	checkTurns(t, sessions[0].Turns, []Turn{
		{200, 200, UnknownSeconds, 61},
		{90, 0, 0, UnknownSeconds},
	})
	checkTurns(t, sessions[1].Turns, []Turn{
		{100, 900, UnknownSeconds, 89},
		{50, 0, 0, UnknownSeconds},
	})
	checkTurns(t, sessions[3].Turns, []Turn{
		{5, 295, UnknownSeconds, 37},
		{1, 0, 0, UnknownSeconds},
	})
	if sessions[1].StartSeconds != 1 || sessions[1].PromptTokens != 1_100 {
		t.Errorf("second session starts at %v with %d", sessions[1].StartSeconds, sessions[1].PromptTokens)
	}
}

// The shared prefix is the part of a first prompt that another session's first
// prompt has as well; the key must be equal exactly where that part is.
func TestMooncakeFindsSharedPrefixes(t *testing.T) {
	sessions := mustRead(t, FormatMooncake, jsonLines(t,
		request{0, 1_500, 10, []int64{0, 1, 2}},
		request{1, 1_300, 10, []int64{0, 1, 3}},
		request{2, 1_100, 10, []int64{0, 5, 6}},
		request{3, 300, 10, []int64{0}},
		request{4, 700, 10, []int64{9, 1}},
	))
	shared := []int{1_024, 1_024, 512, 300, 0}
	for i, want := range shared {
		if got := sessions[i].SharedTokens; got != want {
			t.Errorf("session %d shares %d tokens, want %d", i, got, want)
		}
	}
	keys := []string{sessions[0].SharedKey, sessions[1].SharedKey, sessions[2].SharedKey, sessions[3].SharedKey}
	if keys[0] != keys[1] || keys[2] != keys[3] || keys[0] == keys[2] || sessions[4].SharedKey != "" {
		t.Errorf("keys %q", keys)
	}
}

func TestMooncakeRefuses(t *testing.T) {
	good := `{"timestamp":5,"input_length":600,"output_length":1,"hash_ids":[0,1]}` + "\n"
	checkBadFiles(t, FormatMooncake, []badFile{
		{"truncated", good + `{"timestamp":5,"input_len`, `file:2: is not valid JSON: unexpected EOF (at byte 25)`},
		{"alien: another format", `{"timestamp":1,"input":"a","output":"b","session_id":"s"}`, `file:1: input_length: must be from 1 to 1048576, is missing`},
		{"no timestamp", `{"input_length":600,"output_length":1,"hash_ids":[0,1]}`, `file:1: timestamp: is required`},
		{"out of order", good + strings.Replace(good, "5", "4", 1), `file:2: timestamp: must not be before the line above (5), is 4`},
		{"no input", strings.Replace(good, "600", "0", 1), `file:1: input_length: must be from 1 to 1048576, is 0`},
		{"absurd input", strings.Replace(good, "600", "60000000", 1), `file:1: input_length: must be from 1 to 1048576, is 60000000`},
		{"negative output", strings.Replace(good, `th":1`, `th":-1`, 1), `file:1: output_length: must be from 0 to 1048576, is -1`},
		{"fraction", strings.Replace(good, "600", "600.5", 1), `file:1: input_length: must be a whole number, is 600.5 (at byte 30)`},
		{"blocks of another size", strings.Replace(good, "[0,1]", "[0,1,2]", 1), `file:1: hash_ids: must name the 2 blocks of 512 tokens that input_length 600 has, names 3`},
		{"hash as text", strings.Replace(good, "[0,1]", `[0,"1"]`, 1), `file:1: hash_ids[1]: must be a whole number, is a string (at byte 66)`},
	})
}

func FuzzMooncake(f *testing.F) {
	fuzzReader(f, FormatMooncake,
		`{"timestamp":0,"input_length":1100,"output_length":2,"hash_ids":[0,1,2]}`+"\n"+`{"timestamp":9,"input_length":1200,"output_length":0,"hash_ids":[0,1,3]}`,
		`{"timestamp":0,"input_length":1,"output_length":0,"hash_ids":[-1]}`)
}
