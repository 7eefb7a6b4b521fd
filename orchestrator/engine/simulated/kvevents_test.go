package simulated

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/vmihailenco/msgpack/v5"

	"holdfast/orchestrator/engine/simulated/publish"
)

// follower is a subscriber's view of one rank's cache. It reads whatever dialect comes.
type follower struct {
	t        *testing.T
	blocks   map[uint64]int // copies by hash
	tokens   map[uint64][]int32
	parents  map[uint64]uint64
	salts    map[uint64]any
	next     uint64
	cleared  int
	replayed int
}

func newFollower(t *testing.T) *follower {
	return &follower{t: t, blocks: map[uint64]int{}, tokens: map[uint64][]int32{}, parents: map[uint64]uint64{}, salts: map[uint64]any{}}
}

// event is one event in any encoding, by vLLM's names.
func event(v any) map[string]any {
	if m, ok := v.(map[string]any); ok {
		return m
	}
	a := v.([]any)
	names := []string{"type"}
	switch a[0] {
	case "BlockStored":
		names = append(names, "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys", "group_idx")
	case "BlockRemoved":
		names = append(names, "block_hashes", "medium", "group_idx")
	}
	m := map[string]any{}
	for i := range min(len(a), len(names)) {
		m[names[i]] = a[i]
	}
	return m
}

func number(v any) uint64 {
	switch n := v.(type) {
	case uint64:
		return n
	case int64:
		return uint64(n)
	}
	panic(fmt.Sprintf("%T is no number", v))
}

func (f *follower) apply(seq uint64, payload []byte) {
	f.t.Helper()
	if seq != f.next {
		f.t.Fatalf("batch %d after %d", seq, f.next)
	}
	f.next++
	decoder := msgpack.NewDecoder(strings.NewReader(string(payload)))
	decoder.UseLooseInterfaceDecoding(true)
	batch, err := decoder.DecodeInterface()
	if err != nil {
		f.t.Fatal(err)
	}
	var events []any
	if m, ok := batch.(map[string]any); ok {
		events = m["events"].([]any)
	} else {
		events = batch.([]any)[1].([]any)
	}
	for _, v := range events {
		f.event(event(v))
	}
}

func (f *follower) event(e map[string]any) {
	f.t.Helper()
	switch e["type"] {
	case "BlockStored":
		hashes, tokens := e["block_hashes"].([]any), e["token_ids"].([]any)
		if len(tokens) != len(hashes)*16 || number(e["block_size"]) != 16 || e["medium"] != "GPU" {
			f.t.Fatalf("%d hashes with %d tokens in %v", len(hashes), len(tokens), e)
		}
		parent := e["parent_block_hash"]
		for i, v := range hashes {
			h := number(v)
			f.blocks[h]++
			f.tokens[h] = nil
			for _, token := range tokens[i*16 : i*16+16] {
				f.tokens[h] = append(f.tokens[h], int32(number(token)))
			}
			delete(f.parents, h)
			if parent != nil {
				p := number(parent)
				if f.blocks[p] == 0 {
					f.t.Fatalf("block %x is stored behind %x, which is not there", h, p)
				}
				f.parents[h] = p
			}
			parent = v
			if keys, ok := e["extra_keys"].([]any); ok {
				f.salts[h] = keys[i]
			}
		}
	case "BlockRemoved":
		for _, v := range e["block_hashes"].([]any) {
			h := number(v)
			if f.blocks[h] == 0 {
				f.t.Fatalf("block %x is removed and was not there", h)
			}
			if f.blocks[h]--; f.blocks[h] == 0 {
				delete(f.blocks, h)
			}
		}
	case "AllBlocksCleared":
		f.cleared++
		clear(f.blocks)
	default:
		f.t.Fatalf("event %v", e)
	}
}

// context is the content up to and with a block.
func (f *follower) context(h uint64) (context []int32) {
	for {
		context = append(slices.Clone(f.tokens[h]), context...)
		p, ok := f.parents[h]
		if !ok {
			return context
		}
		h = p
	}
}

func (f *follower) resident() []uint64 {
	hashes := make([]uint64, 0, len(f.blocks))
	for h := range f.blocks {
		hashes = append(hashes, h)
	}
	slices.Sort(hashes)
	return hashes
}

// ask reads a replay from a sequence number on.
func ask(t *testing.T, endpoint string, first uint64) (replies [][][]byte) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	dealer := zmq4.NewDealer(ctx)
	defer dealer.Close()
	if err := dealer.Dial(endpoint); err != nil {
		t.Fatal(err)
	}
	if err := dealer.SendMulti(zmq4.NewMsgFrom(nil, binary.BigEndian.AppendUint64(nil, first))); err != nil {
		t.Fatal(err)
	}
	for {
		m, err := dealer.Recv()
		if err != nil {
			t.Fatal(err)
		}
		n := len(m.Frames)
		if binary.BigEndian.Uint64(m.Frames[n-2]) == ^uint64(0) {
			if len(m.Frames[n-1]) != 0 {
				t.Fatal("the end of a replay has a payload")
			}
			return replies
		}
		replies = append(replies, m.Frames)
	}
}

// catchUp applies what was published since, by replay.
func (f *follower) catchUp(e KVEndpoint) {
	f.t.Helper()
	for deadline := time.Now().Add(patience); f.next < e.Published; {
		if time.Now().After(deadline) {
			f.t.Fatalf("%d of %d batches can be replayed", f.next, e.Published)
		}
		// The publisher may still be about to number the last batches.
		for _, frames := range ask(f.t, e.ReplayEndpoint, f.next) {
			n := len(frames)
			f.apply(binary.BigEndian.Uint64(frames[n-2]), frames[n-1])
			f.replayed++
		}
	}
}

// load runs random branching sessions of several salts over HTTP, with aborts.
func load(t *testing.T, s *Server, seed uint64, calls int, path string, body func(prompt []int32, output int, salt string) string) {
	rng := rand.New(rand.NewPCG(seed, 1))
	var group sync.WaitGroup
	var contexts [][]int32
	for i := range calls {
		var prompt []int32
		if len(contexts) > 0 && rng.IntN(4) > 0 {
			old := contexts[rng.IntN(len(contexts))]
			prompt = slices.Clone(old[:1+rng.IntN(len(old))])
		}
		for range 1 + rng.IntN(60) {
			prompt = append(prompt, int32(rng.IntN(1000)))
		}
		prompt = prompt[:min(len(prompt), 600)]
		contexts = append(contexts, prompt)
		text := body(prompt, 1+rng.IntN(120), []string{"", "a", "b"}[rng.IntN(3)])
		ctx, cancel := context.WithCancel(t.Context())
		if rng.IntN(5) == 0 {
			time.AfterFunc(time.Duration(rng.IntN(3000))*time.Microsecond, cancel)
		}
		group.Go(func() {
			defer cancel()
			request := httptest.NewRequestWithContext(ctx, http.MethodPost, path, strings.NewReader(text))
			request.Header.Set("X-Request-Id", fmt.Sprint("r", i))
			s.Handler().ServeHTTP(httptest.NewRecorder(), request)
		})
		if i%8 == 7 {
			group.Wait()
		}
	}
	group.Wait()
}

func vllmBody(prompt []int32, output int, salt string) string {
	return fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"ignore_eos":true,"temperature":1,"cache_salt":%q}`, jsonInts(prompt), output, salt)
}

func jsonInts(ids []int32) string { return strings.ReplaceAll(fmt.Sprint(ids), " ", ",") }

// TestEventsTellWhatIsResident compares the table that a subscriber rebuilds with
// the engine's own, at quiet points under eviction and after resets.
func TestEventsTellWhatIsResident(t *testing.T) {
	for _, encoding := range []publish.Encoding{publish.Array, publish.Map, publish.Mixed} {
		t.Run(encoding.String(), func(t *testing.T) {
			s := newTestServer(t, Config{TimeScale: 3000, StreamTick: time.Millisecond, KVEvents: KVEvents{
				Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0", Encoding: encoding, FlushIdle: true,
			}})
			defer s.Stop(t.Context())
			f := newFollower(t)
			for round := range 6 {
				load(t, s, uint64(round), 60, "/v1/completions", vllmBody)
				resident := s.ResidentBlocks()
				f.catchUp(s.KVEndpoints()[0])
				if got := f.resident(); !slices.Equal(got, resident) {
					t.Fatalf("round %d: events leave %d blocks, %d are resident", round, len(got), len(resident))
				}
				if len(resident) < 20 {
					t.Fatalf("round %d: only %d blocks resident", round, len(resident))
				}
				for _, h := range resident {
					f.checkHash(h)
				}
				if round == 3 {
					s.ResetPrefixCache()
				}
			}
			if f.cleared != 1 {
				t.Errorf("%d resets told", f.cleared)
			}
		})
	}
}

// TestEqualContentCountsOnce: greedy requests side by side generate equal blocks on
// chains of their own. Subscribers hear of them once, and as long as one copy is
// left they are found.
func TestEqualContentCountsOnce(t *testing.T) {
	s := newTestServer(t, Config{TimeScale: 50, StreamTick: time.Millisecond, KVEvents: KVEvents{
		Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0", FlushIdle: true,
	}})
	defer s.Stop(t.Context())
	prompt := make([]int32, 40)
	f := newFollower(t)
	for round := range 6 {
		prompt[0] = int32(round)
		body := fmt.Sprintf(`{"prompt":%s,"max_tokens":100,"ignore_eos":true,"temperature":0,"return_token_ids":true}`, jsonInts(prompt))
		var group sync.WaitGroup
		for range 4 {
			group.Go(func() { post(t, s, body) })
		}
		group.Wait()
		resident := s.ResidentBlocks()
		f.catchUp(s.KVEndpoints()[0])
		if got := f.resident(); !slices.Equal(got, resident) {
			t.Fatalf("round %d: events leave %d blocks, %d are resident", round, len(got), len(resident))
		}
		context := append(slices.Clone(prompt), greedy("default").Continue(prompt, 100, 16)...)
		hashes := hashPrompt(nil, 0, context, 16)
		found := 0
		for found < len(hashes) && f.blocks[uint64(hashes[found])] > 0 {
			found++
		}
		c := decode(t, post(t, s, fmt.Sprintf(`{"prompt":%s,"max_tokens":1}`, jsonInts(context))).Body.Bytes())
		if cached := *c.Usage.Details.CachedTokens; cached != found*16 || found != len(hashes) {
			t.Errorf("round %d: %d tokens cached, the events tell of %d blocks of %d", round, cached, found, len(hashes))
		}
	}
	s.ResetPrefixCache()
	if n := len(s.core().chains.byID) + len(s.core().chains.heads); n != 0 {
		t.Errorf("%d chains left with nothing cached", n)
	}
}

// checkHash recomputes a block's hash from the tokens that the events tell.
func (f *follower) checkHash(h uint64) {
	f.t.Helper()
	root := h
	for p, ok := f.parents[root]; ok; p, ok = f.parents[root] {
		root = p
	}
	salt := ""
	if keys, ok := f.salts[root].([]any); ok {
		salt = keys[0].(string)
	}
	hashes := hashPrompt(nil, hashSalt(salt), f.context(h), 16)
	if got := uint64(hashes[len(hashes)-1]); got != h {
		f.t.Fatalf("the tokens of block %x, salted %q, hash to %x", h, salt, got)
	}
}

// TestSubscribersGetNumberedBatches reads the PUB socket itself.
func TestSubscribersGetNumberedBatches(t *testing.T) {
	s := newTestServer(t, Config{TimeScale: 3000, KVEvents: KVEvents{
		Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0", Topic: "kv@x@m",
	}})
	defer s.Stop(t.Context())
	sub := zmq4.NewSub(t.Context())
	defer sub.Close()
	if err := sub.SetOption(zmq4.OptionSubscribe, "kv@"); err != nil {
		t.Fatal(err)
	}
	if err := sub.Dial(s.KVEndpoints()[0].Endpoint); err != nil {
		t.Fatal(err)
	}
	f := newFollower(t)
	messages := make(chan zmq4.Msg, 1000)
	go func() {
		for {
			m, err := sub.Recv()
			if err != nil {
				return
			}
			messages <- m
		}
	}()
	// A subscription takes effect when it arrives; what was sent before comes by replay.
	var first *zmq4.Msg
	for i, deadline := 0, time.Now().Add(patience); first == nil; i++ {
		if time.Now().After(deadline) {
			t.Fatal("nothing is published")
		}
		post(t, s, vllmBody([]int32{int32(i), 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17}, 20, ""))
		select {
		case m := <-messages:
			first = &m
		default:
		}
	}
	seq := binary.BigEndian.Uint64(first.Frames[1])
	for _, frames := range ask(t, s.KVEndpoints()[0].ReplayEndpoint, 0)[:seq] {
		if len(frames) != 4 || string(frames[1]) != "kv@x@m" {
			t.Fatalf("reply %q", frames)
		}
		f.apply(binary.BigEndian.Uint64(frames[2]), frames[3])
	}
	resident := s.ResidentBlocks()
	published := s.KVEndpoints()[0].Published
	for m := *first; ; m = receive(t, "a batch", messages) {
		if len(m.Frames) != 3 || string(m.Frames[0]) != "kv@x@m" {
			t.Fatalf("message %q", m.Frames)
		}
		f.apply(binary.BigEndian.Uint64(m.Frames[1]), m.Frames[2])
		if f.next == published {
			break
		}
	}
	if !slices.Equal(f.resident(), resident) {
		t.Errorf("%d blocks, %d resident", len(f.blocks), len(resident))
	}
}

// TestIdleEngineKeepsItsResetToItself as vLLM does, until its next step.
func TestIdleEngineKeepsItsResetToItself(t *testing.T) {
	s := newTestServer(t, Config{TimeScale: 3000, KVEvents: KVEvents{
		Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0", OldReplies: true,
	}})
	defer s.Stop(t.Context())
	body := vllmBody(make([]int32, 40), 5, "")
	post(t, s, body)
	before := s.KVEndpoints()[0].Published
	s.ResetPrefixCache()
	if got := s.KVEndpoints()[0].Published; got != before {
		t.Fatalf("an idle engine published %d batches", got-before)
	}
	f := newFollower(t)
	f.catchUp(s.KVEndpoints()[0])
	if len(f.blocks) != 2 || f.cleared != 0 {
		t.Fatalf("%d blocks, %d resets", len(f.blocks), f.cleared)
	}
	if frames := ask(t, s.KVEndpoints()[0].ReplayEndpoint, 0)[0]; len(frames) != 3 {
		t.Errorf("an old reply has %d frames", len(frames))
	}
	post(t, s, body)
	f.catchUp(s.KVEndpoints()[0])
	if len(f.blocks) != 2 || f.cleared != 1 {
		t.Errorf("%d blocks, %d resets", len(f.blocks), f.cleared)
	}
}
