package publish

import (
	"bytes"
	"fmt"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

// Encoding is a dialect of event batches.
type Encoding uint8

const (
	// Array is vLLM's until June 2026: batch and events are arrays, events with
	// their tag first.
	Array Encoding = iota
	// Map is vLLM's since: batch and events are maps, events with the key "type",
	// and fields at their default are left out.
	Map
	// Mixed is an array of a batch with maps for events, as llm-d's simulator sends.
	Mixed
	// SGLang is its positional arrays: hashes are signed, and there are
	// neither salts nor groups.
	SGLang
)

func (e Encoding) String() string {
	switch e {
	case Array:
		return "array"
	case Map:
		return "map"
	case Mixed:
		return "mixed"
	case SGLang:
		return "sglang"
	}
	return fmt.Sprintf("Encoding(%d)", uint8(e))
}

// ParseEncoding is the inverse of String.
func ParseEncoding(s string) (Encoding, error) {
	for e := Array; e <= SGLang; e++ {
		if e.String() == s {
			return e, nil
		}
	}
	return 0, fmt.Errorf("unknown encoding of KV events %q, want array, map, mixed or sglang", s)
}

// Kind says what happened to blocks.
type Kind uint8

const (
	// Stored: the blocks can be hit from now on.
	Stored Kind = iota + 1
	// Removed: the blocks were evicted.
	Removed
	// Cleared: nothing is cached any more.
	Cleared
)

func (k Kind) String() string {
	switch k {
	case Stored:
		return "BlockStored"
	case Removed:
		return "BlockRemoved"
	case Cleared:
		return "AllBlocksCleared"
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Event is one change of the prefix cache.
type Event struct {
	Kind Kind
	// Hashes are the blocks', in order of position when stored.
	Hashes []uint64
	// Parent is the hash of the block before the first one; HasParent is false at
	// the start of a prompt.
	Parent    uint64
	HasParent bool
	// Tokens are those of the stored blocks, BlockTokens each. They are not changed
	// after the event was handed over.
	Tokens      []int32
	BlockTokens int
	// Salt is the cache salt of the content; only a first block shows it.
	Salt string
}

// medium is where the blocks are. The host tier is not published.
const medium = "GPU"

// specKind is the kind of attention group that all blocks belong to.
const specKind = "full_attention"

// encoder writes batches. It keeps its buffer.
type encoder struct {
	encoding Encoding
	rank     int
	buf      bytes.Buffer
	msgpack  *msgpack.Encoder
}

func newEncoder(encoding Encoding, rank int) *encoder {
	e := &encoder{encoding: encoding, rank: rank}
	e.msgpack = msgpack.NewEncoder(&e.buf)
	return e
}

// batch returns a payload of its own.
func (e *encoder) batch(at time.Time, events []Event) []byte {
	e.buf.Reset()
	seconds := float64(at.UnixNano()) / 1e9
	if e.encoding == Map {
		e.mapLen(3)
		e.text("ts")
		e.float(seconds)
		e.text("events")
	} else {
		e.arrayLen(3)
		e.float(seconds)
	}
	e.arrayLen(len(events))
	for i := range events {
		switch e.encoding {
		case Map, Mixed:
			e.mapEvent(&events[i])
		case SGLang:
			e.sglangEvent(&events[i])
		default:
			e.arrayEvent(&events[i])
		}
	}
	if e.encoding == Map {
		e.text("data_parallel_rank")
	}
	e.int(int64(e.rank))
	return bytes.Clone(e.buf.Bytes())
}

func (e *encoder) arrayEvent(x *Event) {
	switch x.Kind {
	case Stored:
		e.arrayLen(12)
		e.text(x.Kind.String())
		e.hashes(x.Hashes)
		e.parent(x)
		e.tokens(x.Tokens)
		e.int(int64(x.BlockTokens))
		e.null() // lora_id
		e.text(medium)
		e.null() // lora_name
		if x.salted() {
			e.extraKeys(x)
		} else {
			e.null()
		}
		e.int(0) // group_idx
		e.text(specKind)
		e.null() // kv_cache_spec_sliding_window
	case Removed:
		e.arrayLen(4)
		e.text(x.Kind.String())
		e.hashes(x.Hashes)
		e.text(medium)
		e.int(0)
	default:
		e.arrayLen(1)
		e.text(x.Kind.String())
	}
}

func (e *encoder) mapEvent(x *Event) {
	fields := 1
	switch {
	case x.Kind == Stored && x.salted():
		fields = 11
	case x.Kind == Stored:
		fields = 10
	case x.Kind == Removed:
		fields = 4
	}
	e.mapLen(fields)
	e.text("type")
	e.text(x.Kind.String())
	if x.Kind == Cleared {
		return
	}
	e.text("block_hashes")
	e.hashes(x.Hashes)
	if x.Kind == Stored {
		e.text("parent_block_hash")
		e.parent(x)
		e.text("token_ids")
		e.tokens(x.Tokens)
		e.text("block_size")
		e.int(int64(x.BlockTokens))
		e.text("lora_id")
		e.null()
		e.text("lora_name")
		e.null()
		if x.salted() {
			e.text("extra_keys")
			e.extraKeys(x)
		}
		e.text("kv_cache_spec_kind")
		e.text(specKind)
	}
	e.text("medium")
	e.text(medium)
	e.text("group_idx")
	e.int(0)
}

func (e *encoder) sglangEvent(x *Event) {
	switch x.Kind {
	case Stored:
		e.arrayLen(7)
		e.text(x.Kind.String())
		e.hashes(x.Hashes)
		e.parent(x)
		e.tokens(x.Tokens)
		e.int(int64(x.BlockTokens))
		e.null() // lora_id
		e.text(medium)
	case Removed:
		e.arrayLen(3)
		e.text(x.Kind.String())
		e.hashes(x.Hashes)
		e.text(medium)
	default:
		e.arrayLen(1)
		e.text(x.Kind.String())
	}
}

// salted says that the first of the blocks is a prompt's first and has extra keys.
func (x *Event) salted() bool { return x.Salt != "" && !x.HasParent }

// extraKeys are one entry per block: the salt counts in the first block of a prompt.
func (e *encoder) extraKeys(x *Event) {
	e.arrayLen(len(x.Hashes))
	e.arrayLen(1)
	e.text(x.Salt)
	for range x.Hashes[1:] {
		e.null()
	}
}

func (e *encoder) hashes(hashes []uint64) {
	e.arrayLen(len(hashes))
	for _, h := range hashes {
		e.hash(h)
	}
}

func (e *encoder) hash(h uint64) {
	if e.encoding == SGLang {
		e.int(int64(h))
		return
	}
	_ = e.msgpack.EncodeUint(h)
}

func (e *encoder) parent(x *Event) {
	if x.HasParent {
		e.hash(x.Parent)
	} else {
		e.null()
	}
}

func (e *encoder) tokens(tokens []int32) {
	e.arrayLen(len(tokens))
	for _, t := range tokens {
		_ = e.msgpack.EncodeUint(uint64(uint32(t)))
	}
}

// A write into memory cannot fail, so that these have no error to hand on.

func (e *encoder) arrayLen(n int)  { _ = e.msgpack.EncodeArrayLen(n) }
func (e *encoder) mapLen(n int)    { _ = e.msgpack.EncodeMapLen(n) }
func (e *encoder) text(s string)   { _ = e.msgpack.EncodeString(s) }
func (e *encoder) int(n int64)     { _ = e.msgpack.EncodeInt(n) }
func (e *encoder) float(f float64) { _ = e.msgpack.EncodeFloat64(f) }
func (e *encoder) null()           { _ = e.msgpack.EncodeNil() }
