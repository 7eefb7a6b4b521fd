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

// call is one request in flight.
type call struct {
	id        uint64
	requestID string
	sessionID string
	request   *completionRequest
	sampler   sampler
	chain     *chain
	// What the content goes on from after its last full block of prompt.
	promptTokens int
	promptTail   []int32
	promptHash   blockHash

	outputTokens int
	stopped      bool
	wallStart    time.Time

	// Guarded by core.mu.
	generated int // what the reader has been told
	done      bool
	aborted   bool
	event     instance.Event // of the end
	firstAt   int64          // engine nanoseconds
	// notify holds a token when there is something to read.
	notify chan struct{}
}

// core is the model driven by the wall clock: whoever holds mu brings it up to
// date first, and one timer is set to the next thing that will happen. While
// nothing happens nothing runs.
type core struct {
	cfg     *Config
	started time.Time

	mu      sync.Mutex
	model   *instance.Instance
	chains  *chainTable
	calls   map[uint64]*call
	streams map[uint64]*call // those of calls that stream
	lastID  uint64
	timer   *time.Timer
	armed   time.Time // when the timer fires; zero if it is not set
	looked  time.Time // when progress last ran
	closed  bool
	events  []instance.Event
	latency latencies
	log     *kvLog // nil without events
}

func newCore(cfg *Config, log *kvLog) (*core, error) {
	c := &core{
		cfg: cfg, started: time.Now(), chains: newChainTable(cfg.Engine.BlockTokens),
		calls: map[uint64]*call{}, streams: map[uint64]*call{}, latency: newLatencies(),
		log: log,
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
	return int64(float64(time.Since(c.started)) * c.cfg.TimeScale)
}

var errClosed = errors.New("the engine is shutting down")

// submit queues a call whose request, ids, sampler and hashes are set. The prompt is not kept.
func (c *core) submit(x *call, hashes []blockHash, prompt []int32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errClosed
	}
	c.advance()
	c.lastID++
	x.id = c.lastID
	x.chain = c.chains.open(x, hashes, prompt)
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
	if x.request.Stream {
		if len(c.streams) == 0 {
			c.looked = time.Now()
		}
		c.streams[x.id] = x
	}
	c.arm()
	return nil
}

// wait blocks until the call has something new, and reports what can be read.
// When ctx ends the call is aborted.
func (c *core) wait(ctx context.Context, x *call) (generated int, done bool, err error) {
	select {
	case <-x.notify:
	case <-ctx.Done():
		c.abort(x)
		return 0, true, ctx.Err()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if x.aborted {
		return x.generated, true, errClosed
	}
	return x.generated, x.done, nil
}

// abort ends a call on behalf of its reader; it may have ended already.
func (c *core) abort(x *call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advance()
	c.abortLocked(x)
	c.arm()
}

func (c *core) abortLocked(x *call) {
	if x.done {
		return
	}
	if p, ok := c.model.Progress(x.id); ok {
		x.generated = p.OutputTokens
	}
	c.model.Abort(x.id)
	x.aborted = true
	c.latency.aborted++
	c.end(x)
}

// end lets go of a call that the model no longer has.
func (c *core) end(x *call) {
	x.done = true
	c.chains.close(x.chain)
	delete(c.calls, x.id)
	delete(c.streams, x.id)
	signal(x)
}

func signal(x *call) {
	select {
	case x.notify <- struct{}{}:
	default:
	}
}

// learn gives the blocks that x has generated, up to block end, the hashes by which a
// later prompt finds them.
func (x *call) learn(t *chainTable, end int) {
	ch, size := x.chain, t.blockTokens
	h := x.promptHash
	if from := ch.end(); from > x.promptTokens/size {
		h = ch.hashes[from-ch.start-1] ^ ch.saltHash
	}
	block := make([]int32, 0, size)
	for b := ch.end(); b < end; b++ {
		block = block[:0]
		at := b*size - x.promptTokens // the block's first token, counted in output tokens
		if at < 0 {
			block = append(block, x.promptTail...)
			at = 0
		}
		block = x.sampler.appendTokens(block, at, at+size-len(block))
		h = hashBlock(h, block)
		t.extend(ch, []blockHash{h ^ ch.saltHash}, block)
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
			if x.request.Stream {
				x.generated = max(x.generated, e.OutputTokens)
				signal(x)
			}
		case instance.Finished:
			x.generated = e.OutputTokens
			x.event = *e
			c.latency.observeEnd(x, e)
			c.end(x)
		case instance.Preempted:
			// The model counts it; the reader only sees a pause.
		}
	}
}

// progress tells streaming calls about tokens that make a chunk.
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
		signal(x)
	}
}

// wake is the timer.
func (c *core) wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
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
	if c.closed {
		return
	}
	now := time.Now()
	due := time.Time{}
	if at, ok := c.model.NextEvent(); ok {
		// A little late rather than a little early: early would find nothing.
		delay := float64(at-c.engineNow())/c.cfg.TimeScale + float64(time.Microsecond)
		due = now.Add(time.Duration(min(delay, float64(maxDelay))))
	}
	if len(c.streams) > 0 {
		if look := c.looked.Add(c.cfg.StreamTick); due.IsZero() || look.Before(due) {
			due = look
		}
	}
	if c.log != nil {
		c.log.flush(c.steps)
		if len(c.calls) > 0 {
			if look := c.log.decodedAt.Add(c.cfg.StreamTick); due.IsZero() || look.Before(due) {
				due = look
			}
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

// maxDelay is the longest sleep; an earlier wake finds nothing and sleeps again.
const maxDelay = 24 * time.Hour

// close refuses new calls and aborts those in flight.
func (c *core) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	c.advance()
	ids := make([]uint64, 0, len(c.calls))
	for id := range c.calls {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		c.abortLocked(c.calls[id])
	}
	c.closed = true
	c.timer.Stop()
	if c.log != nil {
		c.log.publisher.Close()
	}
}

// look runs f on the up-to-date model.
func (c *core) look(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.advance()
	}
	f()
	if !c.closed {
		c.arm()
	}
}
