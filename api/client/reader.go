package client

import (
	"context"
	"errors"
	"iter"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"holdfast/api/wire"
)

// SamplesQuery asks for a page of samples.
type SamplesQuery struct {
	// Consumer names who reads; empty reads without a trace.
	Consumer string
	// After is a cursor, also an earlier one than the last, such as a checkpoint has;
	// empty begins at the consumer's acknowledged place.
	After string
	// Start says where a consumer begins that is not known yet, without After:
	// beginning (also empty), available or now.
	Start string
	// Batch narrows to one batch; it stands with neither Consumer nor WholeGroups.
	Batch uuid.UUID
	// Wait is how long the service waits when there is nothing, up to 60 s.
	Wait time.Duration
	// Limit and MaxBytes bound the page; 0 means the service's bounds.
	Limit    int
	MaxBytes int64
	// Encoding of the tokens: packed, json or none; empty means packed.
	Encoding string
	// Statuses to read; none means all.
	Statuses []string
	// WholeGroups reads group by group instead of in completion order; a consumer
	// keeps to one of the two.
	WholeGroups bool
}

// Samples reads a page of a run's samples.
func (c *Client) Samples(ctx context.Context, run uuid.UUID, query SamplesQuery) (wire.SamplePage, error) {
	if query.Encoding == "" {
		query.Encoding = "packed"
	}
	k := c.get("runs", run.String(), "samples")
	k.timeout = c.config.CallTimeout + query.Wait
	k.query = values("consumer", query.Consumer, "after", query.After, "limit", number(query.Limit),
		"encoding", query.Encoding, "status", strings.Join(query.Statuses, ","))
	if query.WholeGroups {
		k.query.Set("groups", "whole")
	}
	if query.Start != "" {
		k.query.Set("start", query.Start)
	}
	if query.Batch != uuid.Nil {
		k.query.Set("batch", query.Batch.String())
	}
	if query.Wait > 0 {
		k.query.Set("wait", query.Wait.String())
	}
	if query.MaxBytes > 0 {
		k.query.Set("max_bytes", strconv.FormatInt(query.MaxBytes, 10))
	}
	return do[wire.SamplePage](ctx, c, k)
}

// Ack records that a consumer has everything up to a cursor.
func (c *Client) Ack(ctx context.Context, run uuid.UUID, consumer, cursor string) (wire.Consumer, error) {
	return do[wire.Consumer](ctx, c, call{
		method: http.MethodPost, path: []string{"runs", run.String(), "ack"}, body: jsonBody(wire.Ack{Consumer: consumer, Cursor: cursor}), repeatable: true,
	})
}

// Consumers lists the readers of a run's samples.
func (c *Client) Consumers(ctx context.Context, run uuid.UUID) (wire.ConsumerList, error) {
	return do[wire.ConsumerList](ctx, c, c.get("runs", run.String(), "consumers"))
}

// Reader goes through a run's samples in completion order. It begins at the
// consumer's acknowledged place, unless query.After says otherwise. One goroutine
// uses it at a time.
type Reader struct {
	client *Client
	run    uuid.UUID
	query  SamplesQuery
	page   []wire.Sample
	// given is the cursor of the last sample that Next gave out, acked the last
	// one acknowledged.
	given, acked string
}

// defaultReaderWait is how long a Reader's requests wait for samples.
const defaultReaderWait = 30 * time.Second

// Read starts a Reader. A zero query.Wait means 30 s for each request; Next waits
// for as long as it takes.
func (c *Client) Read(run uuid.UUID, query SamplesQuery) *Reader {
	if query.Wait == 0 {
		query.Wait = defaultReaderWait
	}
	return &Reader{client: c, run: run, query: query}
}

// Next returns the next sample and waits for it until ctx ends. After an error
// Next may be called again and skips nothing.
func (r *Reader) Next(ctx context.Context) (*wire.Sample, error) {
	for len(r.page) == 0 {
		page, err := r.client.Samples(ctx, r.run, r.query)
		if err != nil {
			return nil, err
		}
		r.page, r.query.After = page.Samples, page.Next
	}
	sample := &r.page[0]
	r.page = r.page[1:]
	r.given = sample.Cursor
	return sample, nil
}

// All goes through the samples until ctx ends, the loop is left, or a call fails
// beyond its repetitions; the error is the last thing it gives.
func (r *Reader) All(ctx context.Context) iter.Seq2[*wire.Sample, error] {
	return func(yield func(*wire.Sample, error) bool) {
		for {
			sample, err := r.Next(ctx)
			if !yield(sample, err) || err != nil {
				return
			}
		}
	}
}

// Ack acknowledges every sample that Next has given out. What was not
// acknowledged comes again to the consumer's next Reader.
func (r *Reader) Ack(ctx context.Context) error {
	if r.query.Consumer == "" {
		return errors.New("acknowledging samples: the reader names no consumer")
	}
	if r.given == "" || r.given == r.acked {
		return nil
	}
	if _, err := r.client.Ack(ctx, r.run, r.query.Consumer, r.given); err != nil {
		return err
	}
	r.acked = r.given
	return nil
}
