package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"sync"
	"time"

	"holdfast/orchestrator/environment/excerpt"
	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/environment/spec"
)

// Limit is the closed set of limits that end a program from outside. Memory and
// processes are not among them: the program sees those as errors of its own.
type Limit uint8

const (
	// LimitNone: the program ended by itself.
	LimitNone Limit = iota
	LimitWall
	LimitCPU
	LimitOutput
	LimitFile
)

var limitNames = [...]string{"none", "wall time", "CPU time", "output", "file size"}

func (l Limit) String() string {
	if int(l) < len(limitNames) {
		return limitNames[l]
	}
	return fmt.Sprintf("Limit(%d)", uint8(l))
}

// Exit statuses by which a shell reports that a signal ended its command.
const (
	exitCPU  = 128 + 24 // SIGXCPU
	exitFile = 128 + 25 // SIGXFSZ
	exitKill = 128 + 9  // SIGKILL, which follows a SIGXCPU that was ignored
)

// Request is one program to be run to its end.
type Request struct {
	Program spec.Program
	Stdin   []byte
	// KeepBytes is how much of each output is kept.
	KeepBytes int
	// Merge puts standard error where it comes among standard output.
	Merge bool
}

// Output is what was kept of a stream, as text that can be stored.
type Output struct {
	Text     string
	CutBytes int64
}

// Result is how a program ended.
type Result struct {
	Stdout, Stderr Output
	// ExitCode is the program's status, 128 + n when signal n ended it, and -1
	// when a limit did that is watched from here.
	ExitCode int
	Reached  Limit
	// WallSeconds and CPUSeconds are what it took, including what it waited for.
	WallSeconds, CPUSeconds float64
}

// Answer is the program's standard output if that can be taken for its answer:
// the program ended well, by itself, and said no more than was kept. Otherwise
// the error is a *failure.Error that repeats its complaints.
func (r Result) Answer() (string, error) {
	const complaintBytes = 300
	says := excerpt.Line(r.Stderr.Text, complaintBytes)
	switch {
	case r.Reached == LimitWall:
		return "", failure.Newf(failure.Timeout, "", "the program was ended after %.1f s: %s", r.WallSeconds, says)
	case r.Reached != LimitNone:
		return "", failure.Newf(failure.LimitReached, "", "the program reached its limit of %s: %s", r.Reached, says)
	case r.ExitCode != 0:
		return "", failure.Newf(failure.Died, "", "the program ended with status %d: %s", r.ExitCode, says)
	case r.Stdout.CutBytes > 0:
		return "", failure.Newf(failure.TooLarge, "", "the program's answer is %d bytes too long", r.Stdout.CutBytes)
	}
	return r.Stdout.Text, nil
}

// Run runs a program to its end. That it fails or reaches a limit is part of the
// result. An error means that it could not be run: it is not there, the kernel
// refused, the directory was removed; or ctx ended, which kills it.
func (d *Directory) Run(ctx context.Context, request Request) (Result, error) {
	limits := request.Program.Limits.WithDefaults()
	if err := ctx.Err(); err != nil {
		return Result{}, fmt.Errorf("running %s: %w", request.Program.Command[0], err)
	}
	outputs := newOutputs(request, limits.OutputBytes)
	cmd := &exec.Cmd{Stdin: bytes.NewReader(request.Stdin), Stdout: outputs.stdout, Stderr: outputs.stderr}
	begin := time.Now()
	p, err := d.start(cmd, request.Program)
	if err != nil {
		return Result{}, fmt.Errorf("running %s: %w", request.Program.Command[0], err)
	}
	wall := time.NewTimer(time.Duration(limits.WallSeconds * float64(time.Second)))
	defer wall.Stop()
	result := Result{}
	select {
	case <-p.done:
	case <-wall.C:
		result.Reached = LimitWall
	case <-outputs.flooded:
		result.Reached = LimitOutput
	case <-ctx.Done():
	}
	stopped, err := p.killAndWait()
	if err != nil {
		return Result{}, fmt.Errorf("running %s: %w", request.Program.Command[0], err)
	}
	if err := ctx.Err(); err != nil && stopped && result.Reached == LimitNone {
		return Result{}, fmt.Errorf("running %s: %w", request.Program.Command[0], err)
	}
	result.WallSeconds = time.Since(begin).Seconds()
	p.judge(&result, limits, stopped)
	outputs.fill(&result)
	if d.wasRemoved() {
		return Result{}, fmt.Errorf("running %s: %w", request.Program.Command[0], ErrRemoved)
	}
	return result, nil
}

// ErrRemoved means that a directory was removed while, or before, a program ran
// in it.
var ErrRemoved = errors.New("the directory has been removed")

func (d *Directory) wasRemoved() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.removed
}

// judge reads the exit status and what it says about limits. A program that was stopped
// may have a status of its own all the same: a shell, say, whose child was killed first.
func (p *process) judge(result *Result, limits spec.Limits, stopped bool) {
	state := p.cmd.ProcessState
	result.ExitCode = state.ExitCode()
	result.CPUSeconds = (state.UserTime() + state.SystemTime()).Seconds()
	switch {
	case stopped:
		result.ExitCode = -1
	case result.Reached == LimitWall:
		result.Reached = LimitNone // it ended by itself just then
	}
	if result.Reached != LimitNone {
		return
	}
	switch result.ExitCode {
	case exitCPU:
		result.Reached = LimitCPU
	case exitFile:
		result.Reached = LimitFile
	case exitKill:
		if result.CPUSeconds >= float64(limits.CPUSeconds) {
			result.Reached = LimitCPU
		}
	}
}

// killAndWait ends a program that may have ended already; stopped tells that it had not.
func (p *process) killAndWait() (stopped bool, err error) {
	select {
	case <-p.done:
		return false, nil
	default:
	}
	p.kill()
	deadline := time.NewTimer(removeWait)
	defer deadline.Stop()
	select {
	case <-p.done:
		return true, nil
	case <-deadline.C:
		return true, fmt.Errorf("process %d does not end", p.pid)
	}
}

// outputs collects both streams and watches their size together.
type outputs struct {
	stdout, stderr *stream
	flooded        chan struct{}

	mu        sync.Mutex
	leftBytes int64
}

// stream is one of them; with Merge both are the same.
type stream struct {
	all    *outputs
	buffer *excerpt.Buffer
}

func newOutputs(request Request, limitBytes int64) *outputs {
	o := &outputs{flooded: make(chan struct{}), leftBytes: limitBytes}
	o.stdout = &stream{all: o, buffer: excerpt.NewBuffer(request.KeepBytes)}
	o.stderr = o.stdout
	if !request.Merge {
		o.stderr = &stream{all: o, buffer: excerpt.NewBuffer(request.KeepBytes)}
	}
	return o
}

// Write goes on taking what comes after a flood, until the program is killed.
func (s *stream) Write(p []byte) (int, error) {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	before := s.all.leftBytes
	s.all.leftBytes -= int64(len(p))
	if before >= 0 && s.all.leftBytes < 0 {
		close(s.all.flooded)
	}
	return s.buffer.Write(p)
}

func (o *outputs) fill(result *Result) {
	o.mu.Lock()
	defer o.mu.Unlock()
	result.Stdout.Text, result.Stdout.CutBytes = o.stdout.buffer.Text()
	if o.stderr != o.stdout {
		result.Stderr.Text, result.Stderr.CutBytes = o.stderr.buffer.Text()
	}
	// A short program may have ended by itself before it could be stopped.
	if o.leftBytes < 0 {
		result.Reached = LimitOutput
	}
}
