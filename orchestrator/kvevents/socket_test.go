package kvevents

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"

	"holdfast/router"
)

// TestFollowCapturedStream in both directions of connecting, with the recorded bytes
// of both encodings: what is told at last is what the recording says.
func TestFollowCapturedStream(t *testing.T) {
	first := run(100, 48)
	second := run(500, 48)
	third := append(run(900, 48), run(2000, 16)...)
	for _, name := range []string{"kv_events_full_array.txt", "kv_events_full_map.txt"} {
		for _, bind := range []bool{false, true} {
			messages := readCapture(t, name)
			var r *running
			var pub *publisher
			if bind {
				endpoint := freeEndpoint(t)
				r = start(t, func(c *Config) { c.Endpoint, c.Bind, c.Topic = endpoint, true, "kv@127" })
				pub = publish(t, reach(t, endpoint), false)
			} else {
				l, endpoint := listen(t)
				r = start(t, func(c *Config) { c.Endpoint, c.Topic = endpoint, "kv@127" })
				pub = accept(t, l)
			}
			if pub.topic != "kv@127" {
				t.Fatalf("subscribed to %q", pub.topic)
			}
			pub.frames(messages[0].frames...)
			stored := await[*router.BlocksStored](r)
			if want := append(ownChain(7, 16, first)[2:], ownChain(7, 16, second)...); !slices.Equal(stored.Blocks, want) || stored.Instance != "e1" {
				t.Fatalf("%s bind %v: stored %x, want %x", name, bind, stored.Blocks, want)
			}
			pub.frames(messages[1].frames...)
			removed := await[*router.BlocksRemoved](r)
			if len(removed.Blocks) != 2 {
				t.Fatalf("removed %x", removed.Blocks)
			}
			stored = await[*router.BlocksStored](r)
			if want := ownChain(7, 16, third); !slices.Equal(stored.Blocks, want) {
				t.Fatalf("stored %x, want %x", stored.Blocks, want)
			}
			pub.frames(messages[2].frames...)
			await[*router.BlocksCleared](r)
			h := r.Health()
			if !h.Trusted || h.Batches != 3 || h.Events != 9 || h.Resyncs != 0 || h.LastEventAt.IsZero() || r.v.size() != 0 {
				t.Fatalf("%+v", h)
			}
			r.stop()
		}
	}
}

// TestReplayOverSockets: first connect, gap healed, gap that the buffer no longer
// covers, in both shapes of the reply.
func TestReplayOverSockets(t *testing.T) {
	for _, shape := range replayShapes {
		t.Run(shape.name, func(t *testing.T) {
			payloads, tokens := threeBatches(t)
			replay := serveReplay(t, shape)
			replay.set(0, payloads[0])
			l, endpoint := listen(t)
			r := start(t, func(c *Config) { c.Endpoint, c.ReplayEndpoint = endpoint, replay.endpoint })
			pub := accept(t, l)
			if got := await[*router.BlocksStored](r); len(got.Blocks) != 2 {
				t.Fatalf("history: %x", got.Blocks)
			}
			replay.set(0, payloads...)
			pub.send(2, payloads[2])
			await[*router.BlocksStored](r)
			await[*router.BlocksStored](r)
			if !r.v.has(ownChain(7, 16, tokens)...) {
				t.Fatal("not healed")
			}
			if from := replay.next(t); from != 0 {
				t.Fatalf("first asked from %d", from)
			}
			if from := replay.next(t); from != 0 {
				t.Fatalf("asked from %d for batch 1, which shows batch 0 to be the one known", from)
			}
			tail := batchOf(t, 20, storedEvent(list{60}, nil, run(900, 16), 16))
			replay.set(9, tail)
			pub.send(9, tail)
			await[*router.BlocksCleared](r)
			await[*router.BlocksStored](r)
			if !r.v.has(ownChain(7, 16, run(900, 16))...) || r.v.size() != 1 {
				t.Fatalf("%d blocks", r.v.size())
			}
			pub.send(10, batchOf(t, 21, removedEvent(60)))
			await[*router.BlocksRemoved](r)
			if h := r.Health(); h.Trusted || h.Gaps != 2 || h.Resyncs != 1 || !strings.Contains(h.Reason, "beginning of the history is gone") {
				t.Fatalf("%+v", h)
			}
		})
	}
}

// TestRestartOverSockets: the engine dies with its connection and comes back empty,
// already further than it was.
func TestRestartOverSockets(t *testing.T) {
	payloads, _ := threeBatches(t)
	replay := serveReplay(t, replayShapes[1])
	replay.set(0, payloads...)
	l, endpoint := listen(t)
	r := start(t, func(c *Config) { c.Endpoint, c.ReplayEndpoint = endpoint, replay.endpoint })
	pub := accept(t, l)
	for range payloads {
		await[*router.BlocksStored](r)
	}
	anew := make([][]byte, 5)
	for i := range anew {
		anew[i] = batchOf(t, float64(100+i), storedEvent(list{100 + i}, nil, run(3000+100*i, 16), 16))
	}
	replay.set(0, anew...)
	pub.close()
	pub = accept(t, l)
	await[*router.BlocksCleared](r)
	for range anew {
		await[*router.BlocksStored](r)
	}
	pub.send(5, batchOf(t, 105, removedEvent(100)))
	await[*router.BlocksRemoved](r)
	if h := r.Health(); r.v.size() != 4 || !h.Trusted || h.Restarts != 1 || h.Connects != 2 || h.Gaps != 0 {
		t.Fatalf("%d blocks, %+v", r.v.size(), h)
	}
}

// TestNewestPublisherCounts when it connects to us: the old connection of a dead
// host looks alive for long.
func TestNewestPublisherCounts(t *testing.T) {
	endpoint := freeEndpoint(t)
	r := start(t, func(c *Config) { c.Endpoint, c.Bind = endpoint, true })
	old := publish(t, reach(t, endpoint), false)
	payloads, _ := threeBatches(t)
	old.send(0, payloads[0])
	await[*router.BlocksStored](r)
	// A peer that says nothing keeps nobody out.
	silent := reach(t, endpoint)
	defer silent.Close()
	anew := publish(t, reach(t, endpoint), false)
	await[*router.BlocksCleared](r)
	anew.send(0, batchOf(t, 50, storedEvent(list{9}, nil, run(900, 16), 16)))
	await[*router.BlocksStored](r)
	if _, err := old.conn.RecvMsg(); err == nil {
		t.Fatal("the old connection is still served")
	}
	if h := r.Health(); r.v.size() != 1 || !h.Trusted || h.Connects != 2 {
		t.Fatalf("%d blocks, %+v", r.v.size(), h)
	}
}

// TestProbeOverSockets: the lost last batch of an engine gone quiet.
func TestProbeOverSockets(t *testing.T) {
	payloads, tokens := threeBatches(t)
	replay := serveReplay(t, replayShapes[0])
	replay.set(0, payloads[:2]...)
	l, endpoint := listen(t)
	v := newView()
	cfg := testConfig(v)
	cfg.Endpoint, cfg.ReplayEndpoint = endpoint, replay.endpoint
	s := newSubscriber(t, cfg)
	s.timing.probe = time.Millisecond
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	r := &running{Subscriber: s, t: t, v: v}
	accept(t, l)
	await[*router.BlocksStored](r)
	await[*router.BlocksStored](r)
	replay.set(0, payloads...)
	await[*router.BlocksStored](r)
	if !v.has(ownChain(7, 16, tokens)...) || s.Health().Gaps != 0 {
		t.Fatalf("%+v", s.Health())
	}
	cancel()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	case <-time.After(patience):
		t.Fatal("Run did not return")
	}
}

// TestLibrarySockets: the sockets of the ZeroMQ library as the engine's side, PUB in
// both directions and ROUTER, whose first messages may come before the subscription.
func TestLibrarySockets(t *testing.T) {
	payloads, tokens := threeBatches(t)
	for _, bind := range []bool{false, true} {
		ctx, cancel := context.WithCancel(context.Background())
		pub, replay := zmq4.NewPub(ctx), zmq4.NewRouter(ctx)
		if err := replay.Listen("tcp://127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		go func() {
			for {
				msg, err := replay.Recv()
				if err != nil || len(msg.Frames) != 3 {
					return
				}
				id := msg.Frames[0]
				for seq, payload := range payloads[:2] {
					_ = replay.Send(zmq4.NewMsgFrom(id, nil, binary.BigEndian.AppendUint64(nil, uint64(seq)), payload))
				}
				_ = replay.Send(zmq4.NewMsgFrom(id, nil, bytes.Repeat([]byte{0xff}, 8), nil))
			}
		}()
		endpoint := freeEndpoint(t)
		if !bind {
			if err := pub.Listen(endpoint); err != nil {
				t.Fatal(err)
			}
		}
		r := start(t, func(c *Config) {
			c.Endpoint, c.Bind, c.ReplayEndpoint = endpoint, bind, "tcp://"+replay.Addr().String()
		})
		if bind {
			reach(t, endpoint).Close()
			if err := pub.Dial(endpoint); err != nil {
				t.Fatal(err)
			}
		}
		await[*router.BlocksStored](r)
		await[*router.BlocksStored](r)
		// This PUB does not say when it is subscribed to, so it repeats itself.
		again, deadline := time.NewTicker(5*time.Millisecond), time.After(patience)
		for r.v.size() < 5 {
			if err := pub.Send(zmq4.NewMsgFrom(nil, binary.BigEndian.AppendUint64(nil, 2), payloads[2])); err != nil {
				t.Fatal(err)
			}
			select {
			case <-r.v.told:
			case <-again.C:
			case <-deadline:
				t.Fatalf("bind %v: %d blocks, %+v", bind, r.v.size(), r.Health())
			}
		}
		again.Stop()
		if !r.v.has(ownChain(7, 16, tokens)...) || !r.Health().Trusted {
			t.Fatalf("bind %v: %+v", bind, r.Health())
		}
		r.stop()
		pub.Close()
		replay.Close()
		cancel()
	}
}

// TestHostilePeers: what they send ends their connection and nothing else.
func TestHostilePeers(t *testing.T) {
	greeting := make([]byte, greetingBytes)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NULL")
	ready := "\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
	frame := func(flags byte, body string) string { return string([]byte{flags, byte(len(body))}) + body }
	l, endpoint := listen(t)
	r := start(t, func(c *Config) { c.Endpoint = endpoint })
	for name, bytes := range map[string]string{
		"no ZeroMQ":           "HTTP/1.1 400 Bad Request\r\n\r\n" + strings.Repeat(" ", 64),
		"short properties":    string(greeting) + frame(4, "\x05READY\xff"),
		"length past the end": string(greeting) + frame(4, "\x05READY\x0bSocket-Type\xff\xff\xff\xff"),
		"wrong socket":        string(greeting) + frame(4, "\x05READY\x0bSocket-Type\x00\x00\x00\x03REP"),
		"endless frame":       string(greeting) + frame(4, ready) + "\x02\x3f\xff\xff\xff\xff\xff\xff\xff",
		"endless message":     string(greeting) + frame(4, ready) + strings.Repeat(frame(1, "x"), maxFrames+1),
		"empty command":       string(greeting) + frame(4, ready) + frame(4, ""),
	} {
		raw := acceptRaw(t, l)
		if _, err := io.WriteString(raw, bytes); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := raw.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, raw); errors.Is(err, context.DeadlineExceeded) || isTimeout(err) {
			t.Fatalf("%s: the connection was kept", name)
		}
		raw.Close()
	}
	pub := accept(t, l)
	pub.frames([]byte("one frame"))
	pub.frames([]byte("t"), []byte("no number"), []byte("x"))
	payloads, _ := threeBatches(t)
	pub.send(0, payloads[0])
	await[*router.BlocksStored](r)
	if h := r.Health(); h.DecodeErrors != 2 || !h.Trusted {
		t.Fatalf("%+v", h)
	}
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// TestNothingIsLeftRunning after Run: neither while a replay hangs, nor with a full
// inbox, nor while nobody answers.
func TestNothingIsLeftRunning(t *testing.T) {
	mute, muteEndpoint := listen(t)
	go func() {
		for {
			if _, err := mute.Accept(); err != nil {
				return
			}
		}
	}()
	l, endpoint := listen(t)
	r := start(t, func(c *Config) { c.Endpoint, c.ReplayEndpoint = endpoint, muteEndpoint })
	pub := accept(t, l)
	go func() {
		for seq := uint64(0); ; seq++ {
			if pub.conn.SendMsg(zmq4.NewMsgFrom(nil, binary.BigEndian.AppendUint64(nil, seq), make([]byte, 1<<20))) != nil {
				return
			}
		}
	}()
	binding := start(t, func(c *Config) { c.Endpoint, c.Bind = freeEndpoint(t), true })
	refused := start(t, func(c *Config) { c.Endpoint = freeEndpoint(t) })
	for _, each := range []*running{r, binding, refused} {
		each.stop()
	}
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	for _, stack := range strings.Split(string(stacks), "\n\n") {
		if strings.Contains(stack, "kvevents.(*Subscriber)") || strings.Contains(stack, "kvevents.(*wire)") || strings.Contains(stack, "kvevents.(*link)") {
			t.Errorf("left running:\n%s", stack)
		}
	}
}

func FuzzReplayReply(f *testing.F) {
	for _, m := range readCapture(f, "kv_replay.txt") {
		payload := m.frames[3]
		f.Add(byte(4), m.frames[1], m.frames[2], payload[:min(len(payload), 400)])
		f.Add(byte(3), m.frames[2], payload[:min(len(payload), 400)], []byte(nil))
	}
	f.Fuzz(func(t *testing.T, count byte, a, b, c []byte) {
		frames := [][]byte{nil, a, b, c}
		if count%5 == 0 {
			frames = frames[1:]
		}
		frames = frames[:int(count)%(len(frames)+1)]
		seq, payload, end, err := parseReply(frames)
		if err != nil && (payload != nil || end) || end && seq+1 != 0 {
			t.Fatalf("seq %d, %d bytes, end %v, %v", seq, len(payload), end, err)
		}
		if err == nil && !slices.ContainsFunc(frames, func(frame []byte) bool {
			return len(frame) == 8 && binary.BigEndian.Uint64(frame) == seq
		}) {
			t.Fatalf("seq %d is in no frame", seq)
		}
	})
}

// FuzzPeer lets the fuzzer be the other end of a connection, after a correct
// handshake or instead of it.
func FuzzPeer(f *testing.F) {
	f.Add(true, []byte("\x01\x00\x01\x08\x00\x00\x00\x00\x00\x00\x00\x01\x00\x01x"))
	f.Add(true, []byte("\x04\x07\x04PING\x00\x00"))
	f.Add(false, []byte("\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"))
	f.Fuzz(func(t *testing.T, greeted bool, input []byte) {
		ours, theirs := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, theirs) }()
		go func() {
			head := make([]byte, greetingBytes)
			head[0], head[9], head[10] = 0xff, 0x7f, 3
			copy(head[12:], "NULL")
			if greeted {
				head = append(head, "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"...)
			}
			_, _ = theirs.Write(append(head, input...))
			theirs.Close()
		}()
		w, err := shake(context.Background(), ours, zmq4.Sub, false, patience)
		if err != nil {
			return
		}
		defer w.close()
		for {
			frames, err := w.receive()
			if err != nil {
				return
			}
			total := 0
			for _, frame := range frames {
				total += len(frame)
			}
			if total > len(input) {
				t.Fatalf("%d bytes made of %d", total, len(input))
			}
		}
	})
}
