package environment

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"holdfast/orchestrator/environment/command"
	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/toolcall"
)

// execDriver runs a program once for each step. A process that lives on between
// steps would have to speak a protocol; those that do are mcp and http.
type execDriver struct {
	id        string
	spec      spec.ExecProgram
	commands  *command.Runner
	keepBytes int
	directory *command.Directory
}

func (x *execDriver) remote() bool { return false }

func (x *execDriver) reset(ctx context.Context, request ResetRequest) (Observation, error) {
	directory, err := x.commands.NewDirectory(x.id)
	if err != nil {
		return Observation{}, err
	}
	x.directory = directory
	observation, err := x.begin(ctx, request)
	if err != nil {
		x.directory = nil
		return Observation{}, errors.Join(err, directory.Remove())
	}
	return observation, nil
}

// begin fills the directory. A program that speaks JSON both ways is asked for a
// first observation; others have nothing to say before the model has.
func (x *execDriver) begin(ctx context.Context, request ResetRequest) (Observation, error) {
	for name, content := range x.spec.Files {
		if err := x.directory.Write(name, []byte(content)); err != nil {
			return Observation{}, err
		}
	}
	if x.spec.Input == spec.InputJSON && x.spec.Output == spec.OutputJSON {
		return x.answer(ctx, newResetDocument(x.id, nil, request))
	}
	if x.spec.Tool == nil {
		return Observation{}, nil
	}
	t := x.spec.Tool
	return Observation{Tools: []toolcall.Tool{{Name: t.Name, Description: t.Description, Parameters: t.Parameters}}}, nil
}

func (x *execDriver) step(ctx context.Context, action Action) (Observation, error) {
	switch {
	case x.spec.Tool != nil:
		return x.calls(ctx, action)
	case x.spec.Output == spec.OutputJSON && x.spec.Input == spec.InputJSON:
		return x.answer(ctx, newStepDocument(x.id, action))
	case x.spec.Output == spec.OutputJSON:
		return x.answer(ctx, action.Text)
	}
	var stdin any = action.Text
	if x.spec.Input == spec.InputJSON {
		stdin = newStepDocument(x.id, action)
	}
	text, cutBytes, err := x.text(ctx, stdin)
	if err != nil {
		return Observation{}, err
	}
	return Observation{Messages: []toolcall.Message{user(text)}, CutBytes: cutBytes}, nil
}

// calls runs the program once for each call. A message without calls ends the
// episode: the model has said what it had to say.
func (x *execDriver) calls(ctx context.Context, action Action) (Observation, error) {
	observation := Observation{Done: len(action.Calls) == 0}
	for _, call := range action.Calls {
		result := toolcall.Result{CallID: call.ID, Name: call.Name}
		stdin, problem := x.toolInput(action.Step, call)
		if problem != "" {
			result.Content, result.IsError = "Error: "+problem, true
		} else {
			content, cutBytes, err := x.text(ctx, stdin)
			if err != nil {
				return Observation{}, err
			}
			result.Content = content
			observation.CutBytes += cutBytes
		}
		observation.Results = append(observation.Results, result)
	}
	return observation, nil
}

// toolInput is what the program reads for a call, or what is wrong with the call.
func (x *execDriver) toolInput(step int, call toolcall.Call) (stdin any, problem string) {
	tool := x.spec.Tool
	if call.Name != tool.Name {
		return nil, fmt.Sprintf("there is no tool %q; there is %q", call.Name, tool.Name)
	}
	if x.spec.Input == spec.InputJSON {
		return newStepDocument(x.id, Action{Step: step, Calls: []toolcall.Call{call}}), ""
	}
	var arguments map[string]json.RawMessage
	// A well-formed call's arguments are an object.
	_ = json.Unmarshal(call.Arguments, &arguments)
	var text string
	if err := json.Unmarshal(arguments[tool.Argument], &text); err != nil {
		return nil, fmt.Sprintf("the argument %q must be a string", tool.Argument)
	}
	return text, ""
}

// run runs the program with a text, or a document, as its input.
func (x *execDriver) run(ctx context.Context, stdin any, keepBytes int, merge bool) (command.Result, error) {
	text, ok := stdin.(string)
	input := []byte(text)
	if !ok {
		var err error
		if input, err = json.Marshal(stdin); err != nil {
			return command.Result{}, fmt.Errorf("encoding the input: %w", err)
		}
	}
	if x.directory == nil {
		return command.Result{}, failure.Newf(failure.Lost, "", "it has not been reset")
	}
	return x.directory.Run(ctx, command.Request{Program: x.spec.Program, Stdin: input, KeepBytes: keepBytes, Merge: merge})
}

// text runs the program and tells how it went: what the model asked for may well
// fail or run into a limit, and the model shall know.
func (x *execDriver) text(ctx context.Context, stdin any) (text string, cutBytes int64, err error) {
	result, err := x.run(ctx, stdin, x.keepBytes, true)
	if err != nil {
		return "", 0, err
	}
	text, cutBytes = result.Stdout.Text, result.Stdout.CutBytes
	var note string
	switch {
	case result.Reached != command.LimitNone:
		note = fmt.Sprintf("[ended: the limit of %s was reached]", result.Reached)
	case result.ExitCode != 0:
		note = fmt.Sprintf("[exit status %d]", result.ExitCode)
	default:
		return text, cutBytes, nil
	}
	if text != "" && !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	return text + note, cutBytes, nil
}

// answer runs the program and reads its output as an answer: here the program is
// the environment, so that nothing about it may fail.
func (x *execDriver) answer(ctx context.Context, stdin any) (Observation, error) {
	result, err := x.run(ctx, stdin, maxAnswerBytes, false)
	if err != nil {
		return Observation{}, err
	}
	text, err := result.Answer()
	if err != nil {
		return Observation{}, err
	}
	var answer answerDocument
	if err := json.Unmarshal([]byte(text), &answer); err != nil {
		return Observation{}, failure.NotAsDocumented("the output", err)
	}
	return answer.observation(x.keepBytes)
}

func (x *execDriver) close(context.Context) error {
	if x.directory == nil {
		return nil
	}
	return x.directory.Remove()
}
