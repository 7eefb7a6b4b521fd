package kvevents

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
	"golang.org/x/sync/semaphore"
)

const (
	// maxMessageBytes bounds one ZeroMQ message over all its frames. A batch of
	// 100,000 tokens takes 0.6 MB.
	maxMessageBytes = 32 << 20
	maxFrames       = 16
	// The inbox holds what arrives while a replay runs. Beyond it the socket is not
	// read, the publisher drops at its high-water mark, and the gap is found.
	inboxMessages = 1024
	inboxBytes    = 2 * maxMessageBytes
	greetingBytes = 64
	maxHandshakes = 8
)

var errTooLarge = fmt.Errorf("message of more than %d bytes", maxMessageBytes)

// endpointOf returns network and address of a rank's socket.
func endpointOf(endpoint string, rank int, listen bool) (network, address string, err error) {
	scheme, rest, ok := strings.Cut(endpoint, "://")
	switch {
	case ok && scheme == "ipc" && rest != "":
		if rank > 0 {
			return "", "", fmt.Errorf("endpoint %q: ranks need ports", endpoint)
		}
		return "unix", rest, nil
	case !ok || scheme != "tcp":
		return "", "", fmt.Errorf("endpoint %q is neither tcp://host:port nor ipc://path", endpoint)
	}
	host, portText, err := net.SplitHostPort(rest)
	if err != nil {
		return "", "", fmt.Errorf("endpoint %q: %w", endpoint, err)
	}
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil || port == 0 || port+uint64(rank) > 65535 {
		return "", "", fmt.Errorf("endpoint %q: no port for rank %d", endpoint, rank)
	}
	if host == "*" {
		host = ""
	}
	if host == "" && !listen {
		return "", "", fmt.Errorf("endpoint %q names no host to connect to", endpoint)
	}
	return "tcp", net.JoinHostPort(host, strconv.FormatUint(port+uint64(rank), 10)), nil
}

// guard stands between a connection and the ZMTP reader, which allocates as much as
// a frame header asks for: it looks at each header first. It also saves the reader's
// three system calls for every frame.
type guard struct {
	net.Conn
	in      *bufio.Reader
	left    uint64 // bytes that may pass unseen: greeting, header and body of a frame
	message uint64 // bytes of the message so far
	frames  int
}

func newGuard(conn net.Conn) *guard {
	return &guard{Conn: conn, in: bufio.NewReaderSize(conn, 64<<10), left: greetingBytes}
}

// The bits of a ZMTP frame's first byte.
const (
	flagMore = 1
	flagLong = 2
)

// Read implements net.Conn.
func (g *guard) Read(p []byte) (int, error) {
	if g.left == 0 {
		if err := g.header(); err != nil {
			return 0, err
		}
	}
	if uint64(len(p)) > g.left {
		p = p[:g.left]
	}
	n, err := g.in.Read(p)
	g.left -= uint64(n)
	return n, err
}

func (g *guard) header() error {
	head, err := g.in.Peek(2)
	if err != nil {
		return err
	}
	flags, size, length := head[0], uint64(head[1]), uint64(2)
	if flags&flagLong != 0 {
		if head, err = g.in.Peek(9); err != nil {
			return err
		}
		size, length = binary.BigEndian.Uint64(head[1:]), 9
	}
	g.frames++
	if size > maxMessageBytes || g.message+size > maxMessageBytes || g.frames > maxFrames {
		return errTooLarge
	}
	g.message += size
	if flags&flagMore == 0 {
		g.message, g.frames = 0, 0
	}
	g.left = length + size
	return nil
}

// wire is one ZMTP connection.
type wire struct {
	raw  net.Conn
	zmtp *zmq4.Conn
	// cut closes the connection when its context ends; stop takes that back.
	stop func() bool
}

// shake turns a network connection into a ZMTP one, or closes it. The library's
// parser of the peer's properties indexes past their end if they are malformed, so
// that a panic here is the peer's error.
func shake(ctx context.Context, raw net.Conn, kind zmq4.SocketType, server bool, limit time.Duration) (w *wire, err error) {
	stop := context.AfterFunc(ctx, func() { raw.Close() })
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("malformed properties: %v", cause)
		}
		if err != nil {
			stop()
			raw.Close()
			w, err = nil, fmt.Errorf("ZeroMQ handshake with %s: %w", raw.RemoteAddr(), err)
		}
	}()
	if err := raw.SetDeadline(time.Now().Add(limit)); err != nil {
		return nil, err
	}
	// A DEALER of no name gets one from the ROUTER.
	zmtp, err := zmq4.Open(newGuard(raw), null.Security(), kind, nil, server, nil)
	if err != nil {
		return nil, err
	}
	if err := raw.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	return &wire{raw: raw, zmtp: zmtp, stop: stop}, nil
}

func dial(ctx context.Context, network, address string, kind zmq4.SocketType, t timing) (*wire, error) {
	dialer := net.Dialer{Timeout: t.dial}
	raw, err := dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("connecting: %w", err)
	}
	return shake(ctx, raw, kind, false, t.handshake)
}

func (w *wire) close() {
	w.stop()
	w.raw.Close()
}

func (w *wire) send(frames ...[]byte) error {
	return w.zmtp.SendMsg(zmq4.NewMsgFrom(frames...))
}

// receive returns the frames of the next message; commands are dealt with.
func (w *wire) receive() (frames [][]byte, err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("malformed command: %v", cause)
		}
	}()
	for {
		msg, err := w.zmtp.RecvMsg()
		if err != nil {
			return nil, err
		}
		if msg.Type != zmq4.CmdMsg {
			return msg.Frames, nil
		}
	}
}

// message is one batch as it came.
type message struct {
	seq     uint64
	payload []byte
}

// inbox is a bounded queue from the reader of a connection to its stream.
type inbox struct {
	messages chan message
	room     *semaphore.Weighted
}

func newInbox() *inbox {
	return &inbox{messages: make(chan message, inboxMessages), room: semaphore.NewWeighted(inboxBytes)}
}

func (b *inbox) put(ctx context.Context, m message) error {
	if err := b.room.Acquire(ctx, int64(len(m.payload))); err != nil {
		return err
	}
	select {
	case b.messages <- m:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (b *inbox) release(m message) { b.room.Release(int64(len(m.payload))) }

// readInto reads batches until the connection breaks or ctx ends. A message that
// is no batch is counted; if a batch was meant, its number will be missing.
func (w *wire) readInto(ctx context.Context, box *inbox, topic string, counts *status) error {
	for {
		frames, err := w.receive()
		if err != nil {
			return fmt.Errorf("reading: %w", err)
		}
		m, ok := parseBatch(frames)
		if !ok {
			counts.badInput.Add(1)
			continue
		}
		if !strings.HasPrefix(string(frames[0]), topic) {
			counts.otherTopics.Add(1)
			continue
		}
		if err := box.put(ctx, m); err != nil {
			return err
		}
	}
}

// parseBatch reads topic, sequence number and payload.
func parseBatch(frames [][]byte) (message, bool) {
	if len(frames) != 3 || len(frames[1]) != 8 {
		return message{}, false
	}
	return message{seq: binary.BigEndian.Uint64(frames[1]), payload: frames[2]}, true
}

// link makes the connections of one rank, by dialling or by listening.
type link struct {
	sub              *Subscriber
	network, address string
	listen           bool

	listener net.Listener
	arrived  chan *wire // the newest publisher that connected, if not yet taken
	pending  *wire      // the one that ended the session before
	accepts  sync.WaitGroup
	stop     context.CancelFunc
}

func newLink(s *Subscriber, rank int) *link {
	l := &link{sub: s, listen: s.cfg.Bind, arrived: make(chan *wire, 1), stop: func() {}}
	// New has checked it.
	l.network, l.address, _ = endpointOf(s.cfg.Endpoint, rank, s.cfg.Bind)
	return l
}

// open returns the next connection. It gives up after a while so that the caller
// can act on the silence.
func (l *link) open(ctx context.Context) (*wire, error) {
	if !l.listen {
		return dial(ctx, l.network, l.address, zmq4.Sub, l.sub.timing)
	}
	if w := l.pending; w != nil {
		l.pending = nil
		return w, nil
	}
	if l.listener == nil {
		listener, err := net.Listen(l.network, l.address)
		if err != nil {
			return nil, fmt.Errorf("listening for the publisher: %w", err)
		}
		l.listener = listener
		ctx, cancel := context.WithCancel(ctx)
		l.stop = cancel
		l.accepts.Go(func() { l.accept(ctx, listener) })
	}
	patience := time.NewTimer(l.sub.timing.lost)
	defer patience.Stop()
	select {
	case w := <-l.arrived:
		return w, nil
	case <-patience.C:
		return nil, errors.New("no publisher has connected")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// accept shakes hands with whoever connects, several at a time so that a silent peer
// keeps nobody out. The newest publisher counts: when an engine's host dies, its old
// connection looks alive for minutes.
func (l *link) accept(ctx context.Context, listener net.Listener) {
	slots := make(chan struct{}, maxHandshakes)
	pause := backoff{first: l.sub.timing.backoff, most: l.sub.timing.maxDelay}
	for {
		raw, err := listener.Accept()
		if ctx.Err() != nil {
			if err == nil {
				raw.Close()
			}
			return
		}
		if err != nil {
			// Out of file descriptors, say: it may pass.
			if !pause.wait(ctx) {
				return
			}
			continue
		}
		pause.reset()
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			raw.Close()
			return
		}
		l.accepts.Go(func() {
			defer func() { <-slots }()
			w, err := shake(ctx, raw, zmq4.Sub, true, l.sub.timing.handshake)
			if err != nil {
				l.sub.cfg.Logger.Info("KV event publisher refused", "instance", l.sub.cfg.Instance, "error", err)
				return
			}
			l.arrive(w)
		})
	}
}

func (l *link) arrive(w *wire) {
	for {
		select {
		case l.arrived <- w:
			return
		default:
		}
		select {
		case older := <-l.arrived:
			older.close()
		default:
		}
	}
}

func (l *link) close() {
	l.stop()
	if l.listener != nil {
		l.listener.Close()
	}
	l.accepts.Wait()
	if l.pending != nil {
		l.pending.close()
	}
	select {
	case w := <-l.arrived:
		w.close()
	default:
	}
}

// backoff waits longer each time, half of it by chance.
type backoff struct{ first, most, next time.Duration }

func (b *backoff) reset() { b.next = 0 }

// wait returns false when ctx ends first.
func (b *backoff) wait(ctx context.Context) bool {
	if b.next == 0 {
		b.next = b.first
	}
	delay := b.next/2 + rand.N(b.next/2+1)
	b.next = min(2*b.next, b.most)
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
