// Package pool runs the router of one pool of engines: a single goroutine owns
// the pure core, feeds it events, makes its decisions durable and only then acts
// on them.
//
// A decision that cannot be recorded ends the loop: its owner rebuilds the core
// from what is durable instead of guessing what was lost. The loop talks to no
// engine and starts no workflow.
package pool

import (
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/router"
)

// ErrNotOwner is returned to callers of a loop that has ended: another process
// owns the pool now, or this one is rebuilding its state. Asking again later is right.
var ErrNotOwner = errors.New("this process does not own the pool's router now")

// Journal makes decisions durable in one transaction, fenced by the owner's
// epoch. It is called from the loop's goroutine only.
type Journal interface {
	Record(ctx context.Context, decisions []Recorded) error
}

// Recorded is a decision with what the journal must add to it.
type Recorded struct {
	router.Decision
	// Signal asks for a grant to be signalled to the session's workflow, since
	// nobody waits for the answer in a call.
	Signal bool
}

// Config sets up a Loop.
type Config struct {
	Router  router.Config
	Journal Journal
	// Now gives router time in nanoseconds since the Unix epoch, never backwards.
	Now func() router.Nanos
	// TickInterval is how often time passes for the core when nothing else happens.
	TickInterval time.Duration
	// Observe, if set, is told every batch after it was recorded.
	Observe func(Batch)
}

// Batch describes one round of the loop, for metrics.
type Batch struct {
	Events, Decisions, Recorded int
	RecordDuration              time.Duration
	ByReason                    []router.Decision
}

// Placement answers a turn's request.
type Placement struct {
	// Admitted is false for a hold; a grant is signalled later.
	Admitted bool
	Instance router.InstanceID
	Reason   router.Reason
	// PredictedCachedTokens is H at the instance when the turn was placed.
	PredictedCachedTokens int64
}

// batchLimit bounds the events of one round, so that a burst cannot make the
// first caller wait for the last.
const batchLimit = 256

// Loop owns one core. Create it with New, feed it from any goroutine, run it once.
type Loop struct {
	cfg      Config
	core     *router.Core
	commands chan command
	done     chan struct{}
	turns    map[router.SessionID]*turnState
	// homes is where each protected session was last durably admitted, so that a
	// continuation that stays there needs no write.
	homes  map[router.SessionID]router.InstanceID
	recent history
	// Scratch space, reused between rounds.
	decisions []router.Decision
	records   []Recorded
	replies   []reply
	holds     []hold
}

// turnState is the loop's memory of a turn that was asked for and has not ended.
type turnState struct {
	turn      int
	placement Placement
	decided   bool
	// waiting callers, in this round or until the turn is admitted; at most one in practice.
	waiting []waiter
}

// waiter is a caller of RequestTurn, or of AwaitTurn, who has a channel for holds.
type waiter struct {
	reply chan answer
	held  chan router.Reason
}

// command is one input of the loop: an event, a request for a turn, or a look at the loop's state.
type command struct {
	event   router.Event
	from    waiter
	inspect func()
}

type answer struct {
	placement Placement
	err       error
}

type reply struct {
	to     chan answer
	answer answer
}

// hold tells a caller who waits for admission why there is none yet.
type hold struct {
	to     chan router.Reason
	reason router.Reason
}

// New returns a loop that has not started.
func New(cfg Config) (*Loop, error) {
	if cfg.Journal == nil || cfg.Now == nil || cfg.TickInterval <= 0 {
		return nil, errors.New("pool loop: journal, clock and a positive tick interval are required")
	}
	core, err := router.New(cfg.Router)
	if err != nil {
		return nil, fmt.Errorf("pool loop: %w", err)
	}
	return &Loop{
		cfg: cfg, core: core,
		commands: make(chan command, 4*batchLimit),
		done:     make(chan struct{}),
		turns:    make(map[router.SessionID]*turnState),
		homes:    make(map[router.SessionID]router.InstanceID),
	}, nil
}

// Run feeds the restored events and then every command to the core until ctx
// ends or a decision cannot be recorded. It runs once.
func (l *Loop) Run(ctx context.Context, restored []router.Event) error {
	defer close(l.done)
	for _, event := range restored {
		l.step(command{event: event})
	}
	if err := l.settle(ctx, len(restored)); err != nil {
		return err
	}
	ticker := time.NewTicker(l.cfg.TickInterval)
	defer ticker.Stop()
	for {
		events := 1
		select {
		case <-ctx.Done():
			l.refuse(ErrNotOwner)
			return ctx.Err()
		case <-ticker.C:
			l.step(command{event: &router.Tick{}})
		case cmd := <-l.commands:
			l.step(cmd)
			events += l.drain()
		}
		if err := l.settle(ctx, events); err != nil {
			return err
		}
	}
}

// drain steps through what else has arrived, up to the batch limit.
func (l *Loop) drain() int {
	for n := 0; n < batchLimit; n++ {
		select {
		case cmd := <-l.commands:
			l.step(cmd)
		default:
			return n
		}
	}
	return batchLimit
}

// step feeds one command to the core; records and replies gather until settle.
func (l *Loop) step(cmd command) {
	if cmd.inspect != nil {
		cmd.inspect()
		return
	}
	stamp(cmd.event, l.cfg.Now())
	switch event := cmd.event.(type) {
	case *router.TurnRequested:
		l.request(event, cmd.from)
		return
	case *router.SessionRestored:
		l.restore(event)
	case *router.TurnEnded:
		if state := l.turns[event.Session]; state != nil && state.turn == event.Turn {
			delete(l.turns, event.Session)
		}
	case *router.SessionEnded:
		l.forget(event.Session)
	}
	l.feed(cmd.event)
}

// feed steps the core and takes in what it decided, so that the next command of
// the same round finds it; nobody is told before the round is recorded.
func (l *Loop) feed(event router.Event) {
	before := len(l.decisions)
	l.decisions = l.core.Step(event, l.decisions)
	for i := before; i < len(l.decisions); i++ {
		l.take(&l.decisions[i])
	}
}

// request asks the core for a placement, unless the turn has one already: a
// repeated question after a worker's death must not be a second admission.
func (l *Loop) request(event *router.TurnRequested, from waiter) {
	state := l.turns[event.Session]
	if state != nil && state.turn == event.Turn {
		state.waiting = append(state.waiting, from)
		if state.decided {
			l.answerWaiting(state)
		}
		return
	}
	l.turns[event.Session] = &turnState{turn: event.Turn, waiting: []waiter{from}}
	l.feed(event)
}

// restore remembers a restored session as the core does.
func (l *Loop) restore(event *router.SessionRestored) {
	if event.Instance == "" {
		l.turns[event.Session] = &turnState{turn: event.Turn, decided: true, placement: Placement{Reason: router.NoInstance}}
		return
	}
	l.homes[event.Session] = event.Instance
}

func (l *Loop) forget(session router.SessionID) {
	if state := l.turns[session]; state != nil {
		for _, w := range state.waiting {
			l.replies = append(l.replies, reply{w.reply, answer{err: fmt.Errorf("session %x has ended", session)}})
		}
	}
	delete(l.turns, session)
	delete(l.homes, session)
}

// settle records the round's decisions and then answers those who wait for them.
func (l *Loop) settle(ctx context.Context, events int) error {
	batch := Batch{Events: events, Decisions: len(l.decisions), Recorded: len(l.records), ByReason: l.decisions}
	if len(l.records) > 0 {
		began := time.Now()
		if err := l.cfg.Journal.Record(ctx, l.records); err != nil {
			for _, r := range l.replies {
				r.to <- answer{err: ErrNotOwner}
			}
			l.refuse(ErrNotOwner)
			return fmt.Errorf("recording %d decisions: %w", len(l.records), err)
		}
		batch.RecordDuration = time.Since(began)
	}
	for _, r := range l.replies {
		r.to <- r.answer
	}
	for _, h := range l.holds {
		select {
		case h.to <- h.reason:
		default: // Told before and not read yet.
		}
	}
	if l.cfg.Observe != nil {
		l.cfg.Observe(batch)
	}
	clear(l.decisions)
	l.decisions, l.records, l.replies, l.holds = l.decisions[:0], l.records[:0], l.replies[:0], l.holds[:0]
	return nil
}

// take turns one decision into a record and a reply.
func (l *Loop) take(d *router.Decision) {
	l.recent.add(*d)
	switch d.Kind {
	case router.Admit:
		l.takeAdmit(d)
	case router.Hold:
		l.takeHold(d)
	case router.ProtectionEnded:
		delete(l.homes, d.Session)
		l.records = append(l.records, Recorded{Decision: *d})
	case router.CapChanged:
		l.records = append(l.records, Recorded{Decision: *d})
	}
}

func (l *Loop) takeAdmit(d *router.Decision) {
	state := l.turns[d.Session]
	if state == nil || state.turn != d.Turn {
		// The core admits only turns that were asked for; a turn that ended in the
		// same round needs no answer.
		return
	}
	state.decided = true
	state.placement = Placement{
		Admitted: true, Instance: d.Instance, Reason: d.Reason,
		PredictedCachedTokens: d.Numbers.PredictedCachedTokens,
	}
	signal := len(state.waiting) == 0
	if signal || d.Reason != router.Continuation || l.homes[d.Session] != d.Instance {
		l.records = append(l.records, Recorded{Decision: *d, Signal: signal})
	}
	l.homes[d.Session] = d.Instance
	l.answerWaiting(state)
}

func (l *Loop) takeHold(d *router.Decision) {
	state := l.turns[d.Session]
	if state == nil || state.turn != d.Turn {
		return
	}
	state.decided = true
	state.placement = Placement{Reason: d.Reason}
	l.records = append(l.records, Recorded{Decision: *d})
	l.answerWaiting(state)
}

// answerWaiting tells the callers of a decided turn. Those who wait for admission
// are told of a hold and go on waiting.
func (l *Loop) answerWaiting(state *turnState) {
	still := state.waiting[:0]
	for _, w := range state.waiting {
		switch {
		case state.placement.Admitted || w.held == nil:
			l.replies = append(l.replies, reply{w.reply, answer{placement: state.placement}})
		default:
			still = append(still, w)
			l.holds = append(l.holds, hold{w.held, state.placement.Reason})
		}
	}
	clear(state.waiting[len(still):])
	state.waiting = still
}

// refuse answers everybody who waits or has asked, at the end of the loop.
func (l *Loop) refuse(err error) {
	for _, state := range l.turns {
		for _, w := range state.waiting {
			w.reply <- answer{err: err}
		}
		state.waiting = nil
	}
	for {
		select {
		case cmd := <-l.commands:
			if cmd.from.reply != nil {
				cmd.from.reply <- answer{err: err}
			}
		default:
			return
		}
	}
}

// RequestTurn asks where a turn may run and returns once the answer is durable.
func (l *Loop) RequestTurn(ctx context.Context, request router.TurnRequested) (Placement, error) {
	return l.ask(ctx, request, waiter{reply: make(chan answer, 1)}, nil)
}

// AwaitTurn asks where a turn may run and returns once it is admitted and that is
// durable; onHold is called in the caller's goroutine when it is held, with the
// reason. A caller who gives up leaves the turn as it stands: asking for it again
// finds its place or goes on waiting.
func (l *Loop) AwaitTurn(ctx context.Context, request router.TurnRequested, onHold func(router.Reason)) (Placement, error) {
	return l.ask(ctx, request, waiter{reply: make(chan answer, 1), held: make(chan router.Reason, 1)}, onHold)
}

func (l *Loop) ask(ctx context.Context, request router.TurnRequested, from waiter, onHold func(router.Reason)) (Placement, error) {
	if err := l.send(ctx, command{event: &request, from: from}); err != nil {
		return Placement{}, err
	}
	for {
		select {
		case a := <-from.reply:
			return a.placement, a.err
		case reason := <-from.held:
			onHold(reason)
		case <-ctx.Done():
			return Placement{}, ctx.Err()
		case <-l.done:
			return Placement{}, ErrNotOwner
		}
	}
}

// Tell feeds an event. Events of one caller keep their order; events without a
// time of their own are stamped when they reach the core.
func (l *Loop) Tell(ctx context.Context, event router.Event) error {
	return l.send(ctx, command{event: event})
}

// Sessions lists every session that is protected or has asked for a turn, in no
// particular order.
func (l *Loop) Sessions(ctx context.Context) ([]router.SessionID, error) {
	return look(ctx, l, func() []router.SessionID {
		known := make([]router.SessionID, 0, len(l.homes)+len(l.turns))
		for session := range l.homes {
			known = append(known, session)
		}
		for session := range l.turns {
			if _, protected := l.homes[session]; !protected {
				known = append(known, session)
			}
		}
		return known
	})
}

// look runs a function in the loop's goroutine, between two commands.
func look[T any](ctx context.Context, l *Loop, f func() T) (T, error) {
	var none T
	result := make(chan T, 1)
	if err := l.send(ctx, command{inspect: func() { result <- f() }}); err != nil {
		return none, err
	}
	select {
	case value := <-result:
		return value, nil
	case <-ctx.Done():
		return none, ctx.Err()
	case <-l.done:
		return none, ErrNotOwner
	}
}

func (l *Loop) send(ctx context.Context, cmd command) error {
	select {
	case <-l.done:
		return ErrNotOwner
	default:
	}
	select {
	case l.commands <- cmd:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-l.done:
		return ErrNotOwner
	}
}
