// Package export writes samples to files for what happens outside of training: JSONL,
// one document of the samples API a line, and Parquet, one row a sample.
//
// It reads nothing by itself and holds no more than a row group: samples come one by
// one. It is no way to consume: nothing is delivered or acknowledged by an export.
package export

import (
	"bufio"
	"fmt"
	"io"

	strictjson "github.com/go-json-experiment/json"

	"holdfast/api/wire"
)

// Format is the closed set of file formats.
type Format string

// Formats.
const (
	JSONL   Format = "jsonl"
	Parquet Format = "parquet"
)

// MediaType is what HTTP calls the format.
func (f Format) MediaType() string {
	if f == Parquet {
		return "application/vnd.apache.parquet"
	}
	return "application/jsonl"
}

// Writer takes samples in their order. Without a successful Close the file is not whole.
type Writer interface {
	Write(sample *wire.Sample) error
	Close() error
}

// NewWriter writes to w in the format.
func NewWriter(format Format, w io.Writer) (Writer, error) {
	switch format {
	case JSONL:
		return &lines{out: bufio.NewWriterSize(w, lineBufferBytes)}, nil
	case Parquet:
		return newTable(w), nil
	}
	return nil, fmt.Errorf("format %q is neither jsonl nor parquet", string(format))
}

const lineBufferBytes = 64 << 10

// lines writes JSONL.
type lines struct{ out *bufio.Writer }

func (l *lines) Write(sample *wire.Sample) error {
	if err := strictjson.MarshalWrite(l.out, sample, strictjson.Deterministic(true)); err != nil {
		return fmt.Errorf("writing sample %s: %w", sample.ID, err)
	}
	return l.out.WriteByte('\n')
}

func (l *lines) Close() error { return l.out.Flush() }
