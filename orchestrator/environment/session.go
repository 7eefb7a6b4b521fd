package environment

import (
	"context"
	"fmt"
	"sync"
	"time"

	"holdfast/orchestrator/environment/failure"
)

// closeWait bounds a Close: the time in which a server answers, or a program
// that is asked to end does.
const closeWait = 10 * time.Second

// unknownStep is where an episode stands that another process may have stepped.
const unknownStep = -1

// session adds to a driver what every kind promises: one call at a time, repeated
// calls, finite rewards, and a Close that comes through.
type session struct {
	registry *Registry
	id       string
	driver   driver
	// life ends at Close and takes the call under way with it.
	life context.Context
	end  context.CancelFunc
	// turn is held by the call under way.
	turn chan struct{}

	// Below: guarded by turn.
	step     int // the last that was answered; 0 is Reset
	answered bool
	last     Observation
	broken   error
	released bool

	mu   sync.Mutex
	used time.Time
}

func newSession(r *Registry, id string, d driver) *session {
	s := &session{registry: r, id: id, driver: d, turn: make(chan struct{}, 1), step: unknownStep, used: time.Now()}
	s.life, s.end = context.WithCancel(context.Background())
	return s
}

// Reset implements Environment.
func (s *session) Reset(ctx context.Context, request ResetRequest) (Observation, error) {
	return s.call(ctx, 0, func(ctx context.Context) (Observation, error) {
		return s.driver.reset(ctx, request)
	})
}

// Step implements Environment.
func (s *session) Step(ctx context.Context, action Action) (Observation, error) {
	return s.call(ctx, action.Step, func(ctx context.Context) (Observation, error) {
		return s.driver.step(ctx, action)
	})
}

// call makes one call of the driver, or answers from memory.
func (s *session) call(ctx context.Context, step int, call func(context.Context) (Observation, error)) (Observation, error) {
	doing := fmt.Sprintf("stepping environment %s to %d", s.id, step)
	if step == 0 {
		doing = "resetting environment " + s.id
	}
	if err := s.take(ctx); err != nil {
		return Observation{}, failure.Within(ctx, doing, failure.Lost, err)
	}
	defer s.give()
	if s.answered && step == s.step {
		return s.last, nil
	}
	if err := s.inOrder(step); err != nil {
		return Observation{}, failure.Within(ctx, doing, failure.Conflict, err)
	}
	calling, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	observation, err := call(calling)
	if err == nil {
		err = observation.check()
	}
	if err != nil {
		err = failure.Within(calling, doing, failure.Died, err)
		if !s.driver.remote() && step > 0 {
			s.broken = err
		}
		return Observation{}, err
	}
	s.step, s.answered, s.last = step, true, observation
	return observation, nil
}

// inOrder tells whether a call may be made where the episode stands. A server
// knows by itself where an episode stands that began in another process.
func (s *session) inOrder(step int) error {
	switch {
	case s.broken != nil:
		return failure.New(failure.Lost, "", fmt.Errorf("an earlier step was cut short: %w", s.broken))
	case step < 0:
		return failure.Newf(failure.Conflict, "", "steps are counted from 1")
	case s.step == unknownStep && step > 0 && !s.driver.remote():
		return failure.Newf(failure.Lost, "", "this process has not reset it")
	case s.answered && s.last.Done:
		return failure.Newf(failure.Conflict, "", "the episode ended with step %d", s.step)
	case s.step != unknownStep && step != s.step+1:
		return failure.Newf(failure.Conflict, "", "the last step was %d", s.step)
	}
	return nil
}

// take waits for the session's turn.
func (s *session) take(ctx context.Context) error {
	s.touch()
	closed := failure.Newf(failure.Lost, "", "it is closed")
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	case <-s.life.Done():
		return closed
	}
	if s.life.Err() != nil {
		<-s.turn
		return closed
	}
	return nil
}

func (s *session) give() {
	s.touch()
	<-s.turn
}

func (s *session) touch() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used = time.Now()
}

func (s *session) idleSince(now time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.turn) > 0 {
		return 0 // a call is under way
	}
	return now.Sub(s.used)
}

// Close implements Environment.
func (s *session) Close(ctx context.Context) error {
	doing := "closing environment " + s.id
	s.end()
	s.registry.forget(s)
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeWait)
	defer cancel()
	select {
	case s.turn <- struct{}{}:
	case <-closing.Done():
		return failure.Newf(failure.Timeout, doing, "a call under way does not end")
	}
	defer func() { <-s.turn }()
	defer s.registry.rest()
	if s.released {
		return nil
	}
	if err := s.driver.close(closing); err != nil {
		return failure.Within(closing, doing, failure.Died, err)
	}
	s.released = true
	return nil
}
