// Package environment answers a model between its turns: an environment server
// over HTTP, the tools of an MCP server, or a program in a directory that is
// thrown away.
//
// Each session has one Environment, opened by a Registry, which keeps those that
// live in this process, bounds their number, and releases what is left of them
// when the process ends, and at the start of the next one when it crashed.
//
// What the model did wrong (an unknown tool, a command that fails) is part of an
// Observation. What the environment did wrong (it hangs, it died, it does not
// follow its schema) is a *failure.Error, so that it never becomes a reward.
//
// Every call can be made again after a crash of the caller. Episodes are named by
// the session's id and actions are numbered, so a repeated call gives the same
// observation or failure.Conflict. An http environment is reached from any
// process; mcp and exec environments live in the process that reset them, and
// elsewhere give failure.Lost.
//
// Not here: deciding how many turns a session has, tokens, storage. Isolation is
// what package command says, and no more.
package environment

import (
	"context"
	"encoding/json"
	"math"

	"holdfast/orchestrator/environment/excerpt"
	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/toolcall"
)

// Environment is the environment of one session. It is safe for concurrent use;
// Reset and Step wait for each other.
type Environment interface {
	// Reset begins the episode and says what the model sees beside its prompt. A
	// repeated Reset before the first Step gives the same; after it, Conflict.
	Reset(ctx context.Context, request ResetRequest) (Observation, error)
	// Step takes one message of the model. The step numbers begin at 1 and have no
	// gaps. A repeated number gives the same observation. When a Step of a local
	// environment was cut short, by an error or by ctx, its state is not known and
	// every later call gives Lost.
	Step(ctx context.Context, action Action) (Observation, error)
	// Close releases everything. It can be called again, while a Step is under way
	// (which then ends as cancelled), and with a context that has ended: it takes
	// its own time, which is bounded.
	Close(ctx context.Context) error
}

// ResetRequest is what an episode begins with, beside what the spec says.
type ResetRequest struct {
	// Seed is the session's; equal seeds ask for equal episodes.
	Seed int64
	// Member is the session's place in its group.
	Member int
	// Metadata is the task's, a JSON object; absent means none.
	Metadata json.RawMessage
}

// Action is one message of the model.
type Action struct {
	// Step is the number of the message in the episode, from 1.
	Step int
	// Text is the message without its tool calls.
	Text string
	// Calls are the well-formed tool calls in it.
	Calls []toolcall.Call
}

// Observation is what the model sees next.
type Observation struct {
	// Results are the answers to the action's calls, in their order.
	Results []toolcall.Result
	// Messages follow the results.
	Messages []toolcall.Message
	// Tools are what the model may call; only Reset gives them.
	Tools []toolcall.Tool
	// Reward is finite, or nil when the environment gave none with this step.
	Reward *float64
	// Done means that the episode has ended. Truncated means that it ended by a
	// limit of the environment and not by the task; it implies Done.
	Done, Truncated bool
	// CutBytes is how much of the texts was cut.
	CutBytes int64
}

// Render gives results, and the calls that could not be read, and messages as
// one list of chat messages in the model's tool format.
func (o Observation) Render(format toolcall.Format, problems []*toolcall.MalformedError) []toolcall.Message {
	results := append(toolcall.ProblemResults(problems), o.Results...)
	return append(toolcall.Render(format, results), o.Messages...)
}

// shorten cuts every text to what the spec keeps. Drivers call it, since a
// program's output is cut while it is read.
func (o *Observation) shorten(keepBytes int) {
	for i := range o.Results {
		o.CutBytes += cut(&o.Results[i].Content, keepBytes)
	}
	for i := range o.Messages {
		o.CutBytes += cut(&o.Messages[i].Content, keepBytes)
	}
}

func cut(text *string, keepBytes int) (cutBytes int64) {
	*text, cutBytes = excerpt.Of(*text, keepBytes)
	return cutBytes
}

// check holds an observation to what this package promises.
func (o *Observation) check() error {
	if o.Reward != nil && (math.IsNaN(*o.Reward) || math.IsInf(*o.Reward, 0)) {
		return failure.Newf(failure.Malformed, "", "the reward is %v", *o.Reward)
	}
	o.Done = o.Done || o.Truncated
	return nil
}

// user is a message that the environment says to the model.
func user(text string) toolcall.Message {
	return toolcall.Message{Role: "user", Content: text}
}
