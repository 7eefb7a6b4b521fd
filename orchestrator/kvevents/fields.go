package kvevents

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"strconv"
	"strings"

	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

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
