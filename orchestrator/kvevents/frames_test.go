package kvevents

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"math"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"holdfast/router"
	"holdfast/router/prefix"
)

// captured is one recorded ZeroMQ message, with the JSON that the recorder made of
// its payload.
type captured struct {
	frames  [][]byte
	decoded string
}

func readCapture(tb testing.TB, name string) []captured {
	tb.Helper()
	file, err := os.Open("testdata/" + name)
	if err != nil {
		tb.Fatal(err)
	}
	defer file.Close()
	var messages []captured
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		switch {
		case strings.HasPrefix(line, "== message"):
			messages = append(messages, captured{})
		case strings.HasPrefix(line, "frame["):
			_, digits, _ := strings.Cut(line, "hex=")
			frame, err := hex.DecodeString(digits)
			if err != nil {
				tb.Fatal(err)
			}
			last := &messages[len(messages)-1]
			last.frames = append(last.frames, frame)
		case strings.HasPrefix(line, "decoded="):
			messages[len(messages)-1].decoded = strings.TrimPrefix(line, "decoded=")
		}
	}
	if err := lines.Err(); err != nil || len(messages) == 0 {
		tb.Fatalf("%s: %d messages, %v", name, len(messages), err)
	}
	return messages
}

// pack writes MessagePack for tests.
func pack(tb testing.TB, value any) []byte {
	tb.Helper()
	var out bytes.Buffer
	enc := msgpack.NewEncoder(&out)
	enc.UseCompactInts(true)
	if err := enc.Encode(value); err != nil {
		tb.Fatal(err)
	}
	return out.Bytes()
}

type (
	list = []any
	dict = map[string]any
)

// ordered is a map of name, value, name, value, written in that order.
type ordered list

// EncodeMsgpack implements msgpack.CustomEncoder.
func (o ordered) EncodeMsgpack(enc *msgpack.Encoder) error {
	if err := enc.EncodeMapLen(len(o) / 2); err != nil {
		return err
	}
	return enc.EncodeMulti(o...)
}

// batchOf is a batch in the array encoding.
func batchOf(tb testing.TB, ts float64, events ...any) []byte {
	return pack(tb, list{ts, events, 0})
}

// stored is a BlockStored event in vLLM's array encoding.
func storedEvent(hashes list, parent any, tokens []int32, size int) list {
	return list{"BlockStored", hashes, parent, tokens, size, nil, "GPU", nil, nil}
}

func removedEvent(hashes ...any) list { return list{"BlockRemoved", hashes, "GPU"} }

// run of n token ids from first on.
func run(first, n int) []int32 {
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = int32(first + i)
	}
	return tokens
}

// ownChain is what the router calls the blocks of these tokens.
func ownChain(version int64, size int, tokens []int32) []prefix.Hash {
	h := prefix.NewHasher(version, size)
	return h.AppendChain(nil, h.Root(), tokens)
}

type place struct {
	rank, group int
	block       prefix.Hash
}

// view is a router's knowledge of one instance, built from what it is told.
type view struct {
	mu     sync.Mutex
	blocks map[place]bool
	told   chan router.Event
	fail   func() bool
}

func newView() *view { return &view{blocks: map[place]bool{}, told: make(chan router.Event, 4096)} }

var errNotTaken = errors.New("not taken")

func (v *view) tell(_ context.Context, ev router.Event) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.fail != nil && v.fail() {
		return errNotTaken
	}
	switch e := ev.(type) {
	case *router.BlocksStored:
		for _, b := range e.Blocks {
			v.blocks[place{e.Rank, e.Group, b}] = true
		}
	case *router.BlocksRemoved:
		for _, b := range e.Blocks {
			delete(v.blocks, place{e.Rank, e.Group, b})
		}
	case *router.BlocksCleared:
		clear(v.blocks)
	}
	select {
	case v.told <- ev:
	default:
	}
	return nil
}

func (v *view) has(blocks ...prefix.Hash) bool { return v.count(blocks...) == len(blocks) }

func (v *view) count(blocks ...prefix.Hash) (n int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, b := range blocks {
		if v.blocks[place{0, 0, b}] {
			n++
		}
	}
	return n
}

func (v *view) size() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.blocks)
}

func testConfig(v *view) Config {
	return Config{
		Instance: "e1", Endpoint: "tcp://127.0.0.1:1", BlockTokens: 16,
		PolicyVersion: func() int64 { return 7 }, Tell: v.tell,
	}
}

func newSubscriber(tb testing.TB, cfg Config) *Subscriber {
	tb.Helper()
	s, err := New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// feed gives a subscriber's first rank live batches without sockets.
func feed(tb testing.TB, s *Subscriber, seq uint64, payload []byte) {
	tb.Helper()
	if err := s.streams[0].frame(context.Background(), seq, payload); err != nil {
		tb.Fatal(err)
	}
}

func join(tb testing.TB, s *Subscriber) {
	tb.Helper()
	for _, st := range s.streams {
		if err := st.connected(context.Background()); err != nil {
			tb.Fatal(err)
		}
	}
}

// expectClose compares two times in seconds.
func expectClose(a, b float64) bool { return math.Abs(a-b) < 1e-6 }
