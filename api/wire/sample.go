package wire

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"
)

// Segment is a stretch of a sample's tokens.
type Segment struct {
	Kind          string `json:"kind" enum:"prompt,appended,generated,kept" doc:"kept: the beginning that a sequence shares with the one before it."`
	Turn          int    `json:"turn"`
	Start         int    `json:"start" doc:"Index of its first token in the sample, or in the sequence."`
	Count         int    `json:"count"`
	PolicyVersion int64  `json:"policy_version" doc:"Weights that generated the tokens; for other kinds those of the turn that read them."`
}

// Tokens are a sample's tokens as JSON numbers, for people. The arrays are of
// equal length; logprobs is 0 where the mask is 0, and absent if none were asked for.
type Tokens struct {
	TokenIDs []int32 `json:"token_ids" nullable:"false"`
	// LossMask is not []uint8, which JSON libraries write as base64.
	LossMask []int8    `json:"loss_mask" nullable:"false" doc:"1 where the policy generated the token, else 0."`
	Logprobs []float32 `json:"logprobs,omitzero" nullable:"false" doc:"Of generated tokens; 0 where loss_mask is 0."`
}

// PackedTokens are a sample's tokens for programs: base64 of little-endian
// arrays of count elements each.
type PackedTokens struct {
	Count    int    `json:"count" doc:"Tokens in each array."`
	TokenIDs []byte `json:"token_ids" doc:"Base64 of int32, little-endian."`
	LossMask []byte `json:"loss_mask" doc:"Base64 of uint8."`
	Logprobs []byte `json:"logprobs,omitzero" doc:"Base64 of float32, little-endian."`
}

// Sequence is one of the contexts of a session whose harness rewrote its history: a
// trainable sequence of its own. A token has a loss mask of 1 in the one sequence in
// whose context the policy sampled it; what was kept or sent again has 0. Tokens or
// Packed is set, by the encoding asked for.
type Sequence struct {
	KeptTokens int           `json:"kept_tokens" doc:"How many of its first tokens are those of the sequence before it; 0 for the first."`
	Segments   []Segment     `json:"segments" nullable:"false"`
	Tokens     *Tokens       `json:"tokens,omitzero"`
	Packed     *PackedTokens `json:"packed,omitzero"`
}

// Sample is the finished product of one session. A session of every status has
// one. Tokens or Packed is set, by the encoding asked for.
type Sample struct {
	ID               uuid.UUID       `json:"id" format:"uuid" doc:"Stable id of the sample, which is its session's: count by it, since delivery is at least once."`
	Seq              int64           `json:"seq" doc:"Place in the run's completion order, from 1 without gaps."`
	Cursor           string          `json:"cursor" doc:"Its place in the order that was asked for, to be given as after or to be acknowledged."`
	Run              uuid.UUID       `json:"run" format:"uuid"`
	Batch            uuid.UUID       `json:"batch" format:"uuid"`
	Task             uuid.UUID       `json:"task" format:"uuid" doc:"Common to the members of a group."`
	TaskID           string          `json:"task_id" doc:"The trainer's own name for the task."`
	Member           int             `json:"member" doc:"Place in the group, from 0."`
	GroupSize        int             `json:"group_size" doc:"Members that the task asked for."`
	GroupMembers     int             `json:"group_members" doc:"Members released for the group so far, spare and refilled ones included: as many samples come of it."`
	GroupOutcome     string          `json:"group_outcome,omitzero" enum:"complete,partial,ended" doc:"complete: group_size members are usable. partial: all have ended and fewer are usable. ended: an unusable member ended the group. Absent while it is not known."`
	Class            string          `json:"class"`
	Status           string          `json:"status" enum:"completed,truncated,stale,failed,cancelled" doc:"Only completed and truncated ones are for training."`
	FinishReason     string          `json:"finish_reason,omitzero"`
	Problem          string          `json:"problem,omitzero" doc:"What went wrong in one that is not usable."`
	Reward           *float64        `json:"reward,omitzero" doc:"Absent without a scorer; a failure is never a reward of 0."`
	ScoreDetail      json.RawMessage `json:"score_detail,omitzero"`
	PolicyVersion    int64           `json:"policy_version" doc:"Of the release."`
	MinPolicyVersion int64           `json:"min_policy_version" doc:"Lowest of its turns."`
	MaxPolicyVersion int64           `json:"max_policy_version" doc:"Highest of its turns."`
	Staleness        int64           `json:"staleness" doc:"How many policy versions the pool was ahead of min_policy_version when the session ended; 0 without turns."`
	OverBound        bool            `json:"over_bound,omitzero" doc:"It is completed or truncated, and staleness is beyond the contract's bound."`
	Restarts         int             `json:"restarts,omitzero" doc:"How often the session was begun again because new weights had made it too old; what it had generated before is not in the sample."`
	Usage            Usage           `json:"usage"`
	Times            Times           `json:"times"`
	Instances        []string        `json:"instances" nullable:"false" doc:"Instances it visited."`
	Metadata         json.RawMessage `json:"metadata,omitzero" doc:"As it came with the task."`
	ReleasedAt       time.Time       `json:"released_at"`
	FirstAdmittedAt  *time.Time      `json:"first_admitted_at,omitzero"`
	EndedAt          time.Time       `json:"ended_at"`
	Segments         []Segment       `json:"segments,omitzero" nullable:"false"`
	Columns          []Column        `json:"columns,omitzero" nullable:"false" doc:"Further arrays that were given with the sample, unless encoding=none."`
	Tokens           *Tokens         `json:"tokens,omitzero" doc:"With encoding=json."`
	Packed           *PackedTokens   `json:"packed,omitzero" doc:"With encoding=packed."`
	Sequences        []Sequence      `json:"sequences,omitzero" nullable:"false" doc:"Of a session whose harness rewrote its history (usage.rewrites), oldest first, two or more: then segments, tokens and packed stand in them and not in the sample."`
}

// SamplePage is a piece of a run's samples in completion order or by whole groups.
type SamplePage struct {
	Samples []Sample `json:"samples" nullable:"false"`
	Next    string   `json:"next" doc:"Continues after this page, also when it is empty."`
	More    bool     `json:"more" doc:"A further page is ready now."`
}

// Ack tells that a consumer has everything up to a cursor.
type Ack struct {
	Consumer string `json:"consumer" minLength:"1" maxLength:"64"`
	Cursor   string `json:"cursor" minLength:"1" maxLength:"256"`
}

// Consumer is a reader's place in a run's samples.
type Consumer struct {
	Run             uuid.UUID `json:"run" format:"uuid"`
	Consumer        string    `json:"consumer"`
	Delivered       string    `json:"delivered"`
	DeliveredSeq    int64     `json:"delivered_seq"`
	Acknowledged    string    `json:"acknowledged"`
	AcknowledgedSeq int64     `json:"acknowledged_seq"`
	StartSeq        int64     `json:"start_seq,omitzero" doc:"Where it began, if not at the beginning: what is before was never given to it."`
	Groups          string    `json:"groups,omitzero" enum:"whole" doc:"whole: it reads whole groups, and its places count samples in that order; absent for completion order."`
	UpdatedAt       time.Time `json:"updated_at"`
}

// ConsumerList lists the readers of a run.
type ConsumerList struct {
	Consumers []Consumer `json:"consumers" nullable:"false"`
}

// Pack encodes tokens in the packed form. logprobs may be nil.
func Pack(tokenIDs []int32, lossMask []uint8, logprobs []float32) *PackedTokens {
	return &PackedTokens{Count: len(tokenIDs), LossMask: lossMask, TokenIDs: PackIDs(tokenIDs), Logprobs: PackFloats(logprobs)}
}

// PackIDs encodes token ids as little-endian int32.
func PackIDs(ids []int32) []byte {
	packed := make([]byte, 4*len(ids))
	for i, id := range ids {
		binary.LittleEndian.PutUint32(packed[4*i:], uint32(id))
	}
	return packed
}

// UnpackIDs is the inverse of PackIDs; bytes after the last whole id are not read.
func UnpackIDs(packed []byte) []int32 {
	ids := make([]int32, len(packed)/4)
	for i := range ids {
		ids[i] = int32(binary.LittleEndian.Uint32(packed[4*i:]))
	}
	return ids
}

// PackFloats encodes values as little-endian float32; nil stays nil.
func PackFloats(values []float32) []byte {
	if values == nil {
		return nil
	}
	packed := make([]byte, 4*len(values))
	for i, value := range values {
		binary.LittleEndian.PutUint32(packed[4*i:], math.Float32bits(value))
	}
	return packed
}

// UnpackFloats is the inverse of PackFloats.
func UnpackFloats(packed []byte) []float32 {
	if packed == nil {
		return nil
	}
	values := make([]float32, len(packed)/4)
	for i := range values {
		values[i] = math.Float32frombits(binary.LittleEndian.Uint32(packed[4*i:]))
	}
	return values
}

// Unpack decodes the packed form; logprobs is nil if there are none. Arrays that
// are not of Count elements are an error.
func (p *PackedTokens) Unpack() (tokenIDs []int32, lossMask []uint8, logprobs []float32, err error) {
	if len(p.TokenIDs) != 4*p.Count || len(p.LossMask) != p.Count {
		return nil, nil, nil, fmt.Errorf("unpacking tokens: %d tokens need %d and %d bytes, found %d and %d", p.Count, 4*p.Count, p.Count, len(p.TokenIDs), len(p.LossMask))
	}
	if p.Logprobs != nil && len(p.Logprobs) != 4*p.Count {
		return nil, nil, nil, errors.New("unpacking tokens: log-probabilities are not as many as tokens")
	}
	return UnpackIDs(p.TokenIDs), p.LossMask, UnpackFloats(p.Logprobs), nil
}

// Arrays returns the sample's tokens whatever their encoding; all nil if the
// sample came without. A sample of several sequences has no one array: that is an
// error, so that none of them is lost unseen; see AllSequences.
func (s *Sample) Arrays() (tokenIDs []int32, lossMask []uint8, logprobs []float32, err error) {
	if len(s.Sequences) > 0 {
		return nil, nil, nil, fmt.Errorf("sample %s has %d sequences, since its harness rewrote its history: read each of them", s.ID, len(s.Sequences))
	}
	return arrays(s.Tokens, s.Packed)
}

// AllSequences returns the sample's sequences: one, unless the harness rewrote its history.
func (s *Sample) AllSequences() []Sequence {
	if len(s.Sequences) > 0 {
		return s.Sequences
	}
	return []Sequence{{Segments: s.Segments, Tokens: s.Tokens, Packed: s.Packed}}
}

// Arrays returns the sequence's tokens whatever their encoding.
func (s *Sequence) Arrays() (tokenIDs []int32, lossMask []uint8, logprobs []float32, err error) {
	return arrays(s.Tokens, s.Packed)
}

func arrays(tokens *Tokens, packed *PackedTokens) (tokenIDs []int32, lossMask []uint8, logprobs []float32, err error) {
	switch {
	case packed != nil:
		return packed.Unpack()
	case tokens != nil:
		lossMask = make([]uint8, len(tokens.LossMask))
		for i, bit := range tokens.LossMask {
			lossMask[i] = uint8(bit)
		}
		return tokens.TokenIDs, lossMask, tokens.Logprobs, nil
	}
	return nil, nil, nil, nil
}
