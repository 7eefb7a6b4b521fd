package client

import (
	"bufio"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"slices"

	"github.com/google/uuid"

	"holdfast/api/wire"
	"holdfast/workflows/task"
)

// NewBatch is a set of tasks to release together.
type NewBatch struct {
	// PolicyVersion is the one the tasks are released at; nil means the pool's.
	PolicyVersion *int64
	// Tasks are encoded one by one while they are sent. The sequence is gone
	// through again for every try and must then give the same tasks. An error in
	// it ends the submission, and nothing is released.
	Tasks iter.Seq2[task.Spec, error]
	// Compress sends the body as gzip.
	Compress bool
}

// Tasks makes a sequence of a slice.
func Tasks(tasks []task.Spec) iter.Seq2[task.Spec, error] {
	return func(yield func(task.Spec, error) bool) {
		for _, spec := range tasks {
			if !yield(spec, nil) {
				return
			}
		}
	}
}

// SubmitBatch releases a batch, all of it or nothing. The key makes it harmless
// to repeat, here and by the caller: the same key and tasks give the same batch.
func (c *Client) SubmitBatch(ctx context.Context, run uuid.UUID, idempotencyKey string, batch NewBatch) (wire.Batch, error) {
	k := call{
		method: http.MethodPost, path: []string{"runs", run.String(), "batches"}, repeatable: true, timeout: c.config.UploadTimeout,
		header: http.Header{"Idempotency-Key": {idempotencyKey}},
		body:   func() (io.ReadCloser, error) { return newUpload(&batch), nil },
	}
	if batch.Compress {
		k.header.Set("Content-Encoding", "gzip")
	}
	return do[wire.Batch](ctx, c, k)
}

// upload is the body of a batch, written as it is read.
type upload struct {
	*io.PipeReader
	written chan struct{}
}

func newUpload(batch *NewBatch) *upload {
	reader, writer := io.Pipe()
	u := &upload{PipeReader: reader, written: make(chan struct{})}
	go func() {
		defer close(u.written)
		writer.CloseWithError(writeBatch(writer, batch))
	}()
	return u
}

// Close ends the writing and waits for it, so that nobody goes through the tasks
// once the call is over.
func (u *upload) Close() error {
	err := u.PipeReader.Close()
	<-u.written
	return err
}

const uploadBufferBytes = 64 << 10

func writeBatch(to io.Writer, batch *NewBatch) error {
	buffered := bufio.NewWriterSize(to, uploadBufferBytes)
	var body io.Writer = buffered
	closers := []func() error{buffered.Flush}
	if batch.Compress {
		zip := gzip.NewWriter(buffered)
		body = zip
		closers = append(closers, zip.Close)
	}
	if err := writeTasks(body, batch); err != nil {
		return err
	}
	for _, finish := range slices.Backward(closers) {
		if err := finish(); err != nil {
			return err
		}
	}
	return nil
}

func writeTasks(w io.Writer, batch *NewBatch) error {
	opening := `{"tasks":[`
	if batch.PolicyVersion != nil {
		opening = fmt.Sprintf(`{"policy_version":%d,"tasks":[`, *batch.PolicyVersion)
	}
	if _, err := io.WriteString(w, opening); err != nil {
		return err
	}
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	separator := ""
	for spec, err := range batch.Tasks {
		if err != nil {
			return &sourceError{fmt.Errorf("reading the tasks: %w", err)}
		}
		if _, err := io.WriteString(w, separator); err != nil {
			return err
		}
		if err := encoder.Encode(&spec); err != nil {
			var unsupported *json.UnsupportedValueError
			if errors.As(err, &unsupported) {
				return &sourceError{fmt.Errorf("encoding task %q: %w", spec.ID, err)}
			}
			return err
		}
		separator = ","
	}
	_, err := io.WriteString(w, "]}")
	return err
}
