package api

import (
	"context"
	"errors"
	"net/http"

	"holdfast/api/wire"
	"holdfast/store"
)

type putColumnsInput struct {
	SessionPath
	Body wire.NewColumns
}

// maxColumnsBodyBytes holds the columns that a sample may have, in base64, and their names.
const maxColumnsBodyBytes = store.MaxColumnsBytes/3*4 + 64<<10

func (s *Server) registerColumns() {
	register(s, operation{
		id: "put-columns", method: http.MethodPost, path: "/sessions/{session}/columns", tag: "sessions", status: http.StatusNoContent,
		summary:     "Add further arrays to the sample that a session is to become",
		description: "Such as the experts that each token was routed to. They are delivered with the sample, checked, and pruned with its tokens. One of the same name is replaced; once the session has ended nothing changes any more.",
		terms:       terms{roles: trainers, kind: workUpload}, bodyBytes: maxColumnsBodyBytes,
		problems: append([]int{http.StatusNotFound, http.StatusConflict}, withBody...),
	}, s.putColumns)
}

func (s *Server) putColumns(ctx context.Context, in *putColumnsInput) (*struct{}, error) {
	columns := make([]store.Column, len(in.Body.Columns))
	for i, c := range in.Body.Columns {
		columns[i] = store.Column(c)
	}
	if len(columns) == 0 {
		return nil, invalid("body.columns", "must hold at least one column")
	}
	err := s.store.PutColumns(ctx, in.Session, columns)
	if errors.Is(err, store.ErrSessionEnded) {
		return nil, newProblem(http.StatusConflict, kindConflict, "the session is not under way: columns are added before it ends").because(err)
	}
	if err != nil {
		return nil, noSession(err, in.Session)
	}
	return nil, nil
}

func wireColumns(columns []store.Column) []wire.Column {
	if len(columns) == 0 {
		return nil
	}
	w := make([]wire.Column, len(columns))
	for i, c := range columns {
		w[i] = wire.Column(c)
	}
	return w
}
