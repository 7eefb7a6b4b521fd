package trace

import (
	"fmt"
)

// mooncakeBlockTokens is the size of the blocks that hash_ids name.
const mooncakeBlockTokens = 512

// mooncakeLinkBlocks is how many full blocks a request must have before another
// can be recognised as its continuation: every request of the published trace
// starts with the same first block, so one block tells nothing.
const mooncakeLinkBlocks = 2

// maxMooncakeBlocks bounds the block hashes that are kept of one file, some 40
// bytes each. The published hour has 0.3 million.
const maxMooncakeBlocks = 16 << 20

// mooncakeRow is one request.
type mooncakeRow struct {
	Timestamp    *int64  `json:"timestamp"` // milliseconds
	InputLength  *int64  `json:"input_length"`
	OutputLength *int64  `json:"output_length"`
	HashIDs      []int64 `json:"hash_ids"`
}

// mooncakeSession is a session being put together.
type mooncakeSession struct {
	Session
	line          int
	lastTimestamp int64
	lastInput     int64
	// lastKey is the chain hash of the last request's full blocks, 0 if it has
	// too few of them to be continued.
	lastKey uint64
	// firstChain are the chain hashes of the first request's blocks.
	firstChain []uint64
}

// readMooncake reads Mooncake's request traces. They name no sessions, so
// sessions are derived from prefix structure: a request continues the session
// whose last request's full blocks all stand at the start of its own, if there
// are at least two such blocks, if it is later, and if it is at least as long as
// that request and its answer together. The longest such prefix wins; of several
// sessions that end in the same blocks, the latest. Requests too short to be
// told apart stay sessions of one turn. Memory holds the numbers of all
// requests and the chain hashes of their blocks.
//
// The interval to the next request is recorded and the gap, which holds a
// person's reading and typing, is unknown. The shared prefix of a session is the
// longest run of blocks that its first request has in common with another
// session's first request.
func readMooncake(src *source, yield yieldFunc) error {
	var sessions []*mooncakeSession
	continuable := map[uint64]*mooncakeSession{}
	var lastTimestamp int64
	blocks := 0
	err := eachLine(src.name, src.file, func(l line) error {
		row, err := decodeMooncakeRow(src.name, l, lastTimestamp)
		if err != nil {
			return err
		}
		lastTimestamp = *row.Timestamp
		if blocks += len(row.HashIDs); blocks > maxMooncakeBlocks {
			return fileErrorf(src.name, l.number, "hash_ids", "file has more than %d blocks", maxMooncakeBlocks)
		}
		chain := chainHashes(row.HashIDs)
		s := findMooncakeSession(continuable, chain, row)
		if s == nil {
			s = &mooncakeSession{firstChain: chain}
			s.ID = fmt.Sprintf("request-%d", l.number)
			s.StartSeconds = float64(*row.Timestamp) / 1e3
			s.PromptTokens = int(*row.InputLength)
			sessions = append(sessions, s)
		} else {
			s.link(row)
			delete(continuable, s.lastKey)
		}
		s.call(row, l.number)
		s.lastKey = 0
		if full := int(*row.InputLength) / mooncakeBlockTokens; full >= mooncakeLinkBlocks {
			s.lastKey = chain[full-1]
			continuable[s.lastKey] = s
		}
		return nil
	})
	if err != nil {
		return err
	}
	sharePrefixes(sessions)
	for _, s := range sessions {
		if err := yield(&s.Session, s.line); err != nil {
			return err
		}
	}
	return nil
}

func decodeMooncakeRow(name string, l line, notBefore int64) (mooncakeRow, error) {
	var row mooncakeRow
	if err := decodeLine(name, l, &row); err != nil {
		return row, err
	}
	switch {
	case row.Timestamp == nil:
		return row, fileErrorf(name, l.number, "timestamp", "is required")
	case *row.Timestamp < notBefore:
		return row, fileErrorf(name, l.number, "timestamp", "must not be before the line above (%d), is %d", notBefore, *row.Timestamp)
	case row.InputLength == nil || *row.InputLength < 1 || *row.InputLength > maxTokens:
		return row, fileErrorf(name, l.number, "input_length", "must be from 1 to %d%s", maxTokens, isValue(row.InputLength))
	case row.OutputLength == nil || *row.OutputLength < 0 || *row.OutputLength > maxTokens:
		return row, fileErrorf(name, l.number, "output_length", "must be from 0 to %d%s", maxTokens, isValue(row.OutputLength))
	}
	want := (*row.InputLength + mooncakeBlockTokens - 1) / mooncakeBlockTokens
	if int64(len(row.HashIDs)) != want {
		return row, fileErrorf(name, l.number, "hash_ids", "must name the %d blocks of %d tokens that input_length %d has, names %d",
			want, mooncakeBlockTokens, *row.InputLength, len(row.HashIDs))
	}
	return row, nil
}

// isValue ends an error message with the value given, if any.
func isValue(v *int64) string {
	if v == nil {
		return ", is missing"
	}
	return fmt.Sprintf(", is %d", *v)
}

// chainHashes gives, for each block, a hash of it and all blocks before it.
func chainHashes(ids []int64) []uint64 {
	chain := make([]uint64, len(ids))
	h := uint64(0)
	for i, id := range ids {
		h = mix(h ^ mix(uint64(id)+0x9e3779b97f4a7c15))
		chain[i] = h
	}
	return chain
}

// mix is the finaliser of splitmix64 (Steele, Lea, Flood 2014).
func mix(z uint64) uint64 {
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9
	z = (z ^ (z >> 27)) * 0x94d049bb133111eb
	return z ^ (z >> 31)
}

// findMooncakeSession returns the session that the request continues, or nil.
func findMooncakeSession(continuable map[uint64]*mooncakeSession, chain []uint64, row mooncakeRow) *mooncakeSession {
	for depth := len(chain); depth >= mooncakeLinkBlocks; depth-- {
		s := continuable[chain[depth-1]]
		if s == nil || *row.Timestamp <= s.lastTimestamp {
			continue
		}
		answer := int64(s.Turns[len(s.Turns)-1].OutputTokens)
		if *row.InputLength >= s.lastInput+answer {
			return s
		}
	}
	return nil
}

// link completes the session's last turn, now that the next request is known.
func (s *mooncakeSession) link(row mooncakeRow) {
	turn := &s.Turns[len(s.Turns)-1]
	turn.AppendTokens = int(*row.InputLength - s.lastInput - int64(turn.OutputTokens))
	turn.IntervalSeconds = knownSeconds(float64(*row.Timestamp-s.lastTimestamp) / 1e3)
}

// call appends the request's own turn.
func (s *mooncakeSession) call(row mooncakeRow, number int) {
	s.Turns = append(s.Turns, Turn{
		OutputTokens: int(*row.OutputLength), GapSeconds: UnknownSeconds, IntervalSeconds: UnknownSeconds,
	})
	s.lastTimestamp, s.lastInput, s.line = *row.Timestamp, *row.InputLength, number
}

// sharePrefixes sets each session's shared prefix.
func sharePrefixes(sessions []*mooncakeSession) {
	having := map[uint64]int{}
	for _, s := range sessions {
		for _, key := range s.firstChain {
			having[key]++
		}
	}
	for _, s := range sessions {
		depth := 0
		for depth < len(s.firstChain) && having[s.firstChain[depth]] > 1 {
			depth++
		}
		if depth > 0 {
			s.SharedTokens = min(depth*mooncakeBlockTokens, s.PromptTokens)
			s.SharedKey = fmt.Sprintf("blocks-%012x", s.firstChain[depth-1]>>16)
		}
	}
}
