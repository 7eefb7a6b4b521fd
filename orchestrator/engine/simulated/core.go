package simulated

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"holdfast/router/sim/instance"
)

// core is one rank: the model driven by the wall clock. Whoever holds mu brings it up
// to date first, and one timer is set to the next thing that will happen. While
// nothing happens nothing runs.
type core struct {
	cfg  *Config
	rank int // within the server

	mu      sync.Mutex
	model   *instance.Instance
	chains  *chainTable
	calls   map[uint64]*call
	streams map[uint64]*call // those of calls that are watched
	lastID  uint64
	timer   *time.Timer
	armed   time.Time // when the timer fires; zero if it is not set
	looked  time.Time // when progress last ran
	closed  ending    // why no more calls are taken
	events  []instance.Event
	latency latencies
	log     *kvLog // nil without events
	weights string
	// gate holds new calls back until it is closed; nil lets them in. idle is closed
	// when the last call behind a gate ends.
	gate, idle chan struct{}

	// The engine's clock showed engineBase at wallBase and runs at speed times the scale.
	wallBase   time.Time
	engineBase int64
	speed      float64
}

func newCore(cfg *Config, rank int, log *kvLog) (*core, error) {
	c := &core{
		cfg: cfg, rank: rank, wallBase: time.Now(), speed: 1, chains: newChainTable(cfg.Engine.BlockTokens),
		calls: map[uint64]*call{}, streams: map[uint64]*call{}, latency: newLatencies(),
		log: log, weights: cfg.WeightVersion,
	}
	c.chains.log, c.chains.step = log, c.steps
	var err error
	if c.model, err = instance.New(cfg.Engine, c.chains); err != nil {
		return nil, err
	}
	c.timer = time.AfterFunc(time.Hour, c.wake)
	c.timer.Stop()
	return c, nil
}

// steps is how many steps the model has begun.
func (c *core) steps() int64 { return c.model.Stats().Steps }

// engineNow is the engine's clock, in nanoseconds.
func (c *core) engineNow() int64 {
	return c.engineBase + int64(float64(time.Since(c.wallBase))*c.cfg.TimeScale*c.speed)
}

// setSpeed makes the engine faster or slower from now on.
func (c *core) setSpeed(speed float64) {
	c.look(func() {
		c.engineBase, c.wallBase = c.engineNow(), time.Now()
		c.speed = speed
	})
}

var (
	errClosed  = errors.New("the engine is shutting down")
	errCrashed = errors.New("the engine has crashed")
)

func (e ending) err() error {
	if e == crashed {
		return errCrashed
	}
	return errClosed
}

// submit queues a call whose request, ids, sampler and hashes are set. The prompt
// is not kept. It waits while the engine takes no new calls.
func (c *core) submit(ctx context.Context, x *call, hashes []blockHash, prompt []int32) error {
	if err := c.enter(ctx); err != nil {
		return err
	}
	defer c.mu.Unlock()
	if c.closed != running {
		return c.closed.err()
	}
	c.advance()
	c.lastID++
	x.id, x.core = c.lastID, c
	if x.sampler.span(0).version != c.weights {
		x.sampler.under(c.weights, 0)
	}
	x.chain = c.chains.open(x, hashes, prompt)
	x.learner = tape{at: x.promptEnd}
	x.notify = make(chan struct{}, 1)
	err := c.model.Submit(instance.Request{
		ID: x.id, Chain: &x.chain.model, PromptTokens: x.promptTokens, OutputTokens: x.outputTokens,
		Priority: x.request.Priority,
	})
	if err != nil {
		c.chains.close(x.chain)
		return fmt.Errorf("submitting: %w", err)
	}
	c.calls[x.id] = x
	if x.watched() {
		if len(c.streams) == 0 {
			c.looked = time.Now()
		}
		c.streams[x.id] = x
	}
	c.arm()
	return nil
}

// enter takes the lock as soon as no gate keeps new calls out.
func (c *core) enter(ctx context.Context) error {
	for {
		c.mu.Lock()
		gate := c.gate
		if gate == nil {
			return nil
		}
		c.mu.Unlock()
		select {
		case <-gate:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// wait blocks until the call has something new, and reports what can be read.
// When ctx ends the call is aborted.
func (c *core) wait(ctx context.Context, x *call) (progress, error) {
	select {
	case <-x.notify:
	case <-ctx.Done():
		c.abort(x)
		return progress{ending: aborted}, ctx.Err()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p := progress{x.generated, x.ending, x.sampler, x.event}
	if x.ending == shutDown || x.ending == crashed {
		return p, x.ending.err()
	}
	return p, nil
}

// abort ends a call on behalf of its reader; it may have ended already.
func (c *core) abort(x *call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advance()
	c.abortLocked(x, aborted)
	c.arm()
}

func (c *core) abortLocked(x *call, why ending) {
	if x.ending != running {
		return
	}
	if p, ok := c.model.Progress(x.id); ok {
		x.generated = p.OutputTokens
		x.event.CachedTokens, x.event.Preemptions = p.CachedTokens, p.Preemptions
	}
	c.model.Abort(x.id)
	c.latency.aborted++
	c.end(x, why)
}

// end lets go of a call that the model no longer has.
func (c *core) end(x *call, how ending) {
	x.ending = how
	c.chains.close(x.chain)
	delete(c.calls, x.id)
	delete(c.streams, x.id)
	x.signal()
	if c.idle != nil && len(c.calls) == 0 {
		close(c.idle)
		c.idle = nil
	}
}

// advance brings the model to the present and tells the calls what happened.
func (c *core) advance() {
	c.events = c.model.Advance(c.engineNow(), c.events[:0])
	for i := range c.events {
		e := &c.events[i]
		x := c.calls[e.ID]
		if x == nil {
			continue
		}
		switch e.Kind {
		case instance.FirstToken:
			x.firstAt = e.At
			c.latency.observeFirst(e)
			if x.watched() {
				x.generated = max(x.generated, e.OutputTokens)
				x.signal()
			}
		case instance.Finished:
			x.generated = e.OutputTokens
			x.event = *e
			c.latency.observeEnd(x, e)
			c.end(x, finished)
		case instance.Preempted:
			// The model counts it; the reader only sees a pause.
		}
	}
}

// progress tells watched calls about tokens that make a chunk.
func (c *core) progress() {
	now := time.Now()
	if now.Sub(c.looked) < c.cfg.StreamTick {
		return
	}
	c.looked = now
	for _, x := range c.streams {
		p, ok := c.model.Progress(x.id)
		if !ok || p.OutputTokens-x.generated < x.request.StreamInterval {
			continue
		}
		// Send whole intervals, so that chunks do not depend on when this ran.
		sent := max(x.generated-1, 0)
		x.generated += (p.OutputTokens - 1 - sent) / x.request.StreamInterval * x.request.StreamInterval
		x.signal()
	}
}

// wake is the timer.
func (c *core) wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed != running {
		return
	}
	c.armed = time.Time{}
	c.advance()
	c.progress()
	if c.log != nil && time.Since(c.log.decodedAt) >= c.cfg.StreamTick {
		c.publishDecoded()
	}
	c.arm()
}

// publishDecoded makes the model tell of the blocks that running requests have filled.
func (c *core) publishDecoded() {
	c.model.PublishDecoded()
	if c.log != nil {
		c.log.decodedAt = time.Now()
	}
}

// arm sets the timer to the next event, or to the next look at the streams.
func (c *core) arm() {
	if c.closed != running {
		return
	}
	now := time.Now()
	due := time.Time{}
	if at, ok := c.model.NextEvent(); ok {
		// A little late rather than a little early: early would find nothing.
		delay := float64(at-c.engineNow())/(c.cfg.TimeScale*c.speed) + float64(time.Microsecond)
		due = now.Add(time.Duration(min(delay, float64(maxDelay))))
	}
	if len(c.streams) > 0 {
		due = earlier(due, c.looked.Add(c.cfg.StreamTick))
	}
	if c.log != nil {
		c.log.flush(c.steps)
		if len(c.calls) > 0 {
			due = earlier(due, c.log.decodedAt.Add(c.cfg.StreamTick))
		}
	}
	switch {
	case due.IsZero():
		c.timer.Stop()
	case due != c.armed:
		c.timer.Reset(max(due.Sub(now), 0))
	}
	c.armed = due
}

// earlier is the earlier of two times, of which the first may be none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || b.Before(a) {
		return b
	}
	return a
}

// maxDelay is the longest sleep; an earlier wake finds nothing and sleeps again.
const maxDelay = 24 * time.Hour

// close refuses new calls and ends those in flight.
func (c *core) close(why ending) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed != running {
		return
	}
	c.advance()
	for _, id := range c.inOrder() {
		c.abortLocked(c.calls[id], why)
	}
	c.closed = why
	c.openGate()
	c.timer.Stop()
	if c.log != nil {
		c.log.publisher.Close()
	}
}

// inOrder lists the calls in order of arrival.
func (c *core) inOrder() []uint64 {
	ids := make([]uint64, 0, len(c.calls))
	for id := range c.calls {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// look runs f on the up-to-date model.
func (c *core) look(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed == running {
		c.advance()
	}
	f()
	if c.closed == running {
		c.arm()
	}
}
