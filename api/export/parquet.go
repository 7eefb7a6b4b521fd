package export

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/parquet-go/parquet-go"

	"holdfast/api/wire"
)

// Row is a sample as a row of a Parquet file. Names are those of the samples API;
// score_detail and metadata are JSON texts. Of a sample whose harness rewrote its
// history token_ids to segments are the last sequence's, and earlier holds the others.
type Row struct {
	ID               string     `parquet:"id"`
	Seq              int64      `parquet:"seq"`
	Run              string     `parquet:"run,dict"`
	Batch            string     `parquet:"batch,dict"`
	Task             string     `parquet:"task"`
	TaskID           string     `parquet:"task_id"`
	Member           int32      `parquet:"member"`
	GroupSize        int32      `parquet:"group_size"`
	GroupMembers     int32      `parquet:"group_members"`
	GroupOutcome     string     `parquet:"group_outcome,dict"`
	Class            string     `parquet:"class,dict"`
	Status           string     `parquet:"status,dict"`
	FinishReason     string     `parquet:"finish_reason,dict"`
	Problem          string     `parquet:"problem"`
	Reward           *float64   `parquet:"reward,optional"`
	ScoreDetail      *string    `parquet:"score_detail,optional"`
	PolicyVersion    int64      `parquet:"policy_version"`
	MinPolicyVersion int64      `parquet:"min_policy_version"`
	MaxPolicyVersion int64      `parquet:"max_policy_version"`
	Staleness        int64      `parquet:"staleness"`
	OverBound        bool       `parquet:"over_bound"`
	Restarts         int32      `parquet:"restarts"`
	Usage            Usage      `parquet:"usage"`
	Times            Times      `parquet:"times"`
	Instances        []string   `parquet:"instances,list"`
	Metadata         *string    `parquet:"metadata,optional"`
	ReleasedAt       time.Time  `parquet:"released_at,timestamp(microsecond)"`
	FirstAdmittedAt  *time.Time `parquet:"first_admitted_at,optional,timestamp(microsecond)"`
	EndedAt          time.Time  `parquet:"ended_at,timestamp(microsecond)"`
	Sequence
	Earlier []Sequence `parquet:"earlier,list"`
	Columns []Column   `parquet:"columns,list"`
}

// Column is a further array: little-endian, in row-major order.
type Column struct {
	Name  string  `parquet:"name,dict"`
	DType string  `parquet:"dtype,dict"`
	Shape []int64 `parquet:"shape,list"`
	Data  []byte  `parquet:"data"`
}

// Sequence are the tokens of one stretch of history. Arrays are of equal length, but
// Logprobs, which is empty where none were asked for.
type Sequence struct {
	TokenIDs   []int32   `parquet:"token_ids,list"`
	LossMask   []int32   `parquet:"loss_mask,list"`
	Logprobs   []float32 `parquet:"logprobs,list"`
	Segments   []Segment `parquet:"segments,list"`
	KeptTokens int64     `parquet:"kept_tokens"`
}

// Segment is a stretch of a sequence, with the policy version that generated it.
type Segment struct {
	Kind          string `parquet:"kind,dict"`
	Turn          int32  `parquet:"turn"`
	Start         int64  `parquet:"start"`
	Count         int64  `parquet:"count"`
	PolicyVersion int64  `parquet:"policy_version"`
}

// Usage is the sample's usage.
type Usage struct {
	Turns             int32   `parquet:"turns"`
	PromptTokens      int64   `parquet:"prompt_tokens"`
	CachedTokens      int64   `parquet:"cached_tokens"`
	OutputTokens      int64   `parquet:"output_tokens"`
	ContextTokens     int64   `parquet:"context_tokens"`
	TokenSeconds      float64 `parquet:"token_seconds"`
	Rewrites          int32   `parquet:"rewrites"`
	EarlierTokens     int64   `parquet:"earlier_tokens"`
	Resumes           int32   `parquet:"resumes"`
	TokensRegenerated int64   `parquet:"tokens_regenerated"`
}

// Times says where the sample's time went.
type Times struct {
	HeldSeconds      float64 `parquet:"held_seconds"`
	ResidencySeconds float64 `parquet:"residency_seconds"`
	QueueSeconds     float64 `parquet:"queue_seconds"`
	PrefillSeconds   float64 `parquet:"prefill_seconds"`
	DecodeSeconds    float64 `parquet:"decode_seconds"`
	ToolSeconds      float64 `parquet:"tool_seconds"`
	ScoreSeconds     float64 `parquet:"score_seconds"`
}

// A row group is held in memory until it is written.
const (
	groupBytes = 24 << 20
	groupRows  = 4_096
	// tokenBytes are an id, a mask and a log-probability.
	tokenBytes = 4 + 4 + 4
	// segmentBytes are four numbers and the index of a kind; fieldsBytes the row's
	// numbers, times and ids.
	segmentBytes = 3*8 + 4 + 4
	fieldsBytes  = 600
)

// table writes Parquet.
type table struct {
	out *parquet.GenericWriter[Row]
	// bytes and rows of the row group.
	bytes, rows int
}

func newTable(w io.Writer) *table {
	return &table{out: parquet.NewGenericWriter[Row](w, parquet.Compression(&parquet.Zstd))}
}

func (t *table) Write(sample *wire.Sample) error {
	row, err := RowOf(sample)
	if err != nil {
		return err
	}
	if _, err := t.out.Write([]Row{row}); err != nil {
		return fmt.Errorf("writing sample %s: %w", sample.ID, err)
	}
	t.rows++
	t.bytes += row.sizeBytes()
	if t.rows < groupRows && t.bytes < groupBytes {
		return nil
	}
	t.rows, t.bytes = 0, 0
	if err := t.out.Flush(); err != nil {
		return fmt.Errorf("writing a row group: %w", err)
	}
	return nil
}

// sizeBytes is about what the row takes in memory: tokens, columns and every text
// whose length somebody else decides.
func (r *Row) sizeBytes() int {
	n := fieldsBytes + r.Sequence.sizeBytes() + len(r.TaskID) + len(r.Problem) + len(r.FinishReason)
	for _, text := range []*string{r.ScoreDetail, r.Metadata} {
		if text != nil {
			n += len(*text)
		}
	}
	for _, instance := range r.Instances {
		n += len(instance)
	}
	for i := range r.Earlier {
		n += r.Earlier[i].sizeBytes()
	}
	for i := range r.Columns {
		n += len(r.Columns[i].Name) + 8*len(r.Columns[i].Shape) + len(r.Columns[i].Data)
	}
	return n
}

func (s *Sequence) sizeBytes() int { return tokenBytes*len(s.TokenIDs) + segmentBytes*len(s.Segments) }

func (t *table) Close() error {
	if err := t.out.Close(); err != nil {
		return fmt.Errorf("writing the end of a Parquet file: %w", err)
	}
	return nil
}

// RowOf turns a sample of either encoding into a row.
func RowOf(s *wire.Sample) (Row, error) {
	row := Row{
		ID: s.ID.String(), Seq: s.Seq, Run: s.Run.String(), Batch: s.Batch.String(), Task: s.Task.String(), TaskID: s.TaskID,
		Member: int32(s.Member), GroupSize: int32(s.GroupSize), GroupMembers: int32(s.GroupMembers), GroupOutcome: s.GroupOutcome,
		Class: s.Class, Status: s.Status, FinishReason: s.FinishReason, Problem: s.Problem,
		Reward: s.Reward, ScoreDetail: document(s.ScoreDetail), PolicyVersion: s.PolicyVersion,
		MinPolicyVersion: s.MinPolicyVersion, MaxPolicyVersion: s.MaxPolicyVersion, Staleness: s.Staleness, OverBound: s.OverBound, Restarts: int32(s.Restarts),
		Usage: Usage{
			Turns: int32(s.Usage.Turns), PromptTokens: s.Usage.PromptTokens, CachedTokens: s.Usage.CachedTokens, OutputTokens: s.Usage.OutputTokens,
			ContextTokens: s.Usage.ContextTokens, TokenSeconds: s.Usage.TokenSeconds, Rewrites: int32(s.Usage.Rewrites),
			EarlierTokens: s.Usage.EarlierTokens, Resumes: int32(s.Usage.Resumes), TokensRegenerated: s.Usage.TokensRegenerated,
		},
		Times: Times(s.Times), Instances: s.Instances, Metadata: document(s.Metadata),
		ReleasedAt: s.ReleasedAt, FirstAdmittedAt: s.FirstAdmittedAt, EndedAt: s.EndedAt,
	}
	for _, c := range s.Columns {
		row.Columns = append(row.Columns, Column(c))
	}
	sequences := s.AllSequences()
	for i := range sequences {
		sequence, err := sequenceOf(&sequences[i])
		if err != nil {
			return Row{}, fmt.Errorf("reading sample %s: %w", s.ID, err)
		}
		if i == len(sequences)-1 {
			row.Sequence = sequence
		} else {
			row.Earlier = append(row.Earlier, sequence)
		}
	}
	return row, nil
}

func sequenceOf(s *wire.Sequence) (Sequence, error) {
	ids, mask, logprobs, err := s.Arrays()
	if err != nil {
		return Sequence{}, err
	}
	sequence := Sequence{TokenIDs: ids, Logprobs: logprobs, LossMask: make([]int32, len(mask)), Segments: make([]Segment, len(s.Segments)), KeptTokens: int64(s.KeptTokens)}
	for i, bit := range mask {
		sequence.LossMask[i] = int32(bit)
	}
	for i, part := range s.Segments {
		sequence.Segments[i] = Segment{Kind: part.Kind, Turn: int32(part.Turn), Start: int64(part.Start), Count: int64(part.Count), PolicyVersion: part.PolicyVersion}
	}
	return sequence, nil
}

func document(raw json.RawMessage) *string {
	if raw == nil {
		return nil
	}
	s := string(raw)
	return &s
}
