// Package publish sends a simulated engine's KV cache events as vLLM and SGLang
// do: batches in MessagePack on a ZeroMQ PUB socket, numbered from 0, with a
// bounded history that a ROUTER socket replays. It can lose, repeat, delay and
// swap batches on their way to subscribers, which the history does not know of.
//
// It knows nothing of how blocks come to be cached, and does not wait for
// subscribers: who connects late asks for a replay.
package publish

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
)

// Config says where and how events are published.
type Config struct {
	// Endpoint is such as tcp://127.0.0.1:5557; see AtRank. Port 0 takes a free one.
	Endpoint string
	// Connect makes the PUB socket connect to a subscriber that has bound Endpoint,
	// as vLLM does unless the endpoint has a wildcard. Otherwise it binds.
	Connect bool
	// ReplayEndpoint is bound for replays; empty for none.
	ReplayEndpoint string
	// Topic is the first frame of each message.
	Topic    string
	Encoding Encoding
	// OldReplies leaves the topic out of replies to a replay, as vLLM before 0.26.
	OldReplies bool
	// HistoryBatches is how many batches can be replayed. Default 10,000.
	HistoryBatches int
	// Rank is the data-parallel rank whose blocks these are.
	Rank int
	// Fate is asked what becomes of each batch; nil delivers all. It is called from
	// one goroutine, in order of sequence.
	Fate func() Fate
}

// Fate is what becomes of a batch on its way to subscribers. Zero: it arrives.
type Fate struct {
	Lost      bool
	Duplicate bool
	// Swapped lets the next batch overtake this one.
	Swapped bool
	// Delay holds up this batch, and what follows behind it.
	Delay time.Duration
}

// sendQueueBatches is how many batches may wait for slow subscribers before ZeroMQ
// drops more; vLLM's default.
const sendQueueBatches = 100_000

// swapWait is how long a swapped batch waits for one to overtake it.
const swapWait = time.Second

// Publisher is the sockets and the history of one rank.
type Publisher struct {
	cfg      Config
	pub      zmq4.Socket
	router   zmq4.Socket
	endpoint string
	replayAt string
	cancel   context.CancelFunc
	done     sync.WaitGroup

	mu      sync.Mutex
	queue   []batch
	ready   chan struct{} // holds a token when queue is not empty
	history []message     // a ring: message n is at n modulo its size
	next    uint64        // sequence number of the next batch to be encoded
	total   uint64        // batches handed over
}

type batch struct {
	at     time.Time
	events []Event
}

type message struct {
	sequence uint64
	payload  []byte
}

// New opens the sockets and starts to serve.
func New(cfg Config) (*Publisher, error) {
	if cfg.HistoryBatches == 0 {
		cfg.HistoryBatches = 10_000
	}
	if cfg.HistoryBatches < 0 || cfg.Encoding > SGLang || cfg.Rank < 0 {
		return nil, fmt.Errorf("publishing KV events: a history of %d batches, %s, rank %d", cfg.HistoryBatches, cfg.Encoding, cfg.Rank)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &Publisher{cfg: cfg, cancel: cancel, ready: make(chan struct{}, 1), history: make([]message, cfg.HistoryBatches)}
	quiet := zmq4.WithLogger(log.New(discard{}, "", 0))
	p.pub = zmq4.NewPub(ctx, quiet, zmq4.WithDialerMaxRetries(-1), zmq4.WithAutomaticReconnect(cfg.Connect))
	// The option exists, so setting it cannot fail.
	_ = p.pub.SetOption(zmq4.OptionHWM, sendQueueBatches)
	if err := p.open(ctx, quiet); err != nil {
		p.Close()
		return nil, fmt.Errorf("publishing KV events: %w", err)
	}
	p.done.Go(func() { p.send(ctx) })
	return p, nil
}

type discard struct{}

func (discard) Write(b []byte) (int, error) { return len(b), nil }

func (p *Publisher) open(ctx context.Context, quiet zmq4.Option) error {
	var err error
	endpoint := p.cfg.Endpoint
	if p.cfg.Connect {
		p.endpoint = endpoint
		// Dial tries until somebody listens there.
		p.done.Go(func() { _ = p.pub.Dial(endpoint) })
	} else if p.endpoint, err = listen(p.pub, endpoint); err != nil {
		return err
	}
	if p.cfg.ReplayEndpoint == "" {
		return nil
	}
	p.router = zmq4.NewRouter(ctx, quiet)
	if p.replayAt, err = listen(p.router, p.cfg.ReplayEndpoint); err != nil {
		return err
	}
	p.done.Go(p.serveReplays)
	return nil
}

// listen binds a socket and returns the endpoint that it got.
func listen(socket zmq4.Socket, endpoint string) (string, error) {
	if err := socket.Listen(endpoint); err != nil {
		return "", fmt.Errorf("binding %s: %w", endpoint, err)
	}
	return "tcp://" + socket.Addr().String(), nil
}

// AtRank is where a rank publishes: rank r uses the port + r. A port of 0 stays, and
// an empty endpoint stays empty; a host of * is all of the machine's.
func AtRank(endpoint string, rank int) (string, error) {
	if endpoint == "" {
		return "", nil
	}
	host, port, err := split(endpoint)
	if err != nil {
		return "", err
	}
	if port > 0 {
		port += rank
	}
	if host == "*" {
		host = "0.0.0.0"
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(port)), nil
}

// FreePort says that an endpoint asks for any free port.
func FreePort(endpoint string) bool {
	_, port, err := split(endpoint)
	return err == nil && port == 0
}

func split(endpoint string) (host string, port int, err error) {
	address, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", 0, fmt.Errorf("endpoint %q: want tcp://host:port", endpoint)
	}
	host, text, err := net.SplitHostPort(address)
	if err != nil {
		return "", 0, fmt.Errorf("endpoint %q: %w", endpoint, err)
	}
	number, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("endpoint %q: the port is no number up to 65535", endpoint)
	}
	return host, int(number), nil
}

// Endpoint is what subscribers connect to, or what this one connects to.
func (p *Publisher) Endpoint() string { return p.endpoint }

// ReplayEndpoint is where replays are asked for, empty if nowhere.
func (p *Publisher) ReplayEndpoint() string { return p.replayAt }

// Published is the number of batches handed over so far: when all of them
// have been sent, the next one has this sequence number.
func (p *Publisher) Published() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.total
}

// Publish hands a batch over; it never blocks. The events must not be changed afterwards.
func (p *Publisher) Publish(at time.Time, events []Event) {
	p.mu.Lock()
	p.queue = append(p.queue, batch{at, events})
	p.total++
	p.mu.Unlock()
	select {
	case p.ready <- struct{}{}:
	default:
	}
}

// Close drops what has not been sent and closes the sockets with all connections. The
// library leaves one parked goroutine behind for each PUB socket.
func (p *Publisher) Close() {
	p.cancel()
	// An error of closing means that a connection was gone already.
	_ = p.pub.Close()
	if p.router != nil {
		_ = p.router.Close()
	}
	p.done.Wait()
}

// send encodes what is handed over and sends it.
func (p *Publisher) send(ctx context.Context) {
	encoder := newEncoder(p.cfg.Encoding, p.cfg.Rank)
	var swapped *message // waits for the next one to overtake it
	overdue := time.NewTimer(time.Hour)
	overdue.Stop()
	defer overdue.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-overdue.C:
			p.write(*swapped)
			swapped = nil
			continue
		case <-p.ready:
		}
		p.mu.Lock()
		queue := p.queue
		p.queue = nil
		p.mu.Unlock()
		for _, b := range queue {
			m := p.record(encoder.batch(b.at, b.events))
			fate := p.fate()
			if fate.Delay > 0 && !sleep(ctx, fate.Delay) {
				return
			}
			switch {
			case fate.Lost:
				continue
			case fate.Swapped && swapped == nil:
				swapped = &m
				overdue.Reset(swapWait)
				continue
			}
			p.write(m)
			if fate.Duplicate {
				p.write(m)
			}
			if swapped != nil {
				overdue.Stop()
				p.write(*swapped)
				swapped = nil
			}
		}
	}
}

func (p *Publisher) fate() Fate {
	if p.cfg.Fate == nil {
		return Fate{}
	}
	return p.cfg.Fate()
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// record numbers a batch and keeps it for replays.
func (p *Publisher) record(payload []byte) message {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := message{p.next, payload}
	p.history[p.next%uint64(len(p.history))] = m
	p.next++
	return m
}

func (p *Publisher) write(m message) {
	// PUB drops what it cannot deliver; an error means that the socket is closed.
	_ = p.pub.SendMulti(zmq4.NewMsgFrom([]byte(p.cfg.Topic), sequenceBytes(m.sequence), m.payload))
}

func sequenceBytes(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// endOfReplay is the sequence number of the message that ends a replay.
const endOfReplay = ^uint64(0)

// serveReplays answers [identity, "", first sequence number] with the kept batches
// from there on. Like the engines it ignores anything else, and
// does not say when the history begins later than was asked for.
func (p *Publisher) serveReplays() {
	for {
		request, err := p.router.Recv()
		if err != nil {
			if errors.Is(err, context.Canceled) {
				return
			}
			continue
		}
		if len(request.Frames) != 3 || len(request.Frames[2]) != 8 {
			continue
		}
		identity := request.Frames[0]
		for _, m := range p.since(binary.BigEndian.Uint64(request.Frames[2])) {
			p.reply(identity, m)
		}
		p.reply(identity, message{endOfReplay, nil})
	}
}

func (p *Publisher) reply(identity []byte, m message) {
	frames := [][]byte{identity, {}, []byte(p.cfg.Topic), sequenceBytes(m.sequence), m.payload}
	if p.cfg.OldReplies {
		frames = append(frames[:2], frames[3:]...)
	}
	// An error means that the asker is gone.
	_ = p.router.SendMulti(zmq4.NewMsgFrom(frames...))
}

// since lists the kept messages from a sequence number on.
func (p *Publisher) since(first uint64) []message {
	p.mu.Lock()
	defer p.mu.Unlock()
	size := uint64(len(p.history))
	if p.next > size {
		first = max(first, p.next-size)
	}
	var list []message
	for n := first; n < p.next; n++ {
		list = append(list, p.history[n%size])
	}
	return list
}
