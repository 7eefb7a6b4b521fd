// Package kvevents follows the KV-cache event stream of one inference engine and
// tells the router which blocks that engine holds.
//
// It subscribes over ZeroMQ to what vLLM and SGLang publish, decodes every
// encoding in use, maps the engine's block hashes to the router's own chain hashes
// (package router/prefix), and passes on router.BlocksStored, BlocksRemoved and
// BlocksCleared. Its one rule is that the router may know too little of a cache
// and never too much: whenever events may have been lost and cannot be had again,
// everything told so far is taken back and the picture is built anew.
//
// It does not recompute the engines' own hashes, does not predict evictions, keeps
// nothing on disk, never publishes, and serves GPU blocks of full attention only.
//
// # Wire libraries
//
// ZMTP, the wire protocol of ZeroMQ, is github.com/go-zeromq/zmq4's Conn. That
// library's Socket is not used: it allocates whatever length a frame header
// claims (2^62 bytes end the process), shakes hands inside its accept loop (one
// silent peer keeps all others out), leaves a goroutine behind if its queue is
// full when the context ends, and reconnects (WithAutomaticReconnect) without
// telling, while a subscriber has to know that events may be missing. A SUB that
// binds works in it; the other points are why socket.go owns connections itself.
//
// MessagePack is github.com/vmihailenco/msgpack/v5's token-level decoder, which
// reaches several times the speed asked for (BenchmarkWireToIndex), so there is no
// reader of our own. Only Skip is ours, because the library's recurses as deep as
// the input asks.
package kvevents

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"holdfast/router"
	"holdfast/router/prefix"
)

// Dialect names the publisher whose positional fields are read.
type Dialect uint8

// VLLM and SGLang differ in the order of fields in the array encoding.
const (
	VLLM Dialect = iota
	SGLang
)

// String names the dialect.
func (d Dialect) String() string {
	switch d {
	case VLLM:
		return "vllm"
	case SGLang:
		return "sglang"
	}
	return fmt.Sprintf("dialect %d", uint8(d))
}

// Config says what to follow. Instance, Endpoint, BlockTokens, PolicyVersion and
// Tell are required.
type Config struct {
	Instance router.InstanceID
	// Endpoint is "tcp://host:port" of rank 0, or "ipc://path" with one rank.
	Endpoint string
	// Bind listens at Endpoint instead of connecting to it, for publishers that
	// connect: llm-d's simulator always, vLLM when its endpoint has no wildcard.
	Bind bool
	// ReplayEndpoint is the ROUTER socket of rank 0's replay, empty if there is
	// none. Without one, every lost batch and every reconnect costs all locations.
	ReplayEndpoint string
	// Topic is the prefix to subscribe to; empty takes all.
	Topic   string
	Dialect Dialect
	// BlockTokens is the router's block size in tokens.
	BlockTokens int
	// Ranks is the number of data-parallel ranks; rank r publishes at port + r and
	// replays at port + r. 0 means 1.
	Ranks int
	// PolicyVersion is the salt of a chain that names none, at the time its first
	// block arrives (see prefix.NewHasher). It must not block.
	PolicyVersion func() int64
	// Tell passes an event on. The event and its slices are the callee's to keep.
	// Events of one Subscriber are told one at a time and in order; an error means
	// that the event was not taken, and everything is then told anew.
	Tell func(context.Context, router.Event) error
	// MaxBlocks bounds the known blocks over all ranks and groups, and with them the
	// memory (about 100 bytes each); 0 means 2,000,000.
	MaxBlocks int
	Logger    *slog.Logger
}

func (c Config) validate() (Config, error) {
	var problems []error
	require := func(ok bool, problem string) {
		if !ok {
			problems = append(problems, errors.New(problem))
		}
	}
	if c.Ranks == 0 {
		c.Ranks = 1
	}
	if c.MaxBlocks == 0 {
		c.MaxBlocks = 2_000_000
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	require(c.Instance != "", "no instance")
	require(c.BlockTokens > 0, "block size is not positive")
	require(c.Ranks > 0 && c.Ranks <= maxRanks, fmt.Sprintf("ranks are not within 1 to %d", maxRanks))
	require(c.PolicyVersion != nil, "no policy version")
	require(c.Tell != nil, "nobody to tell")
	require(c.MaxBlocks >= c.Ranks, "fewer blocks than ranks")
	require(c.Dialect == VLLM || c.Dialect == SGLang, "unknown dialect")
	for rank := range min(max(c.Ranks, 1), maxRanks) {
		if _, _, err := endpointOf(c.Endpoint, rank, c.Bind); err != nil {
			problems = append(problems, err)
			break
		}
		if c.ReplayEndpoint == "" {
			continue
		}
		if _, _, err := endpointOf(c.ReplayEndpoint, rank, false); err != nil {
			problems = append(problems, fmt.Errorf("replay: %w", err))
			break
		}
	}
	return c, errors.Join(problems...)
}

const maxRanks = 256

// timing holds the durations that tests shorten.
type timing struct {
	dial, handshake time.Duration
	// replayReply is the longest wait for one replayed batch, replay for all.
	replayReply, replay time.Duration
	// probe is how often a quiet stream asks the replay socket whether it missed
	// something, which is the only way to see that the last batch was lost.
	probe time.Duration
	// lost is how long locations outlive their connection.
	lost              time.Duration
	backoff, maxDelay time.Duration
}

var defaultTiming = timing{
	dial: 5 * time.Second, handshake: 10 * time.Second,
	replayReply: 5 * time.Second, replay: 5 * time.Minute,
	probe: 5 * time.Second, lost: 10 * time.Second,
	backoff: 50 * time.Millisecond, maxDelay: 5 * time.Second,
}

// Subscriber follows one engine instance. Run it once; Health and Clear may be
// called at any time from any goroutine.
type Subscriber struct {
	cfg    Config
	timing timing
	now    func() time.Time
	status status

	// mu serialises batches, clears and what is told of them. It is not held while
	// waiting for an engine.
	mu      sync.Mutex
	streams []*stream
	// clearOwed: the router could not be told what changed, so that it must first
	// hear that nothing is cached.
	clearOwed bool
	clearedAt time.Time
}

// New checks the configuration; nothing is opened before Run.
func New(cfg Config) (*Subscriber, error) {
	cfg, err := cfg.validate()
	if err != nil {
		return nil, fmt.Errorf("configuring KV events of %s: %w", cfg.Instance, err)
	}
	s := &Subscriber{cfg: cfg, timing: defaultTiming, now: time.Now}
	s.status.init(cfg.Ranks, s.now())
	for rank := range cfg.Ranks {
		s.streams = append(s.streams, newStream(s, rank))
	}
	return s, nil
}

// Run follows all ranks until ctx ends and returns its error, when nothing that it
// started is left. Whatever the engine does, it reconnects and goes on.
func (s *Subscriber) Run(ctx context.Context) error {
	var ranks sync.WaitGroup
	for _, st := range s.streams {
		ranks.Go(func() { s.follow(ctx, st) })
	}
	ranks.Wait()
	return fmt.Errorf("following KV events of %s: %w", s.cfg.Instance, context.Cause(ctx))
}

// Clear is for the caller that ordered the engine to reset its cache: all blocks
// are forgotten at once, because an idle engine publishes nothing. Call it when the
// engine has confirmed the reset and before it may work again: batches that it
// published before this call and that arrive later are not applied. The error is
// Tell's; the clear is then repeated before anything else is told.
func (s *Subscriber) Clear(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clearedAt = s.now()
	for _, st := range s.streams {
		st.table.forget()
		if st.known {
			s.status.trust(st.rank, true, "")
		}
	}
	s.status.clears.Add(1)
	return s.tellCleared(ctx)
}

// Retell tells all that is known anew, after a clear. It is for the caller whose
// router forgot the instance (it left and joined again) while the engine and its
// stream went on: no event would show that.
func (s *Subscriber) Retell(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.tellCleared(ctx); err != nil {
		return err
	}
	for _, st := range s.streams {
		if err := st.table.each(chunkBlocks, func(group int, blocks []prefix.Hash) error {
			return s.cfg.Tell(ctx, &router.BlocksStored{Instance: s.cfg.Instance, Rank: st.rank, Group: group, Blocks: blocks})
		}); err != nil {
			s.clearOwed = true
			return fmt.Errorf("telling what %s holds: %w", s.cfg.Instance, err)
		}
	}
	return nil
}

// tellCleared tells the router that the instance holds nothing. The caller holds mu.
func (s *Subscriber) tellCleared(ctx context.Context) error {
	s.clearOwed = true
	if err := s.cfg.Tell(ctx, &router.BlocksCleared{Instance: s.cfg.Instance}); err != nil {
		return fmt.Errorf("telling that %s was cleared: %w", s.cfg.Instance, err)
	}
	s.clearOwed = false
	return nil
}

// follow keeps one rank connected until ctx ends.
func (s *Subscriber) follow(ctx context.Context, st *stream) {
	link := newLink(s, st.rank)
	defer link.close()
	delay := backoff{first: s.timing.backoff, most: s.timing.maxDelay}
	for {
		conn, err := link.open(ctx)
		if err == nil {
			var frames int
			frames, err = s.session(ctx, st, conn, link)
			if frames > 0 {
				delay.reset()
			}
		}
		if ctx.Err() != nil {
			return
		}
		// Once for each interruption; the attempts that follow show in the health.
		level := slog.LevelDebug
		if st.lostAt.IsZero() {
			level = slog.LevelWarn
		}
		s.cfg.Logger.Log(ctx, level, "KV event stream interrupted", "instance", s.cfg.Instance, "rank", st.rank, "error", err)
		st.disconnected(ctx, err)
		if !delay.wait(ctx) {
			return
		}
	}
}

var errSuperseded = errors.New("the publisher connected anew")

// session serves one connection until it breaks, and reports how many batches came.
func (s *Subscriber) session(ctx context.Context, st *stream, conn *wire, link *link) (frames int, err error) {
	ctx, cancel := context.WithCancel(ctx)
	inbox := newInbox()
	var reader sync.WaitGroup
	defer reader.Wait()
	defer conn.close()
	defer cancel()
	if err := conn.send([]byte("\x01" + s.cfg.Topic)); err != nil {
		return 0, fmt.Errorf("subscribing: %w", err)
	}
	var readErr error
	reader.Go(func() {
		readErr = conn.readInto(ctx, inbox, s.cfg.Topic, &s.status)
		close(inbox.messages)
	})
	if err := st.connected(ctx); err != nil {
		return 0, err
	}
	probe := time.NewTicker(s.timing.probe)
	defer probe.Stop()
	quiet := true
	for {
		select {
		case m, ok := <-inbox.messages:
			if !ok {
				return frames, readErr
			}
			frames++
			quiet = false
			err := st.frame(ctx, m.seq, m.payload)
			inbox.release(m)
			if err != nil {
				return frames, err
			}
		case <-probe.C:
			if err := st.probe(ctx, quiet); err != nil {
				return frames, err
			}
			quiet = true
		case link.pending = <-link.arrived:
			return frames, errSuperseded
		case <-ctx.Done():
			return frames, ctx.Err()
		}
	}
}
