package kvevents

import (
	"bytes"
	"errors"
	"fmt"
	"hash/maphash"
	"io"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// Limits of one batch. A frame has at most maxMessageBytes, so arrays cannot be
// longer than that; these keep what is made of them within a few times its size.
const (
	maxEventsPerBatch = 1 << 16
	maxHashesPerEvent = 1 << 17
	maxTokensPerEvent = 1 << 22
	maxHashBytes      = 256
	maxDepth          = 32
)

// engineHash is an engine's block hash, opaque: integers of either sign in lo,
// byte strings as 128 bits of a keyed hash of this process with hi odd.
type engineHash struct{ hi, lo uint64 }

type eventKind uint8

const (
	unknownEvent eventKind = iota
	blockStored
	blockRemoved
	allBlocksCleared
)

// event is one decoded event; its slices are reused by the next.
type event struct {
	kind      eventKind
	hashes    []engineHash
	parent    engineHash
	hasParent bool
	tokens    []int32
	blockSize int64
	group     int64
	hasGroup  bool
	// oddTokens: token ids that are not plain integers (pairs, under speculation).
	oddTokens bool
	// lora, elsewhere and partial say why blocks are not for the index: an adapter,
	// another tier or machine, a group without full attention.
	lora, elsewhere, partial bool
	// salted: version is the policy version in the first block's salt.
	salted  bool
	version int64
	// foreignFrom is the first block with extra keys that are not our salt.
	foreignFrom int
}

func (e *event) reset() {
	*e = event{hashes: e.hashes[:0], tokens: e.tokens[:0], foreignFrom: maxHashesPerEvent}
}

func kindNamed(name []byte) eventKind {
	switch string(name) {
	case "BlockStored":
		return blockStored
	case "BlockRemoved":
		return blockRemoved
	case "AllBlocksCleared":
		return allBlocksCleared
	}
	return unknownEvent
}

// decoder reads batches of one publisher. It allocates only to grow its buffers.
type decoder struct {
	dialect Dialect
	src     bytes.Reader
	in      *msgpack.Decoder
	text    [maxHashBytes]byte
	seeds   [2]maphash.Seed
	ev      event
	// Counted since the caller last took them.
	unknownEvents, unknownFields uint64
}

func newDecoder(dialect Dialect) *decoder {
	d := &decoder{dialect: dialect, seeds: [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}}
	d.in = msgpack.NewDecoder(&d.src)
	return d
}

var (
	errTooLong  = errors.New("longer than the limit")
	errTooDeep  = errors.New("nested too deep")
	errNotBatch = errors.New("neither an array nor a map")
)

// timestamp is the time of a batch in the engine's seconds, 0 if it has none.
func (d *decoder) timestamp(payload []byte) float64 {
	d.src.Reset(payload)
	code, err := d.in.PeekCode()
	if err != nil {
		return 0
	}
	if isArray(code) {
		if n, err := d.in.DecodeArrayLen(); err != nil || n < 1 {
			return 0
		}
		return d.seconds()
	}
	if !isMap(code) {
		return 0
	}
	n, err := d.in.DecodeMapLen()
	for ; err == nil && n > 0; n-- {
		var name []byte
		if name, err = d.string(); err != nil {
			return 0
		}
		if string(name) == "ts" {
			return d.seconds()
		}
		err = d.skip(0)
	}
	return 0
}

func (d *decoder) seconds() float64 {
	code, err := d.in.PeekCode()
	if err != nil || code != msgpcode.Double && code != msgpcode.Float && !isInt(code) {
		return 0
	}
	ts, err := d.in.DecodeFloat64()
	if err != nil || ts != ts || ts < 0 || ts > 1e12 {
		return 0
	}
	return ts
}

// batch calls each for every event of a payload, in order. What each gets is valid
// during the call only. An error means that the rest of the batch was not read.
func (d *decoder) batch(payload []byte, each func(*event) error) error {
	d.src.Reset(payload)
	code, err := d.in.PeekCode()
	switch {
	case err != nil:
		return fmt.Errorf("reading a batch: %w", err)
	case isArray(code):
		err = d.arrayBatch(each)
	case isMap(code):
		err = d.mapBatch(each)
	default:
		err = errNotBatch
	}
	if err == nil && d.src.Len() > 0 {
		err = fmt.Errorf("%d bytes after the end", d.src.Len())
	}
	if err != nil {
		return fmt.Errorf("reading a batch: %w", err)
	}
	return nil
}

func (d *decoder) arrayBatch(each func(*event) error) error {
	n, err := d.in.DecodeArrayLen()
	if err != nil {
		return err
	}
	if n < 2 {
		return fmt.Errorf("array of %d values", n)
	}
	if err := d.skip(0); err != nil {
		return err
	}
	if err := d.events(each); err != nil {
		return err
	}
	for i := 2; i < n; i++ {
		if i > 2 {
			d.unknownFields++
		}
		if err := d.skip(0); err != nil {
			return err
		}
	}
	return nil
}

func (d *decoder) mapBatch(each func(*event) error) error {
	n, err := d.in.DecodeMapLen()
	if err != nil {
		return err
	}
	seen := false
	for range n {
		name, err := d.string()
		if err != nil {
			return err
		}
		switch string(name) {
		case "events":
			if seen {
				return errors.New("two lists of events")
			}
			seen = true
			err = d.events(each)
		case "ts", "data_parallel_rank", "attn_dp_rank":
			err = d.skip(0)
		default:
			d.unknownFields++
			err = d.skip(0)
		}
		if err != nil {
			return err
		}
	}
	if !seen {
		return errors.New("no list of events")
	}
	return nil
}

func (d *decoder) events(each func(*event) error) error {
	n, err := d.in.DecodeArrayLen()
	if err != nil {
		return err
	}
	if n > maxEventsPerBatch {
		return fmt.Errorf("%d events: %w", n, errTooLong)
	}
	for i := range n {
		d.ev.reset()
		code, err := d.in.PeekCode()
		switch {
		case err != nil:
		case isArray(code):
			err = d.arrayEvent()
		case isMap(code):
			err = d.mapEvent()
		default:
			err = d.skip(0)
		}
		if err != nil {
			return fmt.Errorf("event %d of %d: %w", i, n, err)
		}
		if d.ev.kind == unknownEvent {
			d.unknownEvents++
			continue
		}
		if err := each(&d.ev); err != nil {
			return err
		}
	}
	return nil
}

func (d *decoder) arrayEvent() error {
	n, err := d.in.DecodeArrayLen()
	if err != nil || n == 0 {
		return err
	}
	code, err := d.in.PeekCode()
	if err != nil {
		return err
	}
	if !isString(code) {
		return d.skipMany(n)
	}
	name, err := d.string()
	if err != nil {
		return err
	}
	d.ev.kind = kindNamed(name)
	var fields []field
	switch d.ev.kind {
	case unknownEvent:
		return d.skipMany(n - 1)
	case blockStored:
		fields = positions[d.dialect].stored
	case blockRemoved:
		fields = positions[d.dialect].removed
	}
	for i := range n - 1 {
		f := unknownField
		if i < len(fields) {
			f = fields[i]
		}
		if err := d.value(f); err != nil {
			return fmt.Errorf("value %d: %w", i+1, err)
		}
	}
	return nil
}

func (d *decoder) mapEvent() error {
	n, err := d.in.DecodeMapLen()
	if err != nil {
		return err
	}
	start := d.src.Len()
	for i := range n {
		name, err := d.string()
		if err != nil {
			return err
		}
		f := fieldNamed(name)
		if f != typeField {
			// Publishers write the type first. If one does not, what its fields
			// hold is not known before the type is.
			if d.ev.kind == unknownEvent && i == 0 {
				if err := d.findType(n); err != nil || d.ev.kind == unknownEvent {
					return err
				}
				if err := d.rewind(start); err != nil {
					return err
				}
				if _, err := d.string(); err != nil {
					return err
				}
			}
			if err := d.value(f); err != nil {
				return fmt.Errorf("value %d: %w", i, err)
			}
			continue
		}
		if name, err = d.string(); err != nil {
			return err
		}
		if d.ev.kind = kindNamed(name); d.ev.kind == unknownEvent {
			return d.skipMany(2 * (n - 1 - i))
		}
	}
	return nil
}

// findType looks through the rest of a map of n pairs, whose first key was read, for
// the event's type, and reads it to its end.
func (d *decoder) findType(n int) error {
	if err := d.skip(0); err != nil {
		return err
	}
	for range n - 1 {
		name, err := d.string()
		if err != nil {
			return err
		}
		if fieldNamed(name) != typeField {
			if err := d.skip(0); err != nil {
				return err
			}
			continue
		}
		if name, err = d.string(); err != nil {
			return err
		}
		d.ev.kind = kindNamed(name)
	}
	return nil
}

// rewind goes back to where the given number of bytes was left.
func (d *decoder) rewind(left int) error {
	_, err := d.src.Seek(int64(d.src.Len()-left), io.SeekCurrent)
	return err
}

// string reads a text or byte string into the decoder's buffer. Of a longer one it
// keeps the beginning, since no name that means something here is longer.
func (d *decoder) string() ([]byte, error) {
	n, err := d.in.DecodeBytesLen()
	if err != nil || n < 0 {
		return nil, err
	}
	kept := d.text[:min(n, len(d.text))]
	if err := d.in.ReadFull(kept); err != nil {
		return nil, err
	}
	return kept, d.discard(n - len(kept))
}

// skip passes over one value. It is not the library's, which recurses once for
// every level of nesting that the input has.
func (d *decoder) skip(depth int) error {
	code, err := d.in.PeekCode()
	if err != nil {
		return err
	}
	if depth > maxDepth {
		return errTooDeep
	}
	values := 0
	switch {
	case isArray(code):
		values, err = d.in.DecodeArrayLen()
	case isMap(code):
		values, err = d.in.DecodeMapLen()
		values *= 2
	case isString(code) || msgpcode.IsBin(code):
		var n int
		if n, err = d.in.DecodeBytesLen(); err == nil {
			err = d.discard(n)
		}
	case msgpcode.IsExt(code):
		var n int
		if _, n, err = d.in.DecodeExtHeader(); err == nil {
			err = d.discard(n)
		}
	default:
		err = d.in.Skip()
	}
	for ; err == nil && values > 0; values-- {
		err = d.skip(depth + 1)
	}
	return err
}

// skipMany passes over the given number of values.
func (d *decoder) skipMany(values int) error {
	for range values {
		if err := d.skip(0); err != nil {
			return err
		}
	}
	return nil
}

func (d *decoder) discard(n int) error {
	if n > d.src.Len() {
		return fmt.Errorf("string of %d bytes in %d: %w", n, d.src.Len(), errTooLong)
	}
	_, err := d.src.Seek(int64(n), io.SeekCurrent)
	return err
}

func isArray(code byte) bool {
	return msgpcode.IsFixedArray(code) || code == msgpcode.Array16 || code == msgpcode.Array32
}

func isMap(code byte) bool {
	return msgpcode.IsFixedMap(code) || code == msgpcode.Map16 || code == msgpcode.Map32
}

func isString(code byte) bool { return msgpcode.IsString(code) }

func isInt(code byte) bool {
	return msgpcode.IsFixedNum(code) || code >= msgpcode.Uint8 && code <= msgpcode.Int64
}
