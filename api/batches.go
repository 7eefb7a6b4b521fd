package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humaecho"
	"github.com/google/uuid"

	"holdfast/api/wire"
	"holdfast/store"
	"holdfast/workflows/task"
)

const tagBatches = "batches"

// submitBatchInput has no Body: huma would read all of it into memory.
type submitBatchInput struct {
	RunPath
	IdempotencyKey  string `header:"Idempotency-Key" required:"true" minLength:"1" maxLength:"256" doc:"Names the submission. Repeating it with the same body returns the same batch; with another body it is refused with 409."`
	ContentEncoding string `header:"Content-Encoding" doc:"gzip, zstd or identity."`
	ContentType     string `header:"Content-Type" hidden:"true"`
	body            *movingReader
}

// Resolve keeps the way to the body.
func (in *submitBatchInput) Resolve(ctx huma.Context) []error {
	c := humaecho.Unwrap(ctx)
	in.body = &movingReader{from: c.Request().Body, controller: http.NewResponseController(c.Response())}
	return nil
}

type batchOutput struct {
	Status int
	Body   wire.Batch
}

type getBatchInput struct {
	RunPath
	Batch uuid.UUID `path:"batch" format:"uuid" doc:"Id of the batch."`
}

type getBatchOutput struct{ Body wire.Batch }

func (s *Server) registerBatches() {
	submit := operation{
		id: "submit-batch", method: http.MethodPost, path: "/runs/{run}/batches", tag: tagBatches, status: http.StatusCreated,
		summary: "Release a batch of tasks: all of it or nothing",
		description: fmt.Sprintf("At most %d tasks and %d MiB, as sent and decompressed. Answers 201 for a new batch and 200 for one that the key released before. Problems name the place (body.tasks[3].class) and, for what is not JSON, the byte.",
			store.MaxBatchTasks, s.limits.BatchBytes>>20),
		terms:    terms{roles: trainers, kind: workUpload, timeout: s.limits.UploadTimeout},
		problems: append([]int{http.StatusNotFound, http.StatusConflict}, withBody...),
	}
	register(s, submit, s.submitBatch)
	// Set only now, or huma would read and check the body itself.
	documented := s.huma.OpenAPI().Paths[basePath+submit.path].Post
	documented.RequestBody = batchRequestBody(s.huma.OpenAPI().Components.Schemas)
	documented.Responses["200"] = &huma.Response{
		Description: "The key had been used with this very body: the batch of then, marked replayed.",
		Content:     documented.Responses["201"].Content,
	}
	register(s, operation{
		id: "get-batch", method: http.MethodGet, path: "/runs/{run}/batches/{batch}", tag: tagBatches,
		summary: "Read a batch", terms: terms{roles: anyone}, problems: []int{http.StatusNotFound},
	}, s.getBatch)
}

func (s *Server) submitBatch(ctx context.Context, in *submitBatchInput) (*batchOutput, error) {
	if in.ContentType != "" {
		if media, _, err := mime.ParseMediaType(in.ContentType); err != nil || media != jsonMediaType {
			return nil, newProblem(http.StatusUnsupportedMediaType, kindUnsupportedMedia, fmt.Sprintf("a batch is application/json, not %q", shorten(in.ContentType)))
		}
	}
	in.body.stall = s.limits.StallTimeout
	body, err := newBatchBody(in.body, in.ContentEncoding, &s.limits)
	if err != nil {
		return nil, err
	}
	defer body.close()
	if err := body.open(); err != nil {
		return nil, err
	}
	batch, replayed, err := s.store.SubmitBatch(ctx, store.BatchSubmission{
		RunID: in.Run, IdempotencyKey: in.IdempotencyKey, PolicyVersion: body.policyVersion,
		Next: func() (*task.Spec, error) {
			spec, err := body.next()
			if errors.Is(err, io.EOF) {
				if err := in.body.rest(); err != nil {
					return nil, err
				}
			}
			if err == nil && s.allowed != nil {
				if refused := s.allowed(spec, fmt.Sprintf("tasks[%d]", body.tasks-1)); refused != nil {
					return nil, refused
				}
			}
			return spec, err
		},
		BodyHash: body.hash,
	})
	if err != nil {
		return nil, relocated(noRun(err, in.Run), "idempotency_key", "header.Idempotency-Key")
	}
	status := http.StatusOK
	if !replayed {
		status = http.StatusCreated
		s.metrics.tasks.Add(float64(batch.Tasks))
	}
	answer := wireBatch(&batch)
	answer.Replayed = replayed
	return &batchOutput{Status: status, Body: answer}, nil
}

func (s *Server) getBatch(ctx context.Context, in *getBatchInput) (*getBatchOutput, error) {
	batch, err := s.store.Batch(ctx, in.Batch)
	if err == nil && batch.RunID != in.Run {
		err = store.ErrNotFound
	}
	if err != nil {
		return nil, notFound(err, fmt.Sprintf("batch %s in run %s", in.Batch, in.Run))
	}
	return &getBatchOutput{Body: wireBatch(&batch)}, nil
}

func wireBatch(batch *store.Batch) wire.Batch {
	return wire.Batch{
		ID: batch.ID, Run: batch.RunID, Seq: batch.Seq, IdempotencyKey: batch.IdempotencyKey, PolicyVersion: batch.PolicyVersion,
		Tasks: batch.Tasks, Sessions: batch.Sessions, SessionsByClass: batch.SessionsByClass, CreatedAt: batch.CreatedAt.UTC(),
	}
}
