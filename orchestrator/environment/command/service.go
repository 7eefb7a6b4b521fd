package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/orchestrator/environment/excerpt"
	"holdfast/orchestrator/environment/spec"
)

// complaintBytes is how much of a service's standard error is kept.
const complaintBytes = 4 << 10

// Service is a program that lives on and is spoken to through its standard
// streams. Its limit of wall time is its Stop; its output is bounded by whoever
// reads it.
type Service struct {
	process *process
	input   *os.File
	output  *os.File

	mu         sync.Mutex
	complaints *excerpt.Buffer

	stop sync.Once
	err  error
}

// Start starts a program that lives until Stop, or until the directory is removed.
func (d *Directory) Start(ctx context.Context, program spec.Program) (*Service, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", program.Command[0], err)
	}
	childInput, input, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", program.Command[0], err)
	}
	defer childInput.Close()
	output, childOutput, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("starting %s: %w", program.Command[0], err), input.Close())
	}
	defer childOutput.Close()
	s := &Service{input: input, output: output, complaints: excerpt.NewBuffer(complaintBytes)}
	s.process, err = d.start(&exec.Cmd{Stdin: childInput, Stdout: childOutput, Stderr: complaintWriter{s}}, program)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("starting %s: %w", program.Command[0], err), input.Close(), output.Close())
	}
	return s, nil
}

// Input writes to the program's standard input.
func (s *Service) Input() io.WriteCloser { return s.input }

// Output reads from the program's standard output.
func (s *Service) Output() io.ReadCloser { return s.output }

// Done is closed when the program has ended.
func (s *Service) Done() <-chan struct{} { return s.process.done }

// Complaints is the beginning and end of what the program wrote to standard error.
func (s *Service) Complaints() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	text, _ := s.complaints.Text()
	return text
}

// Stop closes the program's input, which asks a well-behaved one to end; after
// the runner's grace it sends SIGTERM, and after the same again SIGKILL. It
// returns when everything has ended, and can be called again.
func (s *Service) Stop() error {
	s.stop.Do(func() { s.err = s.stopOnce() })
	return s.err
}

func (s *Service) stopOnce() error {
	// The client of the protocol may have closed them already.
	_ = s.input.Close()
	defer s.output.Close()
	grace := s.process.directory.runner.config.StopGrace
	if !s.endsWithin(grace) {
		s.process.signal(unix.SIGTERM)
		s.endsWithin(grace)
	}
	_, err := s.process.killAndWait()
	return err
}

func (s *Service) endsWithin(wait time.Duration) bool {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-s.process.done:
		return true
	case <-timer.C:
		return false
	}
}

type complaintWriter struct{ service *Service }

func (w complaintWriter) Write(p []byte) (int, error) {
	w.service.mu.Lock()
	defer w.service.mu.Unlock()
	return w.service.complaints.Write(p)
}
