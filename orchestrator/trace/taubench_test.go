package trace

import (
	"fmt"
	"strings"
	"testing"
)

// trajectory is one run in tau-bench's shape, with text of our own.
func trajectory(taskID, trial int, reward float64, messages ...string) string {
	return fmt.Sprintf(`{"task_id":%d,"reward":%g,"info":{"any":1},"trial":%d,"traj":[%s]}`, taskID, reward, trial, strings.Join(messages, ","))
}

const (
	systemMessage  = `{"role":"system","content":"You sell tickets for the puppet theatre."}`
	userMessage    = `{"role":"user","content":"Two seats for Sunday."}`
	toolCall       = `{"role":"assistant","content":null,"tool_calls":[{"id":"x","type":"function","function":{"name":"find_seats","arguments":"{\"day\":\"Sunday\"}"}}]}`
	toolResult     = `{"role":"tool","tool_call_id":"x","name":"find_seats","content":"row 3, seats 4 and 5"}`
	offerMessage   = `{"role":"assistant","content":"Row 3, seats 4 and 5?"}`
	farewell       = `{"role":"user","content":"Yes, thank you."}`
	systemContent  = "You sell tickets for the puppet theatre."
	offerContent   = "Row 3, seats 4 and 5?"
	resultContent  = "row 3, seats 4 and 5"
	userContent    = "Two seats for Sunday."
	callArguments  = `{"day":"Sunday"}`
	callName       = "find_seats"
	secondQuestion = `{"role":"user","content":"Is there a box?"}`
)

func TestTauBenchCountsMessagesIntoTurns(t *testing.T) {
	text := "[" + strings.Join([]string{
		trajectory(4, 0, 1, systemMessage, userMessage, toolCall, toolResult, offerMessage, farewell),
		trajectory(4, 1, 0, systemMessage, secondQuestion, offerMessage),
	}, ",\n") + "]\n"
	sessions := mustRead(t, FormatTauBench, text)
	if len(sessions) != 2 {
		t.Fatalf("got %d sessions", len(sessions))
	}
	first, second := sessions[0], sessions[1]
	if first.ID != "task-4/trial-0" || second.ID != "task-4/trial-1" || first.Group != "task-4" || second.Group != first.Group {
		t.Errorf("ids %s %s, groups %s %s", first.ID, second.ID, first.Group, second.Group)
	}
	if *first.Reward != 1 || *second.Reward != 0 {
		t.Errorf("rewards %v %v", *first.Reward, *second.Reward)
	}
	if want := tokensOf(t, systemContent) + tokensOf(t, userContent); first.PromptTokens != want {
		t.Errorf("prompt %d, want %d", first.PromptTokens, want)
	}
	if first.SharedTokens != tokensOf(t, systemContent) || first.SharedKey == "" || first.SharedKey != second.SharedKey {
		t.Errorf("shared %d %q and %q", first.SharedTokens, first.SharedKey, second.SharedKey)
	}
	checkTurns(t, first.Turns, []Turn{
		{tokensOf(t, callName) + tokensOf(t, callArguments), tokensOf(t, resultContent), UnknownSeconds, UnknownSeconds},
		{tokensOf(t, offerContent), 0, 0, UnknownSeconds}, // the farewell is left out
	})
}

func TestTauBenchSkipsRunsThatFailedBeforeACall(t *testing.T) {
	sessions, report, err := readText(FormatTauBench, "file", "["+trajectory(1, 0, 0)+","+trajectory(1, 1, 1, userMessage, offerMessage)+"]")
	if err != nil {
		t.Fatal(err)
	}
	if len(sessions) != 1 || report.SkippedRows != 1 || sessions[0].SharedTokens != 0 {
		t.Errorf("got %+v, %+v", sessions, report)
	}
}

// Found by fuzzing: a system message may have no content.
func TestTauBenchReadsASystemMessageWithoutContent(t *testing.T) {
	sessions := mustRead(t, FormatTauBench, "["+trajectory(1, 0, 0, `{"role":"system"}`, userMessage, offerMessage)+"]")
	if s := sessions[0]; s.SharedTokens != 0 || s.PromptTokens != tokensOf(t, userContent) {
		t.Errorf("got %+v", s)
	}
	toolOnly := strings.Replace(toolCall, "assistant", "system", 1)
	sessions = mustRead(t, FormatTauBench, "["+trajectory(1, 0, 0, toolOnly, offerMessage)+"]")
	if s := sessions[0]; s.SharedTokens != 0 {
		t.Errorf("got %+v", s)
	}
}

func TestTauBenchRefuses(t *testing.T) {
	good := trajectory(0, 0, 1, systemMessage, userMessage, offerMessage)
	checkBadFiles(t, FormatTauBench, []badFile{
		{"truncated in a trajectory", "[" + good + "," + good[:50], `file: [1]: the file ends before the array of trajectories does`},
		{"truncated between two", "[" + good + ",", `file: [1]: the file ends before the array of trajectories does`},
		{"truncated before the end", "[" + good, `file: [1]: the file ends before the array of trajectories does`},
		{"only blanks", "  \n", `file: the file ends before the array of trajectories does`},
		{"not an array", good, `file: must be an array of trajectories`},
		{"lines instead of an array", "[" + good + "]\n[" + good + "]", `file: has something after the array of trajectories (at byte 240)`},
		{"not JSON", "[" + good + "; ", `file: is not valid JSON: invalid character ';' after array element (expecting ',' or ']') (at byte 237)`},
		{"not an object", "[" + good + ", 7]", `file: [1]: must be an object (at byte 239)`},
		{"no task", `[{"trial":0,"traj":[]}]`, `file: [0].task_id: is required`},
		{"no trial", `[{"task_id":0,"traj":[]}]`, `file: [0].trial: is required`},
		{"no messages", `[{"task_id":0,"trial":0}]`, `file: [0].traj: is required`},
		{"reward as text", `[{"task_id":0,"trial":0,"reward":"good","traj":[]}]`, `file: [0].reward: must be a number that a 64-bit float can hold, is a string (at byte 33)`},
		{"unknown role", "[" + trajectory(0, 0, 1, userMessage, `{"role":"critic","content":"hm"}`) + "]", `file: [0].traj[1]: role must be one of system, user, assistant, tool, is "critic"`},
		{"content in parts", "[" + trajectory(0, 0, 1, `{"role":"user","content":[{"text":"hm"}]}`) + "]", `file: [0].traj[0].content: must be a string, is an array (at byte 85)`},
		{"answer without a prompt", "[" + trajectory(3, 0, 1, offerMessage) + "]", `file: [0].prompt: must be from 1 to 1048576 tokens, is 0`},
		{"the same trial twice", "[" + good + "," + good + "]", `file: [1]: session task-0/trial-0 occurs twice, first in file`},
	})
}

func FuzzTauBench(f *testing.F) {
	fuzzReader(f, FormatTauBench,
		"["+trajectory(0, 0, 1, systemMessage, userMessage, toolCall, toolResult, offerMessage)+"]",
		`[{"task_id":0,"trial":-1,"traj":[{"role":"user","content":"x"},{"role":"assistant"}]}]`)
}
