package kvevents

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"

	"holdfast/router"
)

// patience bounds every wait of the socket tests; none takes a noticeable part of it.
const patience = time.Minute

// publisher is the engine's end of one subscription: a PUB that knows when the other
// side has subscribed, which the library's cannot say.
type publisher struct {
	t     *testing.T
	conn  *zmq4.Conn
	raw   net.Conn
	topic string // as subscribed
}

func publish(t *testing.T, raw net.Conn, server bool) *publisher {
	t.Helper()
	if err := raw.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	conn, err := zmq4.Open(raw, null.Security(), zmq4.Pub, nil, server, nil)
	if err != nil {
		t.Fatal(err)
	}
	msg, err := conn.RecvMsg()
	if err != nil || len(msg.Frames) != 1 || msg.Frames[0][0] != 1 {
		t.Fatalf("subscription: %v %v", msg, err)
	}
	p := &publisher{t: t, conn: conn, raw: raw, topic: string(msg.Frames[0][1:])}
	t.Cleanup(p.close)
	return p
}

func (p *publisher) close() { p.raw.Close() }

func (p *publisher) send(seq uint64, payload []byte) {
	p.t.Helper()
	p.frames([]byte("kv@10.0.0.1@m"), binary.BigEndian.AppendUint64(nil, seq), payload)
}

func (p *publisher) frames(frames ...[]byte) {
	p.t.Helper()
	if err := p.conn.SendMsg(zmq4.NewMsgFrom(frames...)); err != nil {
		p.t.Fatal(err)
	}
}

func listen(t *testing.T) (net.Listener, string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, "tcp://" + l.Addr().String()
}

func accept(t *testing.T, l net.Listener) *publisher {
	t.Helper()
	return publish(t, acceptRaw(t, l), true)
}

func acceptRaw(t *testing.T, l net.Listener) net.Conn {
	t.Helper()
	if err := l.(*net.TCPListener).SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	raw, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// freeEndpoint is one that nobody listens at. Its port is below those that the kernel
// gives to others' connections, so that it stays free until the test takes it.
func freeEndpoint(t *testing.T) string {
	t.Helper()
	for range 1_000 {
		l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", 10_000+rand.IntN(10_000)))
		if err != nil {
			continue
		}
		defer l.Close()
		return "tcp://" + l.Addr().String()
	}
	t.Fatal("no port is free")
	return ""
}

// reach connects to an endpoint that is about to be opened.
func reach(t *testing.T, endpoint string) net.Conn {
	t.Helper()
	for deadline := time.Now().Add(patience); ; runtime.Gosched() {
		raw, err := net.Dial("tcp", strings.TrimPrefix(endpoint, "tcp://"))
		if err == nil {
			return raw
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// replayShape is how a ROUTER answers.
type replayShape struct {
	name  string
	topic bool // since vLLM 0.26
}

var replayShapes = []replayShape{{"without topic", false}, {"with topic", true}}

// replayServer answers replay requests from a history that tests change.
type replayServer struct {
	endpoint string
	shape    replayShape
	mu       sync.Mutex
	history  history
	asked    chan uint64
}

func serveReplay(t *testing.T, shape replayShape) *replayServer {
	t.Helper()
	l, endpoint := listen(t)
	r := &replayServer{endpoint: endpoint, shape: shape, asked: make(chan uint64, 100)}
	go func() {
		for {
			raw, err := l.Accept()
			if err != nil {
				return
			}
			go r.answer(raw)
		}
	}()
	return r
}

func (r *replayServer) set(first uint64, batches ...[]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.history = history{first: first, batches: batches}
}

// next is the first number of the next request that was answered.
func (r *replayServer) next(t *testing.T) uint64 {
	t.Helper()
	select {
	case from := <-r.asked:
		return from
	case <-time.After(patience):
		t.Fatal("no replay was asked for")
	}
	return 0
}

func (r *replayServer) answer(raw net.Conn) {
	defer raw.Close()
	conn, err := zmq4.Open(raw, null.Security(), zmq4.Router, nil, true, nil)
	if err != nil {
		return
	}
	msg, err := conn.RecvMsg()
	if err != nil || len(msg.Frames) != 2 || len(msg.Frames[0]) != 0 || len(msg.Frames[1]) != 8 {
		return
	}
	from := binary.BigEndian.Uint64(msg.Frames[1])
	r.mu.Lock()
	h := r.history
	r.mu.Unlock()
	reply := func(topic string, seq uint64, payload []byte) error {
		frames := [][]byte{{}, binary.BigEndian.AppendUint64(nil, seq), payload}
		if r.shape.topic {
			frames = [][]byte{{}, []byte(topic), frames[1], payload}
		}
		return conn.SendMsg(zmq4.NewMsgFrom(frames...))
	}
	_ = h.replay(context.Background(), from, func(seq uint64, payload []byte) error { return reply("kv@", seq, payload) })
	_ = reply("", math.MaxUint64, nil)
	r.asked <- from
	_, _ = conn.RecvMsg() // until the other side has read all and hangs up
}

// running is a Subscriber at work.
type running struct {
	*Subscriber
	t    *testing.T
	v    *view
	stop func()
}

func start(t *testing.T, change func(*Config)) *running {
	t.Helper()
	v := newView()
	cfg := testConfig(v)
	change(&cfg)
	s := newSubscriber(t, cfg)
	s.timing.backoff, s.timing.maxDelay = time.Millisecond, 10*time.Millisecond
	s.timing.probe = time.Hour
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Run(ctx)
	}()
	r := &running{Subscriber: s, t: t, v: v, stop: func() {
		cancel()
		select {
		case <-done:
		case <-time.After(patience):
			stacks := make([]byte, 1<<20)
			t.Errorf("Run did not return:\n%s", stacks[:runtime.Stack(stacks, true)])
		}
	}}
	t.Cleanup(r.stop)
	return r
}

// await returns when the router was told an event of this kind.
func await[E router.Event](r *running) E {
	r.t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case ev := <-r.v.told:
			if found, ok := ev.(E); ok {
				return found
			}
		case <-timeout:
			r.t.Fatalf("nothing told: %+v", r.Health())
		}
	}
}
