package publish

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

var examples = []Event{
	{Kind: Stored, Hashes: []uint64{0xfedcba9876543210, 7}, Tokens: []int32{1, 2, 300, 70_000}, BlockTokens: 2, Salt: "s"},
	{Kind: Stored, Hashes: []uint64{9}, Parent: 7, HasParent: true, Tokens: []int32{5, 6}, BlockTokens: 2, Salt: "s"},
	{Kind: Removed, Hashes: []uint64{9, 7}},
	{Kind: Cleared},
}

func decode(t *testing.T, payload []byte) any {
	t.Helper()
	d := msgpack.NewDecoder(bytes.NewReader(payload))
	d.UseLooseInterfaceDecoding(true)
	v, err := d.DecodeInterface()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

type (
	array = []any
	table = map[string]any
)

// TestShapes writes every dialect down by hand, as the engines' sources declare it.
// Small unsigned integers decode as int64.
func TestShapes(t *testing.T) {
	const hash = uint64(0xfedcba9876543210)
	tokens, more := array{int64(1), int64(2), uint64(300), uint64(70_000)}, array{int64(5), int64(6)}
	mapEvents := array{
		table{
			"type": "BlockStored", "block_hashes": array{hash, int64(7)}, "parent_block_hash": nil, "token_ids": tokens, "block_size": int64(2),
			"lora_id": nil, "lora_name": nil, "medium": "GPU", "extra_keys": array{array{"s"}, nil}, "group_idx": int64(0), "kv_cache_spec_kind": "full_attention",
		},
		table{
			"type": "BlockStored", "block_hashes": array{int64(9)}, "parent_block_hash": int64(7), "token_ids": more, "block_size": int64(2),
			"lora_id": nil, "lora_name": nil, "medium": "GPU", "group_idx": int64(0), "kv_cache_spec_kind": "full_attention",
		},
		table{"type": "BlockRemoved", "block_hashes": array{int64(9), int64(7)}, "medium": "GPU", "group_idx": int64(0)},
		table{"type": "AllBlocksCleared"},
	}
	for encoding, want := range map[Encoding]any{
		Array: array{1.5, array{
			array{"BlockStored", array{hash, int64(7)}, nil, tokens, int64(2), nil, "GPU", nil, array{array{"s"}, nil}, int64(0), "full_attention", nil},
			array{"BlockStored", array{int64(9)}, int64(7), more, int64(2), nil, "GPU", nil, nil, int64(0), "full_attention", nil},
			array{"BlockRemoved", array{int64(9), int64(7)}, "GPU", int64(0)},
			array{"AllBlocksCleared"},
		}, int64(3)},
		Map:   table{"ts": 1.5, "events": mapEvents, "data_parallel_rank": int64(3)},
		Mixed: array{1.5, mapEvents, int64(3)},
		SGLang: array{1.5, array{
			array{"BlockStored", array{int64(-0x123456789abcdf0), int64(7)}, nil, tokens, int64(2), nil, "GPU"},
			array{"BlockStored", array{int64(9)}, int64(7), more, int64(2), nil, "GPU"},
			array{"BlockRemoved", array{int64(9), int64(7)}, "GPU"},
			array{"AllBlocksCleared"},
		}, int64(3)},
	} {
		got := decode(t, newEncoder(encoding, 3).batch(time.Unix(1, 500_000_000), examples))
		if !reflect.DeepEqual(normal(got), normal(want)) {
			t.Errorf("%s:\n got %v\nwant %v", encoding, got, want)
		}
	}
}

// normal makes all integers that fit int64 of that type.
func normal(v any) any {
	switch x := v.(type) {
	case array:
		out := make(array, len(x))
		for i := range x {
			out[i] = normal(x[i])
		}
		return out
	case table:
		out := table{}
		for k := range x {
			out[k] = normal(x[k])
		}
		return out
	case uint64:
		if x < 1<<63 {
			return int64(x)
		}
	}
	return v
}

// TestBytes compares with bytes put together by hand from the MessagePack specification.
func TestBytes(t *testing.T) {
	got := newEncoder(Array, 0).batch(time.Unix(0, 0), []Event{{Kind: Removed, Hashes: []uint64{1 << 63, 5}}})
	want := "93" + "cb0000000000000000" + // [ts,
		"91" + "94" + "ac426c6f636b52656d6f766564" + // [["BlockRemoved",
		"92" + "cf8000000000000000" + "05" + // [2^63, 5],
		"a3475055" + "00" + // "GPU", 0]],
		"00" // rank]
	if hex.EncodeToString(got) != want {
		t.Errorf("got  %x\nwant %s", got, want)
	}
	signed := newEncoder(SGLang, 0).batch(time.Unix(0, 0), []Event{{Kind: Removed, Hashes: []uint64{1 << 63}}})
	if !bytes.Contains(signed, []byte{0x91, 0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0}) {
		t.Errorf("the least int64 is not in %x", signed)
	}
}
