package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"holdfast/api/export"
	"holdfast/store"
)

type exportInput struct {
	RunPath
	Format string   `query:"format" enum:"jsonl,parquet" default:"jsonl" doc:"jsonl: a sample of the samples operation a line, tokens as arrays of numbers. parquet: a row a sample."`
	After  string   `query:"after" maxLength:"256" doc:"A cursor: only samples after it."`
	Start  string   `query:"start" enum:"beginning,available" default:"beginning" doc:"Where to begin without a cursor. If samples are pruned, beginning is refused with 410, since the file would lack them, and available begins with the first that is there."`
	Status []string `query:"status" enum:"completed,truncated,stale,failed,cancelled" doc:"Only these, separated by commas; absent means all."`
}

// exportTimeout bounds a whole export; a connection that stalls ends sooner.
const exportTimeout = 6 * time.Hour

// exportPageBytes bounds what one export holds of the database's answer.
const exportPageBytes = 4 << 20

func (s *Server) registerExport() {
	op := operation{
		id: "export-samples", method: http.MethodGet, path: "/runs/{run}/export", tag: tagSamples,
		summary:     "Write a run's samples to a file",
		description: "In completion order, up to those that have ended by then. No consumer's place moves. An answer that is cut off is not whole.",
		terms:       terms{roles: anyone, kind: workExport, timeout: exportTimeout},
		problems:    []int{http.StatusNotFound, http.StatusGone},
	}
	register(s, op, s.exportSamples)
	file := &huma.Schema{Type: huma.TypeString, Format: "binary"}
	s.huma.OpenAPI().Paths[basePath+op.path].Get.Responses["200"] = &huma.Response{
		Description: http.StatusText(http.StatusOK),
		Content:     map[string]*huma.MediaType{export.JSONL.MediaType(): {Schema: file}, export.Parquet.MediaType(): {Schema: file}},
	}
}

// exportSamples reads the first page before it answers, so that what cannot be
// exported is refused properly.
func (s *Server) exportSamples(ctx context.Context, in *exportInput) (*huma.StreamResponse, error) {
	query := store.SampleQuery{RunID: in.Run, After: store.Cursor(in.After), Start: store.Start(in.Start), Limit: 1_000, MaxBytes: min(exportPageBytes, s.limits.PageBytes), WithTokens: true}
	for _, name := range in.Status {
		query.Statuses = append(query.Statuses, statusNamed[name])
	}
	// Nobody has been answered yet, so that it need not wait as long as an export may take.
	patience, cancel := context.WithTimeout(ctx, s.limits.RequestTimeout)
	defer cancel()
	if err := s.pages.Acquire(patience, 1); err != nil {
		return nil, newProblem(http.StatusTooManyRequests, kindOverloaded, "too many pages of samples are being sent; try again after a moment").because(err)
	}
	page, err := s.store.Samples(ctx, query)
	if err != nil {
		s.pages.Release(1)
		return nil, pruned(unknownCursor(noRun(err, in.Run), "query.after"), in.After)
	}
	return &huma.StreamResponse{Body: func(out huma.Context) {
		format := export.Format(in.Format)
		out.SetHeader("Content-Type", format.MediaType())
		out.SetHeader("Content-Disposition", fmt.Sprintf("attachment; filename=%q", "run-"+in.Run.String()+"."+in.Format))
		out.SetStatus(http.StatusOK)
		if err := s.writeExport(out, format, &query, &page); err != nil {
			state := stateOf(out.Context())
			state.cause = errors.Join(state.cause, fmt.Errorf("exporting samples: %w", err))
			panic(http.ErrAbortHandler)
		}
	}}, nil
}

// writeExport sends page after page. It holds a place among the pages in memory while
// it holds one, and lets go of the one before it waits for the next.
func (s *Server) writeExport(out huma.Context, format export.Format, query *store.SampleQuery, page *store.SamplePage) error {
	held := true
	defer func() {
		if held {
			s.pages.Release(1)
		}
	}()
	writer, err := export.NewWriter(format, out.BodyWriter())
	if err != nil {
		return err
	}
	for {
		for i := range page.Samples {
			sample := wireSample(&page.Samples[i], encodingJSON)
			page.Samples[i] = store.Sample{}
			if err := writer.Write(&sample); err != nil {
				return err
			}
		}
		if !page.More {
			return writer.Close()
		}
		query.After = page.Next
		*page = store.SamplePage{}
		s.pages.Release(1)
		held = false
		if err := s.pages.Acquire(out.Context(), 1); err != nil {
			return err
		}
		held = true
		if *page, err = s.store.Samples(out.Context(), *query); err != nil {
			return err
		}
	}
}
