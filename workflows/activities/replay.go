package activities

import (
	"encoding/binary"
	"time"

	"holdfast/store"
	"holdfast/workflows/task"
)

// The replay environment plays a recorded session back: each turn generates as
// many tokens as the record says, the tool takes as long as it took, and a tool
// result of the recorded length is appended.

// turnsOf returns the recorded turns, or nil where the task is no replay.
func turnsOf(spec *task.Spec) []task.ReplayTurn {
	if spec.Environment == nil || spec.Environment.Kind != task.EnvironmentReplay {
		return nil
	}
	return spec.Environment.Turns
}

// outputTokens is the limit on a turn's output.
func outputTokens(spec *task.Spec, turn int) int {
	if turns := turnsOf(spec); turn < len(turns) {
		return turns[turn].OutputTokens
	}
	return spec.Sampling.MaxTokens
}

// appendedTokens is the length of the tool result before a turn.
func appendedTokens(spec *task.Spec, turn int) int {
	if turns := turnsOf(spec); turn > 0 && turn <= len(turns) {
		return turns[turn-1].AppendTokens
	}
	return 0
}

// appendToolResult appends the tool result before a turn to the context. Its ids
// are a function of session and turn, so that a repeated turn sees the same ones.
func appendToolResult(tokens []int32, work *store.WorkSession, turn int) []int32 {
	seed := binary.LittleEndian.Uint64(work.ID[:8]) ^ binary.LittleEndian.Uint64(work.ID[8:])
	return task.AppendToolResult(tokens, seed, turn, appendedTokens(&work.Spec, turn))
}

// gapAfter is the wall time that the recorded tool takes after a turn.
func gapAfter(spec *task.Spec, turn int) time.Duration {
	turns := turnsOf(spec)
	if turn < 0 || turn >= len(turns) {
		return 0
	}
	scale := spec.Environment.TimeScale
	if scale == 0 {
		scale = 1
	}
	return time.Duration(turns[turn].GapSeconds / scale * float64(time.Second))
}
