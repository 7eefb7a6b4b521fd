package activities

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"

	"holdfast/store"
)

const (
	// checkpointTokens is how much of a turn's output a lost worker can lose.
	checkpointTokens = 2_048
	// partingPatience bounds the last checkpoint of a worker that must stop.
	partingPatience = 2 * time.Second
)

// saver makes a turn's output durable while it is generated. It writes one
// checkpoint at a time, beside the reader of the stream: while the store is slow the
// next one grows, and the order stays.
type saver struct {
	a       *Activities
	session uuid.UUID
	// restarts names the session's attempt that the turn is of.
	restarts int
	turn     int
	out      *output
	// ended: the turn is another worker's or over, and nothing is to be saved.
	ended bool
	wake  chan struct{}
	done  chan struct{}
}

// start asks for a checkpoint without waiting for it.
func (s *saver) start(ctx context.Context) {
	if s.wake == nil {
		s.wake, s.done = make(chan struct{}, 1), make(chan struct{})
		go s.run(ctx)
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *saver) run(ctx context.Context) {
	defer close(s.done)
	for range s.wake {
		if s.out.due() {
			s.save(ctx)
		}
	}
}

// settle waits until no checkpoint is being written.
func (s *saver) settle() {
	if s.wake == nil {
		return
	}
	// A wake that was not heard yet is left to whoever settles.
	select {
	case <-s.wake:
	default:
	}
	close(s.wake)
	<-s.done
	s.wake, s.done = nil, nil
}

// save writes what is not durable yet. An error is logged only: the output is still
// here, and the next checkpoint brings it.
func (s *saver) save(ctx context.Context) {
	c, ok := s.out.unsaved()
	if !ok || s.ended {
		return
	}
	c.SessionID, c.Restarts, c.Turn, c.Epoch = s.session, s.restarts, s.turn, s.a.cfg.Epoch
	last, err := s.a.cfg.Store.SaveCheckpoint(ctx, c)
	switch {
	case err == nil:
		s.out.saved(savedPart{id: last, end: c.StartTokens + len(c.IDs)})
	case errors.Is(err, store.ErrCheckpointSuperseded), errors.Is(err, store.ErrSessionEnded), errors.Is(err, store.ErrSessionRestarted), errors.Is(err, store.ErrTurnOutOfOrder):
		s.ended = true
		s.a.cfg.Logger.Info("a turn's output is not this worker's to save any more", "session", s.session, "turn", s.turn, "reason", err)
	case ctx.Err() == nil:
		s.a.cfg.Logger.Warn("a checkpoint failed", "session", s.session, "turn", s.turn, "start_tokens", c.StartTokens, "tokens", len(c.IDs), "error", err)
	}
}

// drop removes from the store what this worker's output has discarded, so that no
// other one goes on from it. It tries until ctx ends, whose error it then returns.
func (s *saver) drop(ctx context.Context) error {
	c := s.out.discarded()
	c.SessionID, c.Restarts, c.Turn = s.session, s.restarts, s.turn
	for tries := 1; ; tries++ {
		err := s.a.cfg.Store.DropCheckpoints(ctx, c)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.a.cfg.Logger.Warn("dropping checkpoints failed, trying again", "session", s.session, "turn", s.turn, "tries", tries, "error", err)
		if err := s.a.pause(ctx, tries); err != nil {
			return err
		}
	}
}

// part saves what is left when this worker must stop: its context has ended, and
// another one may go on.
func (s *saver) part(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.a.partingPatience)
	defer cancel()
	s.save(ctx)
}
