package kvevents

import (
	"context"
	"testing"

	"holdfast/router/prefix"
)

// FuzzEvents lets the fuzzer write streams over few hashes, with everything that no
// engine would do: unknown parents, blocks that are their own parent, repeated and
// contradictory stores. After each batch, what was told must be in the table, what is
// in the table must have been stored and not removed, and the counts must be exact.
func FuzzEvents(f *testing.F) {
	f.Add([]byte("\x00\x01\x00\x02\x00\x02\x01\x02\x10\x01\x02\x00"))
	f.Add([]byte("orphans first, then parents; 0123456789 and so on until the end"))
	f.Fuzz(func(t *testing.T, program []byte) {
		v := newView()
		cfg := testConfig(v)
		cfg.BlockTokens, cfg.MaxBlocks = 1, 24
		s := newSubscriber(t, cfg)
		st := s.streams[0]
		held := map[orphanKey]bool{}
		seq := uint64(0)
		var events list
		for ; len(program) >= 4; program = program[4:] {
			events = append(events, fuzzedEvent(program, held))
			if program[0]&0x30 != 0 {
				continue
			}
			if err := st.frame(context.Background(), seq, batchOf(t, float64(seq+1), events...)); err != nil {
				t.Fatal(err)
			}
			seq, events = seq+1, nil
			checkTable(t, s, v, held)
		}
	})
}

// fuzzedEvent makes an event of four bytes and notes what is held after it.
func fuzzedEvent(b []byte, held map[orphanKey]bool) any {
	group := int(b[0] >> 6 & 1)
	first, count := int(b[1]%16), 1+int(b[3]%3)
	var hashes list
	for i := range count {
		hashes = append(hashes, first+i)
	}
	keys := func(change func(orphanKey)) {
		for i := range count {
			change(orphanKey{group, engineHash{lo: uint64(first + i)}})
		}
	}
	switch b[0] % 16 {
	case 0:
		clear(held)
		return list{"AllBlocksCleared"}
	case 1, 2, 3, 4:
		keys(func(k orphanKey) { delete(held, k) })
		return list{"BlockRemoved", hashes, "GPU", group}
	case 5:
		for group = range 2 {
			keys(func(k orphanKey) { delete(held, k) })
		}
		return list{"BlockRemoved", hashes, "GPU"}
	case 6:
		return list{"BlockRemoved", hashes, "CPU", group}
	}
	keys(func(k orphanKey) { held[k] = true })
	var parent, lora any
	if b[2]&0x80 == 0 {
		parent = int(b[2] % 16)
	}
	if b[0]%16 == 7 {
		lora = 1
	}
	return list{"BlockStored", hashes, parent, run(int(b[3]>>2), count), 1, lora, "GPU", nil, nil, group}
}

func checkTable(t *testing.T, s *Subscriber, v *view, held map[orphanKey]bool) {
	t.Helper()
	table := s.streams[0].table
	owns := map[place]bool{}
	entries := 0
	for _, g := range table.groups {
		for hash, c := range g.blocks {
			entries++
			owns[place{0, g.id, c.own}] = true
			if !held[orphanKey{g.id, hash}] {
				t.Fatalf("block %d of group %d is known and not stored", hash.lo, g.id)
			}
		}
	}
	for claimed := range v.blocks {
		if !owns[claimed] || claimed.block == prefix.Hash(0) {
			t.Fatalf("%+v is claimed and not known", claimed)
		}
	}
	waiting, live := 0, 0
	for key, at := range table.orphans.byBlock {
		waiting++
		if !held[key] || at.orphan.dead || at.orphan.gone[at.index] {
			t.Fatalf("orphan block %+v is not stored", key)
		}
	}
	for _, siblings := range table.orphans.byParent {
		live += len(siblings)
	}
	h := s.Health()
	if entries != table.entries || int64(entries) != h.OwnHashes || waiting != table.orphans.blocks || int64(waiting) != h.OrphansHeld || live != table.orphans.live {
		t.Fatalf("%d entries, %d orphans in %d events: table %d, %d, %d; %+v", entries, waiting, live, table.entries, table.orphans.blocks, table.orphans.live, h)
	}
	if h.Resyncs > 0 {
		// The table was full once and began anew: from now on it is the truth itself.
		clear(held)
		for _, g := range table.groups {
			for hash := range g.blocks {
				held[orphanKey{g.id, hash}] = true
			}
		}
		for key := range table.orphans.byBlock {
			held[key] = true
		}
	}
}
