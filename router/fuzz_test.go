package router

import (
	"encoding/binary"
	"math"
	"testing"
)

// FuzzStep feeds events that no sane service would send, in any order: unknown
// and repeated ids, ends without beginnings, absurd lengths, time that runs back.
// Nothing may panic, every kept sum must stay right, and the core must still take
// in a lawful session afterwards.
func FuzzStep(f *testing.F) {
	f.Add([]byte("\x00a\x10\x00\x05b\x20\x01\x05c\x30\x02\x08d\x00\x03"))
	f.Add([]byte("holdfast admits, holds, restores, resets and forgets; 0123456789abcdefghijklmnopqrstuvwxyz"))
	f.Fuzz(func(t *testing.T, program []byte) {
		cfg := []Config{DefaultConfig(), MISATBorrow(), PlacementOnly()}[len(program)%3]
		cfg.Footprint.PriorTokens = 2000
		cfg.MaxClasses = 3
		c := mustCore(t, cfg)
		for ; len(program) >= 4; program = program[4:] {
			ev := unlawful(program[:4])
			c.Step(ev, nil)
			if err := c.CheckInvariants(); err != nil {
				t.Fatalf("after %T %+v: %v", ev, ev, err)
			}
		}
		_ = c.Describe()
		c.Step(&InstanceJoined{At: c.now, Instance: "fresh", CapacityBlocks: 1 << 30, BlockTokens: 16, PolicyVersion: math.MaxInt64}, nil)
		admitted := false
		for _, d := range c.Step(&TurnRequested{At: c.now, Session: sid(9999), Class: "agent", PromptTokens: 100}, nil) {
			admitted = admitted || d.Kind == Admit && d.Session == sid(9999)
		}
		// Only sessions that stand before it may keep it waiting.
		if !admitted && c.queued == 0 {
			t.Fatalf("a lawful session was not admitted to an empty instance:\n%s", c.Describe())
		}
	})
}

// unlawful makes an event of four bytes: its kind, who, how much, and a twist.
func unlawful(b []byte) Event {
	lengths := []int64{0, 1, 15, 16, 500, 3000, 20_000, -1, math.MaxInt64, math.MinInt64, 1 << 41, 160, 1000}
	at := Nanos(binary.LittleEndian.Uint16(b[2:])) * second / 100
	s, in, turn := sid(int(b[1]%6)), InstanceID([]string{"a", "b", "", "c"}[b[1]>>6]), int(b[3]%4)-1
	tokens := lengths[int(b[2])%len(lengths)]
	var blocks []BlockHash
	for i := range int(b[3] % 64) {
		blocks = append(blocks, BlockHash(int(b[1]%6)<<8+i))
	}
	class := ClassID([]string{"agent", "rlvr", "", "x", "y", "z", "w"}[b[3]%7])
	group := gid(int(b[3] % 3))
	if b[3]%3 == 0 {
		group = GroupID{}
	}
	switch b[0] % 17 {
	case 0, 1:
		return &InstanceJoined{At: at, Instance: in, CapacityBlocks: lengths[int(b[3])%len(lengths)], BlockTokens: int(b[2] % 33), MaxContextTokens: tokens, PolicyVersion: int64(b[3] % 2), PrefillTokensPerSecond: float64(tokens)}
	case 2:
		return &InstanceLeft{At: at, Instance: in}
	case 3:
		return &InstanceDraining{At: at, Instance: in, Draining: b[3]&1 == 0}
	case 4:
		return &InstanceReset{At: at, Instance: in, PolicyVersion: int64(b[3] % 3)}
	case 5, 6, 7:
		return &TurnRequested{At: at, Session: s, Class: class, Group: group, Turn: turn, PromptTokens: tokens, SharedTokens: lengths[int(b[3])%len(lengths)], KnownBlocks: int(lengths[int(b[3]/2)%len(lengths)]), NewBlocks: blocks, Deadline: tokens, Avoid: in}
	case 8:
		return &TurnStarted{At: at, Session: s, Turn: turn}
	case 9, 10:
		return &TurnEnded{At: at, Session: s, Turn: turn, Instance: in, PromptTokens: tokens, CachedTokens: lengths[int(b[3])%len(lengths)], OutputTokens: tokens, PrefillNanos: tokens, Failed: b[3]&1 == 0}
	case 11:
		return &SessionEnded{At: at, Session: s, Status: EndStatus(b[3] % 8)}
	case 12:
		return &Snapshot{At: at, TakenAt: at - tokens, Instance: in, Running: int(b[3]), Waiting: int(tokens), Sessions: []SnapshotSession{{Session: s, Tokens: tokens, CachedBlocks: tokens}}}
	case 13:
		return &BlocksStored{At: at, Instance: in, Rank: turn, Group: int(b[3] % 2), Blocks: blocks}
	case 14:
		return &BlocksRemoved{At: at, Instance: in, Rank: turn, Blocks: blocks}
	case 15:
		return &SessionRestored{At: at, Session: s, Class: class, Group: group, Turn: turn, PromptTokens: tokens, SharedTokens: tokens, Instance: in, AdmittedAt: at, HeldSince: tokens, ResidencyNanos: tokens, InFlight: b[3]&1 == 0}
	}
	if b[3]&1 == 0 {
		return &ObservabilityChanged{At: at, Instance: in, State: Observability(b[3] % 4)}
	}
	return &Tick{At: at}
}
