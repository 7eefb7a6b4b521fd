package sim

import (
	"fmt"

	"holdfast/router"
	"holdfast/router/sim/instance"
)

// retrySeconds is how long a caller waits before it asks again for a turn that
// an instance did not answer.
const retrySeconds = 1

// start brings an engine up, empty, and announces it.
func (w *world) start(e *engine) error {
	var sink instance.CacheSink
	if w.spec.Wants.Blocks {
		e.feed = blockFeed{ratio: w.cfg.RouterBlockTokens / e.params.BlockTokens}
		sink = &e.feed
	}
	in, err := instance.New(e.params, sink)
	if err != nil {
		return fmt.Errorf("starting instance %s: %w", e.id, err)
	}
	e.in, e.up, e.stale = in, true, true
	e.inbox = in.Advance(w.now, e.inbox)
	w.undrained = true
	w.announce(e, 1)
	return nil
}

// announce tells the policy of an instance, with its context limit scaled.
func (w *world) announce(e *engine, factor float64) {
	ratio := w.cfg.RouterBlockTokens / e.params.BlockTokens
	w.tell(&router.InstanceJoined{
		At: w.now, Instance: e.id,
		CapacityBlocks: int64(e.params.CapacityBlocks / ratio), BlockTokens: w.cfg.RouterBlockTokens,
		MaxContextTokens: int64(float64(e.params.MaxContextTokens) * factor),
		MaxRunning:       e.params.MaxSequences, PolicyVersion: w.version,
	})
}

func (w *world) startFault(f Fault) {
	switch f.Kind {
	case SlowTools:
		w.gapFactor *= f.Factor
	case InstanceLost:
		w.lose(w.engines[f.Instance])
	case WeightSync:
		w.pauseAll(instance.PauseAll)
	case ContextLimit:
		for _, e := range w.engines {
			w.announce(e, f.Factor)
		}
	}
}

func (w *world) endFault(f Fault) {
	switch f.Kind {
	case SlowTools:
		w.gapFactor /= f.Factor
	case InstanceLost:
		if err := w.start(w.engines[f.Instance]); err != nil {
			w.fail(err)
		}
	case WeightSync:
		w.newWeights()
	case ContextLimit:
		for _, e := range w.engines {
			w.announce(e, 1)
		}
	}
}

// lose takes an engine down with everything that runs on it.
func (w *world) lose(e *engine) {
	w.advance(e)
	w.drain()
	e.up, e.stale = false, true
	e.lost = addStats(e.lost, e.in.Stats())
	w.tell(&router.InstanceLeft{At: w.now, Instance: e.id})
	var cut []*session
	for _, s := range e.sessions {
		if s.state == running {
			cut = append(cut, s)
		}
	}
	for _, s := range cut {
		w.failTurn(s, e)
	}
}

// failTurn tells the policy that a turn was not answered; it will be asked again.
func (w *world) failTurn(s *session, e *engine) {
	s.state = asking
	s.stay(w.now-s.admittedAt, s.contextTokens, s.contextTokens)
	s.finishedAt = w.now
	s.avoid = e.id
	w.queue.push(w.now+nanos(retrySeconds), turnRetried, int32(s.index))
	// failTurn may run while the decisions of another event are carried out, and
	// the policy may be asked again only after that: a message of no delay.
	w.post(w.now, message{event: &router.TurnEnded{
		At: w.now, Session: s.id, Turn: s.turn, Instance: e.id, CachedTokens: -1, Failed: true,
	}})
}
