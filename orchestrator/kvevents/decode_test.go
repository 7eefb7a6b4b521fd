package kvevents

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// seen is an event as the tests compare it.
type seen struct {
	kind      eventKind
	hashes    []engineHash
	parent    engineHash
	hasParent bool
	tokens    []int32
	blockSize int64
	elsewhere bool
}

func decodeAll(d *decoder, payload []byte) (events []seen, err error) {
	err = d.batch(payload, func(ev *event) error {
		events = append(events, seen{ev.kind, slices.Clone(ev.hashes), ev.parent, ev.hasParent, slices.Clone(ev.tokens), ev.blockSize, ev.elsewhere})
		return nil
	})
	return events, err
}

// wanted turns the recorder's JSON of a payload into events.
func wanted(t *testing.T, decoded string) (ts float64, events []seen) {
	t.Helper()
	in := json.NewDecoder(strings.NewReader(decoded))
	in.UseNumber()
	var batch []any
	if err := in.Decode(&batch); err != nil {
		t.Fatal(err)
	}
	ts, _ = batch[0].(json.Number).Float64()
	for _, raw := range batch[1].([]any) {
		fields := map[string]any{}
		switch ev := raw.(type) {
		case map[string]any:
			fields = ev
		case []any:
			names := []string{"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"}
			if ev[0] == "BlockRemoved" {
				names = []string{"type", "block_hashes", "medium"}
			}
			for i := range min(len(names), len(ev)) {
				fields[names[i]] = ev[i]
			}
		}
		events = append(events, fromFields(t, fields))
	}
	return ts, events
}

func fromFields(t *testing.T, fields map[string]any) seen {
	t.Helper()
	want := seen{kind: kindNamed([]byte(fields["type"].(string)))}
	number := func(v any) (n uint64) {
		if _, err := fmt.Sscan(v.(json.Number).String(), &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if hashes, ok := fields["block_hashes"].([]any); ok {
		for _, h := range hashes {
			want.hashes = append(want.hashes, engineHash{lo: number(h)})
		}
	}
	if parent := fields["parent_block_hash"]; parent != nil {
		want.hasParent, want.parent = true, engineHash{lo: number(parent)}
	}
	if tokens, ok := fields["token_ids"].([]any); ok {
		for _, id := range tokens {
			want.tokens = append(want.tokens, int32(number(id)))
		}
		want.blockSize = int64(number(fields["block_size"]))
	}
	return want
}

func equalSeen(a, b seen) bool {
	return a.kind == b.kind && slices.Equal(a.hashes, b.hashes) && a.parent == b.parent && a.hasParent == b.hasParent &&
		slices.Equal(a.tokens, b.tokens) && a.blockSize == b.blockSize && a.elsewhere == b.elsewhere
}

// TestCapturedBatches decodes recorded bytes of both encodings and compares with
// what the recorder's own decoder made of them.
func TestCapturedBatches(t *testing.T) {
	for _, name := range []string{"kv_events_full_array.txt", "kv_events_full_map.txt", "kv_events_map.txt", "kv_replay.txt"} {
		d := newDecoder(VLLM)
		compared := 0
		for i, m := range readCapture(t, name) {
			payload := m.frames[len(m.frames)-1]
			if len(payload) == 0 {
				continue
			}
			ts, want := wanted(t, m.decoded)
			got, err := decodeAll(d, payload)
			if err != nil || len(got) != len(want) || !slices.EqualFunc(got, want, equalSeen) {
				t.Fatalf("%s message %d: %v\n got %+v\nwant %+v", name, i, err, got, want)
			}
			if !expectClose(d.timestamp(payload), ts) {
				t.Fatalf("%s message %d: time %f, want %f", name, i, d.timestamp(payload), ts)
			}
			compared += len(got)
		}
		if compared < 2 || d.unknownEvents+d.unknownFields > 0 {
			t.Fatalf("%s: %d events compared, %d and %d unknown", name, compared, d.unknownEvents, d.unknownFields)
		}
	}
}

func one(t *testing.T, d *decoder, payload []byte) event {
	t.Helper()
	var got event
	n := 0
	if err := d.batch(payload, func(ev *event) error { got, n = *ev, n+1; return nil }); err != nil || n != 1 {
		t.Fatalf("%d events, %v", n, err)
	}
	got.hashes, got.tokens = slices.Clone(got.hashes), slices.Clone(got.tokens)
	return got
}

// TestEncodings: array and map, of batch and event, say the same.
func TestEncodings(t *testing.T) {
	fields := dict{
		"type": "BlockStored", "block_hashes": list{uint64(1) << 63, 5}, "parent_block_hash": 9, "token_ids": run(1, 32), "block_size": 16,
		"lora_id": nil, "medium": "GPU", "lora_name": nil, "extra_keys": list{nil, nil}, "group_idx": 3,
		"kv_cache_spec_kind": "full_attention", "kv_cache_spec_sliding_window": nil, "locality": "LOCAL", "ownership": nil, "session_id": "s",
	}
	positional := list{"BlockStored", list{uint64(1) << 63, 5}, 9, run(1, 32), 16, nil, "GPU", nil, list{nil, nil}, 3, "full_attention", nil, "LOCAL", nil, "s"}
	for name, payload := range map[string][]byte{
		"array in array": pack(t, list{1.5, list{positional}, 0}),
		"map in array":   pack(t, list{1.5, list{fields}}),
		"map in map":     pack(t, dict{"ts": 1.5, "events": list{fields}, "data_parallel_rank": 2}),
		"array in map":   pack(t, dict{"events": list{positional}, "ts": 1.5}),
	} {
		d := newDecoder(VLLM)
		got := one(t, d, payload)
		if got.kind != blockStored || !slices.Equal(got.hashes, []engineHash{{lo: 1 << 63}, {lo: 5}}) || got.parent != (engineHash{lo: 9}) ||
			!slices.Equal(got.tokens, run(1, 32)) || got.blockSize != 16 || got.group != 3 || !got.hasGroup || got.lora || got.elsewhere || got.partial ||
			got.foreignFrom <= 2 || got.salted {
			t.Errorf("%s: %+v", name, got)
		}
		if d.timestamp(payload) != 1.5 || d.unknownFields != 0 {
			t.Errorf("%s: time %f, %d unknown", name, d.timestamp(payload), d.unknownFields)
		}
	}
}

// TestFieldVariants goes through what each field may hold.
func TestFieldVariants(t *testing.T) {
	with := func(change dict) []byte {
		fields := dict{"type": "BlockStored", "block_hashes": list{1, 2}, "token_ids": run(0, 32), "block_size": 16}
		for k, v := range change {
			fields[k] = v
		}
		return pack(t, list{1.0, list{fields}})
	}
	for name, test := range map[string]struct {
		fields dict
		ok     func(event) bool
	}{
		"signed hash":      {dict{"block_hashes": list{int64(-3)}}, func(e event) bool { return e.hashes[0] == engineHash{lo: 1<<64 - 3} }},
		"raw hashes":       {dict{"block_hashes": list{make([]byte, 32), make([]byte, 8)}}, func(e event) bool { return e.hashes[0].hi&1 == 1 && e.hashes[0] != e.hashes[1] }},
		"no parent":        {dict{"parent_block_hash": nil}, func(e event) bool { return !e.hasParent }},
		"adapter id":       {dict{"lora_id": 4}, func(e event) bool { return e.lora }},
		"adapter id 0":     {dict{"lora_id": 0}, func(e event) bool { return !e.lora }},
		"adapter name":     {dict{"lora_name": "x"}, func(e event) bool { return e.lora }},
		"host memory":      {dict{"medium": "CPU_TIER1"}, func(e event) bool { return e.elsewhere }},
		"lower case":       {dict{"medium": "gpu"}, func(e event) bool { return !e.elsewhere }},
		"remote":           {dict{"locality": "REMOTE"}, func(e event) bool { return e.elsewhere }},
		"window":           {dict{"kv_cache_spec_sliding_window": 4096}, func(e event) bool { return e.partial }},
		"sliding kind":     {dict{"kv_cache_spec_kind": "sliding_window_mla"}, func(e event) bool { return e.partial }},
		"state kind":       {dict{"kv_cache_spec_kind": "mamba"}, func(e event) bool { return e.partial }},
		"latent kind":      {dict{"kv_cache_spec_kind": "mla_attention"}, func(e event) bool { return !e.partial }},
		"our salt":         {dict{"extra_keys": list{list{"holdfast-41"}, nil}}, func(e event) bool { return e.salted && e.version == 41 && e.foreignFrom > 2 }},
		"negative version": {dict{"extra_keys": list{list{"holdfast--2"}}}, func(e event) bool { return e.salted && e.version == -2 }},
		"another salt":     {dict{"extra_keys": list{list{"tenant"}, nil}}, func(e event) bool { return !e.salted && e.foreignFrom == 0 }},
		"salt and image":   {dict{"extra_keys": list{list{"holdfast-41", list{"img", 3}}}}, func(e event) bool { return e.foreignFrom == 0 }},
		"image later":      {dict{"extra_keys": list{nil, list{list{"img", 3}}}}, func(e event) bool { return e.foreignFrom == 1 }},
		"long extra key":   {dict{"extra_keys": list{nil, list{strings.Repeat("x", 5000)}}}, func(e event) bool { return e.foreignFrom == 1 }},
		"salt later":       {dict{"extra_keys": list{nil, list{"holdfast-41"}}}, func(e event) bool { return e.foreignFrom == 1 && !e.salted }},
		"salt field":       {dict{"cache_salt": "holdfast-5"}, func(e event) bool { return e.salted && e.version == 5 }},
		"token pairs":      {dict{"token_ids": list{list{1, 2}, list{2, 3}}}, func(e event) bool { return e.oddTokens }},
		"no group":         {dict{}, func(e event) bool { return !e.hasGroup && e.group == 0 }},
	} {
		if got := one(t, newDecoder(VLLM), with(test.fields)); !test.ok(got) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// TestSGLangPositions: what vLLM has as an adapter's name is a salt here, and hashes
// are signed.
func TestSGLangPositions(t *testing.T) {
	payload := pack(t, list{1.0, list{list{"BlockStored", list{-7}, -6, run(0, 1), 1, nil, "CPU_TIER2", "holdfast-3", "session"}}})
	got := one(t, newDecoder(SGLang), payload)
	if got.lora || !got.salted || got.version != 3 || !got.elsewhere || got.parent != (engineHash{lo: 1<<64 - 6}) {
		t.Errorf("as sglang: %+v", got)
	}
	if got := one(t, newDecoder(VLLM), payload); !got.lora {
		t.Errorf("as vllm: %+v", got)
	}
	removed := one(t, newDecoder(SGLang), pack(t, list{1.0, list{list{"BlockRemoved", list{-7}, "GPU", "unknown"}}}))
	if removed.elsewhere || removed.hasGroup {
		t.Errorf("removed: %+v", removed)
	}
}

// TestUnknown: what a later version adds is passed over, counted, and hides nothing.
func TestUnknown(t *testing.T) {
	long := append(slices.Clone(storedEvent(list{1}, nil, run(0, 16), 16)), 3, "full_attention", nil, "LOCAL", nil, nil, "new", dict{"deep": list{list{1}}})
	payload := pack(t, list{1.0, list{
		list{"BlockMigrated", list{1}, 2}, dict{"type": "BlockMigrated", "block_hashes": "not a list"}, list{}, list{3}, 17, dict{"x": 1},
		dict{"type": "AllBlocksCleared", "why": list{dict{"a": 1}}}, long,
	}, 0, "fourth"})
	d := newDecoder(VLLM)
	got, err := decodeAll(d, payload)
	if err != nil || len(got) != 2 || got[0].kind != allBlocksCleared || got[1].kind != blockStored {
		t.Fatalf("%v %+v", err, got)
	}
	// Fields: one in the batch, one in the clear, two in the last.
	if d.unknownEvents != 6 || d.unknownFields != 4 {
		t.Fatalf("%d events and %d fields unknown", d.unknownEvents, d.unknownFields)
	}
}

// TestMalformed: an error and not a panic, a hang or a large allocation.
func TestMalformed(t *testing.T) {
	whole := readCapture(t, "kv_events_full_map.txt")[0].frames[2]
	d := newDecoder(VLLM)
	for n := range whole {
		if _, err := decodeAll(d, whole[:n]); err == nil {
			t.Fatalf("the first %d of %d bytes passed", n, len(whole))
		}
	}
	deep := append([]byte{0x93, 0xc0, 0x90}, slices.Repeat([]byte{0x91}, 1<<20)...)
	for name, test := range map[string]struct {
		payload []byte
		cause   error
	}{
		"empty":             {nil, nil},
		"a number":          {[]byte{1}, errNotBatch},
		"deep nesting":      {deep, errTooDeep},
		"four billion":      {[]byte{0x92, 0xc0, 0xdd, 0xff, 0xff, 0xff, 0xff}, errTooLong},
		"claimed hashes":    {[]byte{0x92, 0xc0, 0x91, 0x92, 0xac, 'B', 'l', 'o', 'c', 'k', 'R', 'e', 'm', 'o', 'v', 'e', 'd', 0xdd, 0x7f, 0xff, 0xff, 0xff}, errTooLong},
		"long hash":         {pack(t, list{1.0, list{removedEvent(make([]byte, 1000))}}), errTooLong},
		"hash of floats":    {pack(t, list{1.0, list{removedEvent(1.5)}}), nil},
		"trailing bytes":    {append(slices.Clone(whole), 0), nil},
		"no events":         {pack(t, dict{"ts": 1.0}), nil},
		"extension claimed": {[]byte{0x92, 0xc9, 0xff, 0xff, 0xff, 0xff, 1}, errTooLong},
	} {
		_, err := decodeAll(newDecoder(VLLM), test.payload)
		if err == nil || test.cause != nil && !errors.Is(err, test.cause) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := newDecoder(VLLM).timestamp(deep); got != 0 {
		t.Errorf("time of nothing: %f", got)
	}
}

// TestDecodeAllocatesNothing once the buffers have grown.
func TestDecodeAllocatesNothing(t *testing.T) {
	for _, name := range []string{"kv_events_full_array.txt", "kv_events_full_map.txt"} {
		payload := readCapture(t, name)[0].frames[2]
		d := newDecoder(VLLM)
		each := func(*event) error { return nil }
		if n := testing.AllocsPerRun(100, func() { _ = d.batch(payload, each) }); n > 0 {
			t.Errorf("%s: %v allocations for four events", name, n)
		}
	}
}

func FuzzDecodeBatch(f *testing.F) {
	for _, name := range []string{"kv_events_full_array.txt", "kv_events_full_map.txt", "kv_events_map.txt"} {
		for _, m := range readCapture(f, name) {
			if payload := m.frames[2]; len(payload) < 2000 {
				f.Add(payload)
			}
		}
	}
	f.Add(pack(f, list{1.0, list{list{"BlockStored", list{-7, []byte("0123456789abcdef")}, -6, run(0, 2), 1, 3, "CPU", "holdfast-3", list{nil, list{"holdfast-1", 2}}, 1, "mamba", 3}}}))
	f.Add(pack(f, dict{"ts": 1.0, "events": list{dict{"type": "BlockStored", "extra_keys": list{list{"holdfast-1"}}, "token_ids": list{list{1, 2}}}}}))
	f.Fuzz(func(t *testing.T, payload []byte) {
		for _, dialect := range []Dialect{VLLM, SGLang} {
			d := newDecoder(dialect)
			d.timestamp(payload)
			first, err := decodeAll(d, payload)
			for _, ev := range first {
				if ev.kind == unknownEvent || len(ev.tokens)+len(ev.hashes) > len(payload) {
					t.Fatalf("made %d hashes and %d tokens of kind %d from %d bytes", len(ev.hashes), len(ev.tokens), ev.kind, len(payload))
				}
			}
			// What came before must not show: the decoder is reused for every batch.
			again, errAgain := decodeAll(d, payload)
			if (err == nil) != (errAgain == nil) || !slices.EqualFunc(first, again, equalSeen) {
				t.Fatalf("a second reading differs: %v, %v", err, errAgain)
			}
		}
	})
}
