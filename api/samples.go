package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/google/uuid"

	"holdfast/api/wire"
	"holdfast/router"
	"holdfast/store"
)

const tagSamples = "samples"

const groupsWhole = "whole"

// Encodings of a sample's tokens in an answer.
const (
	encodingJSON   = "json"
	encodingPacked = "packed"
	encodingNone   = "none"
)

type listSamplesInput struct {
	RunPath
	Consumer string   `query:"consumer" maxLength:"64" doc:"Who reads, such as trainer: its deliveries and acknowledgements are kept. Absent reads without a trace."`
	After    string   `query:"after" maxLength:"256" doc:"A cursor: where the last page ended, or an earlier one such as a checkpoint has. Absent begins at the consumer's acknowledged place."`
	Start    string   `query:"start" enum:"beginning,available,now" doc:"Where to begin without after, for a consumer that is not known yet: beginning (the default), available (the first sample that is not pruned), or now (behind the last one there is). One that is known goes on from its place."`
	Batch    string   `query:"batch" format:"uuid" doc:"Only samples of this batch. Not together with consumer or groups: acknowledging such a page would pass over other samples."`
	Wait     span     `query:"wait" doc:"How long to wait when there is nothing, such as 30s; at most 60s."`
	Limit    int      `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Samples in a page."`
	MaxBytes int64    `query:"max_bytes" minimum:"1" doc:"Bytes of tokens in a page, 9 a token; a page holds at least one sample. At most, and by default, the service's limit of 32 MiB."`
	Encoding string   `query:"encoding" enum:"json,packed,none" default:"json" doc:"json: arrays of numbers, for people. packed: base64 of little-endian arrays, for programs. none: no tokens."`
	Groups   string   `query:"groups" enum:"whole" doc:"whole: only samples of groups whose members have all ended, group by group; a page ends with a group unless its first one does not fit. A consumer keeps to one order. Absent means completion order."`
	Status   []string `query:"status" enum:"completed,truncated,stale,failed,cancelled" doc:"Only these, separated by commas; absent means all."`
}

type ackInput struct {
	RunPath
	Body wire.Ack
}

type removeConsumerInput struct {
	RunPath
	Consumer string `path:"consumer" maxLength:"64" doc:"Name of the reader."`
}

type consumerOutput struct{ Body wire.Consumer }

type consumerListOutput struct{ Body wire.ConsumerList }

func (s *Server) registerSamples() {
	list := operation{
		id: "list-samples", method: http.MethodGet, path: "/runs/{run}/samples", tag: tagSamples,
		summary:     "Read finished samples in completion order or by whole groups, waiting for them if asked to",
		description: "Delivery is at least once: what a consumer has not acknowledged comes again after a restart of either side, with the same ids. What it has acknowledged never does.",
		terms:       terms{roles: anyone, kind: workWait, timeout: s.limits.WaitTimeout + s.limits.RequestTimeout},
		problems:    []int{http.StatusNotFound, http.StatusConflict, http.StatusGone},
	}
	register(s, list, s.listSamples)
	documentSamplePage(s.huma.OpenAPI(), list)
	register(s, operation{
		id: "ack-samples", method: http.MethodPost, path: "/runs/{run}/ack", tag: tagSamples,
		summary:     "Acknowledge everything up to a cursor",
		description: "An older cursor than the last acknowledged changes nothing. A cursor beyond what the consumer was given is refused.",
		terms:       terms{roles: trainers}, problems: append([]int{http.StatusNotFound}, withBody...),
	}, s.ackSamples)
	register(s, operation{
		id: "remove-consumer", method: http.MethodDelete, path: "/runs/{run}/consumers/{consumer}", tag: tagSamples, status: http.StatusNoContent,
		summary:     "Forget a reader that reads no more",
		description: "Nobody waits for its acknowledgements any longer, neither pruning nor undelivered_limit. Under the same name it would begin anew.",
		terms:       terms{roles: caretakers}, problems: []int{http.StatusNotFound},
	}, s.removeConsumer)
	register(s, operation{
		id: "list-consumers", method: http.MethodGet, path: "/runs/{run}/consumers", tag: tagSamples,
		summary: "List the readers of a run's samples with their places", terms: terms{roles: anyone}, problems: []int{http.StatusNotFound},
	}, s.listConsumers)
}

// listSamples answers with a page as soon as there is one. At most Limits.Pages
// pages are in memory at a time, from the database to the socket.
func (s *Server) listSamples(ctx context.Context, in *listSamplesInput) (*huma.StreamResponse, error) {
	query, err := s.sampleQuery(ctx, in)
	if err != nil {
		return nil, err
	}
	timer := time.NewTimer(in.Wait.Duration)
	defer timer.Stop()
	// The first look finds out whether there is such a run at all. From then on the
	// wish to be woken comes before the look, so that nothing falls in between.
	var woken <-chan struct{}
	for {
		if err := s.pages.Acquire(ctx, 1); err != nil {
			return nil, newProblem(http.StatusTooManyRequests, kindOverloaded, "too many pages of samples are being sent; try again after a moment").because(err)
		}
		page, err := s.store.Samples(ctx, query)
		if err == nil && len(page.Samples) > 0 {
			return &huma.StreamResponse{Body: func(out huma.Context) {
				defer s.pages.Release(1)
				s.writePage(out, &page, in.Encoding)
			}}, nil
		}
		s.pages.Release(1)
		if err != nil {
			err = relocated(relocated(noRun(err, in.Run), "consumer", "query.consumer"), "batch", "query.batch")
			return nil, pruned(unknownCursor(err, "query.after"), in.After)
		}
		first := woken == nil && in.Wait.Duration > 0
		if !first && !s.sleep(ctx, page.More, woken, timer.C) {
			return &huma.StreamResponse{Body: func(out huma.Context) { s.writePage(out, &page, in.Encoding) }}, nil
		}
		woken = s.notifications.WaitFor(store.SamplesTopic(in.Run))
		// What was looked at and is not of the statuses asked for need not be looked at again.
		query.After = page.Next
	}
}

// sleep waits for news, or not at all if there is more to look at; false means
// that the time to wait is over.
func (s *Server) sleep(ctx context.Context, more bool, woken <-chan struct{}, timeUp <-chan time.Time) bool {
	if more {
		now := make(chan struct{})
		close(now)
		woken = now
	}
	select {
	case <-s.stopping:
		return false
	case <-timeUp:
		return false
	case <-ctx.Done():
		return false
	case <-woken:
		return true
	}
}

// sampleQuery checks what huma cannot.
func (s *Server) sampleQuery(ctx context.Context, in *listSamplesInput) (store.SampleQuery, error) {
	if in.Wait.Duration > s.limits.WaitTimeout {
		return store.SampleQuery{}, invalid("query.wait", fmt.Sprintf("must be at most %s", s.limits.WaitTimeout))
	}
	if who := stateOf(ctx).caller; in.Consumer != "" && who.role != "" && who.role != RoleTrainer {
		return store.SampleQuery{}, newProblem(http.StatusForbidden, kindForbidden, fmt.Sprintf("role %s may read samples only without naming a consumer, which would note their delivery", who.role))
	}
	query := store.SampleQuery{
		RunID: in.Run, Consumer: in.Consumer, After: store.Cursor(in.After), Limit: in.Limit,
		MaxBytes: s.limits.PageBytes, WithTokens: in.Encoding != encodingNone,
		WholeGroups: in.Groups == groupsWhole, Start: store.Start(in.Start),
	}
	if in.Batch != "" {
		// huma has checked its form.
		batch, err := uuid.Parse(in.Batch)
		if err != nil {
			return store.SampleQuery{}, invalid("query.batch", "is not the id of a batch")
		}
		query.BatchID = &batch
	}
	if in.MaxBytes > 0 && in.MaxBytes < query.MaxBytes {
		query.MaxBytes = in.MaxBytes
	}
	for _, name := range in.Status {
		query.Statuses = append(query.Statuses, statusNamed[name])
	}
	return query, nil
}

// statusNamed reads what router.EndStatus.String writes.
var statusNamed = func() map[string]router.EndStatus {
	named := make(map[string]router.EndStatus)
	for _, status := range []router.EndStatus{router.Completed, router.Truncated, router.Stale, router.Failed, router.Cancelled} {
		named[status.String()] = status
	}
	return named
}()

// writePage sends a page sample by sample, letting go of each one's tokens as it
// leaves. A page that cannot be finished is cut off, so that no one takes it for whole.
func (s *Server) writePage(out huma.Context, page *store.SamplePage, encoding string) {
	out.SetHeader("Content-Type", jsonMediaType)
	out.SetStatus(http.StatusOK)
	buffered := bufio.NewWriterSize(out.BodyWriter(), pageBufferBytes)
	if err := writeSamples(buffered, page, encoding); err != nil {
		state := stateOf(out.Context())
		state.cause = errors.Join(state.cause, fmt.Errorf("sending samples: %w", err))
		panic(http.ErrAbortHandler)
	}
	s.metrics.samples.Add(float64(len(page.Samples)))
}

const pageBufferBytes = 64 << 10

func writeSamples(w *bufio.Writer, page *store.SamplePage, encoding string) error {
	if _, err := w.WriteString(`{"samples":[`); err != nil {
		return err
	}
	for i := range page.Samples {
		if i > 0 {
			if err := w.WriteByte(','); err != nil {
				return err
			}
		}
		sample := wireSample(&page.Samples[i], encoding)
		page.Samples[i].Tokens = nil
		if err := marshal(w, &sample); err != nil {
			return fmt.Errorf("encoding sample %s: %w", sample.ID, err)
		}
	}
	end, err := json.Marshal(struct {
		Next store.Cursor `json:"next"`
		More bool         `json:"more"`
	}{page.Next, page.More})
	if err != nil {
		return fmt.Errorf("encoding the end of a page: %w", err)
	}
	// The end continues the object that the beginning opened.
	end[0] = ','
	if _, err := w.Write(append([]byte{']'}, end...)); err != nil {
		return err
	}
	return w.Flush()
}

func wireSample(sample *store.Sample, encoding string) wire.Sample {
	w := wire.Sample{
		ID: sample.SessionID, Seq: sample.Seq, Cursor: string(sample.Cursor),
		Run: sample.RunID, Batch: sample.BatchID, Task: sample.TaskID, TaskID: sample.ExternalTaskID,
		Member: sample.Member, GroupSize: sample.GroupSize, GroupMembers: sample.GroupMembers, GroupOutcome: string(sample.GroupOutcome), Class: sample.Class, Status: sample.Status.String(),
		FinishReason: sample.FinishReason, Problem: sample.Problem, Reward: sample.Reward, ScoreDetail: sample.ScoreDetail,
		PolicyVersion: sample.PolicyVersion, MinPolicyVersion: sample.MinPolicyVersion, MaxPolicyVersion: sample.MaxPolicyVersion,
		Staleness: sample.Staleness, OverBound: sample.OverBound, Restarts: sample.Restarts,
		Usage: wireUsage(&sample.Usage), Times: wireTimes(&sample.Times), Instances: sample.Instances, Metadata: sample.Metadata,
		ReleasedAt: sample.ReleasedAt.UTC(), FirstAdmittedAt: utc(sample.FirstAdmittedAt), EndedAt: sample.EndedAt.UTC(),
	}
	if sample.Tokens != nil {
		w.Columns = wireColumns(sample.Columns)
		putTokens(&w, sample.Tokens, encoding)
	}
	return w
}

func (s *Server) ackSamples(ctx context.Context, in *ackInput) (*consumerOutput, error) {
	consumer, err := s.store.Ack(ctx, in.Run, in.Body.Consumer, store.Cursor(in.Body.Cursor))
	if err != nil {
		what := fmt.Sprintf("consumer %q of run %s; it begins with the first page of samples that names it", in.Body.Consumer, in.Run)
		return nil, unknownCursor(notFound(err, what), "body.cursor")
	}
	return &consumerOutput{Body: wireConsumer(&consumer)}, nil
}

func (s *Server) listConsumers(ctx context.Context, in *RunPath) (*consumerListOutput, error) {
	if _, err := s.store.Run(ctx, in.Run); err != nil {
		return nil, noRun(err, in.Run)
	}
	consumers, err := s.store.Consumers(ctx, in.Run)
	if err != nil {
		return nil, noRun(err, in.Run)
	}
	list := wire.ConsumerList{Consumers: make([]wire.Consumer, len(consumers))}
	for i := range consumers {
		list.Consumers[i] = wireConsumer(&consumers[i])
	}
	return &consumerListOutput{Body: list}, nil
}

func (s *Server) removeConsumer(ctx context.Context, in *removeConsumerInput) (*struct{}, error) {
	if err := s.store.RemoveConsumer(ctx, in.Run, in.Consumer); err != nil {
		return nil, notFound(err, fmt.Sprintf("consumer %q of run %s", in.Consumer, in.Run))
	}
	return nil, nil
}

func wireConsumer(c *store.Consumer) wire.Consumer {
	groups := ""
	if c.WholeGroups {
		groups = groupsWhole
	}
	return wire.Consumer{
		Run: c.RunID, Consumer: c.Name, Groups: groups, Delivered: string(c.Delivered), DeliveredSeq: c.DeliveredSeq,
		Acknowledged: string(c.Acknowledged), AcknowledgedSeq: c.AcknowledgedSeq, StartSeq: c.StartSeq, UpdatedAt: c.UpdatedAt.UTC(),
	}
}

// unknownCursor says which of a request's fields holds the cursor; other errors pass.
func unknownCursor(err error, location string) error {
	if !errors.Is(err, store.ErrUnknownCursor) {
		return err
	}
	const message = "is not a cursor of this run that this consumer was given"
	p := newProblem(http.StatusUnprocessableEntity, kindUnknownCursor, location+" "+message)
	p.Errors = []wire.ErrorDetail{{Location: location, Message: message}}
	return p.because(err)
}

// pruned says that samples are gone and where what is left begins; other errors pass.
// after is the cursor that was given, if one was.
func pruned(err error, after string) error {
	var gone *store.PrunedError
	if !errors.As(err, &gone) {
		return err
	}
	location := "query.after"
	if after == "" {
		location = "query.start"
	}
	p := newProblem(http.StatusGone, kindPruned, location+": "+gone.Error())
	p.Errors = []wire.ErrorDetail{{Location: location, Message: gone.Error(), Value: string(gone.First)}}
	return p.because(err)
}

// documentSamplePage documents the answer that is written as a stream.
func documentSamplePage(document *huma.OpenAPI, op operation) {
	schema := document.Components.Schemas.Schema(reflect.TypeFor[wire.SamplePage](), true, "SamplePage")
	document.Paths[basePath+op.path].Get.Responses["200"] = &huma.Response{
		Description: http.StatusText(http.StatusOK),
		Content:     map[string]*huma.MediaType{jsonMediaType: {Schema: schema}},
	}
}
