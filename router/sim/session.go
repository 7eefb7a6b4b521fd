package sim

import (
	"encoding/binary"

	"holdfast/router"
	"holdfast/router/sim/instance"
	"holdfast/router/sim/workload"
)

// sessionState is where a session is in truth.
type sessionState uint8

const (
	// asking: a turn is asked for and not yet admitted.
	asking sessionState = iota + 1
	// running: a turn is at an engine.
	running
	// inGap: the tool works.
	inGap
	ended
)

// session is one rollout.
type session struct {
	id router.SessionID
	// index is the place in world.sessions, number the one in the id.
	index, number int

	class int
	// label is the class that the policy is told.
	label router.ClassID
	group int32
	plan  workload.Session
	chain *instance.Chain

	state sessionState
	turn  int
	// contextTokens is the prompt of the current or next turn.
	contextTokens int
	// home is the instance of the last turn, -1 before the first; homeIndex the
	// place in its list.
	home, homeIndex int
	avoid           router.InstanceID

	releasedAt int64
	askedAt    int64
	admittedAt int64
	finishedAt int64
	// blockTime is Z so far, in token seconds; residencySeconds T.
	tokenSeconds     float64
	residencySeconds float64

	// hashedBlocks full blocks of the context were named to the policy under
	// hashVersion.
	hashedBlocks int
	hashVersion  int64
}

// group is the set of rollouts of one task.
type group struct {
	id         router.GroupID
	releasedAt int64
	left       int
	prompt     int
}

// idOf makes the id with a number in it. A session is found again by its number.
func idOf(number int) (id [16]byte) {
	binary.BigEndian.PutUint64(id[:8], uint64(number)+1)
	return id
}

func numberOf(id [16]byte) int { return int(binary.BigEndian.Uint64(id[:8])) - 1 }

// Chain ids of classes, groups and sessions lie in ranges of their own.
const (
	classChains   uint64 = 1 << 40
	groupChains   uint64 = 2 << 40
	sessionChains uint64 = 3 << 40
)

// blockHash stands for the router's chain hash of one block: the simulator has no
// token ids, but content is named by chain and position just as uniquely.
func blockHash(version int64, chain uint64, block int) router.BlockHash {
	x := chain*0x9e3779b97f4a7c15 ^ uint64(block)*0xd1b54a32d192ed03 ^ uint64(version)<<56
	x ^= x >> 32
	x *= 0xd6e8feb86659fd93
	x ^= x >> 32
	x *= 0xd6e8feb86659fd93
	return router.BlockHash(x ^ x>>32)
}

// owner is the chain under which block number block of a chain is known.
func owner(ch *instance.Chain, block, blockTokens int) uint64 {
	for ch.Parent != nil && block < ch.SharedTokens/blockTokens {
		ch = ch.Parent
	}
	return ch.ID
}

// newBlocks names the full blocks of a session's context that the policy has not
// been told of.
func (w *world) newBlocks(s *session) (known int, blocks []router.BlockHash) {
	if s.hashVersion != w.version {
		s.hashVersion, s.hashedBlocks = w.version, 0
	}
	known = s.hashedBlocks
	w.hashes = w.hashes[:0]
	size := w.cfg.RouterBlockTokens
	for i := known; i < s.contextTokens/size; i++ {
		w.hashes = append(w.hashes, blockHash(w.version, owner(s.chain, i, size), i))
	}
	s.hashedBlocks = known + len(w.hashes)
	return known, w.hashes
}

// stay adds time at the session's instance to its residency, with a context that
// grew evenly between two sizes.
func (s *session) stay(nanos int64, fromTokens, toTokens int) {
	seconds := float64(nanos) / 1e9
	s.residencySeconds += seconds
	s.tokenSeconds += seconds * float64(fromTokens+toTokens) / 2
}
