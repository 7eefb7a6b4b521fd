package publish

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
)

// open starts a publisher that binds free ports.
func open(t *testing.T, cfg Config) *Publisher {
	t.Helper()
	if cfg.Endpoint == "" {
		cfg.Endpoint = "tcp://127.0.0.1:0"
	}
	cfg.ReplayEndpoint = "tcp://127.0.0.1:0"
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// subscriber receives sequence numbers.
type subscriber struct {
	t       *testing.T
	numbers chan uint64
}

func receive(t *testing.T, socket zmq4.Socket) *subscriber {
	t.Helper()
	s := &subscriber{t, make(chan uint64, 10_000)}
	t.Cleanup(func() { socket.Close() })
	if err := socket.SetOption(zmq4.OptionSubscribe, ""); err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			m, err := socket.Recv()
			if err != nil {
				return
			}
			s.numbers <- binary.BigEndian.Uint64(m.Frames[1])
		}
	}()
	return s
}

// patience bounds every wait; none takes a noticeable part of it.
const patience = time.Minute

// connected publishes until something arrives, reads what is still on its way, and
// returns the next number that will be given.
func (s *subscriber) connected(p *Publisher) uint64 {
	s.t.Helper()
	for deadline := time.Now().Add(patience); ; {
		if time.Now().After(deadline) {
			s.t.Fatal("nothing arrives")
		}
		p.Publish(time.Now(), []Event{{Kind: Cleared}})
		select {
		case <-s.numbers:
			p.Publish(time.Now(), []Event{{Kind: Cleared}})
			n := p.Published()
			for s.next(1)[0] != n-1 {
			}
			return n
		case <-time.After(time.Millisecond):
		}
	}
}

func (s *subscriber) next(n int) (got []uint64) {
	for range n {
		select {
		case x := <-s.numbers:
			got = append(got, x)
		case <-time.After(patience):
			s.t.Fatalf("only %v came", got)
		}
	}
	return got
}

func subscribe(t *testing.T, p *Publisher) *subscriber {
	t.Helper()
	socket := zmq4.NewSub(t.Context())
	if err := socket.Dial(p.Endpoint()); err != nil {
		t.Fatal(err)
	}
	return receive(t, socket)
}

// replay asks for the batches from a number on.
func replay(t *testing.T, p *Publisher, first uint64) (numbers []uint64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	dealer := zmq4.NewDealer(ctx)
	defer dealer.Close()
	if err := dealer.Dial(p.ReplayEndpoint()); err != nil {
		t.Fatal(err)
	}
	for _, frames := range [][][]byte{{nil, []byte("no number")}, {nil, binary.BigEndian.AppendUint64(nil, first)}} {
		// The first of them is no request and gets no answer.
		if err := dealer.SendMulti(zmq4.NewMsgFrom(frames...)); err != nil {
			t.Fatal(err)
		}
	}
	for {
		m, err := dealer.Recv()
		if err != nil {
			t.Fatal(err)
		}
		n := binary.BigEndian.Uint64(m.Frames[len(m.Frames)-2])
		if n == endOfReplay {
			return numbers
		}
		numbers = append(numbers, n)
	}
}

func TestHistoryIsBounded(t *testing.T) {
	p := open(t, Config{HistoryBatches: 4})
	for range 10 {
		p.Publish(time.Now(), []Event{{Kind: Cleared}})
	}
	deadline := time.Now().Add(patience)
	for numbered := uint64(0); numbered < 10; {
		if time.Now().After(deadline) {
			t.Fatalf("%d of 10 batches are numbered", numbered)
		}
		p.mu.Lock()
		numbered = p.next
		p.mu.Unlock()
	}
	for first, want := range map[uint64][]uint64{0: {6, 7, 8, 9}, 8: {8, 9}, 10: nil, 1 << 63: nil} {
		if got := replay(t, p, first); !slices.Equal(got, want) {
			t.Errorf("from %d: %v, want %v", first, got, want)
		}
	}
}

// TestFates: each fate shows in what arrives, and replay knows of none.
func TestFates(t *testing.T) {
	fates := map[int]Fate{
		1: {Lost: true}, 2: {Duplicate: true}, 4: {Swapped: true}, 5: {Swapped: true}, 7: {Lost: true}, 9: {Delay: 30 * time.Millisecond},
		11: {Swapped: true}, // Nothing follows to overtake it.
	}
	active, at := make(chan struct{}), 0
	p := open(t, Config{Fate: func() Fate {
		select {
		case <-active:
			defer func() { at++ }()
			return fates[at]
		default:
			return Fate{}
		}
	}})
	s := subscribe(t, p)
	first := s.connected(p)
	close(active)
	began := time.Now()
	for range 12 {
		p.Publish(time.Now(), []Event{{Kind: Cleared}})
	}
	got := s.next(11)
	for i := range got {
		got[i] -= first
	}
	// 5 would be swapped too, but overtakes 4.
	if want := []uint64{0, 2, 2, 3, 5, 4, 6, 8, 9, 10, 11}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if took := time.Since(began); took < 30*time.Millisecond+swapWait {
		t.Errorf("all came within %s", took)
	}
	if got := replay(t, p, first); len(got) != 12 {
		t.Errorf("replayed %v", got)
	}
}

// TestConnects to a subscriber that has bound the endpoint.
func TestConnects(t *testing.T) {
	bound := zmq4.NewSub(t.Context())
	if err := bound.Listen("tcp://127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	endpoint := fmt.Sprint("tcp://", bound.Addr())
	s := receive(t, bound)
	p := open(t, Config{Endpoint: endpoint, Connect: true})
	if p.Endpoint() != endpoint {
		t.Errorf("endpoint %s", p.Endpoint())
	}
	s.connected(p)
}

func TestEndpoints(t *testing.T) {
	for _, c := range []struct {
		endpoint string
		rank     int
		want     string
	}{
		{"tcp://127.0.0.1:5557", 2, "tcp://127.0.0.1:5559"},
		{"tcp://127.0.0.1:0", 2, "tcp://127.0.0.1:0"},
		{"tcp://*:5557", 0, "tcp://0.0.0.0:5557"},
		{"tcp://[::1]:80", 1, "tcp://[::1]:81"},
		{"", 1, ""},
	} {
		if got, err := AtRank(c.endpoint, c.rank); err != nil || got != c.want {
			t.Errorf("%q at rank %d: %q, %v", c.endpoint, c.rank, got, err)
		}
	}
	for _, endpoint := range []string{"127.0.0.1:5557", "ipc:///x", "tcp://host", "tcp://host:port", "tcp://host:70000"} {
		if got, err := AtRank(endpoint, 0); err == nil {
			t.Errorf("%q is accepted as %q", endpoint, got)
		}
	}
}
