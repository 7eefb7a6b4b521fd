package environment

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/toolcall"
)

// execSpec runs the model's text as a shell script, or a script of ours.
func execSpec(script ...string) spec.Environment {
	program := []string{"sh"}
	if len(script) > 0 {
		program = append([]string{"sh", "-c"}, script...)
	}
	return spec.Environment{Kind: spec.Exec, Exec: &spec.ExecProgram{
		Program: spec.Program{Command: program, Limits: spec.Limits{WallSeconds: 20, OutputBytes: 1 << 20}},
	}}
}

func TestExecEpisode(t *testing.T) {
	s := execSpec()
	s.Exec.Files = map[string]string{"data/names.txt": "ada\ngrace\n"}
	s.ObservationBytes = 100
	e := open(t, newRegistry(t, Config{}), s)
	if o := reset(t, e); len(o.Messages)+len(o.Tools) != 0 {
		t.Errorf("reset gave %+v", o)
	}
	for i, c := range []struct{ script, want string }{
		{"wc -l <data/names.txt; echo 1 >kept", "2\n"},
		{"cat kept; echo oops >&2; exit 3", "1\noops\n[exit status 3]"},
		{"exec cat no-such-file 2>/dev/null", "[exit status 1]"},
		{"printf x; exit 9", "x\n[exit status 9]"},
	} {
		if o := step(t, e, say(i+1, c.script)); o.Messages[0] != user(c.want) || o.Done {
			t.Errorf("%s gave %+v", c.script, o)
		}
	}
	o := step(t, e, say(5, "seq 1 1000"))
	if !strings.HasPrefix(o.Messages[0].Content, "1\n2\n") || !strings.HasSuffix(o.Messages[0].Content, "999\n1000\n") || o.CutBytes != 3893-100 {
		t.Errorf("a long output gives %+v", o)
	}
	again := step(t, e, say(5, "seq 1 1000"))
	if again.Messages[0] != o.Messages[0] {
		t.Error("a step that is repeated gives something else")
	}
	if err := e.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestExecLimitsAreObservations: a command of the model's that runs wild is
// something for the model to see.
func TestExecLimitsAreObservations(t *testing.T) {
	for script, want := range map[string]string{
		"sleep 1000":                            "[ended: the limit of wall time was reached]",
		"trap '' TERM INT; while :; do :; done": "[ended: the limit of wall time was reached]",
		"yes":                                   "[ended: the limit of output was reached]",
	} {
		t.Run(script, func(t *testing.T) {
			s := execSpec()
			if strings.Contains(want, "wall time") {
				s.Exec.Program.Limits.WallSeconds = 2 // for the step after it too
			}
			e := open(t, newRegistry(t, Config{}), s)
			reset(t, e)
			o := step(t, e, say(1, script))
			if !strings.HasSuffix(o.Messages[0].Content, want) || len(o.Messages[0].Content) > 17<<10 {
				t.Errorf("got %d bytes: %.100q", len(o.Messages[0].Content), o.Messages[0].Content)
			}
			if o := step(t, e, say(2, "echo fine")); o.Messages[0].Content != "fine\n" {
				t.Errorf("afterwards: %+v", o)
			}
		})
	}
}

func TestExecAsATool(t *testing.T) {
	s := execSpec()
	s.ToolFormat = toolcall.Hermes
	s.Exec.Tool = &spec.ExecTool{Name: "sh", Description: "Runs a script.", Argument: "script"}
	e := open(t, newRegistry(t, Config{}), s)
	if o := reset(t, e); len(o.Tools) != 1 || o.Tools[0].Name != "sh" {
		t.Errorf("reset gave %+v", o)
	}
	calls := append(ask(1, "sh", `{"script":"echo hi"}`).Calls, ask(2, "bash", `{"script":"echo hi"}`).Calls...)
	calls = append(calls, ask(3, "sh", `{"script":7}`).Calls...)
	o := step(t, e, Action{Step: 1, Calls: calls})
	want := []string{"hi\n", `Error: there is no tool "bash"; there is "sh"`, `Error: the argument "script" must be a string`}
	for i, result := range o.Results {
		if result.Content != want[i] || result.CallID != calls[i].ID || result.IsError != (i > 0) {
			t.Errorf("result %d is %+v", i, result)
		}
	}
	if len(o.Results) != 3 || o.Done {
		t.Errorf("got %+v", o)
	}
	if o = step(t, e, say(2, "That was it.")); !o.Done {
		t.Error("a message without calls ends nothing")
	}
}

// TestExecSpeakingJSON has a program that is the environment: it counts its steps
// in a file.
func TestExecSpeakingJSON(t *testing.T) {
	s := execSpec(`cat >>log; echo >>log
n=$(wc -l <log)
case $n in
1) echo '{"observation":"ready"}';;
2) echo '{"observation":{"messages":[{"role":"user","content":"more"}]},"reward":0.5}';;
*) echo '{"observation":"","reward":1,"truncated":true}';;
esac`)
	s.Exec.Input, s.Exec.Output = spec.InputJSON, spec.OutputJSON
	e := open(t, newRegistry(t, Config{}), s)
	if o := reset(t, e); len(o.Messages) != 1 || o.Messages[0] != user("ready") {
		t.Errorf("reset gave %+v", o)
	}
	if o := step(t, e, say(1, "a")); o.Messages[0].Content != "more" || *o.Reward != 0.5 || o.Done {
		t.Errorf("step 1 gave %+v", o)
	}
	if o := step(t, e, say(2, "b")); len(o.Messages) != 0 || *o.Reward != 1 || !o.Done || !o.Truncated {
		t.Errorf("step 2 gave %+v", o)
	}
	log, err := os.ReadFile(filepath.Join(e.(*session).driver.(*execDriver).directory.Path(), "log"))
	want := `{"episode_id":"session-1","step":0,"seed":7,"member":2}
{"episode_id":"session-1","step":1,"action":{"text":"a","tool_calls":[]}}
{"episode_id":"session-1","step":2,"action":{"text":"b","tool_calls":[]}}
`
	if err != nil || string(log) != want {
		t.Errorf("the program read %s, %v", log, err)
	}
}

func TestExecFailures(t *testing.T) {
	for script, c := range map[string]struct {
		kind failure.Kind
		says string
	}{
		"echo broken >&2; exit 1":   {failure.Died, "the program ended with status 1: broken"},
		"sleep 1000":                {failure.Timeout, "the program was ended after"},
		"yes":                       {failure.LimitReached, "the program reached its limit of output"},
		"echo '{'":                  {failure.Malformed, "not as documented"},
		`echo '{"reward":NaN}'`:     {failure.Malformed, "not as documented"},
		"yes | head -c 5000000":     {failure.TooLarge, "the program's answer is 805696 bytes too long"},
		"exec /no/such/interpreter": {failure.Died, "status 127"},
	} {
		t.Run(script, func(t *testing.T) {
			s := execSpec(script)
			s.Exec.Output = spec.OutputJSON
			if c.kind == failure.TooLarge {
				s.Exec.Program.Limits.OutputBytes = 8 << 20
			}
			if c.kind == failure.Timeout {
				s.Exec.Program.Limits.WallSeconds = 0.3
			}
			r := newRegistry(t, Config{})
			e := open(t, r, s)
			reset(t, e)
			_, err := e.Step(t.Context(), say(1, "go"))
			wantKind(t, err, c.kind, c.says)
			_, err = e.Step(t.Context(), say(1, "go"))
			wantKind(t, err, failure.Lost, "an earlier step was cut short")
		})
	}
	t.Run("at reset nothing is left", func(t *testing.T) {
		s := execSpec("exit 1")
		s.Exec.Input, s.Exec.Output = spec.InputJSON, spec.OutputJSON
		r := newRegistry(t, Config{})
		e := open(t, r, s)
		for range 2 {
			_, err := e.Reset(t.Context(), ResetRequest{})
			wantKind(t, err, failure.Died, "status 1")
			nothingLeft(t, r.config.Commands.Root())
		}
	})
	t.Run("no such program", func(t *testing.T) {
		s := execSpec()
		s.Exec.Program.Command = []string{"no-such-program"}
		e := open(t, newRegistry(t, Config{}), s)
		reset(t, e)
		_, err := e.Step(t.Context(), say(1, ""))
		wantKind(t, err, failure.Died, `"no-such-program" is in no folder of PATH`)
	})
}

// TestExecClose interrupts a step by cancelling it and by closing.
func TestExecClose(t *testing.T) {
	for _, how := range []string{"cancel", "close"} {
		t.Run(how, func(t *testing.T) {
			r := newRegistry(t, Config{})
			e := open(t, r, execSpec())
			reset(t, e)
			directory := e.(*session).driver.(*execDriver).directory.Path()
			ready := filepath.Join(directory, "ready")
			if err := errors.Join(syscall.Mkfifo(ready, 0o666), os.Chmod(ready, 0o666)); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error, 1)
			go func() {
				_, err := e.Step(ctx, say(1, "setsid sleep 1000 & echo >ready; sleep 1000"))
				ended <- err
			}()
			running := make(chan error, 1)
			go func() {
				file, err := os.Open(ready)
				running <- errors.Join(err, file.Close())
			}()
			select {
			case err := <-running:
				if err != nil {
					t.Fatal(err)
				}
			case err := <-ended:
				t.Fatalf("the step ended early: %v", err)
			}
			if how == "cancel" {
				cancel()
				wantKind(t, <-ended, failure.Cancelled, "")
			}
			if err := e.Close(ctx); err != nil {
				t.Error(err)
			}
			if how == "close" {
				wantKind(t, <-ended, failure.Cancelled, "")
			}
			if exists(directory) {
				t.Error("the directory is left")
			}
		})
	}
}
