package kvevents

import (
	"bytes"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"strconv"
	"strings"

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

// field names a value inside an event, in whichever encoding.
type field uint8

const (
	unknownField field = iota
	ignoredField
	typeField
	hashesField
	parentField
	tokensField
	blockSizeField
	loraField
	mediumField
	extraKeysField
	groupField
	specKindField
	windowField
	localityField
	saltField
)

// The positions of fields after the tag in the array encoding. vLLM appended
// locality, ownership and session id in 2026; SGLang put the salt where vLLM has
// the adapter's name.
var positions = [2]struct{ stored, removed []field }{
	VLLM: {
		stored: []field{hashesField, parentField, tokensField, blockSizeField, loraField, mediumField, loraField, extraKeysField,
			groupField, specKindField, windowField, localityField, ignoredField, ignoredField},
		removed: []field{hashesField, mediumField, groupField, localityField, ignoredField},
	},
	SGLang: {
		stored:  []field{hashesField, parentField, tokensField, blockSizeField, loraField, mediumField, saltField, ignoredField},
		removed: []field{hashesField, mediumField},
	},
}

func fieldNamed(name []byte) field {
	switch string(name) {
	case "type":
		return typeField
	case "block_hashes":
		return hashesField
	case "parent_block_hash":
		return parentField
	case "token_ids":
		return tokensField
	case "block_size":
		return blockSizeField
	case "lora_id", "lora_name":
		return loraField
	case "medium":
		return mediumField
	case "extra_keys":
		return extraKeysField
	case "group_idx":
		return groupField
	case "kv_cache_spec_kind":
		return specKindField
	case "kv_cache_spec_sliding_window":
		return windowField
	case "locality":
		return localityField
	case "cache_salt":
		return saltField
	case "ownership", "session_id":
		return ignoredField
	}
	return unknownField
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

// value reads one field into the event. A null leaves the field as it is.
func (d *decoder) value(f field) error {
	switch f {
	case unknownField:
		d.unknownFields++
		return d.skip(0)
	case ignoredField:
		return d.skip(0)
	}
	code, err := d.in.PeekCode()
	if err != nil {
		return err
	}
	if code == msgpcode.Nil {
		return d.in.DecodeNil()
	}
	switch f {
	case hashesField:
		return d.hashes()
	case parentField:
		d.ev.hasParent = true
		d.ev.parent, err = d.hash()
	case tokensField:
		return d.tokens()
	case blockSizeField:
		d.ev.blockSize, err = d.in.DecodeInt64()
	case groupField:
		d.ev.hasGroup = true
		d.ev.group, err = d.in.DecodeInt64()
	case loraField:
		return d.lora(code)
	case mediumField:
		return d.oneOf(&d.ev.elsewhere, "gpu")
	case localityField:
		return d.oneOf(&d.ev.elsewhere, "local")
	case windowField:
		d.ev.partial = true
		return d.skip(0)
	case specKindField:
		return d.specKind()
	case extraKeysField:
		return d.extraKeys()
	case saltField:
		return d.extraKey(0)
	}
	return err
}

func (d *decoder) hashes() error {
	n, err := d.in.DecodeArrayLen()
	if err != nil {
		return err
	}
	if n > maxHashesPerEvent {
		return fmt.Errorf("%d block hashes: %w", n, errTooLong)
	}
	d.ev.hashes = d.ev.hashes[:0]
	for range n {
		h, err := d.hash()
		if err != nil {
			return err
		}
		d.ev.hashes = append(d.ev.hashes, h)
	}
	return nil
}

func (d *decoder) hash() (engineHash, error) {
	code, err := d.in.PeekCode()
	if err != nil {
		return engineHash{}, err
	}
	if isInt(code) {
		v, err := d.in.DecodeInt64()
		return engineHash{lo: uint64(v)}, err
	}
	if !isString(code) && !msgpcode.IsBin(code) {
		return engineHash{}, fmt.Errorf("block hash of type %#x", code)
	}
	before := d.src.Len()
	raw, err := d.string()
	if err != nil {
		return engineHash{}, err
	}
	if before-d.src.Len() > maxHashBytes+5 {
		return engineHash{}, fmt.Errorf("block hash: %w", errTooLong)
	}
	return engineHash{hi: maphash.Bytes(d.seeds[0], raw) | 1, lo: maphash.Bytes(d.seeds[1], raw)}, nil
}

func (d *decoder) tokens() error {
	n, err := d.in.DecodeArrayLen()
	if err != nil {
		return err
	}
	if n > maxTokensPerEvent {
		return fmt.Errorf("%d tokens: %w", n, errTooLong)
	}
	if n > 0 {
		code, err := d.in.PeekCode()
		if err != nil {
			return err
		}
		if !isInt(code) {
			d.ev.oddTokens = true
			return d.skipMany(n)
		}
	}
	tokens := d.ev.tokens[:0]
	for range n {
		v, err := d.in.DecodeInt64()
		if err != nil {
			return err
		}
		tokens = append(tokens, int32(v))
	}
	d.ev.tokens = tokens
	return nil
}

// lora reads an adapter's number or name; 0 and "" are none.
func (d *decoder) lora(code byte) error {
	if isInt(code) {
		id, err := d.in.DecodeInt64()
		d.ev.lora = d.ev.lora || id > 0
		return err
	}
	if !isString(code) {
		d.ev.lora = true
		return d.skip(0)
	}
	name, err := d.string()
	d.ev.lora = d.ev.lora || len(name) > 0
	return err
}

// oneOf sets flag unless the text is the one wanted, in either case of letters.
func (d *decoder) oneOf(flag *bool, wanted string) error {
	text, err := d.string()
	if err == nil && !strings.EqualFold(string(text), wanted) {
		*flag = true
	}
	return err
}

// specKind tells groups whose cache of a prefix is all of it from those that keep
// a window or a state: a hit on those says nothing about the tokens before it.
func (d *decoder) specKind() error {
	text, err := d.string()
	if err != nil {
		return err
	}
	kind := strings.ToLower(string(text))
	full := strings.Contains(kind, "full_attention") || strings.Contains(kind, "mla") && !strings.Contains(kind, "sliding")
	d.ev.partial = d.ev.partial || !full
	return nil
}

// extraKeys reads one entry for each block: null, or a list of what else went
// into that block's hash.
func (d *decoder) extraKeys() error {
	code, err := d.in.PeekCode()
	if err != nil {
		return err
	}
	if !isArray(code) {
		d.ev.foreignFrom = 0
		return d.skip(0)
	}
	n, err := d.in.DecodeArrayLen()
	if err != nil {
		return err
	}
	for block := range n {
		code, err := d.in.PeekCode()
		switch {
		case err != nil:
			return err
		case code == msgpcode.Nil:
			err = d.in.DecodeNil()
		case isArray(code):
			var keys int
			keys, err = d.in.DecodeArrayLen()
			for k := 0; err == nil && k < keys; k++ {
				err = d.extraKey(block)
			}
		default:
			err = d.extraKey(block)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// saltPrefix with the policy version in decimal is the cache salt of our requests.
const saltPrefix = "holdfast-"

func (d *decoder) extraKey(block int) error {
	code, err := d.in.PeekCode()
	if err != nil {
		return err
	}
	if code == msgpcode.Nil {
		return d.in.DecodeNil()
	}
	if isString(code) {
		text, err := d.string()
		if err != nil || len(text) == 0 {
			return err
		}
		if digits, ours := bytes.CutPrefix(text, []byte(saltPrefix)); ours && block == 0 {
			if version, err := strconv.ParseInt(string(digits), 10, 64); err == nil {
				d.ev.salted, d.ev.version = true, version
				return nil
			}
		}
	} else if err := d.skip(0); err != nil {
		return err
	}
	d.ev.foreignFrom = min(d.ev.foreignFrom, block)
	return nil
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
